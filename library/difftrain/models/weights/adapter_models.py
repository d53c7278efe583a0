"""The model that an adapter is for, and what is done with both: merging, and extraction from two models.

1. `identify_adapter` finds family and size by what a file says of itself, else by its names and shapes among all releases.
2. `ModelWeights` gives a model's tensors by our names, from a folder, a file of all parts, or one of the denoiser alone.
3. `merged_stream` and `merge_file` add W + scale alpha / rank B A, in fp32; `extract` takes the best of a rank of W' - W.
   Source: Eckart and Young 1936: that is the head of the singular value decomposition.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.config import TrainConfig
from difftrain.contracts import ConfigFault, Fault
from difftrain.device.quantised import widened
from difftrain.models.registry import DEFAULT, FAMILIES, make_family
from difftrain.models.weights.adapter_files import (
    AdapterChoice,
    AdapterFile,
    fitting,
    load_adapter,
    sort_adapter,
)
from difftrain.models.weights.adapter_layouts import AdapterLayouts, LayerKey, LoraPair, stems_of
from difftrain.models.weights.detect import class_of
from difftrain.models.weights.files import opened
from difftrain.models.weights.part_files import PREFIXES, PartFiles
from difftrain.models.weights.peft_merge import PeftMerge, kind_in
from difftrain.models.weights.writers import SAFETENSORS_NAMES, safetensors_writer

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.models.base import BaseFamily


TINY = "tiny"  # a size that every family ships


# ------------------------------------------------------------------ which model an adapter is for


def identify_adapter(
    choice: AdapterChoice, file: AdapterFile, name: str = ""
) -> tuple[AdapterLayouts, dict[LayerKey, LoraPair]]:
    """Find the family and the size that an adapter is for. name: of the family, where it is known. Raises ConfigFault."""
    fits: dict[str, tuple[AdapterLayouts, dict[LayerKey, LoraPair]]] = {}
    refusals: list[ConfigFault] = []
    names = [name] if name else _named_by(file)
    for candidate in names or [one for one in FAMILIES if _may_be(one, file)]:
        for layouts in _sizes_of(candidate):
            try:
                adapter = sort_adapter(choice, file, layouts, by_diffusers=bool(names))
                fits[candidate] = layouts, fitting(choice, adapter, layouts)
                break
            except ConfigFault as fault:
                refusals.append(fault)
    if name and not fits:
        raise refusals[0]
    # a family that stands on another has the names of its tensors: it is chosen by its own name
    kinds = {candidate: class_of(candidate) for candidate in fits}
    first = [
        one for one, kind in kinds.items() if not any(kind is not k and issubclass(kind, k) for k in kinds.values())
    ]
    if len(first) == 1:
        return fits[first[0]]
    what = f"{file.path} may be {' or '.join(first)}'s" if first else f"{file.path} is of no family's released sizes"
    remedy = "name it with --family" if first else "name its family with --family, and give its model as --base"
    raise ConfigFault([Fault(choice.flag, what, remedy)])


def _named_by(file: AdapterFile) -> list[str]:
    """Return the families that a header names, in ModelSpec's words or kohya's."""
    architecture = file.header.get("modelspec.architecture", "").removesuffix("/lora")
    base = file.header.get("ss_base_model_version", "")
    names = []
    for name in FAMILIES:
        kind = class_of(name)
        if architecture == (kind.modelspec or name) or (base and base == (kind.kohya_name or name)):
            names.append(name)
    return names


def _may_be(name: str, file: AdapterFile) -> bool:
    """Tell whether a family has layers of these names, but for the numbers of blocks: a tiny one is built for it."""
    family: Any = make_family(TrainConfig.model_validate({"model": {"family": name, "init_from_config": TINY}}))
    stems = stems_of(file.tensors[""])
    return bool(stems) and {*map(_unnumbered, stems)} <= {*map(_unnumbered, AdapterLayouts(family).index(stems))}


def _unnumbered(name: str) -> str:
    return re.sub(r"(?<=[._])\d+(?=[._]|$)", "{}", name)


def _sizes_of(name: str) -> Iterator[AdapterLayouts]:
    """Yield the layers of a family in its releases and shipped sizes. Nothing of its weights is needed for names."""
    family: Any = make_family(TrainConfig.model_validate({"model": {"family": name, "init_from_config": TINY}}))
    row = FAMILIES[name]

    # --- releases: a size that is shipped, or the tiny one with the denoiser's numbers and the CLIP encoders of SDXL
    stored = resources.files("difftrain.models").joinpath("releases", f"{name}.json")
    releases = json.loads(stored.read_text("utf-8"))["releases"].values() if stored.is_file() else ()
    clips = dict(
        zip(("clip_l", "clip_g"), (_shipped(DEFAULT, "base")[part] for part in ("text_encoder", "text_encoder_2")))
    )
    texts = {
        family.folder(text.part): clips[kind]
        for text, kind in zip(family.texts, row.encoders, strict=True)
        if kind in clips
    }
    own = []
    for release in releases:
        numbers = {} if "size" in release else texts | _denoiser_of(release, row.denoiser)
        own.append(_shipped(name, release.get("size", TINY)) | numbers)

    # --- then other shipped sizes, small ones last
    for sizes in (*own, *(_shipped(name, size) for size in sorted(row.sizes, key=lambda size: size in (TINY, "demo")))):
        yield AdapterLayouts(family, {key: value for key, value in sizes.items() if isinstance(value, dict)})


def _shipped(name: str, size: str) -> dict[str, Any]:
    text = resources.files("difftrain.models").joinpath("sizes_shipped", f"{name}.{size}.json").read_text("utf-8")
    return dict(json.loads(text))


def _denoiser_of(release: Mapping[str, Any], denoiser: str) -> dict[str, Any]:
    """Return the section of a release's denoiser: what it does not say is its class's default."""
    return {denoiser: dict(release.get("sizes", {}).get(denoiser, {}))}


# ------------------------------------------------------------------ weights of a model


@dataclass
class ModelWeights:
    """A model's tensors by our names. path: where it lies. complete: with all its parts."""

    path: Path
    family: BaseFamily
    layouts: AdapterLayouts
    complete: bool
    reader: PartFiles | None = None

    @classmethod
    def at(cls, path: Path, flag: str, name: str, *, complete: bool) -> ModelWeights:
        """Open a model of a family. complete: it has all parts, else it is a file of the denoiser's. Raises ConfigFault."""
        if complete:
            model = {"family": name, "pretrained": str(path)}
            family: Any = make_family(TrainConfig.model_validate({"model": model}))
            return cls(path, family, AdapterLayouts(family), True)
        family = make_family(TrainConfig.model_validate({"model": {"family": name, "init_from_config": TINY}}))
        part = family.denoiser
        reader = PartFiles(path, family.parts[part], flag, rule=family.rule(part), infer=type(family).infer)
        layouts = AdapterLayouts(family, {family.folder(part): reader.sizes()})
        if problems := reader.faults(layouts.module(family.folder(part))):
            raise ConfigFault(problems)
        return cls(path, family, layouts, False, reader)

    def weights(self, folder: str) -> Iterator[tuple[str, Tensor]]:
        """Give the tensors of a part, one at a time, in the order of its module."""
        module = self.layouts.module(folder)
        if self.reader is not None:
            return widened(self.reader.weights(module))
        return widened(self.family.source.weights(self.layouts.part(folder), module))


