"""What one launch has done, over all starts of its ranks: torchrun starts them anew where one has died.

A launch is known by the torchruns of its machines. What has no torchrun has no launch: whoever starts it again, a script
perhaps, has typed the command again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from difftrain.checkpoint import RunRecord
from difftrain.contracts import ConfigFault
from difftrain.distributed.processes import launcher
from difftrain.distributed.ranks import Ranks

Launch = tuple[str, ...]  # the names of its torchruns: after a failure some may be others


def launch_of(ranks: Ranks) -> Launch:
    """Return the launch that these ranks are of. Every rank calls it."""
    return tuple(sorted({each for each in ranks.gather(launcher()) if each}))


def wrote(meta: Mapping[str, Any], launch: Launch) -> bool:
    """Tell whether a checkpoint is of this launch, by what it says of itself."""
    return not set(launch).isdisjoint(meta.get("launch", ()))


def began_last(folder: Path, launch: Launch) -> bool:
    """Tell whether the last session of a run was of this launch."""
    try:
        record = RunRecord.read(folder)
    except ConfigFault:  # another run's, which nobody has asked for
        return False
    return record is not None and bool(record.sessions) and wrote(record.sessions[-1], launch)
