"""Whether a checkpoint is of a model and of its optimizer: what an engine wrote about itself, and every way in which they differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.config.paths import toml_entry_point
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault

if TYPE_CHECKING:
    from difftrain.checkpoint.tensor_files import CheckpointReader

ENGINE_FILE, FORMAT = "engine.json", 1


def engine_file(path: Path) -> dict[str, Any] | None:
    """Read what the engine wrote about itself, or None where this machine has no such file."""
    try:
        return json.loads((path / ENGINE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def check_compatibility(
    path: Path,
    about: Mapping[str, Any],
    weights: CheckpointReader,
    states: Mapping[str, Any] | None,
    own: Mapping[str, tuple[int, ...]],
    trained: Iterable[str],
    optimizer: str,
) -> None:
    """Raise ConfigFault with every way in which a checkpoint is not of this model and this optimizer.

    own: the shapes of this model's weights. states: None where the optimizer begins anew.
    """
    if about["format"] > FORMAT:
        raise ConfigFault([Fault(option("save.resume"), f"{path} is of a newer version (format {about['format']})")])

    # states are compared only where weights and optimizer agree: else they differ anyway
    parted = _parted("weights", own, weights.shapes)
    same = states is None or about["optimizer"] == optimizer
    if states is not None and same and not parted:
        parted = _parted("optimizer states", dict.fromkeys(trained), dict.fromkeys(states))

    # all differences are said at once, each with its remedy
    remedy = "give a folder of this model and this optimizer"
    faults = [
        Fault(option("save.resume"), f"{path} is a resume folder of another model: {difference}", remedy)
        for difference in parted
    ]
    if not same:
        what = f"{path} was trained with {about['optimizer']}, this run uses {optimizer}"
        remedy = f"use that one; {toml_entry_point()} --reset_optimizer continues with a new one"
        faults.append(Fault(option("save.resume"), what, remedy))
    if faults:
        raise ConfigFault(faults)


def _parted(what: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Say how two tables of names and shapes differ."""
    differences = []
    for word, names in (
        (f"{what} missing from it", sorted(own.keys() - saved.keys())),
        (f"{what} that this model does not have", sorted(saved.keys() - own.keys())),
        (f"{what} of another shape", sorted(name for name in own.keys() & saved.keys() if own[name] != saved[name])),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            differences.append(f"{len(names)} {word}: {', '.join(names[:3])}{more}")
    return differences
