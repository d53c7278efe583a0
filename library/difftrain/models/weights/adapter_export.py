"""Files of an adapter (LoRA, DoRA): one folder with a layout for each reader, whole or absent.

pytorch_lora_weights.safetensors    diffusers: load_lora_weights
adapter_model.safetensors           PEFT, with adapter_config.json; adapters of text encoders in folders beside it
NAME_comfyui.safetensors            ComfyUI; of UNets it reads kohya's, which stands there alone then
NAME.safetensors                    kohya's scripts, A1111, Forge and ComfyUI: families of UNets

LoKr has PEFT's folder and the file of ComfyUI or kohya, in the names of LyCORIS (write_lokr).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import ConfigFault
from difftrain.models.weights.adapter_files import DIFFUSERS_FILE, PEFT_CONFIG, PEFT_FILE, SETTINGS
from difftrain.models.weights.adapter_layouts import PEFT_PREFIX, PIECES, AdapterLayouts, LayerKey, LoraPair
from difftrain.models.weights.folder_export import new_folder
from difftrain.models.weights.writers import safetensors_writer

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.models.base import BaseFamily

log = logging.getLogger("difftrain")
Pairs = Mapping[LayerKey, LoraPair]
Tensors = dict[str, "Tensor"]
_OF_A_FILE = ("format", SETTINGS, PIECES, "modelspec.hash_sha256")  # of headers: what is of one file's layout and bytes
NETWORK = "networks.lora"  # kohya's module of what is written here


@dataclass(frozen=True)
class AdapterFacts:
    """What files say of an adapter beside its tensors.

    rank, alpha: of most layers. targets: as they were asked for. metadata: of the model's exports. dtype: of all factors;
    None: as they are. use_rslora: products are divided by the root of the rank, where a pair does not say its own alpha.
    """

    rank: int
    alpha: float
    targets: Sequence[str] = ()
    use_rslora: bool = False
    dtype: torch.dtype | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


def facts_of(pairs: Pairs, **more: Any) -> AdapterFacts:
    """Return the facts that an adapter's pairs say themselves."""
    rank = Counter(pair.rank for pair in pairs.values()).most_common(1)[0][0]
    alpha = Counter(_alpha(pair) for pair in pairs.values()).most_common(1)[0][0]
    return AdapterFacts(rank, alpha, use_rslora=all(pair.root for pair in pairs.values()), **more)


def described(family: BaseFamily, header: Mapping[str, str]) -> dict[str, str]:
    """Return what a header says of an adapter whatever its layout, with the model's architecture in any case."""
    own = {key: text for key, text in header.items() if key not in _OF_A_FILE and not key.startswith("sshs_")}
    return {"modelspec.architecture": str(family.modelspec or family.name)} | own


def has_kohya(family: BaseFamily) -> bool:
    """Tell whether kohya's scripts train adapters of this family's UNet under names that are written here."""
    return bool(family.lora.kohya)


def layouts_of(family: BaseFamily) -> tuple[str, ...]:
    """Return the layouts that an adapter of a family is written in."""
    return ("diffusers", "peft", "comfyui", *(["kohya"] if has_kohya(family) else []))


