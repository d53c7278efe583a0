"""The adapters of a run: from the root's tensors to the factors of each layer, and to and from files.

LoRA and DoRA are written in every layout that other programs read (models/weights/adapter_export.py); their relatives in PEFT's own.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from difftrain.adapters import ADAPTER, FACTORED, adapted_layers, is_adapter, kind_of, ranks_of
from difftrain.config.paths import expanded
from difftrain.config.rules.adapter import scaled
from difftrain.config.schema.families import row_of
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.models.weights.adapter_export import (
    AdapterFacts,
    facts_of,
    write_adapter,
    write_layout,
    write_lokr,
    write_peft,
)
from difftrain.models.weights.adapter_files import Adapter, AdapterChoice, merge_adapter, read_adapter
from difftrain.models.weights.adapter_layouts import AdapterLayouts, LayerKey, LoraPair
from difftrain.models.weights.fingerprints import hashed
from difftrain.models.weights.folder_export import new_folder
from difftrain.models.weights.peft_merge import fuse_by_peft, kind_in

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.config import TrainConfig
    from difftrain.config.schema.adapter import AdapterSection
    from difftrain.contracts import Parts
    from difftrain.models.base import BaseFamily
    from difftrain.models.root import DenoiserRoot

log = logging.getLogger("difftrain")


def export_adapter(
    family: BaseFamily, weights: Iterable[tuple[str, Tensor]], parts: Parts, path: Path, *, dtype: torch.dtype | None,
    metadata: Mapping[str, str],
) -> Path:  # fmt: skip
    """Write the adapter of a run as a folder, whole or absent, and return it. weights: the root's, by plain name."""
    section = family.cfg.adapter
    tensors: dict[str, dict[str, Tensor]] = {}
    for full, value in weights:
        part, _, name = full.partition(".")
        if is_adapter(name):
            tensors.setdefault(part, {})[name] = value
    if section.type in FACTORED:
        return _export_lora(family, pairs_of(family, tensors, parts), path, dtype, metadata)
    with new_folder(path) as aside:
        for part, named in tensors.items():
            layers = list(adapted_layers(parts.root.get_submodule(part)))
            folder = aside if part == family.denoiser else aside / family.folder(part)
            plain = {name.replace(f".{ADAPTER}", ""): value.to(dtype or value.dtype) for name, value in named.items()}
            # target_modules is one expression of whole names: entries of a list mean ends, too
            config = kind_of(section).config(section, ranks_of(section, layers)).to_dict()
            write_peft(folder, plain, config, {"format": "pt", **metadata})
        if section.type == "lokr":
            _export_lokr(
                family,
                tensors,
                parts,
                aside,
                path.name,
                AdapterFacts(section.rank, _alpha(section), dtype=dtype, metadata=metadata),
            )
    return path


def _alpha(section: AdapterSection) -> float:
    return float(section.rank if section.alpha is None else section.alpha)


def _export_lokr(
    family: BaseFamily, tensors: Mapping[str, Mapping[str, Tensor]], parts: Parts, folder: Path, name: str, facts: AdapterFacts
) -> None:  # fmt: skip
    """Write LoKr for programs that read LyCORIS's names. tensors: by part and name in the root."""
    layers: dict[LayerKey, dict[str, Tensor]] = {}
    alphas: dict[LayerKey, float] = {}
    for part, named in tensors.items():
        home, own = family.folder(part), list(adapted_layers(parts.root.get_submodule(part)))
        alphas |= {(home, layer): alpha for layer, alpha in ranks_of(family.cfg.adapter, own).alpha.items()}
        for full, value in named.items():
            layer, _, leaf = full.removesuffix(f".{ADAPTER}").rpartition(".")
            layers.setdefault((home, layer), {})[leaf] = (
                value.detach().to("cpu", facts.dtype or value.dtype).contiguous()
            )
    write_lokr(AdapterLayouts(family), layers, alphas, folder, name, facts)


def as_one_file(cfg: TrainConfig) -> bool:
    """Tell whether a run's adapter is exported as one file: kohya's scripts read and write such."""
    return (
        cfg.adapter.type in FACTORED
        and "ckpt" in row_of(cfg).layouts
        and cfg.save.naming == "kohya"
        and cfg.save.model_as in (None, "ckpt", "safetensors")
    )


def _export_lora(
    family: BaseFamily, pairs: Mapping[LayerKey, LoraPair], path: Path, dtype: torch.dtype | None,
    metadata: Mapping[str, str],
) -> Path:  # fmt: skip
    """Write a LoRA or DoRA: a folder with all layouts, or kohya's file at his entry points."""
    section = family.cfg.adapter
    facts: dict[str, Any] = {"targets": section.target_modules, "dtype": dtype, "metadata": dict(metadata)}
    if as_one_file(family.cfg):
        return write_layout(
            family, pairs, "kohya", path.with_name(f"{path.name}.safetensors"), facts_of(pairs, **facts)
        )
    rank, root = section.rank, section.use_rslora
    return write_adapter(
        family, pairs, path, rank=rank, alpha=_alpha(section), name=path.name, use_rslora=root, **facts
    )


