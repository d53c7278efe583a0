"""One training step of any family as a benchmark runs it: the model on the device, batches that are there already.

1. A `Case` says what is trained how: a line of a matrix file, or of gpu_cases.py.
2. `Model` holds the random fp32 weights of one model on the device; cases of the same model share them.
3. `EngineStep` puts the trainer's own engine around it, and takes everything off again: compile, adapters, layout.
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from difftrain.config import TrainConfig
from difftrain.config.hidden_imports import is_installed, let_in
from difftrain.contracts import EVERY, Batch, Bucket, Parts, Stats
from difftrain.device import Device, use_attention
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.models.family import ModelFamily
from difftrain.models.flops import blank_inputs, on_meta
from difftrain.models.registry import FAMILIES, make_family
from difftrain.optim.registry import make_optimizer
from difftrain.optim.schedule import make_schedule
from difftrain.testing.batches import cached_batch, fill_in_place, tiny_bucket

LR, LORA_RANK = 1e-4, 16
LORA_LABEL = f"peft LoRA, rank {LORA_RANK}, injected by the benchmark"
_MODE = {"fused": (), "foreach": ("fused=False", "foreach=True")}


@dataclass(frozen=True)
class Case:
    """What is trained, and how. size: of the family's, with sizes of a part in the place of its own.

    trains: "full" or "lora". compile: a backend of torch.compile, "" for none. layout: "contiguous" or "channels_last".
    adamw: "fused" or "foreach". frames: of families of clips.
    """

    family: str
    size: str = "tiny"
    resolution: int = 64
    batch_size: int = 2
    precision: str = "no"
    engine: str = "native"
    trains: str = "full"
    checkpointing: bool = False
    compile: str = ""
    layout: str = "contiguous"
    adamw: str = "fused"
    sizes: str = ""  # JSON of part -> argument -> value, so that a case can be a key

    @property
    def bucket(self) -> Bucket:
        """Return the shape of its samples; of families of clips five frames."""
        return tiny_bucket(self.family, self.resolution)

    @property
    def model(self) -> tuple[str, str, str]:
        """Return what cases of the same weights have in common."""
        return self.family, self.size, self.sizes

    @property
    def title(self) -> str:
        """Say it in a line of a table."""
        how = [self.precision, self.engine, self.trains]
        how += ["checkpointing"] if self.checkpointing else []
        how += [f"compile={self.compile}"] if self.compile else []
        how += [word for word in (self.layout, self.adamw) if word not in ("contiguous", "fused")]
        what = f"{self.family}.{self.size}{'*' * bool(self.sizes)}"
        return f"{what} {self.resolution} px batch {self.batch_size} {' '.join(how)}"


def config(case: Case, folder: Path) -> TrainConfig:
    """Return the trainer's configuration of a case. folder: for sizes of one's own."""
    size = case.size
    if case.sizes:
        content = shipped_sizes(case.family, case.size)
        for part, changed in json.loads(case.sizes).items():
            content[part] = {**content[part], **changed}
        size = str(folder / "sizes.json")
        Path(size).write_text(json.dumps(content))
    return TrainConfig.model_validate(
        {
            "model": {"family": case.family, "init_from_config": size},
            "training": {
                "mixed_precision": case.precision,
                "seed": 1,
                "engine": case.engine,
                "gradient_checkpointing": case.checkpointing,
                "compile": bool(case.compile),
                "compile_backend": case.compile or "inductor",
            },
            "optimizer": {"learning_rate": LR, "args": _MODE[case.adamw]},
        }
    )


def shipped_sizes(family: str, size: str) -> dict[str, Any]:
    """Read the sizes of a random model that comes with the package."""
    import difftrain.models

    path = Path(difftrain.models.__file__).parent / "sizes_shipped" / f"{family}.{size}.json"
    return json.loads(path.read_text("utf-8"))


class Model:
    """One model's weights on one device, filled there: of a published size in seconds."""

    def __init__(self, case: Case, device: Device) -> None:
        self.key, self.device = case.model, device
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-sizes-")
        loaded = self.family(case).load(deferred=EVERY)
        self.root: Any = loaded.root
        self.silent = frozenset(loaded.silent)  # names that no output depends on: zeros there are no surprise
        fill_in_place(self.root, device.torch_device)

    def family(self, case: Case) -> ModelFamily:
        """Make the family that a case's configuration names."""
        family = make_family(config(case, Path(self._folder.name)))
        assert isinstance(family, ModelFamily), f"{case.family} is not on the kit"
        return family

    def free(self) -> None:
        """Give the memory back."""
        self.root = None
        self._folder.cleanup()
        free(self.device)


