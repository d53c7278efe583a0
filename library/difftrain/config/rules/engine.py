"""Rules about engines, precision, compilation and other ways to save time and memory."""

from __future__ import annotations

from collections.abc import Iterator

from difftrain.config.hidden_imports import is_installed
from difftrain.config.paths import expanded, is_folder
from difftrain.config.rules.finding import Finding, Rule
from difftrain.config.rules.pipeline import pipeline, processes_started, sequence, undivided
from difftrain.config.rules.run import Companion, lacking
from difftrain.config.schema import names
from difftrain.config.schema.families import takes
from difftrain.config.schema.rates import is_named, is_schedule_free
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.spellings.spelling import option, spelled

_ALIGNS = "has no effect: repa.encoder names no folder"
_ROUTES = "has no effect: tread.share is 0, no token is routed"
_MASKS = "has no effect: patch_masking.share is 0, no patch is masked"

SPEEDUP_NEEDS: tuple[Companion, ...] = (
    *(Companion(f"repa.{field}", lambda c: c.repa.encoder, _ALIGNS) for field in ("weight", "layer", "hidden", "until_step")),
    *(Companion(f"tread.{field}", lambda c: c.tread.share, _ROUTES) for field in ("start", "end")),
    *(Companion(f"patch_masking.{field}", lambda c: c.patch_masking.share, _MASKS) for field in ("mixer_layers", "until_step")),
)  # fmt: skip