def pairs_of(family: BaseFamily, tensors: Mapping[str, Mapping[str, Tensor]], parts: Parts) -> dict[LayerKey, LoraPair]:
    """Return the two factors of every layer with its alpha, by part and plain name."""
    section, pairs = family.cfg.adapter, dict[LayerKey, LoraPair]()
    for part, named in tensors.items():
        layers = list(adapted_layers(parts.root.get_submodule(part)))
        alphas = ranks_of(section, layers).alpha
        for layer in layers:
            names = [f"{layer}.lora_{side}.{ADAPTER}.weight" for side in "AB"]
            a, b = (named[name] for name in names)
            lengths = named.get(f"{layer}.lora_magnitude_vector.{ADAPTER}.weight")
            pairs[part, layer] = LoraPair(names, a, b, alphas[layer], section.use_rslora, lengths)
    return pairs


# --- from files


def fuse(family: BaseFamily, root: DenoiserRoot) -> list[str]:
    """Add adapters to the weights that are only held; return a sentence for each. Raises ConfigFault where one does not fit."""
    modules = {family.folder(part): root.get_submodule(part) for part in family.in_root}
    return [
        (fuse_by_peft if kind_in(choice.path) else merge_adapter)(choice, family, modules)
        for choice in fused_adapters(family.cfg)
    ]


def fused_adapters(cfg: TrainConfig) -> list[AdapterChoice]:
    """Return the adapters that are added to a run's weights before training."""
    flag = option("adapter.fuse_adapters")
    words = [scaled(word) for word in cfg.adapter.fuse_adapters]
    return [AdapterChoice(Path(expanded(path)), 1.0 if scale is None else scale, flag) for path, scale in words]


def fused_fingerprints(cfg: TrainConfig) -> dict[str, str]:
    """Hash the adapters that are added to weights: with others they are another base."""
    made = {}
    for number, choice in enumerate(fused_adapters(cfg), start=1):
        files = sorted(choice.path.rglob("*.safetensors")) if choice.path.is_dir() else [choice.path]
        hashes = [hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() for file in files]
        made[f"fused adapter {number}"] = hashed(choice.scale, hashes)
    return made


def existing_adapter(family: BaseFamily) -> Adapter:
    """Read the adapter that training goes on from. Raises ConfigFault."""
    path = Path(expanded(family.cfg.adapter.init_from_existing or ""))
    return read_adapter(AdapterChoice(path, 1.0, option("adapter.init_from_existing")), family)


def existing_values(family: BaseFamily, part: str, module: nn.Module, adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter's factors as the file has them that training goes on from, by their names in a part.

    What the file says of alpha goes into the second factor where it is another. Raises ConfigFault where layers or ranks
    are not those of the configuration.
    """
    section, layouts = family.cfg.adapter, AdapterLayouts(family)
    folder, layers = family.folder(part), adapted_layers(module)
    ranks, differing, known = ranks_of(section, list(layers)), [], set()
    for name in layers:
        key = folder, layouts.layer(folder, name)
        known.add(key)
        pair, base = adapter.pairs.get(key), cast("Any", layers[name]).base_layer
        shape = getattr(base, "wide_shape", base.weight.shape)  # of one that is stored in few bits
        if pair is None or pair.a is None or pair.b is None or pair.delta(shape) is None:
            differing.append(f"{name} has none")
        elif pair.rank != ranks.rank[name]:
            differing.append(f"{name} has rank {pair.rank} there and {ranks.rank[name]} here")
        elif (pair.lengths is not None) != (section.type == "dora"):
            differing.append(f"{name} is {'LoRA' if pair.lengths is None else 'DoRA'} there")
        else:
            own = LoraPair([], pair.a, pair.b, ranks.alpha[name], section.use_rslora)
            yield f"{name}.lora_A.{ADAPTER}.weight", pair.a.float()
            yield f"{name}.lora_B.{ADAPTER}.weight", pair.b.float() * (pair.plain_alpha / own.plain_alpha)
            if pair.lengths is not None:
                yield f"{name}.lora_magnitude_vector.{ADAPTER}.weight", pair.lengths.float()
    differing += [f"{'.'.join(key)} gets none here" for key in adapter.pairs if key[0] == folder and key not in known]
    left = sorted({key[0] for key in adapter.pairs} - {family.folder(part) for part in family.in_root})
    if left and part == family.denoiser:
        log.warning("%s: what it has of %s is left out, as no adapter is trained there", adapter.path, ", ".join(left))
    if differing:
        what = f"{adapter.path} is of other layers or ranks: {'; '.join(differing[:3])}"
        what += f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ConfigFault(
            [
                Fault(
                    option("adapter.init_from_existing"),
                    what,
                    "give rank, target_modules and rank_pattern as it has them",
                )
            ]
        )


# --- what is said at start


def adapter_notes(family: BaseFamily, root: DenoiserRoot) -> list[str]:
    """Say which adapters are trained."""
    section, notes = family.cfg.adapter, list[str]()
    if section.type is None:
        return notes
    title = kind_of(section).title
    for part in family.in_root:
        module = root.get_submodule(part)
        if layers := adapted_layers(module):
            count = sum(param.numel() for name, param in module.named_parameters() if is_adapter(name))
            rank = f" of rank {section.rank}" if section.type != "ia3" else ""
            notes.append(f"{title}{rank} in {len(layers)} layers of the {part}: {count:,} weights are trained")
    return notes
