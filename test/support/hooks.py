"""A webhook on this machine: it notes what it is sent, and answers as it is told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Webhook(ThreadingHTTPServer):
    """Take notices. status: what is answered; delay_s: before that."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.notices: list[dict[str, Any]] = []
        self.paths: list[tuple[str, str]] = []
        self.status, self.delay_s = 200, 0.0

    @property
    def url(self) -> str:
        """Return its address, with what makes it a secret."""
        return f"http://127.0.0.1:{self.server_port}/services/very-secret-word"

    @property
    def events(self) -> list[str]:
        """Return what happened, in order."""
        return [notice["event"] for notice in self.notices]


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        """Note it."""
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.append((self.command, self.path))
        time.sleep(self.server.delay_s)
        assert self.headers["Content-Type"] == "application/json"
        self.server.notices.append(json.loads(raw))
        self.send_response(self.server.status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        """Note that somebody followed a redirect."""
        self.server.paths.append((self.command, self.path))
        self.send_error(404)

    def log_message(self, *_: Any) -> None:
        """Be quiet."""


@contextmanager
def webhook() -> Iterator[Webhook]:
    """Serve until the block ends."""
    server = Webhook()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
