"""The server of `difftrain watch`: pages of runs to whoever has the token, and nothing else.

A page of a browser may be hostile, and so may a folder of runs. So: every request needs the token (compared in constant
time) and names this machine in its Host (a foreign name that was pointed here is refused); an action is a POST that no
other site's page can send; a run is one of those that were found, never a path from the address; the report, which may
come from elsewhere, is shown in a sandbox and opened by a key of its own, so that its script never sees the token.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from difftrain.contracts import DataFault
from difftrain.report.metrics import EVALUATION, METRICS, VALIDATION
from difftrain.report.page import POLICY, script_hash
from difftrain.report.sessions import FILE as SESSIONS
from difftrain.watch import pages, runs

log = logging.getLogger("difftrain")
SILENCE_S = 20.0  # a client that sends nothing for so long is let go
MOST_BODY, MOST_PAGE = 4096, 64 << 20  # bytes of a form, of a report
STALE_S = 30.0  # a report that is older than what it is made from by so much is made anew
_PLAIN = (
    "default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; connect-src 'self'; frame-src 'self'; "
    "form-action 'self'; frame-ancestors 'self'; base-uri 'none'"
)
# a report may come from elsewhere: only a script that is this version's own runs, out of reach of the page around it
_OF_REPORTS = f"sandbox allow-scripts; {POLICY}; script-src {script_hash()}; frame-ancestors 'self'"
_TYPES = {b"\x89": "image/png", b"\xff": "image/jpeg", b"R": "image/webp"}


class Refusal(Exception):
    """A request that is not answered with what it asks for."""

    def __init__(self, status: HTTPStatus, text: str, *, form: bool = False) -> None:
        super().__init__(text)
        self.status, self.text, self.form = status, text, form


class Reports:
    """The reports of runs: the file that a run wrote where that is new, else made of its other files, and kept.

    Nothing is written into a run's folder: while it runs, that is for the run alone.
    """

    def __init__(self) -> None:
        # folder -> time of what it was made from, state of the run, page
        self._made: dict[Path, tuple[float, str, bytes]] = {}
        self._lock = threading.Lock()  # making one takes a core for a second

    def page(self, folder: Path) -> bytes | None:
        """Return the report of a run; nothing where there is nothing to report yet."""
        newest = max(runs.modified(folder / METRICS), runs.modified(folder / runs.REPORT))
        written, state = runs.modified(folder / runs.PAGE), runs.status_of("", folder).state
        # who was killed has left a page of a run that goes on
        outdated = state == "killed" and runs.read_table(folder / runs.REPORT).get("status") != state
        is_new = written and newest - written < STALE_S and not outdated
        if is_new and (content := runs.read_end(folder / runs.PAGE, MOST_PAGE)):
            return content
        with self._lock:
            before, state_before, content = self._made.get(folder, (0.0, "", b""))
            if not content or newest - before >= STALE_S or state != state_before:
                content = self._make(folder, state)
                self._made[folder] = newest, state, content
        return content or None

    @staticmethod
    def _make(folder: Path, state: str) -> bytes:
        """Build the page in a folder of our own that has the run's name and shows its files."""
        from difftrain.report.rebuild import report_of_files
        from difftrain.report.run_files import read_run
        from difftrain.report.run_page import build_html

        report = runs.read_table(folder / runs.REPORT)
        if not report and not runs.last_lines(folder):
            return b""
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / (folder.resolve().name or "run")
            copy.mkdir()
            for name in (
                METRICS,
                VALIDATION,
                EVALUATION,
                SESSIONS,
                runs.RECORD,
                runs.CONFIG,
                runs.REPORT,
                runs.SAMPLES,
            ):
                path = folder / name
                if path.exists() and not path.is_symlink():
                    (copy / name).symlink_to(path.absolute())
            try:
                known = report_of_files(read_run(copy, begun=True))
            except DataFault:  # lines that are none of a run
                return b""
            known |= {"status": state} if state in ("running", "killed") else {}
            return build_html(copy, known).read_bytes()


