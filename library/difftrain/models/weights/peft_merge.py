"""Adapters other than LoRA, in the folder that PEFT and our exports write, merged into a model's weights by PEFT itself.

LoKr adds a Kronecker product to a weight, DoRA sets the lengths of its rows too, OFT turns it, (IA)3 multiplies its outputs: what
each makes of a weight is PEFT's to say. Its layers are put into the model, filled, merged, and taken out again; or around one
weight after another (PeftMerge), where a model's weights are written anew, or have adapters of a run beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from difftrain.adapters import adapted_layers, is_adapter
from difftrain.adapters.kinds import library
from difftrain.contracts import ConfigFault, Fault
from difftrain.models.weights.adapter_files import PEFT_CONFIG, PEFT_FILE, AdapterChoice
from difftrain.models.weights.adapter_layouts import PEFT_PREFIX, AdapterLayouts
from difftrain.models.weights.files import opened, read_json

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.models.base import BaseFamily

_NAME = "merged"
_TITLES = {"LOKR": "LoKr", "OFT": "OFT", "IA3": "(IA)3", "LORA": "DoRA"}
_SCALED = ("LOKR", "LORA")  # what is added can be added in part; a rotation and a factor are not added


def kind_in(path: Path) -> str:
    """Return PEFT's name of the kind in a folder that is merged here; an empty string of LoRA and of anything else."""
    folder = path.expanduser()
    if not (folder / PEFT_FILE).is_file() or not (folder / PEFT_CONFIG).is_file():
        return ""
    config = read_json(folder / PEFT_CONFIG)
    kind = str(config.get("peft_type"))
    return kind if kind in _TITLES and (kind != "LORA" or config.get("use_dora")) else ""


@torch.no_grad()
def merge_by_peft(choice: AdapterChoice, family: BaseFamily, modules: Mapping[str, nn.Module]) -> str:
    """Merge a folder's adapter, and those of text encoders beside it; return a sentence that says what it changed.

    modules: as merge_adapter takes them. Raises ConfigFault, changing nothing, where it does not fit.
    """
    folder = choice.path.expanduser()
    kind, homes = _opened(choice, family.folder(family.denoiser))
    if unknown := [name for name in homes if name not in modules]:
        raise _unfit(choice, f"this model has no {', '.join(unknown)}")

    # --- put in and filled, everywhere, before anything is merged
    changed: list[nn.Module] = []
    try:
        for name, home in homes.items():
            if adapted_layers(modules[name]):
                raise _unfit(choice, "the model has another adapter in its layers, and only LoRA is merged beside one")
            changed.append(modules[name])
            _put_in(choice, modules[name], home, choice.scale)
        layers = [layer for module in changed for layer in adapted_layers(module).values()]
        for layer in layers:
            _check(choice, layer)
        for layer in layers:
            layer.merge()  # type: ignore[operator]
    finally:
        for module in changed:
            _take_out(module)
    return f"{_TITLES[kind]} {folder.name} at scale {choice.scale:g}: {len(layers)} layers"


def _opened(choice: AdapterChoice, denoiser: str) -> tuple[str, dict[str, Path]]:
    """Return a folder's kind, and where the adapter of each part lies. Raises ConfigFault for a scale that it cannot have."""
    folder = choice.path.expanduser()
    kind = kind_in(folder)
    if choice.scale != 1 and kind not in _SCALED:
        what = f"{folder} is {_TITLES[kind]}, which is not added to weights, and cannot be at {choice.scale:g}"
        raise ConfigFault([Fault(choice.flag, what, "leave the scale out")])
    homes = {denoiser: folder}
    return kind, homes | {file.parent.name: file.parent for file in sorted(folder.glob(f"*/{PEFT_FILE}"))}


