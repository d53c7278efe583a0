"""What the machine allows: files, shared memory, threads, and the variables that start a job."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from difftrain.contracts.errors import ConfigFault
from difftrain.device import host
from difftrain.device.health.finding import Context, Finding
from difftrain.distributed.launch import Launch

_SHARED = "/dev/shm"
_LEAST_SHARED_GIB = 1.0  # docker's default is 64 MiB
_FEW_FILES, _ENOUGH_FILES = 256, 4096


def check(context: Context) -> Iterator[Finding]:
    """Look at limits that end a run hours after its start."""
    about = host.describe()
    yield Finding("ok", f"{about['cores']} cores of {about['cpu']}, {about['memory_gib']} GiB of memory", about="host")
    yield from _files()
    yield from _shared()
    yield from _threads(int(about["cores"]))


def _files() -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _ENOUGH_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else min(hard, 65536)
        yield Finding(
            "wrong" if soft < _FEW_FILES else "note",
            f"a process may open {soft} files: workers, tars and caches of large data sets may need more",
            f"ulimit -n {most}",
            "files",
        )
    else:
        yield Finding("ok", f"a process may open {'any number of' if soft < 0 else soft} files", about="files")


def _shared() -> Iterator[Finding]:
    if not os.path.isdir(_SHARED):  # noqa: PTH112 - a macOS has none, and needs none
        return
    total = shutil.disk_usage(_SHARED).total / 2**30
    if total < _LEAST_SHARED_GIB:
        what = f"/dev/shm holds {total:.2f} GiB: workers hand batches over in it, and die of SIGBUS where it is full"
        remedy = "docker run --shm-size=16g; until then --max_data_loader_n_workers=0"
        yield Finding("note", what, remedy, "shared_memory")
    else:
        yield Finding("ok", f"/dev/shm holds {total:.1f} GiB", about="shared_memory")


def _threads(cores: int) -> Iterator[Finding]:
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    if text and not text.split(",")[0].isdecimal():
        yield Finding("wrong", f"OMP_NUM_THREADS={text} is no number", "unset it", "threads")
    elif text and int(text.split(",")[0]) > cores:
        what = f"OMP_NUM_THREADS={text}, and this process may use {cores} cores: threads wait for one another"
        yield Finding("note", what, f"export OMP_NUM_THREADS={cores}, or fewer for each of several ranks", "threads")


def launch(context: Context) -> Iterator[Finding]:
    """Judge the variables that say which rank a process is."""
    try:
        place = Launch.from_environment()
    except ConfigFault as error:
        for fault in error.faults:
            yield Finding("wrong", f"{fault.where}: {fault.what}", fault.remedy or "start with torchrun")
        return
    said = f"rank {place.rank} of {place.size}" if place.distributed else "no launcher: a single process"
    yield Finding("ok", f"launch variables: {said}")
