"""Adapters (LoRA, DoRA) of files, merged into the weights of a model: W + scale alpha / rank B A, in fp32.

1. Names of the layouts that are written here are looked up (adapter_layouts.py); what has others goes through
   `lora_state_dict` of the family's pipeline class, which brings them to diffusers' own.
2. Every pair of factors finds the layer that it is for; whatever finds none is named, and nothing is changed then.
3. The product is added to the layer's weight. Source: Hu et al. 2022, LoRA, section 4.1; rsLoRA: alpha / sqrt(rank).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import ConfigFault, Fault
from difftrain.models.weights.adapter_layouts import PEFT_PREFIX, AdapterLayouts, LayerKey, LoraPair, NamedTwice
from difftrain.models.weights.files import opened, read_json
from difftrain.models.weights.infer import adapter_looks_like, looks_like

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.models.base import BaseFamily

PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
SETTINGS = "lora_adapter_metadata"  # of a header of diffusers: settings of each part, "unet.lora_alpha"
# methods whose files are no plain products of two factors: a pattern of their keys, and what people call them
_OTHERS = (
    (r"\.lokr_w[12]", "LoKr"),
    (r"\.hada_w[12]", "LoHa"),
    (r"\.oft_(blocks|diag|R)", "OFT"),
    (r"\.lora_mid\.", "LoCon with a core tensor (CP decomposition)"),
)
_SIDES = {"A": "a", "down": "a", "B": "b", "up": "b", "magnitude_vector": "lengths"}
# name in a state dict of diffusers -> layer and side; {q, k, v, out} of old processors are layers of their own
_KEYS = (
    re.compile(r"(?P<layer>.+)\.lora_(?P<side>A|B)(\.[^.]+)?\.weight"),
    re.compile(r"(?P<layer>.+)\.lora_(?P<side>magnitude_vector)(\.weight)?"),
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


@dataclass(frozen=True)
class AdapterFile:
    """What lies in an adapter's file, and in those of text encoders beside it where PEFT wrote them.

    path: of the file. tensors, settings: by the folder of the part; those of the main file have none. header: of the main one.
    """

    path: Path
    tensors: Mapping[str, dict[str, Tensor]]
    settings: Mapping[str, dict[str, Any]]
    header: Mapping[str, str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Give the shapes of the main file's tensors."""
        return {name: tuple(value.shape) for name, value in self.tensors[""].items()}


@dataclass(frozen=True)
class Adapter:
    """An adapter, sorted by the layers of a model. path: of its file. keys: of its tensors. looks_like: the model that it is for."""

    path: Path
    pairs: dict[LayerKey, LoraPair]
    keys: list[str]
    looks_like: str = ""


