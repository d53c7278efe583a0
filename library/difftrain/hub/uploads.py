"""Sending exports and states, one after the other, in the background where asked for.

Training never stops because of the hub: what cannot be sent after some attempts is named, with the command that sends
it later, and counted in the report. What waits or is being sent must not be deleted: ask holds().
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from pathlib import Path
from typing import Any

from difftrain.config.secrets import redact_text
from difftrain.hub import client
from difftrain.hub.target import UploadTarget

log = logging.getLogger("difftrain")
WAITS_S = (2.0, 10.0, 30.0)  # before another attempt; huggingface_hub itself tries single requests again, too
AT_END_S = 3600.0  # a finished run waits so long for what is still to be sent
AT_STOP_S = 20.0  # a run that a signal ends: what sent it may not wait much longer
SAY_EVERY_S = 60.0


class Uploads:
    """Send files and folders to a target; without one, do nothing. Only the logger rank has a target."""

    def __init__(self, target: UploadTarget | None = None, *, background: bool = False) -> None:
        """Begin. background: add() returns at once, and a thread sends."""
        self.target = target
        self.sent: list[str] = []
        self.failed: list[str] = []
        self._background = background
        self._held: list[Path] = []
        self._jobs: queue.SimpleQueue[tuple[Path, str] | None] = queue.SimpleQueue()  # None: no more will come
        self._thread: threading.Thread | None = None
        self._done = threading.Condition()
        self._given_up = threading.Event()

    def add(self, path: Path, message: str) -> None:
        """Send a file or a folder that is whole and will not change, in its turn."""
        if self.target is None:
            return
        with self._done:
            self._held.append(path)
        if not self._background:
            self._finish(path, message)
            return
        self._jobs.put((path, message))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
            self._thread.start()

    def holds(self, path: Path) -> bool:
        """Tell whether a file or folder waits to be sent, or is being sent."""
        with self._done:
            return path in self._held

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Where an error ends the run, wait a moment for what is still to be sent; a signal waits for nothing."""
        if kind is not None:
            self.wait(AT_STOP_S if issubclass(kind, Exception) else 0.0)

    def wait(self, limit_s: float) -> None:
        """Wait until all is sent or has failed; after the limit, or a signal, name what was not and give up on it."""
        if self.target is None:
            return
        end = time.monotonic() + limit_s
        try:
            with self._done:
                while self._held:
                    left = end - time.monotonic()
                    if left <= 0:
                        break
                    log.info("waiting up to %.0f s for uploads: %s", left, ", ".join(path.name for path in self._held))
                    self._done.wait_for(lambda: not self._held, min(left, SAY_EVERY_S))
        finally:
            self._give_up("the run ended before it was sent")

    def _give_up(self, why: str) -> None:
        self._given_up.set()
        self._jobs.put(None)
        with self._done:
            late, self._held = self._held, []
        for path in late:
            self._name_failure(path, why)

    def facts(self) -> dict[str, Any] | None:
        """Return what a report says of it."""
        if self.target is None:
            return None
        with self._done:
            return {"repo": self.target.repo, "sent": list(self.sent), "failed": list(self.failed)}

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._given_up.is_set():
            self._finish(*job)

    def _finish(self, path: Path, message: str) -> None:
        """Send one, or say why not; in any case it is held no longer."""
        try:
            self._send(path, message)
        except Exception as error:
            self._fail(path, client.trouble(error, path.name) or client.Trouble(f"{type(error).__name__}: {error}"))
        finally:
            with self._done:
                if path in self._held:
                    self._held.remove(path)
                self._done.notify_all()

    def _send(self, path: Path, message: str) -> None:
        assert self.target is not None
        started, operations = time.monotonic(), None
        for wait in (*WAITS_S, None):
            tried = time.monotonic()
            try:
                # made once: what was sent of it in an attempt is not sent again in the next
                operations = operations or self.target.operations(path)
                self.target.commit(operations, message)
                break
            except Exception as error:
                said = client.trouble(error, self.target.repo)
                if wait is None or said is None or not said.passing:
                    raise
                if said.silent and time.monotonic() - tried > 2 * client.SILENCE_S:
                    raise  # huggingface_hub has asked six times: training, which may be waiting, does so no longer
                log.warning("upload of %s: %s; trying again in %.0f s", path.name, redact_text(said.what), wait)
                if self._given_up.wait(wait):
                    return
        if self._given_up.is_set():
            return
        with self._done:
            self.sent.append(path.name)
        log.info("sent %s to %s in %.0f s", path.name, self.target.repo, time.monotonic() - started)

    def _fail(self, path: Path, said: client.Trouble) -> None:
        if not self._given_up.is_set():  # else it is named already
            self._name_failure(path, str(said))

    def _name_failure(self, path: Path, why: str) -> None:
        assert self.target is not None
        with self._done:
            self.failed.append(path.name)
        log.warning(
            "%s was not sent to the hub: %s; send it by hand: %s",
            path.name,
            redact_text(why),
            self.target.by_hand(path),
        )
