"""A real browser, driven over the DevTools protocol: the one that is installed, else one fetched through npm."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from archives import unpack_tar

PACKAGE = "@sparticuz/chromium"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "difftrain" / "test-data"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 60.0
FETCH_S = 400
_UNPACK = """
const { readFileSync, writeFileSync } = require("fs"), { brotliDecompressSync } = require("zlib");
writeFileSync(process.argv[2], brotliDecompressSync(readFileSync(process.argv[1])));
"""
# the browser reads commands from 3 and answers on 4, whatever lies there before
_START = """
import fcntl, os, sys
for place, end in enumerate([fcntl.fcntl(int(number), fcntl.F_DUPFD, 64) for number in sys.argv[1:3]], start=3):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


@dataclass
class Page:
    """A page that was opened: what went wrong, what it asked the network for, and questions to it."""

    browser: Browser
    session: str
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def ask(self, expression: str) -> Any:
        """Evaluate a JavaScript expression."""
        told = self.browser.call("Runtime.evaluate", self.session, expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window a size in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.call("Emulation.setDeviceMetricsOverride", self.session, **size)

    def picture(self, path: Path, whole: bool = False) -> None:
        """Save a screenshot, of the window or of the whole page."""
        told = self.browser.call("Page.captureScreenshot", self.session, captureBeyondViewport=whole)
        path.write_bytes(b64decode(told["data"]))


class Browser:
    """A headless browser process, spoken to over two pipes."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        read_there, self._out = os.pipe()
        self._in, write_there = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(read_there), str(write_there), *command],
            env=env,
            pass_fds=(read_there, write_there),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        os.set_blocking(self._in, False)
        self._number, self._buffer = 0, b""
        self._pages: dict[str, Page] = {}

    def open(self, path: Path | str, width: int = 1280) -> Page:
        """Open a file or an address as a user does, and wait until it is loaded."""
        address = path if isinstance(path, str) else path.as_uri()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        self._pages[page.session] = page
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", page.session)
        page.resize(width)
        self.call("Page.navigate", page.session, url=address)
        end = time.monotonic() + TIMEOUT_S
        while page.ask("document.readyState + location.href") != f"complete{address}":
            assert time.monotonic() < end, f"{path} is not loaded after {TIMEOUT_S} s"
            time.sleep(0.05)
        return page

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, f"{method}: {told['error']}"
                return told["result"]
            self._note(told)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            assert self._process.poll() is None, f"the browser ended with code {self._process.returncode}"
            assert time.monotonic() < end, f"the browser says nothing for {TIMEOUT_S} s"
            try:
                self._buffer += os.read(self._in, 1 << 20)
            except BlockingIOError:
                time.sleep(0.005)
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, told: dict[str, Any]) -> None:
        page = self._pages.get(told.get("sessionId", ""))
        if page is None:
            return
        method, params = told["method"], told["params"]
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            page.errors.append(params["entry"]["text"])
        elif method in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening"):
            page.errors.append(str(params))
        elif method == "Runtime.consoleAPICalled":
            page.errors.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            page.requests.append(params["request"]["url"])

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser; skip the test where there is none and none can be fetched."""
    program, libraries = installed() or fetched()
    env = dict(os.environ)
    if libraries:
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(libraries), env.get("LD_LIBRARY_PATH", ""))))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += ["--remote-debugging-pipe", "--no-first-run", "--disable-extensions", f"--user-data-dir={profile}"]
        flags += ["--disable-background-networking", "--disable-component-update", "--no-zygote", "about:blank"]
        started = Browser([str(program), *flags], env)
        try:
            yield started
        finally:
            started.close()


def installed() -> tuple[Path, Path | None] | None:
    """Return the browser of this machine."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return (Path(found), None) if found else None


def fetched() -> tuple[Path, Path | None]:
    """Return a headless browser of the npm registry (68 MB), and the folder of the libraries that it brings."""
    target = CACHE / "npm-chromium"
    if not (target / "chromium").is_file():
        if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
            pytest.skip(f"no browser is installed, and {PACKAGE} has none for this machine")
        if not (shutil.which("npm") and shutil.which("node")):
            pytest.skip("no browser is installed, and there is no npm to fetch one with")
        _fetch(target)
    return target / "chromium", target / "libraries"


def _fetch(target: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    aside = CACHE / f"tmp-{uuid.uuid4().hex}"
    aside.mkdir()
    try:
        command = ["npm", "pack", PACKAGE, "--silent", "--ignore-scripts", "--pack-destination", str(aside)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, cwd=aside)
        except subprocess.TimeoutExpired:
            pytest.skip(f"the npm registry did not hand out {PACKAGE} within {FETCH_S} s")
        if done.returncode:
            pytest.skip(f"the npm registry cannot be reached for {PACKAGE}: {done.stderr.strip()[-300:]}")
        (archive,) = aside.glob("*.tgz")
        unpack_tar(archive, aside)
        archive.unlink()
        packs, made = aside / "package" / "bin", aside / "made"
        made.mkdir()
        _decompress(packs / "chromium.br", made / "chromium")
        (made / "chromium").chmod(0o755)
        for name in ("al2023", "swiftshader"):
            _decompress(packs / f"{name}.tar.br", aside / f"{name}.tar")
            unpack_tar(aside / f"{name}.tar", made / name)
        (made / "libraries").symlink_to("al2023/lib")
        with contextlib.suppress(FileExistsError):
            made.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _decompress(path: Path, to: Path) -> None:
    subprocess.run(["node", "-e", _UNPACK, str(path), str(to)], check=True, timeout=FETCH_S)
