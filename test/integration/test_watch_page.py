"""The page of runs in a real browser: it is read, refreshed and pressed as a user does; and the command that serves it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, browser
from doors import ROOT, wait_for
from PIL import Image
from watched import line, run_folder

from difftrain.watch import pages
from difftrain.watch.server import WatchServer

HOSTILE = '"><img src=x onerror=alert(1)>'
OUTSIDE = """[...document.querySelectorAll("body *")].filter(e =>
    e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".wide")).length"""
# figures of the list that begin before their own label, which is drawn in front of them, has ended
OVERLAPS = """[...document.querySelectorAll(".runs td[data-head]")].filter(cell => {
    const text = document.createRange(), pen = document.createElement("canvas").getContext("2d");
    text.selectNodeContents(cell);
    const before = getComputedStyle(cell, "::before"), style = getComputedStyle(cell);
    if (before.content === "none" || !cell.checkVisibility()) return false;
    pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
    const label = pen.measureText(cell.dataset.head).width, at = text.getBoundingClientRect();
    return at.left < cell.getBoundingClientRect().left + label - 1 || at.right > cell.getBoundingClientRect().right + 1;
}).length"""


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WatchServer]:
    monkeypatch.setattr(pages, "REFRESH_S", 0.2)
    run_folder(tmp_path / "runs" / HOSTILE)
    run_folder(tmp_path / "runs" / "one")
    watched = WatchServer(tmp_path / "runs", "127.0.0.1", 0, "T")
    watched.start()
    yield watched
    watched.shutdown()
    watched.server_close()


def test_a_run_is_followed_and_saved(opened: Browser, server: WatchServer, tmp_path: Path) -> None:
    base = server.url.partition("/?")[0]
    page = opened.open(server.url)
    for width in (1280, 390):
        page.resize(width)
        assert page.ask("document.documentElement.scrollWidth") <= width and page.ask(OUTSIDE) == 0, width
        assert page.ask(OVERLAPS) == 0, width
    assert HOSTILE in page.ask("document.body.innerText")

    # --- one run, its report in a frame that can reach nothing of the page
    page = opened.open(base + page.ask("[...document.links].find(a => a.innerText === 'one').getAttribute('href')"))
    assert page.ask("document.title") == "one" and page.ask("document.images[0].naturalWidth") == 64
    assert page.ask("document.querySelector('iframe').contentDocument") is None
    assert "30 of 100" in page.ask("document.querySelector('.cards').innerText")
    for width in (1280, 390):
        page.resize(width)
        assert page.ask("document.documentElement.scrollWidth") <= width and page.ask(OUTSIDE) == 0, width
    page.picture(tmp_path / "page.png")
    assert np.asarray(Image.open(tmp_path / "page.png").convert("L")).std() > 10

    # --- it follows what the run writes
    run = tmp_path / "runs" / "one"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(31))
    wait_for(lambda: "31 of 100" in page.ask("document.querySelector('.cards').innerText"), 10)

    # --- a button asks the run, and the page comes back
    page.ask("document.querySelector('button[value=save]').click()")
    wait_for(lambda: (run / "save").is_file(), 10)
    wait_for(lambda: page.ask("location.search").endswith("asked=save"), 10)
    assert page.errors == []
    assert all(url.startswith((base, "data:")) for url in page.requests)


def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    """Cold: that it needs no torch is what makes it quick."""
    run_folder(tmp_path / "one")
    began = time.monotonic()
    words = [sys.executable, "-X", "importtime", "-m", "difftrain.cli", "watch", str(tmp_path), "--port=0", "--token=T"]
    env = {"PYTHONPATH": str(ROOT / "library"), "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    printed = process.stdout.readline() + process.stdout.readline()
    assert "//127.0.0.1:" in printed and "/?token=T" in printed and time.monotonic() - began < 60
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and "Traceback" not in errors
    assert not re.search(r"\| +torch$", errors, re.MULTILINE)