def write_adapter(
    family: BaseFamily, pairs: Pairs, path: Path, *, rank: int, alpha: float, name: str, targets: Sequence[str] = (),
    use_rslora: bool = False, dtype: torch.dtype | None = None, metadata: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write an adapter's folder in every layout that its family has; an older folder of that name is replaced.

    pairs: by part (or its folder) and the module's name. name: the stem of ComfyUI's and kohya's files.
    """
    facts = AdapterFacts(rank, alpha, targets, use_rslora, dtype, metadata or {})
    return write_all(AdapterLayouts(family), pairs, path, name, facts)


def write_all(layouts: AdapterLayouts, pairs: Pairs, path: Path, name: str, facts: AdapterFacts) -> Path:
    """Write a folder with every layout that a family has, as write_adapter does."""
    ours = _completed(layouts, pairs, facts)
    with new_folder(path) as aside:
        _write_diffusers(layouts, ours, facts, aside / DIFFUSERS_FILE)
        _write_peft(layouts, ours, facts, aside)
        kohya = has_kohya(layouts.family)
        file, write = f"{name}{'' if kohya else '_comfyui'}.safetensors", _write_kohya if kohya else _write_comfyui
        try:
            write(layouts, ours, facts, aside / file)
        except ConfigFault as fault:
            log.warning("%s is left out: %s", file, "; ".join(map(str, fault.faults)))
    return path


def write_layout(family: BaseFamily, pairs: Pairs, layout: str, path: Path, facts: AdapterFacts) -> Path:
    """Write one layout: a file, or of "peft" a folder. path: with its suffix. Layouts are those of layouts_of."""
    return write_one(AdapterLayouts(family), pairs, layout, path, facts)


def write_one(layouts: AdapterLayouts, pairs: Pairs, layout: str, path: Path, facts: AdapterFacts) -> Path:
    """Do so for names that are those of other sizes than the family's."""
    ours = _completed(layouts, pairs, facts)
    if layout == "peft":
        with new_folder(path) as aside:
            _write_peft(layouts, ours, facts, aside)
        return path
    kohya_for_both = _write_kohya if has_kohya(layouts.family) else _write_comfyui
    write: Callable[..., None] = {"diffusers": _write_diffusers, "kohya": _write_kohya, "comfyui": kohya_for_both}[
        layout
    ]
    write(layouts, ours, facts, path)
    return path


def _completed(layouts: AdapterLayouts, pairs: Pairs, facts: AdapterFacts) -> dict[LayerKey, LoraPair]:
    """Name layers as files do, and give pairs that say no strength that of the whole; factors on the host, in their dtype."""
    made = {}
    for (part, name), pair in pairs.items():
        assert pair.a is not None and pair.b is not None, name
        folder = layouts.folder(part)
        a, b = (value.detach().to("cpu", facts.dtype or value.dtype).contiguous() for value in (pair.a, pair.b))
        alpha, root = (facts.alpha, facts.use_rslora) if pair.alpha is None else (pair.alpha, pair.root)
        lengths = None if pair.lengths is None else pair.lengths.detach().to("cpu", a.dtype).flatten()
        made[folder, layouts.layer(folder, name)] = LoraPair([], a, b, float(alpha), root, lengths)
    return made


# ------------------------------------------------------------------ layouts


def _write_diffusers(layouts: AdapterLayouts, pairs: Pairs, facts: AdapterFacts, path: Path) -> None:
    """Write what a pipeline's load_lora_weights reads: settings of each part go into the header, as its own save does."""
    about: dict[str, Any] = {}
    tensors: Tensors = {}
    for folder, own in _by_folder(pairs).items():
        made, settings = _settings(layouts, folder, own, facts)
        tensors |= {f"{folder}.{key}": value for key, value in made.items()}
        about |= {f"{folder}.{key}": value for key, value in settings.items()}
    _write(path, tensors, _header(facts) | {SETTINGS: json.dumps(about, indent=2, sort_keys=True)})


def _write_peft(layouts: AdapterLayouts, pairs: Pairs, facts: AdapterFacts, path: Path) -> None:
    """Write what PEFT loads: a file and a configuration for the denoiser, and for each text encoder in its folder."""
    for folder, own in _by_folder(pairs).items():
        tensors, settings = _settings(layouts, folder, own, facts)
        here = path if folder == layouts.denoiser else path / folder
        config = {"peft_type": "LORA", "task_type": None, "base_model_name_or_path": None, "bias": "none", **settings}
        write_peft(here, tensors, config, _header(facts))


def write_peft(folder: Path, tensors: Tensors, config: Mapping[str, Any], header: Mapping[str, str]) -> None:
    """Write the two files of PEFT's own `save_pretrained` of one network, of any kind of adapter.

    tensors: by layer and PEFT's name, in the dtype of the file. config: what peft's configuration of the kind is made with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / PEFT_FILE, {PEFT_PREFIX + key: value for key, value in tensors.items()}, dict(header))
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    text = json.dumps({**plain, "inference_mode": True}, indent=2, sort_keys=True, default=str)
    (folder / PEFT_CONFIG).write_text(text + "\n", encoding="utf-8")


def _write_comfyui(layouts: AdapterLayouts, pairs: Pairs, facts: AdapterFacts, path: Path) -> None:
    """Write the names of the original layout, or diffusers' where ComfyUI knows those; text encoders by diffusers' names."""
    family = layouts.family
    own = {name: pair for (folder, name), pair in pairs.items() if folder == layouts.denoiser}
    pieces: dict[str, Any] = {}
    if family.lora.original:
        own, pieces = layouts.fused(pairs)
    named = {f"{family.lora.comfy}{name}": pair for name, pair in own.items()}
    named |= {f"{folder}.{name}": pair for (folder, name), pair in pairs.items() if folder != layouts.denoiser}
    pieces = {f"{family.lora.comfy}{name}": ranks for name, ranks in pieces.items()}
    _write(
        path, _with_alphas(named, "lora_A", "lora_B"), _header(facts) | ({PIECES: json.dumps(pieces)} if pieces else {})
    )


def _write_kohya(layouts: AdapterLayouts, pairs: Pairs, facts: AdapterFacts, path: Path) -> None:
    """Write the names of kohya's scripts: of a UNet as they build it, and of CLIP."""
    original = layouts.family.lora.kohya == "original"
    own = {name: pair for (folder, name), pair in pairs.items() if folder == layouts.denoiser}
    named = layouts.fused(pairs)[0] if original else own
    flat = {f"lora_unet_{name.replace('.', '_')}": pair for name, pair in named.items()}
    flat |= {
        layouts.kohya_prefix(folder) + name.replace(".", "_"): pair
        for (folder, name), pair in pairs.items()
        if folder != layouts.denoiser
    }
    _write(path, _with_alphas(flat, "lora_down", "lora_up"), _header(facts))


def _with_alphas(pairs: Mapping[str, LoraPair], first: str, second: str) -> Tensors:
    """Name the factors of layers, and the alpha of each, which is over the rank in files that have one for each layer."""
    made: Tensors = {}
    for name, pair in pairs.items():
        assert pair.a is not None and pair.b is not None
        alpha = torch.tensor(pair.plain_alpha, dtype=torch.float64)
        narrow = alpha.float()
        made |= {f"{name}.{first}.weight": pair.a, f"{name}.{second}.weight": pair.b}
        made[f"{name}.alpha"] = narrow if narrow.double() == alpha else alpha
        if pair.lengths is not None:
            made[f"{name}.dora_scale"] = pair.lengths.view(-1, *(1,) * (pair.a.ndim - 1))
    return made


def write_lokr(
    layouts: AdapterLayouts, layers: Mapping[LayerKey, Tensors], alphas: Mapping[LayerKey, float], folder: Path,
    name: str, facts: AdapterFacts,
) -> None:  # fmt: skip
    """Write LoKr into a folder as LyCORIS, A1111 and ComfyUI read it: the file that a LoRA of the family would have.

    layers: by folder and name, PEFT's tensors by their last name, which are LyCORIS's too. A file that fuses one of the
    layers is left out: a Kronecker product is none of some rows. A strength is alpha over the rank of a factor that is a
    product itself; where none is, it goes into the first factor.
    """
    tensors: Tensors = {}
    for (home, layer), own in layers.items():
        stem = layouts.own_name(home, layouts.layer(home, layer))
        if stem is None:
            log.warning("no file of LoKr for other programs: theirs fuse %s with other layers", layer)
            return
        rank = next((own[key].shape[0] for key in ("lokr_w1_b", "lokr_w2_b") if key in own), None)
        alpha = alphas[home, layer]
        for key, value in own.items():
            folded = rank is None and key == "lokr_w1"
            tensors[f"{stem}.{key}"] = (value * (alpha / facts.rank)).to(value.dtype) if folded else value
        tensors[f"{stem}.alpha"] = torch.tensor(float(facts.rank if rank is None else alpha))
    file = f"{name}{'' if has_kohya(layouts.family) else '_comfyui'}.safetensors"
    header = _header(facts) | {"ss_network_module": "lycoris.kohya", "ss_network_args": json.dumps({"algo": "lokr"})}
    _write(folder / file, tensors, header)


# ------------------------------------------------------------------ what files say of themselves


def _by_folder(pairs: Pairs) -> dict[str, dict[str, LoraPair]]:
    made: dict[str, dict[str, LoraPair]] = {}
    for (folder, name), pair in sorted(pairs.items(), key=lambda item: item[0]):
        made.setdefault(folder, {})[name] = pair
    return made


def _alpha(pair: LoraPair) -> float:
    return float(pair.rank if pair.alpha is None else pair.alpha)


def _settings(
    layouts: AdapterLayouts, folder: str, pairs: Mapping[str, LoraPair], facts: AdapterFacts
) -> tuple[Tensors, dict[str, Any]]:
    """Return the factors of a part's layers, and what peft.LoraConfig is made with to hold them."""
    root = all(pair.root for pair in pairs.values())
    alphas = {name: _alpha(pair) if root else float(pair.plain_alpha) for name, pair in pairs.items()}
    ranks = {name: pair.rank for name, pair in pairs.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    settings = {
        "r": rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": {f"^{name}": value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {f"^{name}": _number(value) for name, value in alphas.items() if value != alpha},
        "target_modules": _targets(layouts, folder, pairs, facts.targets),
        "use_rslora": root,
        "lora_dropout": 0.0,
        "use_dora": any(pair.lengths is not None for pair in pairs.values()),
    }
    tensors: Tensors = {}
    for name, pair in pairs.items():
        assert pair.a is not None and pair.b is not None
        tensors |= {f"{name}.lora_A.weight": pair.a, f"{name}.lora_B.weight": pair.b}
        if pair.lengths is not None:
            tensors[f"{name}.lora_magnitude_vector"] = pair.lengths
    return tensors, settings


def _targets(
    layouts: AdapterLayouts, folder: str, pairs: Mapping[str, LoraPair], targets: Sequence[str]
) -> list[str] | str:
    """Say to PEFT which modules have an adapter: as it was asked for, or all names, whichever says exactly these.

    PEFT takes a module whose name is one of a list, or ends on one behind a dot; or that a pattern matches in whole.
    """
    modules = [layouts.layer(folder, name) for name, _ in layouts.module(folder).named_modules()]
    for listed in (sorted(targets), sorted(pairs)):
        ends = tuple(f".{target}" for target in listed)
        if listed and {name for name in modules if name in listed or name.endswith(ends)} == set(pairs):
            return listed
    return "|".join(name.replace(".", r"\.") for name in sorted(pairs))


def _number(value: float) -> float:
    """Write an alpha as people do: 8 and not 8.0."""
    return int(value) if value == int(value) else value


def _header(facts: AdapterFacts) -> dict[str, str]:
    """Describe an adapter: the model's description, named as an adapter's, and kohya's words for what it is."""
    made = {"format": "pt", **facts.metadata}
    if base := made.get("modelspec.architecture"):
        made["modelspec.architecture"] = f"{base.removesuffix('/lora')}/lora"
    return made | {
        "ss_network_module": NETWORK,
        "ss_network_dim": str(facts.rank),
        "ss_network_alpha": str(_number(float(facts.alpha))),
    }


def _write(path: Path, tensors: Tensors, header: dict[str, str]) -> None:
    shapes = {key: (value.dtype, tuple(value.shape)) for key, value in tensors.items()}
    with safetensors_writer(path, shapes, header) as writer:
        for key, value in tensors.items():
            writer.write(key, value)
