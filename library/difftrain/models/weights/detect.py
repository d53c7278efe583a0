"""Which family a file or folder of weights is of, from what lies in it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.io.files import read_regular
from difftrain.models.registry import FAMILIES
from difftrain.models.weights.identify import is_told, read_object

INDEX = "model_index.json"


@dataclass(frozen=True)
class DetectedFamily:
    """A family, and whether a file holds the whole model; else it is the denoiser's alone."""

    name: str
    is_whole: bool = True


def family_of_folder(folder: Path, flag: str) -> str:
    """Return the family of a diffusers folder, as its model_index.json says it; imports no torch. Raises ConfigFault."""
    try:
        content = json.loads(read_regular(folder / INDEX, 1 << 26))
        pipeline = str(content.get("_class_name", "nothing"))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigFault(
            [Fault(flag, f"{folder / INDEX} cannot be read: {error}", "fetch the folder again")]
        ) from None
    # a pipeline of another task has the name of the family's before it: StableDiffusionXLImg2ImgPipeline
    stems = {row.pipeline.removesuffix("Pipeline"): name for name, row in FAMILIES.items()}
    fitting = [stem for stem in stems if pipeline.startswith(stem)]
    same = {name: row for name, row in FAMILIES.items() if row.pipeline == pipeline}
    # what several families draw with, one of them is told from the others by
    exact = [name for name, row in same.items() if is_told(row, lambda file: read_object(folder / file))] or list(same)
    if not exact and not fitting:
        known = ", ".join(row.pipeline for row in FAMILIES.values())
        raise ConfigFault([Fault(flag, f"{folder} holds {pipeline}", f"known are {known}")])
    named = _family_beside(folder)
    if named in (*exact, *(stems[stem] for stem in fitting)):
        return named
    return exact[0] if exact else stems[max(fitting, key=len)]


def _family_beside(folder: Path) -> str:
    """Return the family that an export of ours names beside its index, where families share a pipeline."""
    return str((read_object(folder / "difftrain.json") or {}).get("family", ""))


def family_of_file(file: Path, flag: str) -> DetectedFamily:
    """Return the family of a single file, by its header or its tensors' names. Raises ConfigFault with what it looks like."""
    from difftrain.models.weights.files import opened
    from difftrain.models.weights.infer import looks_like
    from difftrain.models.weights.part_files import SIZES

    weights = opened(file, flag)
    shapes = weights.shapes()
    try:
        sizes = json.loads(weights.metadata.get(SIZES, "{}"))
    except (ValueError, RecursionError):
        sizes = {}
    if isinstance(sizes, dict) and isinstance(sizes.get("family"), str) and sizes["family"] in FAMILIES:
        return DetectedFamily(str(sizes["family"]), _has_all_parts(class_of(sizes["family"]), shapes))
    fits = list(_fitting(shapes))
    # a family that stands on another has the names of its tensors: it is chosen by its own name
    fits = [one for one in fits if not any(other != one and _stands_on(one, other) for other in fits)]
    if len(fits) == 1:
        return fits[0]
    looks = looks_like(shapes)
    if fits:
        what, remedy = f"{file} may be {' or '.join(one.name for one in fits)}", "choose one with --family"
    elif "adapter" in looks:
        what, remedy = f"{file} looks like {looks}", "give it as --adapter, with its model as --weights"
    else:
        what = f"{file} looks like {looks}"
        remedy = (
            f"complete models of {', '.join(FAMILIES)} are read, or with --base only a denoiser (--family names it)"
        )
    raise ConfigFault([Fault(flag, what, remedy)])


def is_complete(file: Path, flag: str, name: str) -> bool:
    """Tell whether a file holds all parts of a family's model, and not the denoiser alone. Raises ConfigFault."""
    from difftrain.models.weights.files import opened

    facts = class_of(name)
    return facts.one_file is not None and _has_all_parts(facts, opened(file, flag).shapes())


def _stands_on(one: DetectedFamily, other: DetectedFamily) -> bool:
    return class_of(one.name) is not class_of(other.name) and issubclass(class_of(one.name), class_of(other.name))


def _fitting(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[DetectedFamily]:
    """Yield every family whose layout these names and shapes have."""
    from difftrain.models.weights.part_files import PREFIXES

    prefix = next((known for known in PREFIXES if any(key.startswith(known) for key in shapes)), "")
    bare = {key.removeprefix(prefix): shape for key, shape in shapes.items() if key.startswith(prefix)}
    for name in FAMILIES:
        facts: Any = class_of(name)
        if facts.one_file is not None and _has_all_parts(facts, shapes):
            yield DetectedFamily(name)
        elif facts.infer is not None:
            try:
                facts.infer(bare)
            except (KeyError, ValueError, IndexError, ZeroDivisionError):
                continue
            yield DetectedFamily(name, is_whole=False)


def _has_all_parts(facts: Any, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether something of every part lies in a file; the layout of no family but such is told by its parts."""
    prefixes = facts.one_file.prefixes.values() if facts.one_file is not None else ()
    return all(any(key.startswith(prefix) for key in shapes) for prefix in prefixes)


def class_of(name: str) -> Any:
    """Import the class of a family."""
    module, _, attribute = FAMILIES[name].target.partition(":")
    return getattr(importlib.import_module(module), attribute)
