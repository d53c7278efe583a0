"""The file by which the end of a machine is announced."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from difftrain.config.parse_flags import parse
from difftrain.contracts import ConfigFault
from difftrain.train.triggers import NOTHING, PREEMPTED, STOP, NoticeFile, Requests


class Time:
    """A clock that moves a second each time it is read."""

    now = 100.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_a_file_that_appears_is_a_notice_and_stays_one(tmp_path: Path) -> None:
    notice = NoticeFile(tmp_path / "notice", Time())
    assert not notice.has_come()
    (tmp_path / "notice").touch()
    assert notice.has_come()
    (tmp_path / "notice").unlink()
    assert notice.has_come()


def test_a_file_of_an_earlier_run_counts_once_it_is_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "notice"
    path.touch()
    notice = NoticeFile(path, Time())
    assert str(path) in caplog.text
    assert not notice.has_come() and not notice.has_come()
    os.utime(path, ns=(10**18, 10**18))
    assert notice.has_come()


def test_a_file_of_an_earlier_run_that_is_taken_away_and_comes_back_counts(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    path.touch()
    status = path.stat()
    notice = NoticeFile(path, Time())
    path.unlink()
    assert not notice.has_come()
    path.touch()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert notice.has_come()


def test_the_folder_is_not_asked_at_every_step(tmp_path: Path) -> None:
    clock = Time()
    notice = NoticeFile(tmp_path / "notice", lambda: clock.now)
    assert not notice.has_come()
    (tmp_path / "notice").touch()
    clock.now += 0.1
    assert not notice.has_come()
    clock.now += 1
    assert notice.has_come()


def test_a_notice_stops_and_a_signal_behind_it_says_how(tmp_path: Path) -> None:
    with Requests(NoticeFile(tmp_path / "notice", Time())).listening() as requests, requests.heeded():
        assert (requests.take(), requests.exit_code) == (NOTHING, 0)
        (tmp_path / "notice").touch()
        assert [requests.take(), requests.take()] == [STOP, STOP]
        assert requests.exit_code == PREEMPTED
        os.kill(os.getpid(), signal.SIGTERM)  # the machine's own end: it is no impatience
        assert requests.exit_code == 128 + signal.SIGTERM


@pytest.mark.flags("preempt_file")
@pytest.mark.parametrize("given", ["", "pictures", "missing/notice"])
def test_a_notice_that_could_never_be_seen_is_refused(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    line = ["--init_from_config=tiny", "--train_data_dir=pictures", "--output_dir=out", "--resolution=64"]
    parse([*line, "--preempt_file=notice"])
    with pytest.raises(ConfigFault) as caught:
        parse([*line, f"--preempt_file={given}"])
    assert [fault.where for fault in caught.value.faults] == ["--preempt_file"]
