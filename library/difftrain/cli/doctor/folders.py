"""The folders of data, caches and results: whether they can be used, room, and what kind of disk they are on."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from difftrain.config.paths import is_url, shown_url, unreadable_url
from difftrain.device.health import Context, HealthFinding

# kinds as mountinfo calls them; fuse.* are added
NETWORK = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "glusterfs", "beegfs", "gpfs", "9p", "afs", "dpc", "pvfs2",
    "virtiofs", "efs", "wekafs", "juicefs",
}  # fmt: skip
# A checkpoint of SDXL with its optimizer in fp32 is about 42 GB, and the last two are kept.
_LEAST_GIB = {"output": 90.0, "cache": 5.0}
_FULL_GIB = 0.5
_ANOTHER = "or give another folder with its flag"
_PROBE = b"\0" * (1 << 20)
_FEW_INODES = 10_000


def check(context: Context) -> Iterator[HealthFinding]:
    """Look at the folders that were given, and at the user's cache folder."""
    if context.data_dir:
        yield from _readable(Path(context.data_dir))
    folder = context.cache_dir
    if folder and is_url(folder):
        fault = unreadable_url(folder)
        what, remedy = fault or (f"{shown_url(folder)} is read-only, and tested when a run starts", "")
        yield HealthFinding("wrong" if fault else "ok", f"--cache_dir: {what}", remedy, "cache_url")
        folder = None
    cache = folder or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    yield from _writable(Path(cache), "cache", "--cache_dir" if folder else "the user's cache folder")
    if context.output_dir:
        yield from _writable(Path(context.output_dir), "output", "--output_dir")


def _readable(folder: Path) -> Iterator[HealthFinding]:
    start = time.monotonic()
    try:
        with os.scandir(folder) as entries:
            first = [entry for entry, _ in zip(entries, range(1000))]
        for entry in first[:20]:
            if entry.is_file():
                with Path(entry.path).open("rb") as file:
                    file.read(1)
    except OSError as error:
        at = error.filename or folder
        remedy = "give the folder of the images, and make it readable for this user"
        yield HealthFinding("wrong", f"--train_data_dir: {at} cannot be read: {error.strerror}", remedy, "data")
        return
    if not first:
        yield HealthFinding("wrong", f"--train_data_dir: {folder} is empty", "give the folder of the images", "data")
        return
    took = time.monotonic() - start
    text = (
        f"{folder} can be read, {len(first)}{' or more' if len(first) == 1000 else ''} entries in {took * 1e3:.0f} ms"
    )
    yield HealthFinding("ok", text, about="data")
    yield from _disk(folder, "data")


def _writable(folder: Path, about: str, flag: str) -> Iterator[HealthFinding]:
    """Write, sync, read and delete a file; a folder that is still to be made is judged by the one above it."""
    nearest = next((above for above in (folder.absolute(), *folder.absolute().parents) if above.exists()), Path("/"))
    word = f"{flag}: {folder}"
    if not nearest.is_dir():
        yield HealthFinding("wrong", f"{word} cannot be made: {nearest} is a file", _ANOTHER, about)
        return

    # permissions and quotas are known for certain only once something was written
    free = shutil.disk_usage(nearest).free / 2**30
    try:
        took = _try(nearest)
    except OSError as error:
        if free < _FULL_GIB:
            yield HealthFinding(
                "wrong", f"{word} cannot be written: the disk is full", f"free some space; {_ANOTHER}", about
            )
        else:
            what = f"{word} cannot be written: {error.strerror or 'what was read differs from what was written'}"
            yield HealthFinding("wrong", what, f"make it writable for this user; {_ANOTHER}", about)
        return

    # it can be written to: is there room for what will be?
    least = _LEAST_GIB[about]
    text = f"{word} can be {'written' if nearest == folder.absolute() else 'made'}, {free:.1f} GiB free, 1 MiB synced in {took * 1e3:.0f} ms"
    if free < _FULL_GIB:
        yield HealthFinding("wrong", f"{text}: the disk is full", f"free some space; {_ANOTHER}", about)
    elif free < least:
        what = "checkpoints of SDXL with their optimizer" if about == "output" else "indices and caches"
        yield HealthFinding("note", f"{text}: {what} may need {least:g} GiB", f"free some space; {_ANOTHER}", about)
    else:
        yield HealthFinding("ok", text, about=about)
    yield from _disk(nearest, about)


def _try(folder: Path) -> float:
    """Return the seconds that writing and syncing a file takes. Raises OSError."""
    start = time.monotonic()
    descriptor, name = tempfile.mkstemp(prefix=".difftrain-doctor-", dir=folder)
    renamed = f"{name}.renamed"
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_PROBE)
            file.flush()
            os.fsync(file.fileno())
        Path(name).rename(renamed)
        if Path(renamed).read_bytes() != _PROBE:
            raise OSError(f"{folder} returns other bytes than were written")
        return time.monotonic() - start
    finally:
        for path in (name, renamed):
            with contextlib.suppress(OSError):
                Path(path).unlink()


def _disk(folder: Path, about: str) -> Iterator[HealthFinding]:
    kind = kind_of(folder)
    if is_network(kind):
        what = f"{folder} is on a network disk ({kind}): its locks are not relied on; small files are slow there"
        remedy = {
            "data": "pack the images into tars, or copy them to a local disk",
            "cache": "a local disk is faster; each of several machines may have its own",
            "output": "fine where all machines see the same folder, which several machines need",
        }[about]
        yield HealthFinding("note", what, remedy, f"{about}_disk")
    with contextlib.suppress(OSError):
        inodes = os.statvfs(folder)
        if about != "data" and inodes.f_files and inodes.f_favail < _FEW_INODES:
            what = f"{folder}: the disk has room for {inodes.f_favail} more files only"
            yield HealthFinding("note", what, "delete small files there", f"{about}_files")


def kind_of(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the kind of file system that a folder is on, as the kernel calls it; "" where it does not say."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    real = os.path.realpath(folder)
    best, kind = -1, ""
    for line in lines:
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        mount = fields[4].replace("\\040", " ")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= best:  # of two mounts at one place the later hides the earlier
            best, kind = len(mount), right.split()[0]
    return kind


def is_network(kind: str) -> bool:
    """Tell whether a kind of file system lies behind a network, or a program that may."""
    return kind in NETWORK or kind.startswith("fuse.")
