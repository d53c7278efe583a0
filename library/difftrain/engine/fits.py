"""Whether a resume folder is one of this model and this optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.engine.snapshot import ENGINE_FILE

if TYPE_CHECKING:
    from difftrain.engine.shelf import Shelf

FORMAT = 1


def engine_file(path: Path) -> dict[str, Any] | None:
    """Read what the engine wrote about itself, or None where this machine has no such file."""
    try:
        return json.loads((path / ENGINE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def check_fits(
    path: Path,
    about: Mapping[str, Any],
    weights: Shelf,
    states: Mapping[str, Any] | None,
    own: Mapping[str, tuple[int, ...]],
    trained: Iterable[str],
    optimizer: str,
) -> None:
    """Raise ConfigFault with every way in which a checkpoint is not of this model and this optimizer.

    own: the shapes of this model's weights. states: None where the optimizer begins anew.
    """
    if about["format"] > FORMAT:
        raise ConfigFault([Fault("--resume", f"{path} is of a later version (format {about['format']})")])
    parted = _parted("weights", own, weights.shapes)
    same = states is None or about["optimizer"] == optimizer
    if states is not None and same and not parted:
        parted = _parted("optimizer states", dict.fromkeys(trained), dict.fromkeys(states))
    remedy = "give a folder of this model and this optimizer"
    faults = [Fault("--resume", f"{path} is a resume folder of another model: {each}", remedy) for each in parted]
    if not same:
        what = f"{path} was trained with {about['optimizer']}, this run uses {optimizer}"
        faults.append(Fault("--resume", what, "take that one; train.py --reset_optimizer goes on with a new one"))
    if faults:
        raise ConfigFault(faults)


def _parted(what: str, own: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Say how two tables of names and shapes differ."""
    said = []
    for word, names in (
        (f"{what} missing from it", sorted(own.keys() - found.keys())),
        (f"{what} that this model has not", sorted(found.keys() - own.keys())),
        (f"{what} of another shape", sorted(name for name in own.keys() & found.keys() if own[name] != found[name])),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            said.append(f"{len(names)} {word}: {', '.join(names[:3])}{more}")
    return said