# ------------------------------------------------------------------ merging


def products_of(
    choices: Sequence[tuple[AdapterChoice, AdapterFile]], layouts: AdapterLayouts
) -> Callable[[str, str, Tensor], Tensor | None]:
    """Return what adapters make of a layer's weight, by folder and name, in fp32: None where nothing.

    What is added is added first, then rows get their lengths (DoRA). Raises ConfigFault where one does not fit.
    """
    merged: dict[LayerKey, list[tuple[float, LoraPair]]] = {}
    for choice, file in choices:
        for key, pair in fitting(choice, sort_adapter(choice, file, layouts), layouts).items():
            merged.setdefault(key, []).append((choice.scale, pair))

    def changed(folder: str, name: str, weight: Tensor) -> Tensor | None:
        pairs = merged.get((folder, layouts.layer(folder, name)), [])
        products = [(scale, pair.delta(weight.shape)) for scale, pair in pairs if pair.lengths is None]
        added = [scale * product for scale, product in products if product is not None]
        made = weight.float() + sum(added[1:], added[0]) if added else None
        for scale, pair in pairs:
            if pair.lengths is not None:
                made = pair.changed(weight if made is None else made, scale)
        return made

    return changed


Change = Callable[[str, str, "Tensor"], "Tensor | None"]  # folder, name of a tensor, value -> what it becomes, in fp32


def changes_of(choices: Sequence[AdapterChoice], layouts: AdapterLayouts) -> Change:
    """Return what adapters of all kinds make of a tensor: products are added first, others follow one after another.

    Raises ConfigFault where one does not fit.
    """
    others = [PeftMerge(choice, layouts) for choice in choices if kind_in(choice.path)]
    products = [(choice, load_adapter(choice)) for choice in choices if not kind_in(choice.path)]
    changed_by_products = products_of(products, layouts)

    def change(folder: str, name: str, value: Tensor) -> Tensor | None:
        made: Tensor | None = None
        layer = name.removesuffix(".weight")
        if layer != name and value.ndim > 1:
            made = changed_by_products(folder, layer, value)
        for other in others:
            changed = other(folder, name, value if made is None else made)
            made = made if changed is None else changed
        return made

    return change