def load_adapter(choice: AdapterChoice) -> AdapterFile:
    """Read an adapter's tensors and what it says of itself. Raises ConfigFault."""
    path = _file(choice)
    beside = sorted(path.parent.glob(f"*/{PEFT_FILE}")) if path.name == PEFT_FILE else []
    tensors: dict[str, dict[str, Tensor]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for part_path in (path, *beside):
        folder = "" if part_path == path else part_path.parent.name
        file = opened(part_path, choice.flag)
        _refuse_others(choice, part_path, file.shapes())
        tensors[folder] = {key: file.get(key) for key in file.shapes()}
        settings[folder] = _settings(part_path, file.metadata)
    return AdapterFile(path, tensors, settings, opened(path, choice.flag).metadata)


def sort_adapter(
    choice: AdapterChoice, file: AdapterFile, layouts: AdapterLayouts, *, by_diffusers: bool = True
) -> Adapter:
    """Sort an adapter by a model's layers.

    Raises ConfigFault where nothing here, nor diffusers, knows its names, or where it names a layer twice.

    by_diffusers: its converters are tried for names that are not known here; without them none of such a file is sorted.
    """
    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {}
    for folder, own in file.tensors.items():  # those of a text encoder by the names of its folder
        tensors |= {f"{folder}.{key.removeprefix(PEFT_PREFIX)}" if folder else key: value for key, value in own.items()}
        by_part = file.settings[folder] if file.path.name != PEFT_FILE else {
            f"{folder or layouts.denoiser}.{key}": value for key, value in file.settings[folder].items()
        }  # fmt: skip
        about |= by_part
    try:
        pairs = layouts.sorted(tensors, file.header)
        if pairs is not None:
            _strengthen(pairs, about)
        else:
            pairs = _by_diffusers(choice, file.path, tensors, layouts, about) if by_diffusers else {}
    except NamedTwice as twice:
        raise named_twice(choice, file.path, twice.layer, twice.keys) from None
    looks = adapter_looks_like({key: tuple(value.shape) for key, value in tensors.items()})
    return Adapter(file.path, pairs, list(tensors), looks)


def read_adapter(choice: AdapterChoice, family: BaseFamily) -> Adapter:
    """Read an adapter of any layout, sorted by folder and layer (see adapter_layouts). Raises ConfigFault.

    A layer that the model has not is among the pairs: whoever uses them has to look (see fitting and unfit).
    """
    return sort_adapter(choice, load_adapter(choice), AdapterLayouts(family))


def fitting(choice: AdapterChoice, adapter: Adapter, layouts: AdapterLayouts) -> dict[LayerKey, LoraPair]:
    """Return the pairs of an adapter that is for this model, and finite. Raises ConfigFault for another one."""
    homeless: list[str] = []
    for (folder, name), pair in adapter.pairs.items():
        shape = layouts.shapes(folder).get(layouts.layer(folder, name)) if layouts.has(folder) else None
        if shape is None or not pair.fits(shape):
            homeless += pair.keys
        elif not all(value.isfinite().all() for value in (pair.a, pair.b, pair.lengths) if value is not None):
            raise not_finite(choice, adapter.path, pair)
    if homeless or not adapter.pairs:
        raise unfit(choice, adapter, homeless)
    return adapter.pairs


def not_finite(choice: AdapterChoice, path: Path, pair: LoraPair) -> ConfigFault:
    """Say which tensors of an adapter hold what is no number."""
    what = f"{path} holds weights that are no numbers: {', '.join(pair.keys)}"
    return ConfigFault([Fault(choice.flag, what, "take an earlier save of the adapter")])


def named_twice(choice: AdapterChoice, path: Path, layer: str, keys: Sequence[str]) -> ConfigFault:
    """Say which tensors of an adapter are for one layer, where one pair of factors was expected."""
    what = f"{path} has two adapters for the layer {layer}: {', '.join(keys)}"
    return ConfigFault([Fault(choice.flag, what, "a file with one name for each layer")])


def unfit(choice: AdapterChoice, adapter: Adapter, keys: Iterable[str]) -> ConfigFault:
    """Say that an adapter is another model's. keys: of its tensors that have no layer; none of them, where there is none."""
    named = list(dict.fromkeys(keys)) or adapter.keys
    what = f"{adapter.path} does not fit this model: {len(named)} of its {len(adapter.keys)} tensors have no layer here"
    whose = f"; it looks like {adapter.looks_like}'s" if adapter.looks_like else ""
    what = f"{what}, {', '.join(named[:3])} first{whose}"
    return ConfigFault([Fault(choice.flag, what, "give an adapter of this family and size")])


@torch.no_grad()
def merge_adapter(choice: AdapterChoice, family: BaseFamily, modules: Mapping[str, nn.Module]) -> str:
    """Add an adapter to the weights of modules and return a sentence that says what it changed.

    modules: by their folders in the family's layout, which are the first part of diffusers' names. Raises ConfigFault,
    changing nothing, where it does not fit.
    """
    adapter = read_adapter(choice, family)

    # --- every product, before one is added: an adapter of another model changes nothing
    layers: dict[int, tuple[nn.Module, LoraPair]] = {}
    homeless: list[str] = []
    for (folder, name), pair in adapter.pairs.items():
        layer = find_layer(modules[folder], name) if folder in modules else None
        weight = getattr(layer, "weight", None)
        delta = pair.delta(weight.shape) if isinstance(weight, torch.Tensor) else None
        if layer is not None and id(layer) in layers:  # two names of diffusers', with `text_model.` and without
            raise named_twice(choice, adapter.path, name, layers[id(layer)][1].keys + pair.keys)
        if layer is None or delta is None:
            homeless += pair.keys
        elif not torch.isfinite(delta).all() or (pair.lengths is not None and not pair.lengths.isfinite().all()):
            raise not_finite(choice, adapter.path, pair)
        else:
            layers[id(layer)] = layer, pair
    if homeless or not layers:
        raise unfit(choice, adapter, homeless)

    # --- added in fp32, rounded once to what the layer is held in
    for layer, pair in layers.values():
        weight = getattr(layer, "base_layer", layer).get_parameter("weight")  # beside an adapter that is trained
        made = pair.changed(weight, choice.scale)
        assert made is not None
        weight.copy_(made.to(weight.dtype))
    return f"adapter {adapter.path.name} at scale {choice.scale:g}: {len(layers)} layers"


def _file(choice: AdapterChoice) -> Path:
    """Return the file of an adapter; of a folder the one that diffusers or PEFT wrote. Raises ConfigFault."""
    path = choice.path.expanduser()
    if path.is_dir():
        inside = [path / name for name in (DIFFUSERS_FILE, PEFT_FILE) if (path / name).is_file()]
        if not inside:
            what = f"{path} has neither {DIFFUSERS_FILE} nor {PEFT_FILE}"
            raise ConfigFault([Fault(choice.flag, what, "give the adapter's file")])
        return inside[0]
    if not path.is_file():
        raise ConfigFault([Fault(choice.flag, f"no such file: '{path}'", "FILE, or FILE:SCALE")])
    return path


def _refuse_others(choice: AdapterChoice, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Name what is no LoRA. Raises ConfigFault."""
    keys = list(shapes)
    for pattern, name in _OTHERS:
        if any(re.search(pattern, key) for key in keys):
            remedy = "merge it with the tool that made it, and give the merged weights"
            raise ConfigFault(
                [Fault(choice.flag, f"{path} is {name}; adapters in one file are LoRA or DoRA here", remedy)]
            )
    if not any("lora" in key.lower() for key in keys):
        what = f"{path} is not an adapter: it looks like {looks_like(shapes)}"
        raise ConfigFault([Fault(choice.flag, what, "whole models are given as --weights")])


def _settings(path: Path, header: Mapping[str, str]) -> dict[str, Any]:
    """Return what is said of ranks and alphas beside the tensors: "folder.setting" of diffusers, "setting" of PEFT."""
    if path.name == PEFT_FILE:
        return read_json(path.with_name(PEFT_CONFIG))
    try:
        about = json.loads(header.get(SETTINGS, "{}"))
    except (ValueError, RecursionError):
        about = {}
    return about if isinstance(about, dict) else {}


def _strengthen(pairs: Mapping[LayerKey, LoraPair], about: Mapping[str, Any]) -> None:
    """Say how strong pairs are whose tensors do not say it, by what their file says of itself."""
    for (folder, layer), pair in pairs.items():
        if pair.alpha is None:
            pair.root = bool(about.get(f"{folder}.use_rslora"))
            patterns = about.get(f"{folder}.alpha_pattern") or {}
            own = patterns.get(f"^{layer}")
            if own is None:
                own = next(
                    (alpha for name, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({name})", layer)), None
                )
            pair.alpha = own if own is not None else about.get(f"{folder}.lora_alpha")


# --- layouts that diffusers reads and adapter_layouts does not name


def _by_diffusers(
    choice: AdapterChoice, path: Path, tensors: dict[str, Tensor], layouts: AdapterLayouts, about: Mapping[str, Any]
) -> dict[LayerKey, LoraPair]:
    """Sort an adapter's tensors as diffusers names them. Raises ConfigFault where it cannot read them."""
    if lost := [key for key in tensors if "dora_scale" in key]:  # which diffusers' converters leave out
        what = f"{path} is DoRA, and {lost[0]} names no layer of this model that is known here"
        raise ConfigFault([Fault(choice.flag, what, "give an adapter of this family and size")])

    # --- keys of PEFT and of kohya as diffusers has them
    tensors = {
        f"{layouts.denoiser}.{key.removeprefix(PEFT_PREFIX)}" if key.startswith(PEFT_PREFIX) else key: value
        for key, value in tensors.items()
    }
    pipeline = layouts.family.row.pipeline
    named, alphas = _as_diffusers(choice, path, tensors, pipeline, layouts.module(layouts.denoiser))

    # --- the two matrices of each layer
    pairs: dict[LayerKey, LoraPair] = {}
    for key, value in named.items():
        if key.endswith(".alpha"):
            alphas[key] = float(value)
            continue
        layer_key, side = _placed(key)
        pair = pairs.setdefault(layer_key, LoraPair())
        if side:
            pair.put(layer_key[1], side, key, value)
        else:
            pair.keys.append(key)

    # --- how strong each is: by its own tensors, then by what the file says of itself
    for key, alpha in alphas.items():
        layer_key, _ = _placed(key.removesuffix(".alpha"))
        if layer_key not in pairs:
            layer_key, _ = _placed(f"{key.removesuffix('.alpha')}.lora_A.weight")
        if layer_key in pairs:
            pairs[layer_key].alpha = alpha
    _strengthen(pairs, about)
    return pairs


def _as_diffusers(
    choice: AdapterChoice, path: Path, tensors: dict[str, Tensor], pipeline: str, net: nn.Module
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Give tensors diffusers' own names, and the alphas that lie among them; without a converter they keep theirs."""
    import diffusers

    loader: Any = getattr(diffusers, pipeline, None)
    if not hasattr(loader, "lora_state_dict"):
        return tensors, {}
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
    """Return folder and layer of a key, and which tensor of a pair it is: "a", "b", "lengths" or none."""
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


def find_layer(module: nn.Module, name: str) -> nn.Module | None:
    """Find a layer by its name; text encoders have been called with a prefix and without."""
    inside = dict(module.named_modules())
    return inside.get(name) or inside.get(name.removeprefix("text_model.")) or inside.get(f"text_model.{name}")
