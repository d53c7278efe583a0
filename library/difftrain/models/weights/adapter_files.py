"""Adapters (LoRA) of files, merged into the weights of a model: W + scale alpha / rank B A, in fp32.

1. Layouts are diffusers' business: `lora_state_dict` of the family's pipeline class brings kohya's and others to its own
   names. What PEFT writes by itself is renamed before.
2. Every pair of factors finds the layer that it is for; whatever finds none is named, and nothing is changed then.
3. The product is added to the layer's weight. Source: Hu et al. 2022, LoRA, section 4.1; rsLoRA: alpha / sqrt(rank).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import ConfigFault, Fault
from difftrain.models.weights.files import opened, read_json
from difftrain.models.weights.infer import adapter_looks_like, looks_like

if TYPE_CHECKING:
    from torch import Tensor, nn

_PEFT = "base_model.model."  # before the names of a file that PEFT wrote by itself
_PEFT_FILE, _PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
_ABOUT = "lora_adapter_metadata"  # of a header of diffusers: settings of each part, "unet.lora_alpha"
# methods whose files are no plain products of two factors: a pattern of their keys, and what people call them
_OTHERS = (
    (r"\.dora_scale$|lora_magnitude_vector", "DoRA"),
    (r"\.lokr_w[12]", "LoKr"),
    (r"\.hada_w[12]", "LoHa"),
    (r"\.oft_(blocks|diag|R)", "OFT"),
    (r"\.lora_mid\.", "LoCon with a core tensor (CP decomposition)"),
)
_SIDES = {"A": "A", "down": "A", "B": "B", "up": "B"}
# name in a state dict of diffusers -> layer and side; {q, k, v, out} of old processors are layers of their own
_KEYS = (
    re.compile(r"(?P<layer>.+)\.lora_(?P<side>A|B)(\.[^.]+)?\.weight"),
    re.compile(r"(?P<layer>.+)\.lora_(?P<side>down|up)\.weight"),
    re.compile(r"(?P<layer>.+)\.lora(_linear_layer)?\.(?P<side>down|up)\.weight"),
    re.compile(r"(?P<layer>.+)\.processor\.(?P<attention>to_(q|k|v|out))_lora\.(?P<side>down|up)\.weight"),
    re.compile(r"(?P<layer>.+\.self_attn)\.(?P<text>to_(q|k|v|out))_lora\.(?P<side>down|up)\.weight"),
)


@dataclass(frozen=True)
class AdapterChoice:
    """One adapter that is asked for. flag: how messages call it. scale: 1 is as it was trained."""

    path: Path
    scale: float
    flag: str


@dataclass
class LoraPair:
    """The two factors of one layer, and what the product is multiplied with beside the scale."""

    keys: list[str]
    a: Tensor | None = None
    b: Tensor | None = None
    alpha: float | None = None
    root: bool = False  # rsLoRA

    def delta(self, shape: torch.Size) -> Tensor | None:
        """Return alpha / rank B A in the layer's shape, fp32; None where it does not fit."""
        if self.a is None or self.b is None:
            return None
        a, b = self.a.float().flatten(1), self.b.float().flatten(1)
        rank = a.shape[0]
        if b.shape[1] != rank or (b.shape[0], a.shape[1]) != (shape[0], math.prod(shape[1:])):
            return None
        factor = (rank if self.alpha is None else self.alpha) / (math.sqrt(rank) if self.root else rank)
        return (factor * (b @ a)).reshape(shape)


