"""Adapters other than LoRA, in the folder that PEFT and our exports write, merged into a model's weights by PEFT itself.

LoKr adds a Kronecker product to a weight, DoRA sets the lengths of its rows too, OFT turns it, (IA)3 multiplies its outputs: what
each makes of a weight is PEFT's to say. Its layers are put into the model, filled, merged, and taken out again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.adapters import adapted_layers
from difftrain.adapters.kinds import library
from difftrain.contracts import ConfigFault, Fault
from difftrain.models.weights.adapter_files import PEFT_CONFIG, PEFT_FILE, AdapterChoice
from difftrain.models.weights.files import opened, read_json

if TYPE_CHECKING:
    from torch import Tensor, nn

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
    kind = kind_in(folder)
    if choice.scale != 1 and kind not in _SCALED:
        what = f"{folder} is {_TITLES[kind]}, which is not added to weights, and cannot be at {choice.scale:g}"
        raise ConfigFault([Fault(choice.flag, what, "leave the scale out")])
    homes = {family.folder(family.denoiser): folder}
    homes |= {file.parent.name: file.parent for file in sorted(folder.glob(f"*/{PEFT_FILE}"))}
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
