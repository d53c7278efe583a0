"""Which family a folder or a file of weights is of, and what it predicts, without a tensor or torch being read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from difftrain.config.parse_text_to_image import WeightsIdentity
from difftrain.io.files import open_regular, read_json_object
from difftrain.models.registry import FAMILIES
from difftrain.models.row import FamilyRow
from difftrain.models.weights.infer import looks_like

INDEX, SCHEDULER = "model_index.json", "scheduler/scheduler_config.json"
_MOST = 100 << 20  # bytes of a header, beyond which a file is no safetensors
# the process that is trained (difftrain/diffusion/ddpm.py), in the words of a scheduler's file
_TRAINED = {
    "num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
    "trained_betas": None,
}  # fmt: skip

Read = Callable[[str], "Mapping[str, Any] | None"]  # a JSON file by its path in the folder; None: it is not there


def identify(path: str) -> WeightsIdentity:
    """Look at a folder of diffusers, or one file of the original layout."""
    location = Path(path).expanduser()
    if location.is_dir():
        return of_folder(lambda name: read_object(location / name))
    if location.suffix.lower() != ".safetensors":
        return WeightsIdentity()
    title = looks_like(_shapes(location))
    families = [name for name, row in FAMILIES.items() if row.title == title]
    if families:
        return WeightsIdentity(families[0])
    what, remedy = f"{location.name} looks like {title}", "give a diffusers folder, or a file of the original layout"
    return WeightsIdentity(faults=((what, remedy),))


def of_folder(read: Read) -> WeightsIdentity:
    """Do so for a folder of diffusers, wherever its files are."""
    index = read(INDEX)
    if index is None:
        return WeightsIdentity(faults=((f"there is no {INDEX}", "give a folder that diffusers has written"),))
    pipeline = str(index.get("_class_name", ""))
    rows = {name: row for name, row in FAMILIES.items() if row.pipeline == pipeline}
    named = [name for name, row in rows.items() if is_told(row, read)]
    if not named:
        known = ", ".join(dict.fromkeys(row.pipeline for row in FAMILIES.values() if row.objective == "ddpm"))
        return WeightsIdentity(faults=((f"it is a {pipeline or 'pipeline without a name'}", f"supported are {known}"),))

    # what it predicts, and whether it was trained on the noise that is made here
    scheduler = read(SCHEDULER) or {}
    prediction = str(scheduler.get("prediction_type") or "epsilon")
    faults = []
    if prediction not in ("epsilon", "v_prediction"):
        faults.append((f"{SCHEDULER} says prediction_type {prediction}", "epsilon or v_prediction"))
    for key, value in _TRAINED.items():
        if rows[named[0]].objective == "ddpm" and scheduler.get(key, value) != value:
            faults.append((f"{SCHEDULER} says {key} {scheduler[key]}", f"supported here is {key} {value}"))
    return WeightsIdentity(named[0], prediction, tuple(faults))


def is_told(row: FamilyRow, read: Read) -> bool:
    """Tell a family from others of its pipeline by an argument of a part."""
    return all(_is(argument, value, read) for argument, value in row.told_by)


def _is(path_of_marker: str, expected: Any, read: Read) -> bool:
    part, _, argument = path_of_marker.partition(".")
    config = read(f"{part}.json" if part == "model_index" else f"{part}/config.json") or {}
    value = config.get(argument, False)
    return bool((bool(value) if isinstance(expected, bool) else value) == expected)


def read_object(path: Path) -> Mapping[str, Any] | None:
    """Read a JSON object; None where there is none."""
    return read_json_object(path)


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes from a safetensors header; nothing where there is none."""
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length < _MOST else {}
        return {key: tuple(entry["shape"]) for key, entry in header.items() if key != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