@torch.no_grad()
def merge_adapter(choice: AdapterChoice, pipeline: str, modules: Mapping[str, nn.Module], denoiser: str) -> str:
    """Add an adapter to the weights of modules and return a sentence that says what it changed.

    pipeline: diffusers' class of the family. modules: by their folders in its layout, which are the first part of its
    names; denoiser: one of them. Raises ConfigFault, changing nothing, where it does not fit.
    """
    path = _file(choice)
    file = opened(path, choice.flag)
    keys = list(file.shapes())
    _refuse_others(choice, path, keys, file.shapes())
    about = _settings(path, file.metadata, denoiser)
    pairs = _pairs(choice, path, {key: file.get(key) for key in keys}, pipeline, modules, denoiser, about)

    # --- every product, before one is added: an adapter of another model changes nothing
    layers: dict[int, tuple[nn.Module, Tensor]] = {}
    unfit: list[str] = []
    for (folder, name), pair in pairs.items():
        layer = _layer(modules[folder], name) if folder in modules else None
        weight = getattr(layer, "weight", None)
        delta = pair.delta(weight.shape) if isinstance(weight, torch.Tensor) else None
        if layer is None or delta is None:
            unfit += pair.keys
        elif not torch.isfinite(delta).all():
            what = f"{path} holds weights that are no numbers: {', '.join(pair.keys)}"
            raise ConfigFault([Fault(choice.flag, what, "take an earlier save of the adapter")])
        else:
            layers[id(layer)] = (layer, delta if id(layer) not in layers else layers[id(layer)][1] + delta)
    if unfit or not layers:
        shown = ", ".join((unfit or keys)[:3])
        what = (
            f"{path} does not fit this model: {len(unfit) or len(keys)} of its {len(keys)} tensors have no layer here"
        )
        looks = adapter_looks_like(file.shapes())
        whose = f"; it looks like {looks}'s" if looks else ""
        raise ConfigFault(
            [Fault(choice.flag, f"{what}, {shown} first{whose}", "give an adapter of this family and size")]
        )

    # --- added in fp32, rounded once to what the layer is held in
    for layer, delta in layers.values():
        weight = layer.get_parameter("weight")
        weight.copy_((weight.float() + choice.scale * delta.to(weight.device)).to(weight.dtype))
    return f"adapter {path.name} at scale {choice.scale:g}: {len(layers)} layers"


def _file(choice: AdapterChoice) -> Path:
    """Return the file of an adapter; of a folder the one that diffusers or PEFT wrote. Raises ConfigFault."""
    path = choice.path.expanduser()
    if path.is_dir():
        inside = [path / name for name in (_DIFFUSERS_FILE, _PEFT_FILE) if (path / name).is_file()]
        if not inside:
            what = f"{path} has neither {_DIFFUSERS_FILE} nor {_PEFT_FILE}"
            raise ConfigFault([Fault(choice.flag, what, "give the adapter's file")])
        return inside[0]
    if not path.is_file():
        raise ConfigFault([Fault(choice.flag, f"no such file: '{path}'", "FILE, or FILE:SCALE")])
    return path