class WatchServer(ThreadingHTTPServer):
    """Serve the runs below a folder. Raises OSError where the address cannot be had."""

    daemon_threads = True

    def __init__(self, root: Path, host: str, port: int, token: str) -> None:
        self.root, self.token, self.host = root, token, host
        self.reports = Reports()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Return the address to open, with the token."""
        # an address that means every one is none to open
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname(), "": socket.gethostname()}.get(
            self.host, self.host
        )
        name = f"[{host}]" if ":" in host else host
        return f"http://{name}:{self.server_port}/?{urlencode({'token': self.token})}"

    def is_token(self, word: str) -> bool:
        """Tell whether a word is the token, in a time that says nothing of how much of it is right."""
        return hmac.compare_digest(word.encode("utf-8", "replace"), self.token.encode("utf-8", "replace"))

    def report_key(self, name: str) -> str:
        """Return what opens the report of one run, and nothing else."""
        return hmac.new(
            self.token.encode("utf-8", "replace"), f"report {name}".encode("utf-8", "replace"), hashlib.sha256
        ).hexdigest()

    def knows_host(self, header: str | None) -> bool:
        """Tell whether a Host is a name of this machine: an address, localhost, or what it was told to listen on."""
        try:
            name = urlsplit(f"//{header}").hostname or ""
        except ValueError:
            return False
        if name in {"localhost", self.host.lower(), socket.gethostname().lower()}:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up in the middle is nobody's error."""

    def start(self) -> threading.Thread:
        """Serve in a thread, until shutdown()."""
        thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="watch", daemon=True)
        thread.start()
        return thread


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    timeout = SILENCE_S
    server_version, sys_version = "difftrain", ""

    # --- what is asked

    def do_GET(self) -> None:
        """Show something."""
        path, query = self._address()
        shows: dict[str, Callable[[dict[str, str]], None]] = {
            "/": self._runs, "/run": self._run, "/report": self._report, "/sample": self._sample,
        }  # fmt: skip
        self._answer(path, lambda: shows[path](query), shows)

    do_HEAD = do_GET  # _send leaves the body out

    def do_POST(self) -> None:
        """Do something to a run."""
        path, _ = self._address()
        self._answer(path, self._do, {"/do"})

    def _answer(self, path: str, work: Callable[[], None], known: Any) -> None:
        try:
            if not self.server.knows_host(self.headers.get("Host")):
                raise Refusal(
                    HTTPStatus.FORBIDDEN,
                    "this address is not a name of the serving machine: open it as it was printed",
                )
            if path not in known:
                raise Refusal(HTTPStatus.NOT_FOUND, "there is no such page")
            work()
        except Refusal as refusal:
            text = pages.message_page(refusal.status.phrase, refusal.text, form=refusal.form)
            self._send(refusal.status, text.encode(), policy=_PLAIN)
        except OSError:  # the client has hung up
            self.close_connection = True
        except Exception:
            log.exception("watch: a page could not be made")
            text = pages.message_page("Error", "this page could not be made; the terminal says why")
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, text.encode(), policy=_PLAIN)

    def _address(self) -> tuple[str, dict[str, str]]:
        try:
            parts = urlsplit(self.path)
            return parts.path, {name: values[-1] for name, values in parse_qs(parts.query).items()}
        except ValueError:
            return "", {}

    def _need_token(self, form: dict[str, str]) -> None:
        header = self.headers.get("Authorization") or ""
        word = form.get("token") or (header.removeprefix("Bearer ") if header.startswith("Bearer ") else "")
        if not word:
            text = "the address needs its token: open it as difftrain watch printed it, or type the token here"
            raise Refusal(HTTPStatus.FORBIDDEN, text, form=True)
        if not self.server.is_token(word):
            text = "wrong token for this server; every start has a new one unless it is set"
            raise Refusal(HTTPStatus.FORBIDDEN, text, form=True)

    def _folder(self, form: dict[str, str]) -> tuple[str, Path]:
        """Return a run that was found, by its name."""
        name = form.get("name", "")
        folder = runs.find_runs(self.server.root).get(name)
        if folder is None:
            raise Refusal(HTTPStatus.NOT_FOUND, "there is no such run; it may have been moved away")
        return name, folder

    # --- what is shown

    def _runs(self, query: dict[str, str]) -> None:
        self._need_token(query)
        known = runs.find_runs(self.server.root)
        shown = [runs.status_of(name, known[name]) for name in list(known)[: runs.MOST_RUNS]]
        more, nonce = len(known) - len(shown), secrets.token_urlsafe(16)
        text = pages.runs_page(shown, folder=str(self.server.root), more=more, token=self.server.token, nonce=nonce)
        self._send_page(text, nonce)

    def _run(self, query: dict[str, str]) -> None:
        self._need_token(query)
        name, folder = self._folder(query)
        nonce = secrets.token_urlsafe(16)
        text = pages.run_page(
            runs.status_of(name, folder),
            log=runs.log_end(folder),
            samples=runs.newest_samples(folder),
            report=self.server.report_key(name),
            token=self.server.token,
            nonce=nonce,
            requested=query.get("asked", ""),
        )
        self._send_page(text, nonce)

    def _report(self, query: dict[str, str]) -> None:
        key = self.server.report_key(query.get("name", ""))
        if not hmac.compare_digest(query.get("key", "").encode("utf-8", "replace"), key.encode()):
            self._need_token(query)
        _, folder = self._folder(query)
        content = self.server.reports.page(folder)
        if content is None:
            text = pages.message_page("No report yet", "it appears after the first steps")
            content = text.encode()
        self._send(HTTPStatus.OK, content, policy=_OF_REPORTS)

    def _sample(self, query: dict[str, str]) -> None:
        self._need_token(query)
        _, folder = self._folder(query)
        raw = runs.sample_picture(folder, query.get("file", ""))
        if not raw:
            raise Refusal(HTTPStatus.NOT_FOUND, "there is no such sample")
        self._send(HTTPStatus.OK, raw, policy="default-src 'none'", kind=_TYPES[raw[:1]])

    # --- what is done

    def _do(self) -> None:
        # a page of another site may send a form here, but not from here
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site", "same-origin")
        if (origin is not None and urlsplit(origin).netloc != self.headers.get("Host")) or site not in (
            "same-origin",
            "none",
        ):
            raise Refusal(HTTPStatus.FORBIDDEN, "this request came from a page of another site")
        form = self._form()
        self._need_token(form)
        name, folder = self._folder(form)
        action = form.get("action", "")
        if action not in runs.CONTROLS:
            known = ", ".join(runs.CONTROLS)
            raise Refusal(HTTPStatus.BAD_REQUEST, f"there is no such action; known are {known}")

        # a file that nobody looks for now would be acted on by the next resume
        status = runs.status_of(name, folder)
        if status.state != "running":
            raise Refusal(HTTPStatus.CONFLICT, f"this run is not running ({status.state}): nothing was requested")
        try:
            runs.ask(folder, action)
        except OSError as error:
            raise Refusal(
                HTTPStatus.CONFLICT,
                f"{runs.control_file(folder, action).name} cannot be written to the run's folder: {error.strerror}",
            ) from error
        log.info("%s was requested of %s", action, folder)

        self.send_response(HTTPStatus.SEE_OTHER)
        back = urlencode({"name": name, "token": self.server.token, "asked": action})
        self.send_header("Location", f"/run?{back}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _form(self) -> dict[str, str]:
        length = self.headers.get("Content-Length") or ""
        if not length.isascii() or not length.isdecimal():
            raise Refusal(HTTPStatus.LENGTH_REQUIRED, "a form must state its length")
        if int(length) > MOST_BODY:
            self.close_connection = True
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a form has {MOST_BODY} bytes at most")
        raw = self.rfile.read(int(length))
        try:
            return {name: values[-1] for name, values in parse_qs(raw.decode()).items()}
        except ValueError as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, "the form cannot be read") from error

    # --- how it is sent

    def _send_page(self, text: str, nonce: str) -> None:
        self._send(HTTPStatus.OK, text.encode("utf-8", "replace"), policy=f"{_PLAIN}; script-src 'nonce-{nonce}'")

    def _send(self, status: HTTPStatus, body: bytes, *, policy: str, kind: str = "text/html; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "same-origin")  # with none a browser hides where a form is from
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: addresses hold the token."""