def merged_stream(
    family: BaseFamily, weights: Iterable[tuple[str, Tensor]], change: Change
) -> Iterator[tuple[str, Tensor]]:
    """Give a model's weights with what adapters make of them; fp32 where they do."""
    for full, value in weights:
        part, _, name = full.partition(".")
        made = change(family.folder(part), name, value)
        yield full, value if made is None else made


def merge_file(
    model: ModelWeights,
    change: Change,
    output: Path,
    dtype: torch.dtype | None,
) -> Path:
    """Write a file of the denoiser's once more, with what adapters add; names, header and precision stay."""
    assert model.reader is not None
    folder = model.layouts.denoiser
    file = opened(model.path, model.reader.flag)
    places = model.reader.key_map(model.layouts.module(folder))
    prefix = next((prefix for prefix in PREFIXES if any(key.startswith(prefix) for key in file.shapes())), "")
    kinds = {key: file.get(key).dtype for key in file.shapes()}
    kept = {key: dtype if dtype and kind.is_floating_point else kind for key, kind in kinds.items()}
    if odd := next((key for key, kind in kept.items() if kind not in SAFETENSORS_NAMES), None):
        what = f"{model.path} holds weights of 8 bits ({odd}), to which nothing can be added"
        raise ConfigFault([Fault(model.reader.flag, what, "--save_precision=bf16 writes them wider")])
    with safetensors_writer(
        output, {key: (kept[key], shape) for key, shape in file.shapes().items()}, dict(file.metadata)
    ) as writer:
        for key in file.shapes():
            value, members = file.get(key), places.members.get(key.removeprefix(prefix), [])
            ours = {name: places.restored(name, value) for name in members}
            made = {name: change(folder, name, one) for name, one in ours.items()}
            if any(one is not None for one in made.values()):
                wide = {name: ours[name].float() if one is None else one for name, one in made.items()}
                value = places.joined(key.removeprefix(prefix), wide)
            writer.write(key, value)
    return output


# ------------------------------------------------------------------ extraction


@dataclass(frozen=True)
class Extracted:
    """An adapter out of two models. shares: of the squared difference, what it holds of its layers', and they of all."""

    pairs: dict[LayerKey, LoraPair]
    share: float
    inside: float


def extract(
    tuned: ModelWeights, base: ModelWeights, rank: int, targets: Mapping[str, Sequence[str]], device: torch.device,
    report: Callable[[str], None] = lambda layer: None,
) -> Extracted:  # fmt: skip
    """Take the product of a rank that is nearest to the difference of each target's weights.

    targets: leaves of the names of layers, by folder. device: where singular values are computed. Raises ConfigFault where
    two models are not of one size, or are equal.
    """
    pairs: dict[LayerKey, LoraPair] = {}
    kept = among = total = 0.0
    for folder, leaves in targets.items():
        ends = tuple(f".{leaf}" for leaf in leaves)
        for (name, after), (same, before) in zip(tuned.weights(folder), base.weights(folder), strict=True):
            if name != same or after.shape != before.shape:
                what = f"{tuned.path} has other shapes than {base.path}: {name} is {tuple(after.shape)}"
                raise ConfigFault(
                    [Fault("--base", f"{what}, there {tuple(before.shape)}", "give the model it was trained from")]
                )
            if not after.is_floating_point():
                continue
            difference = after.float() - before.float()
            square = float(difference.double().square().sum())
            total += square
            layer = name.removesuffix(".weight")
            if not square or layer == name or after.ndim != 2 or not layer.endswith(ends):
                continue
            report(layer)
            left, values, right = torch.linalg.svd(difference.to(device), full_matrices=False)
            own = min(rank, len(values))
            root = values[:own].sqrt()
            a, b = root[:, None] * right[:own], left[:, :own] * root
            pairs[folder, tuned.layouts.layer(folder, layer)] = LoraPair([], a.cpu(), b.cpu().contiguous(), float(own))
            among += square
            kept += float(values[:own].double().square().sum())
    if not pairs:
        what = f"{tuned.path} differs from {base.path} in no layer that an adapter goes to"
        raise ConfigFault([Fault("--extract_from", what, "give a model that was trained from --base")])
    return Extracted(pairs, kept / among, among / total)