def _refuse_others(
    choice: AdapterChoice, path: Path, keys: Iterable[str], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Name what is no LoRA. Raises ConfigFault."""
    for pattern, name in _OTHERS:
        if any(re.search(pattern, key) for key in keys):
            remedy = "merge it with the tool that made it, and give the merged weights"
            raise ConfigFault([Fault(choice.flag, f"{path} is {name}; adapters here are LoRA", remedy)])
    if not any("lora" in key.lower() for key in keys):
        what = f"{path} is not an adapter: it looks like {looks_like(shapes)}"
        raise ConfigFault([Fault(choice.flag, what, "whole models are given as --weights")])


def _settings(path: Path, header: Mapping[str, str], denoiser: str) -> dict[str, Any]:
    """Return what is said of ranks and alphas beside the tensors, by "folder.setting"."""
    try:
        about = json.loads(header.get(_ABOUT, "{}"))
    except (ValueError, RecursionError):
        about = {}
    beside = read_json(path.with_name(_PEFT_CONFIG)) if path.name == _PEFT_FILE else {}
    return (about if isinstance(about, dict) else {}) | {f"{denoiser}.{name}": value for name, value in beside.items()}


def _pairs(
    choice: AdapterChoice,
    path: Path,
    tensors: dict[str, Tensor],
    pipeline: str,
    modules: Mapping[str, nn.Module],
    denoiser: str,
    about: Mapping[str, Any],
) -> dict[tuple[str, str], LoraPair]:
    """Sort an adapter's tensors by folder and layer. Raises ConfigFault where diffusers cannot read it."""
    # --- keys of PEFT and of kohya as diffusers has them
    tensors = {
        f"{denoiser}.{key.removeprefix(_PEFT)}" if key.startswith(_PEFT) else key: value
        for key, value in tensors.items()
    }
    named, alphas = _as_diffusers(choice, path, tensors, pipeline, modules[denoiser])

    # --- the two matrices of each layer
    pairs: dict[tuple[str, str], LoraPair] = {}
    for key, value in named.items():
        if key.endswith(".alpha"):
            alphas[key] = float(value)
            continue
        layer_key, side = _placed(key)
        pair = pairs.setdefault(layer_key, LoraPair([]))
        pair.keys.append(key)
        if side == "A":
            pair.a = value
        elif side == "B":
            pair.b = value

    # --- how strong each is: by what the file says of itself, then by its own tensors
    for (folder, layer), pair in pairs.items():
        pair.root = bool(about.get(f"{folder}.use_rslora"))
        patterns = about.get(f"{folder}.alpha_pattern") or {}
        own = next((alpha for name, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({name})", layer)), None)
        pair.alpha = own if own is not None else about.get(f"{folder}.lora_alpha")
    for key, alpha in alphas.items():
        layer_key, _ = _placed(key.removesuffix(".alpha"))
        if layer_key not in pairs:
            layer_key, _ = _placed(f"{key.removesuffix('.alpha')}.lora_A.weight")
        if layer_key in pairs:
            pairs[layer_key].alpha = alpha
    return pairs


def _as_diffusers(
    choice: AdapterChoice, path: Path, tensors: dict[str, Tensor], pipeline: str, net: nn.Module
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Give tensors diffusers' own names, and the alphas that lie among them."""
    import diffusers

    loader: Any = getattr(diffusers, pipeline)
    if not hasattr(loader, "lora_state_dict"):
        raise ConfigFault([Fault(choice.flag, f"{pipeline} takes no adapters", "give merged weights")])
    options = {"unet_config": net.config} if "unet" in str(getattr(loader, "_lora_loadable_modules", ())) else {}
    try:
        made = loader.lora_state_dict(dict(tensors), **options)
    except (
        Exception
    ) as error:  # its converters index, split and assert: whatever does not fit them raises something else
        shown = ", ".join(sorted(tensors)[:3])
        looks = adapter_looks_like({key: tuple(value.shape) for key, value in tensors.items()})
        whose = f"; it looks like {looks}'s" if looks else ""
        why = f"{type(error).__name__}: {error}"
        what = f"{path} is not an adapter that {pipeline} reads ({why}); its first keys are {shown}{whose}"
        raise ConfigFault([Fault(choice.flag, what, "give an adapter of this family and size")]) from None
    named, alphas = (made[0], made[1]) if isinstance(made, tuple) else (made, None)
    return dict(named), {key: float(value) for key, value in (alphas or {}).items()}


def _placed(key: str) -> tuple[tuple[str, str], str]:
    """Return folder and layer of a key, and which factor it is: "A", "B" or none."""
    folder, _, remaining = key.partition(".")
    for pattern in _KEYS:
        if match := pattern.fullmatch(remaining):
            groups = match.groupdict()
            layer = groups["layer"]
            if groups.get("attention"):
                layer += f".{groups['attention']}{'.0' if groups['attention'] == 'to_out' else ''}"
            if groups.get("text"):
                layer += f".{groups['text'].removeprefix('to_')}_proj"
            return (folder, layer), _SIDES[groups["side"]]
    return (folder, remaining), ""


def _layer(module: nn.Module, name: str) -> nn.Module | None:
    """Find a layer by its name; text encoders have been called with a prefix and without."""
    inside = dict(module.named_modules())
    return inside.get(name) or inside.get(name.removeprefix("text_model.")) or inside.get(f"text_model.{name}")
