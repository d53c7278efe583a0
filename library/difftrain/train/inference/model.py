"""A model to draw with, from any weights: those of a run's checkpoint or its averages, of an export, of others' files.

1. The configuration is the run's, or what the weights say of themselves; parts are built without weights.
2. The root is filled from the checkpoint, by the averages where those are chosen as training's samples choose, or from
   the source; frozen parts are loaded.
3. Adapters are merged, weights are brought to their precision and looked at, and everything goes to the device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain import checkpoint, optim
from difftrain.checkpoint.compatibility import engine_file
from difftrain.checkpoint.tensor_files import CheckpointReader
from difftrain.contracts import EVERY, ConfigFault, Fault, Parts
from difftrain.diffusion.ema import start_share
from difftrain.distributed.ranks import Ranks
from difftrain.engine.snapshot import OPTIMIZER, WEIGHTS
from difftrain.models.placeholder import DTYPES, fill
from difftrain.models.registry import make_family
from difftrain.models.weights.adapter_files import AdapterChoice, merge_adapter
from difftrain.models.weights.peft_merge import kind_in, merge_by_peft
from difftrain.optim.state import NamedState, merge_states
from difftrain.train.averages import HALF, PLAIN, POWER, UPDATES, percent
from difftrain.train.run import attend

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.contracts import Drawer
    from difftrain.device import Device
    from difftrain.train.inference.weights_path import WeightsPath

log = logging.getLogger("difftrain")
AS_SAMPLES, MOVING, TRAINED = "samples", "yes", "no"  # which averages; else a relative width
FLAG, EMA_FLAG = "--weights", "--ema"
_FREE = "schedulefree"  # of optimizers whose trained weights are not those that are meant to be used


@dataclass
class Inference:
    """A model that draws, the configuration that it is of, and what is to be said of its weights."""

    cfg: TrainConfig
    family: Any
    parts: Parts
    device: Device
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def drawer(self) -> Drawer:
        """Return what draws."""
        made: Drawer = self.family.drawer(self.parts)
        return made


def load_model(
    cfg: TrainConfig,
    source: WeightsPath,
    device: Device,
    *,
    ema: str = AS_SAMPLES,
    adapters: Sequence[AdapterChoice] = (),
) -> Inference:
    """Load weights for drawing. cfg: with paths in the place of hub ids. Raises ConfigFault with what does not fit."""
    if adapters:  # nothing is added to weights of few bits
        cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"fp8_frozen": None, "base_dtype": None})})
    if ema not in (AS_SAMPLES, TRAINED) and source.kind != "checkpoint":
        what = f"{source.path} is not a checkpoint: it contains a single set of weights"
        raise ConfigFault(
            [Fault(EMA_FLAG, what, "leave it out; the averages of a run are exported next to its weights")]
        )
    family: Any = make_family(cfg)  # a model, with facts of its files
    parts = family.load(deferred=EVERY)
    attention = attend(cfg, device, parts)
    model = Inference(cfg, family, parts, device, {"weights": source.path.name}, [attention])

    # --- weights of the root
    if source.kind == "checkpoint":
        _restore(model, source.path, ema)
        model.about["run"] = source.path.resolve().parent.name
    else:
        parts.fill_root()

    # --- frozen parts, but those that only training looks at
    for name in parts.frozen:
        if name not in parts.training_only:
            parts.load(name)
    modules = {
        family.folder(part): parts.root.get_submodule(part) if part in family.in_root else parts.frozen[part]
        for part in family.parts
    }
    for choice in adapters:
        merge = merge_by_peft if kind_in(choice.path) else merge_adapter
        model.notes.append(merge(choice, family, modules))
    if adapters:
        model.about["adapters"] = [{"file": adapter.path.name, "scale": adapter.scale} for adapter in adapters]

    # --- precision, faults, device
    half = cfg.training.full_precision
    if half is not None:
        for parameter in parts.root.parameters():
            if parameter.dtype == torch.float32:
                parameter.data = parameter.detach().to(DTYPES[half])
    _refuse_no_numbers(source, modules)
    # gradients stay allowed, as in training: torch's matmul is another one where weights take none, and rounds otherwise
    parts.root.eval().to(device.torch_device)
    for name, module in parts.frozen.items():
        if name not in parts.training_only:
            module.eval().to(device.torch_device)
    return model


# --- a checkpoint's weights


def _restore(model: Inference, folder: Path, ema: str) -> None:
    """Fill the root with a checkpoint's weights, or averages of them. Raises ConfigFault where they do not fit."""
    ranks, parts, family = Ranks(), model.parts, model.family
    stored = CheckpointReader(folder, WEIGHTS, ranks)
    meta = checkpoint.load_meta(folder)
    own = {name: tuple(value.shape) for name, value in parts.root.state_dict().items() if name not in parts.base}
    if own != stored.shapes:
        differing = sorted(
            name for name in own.keys() | stored.shapes.keys() if own.get(name) != stored.shapes.get(name)
        )
        what = f"{folder} belongs to another model than its configuration says: {', '.join(differing[:3])} first"
        raise ConfigFault([Fault(FLAG, what, "give the config.toml of the run that wrote it as --config")])
    averaged, description = _averages(model, folder, ema, ranks)
    weights = dict(stored.tensors(lambda name: True)) | averaged

    # --- a root without weights is filled; of one that has its source's, what was trained is replaced
    if parts.load_root is not None and not parts.base:
        parts.load_root = None
        for part in family.in_root:
            inside = ((name.partition(".")[2], value) for name, value in weights.items() if name.startswith(f"{part}."))
            fill(parts.root.get_submodule(part), inside, partial(family.storage_dtype, part))
    else:
        parts.fill_root()
    tensors = parts.root.state_dict(keep_vars=True)
    trained = {name for name, parameter in parts.root.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name in weights.keys() & (trained | {name for name in tensors if not tensors[name].is_floating_point()}):
            tensors[name].copy_(weights[name])

    if not averaged and ema != TRAINED:
        description = _put_free_averages(model, folder, ranks) or description
    step = int(meta["step"])
    model.about |= {"step": step, "drawn_from": description}
    model.notes.append(f"{folder} at step {step}: {description}")


def _averages(model: Inference, folder: Path, ema: str, ranks: Ranks) -> tuple[dict[str, Tensor], str]:
    """Return the averages that are chosen, by name, and what is drawn from. Raises ConfigFault where there are none."""
    kind = POWER.format(width=_width(ema)) if ema not in (AS_SAMPLES, MOVING, TRAINED) else PLAIN
    known = sorted({path.name.rpartition("-")[0] for path in folder.glob("ema*-*.safetensors")})
    if ema == TRAINED or (ema == AS_SAMPLES and kind not in known):
        return {}, "raw weights"
    if kind not in known:
        widths = [name.removeprefix("ema_") for name in known if name != PLAIN]
        has = [*(["a moving average (--ema)"] if PLAIN in known else []), *(f"--ema={width}" for width in widths)]
        what = f"{folder} has no {'moving average' if kind == PLAIN else f'average of relative width {ema}'}"
        raise ConfigFault([Fault(EMA_FLAG, what, f"it has {', '.join(has)}" if has else "it has only raw weights")])
    reader = CheckpointReader(folder, kind, ranks)
    if ema == AS_SAMPLES:
        section, updates = model.cfg.ema, int(reader.metadata[0].get(UPDATES, 0))
        share = start_share(section.decay, updates, ramp=section.ramp)
        if share > HALF:
            return {}, f"raw weights, as the average is still {percent(share)} of its start"
    description = "averaged weights" if kind == PLAIN else f"weights averaged with relative width {_width(ema)}"
    return dict(reader.tensors(lambda name: True)), description


def _width(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        remedy = "--ema: the moving average; --ema=0.05: the one of that relative width; --ema=no: the raw weights"
        raise ConfigFault([Fault(EMA_FLAG, f"got {text!r}", remedy)]) from None


def _put_free_averages(model: Inference, folder: Path, ranks: Ranks) -> str:
    """Put the averages of a schedule-free optimizer in place of what it trains, as samples see them; say so, or nothing."""
    section, root = model.cfg.optimizer, model.parts.root
    if _FREE not in section.type.lower() and not section.schedulefree_wrapper:
        return ""
    optimizer: Any = optim.make_optimizer(section, model.family.param_groups(root), dp_size=1, fused_ok=False)
    stored, about = CheckpointReader(folder, OPTIMIZER, ranks), engine_file(folder)
    if not optim.averages(optimizer) or about is None:
        return ""
    names = {id(parameter): name for name, parameter in root.named_parameters() if parameter.requires_grad}
    states = merge_states(stored.metadata)
    NamedState(optimizer, names).load(states, about["groups"], stored.tensors(lambda name: True))
    optimizer.eval()
    return "the optimizer's averaged weights"


# --- faults


def _refuse_no_numbers(source: WeightsPath, modules: dict[str, Any]) -> None:
    """Look at every weight once: of one that is no number nothing but black is drawn. Raises ConfigFault."""
    bad: list[str] = []
    for folder, module in modules.items():
        for name, value in module.state_dict().items():
            wide = value.float() if value.is_floating_point() and value.itemsize == 1 else value
            if wide.is_floating_point() and not torch.isfinite(wide).all():
                bad.append(f"{folder}.{name}")
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        what = f"{source.path} contains weights that are not finite: {', '.join(bad[:3])}{more}"
        raise ConfigFault([Fault(FLAG, what, "use an earlier checkpoint")])
