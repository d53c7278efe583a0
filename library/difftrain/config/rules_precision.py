"""Rules about precision and memory: half weights, updates during the backward pass, offloading."""

from __future__ import annotations

from collections.abc import Iterator

from difftrain.config import names
from difftrain.config.finding import Finding, Rule
from difftrain.config.rates import is_named, is_schedule_free
from difftrain.config.sections import TrainConfig

_EPS, _D0 = "eps", "d0"
# they divide by the root of squared gradients, and keep both in the weights' own precision
_DIVIDING = (
    "AdamW", "oss", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "AdamWScheduleFree", "RAdamScheduleFree",
)  # fmt: skip


def full_precision(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Half weights compute in their own precision, as kohya asserts."""
    training = cfg.training
    full = training.full_precision
    if full and training.mixed_precision != full:
        about = ("training.full_precision", "training.mixed_precision")
        what = f"asks for weights in {full}, but --mixed_precision is {training.mixed_precision}"
        yield Finding(about, what, f"give --mixed_precision={full} too")
    kept = training.master_weights
    if kept == "none" and not full:
        what = "needs --full_bf16 or --full_fp16: without them the weights are fp32 themselves"
        yield Finding(("training.master_weights",), what)
    if kept in ("kahan", "stochastic") and full != "bf16":
        what = f"{kept} needs --full_bf16: " + ("fp16 is no upper half of fp32" if full else "the weights are fp32")
        yield Finding(("training.master_weights", "training.full_precision"), what, "" if not full else "fp32 or none")


def vanishing(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Squares of gradients vanish in an optimizer state of fp16, and what then divides by eps divides by 0 there.

    What estimates the rate begins with one of 1e-6, by which everything is multiplied: nothing of it is left.
    """
    training, optimizer = cfg.training, cfg.optimizer
    if training.full_precision != "fp16" or training.master_weights not in (None, "none"):
        return
    given = {word.partition("=")[0].strip() for word in optimizer.args}
    name = names.proper(optimizer.type.removeprefix("torch.optim."), _DIVIDING)
    if name and _EPS not in given:
        what = f"keeps {name}'s state in fp16, where its eps of 1e-8 is 0 and squares of gradients below 2e-4 vanish"
        remedy = "give --master_weights=fp32, or --optimizer_args eps=1e-4"
        yield Finding(("training.full_precision",), what, remedy, note=True)
    if is_named(optimizer, names.ADAPTIVE):
        what = f"keeps {optimizer.type}'s state in fp16, where its first estimate of the rate, 1e-6, moves nothing"
        about = ("training.full_precision", "optimizer.type")
        yield Finding(about, what, "give --master_weights=fp32", note=_D0 in given)


def fused(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Updates during the backward pass: what they cannot go with."""
    section = cfg.optimizer
    fields = [("optimizer.fused_backward", section.fused_backward), ("optimizer.fused_groups", section.fused_groups)]
    given = [field for field, value in fields if value]
    if len(given) == 2:
        yield Finding((given[1], given[0]), "contradicts --fused_backward_pass", "give one of them")
    if not given:
        return
    if section.fused_backward and cfg.training.accumulation > 1:
        about = (given[0], "training.accumulation")
        what = f"frees gradients at once, but --gradient_accumulation_steps={cfg.training.accumulation} adds them up"
        yield Finding(about, what, "--gradient_accumulation_steps=1, or --fused_optimizer_groups")
    if cfg.training.mixed_precision == "fp16":
        what = "updates before the loss scale is known to have held, so it does not go with fp16"
        yield Finding((given[0], "training.mixed_precision"), what, "--mixed_precision=bf16")
    if is_named(section, names.ADAPTIVE) or is_schedule_free(section) or section.schedulefree_wrapper:
        what = "updates with a few gradients at a time, but this optimizer needs all gradients of an update at once"
        yield Finding((given[0], "optimizer.type"), what, "--optimizer_type=AdamW or Adafactor")
    if section.type.lower() == "oss":
        what = "updates before the ranks have shared what each of them holds, so it does not go with oss"
        yield Finding((given[0], "optimizer.type"), what, "--optimizer_type=AdamW or Adafactor")


def offloading(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Only what checkpointing keeps is moved to the host."""
    if cfg.training.cpu_offload_checkpointing and not cfg.training.gradient_checkpointing:
        about = ("training.cpu_offload_checkpointing", "training.gradient_checkpointing")
        yield Finding(about, "needs --gradient_checkpointing: there are no checkpoints to move")


RULES: tuple[Rule, ...] = (full_precision, vanishing, fused, offloading)
