"""What weights are, in a few letters: read from where they lie, a tensor at a time, and no file twice.

A hash is kept in the user's cache folder beside what the system says of the files that it was made from. The change
time is part of that: no program can set it, so other weights are noticed under the same name, size and date too.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from difftrain.config.paths import user_cache
from difftrain.contracts import ConfigFault, Fault
from difftrain.io.files import write_text

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "fingerprints"
_VERSION = 1
_SETTLED_NS = 2_000_000_000  # a file may change again within the resolution of its times: what is younger is not kept
_READS = 3
Stamp = list[int]


def hashed(*parts: object) -> str:
    """Hash texts and numbers as they are written."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def of_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """Hash tensors by name, dtype, shape and bits; their order does not count."""
    import torch

    hashes = []
    for name, tensor in named:
        state = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
        state.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        hashes.append(state.hexdigest())
    return hashed(*sorted(hashes))


def of_files(files: Sequence[Path], what: str, compute: Callable[[], str], since: Sequence[Stamp] | None = None) -> str:
    """Return what `compute` makes of files, from the user's cache folder where they are the ones it was made of.

    what: names which part of them is looked at. since: what the files were when they were opened, where they are kept open.
    Raises ConfigFault where a file is changed while it is read.
    """
    paths = [os.path.realpath(file) for file in files]
    for _ in range(_READS):
        before = [stamp(file) for file in files]
        if since is not None and _content(before) != _content(since):
            break
        # machines may share the folder and not the files: each finds its own
        file = user_cache() / FOLDER / f"{hashed(_VERSION, what, paths, before)}.txt"
        known = _read(file)
        if known:
            return known
        digest, now = compute(), time.time_ns()
        if before == [stamp(file) for file in files]:
            if all(now - max(modified, changed) > _SETTLED_NS for _, modified, changed, _ in before):
                _write(file, digest)
            return digest
    raise ConfigFault(
        [Fault(", ".join(map(str, files)), "changed while it was read", "start again once it is complete")]
    )


def _content(stamps: Sequence[Stamp]) -> list[Stamp]:
    """Leave the change times out: they move with every second name that an export gives to a file."""
    return [[size, modified, number] for size, modified, _, number in stamps]


def stamp(file: Path) -> Stamp:
    """Return what tells a file's content from any other that it had: size, both times, and which file it is."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _read(path: Path) -> str:
    """Return what was kept; nothing where it is not a whole hash."""
    try:
        content = path.read_bytes()
    except OSError:
        return ""
    return content.decode() if re.fullmatch(rb"[0-9a-f]{32}", content) else ""


def _write(path: Path, content: str) -> None:
    """Keep a hash; where that cannot be done it is made again the next time."""
    with suppress(OSError):
        write_text(path, content)