@dataclass
class EngineStep:
    """The trainer's engine around a model, as a case asks; `close` leaves the model as it was."""

    case: Case
    model: Model
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        case, device, root = self.case, self.model.device, self.model.root
        self._undo = contextlib.ExitStack()
        try:
            self.family = self.model.family(case)
            root.family = self.family
            self._undo.enter_context(trained_alone(self.family, root, case.trains))
            self._undo.enter_context(recomputed(root.denoiser, case.checkpointing))
            self._undo.enter_context(laid_out(root, case.layout))
            self._undo.callback(uncompile, root)
            self.parts = Parts(root, silent=set(self.model.silent))
            self.notes.append(use_attention(root, device, fused=True, choice="auto", precision=case.precision))
            self.engine = built_engine(self.family, self.parts, device)
            self.notes += self.parts.notes
        except BaseException:
            self._undo.close()
            raise

    def batch(self, seed: int) -> Batch:
        """Make a batch, the same for a seed."""
        return cached_batch(self.family, self.case.bucket, self.case.batch_size, seed=seed)

    def step(self, batch: Batch) -> Stats:
        """Make one update."""
        return self.engine.step([batch], dict(batch.counts))

    def loss(self, batch: Batch) -> float:
        """Make one update; return its loss as a number."""
        return float(self.step(batch).sums["loss"])

    def close(self) -> None:
        """Take off what the case put around the model."""
        self.model.root.zero_grad(set_to_none=True)
        self._undo.close()
        del self.engine
        free(self.model.device)


def built_engine(family: ModelFamily, parts: Parts, device: Device) -> Any:
    """Make the engine that a family's configuration names, around its parts. Raises RuntimeError where it cannot be."""
    cfg = family.cfg
    engine: Any = make_engine(cfg, device, Ranks())
    if wrong := engine.faults():
        raise RuntimeError("; ".join(wrong))
    engine.build(
        family,
        parts,
        lambda groups: make_optimizer(cfg.optimizer, groups, fused_ok=device.fused_optimizer),
        lambda made: make_schedule(cfg.optimizer, made, 1000),
        [],
    )
    return engine


# --- what a case puts around a root, and takes off again


@contextlib.contextmanager
def trained_alone(family: ModelFamily, root: Any, trains: str) -> Iterator[None]:
    """Train all that the family trains, or low-rank adapters alone where the family's facts say they go."""
    if trains == "full":
        yield
        return
    trained = {name: param.requires_grad for name, param in root.named_parameters()}
    inject_lora(family, root)
    try:
        yield
    finally:
        for name, module in list(root.named_modules()):
            if hasattr(module, "base_layer"):
                owner, _, leaf = name.rpartition(".")
                setattr(root.get_submodule(owner), leaf, module.base_layer)
        root.denoiser.__dict__.pop("peft_config", None)
        for name, param in root.named_parameters():
            param.requires_grad_(trained[name])


def inject_lora(family: ModelFamily, root: Any) -> None:
    """Put peft's adapters into the denoiser's blocks; they alone are trained. Raises ImportError without peft."""
    let_in("peft")
    from peft import LoraConfig, inject_adapter_in_model

    blocks = "|".join(re.escape(name) for name in family.blocks)
    leaves = "|".join(re.escape(name) for name in family.lora.targets)
    targets = rf"(?:{blocks})\.\d+\.(?:.*\.)?(?:{leaves})" if blocks else rf".*\.(?:{leaves})"
    adapters = LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=targets)
    inject_adapter_in_model(adapters, root.denoiser)
    last = root.num_blocks - 1 if family.blocks else 0
    unread = re.compile(family.unread.replace("{last}", str(last)) or "$^")
    for name, param in root.denoiser.named_parameters():
        if unread.search(name):
            param.requires_grad_(False)


@contextlib.contextmanager
def recomputed(net: Any, checkpointing: bool) -> Iterator[None]:
    """Recompute activations in the backward pass, or keep them."""
    if not checkpointing:
        yield
        return
    net.enable_gradient_checkpointing()
    try:
        yield
    finally:
        net.disable_gradient_checkpointing()


@contextlib.contextmanager
def laid_out(root: nn.Module, layout: str) -> Iterator[None]:
    """Let convolutions' weights, and so what they make, lie channels last."""
    if layout == "contiguous":
        yield
        return
    root.to(memory_format=torch.channels_last)
    try:
        yield
    finally:
        root.to(memory_format=torch.contiguous_format)


def uncompile(root: nn.Module) -> None:
    """Forget compiled blocks."""
    for module in root.modules():
        module._compiled_call_impl = None
    torch._dynamo.reset()


def free(device: Device) -> None:
    """Give memory back to the device."""
    gc.collect()
    if device.module is not None:
        device.module.empty_cache()


# --- operations


_counted: dict[Any, int] = {}


def counted_flops(family: ModelFamily, case: Case) -> float:
    """Count one sample's forward and backward by torch's counter, on the meta device; recomputation is not counted."""
    key = (case.model, case.bucket, case.trains)
    if key not in _counted:
        root = on_meta(family)
        if case.trains == "lora":
            inject_lora(family, root)
        inputs = blank_inputs(family, case.bucket)
        with FlopCounterMode(display=False) as counter:
            outputs = root(inputs.x_t, inputs.timestep, inputs.conditions)
            torch.stack([output.sum() for output in outputs if output.requires_grad]).sum().backward()
        _counted[key] = int(counter.get_total_flops())
    return float(_counted[key])


@cache
def missing_packages(trains: str) -> str:
    """Name what a case needs and this environment lacks."""
    return "peft" if trains == "lora" and not is_installed("peft") else ""


def trained_families() -> Mapping[str, tuple[str, ...]]:
    """Map every family that is trained to its sizes, by the registry."""
    return {name: row.sizes for name, row in FAMILIES.items()}
