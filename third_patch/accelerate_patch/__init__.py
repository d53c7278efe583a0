"""accelerate 1.15: fairscale's OSS and ShardedDDP through `prepare`, exact resume in mid-epoch, states that are whole."""

from __future__ import annotations

from collections.abc import Iterator

from ..patching import Change, Patch


def _changes() -> Iterator[Change]:
    from . import resume, sharded

    yield from sharded.changes()
    yield from resume.changes()


PATCH = Patch("accelerate", "1.15", "1.16", "it prepares fairscale's OSS, and resumes exactly in mid-epoch", _changes)
apply, revert = PATCH.apply, PATCH.revert
