"""fairscale 0.4.13 on torch 2 and on devices that are no CUDA: OSS, ShardedDDP and ShardedGradScaler mended.

fairscale is not developed any more, so the faults have no upstream fix to wait for. Its FSDP is left alone: torch's own
has replaced it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..patching import Change, Patch


def _changes() -> Iterator[Change]:
    from . import oss, scaler, sharded_ddp

    yield from oss.changes()
    yield from sharded_ddp.changes()
    yield from scaler.changes()


PATCH = Patch(
    "fairscale", "0.4.13", "0.4.14", "OSS, ShardedDDP and its gradient scaler train right on any device", _changes
)
apply, revert = PATCH.apply, PATCH.revert
