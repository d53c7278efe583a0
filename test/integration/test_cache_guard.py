"""A picture that hangs or crashes its decoder while a cache is built: it alone is lost, and it is named."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import cached
import pytest

from difftrain.cache import decoding
from difftrain.cache import decoding as guard
from difftrain.contracts import TrainingFault
from difftrain.data import samples
from difftrain.data.media.media import Unusable

# in every interpreter that is started from here: a decoder that hangs in some pictures and crashes in others
HOSTILE = """
import os, signal, time

def decoder(inner):
    def hostile(data, *args, **more):
        if data.endswith(b"hang"):
            time.sleep(1000)
        if data.endswith(b"crash"):
            os.kill(os.getpid(), signal.SIGSEGV)
        return inner(data, *args, **more)
    return hostile
"""
AT_START = f"{HOSTILE}\nfrom difftrain.data import samples\nsamples.decode_for = decoder(samples.decode_for)\n"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set with one picture of each kind, which are as good as the others to anybody else."""
    data = cached.write_data(tmp_path)
    for path, word in zip(sorted(data.rglob("*.png")), (b"hang", b"", b"crash")):
        path.write_bytes(path.read_bytes() + word)
    at_start = tmp_path / "at_start"
    at_start.mkdir()
    (at_start / "sitecustomize.py").write_text(AT_START)
    monkeypatch.syspath_prepend(str(at_start))
    space: dict[str, Any] = {}
    exec(HOSTILE, space)
    monkeypatch.setattr(samples, "decode_for", space["decoder"](samples.decode_for))
    monkeypatch.setattr(guard, "LIMIT_S", 3.0)
    monkeypatch.setattr(guard, "PATIENCE_S", 5.0)
    return data


def test_pictures_that_hang_or_crash_their_decoder_are_named_and_all_else_is_encoded(
    hostile: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = cached.config(hostile, tmp_path / "cache", cached.ON_DISK)
    cfg = cfg.model_copy(update={"cache": cfg.cache.model_copy(update={"workers": 1})})
    cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"max_rejected_share": 0.9})})
    with caplog.at_level(logging.WARNING):
        made = cached.make(cfg)
    reasons = {Path(each.path).name: each.reason.partition(":")[0] for each in made.rejects}
    assert sorted(reasons.values()) == ["crashed", "too slow"], made.rejects
    assert re.search(r"; \d images? .*too slow .*crashed", caplog.text)
    data, store = made.data, made.data.store.pictures
    assert store is not None
    lost = 0
    for number in range(data.index.count):
        if data.index.path(data.index.record(number)) in {each.path for each in made.rejects}:
            lost += 1
            with pytest.raises(Unusable):
                store.check(number, False)
        else:
            store.check(number, False)
            assert store.read([number], [False])["moments"].abs().sum() > 0
    assert lost == 2 < data.index.count


@pytest.mark.nightly
def test_workers_that_stay_silent_though_no_picture_is_slow_are_given_up_after_some_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late:
        forks = True

        def __getitem__(self, n: int) -> None:
            time.sleep(1000)

        def pictures_of(self, batches: Any) -> list[int]:
            return []

        def pass_over(self, bad: Any) -> None:
            assert not bad

    monkeypatch.setattr(guard, "PATIENCE_S", 0.3)
    monkeypatch.setattr(guard, "run_jobs", lambda *args, **more: iter(()))
    handed = guard.BatchQueue(decoding.np.arange(3), iter(range(9)).__next__, guard.threading.Event())
    start = time.monotonic()
    with pytest.raises(TrainingFault, match=r"nothing .*0\.3 s"):
        list(guard.decoded_batches(Late(), handed, 1))  # type: ignore[arg-type]
    assert time.monotonic() - start < 30


def test_a_worker_that_is_killed_while_every_picture_is_fine_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed:
        forks = True

        def __getitem__(self, n: int) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def pictures_of(self, batches: Any) -> list[int]:
            return []

    monkeypatch.setattr(guard, "run_jobs", lambda *args, **more: iter(()))
    handed = guard.BatchQueue(decoding.np.arange(3), iter(range(9)).__next__, guard.threading.Event())
    with pytest.raises(TrainingFault, match="max_data_loader_n_workers"):
        list(guard.decoded_batches(Killed(), handed, 1))  # type: ignore[arg-type]
