"""What a launch finds in its output folder: nothing, its own unfinished run, or something that must make room."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from difftrain.config import TrainConfig

# Beside run.json, which only the machine of rank 0 has: what this machine started, and whether it ended well.
NOTE = "launch.json"


@dataclass(frozen=True)
class Occupant:
    """Say what is there. in_the_way: it must be moved aside first; running: it must not be touched."""

    sentence: str = ""
    in_the_way: bool = False
    running: bool = False


def look(output: Path, cfg: TrainConfig, world_size: int) -> Occupant:
    """Look at an output folder with the eyes of a launch of cfg."""
    from difftrain import checkpoint
    from difftrain.config.digest import digest
    from difftrain.contracts import ConfigFault

    if not output.is_dir():
        return Occupant()
    ours = digest(cfg, cfg.replicas(world_size))
    for nested in (output, *sorted(output.glob("node[0-9]*"))):
        try:
            checkpoint.Claim.acquire(nested, ours).release()
        except ConfigFault as fault:
            return Occupant(fault.faults[0].what, running=True)
    try:
        state = checkpoint.inspect(output, checkpoint.naming_of(cfg.save))
    except ConfigFault as fault:  # a record that cannot be read
        return Occupant(f"has a run that cannot be resumed ({fault.faults[0].what})", in_the_way=True)
    if isinstance(state, checkpoint.Finished | checkpoint.Unfinished):
        return _judge(state.record.config_digest == ours, isinstance(state, checkpoint.Finished))
    noted = read_note(output)
    if noted is not None:
        return _judge(noted.get("config_digest") == ours, bool(noted.get("finished")))
    if isinstance(state, checkpoint.Foreign):
        return Occupant("has files of another run", in_the_way=True)
    return Occupant()


def _judge(same: bool, finished: bool) -> Occupant:
    if finished:
        return Occupant("has a finished run" + ("" if same else " of another configuration"), in_the_way=True)
    if not same:
        return Occupant("has a run of another configuration", in_the_way=True)
    return Occupant("has an unfinished run of this configuration, which is resumed")


def read_note(output: Path) -> dict[str, object] | None:
    """Return the launcher's note of a folder."""
    try:
        content = json.loads((output / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_note(output: Path, config_digest: str, *, finished: bool) -> None:
    """Write the launcher's note of a folder."""
    content = {"config_digest": config_digest, "finished": finished}
    aside = output / (NOTE + ".tmp")
    aside.write_text(json.dumps(content) + "\n", encoding="utf-8")
    aside.replace(output / NOTE)