class PeftMerge:
    """What a folder's adapter makes of a model's weights, one at a time. layers: that it changes, by folder and name.

    Raises ConfigFault, when it is made, where names are another model's or values no numbers.
    """

    def __init__(self, choice: AdapterChoice, layouts: AdapterLayouts) -> None:
        self._choice, self._layouts = choice, layouts
        self.kind, homes = _opened(choice, layouts.denoiser)
        self._homes = homes
        self.layers: dict[tuple[str, str], dict[str, Tensor]] = {}
        for part, home in homes.items():
            file = opened(home / PEFT_FILE, choice.flag)
            known = layouts.shapes(part) if layouts.has(part) else {}
            for key in file.shapes():
                name, _, leaf = key.removeprefix(PEFT_PREFIX).rpartition(".")
                while is_adapter(f".{name.rpartition('.')[2]}."):  # of LoRA ...lora_A.weight, of others ...lokr_w1
                    name, leaf = name.rpartition(".")[0], f"{name.rpartition('.')[2]}.{leaf}"
                value, name = file.get(key), layouts.layer(part, name)
                if name not in known:
                    raise _unfit(choice, f"it has no layer {name}")
                if not torch.isfinite(value).all():
                    raise _unfit(choice, f"it holds weights that are no numbers: {key}")
                self.layers.setdefault((part, name), {})[leaf] = value
            own = {name for folder, name in self.layers if folder == part}
            if missing := sorted(_meant(read_json(home / PEFT_CONFIG), known) - own):
                raise _unfit(choice, f"it names the layer {missing[0]}, and has no tensor of it")
        if not self.layers:
            raise _unfit(choice, "it changes no layer")

    def __call__(self, folder: str, name: str, value: Tensor) -> Tensor | None:
        """Return what a weight or a bias becomes, in fp32; None where it stays. name: of the tensor, in its part."""
        layer, _, leaf = name.rpartition(".")
        tensors = self.layers.get((folder, self._layouts.layer(folder, layer)))
        if tensors is None or (leaf == "bias" and self.kind != "IA3") or leaf not in ("weight", "bias"):
            return None
        if leaf == "bias":  # (IA)3 multiplies what leaves a layer
            (factor,) = tensors.values()
            return value.float() * factor.float().reshape(-1).to(value.device)
        return self._merged(folder, layer, value.float(), tensors)

    @torch.no_grad()
    def _merged(self, folder: str, name: str, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Let PEFT merge one layer. Raises ConfigFault where its tensors have other shapes."""
        peft, holder = library(), nn.Module()
        out, into = weight.shape[:2]
        sides: Any = tuple(weight.shape[2:])
        holder.layer = nn.Conv2d(into, out, sides, bias=False) if sides else nn.Linear(into, out, bias=False)
        holder.layer.weight = nn.Parameter(weight.cpu(), requires_grad=False)
        config = peft.PeftConfig.from_pretrained(str(self._homes[folder]))
        for field in ("rank_pattern", "alpha_pattern"):
            own = [
                v
                for pattern, v in (getattr(config, field, None) or {}).items()
                if re.match(rf"(.*\.)?({pattern})$", name)
            ]
            if hasattr(config, field):
                setattr(config, field, {"layer": own[0]} if own else {})
        config.target_modules, config.exclude_modules = {"layer"}, None
        if self.kind == "IA3":
            config.feedforward_modules = set()
        try:
            peft.inject_adapter_in_model(config, holder, _NAME)
            renamed = {f"{PEFT_PREFIX}layer.{key}": value for key, value in tensors.items()}
            loaded = peft.set_peft_model_state_dict(holder, renamed, _NAME)
        except (ValueError, RuntimeError, TypeError, KeyError) as error:
            raise _unfit(self._choice, f"{name}: {str(error).splitlines()[0]}") from error
        own_names = {key for key, _ in holder.named_parameters() if f".{_NAME}" in key}
        if odd := [*loaded.unexpected_keys, *sorted(own_names & set(loaded.missing_keys))]:
            raise _unfit(self._choice, f"its tensors of {name} differ, in {odd[0]} first")
        layer: Any = holder.layer
        if self._choice.scale != 1:
            layer.scale_layer(self._choice.scale)
        layer.merge()
        merged: Tensor = layer.base_layer.weight.detach()
        return merged.to(weight.device)

    def sentence(self) -> str:
        """Say what it changes."""
        title, name = _TITLES[self.kind], self._choice.path.name
        return f"{title} {name} at scale {self._choice.scale:g}: {len(self.layers)} layers"


def _meant(config: Mapping[str, Any], layers: Iterable[str]) -> set[str]:
    """Return the layers that a configuration of PEFT's names; none where it leaves some of them out again."""
    targets = config.get("target_modules") or ()
    if config.get("exclude_modules") or config.get("layers_to_transform"):
        return set()
    if isinstance(targets, str):
        return {name for name in layers if re.fullmatch(targets, name)}
    return {name for name in layers if f".{name}".endswith(tuple(f".{target}" for target in targets))}


@torch.no_grad()
def fuse_by_peft(choice: AdapterChoice, family: BaseFamily, modules: Mapping[str, nn.Module]) -> str:
    """Merge a folder's adapter into weights that may have adapters of a run beside them; return a sentence that says so."""
    merge = PeftMerge(choice, AdapterLayouts(family))
    if unknown := sorted({folder for folder, _ in merge.layers} - modules.keys()):
        raise _unfit(choice, f"this model has no {', '.join(unknown)} that is trained")
    for folder, module in modules.items():
        for name, layer in module.named_modules():
            if ".base_layer" in name or is_adapter(f"{name}."):
                continue
            base: Any = getattr(layer, "base_layer", layer)
            for leaf in ("weight", "bias"):
                value: Any = getattr(base, leaf, None)
                made = merge(folder, f"{name}.{leaf}", value) if isinstance(value, torch.Tensor) else None
                if made is not None:
                    value.copy_(made.to(value.dtype))
    return merge.sentence()


def _put_in(choice: AdapterChoice, module: nn.Module, home: Path, scale: float) -> None:
    """Put PEFT's layers of one network in, with a file's values. Raises ConfigFault where names or shapes are others."""
    peft = library()
    grads = {id(param): param.requires_grad for param in module.parameters()}
    file = opened(home / PEFT_FILE, choice.flag)
    try:
        config = peft.PeftConfig.from_pretrained(str(home))
        peft.inject_adapter_in_model(config, module, _NAME)
        tensors: dict[str, Tensor] = {key: file.get(key) for key in file.shapes()}
        loaded = peft.set_peft_model_state_dict(module, tensors, _NAME)
    except (ValueError, RuntimeError, TypeError, KeyError) as error:
        raise _unfit(choice, str(error).splitlines()[0]) from error
    own = {name for name, _ in module.named_parameters() if f".{_NAME}" in name}
    missing = sorted(own & set(loaded.missing_keys))
    if loaded.unexpected_keys or missing:
        raise _unfit(choice, f"its tensors and layers here differ, in {[*loaded.unexpected_keys, *missing][0]} first")
    for param in module.parameters():  # PEFT freezes all else
        if id(param) in grads:
            param.requires_grad_(grads[id(param)])
    for layer in adapted_layers(module).values():
        if scale != 1:
            layer.scale_layer(scale)  # type: ignore[operator]


def _check(choice: AdapterChoice, layer: nn.Module) -> None:
    """Raise ConfigFault where values are no numbers."""
    for name, param in layer.named_parameters():
        if f".{_NAME}" in f".{name}" and not torch.isfinite(param).all():
            raise _unfit(choice, f"it holds weights that are no numbers: {name}")


def _take_out(module: nn.Module) -> None:
    """Put the model's own layers back."""
    for name, layer in adapted_layers(module).items():
        owner, _, leaf = name.rpartition(".")
        base: Any = layer.base_layer
        setattr(module.get_submodule(owner), leaf, base)
    module.__dict__.pop("peft_config", None)


def _unfit(choice: AdapterChoice, why: str) -> ConfigFault:
    what = f"{choice.path} does not fit this model: {why}"
    return ConfigFault([Fault(choice.flag, what, "give an adapter of this family and size")])
