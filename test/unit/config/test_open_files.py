"""The limit on open files: raised, refused or named."""

from __future__ import annotations

import errno
import resource

import pytest

from difftrain.config import open_files
from difftrain.config.door import guard
from difftrain.contracts import ConfigFault


class Limits:
    """Stand for the system's; what is set is kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        self.now = soft, hard
        monkeypatch.setattr(resource, "getrlimit", lambda _: self.now)
        monkeypatch.setattr(resource, "setrlimit", lambda _, both: setattr(self, "now", both))


def test_a_low_limit_is_raised_as_far_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    system = Limits(monkeypatch, 256, resource.RLIM_INFINITY)
    note = open_files.make_room(8)
    assert (
        system.now == (open_files.ENOUGH, resource.RLIM_INFINITY) and " 256 " in note and str(open_files.ENOUGH) in note
    )
    assert open_files.make_room(8) == "" and system.now[0] == open_files.ENOUGH


def test_a_limit_that_no_run_works_with_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    Limits(monkeypatch, 24, 100)
    with pytest.raises(ConfigFault) as refused:
        open_files.make_room(8)
    text = str(refused.value)
    assert "ulimit -n" in text and " 100 " in text and str(open_files.BASE + 8 * open_files.OF_A_WORKER) in text
    open_files.make_room(0)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        RuntimeError("unable to open shared memory: Too many open files (24)"),
    ],
)
def test_an_error_that_comes_from_it_names_it(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        try:
            raise error
        except Exception as cause:
            raise RuntimeError("worker failed") from cause

    assert guard("door.py", work) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said and "ulimit -n" in said and said.count("\n") == 1
    assert open_files.met(ValueError("another")) == ""


def test_the_machines_own_limit_is_told_apart() -> None:
    assert (
        "fs.file-max" in open_files.met(OSError(errno.ENFILE, "x")) and open_files.met(OSError(errno.ENOENT, "x")) == ""
    )
