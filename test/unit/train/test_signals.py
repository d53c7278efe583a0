"""Signals become requests; one wish that arrives twice is one wish."""

from __future__ import annotations

import os
import signal

import pytest

from difftrain.train import triggers
from difftrain.train.triggers import NOTHING, SAVE, STOP, Requests


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_save_is_asked_once_and_a_stop_stays() -> None:
    with Requests().listening() as requests, requests.heeded():
        assert requests.take() == NOTHING
        send(signal.SIGUSR1)
        assert [requests.take(), requests.take()] == [SAVE, NOTHING]
        send(signal.SIGTERM)
        send(signal.SIGUSR1)
        assert [requests.take(), requests.take()] == [STOP, STOP]
        assert requests.stop_signal == signal.SIGTERM


def test_the_same_wish_twice_is_no_impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    with Requests().listening() as requests, requests.heeded():
        send(signal.SIGINT)
        send(signal.SIGTERM)
        assert requests.take() == STOP
        assert requests.stop_signal == signal.SIGINT
        monkeypatch.setattr(triggers, "IMPATIENT_S", -1.0)
        with pytest.raises(SystemExit) as end:
            send(signal.SIGINT)
        assert end.value.code == 130


def test_outside_the_loop_a_stop_ends_the_process() -> None:
    with Requests().listening() as requests:
        send(signal.SIGUSR1)
        with pytest.raises(SystemExit) as end:
            send(signal.SIGTERM)
        assert end.value.code == 143
        assert requests.take() == SAVE


def test_former_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Requests().listening():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