def speedup_companions(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking((need for need in SPEEDUP_NEEDS if takes(cfg, need.field)), cfg, requested)


def encoder(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """The image encoder is a folder of this machine, and counts for something."""
    folder = cfg.repa.encoder
    if folder is None:
        return
    if not is_folder(expanded(folder)):
        remedy = "give the folder of a transformers vision model: DINOv2, CLIP, SigLIP, ViT"
        yield Finding(("repa.encoder",), f"no such folder: {folder!r}", remedy)
    if not cfg.repa.weight:
        yield Finding(
            ("repa.weight", "repa.encoder"), "is 0: nothing would be aligned", "leave repa.encoder out, or 0.5"
        )


def tokens(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Tokens are routed, or patches masked; the route ends behind its start. The depth is looked at by the family."""
    tread = cfg.tread
    if tread.share and cfg.patch_masking.share:
        what = "contradicts patch_masking.share: each drops its own tokens"
        yield Finding(("tread.share", "patch_masking.share"), what, "give one of them")
    if tread.share and tread.end is not None and tread.end < tread.start:
        what = f"is block {tread.end}, before tread.start, {tread.start}: no block would be skipped"
        yield Finding(("tread.end", "tread.start"), what, "the last block that routed tokens skip")


SPEEDUP_RULES: tuple[Rule, ...] = (speedup_companions, encoder, tokens)


_EPS, _D0 = "eps", "d0"
# they divide by the root of squared gradients, and keep both in the weights' own precision
_DIVIDING = (
    "AdamW", "oss", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "AdamWScheduleFree", "RAdamScheduleFree",
)  # fmt: skip


def full_precision(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Half weights compute in their own precision, as kohya asserts."""
    training = cfg.training
    full = training.full_precision
    if full and training.mixed_precision != full:
        about = ("training.full_precision", "training.mixed_precision")
        what = f"asks for weights in {full}, but {option('training.mixed_precision')} is {training.mixed_precision}"
        yield Finding(about, what, f"give {option('training.mixed_precision')}={full} too")
    kept = training.master_weights
    if kept == "none" and not full:
        what = f"needs {option('training.full_precision', 'bf16')} or {option('training.full_precision', 'fp16')}: without them the weights are already fp32"
        yield Finding(("training.master_weights",), what)
    if kept in ("kahan", "stochastic") and full != "bf16":
        what = f"{kept} needs {option('training.full_precision', 'bf16')}: " + (
            "fp16 is not the upper half of fp32" if full else "the weights are fp32"
        )
        yield Finding(("training.master_weights", "training.full_precision"), what, "" if not full else "fp32 or none")


def vanishing(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Squares of gradients vanish in an optimizer state of fp16, and what then divides by eps divides by 0 there.

    What estimates the rate begins with one of 1e-6, by which everything is multiplied: nothing of it is left.
    """
    training, optimizer = cfg.training, cfg.optimizer
    if training.full_precision != "fp16" or training.master_weights not in (None, "none"):
        return
    argument_names = {word.partition("=")[0].strip() for word in optimizer.args}
    name = names.proper(optimizer.type.removeprefix("torch.optim."), _DIVIDING)
    if name and _EPS not in argument_names:
        what = f"keeps {name}'s state in fp16, where its eps of 1e-8 is 0 and squares of gradients below 2e-4 vanish"
        remedy = f"give {option('training.master_weights')}=fp32, or {option('optimizer.args')} eps=1e-4"
        yield Finding(("training.full_precision",), what, remedy, note=True)
    if is_named(optimizer, names.ADAPTIVE):
        what = f"keeps {optimizer.type}'s state in fp16, where its first estimate of the rate, 1e-6, moves nothing"
        about = ("training.full_precision", "optimizer.type")
        yield Finding(about, what, f"give {option('training.master_weights')}=fp32", note=_D0 in argument_names)


def fused(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Updates during the backward pass: what they cannot go with."""
    section = cfg.optimizer
    fields = [("optimizer.fused_backward", section.fused_backward), ("optimizer.fused_groups", section.fused_groups)]
    named = [field for field, value in fields if value]
    if len(named) == 2:
        yield Finding(
            (named[1], named[0]), f"contradicts {option('optimizer.fused_backward', True)}", "give one of them"
        )
    if not named:
        return
    if section.fused_backward and cfg.training.accumulation > 1:
        about = (named[0], "training.accumulation")
        what = f"frees gradients immediately, but {option('training.accumulation')}={cfg.training.accumulation} adds them up"
        yield Finding(about, what, f"{option('training.accumulation')}=1, or {option('optimizer.fused_groups')}")
    if cfg.training.mixed_precision == "fp16":
        what = "updates before the loss scale has been checked, so it cannot be used with fp16"
        yield Finding((named[0], "training.mixed_precision"), what, f"{option('training.mixed_precision')}=bf16")
    if is_named(section, names.ADAPTIVE) or is_schedule_free(section) or section.schedulefree_wrapper:
        what = "updates with a few gradients at a time, but this optimizer needs all gradients at once"
        yield Finding((named[0], "optimizer.type"), what, f"{option('optimizer.type')}=AdamW or Adafactor")
    if section.type.lower() == "oss":
        what = "updates before the ranks have exchanged their parts, so it cannot be used with oss"
        yield Finding((named[0], "optimizer.type"), what, f"{option('optimizer.type')}=AdamW or Adafactor")


def offloading(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Only what checkpointing keeps is moved to the host, and only its blocks can be chosen."""
    if cfg.training.checkpoint_blocks and not cfg.training.gradient_checkpointing:
        about = ("training.checkpoint_blocks", "training.gradient_checkpointing")
        yield Finding(about, f"needs {option('training.gradient_checkpointing', True)}: no block is computed again")
    if cfg.training.cpu_offload_checkpointing and not cfg.training.gradient_checkpointing:
        about = ("training.cpu_offload_checkpointing", "training.gradient_checkpointing")
        yield Finding(
            about, f"needs {option('training.gradient_checkpointing', True)}: there are no activations to move"
        )


_SWAP = "memory.swap_blocks"


def swapping(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Weights that never change can wait on the host, and others once they have been updated; engines that cut them have
    ways of their own."""
    if not cfg.memory.swap_blocks:
        return
    if not cfg.holds_base and not cfg.optimizer.fused_backward:
        what = (
            f"is {cfg.memory.swap_blocks}, and all weights are trained: a block can wait again once it has been updated"
        )
        remedy = spelled("{optimizer.fused_backward=true} updates it during the backward pass")
        yield Finding((_SWAP, "optimizer.fused_backward"), what, remedy)
    if not cfg.holds_base and cfg.training.full_precision:
        what = f"cannot be used with {option('training.full_precision', cfg.training.full_precision)} where all weights are trained"
        remedy = f"{option('training.mixed_precision')}={cfg.training.full_precision} alone: the fp32 weights wait on the host"
        yield Finding((_SWAP, "training.full_precision"), what, remedy)
    for field, value in (
        ("training.engine", cfg.training.engine != "native" and cfg.training.engine),
        ("training.pipeline_stages", cfg.training.pipeline_stages > 1 and cfg.training.pipeline_stages),
        ("training.compile", cfg.training.compile),
        ("model.fp8_frozen", cfg.model.fp8_frozen),
    ):
        if value:
            what = f"cannot be used with {option(field, value)}"
            ways = {
                "training.engine": f"{option('training.engine')}=native, or leave it out: that engine cuts weights over the devices",
                "training.pipeline_stages": f"{option('training.pipeline_stages')}=1, or leave it out: each device has few blocks",
                "model.fp8_frozen": "base_dtype = 'fp8' of [model] in its place, which keeps no originals",
            }
            yield Finding((_SWAP, field), what, ways.get(field, "leave one of them out"))


PRECISION_RULES: tuple[Rule, ...] = (full_precision, vanishing, fused, offloading, swapping)


_ENGINE, _ON, _STAGE, _TYPE = "training.engine", "deepspeed.enable", "deepspeed.zero_stage", "optimizer.type"
_OFFLOAD, _PRECISION = "deepspeed.offload_optimizer_device", "training.mixed_precision"
# ZeRO cuts weights and state into flat pieces, so an optimizer must treat every element by itself
_ELEMENTWISE = (
    "AdamW", "Lion", "SGDNesterov", "ASGD", "Adadelta", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip

_THIRD = "needs {deepspeed.zero_stage}=3"
ENGINE_NEEDS: tuple[Companion, ...] = (
    *(Companion(f"fsdp.{field}", lambda c: c.training.engine == "fsdp", "needs {training.engine}=fsdp") for field in (
        "shard", "shard_size", "reshard_after_forward", "reduce", "cpu_offload",
    )),
    Companion("fsdp.reduce", lambda c: c.training.accumulation > 1, "has no effect: an update has one micro batch", note=True),
    *(Companion(f"deepspeed.{field}", lambda c: c.deepspeed.enable, "needs --deepspeed") for field in (
        "zero_stage", "offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device",
        "offload_param_nvme_path", "zero3_init", "zero3_save_16bit", "fp16_master_weights",
    )),
    Companion(_OFFLOAD, lambda c: c.deepspeed.zero_stage >= 2, "needs {deepspeed.zero_stage}=2 or 3"),
    Companion("deepspeed.offload_param_device", lambda c: c.deepspeed.zero_stage == 3, _THIRD),
    Companion("deepspeed.zero3_init", lambda c: c.deepspeed.zero_stage == 3, _THIRD),
    Companion("deepspeed.zero3_save_16bit", lambda c: c.deepspeed.zero_stage == 3, _THIRD),
    Companion("deepspeed.offload_optimizer_nvme_path", lambda c: c.deepspeed.offload_optimizer_device == "nvme",
         "needs {deepspeed.offload_optimizer_device}=nvme"),
    Companion("deepspeed.offload_param_nvme_path", lambda c: c.deepspeed.offload_param_device == "nvme",
         "needs {deepspeed.offload_param_device}=nvme"),
    Companion("deepspeed.fp16_master_weights", lambda c: c.deepspeed.zero_stage == 2
         and c.deepspeed.offload_optimizer_device == "cpu" and c.training.mixed_precision == "fp16",
         "needs {deepspeed.zero_stage}=2, {deepspeed.offload_optimizer_device}=cpu and {training.mixed_precision}=fp16: DeepSpeed supports it nowhere else"),
)  # fmt: skip


def engine_companions(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Find flags of FSDP and DeepSpeed without what gives them a meaning."""
    reported: set[str] = set()
    for finding in lacking(ENGINE_NEEDS, cfg, requested):
        if finding.about[0] not in reported:  # without its engine the rest is no matter
            reported.add(finding.about[0])
            yield finding


def installed(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What an engine is made of comes in packages of its own."""
    if cfg.training.engine != "accelerate":
        return
    packages = {"accelerate": _ENGINE}
    if cfg.deepspeed.enable:
        packages["deepspeed"] = _ON
    elif cfg.optimizer.type.lower() == "oss":
        packages["fairscale"] = _TYPE
    for package, field in packages.items():
        if not is_installed(package):
            what = f"needs the package {package}, which is not installed"
            extra = "deepspeed" if package == "deepspeed" else "accelerate"
            yield Finding(
                (field,),
                what,
                f'pip install "sd-scripts-xl[{extra}]", or leave it out for {option("training.engine")}=native',
            )


def accelerate(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What does not go through accelerate, with DeepSpeed or without."""
    if cfg.training.engine != "accelerate":
        return
    remedy = f"{option('training.engine')}=native"
    for field, value in (
        ("optimizer.fused_backward", cfg.optimizer.fused_backward),
        ("optimizer.fused_groups", cfg.optimizer.fused_groups),
        ("training.full_precision", cfg.training.full_precision),
    ):
        if value:
            yield Finding((field, _ENGINE), f"cannot be used with {option('training.engine')}=accelerate", remedy)
    shards = cfg.deepspeed.enable or cfg.optimizer.type.lower() == "oss"
    if shards and cfg.model.fp8_frozen:
        what = "cannot be used with --deepspeed or fairscale's oss, which send every weight and do not support 8 bits"
        yield Finding(("model.fp8_frozen", _ENGINE), what, remedy)
    for field, value in (
        ("training.ddp_bucket_view", cfg.training.ddp_bucket_view),
        ("training.ddp_static_graph", cfg.training.ddp_static_graph),
    ):
        if shards and value:
            what = "has no effect: gradients are not reduced by DistributedDataParallel here"
            yield Finding((field, _ENGINE), what, note=True)


_SHARD, _SHARD_SIZE = "fsdp.shard", "fsdp.shard_size"
# each element is updated from its own gradient and state alone, so rows are updated as the whole would be; Muon gathers
_BY_ROWS = ("AdamW", "Lion", "SGDNesterov", *names.SCHEDULE_FREE, *names.TORCH_OPTIMIZERS, "Muon")


def fsdp(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What FSDP cannot go with: it holds rows of weights, gathers blocks as they run, and updates when all is reduced."""
    if cfg.training.engine != "fsdp":
        return
    engine = f"{option(_ENGINE)}=fsdp"
    native = f"{option(_ENGINE)}=native"
    for field, value in (
        ("optimizer.fused_backward", cfg.optimizer.fused_backward),
        ("optimizer.fused_groups", cfg.optimizer.fused_groups),
        ("training.full_precision", cfg.training.full_precision),
        ("training.compile", cfg.training.compile),
        ("model.fp8_frozen", cfg.model.fp8_frozen),
        ("eval.kid", cfg.eval.kid),
        ("demo.score", cfg.demo.score),
    ):
        if value:
            yield Finding((field, _ENGINE), f"cannot be used with {engine}", native)
    for field, value in (
        ("training.ddp_bucket_view", cfg.training.ddp_bucket_view),
        ("training.ddp_static_graph", cfg.training.ddp_static_graph),
    ):
        if value:
            what = "has no effect: gradients are not reduced by DistributedDataParallel here"
            yield Finding((field, _ENGINE), what, note=True)

    # --- the optimizer
    if not names.proper(cfg.optimizer.type.removeprefix("torch.optim."), _BY_ROWS):
        shards = cfg.optimizer.type.lower() == "oss"
        what = "shards the optimizer's state" if shards else "needs whole tensors"
        what = f"{cfg.optimizer.type} {what}, and {engine} shards {'it too' if shards else 'them'}"
        yield Finding((_TYPE, _ENGINE), what, f"one of {', '.join(_BY_ROWS)}")

    # --- who shares a copy
    size = cfg.fsdp.shard_size
    ranks = processes_started()
    if size and ranks and ranks % size:
        what = f"is {size}, and {undivided(ranks, f'groups of {size}')}"
        yield Finding((_SHARD_SIZE,), what, f"a divisor of {ranks}")
    elif size and cfg.fsdp.shard == "full" and size != ranks:
        what = f"is {size}, and {option(_SHARD)}=full shards over all devices"
        yield Finding((_SHARD_SIZE, _SHARD), what, f"{option(_SHARD)}=hybrid, or leave one of them out")
    if cfg.fsdp.cpu_offload and cfg.training.device == "cpu":
        what = f"has no effect with {option('training.device')}=cpu: the weights are on the host already"
        yield Finding(("fsdp.cpu_offload", "training.device"), what, "leave one of them out")


def deepspeed(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What ZeRO cannot go with."""
    section = cfg.deepspeed
    if not section.enable:
        return

    # --- engine and stage
    if cfg.training.engine != "accelerate":
        what = f"{option('training.engine')}={cfg.training.engine} does not run DeepSpeed"
        yield Finding(
            (_ON, _ENGINE), what, f"{option('training.engine')}=accelerate, which --deepspeed selects by itself"
        )
    if section.zero_stage == 0:
        yield Finding((_STAGE,), "0 shards nothing", "1, 2 or 3; leave --deepspeed out if nothing is to be sharded")

    # --- offloading to a disk
    for name, device, path in (
        ("optimizer", section.offload_optimizer_device, section.offload_optimizer_nvme_path),
        ("param", section.offload_param_device, section.offload_param_nvme_path),
    ):
        if device == "nvme":
            field = f"deepspeed.offload_{name}_device"
            if not path:
                yield Finding((field,), f"nvme needs --offload_{name}_nvme_path", "give a folder on a fast disk")
            if section.zero_stage == 2:
                yield Finding(
                    (field, _STAGE),
                    f"nvme needs {option('deepspeed.zero_stage')}=3",
                    f"cpu offloads with {option('deepspeed.zero_stage')}=2",
                )

    # --- what the optimizer and the third stage ask for
    yield from _zero_optimizer(cfg)
    if section.zero_stage == 3:
        yield from _third_stage(cfg)


def _zero_optimizer(cfg: TrainConfig) -> Iterator[Finding]:
    section = cfg.optimizer
    name = names.proper(section.type.removeprefix("torch.optim."), _ELEMENTWISE)
    if section.type.lower() == "oss":
        yield Finding(
            (_TYPE, _ON), "oss and --deepspeed both shard the optimizer's state", f"{option('optimizer.type')}=AdamW"
        )
    elif not name:
        what = f"{section.type} needs whole tensors, and --deepspeed splits them into flat pieces"
        yield Finding((_TYPE, _ON), what, f"one of {', '.join(_ELEMENTWISE)}")
    elif cfg.deepspeed.offload_optimizer_device and name not in ("AdamW", "Adam"):
        what = f"{section.type} has no DeepSpeed kernel for an optimizer on the host"
        yield Finding((_TYPE, _OFFLOAD), what, f"{option('optimizer.type')}=AdamW")
    if section.schedulefree_wrapper:
        what = "cannot average weights that --deepspeed shards"
        yield Finding(("optimizer.schedulefree_wrapper", _ON), what, "leave one of them out")


def _third_stage(cfg: TrainConfig) -> Iterator[Finding]:
    """With ZeRO 3 no rank holds the weights: what one draws or compiles by itself has none."""
    for field, value in (
        ("sample.prompts", cfg.sample.prompts),
        ("eval.kid", cfg.eval.kid),
        ("demo.score", cfg.demo.score),
        ("training.compile", cfg.training.compile),
    ):
        if value:
            what = f"needs complete weights on every rank, which {option('deepspeed.zero_stage')}=3 shards"
            yield Finding((field, _STAGE), what, f"{option('deepspeed.zero_stage')}=2")
    if cfg.model.train_text_encoder and cfg.adapter.type is not None:
        what = "trains adapters of text encoders, which look at embeddings whose pieces DeepSpeed has on their way"
        yield Finding(("model.train_text_encoder", _STAGE), what, f"{option('deepspeed.zero_stage')}=2")


ENGINE_RULES: tuple[Rule, ...] = (engine_companions, installed, accelerate, fsdp, deepspeed, pipeline, sequence)
