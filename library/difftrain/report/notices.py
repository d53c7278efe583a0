"""Notices of what happens to a run, as JSON to a webhook: started, saved, non-finite, slow, stopped, failed, finished.

A thread sends them, so that a service that is slow or away neither delays nor fails training: what it cannot take is
dropped, which is said once. The address is a secret, as who knows it can write there: it lives in the environment alone.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import socket
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from difftrain.config.secrets import WEBHOOK, redact_text, unfit_webhook
from difftrain.contracts import ConfigFault, Fault

if TYPE_CHECKING:
    from pathlib import Path

    from difftrain.report.line import StepMetrics

log = logging.getLogger("difftrain")
TIMEOUT_S, AT_END_S = 10.0, 15.0  # of one request; for what is left when the run ends
TRIES, PAUSE_S = 2, 1.0
MOST_WAITING = 100
LONGEST = 1000  # characters of an error
SLOW, FAST_AGAIN = 2.0, 1.3  # times the usual time of a step
PACE_LINES, LEAST_LINES, LINES_IN_A_ROW = 50, 20, 3  # of metrics.jsonl: what usual is, and what counts as slow
NON_FINITE_EVERY_S = 600.0


class Notices:
    """Send notices of one run; without an address, none."""

    def __init__(self, url: str = "") -> None:
        self._url = url
        self._run: dict[str, Any] = {}
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._troubled = False
        # what of the metric lines is worth a notice
        self._pace = Pace()
        self._last: dict[str, Any] = {}
        self._skipped: int | None = None
        self._non_finite_at = -math.inf

    def describe(self, folder: Path, total_steps: int) -> None:
        """Say which run it is, once that is known."""
        self._run = {"run": folder.name, "folder": str(folder), "total_steps": total_steps}

    def send(self, event: str, text: str, **facts: Any) -> None:
        """Hand a notice to the thread; it returns at once. text: a sentence for people. facts: for programs."""
        if not self._url:
            return
        run = self._run.get("run")
        text = redact_text(f"{run}: {text}" if run else text)
        notice = {
            "event": event,
            "text": text,
            "content": text,  # what other chat services call it
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            **self._run,
            **self._last,
            **facts,
        }
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver, name="webhook", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(json.dumps({key: _plain(value) for key, value in notice.items()}).encode())
        except queue.Full:
            self._trouble(f"{MOST_WAITING} notifications are already waiting")

    def line(self, metrics: StepMetrics) -> None:
        """Look at a metrics line: send what nobody should find out the next morning."""
        if not self._url:
            return
        self._last = {"step": metrics.step, "loss": metrics.step_loss, "fps": metrics.fps}
        now, before = time.monotonic(), self._skipped
        self._skipped = metrics.skipped
        if before is not None and metrics.skipped > before and now - self._non_finite_at >= NON_FINITE_EVERY_S:
            self._non_finite_at = now
            what = f"loss or gradient was not finite by step {metrics.step}; updates skipped so far: {metrics.skipped}"
            self.send("non_finite", what, skipped=metrics.skipped)
        if usual := self._pace.slowed(metrics.step_s):
            what = f"a step takes {metrics.step_s:.3g} s at step {metrics.step}; before, it took {usual:.3g} s"
            self.send("slow", what, step_s=metrics.step_s, usual_step_s=usual)

    def close(self, limit_s: float = AT_END_S) -> None:
        """Wait for what is still to be sent, but not for ever."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            self._waiting.put(None, timeout=limit_s)
        except queue.Full:
            return
        thread.join(limit_s)
        if thread.is_alive():
            self._trouble(f"no answer for {limit_s:g} s")

    def _deliver(self) -> None:
        while (body := self._waiting.get()) is not None:
            for number in range(TRIES):
                if not (why := self._post(body)):
                    break
                if number + 1 < TRIES:
                    time.sleep(PAUSE_S)
            else:
                self._trouble(why)

    def _post(self, body: bytes) -> str:
        """Send one; return what went wrong, without the address."""
        headers = {"Content-Type": "application/json", "User-Agent": "difftrain"}
        try:
            request = urllib.request.Request(self._url, body, headers, method="POST")
            with self._opener.open(request, timeout=TIMEOUT_S):
                return ""
        except urllib.error.HTTPError as error:
            error.close()
            return f"it answered {error.code}"
        except Exception as error:  # of the network, of TLS, of HTTP: nothing of this may reach the run
            reason = getattr(error, "reason", error)
            return str(getattr(reason, "strerror", None) or type(reason).__name__)

    def _trouble(self, why: str) -> None:
        """Say once what went wrong."""
        if not self._troubled:
            self._troubled = True
            host = urlsplit(self._url).hostname
            log.warning(
                "the webhook at %s cannot be reached: %s; training continues, and this is logged once", host, why
            )


class Pace:
    """Tell when steps take much longer than they did."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=PACE_LINES)
        self._slow = 0  # lines in a row
        self._is_slow = False

    def slowed(self, step_s: float) -> float:
        """Take the seconds of a step; return what was usual when it has just become slow, else 0."""
        if not math.isfinite(step_s) or step_s <= 0:
            return 0.0
        usual = statistics.median(self._usual) if len(self._usual) >= LEAST_LINES else 0.0
        if not usual or step_s < SLOW * usual:
            self._slow = 0
            self._is_slow = self._is_slow and step_s > FAST_AGAIN * usual
            if not self._is_slow:
                self._usual.append(step_s)
            return 0.0
        self._slow += 1
        if self._is_slow or self._slow < LINES_IN_A_ROW:
            return 0.0
        self._is_slow = True
        return usual


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follow no redirect: it would turn a POST into a GET of another address."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Refuse."""


@contextmanager
def open_notices(is_logger: bool) -> Iterator[Notices]:
    """Open the notices of this process, and send how it ends where it ends by an error. Raises ConfigFault.

    is_logger: the one process of the run that sends them.
    """
    url = os.environ.get(WEBHOOK, "") if is_logger else ""
    if wrong := unfit_webhook(url):
        raise ConfigFault([Fault(WEBHOOK, wrong)])
    notices = Notices(url)
    try:
        yield notices
    except SystemExit as error:
        if isinstance(error.code, int) and error.code > 128:
            notices.send("stopped", f"stopped by signal {error.code - 128} before its first step")
        raise
    except KeyboardInterrupt:
        notices.send("stopped", "interrupted")
        raise
    except BaseException as error:
        what = redact_text(str(error) or type(error).__name__)[:LONGEST]
        notices.send("failed", f"failed: {what}", error=what, kind=type(error).__name__)
        raise
    finally:
        notices.close()


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
