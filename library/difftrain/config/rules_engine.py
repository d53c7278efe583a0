"""Rules about engines: what accelerate and its DeepSpeed plugin cannot go with, and what of them is not installed."""

from __future__ import annotations

from collections.abc import Iterator

from difftrain.config import names
from difftrain.config.finding import Finding, Rule
from difftrain.config.held import is_installed
from difftrain.config.rules import Need, lacking
from difftrain.config.sections import TrainConfig

_ENGINE, _ON, _STAGE, _TYPE = "training.engine", "deepspeed.enable", "deepspeed.zero_stage", "optimizer.type"
_OFFLOAD, _PRECISION = "deepspeed.offload_optimizer_device", "training.mixed_precision"
# ZeRO cuts weights and state into flat pieces, so an optimizer must treat every element by itself
_ELEMENTWISE = (
    "AdamW", "Lion", "SGDNesterov", "ASGD", "Adadelta", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip

_THIRD = "needs --zero_stage=3"
NEEDS: tuple[Need, ...] = (
    *(Need(f"deepspeed.{field}", lambda c: c.deepspeed.enable, "needs --deepspeed") for field in (
        "zero_stage", "offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device",
        "offload_param_nvme_path", "zero3_init", "zero3_save_16bit", "fp16_master_weights",
    )),
    Need(_OFFLOAD, lambda c: c.deepspeed.zero_stage >= 2, "needs --zero_stage=2 or 3"),
    Need("deepspeed.offload_param_device", lambda c: c.deepspeed.zero_stage == 3, _THIRD),
    Need("deepspeed.zero3_init", lambda c: c.deepspeed.zero_stage == 3, _THIRD),
    Need("deepspeed.zero3_save_16bit", lambda c: c.deepspeed.zero_stage == 3, _THIRD),
    Need("deepspeed.offload_optimizer_nvme_path", lambda c: c.deepspeed.offload_optimizer_device == "nvme",
         "needs --offload_optimizer_device=nvme"),
    Need("deepspeed.offload_param_nvme_path", lambda c: c.deepspeed.offload_param_device == "nvme",
         "needs --offload_param_device=nvme"),
    Need("deepspeed.fp16_master_weights", lambda c: c.deepspeed.zero_stage == 2
         and c.deepspeed.offload_optimizer_device == "cpu" and c.training.mixed_precision == "fp16",
         "needs --zero_stage=2, --offload_optimizer_device=cpu and --mixed_precision=fp16: DeepSpeed has it nowhere else"),
)  # fmt: skip


def companions(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Find DeepSpeed flags without what gives them a meaning."""
    told: set[str] = set()
    for finding in lacking(NEEDS, cfg, asked):
        if finding.about[0] not in told:  # without --deepspeed the rest is no matter
            told.add(finding.about[0])
            yield finding


def installed(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """What an engine is made of comes in packages of its own."""
    if cfg.training.engine != "accelerate":
        return
    wanted = {"accelerate": _ENGINE}
    if cfg.deepspeed.enable:
        wanted["deepspeed"] = _ON
    elif cfg.optimizer.type.lower() == "oss":
        wanted["fairscale"] = _TYPE
    for package, field in wanted.items():
        if not is_installed(package):
            what = f"needs the package {package}, which is not installed"
            extra = "deepspeed" if package == "deepspeed" else "accelerate"
            yield Finding((field,), what, f'pip install "sd-scripts-xl[{extra}]", or leave it out for --engine=native')


def accelerate(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """What does not go through accelerate, with DeepSpeed or without."""
    if cfg.training.engine != "accelerate":
        return
    remedy = "--engine=native"
    for field, value in (
        ("optimizer.fused_backward", cfg.optimizer.fused_backward),
        ("optimizer.fused_groups", cfg.optimizer.fused_groups),
        ("training.full_precision", cfg.training.full_precision),
        ("model.train_only", cfg.model.train_only),  # its checkpoints leave the base out: not built there
    ):
        if value:
            yield Finding((field, _ENGINE), "does not go with --engine=accelerate", remedy)
    shards = cfg.deepspeed.enable or cfg.optimizer.type.lower() == "oss"
    if shards and cfg.model.fp8_frozen:
        what = "does not go with --deepspeed or fairscale's oss, which send every weight and know no 8 bits"
        yield Finding(("model.fp8_frozen", _ENGINE), what, remedy)
    for field, value in (
        ("training.ddp_bucket_view", cfg.training.ddp_bucket_view),
        ("training.ddp_static_graph", cfg.training.ddp_static_graph),
    ):
        if shards and value:
            what = "has no effect: gradients are not reduced by DistributedDataParallel here"
            yield Finding((field, _ENGINE), what, note=True)


def deepspeed(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """What ZeRO cannot go with."""
    section = cfg.deepspeed
    if not section.enable:
        return
    if cfg.training.engine != "accelerate":
        what = f"--engine={cfg.training.engine} does not run DeepSpeed"
        yield Finding((_ON, _ENGINE), what, "--engine=accelerate, which --deepspeed takes by itself")
    if section.zero_stage == 0:
        yield Finding((_STAGE,), "0 shards nothing", "1, 2 or 3; leave --deepspeed out where nothing is to be sharded")
    for name, device, path in (
        ("optimizer", section.offload_optimizer_device, section.offload_optimizer_nvme_path),
        ("param", section.offload_param_device, section.offload_param_nvme_path),
    ):
        if device == "nvme":
            field = f"deepspeed.offload_{name}_device"
            if not path:
                yield Finding((field,), f"nvme needs --offload_{name}_nvme_path", "give a folder on a fast disk")
            if section.zero_stage == 2:
                yield Finding((field, _STAGE), "nvme needs --zero_stage=3", "cpu offloads with --zero_stage=2")
    yield from _zero_optimizer(cfg)
    if section.zero_stage == 3:
        yield from _third_stage(cfg)


def _zero_optimizer(cfg: TrainConfig) -> Iterator[Finding]:
    section = cfg.optimizer
    name = names.proper(section.type.removeprefix("torch.optim."), _ELEMENTWISE)
    if section.type.lower() == "oss":
        yield Finding((_TYPE, _ON), "oss and --deepspeed both shard the optimizer's state", "--optimizer_type=AdamW")
    elif not name:
        what = f"{section.type} needs whole tensors, and --deepspeed cuts them into flat pieces"
        yield Finding((_TYPE, _ON), what, f"one of {', '.join(_ELEMENTWISE)}")
    elif cfg.deepspeed.offload_optimizer_device and name not in ("AdamW", "Adam"):
        what = f"{section.type} has no kernel of DeepSpeed's for an optimizer on the host"
        yield Finding((_TYPE, _OFFLOAD), what, "--optimizer_type=AdamW")
    if section.schedulefree_wrapper:
        what = "cannot average weights that --deepspeed cuts into pieces"
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
            what = "needs whole weights on a rank, which --zero_stage=3 takes apart"
            yield Finding((field, _STAGE), what, "--zero_stage=2")


RULES: tuple[Rule, ...] = (companions, installed, accelerate, deepspeed)
