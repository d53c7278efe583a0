"""Every page that is written or served, in a real browser: with hostile texts, and where an escape was forgotten."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import pytest
from browser import Browser, Page, browser
from compared import made_run
from doors import Door, wait_for, write_pictures
from PIL import Image
from reports import config, facts
from watched import line, run_folder

from difftrain.report.compare.comparison import compare_runs
from difftrain.report.compare.page import comparison_page
from difftrain.report.compare.thresholds import Thresholds
from difftrain.report.report import make_report, write_report
from difftrain.report.run_files import read_run
from difftrain.report.run_page import build_html
from difftrain.watch import pages
from difftrain.watch.server import WatchServer

OWN_SCRIPT = "document.querySelectorAll('dialog, .chart button, .filter:not([hidden]), main button').length > 0"


@dataclass
class Listener:
    """A server of a stranger, which counts who comes."""

    url: str = ""
    visits: list[str] = field(default_factory=list)

    def attack(self) -> str:
        """Return every way in which markup runs a script or asks for something, as far as a page can be held to it."""
        return (
            "<script>window.TAKEN = 1; document.title = 'taken'</script><img src=x onerror='window.TAKEN = 2'>"
            "<svg onload='window.TAKEN = 3'></svg><iframe srcdoc='<script>parent.TAKEN = 4</script>'></iframe>"
            "<details open ontoggle='window.TAKEN = 5'></details><a id=lure href='javascript:window.TAKEN = 6'>x</a>"
            f"<base href='{self.url}/base/'><script src='{self.url}/script'></script><img src='{self.url}/img'>"
            f"<link rel=stylesheet href='{self.url}/style'><object data='{self.url}/object'></object>"
            f"<iframe src='{self.url}/frame'></iframe><video src='{self.url}/video' autoplay></video>"
            f"<p style='background: url({self.url}/background)'>x</p>"
            f"<style>@import '{self.url}/import'; @font-face {{ font-family: f; src: url({self.url}/font) }}"
            " p { font-family: f }</style>"
            f"<form id=sent action='{self.url}/form'><input name=a></form>"
        )


@pytest.fixture(scope="module")
def stranger() -> Iterator[Listener]:
    found = Listener()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.visits.append(self.path)
            self.send_response(204)
            self.end_headers()

        do_POST = do_HEAD = do_OPTIONS = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield found
        server.shutdown()


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as started:
        yield started


def a_run(folder: Path, text: str) -> Path:
    """A report of a run, with a sample whose prompt, a caption and a name are hostile."""
    (folder / "sample").mkdir(parents=True)
    name = text.replace("/", "|")[:80]
    for step in (0, 4):
        Image.new("RGB", (64, 32), (9, 9, 200)).save(
            folder / "sample" / f"{name}_{step:06d}_00_2024013112000{step}_7.png"
        )
    (folder / "metrics.jsonl").write_text("".join(line(step) for step in range(1, 31)))
    (folder / "rejected.jsonl").write_text(json.dumps({"path": text, "reason": text}) + "\n")
    hostile = {"argv": [text], "weights": text, "notes": {text: text}, "scores": {text: text}, "network": name}
    hostile |= {
        "device": {"name": text, text: text},
        "dataset": {"name": text, text: [{text: 1}], "nested": {text: [text]}},
    }
    write_report(folder, make_report(config(), facts(folder, **hostile)))
    return build_html(folder)


def a_comparison(folder: Path, text: str) -> Path:
    a, b = (read_run(made_run(folder / name)) for name in ("a", text.replace("/", "|")[:80]))
    path = folder / "compare.html"
    path.write_text(comparison_page({text: a, "B": b, "C": ("nowhere", text)}, {"B": compare_runs(a, b, Thresholds())}))
    return path


def a_data_set(folder: Path, text: str) -> Path:
    data = write_pictures(folder / "data", 3)
    name = text.replace("/", "|")[:80]
    (data / "000.png").rename(data / f"{name}.png")
    (data / f"{name}.txt").write_text(text)
    (data / f"{name}.jpg").write_bytes(b"no picture at all")
    door = Door(data, folder / "cache")
    door.run(door.flags(folder / "out", "--debug_dataset"))
    return folder / "out" / "dataset.html"


WRITTEN: dict[str, Callable[[Path, str], Path]] = {"run": a_run, "comparison": a_comparison, "data set": a_data_set}


def unharmed(page: Page, stranger: Listener) -> None:
    """Assert that no script of the text has run, its links and forms included, and that nobody was asked for anything."""
    page.ask("document.querySelector('#lure')?.click(); document.querySelector('#sent')?.submit();")
    assert page.ask("window.TAKEN") is None and page.ask("document.title") != "taken"
    assert page.ask(f"document.baseURI.startsWith({stranger.url!r})") is False
    assert stranger.visits == []


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_page_of_hostile_texts_runs_nothing_and_asks_for_nothing(
    kind: str, opened: Browser, stranger: Listener, tmp_path: Path
) -> None:
    path = WRITTEN[kind](tmp_path, stranger.attack())
    page = opened.open(path)
    assert page.errors == [] and page.ask(OWN_SCRIPT)
    assert page.ask("document.scripts.length") == 1 and page.ask("document.querySelector('#lure')") is None
    assert "window.TAKEN" in page.ask("document.body.textContent")
    unharmed(page, stranger)

    # --- the same, where somebody forgot to escape: the policy stands alone
    text = path.read_text()
    path.write_text(text.replace("<main>", f"<main>{stranger.attack()}", 1))
    page = opened.open(path)
    assert page.ask("document.querySelector('#lure') !== null") and page.ask(OWN_SCRIPT)
    unharmed(page, stranger)


@pytest.mark.parametrize("forgotten", [False, True], ids=["escaped", "an escape was forgotten"])
def test_the_page_of_runs_runs_nothing_and_asks_for_nothing(
    forgotten: bool, opened: Browser, stranger: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "REFRESH_S", 0.2)
    attack = stranger.attack()
    # half of an attack, unescaped, would swallow the page and its own script too
    folder = tmp_path / "runs" / ("one" if forgotten else attack.replace("/", "|")[:80])
    run_folder(folder)
    (folder / "console.log").write_text(f"{attack}\n")
    path = a_run(tmp_path / "elsewhere", "x")
    (folder / "report.html").write_text(path.read_text().replace("<main>", f"<main>{attack}", 1))
    if forgotten:
        monkeypatch.setattr(pages, "escape", str)
    server = WatchServer(tmp_path / "runs", "127.0.0.1", 0, "T")
    server.start()
    try:
        run = f"{server.url.partition('/?')[0]}/run?{urlencode({'name': folder.name, 'token': 'T'})}"
        for address in (server.url, run):
            page = opened.open(address)
            page.ask("window.LIVE = document.querySelector('#live').firstChild")
            wait_for(lambda page=page: page.ask("window.LIVE !== document.querySelector('#live').firstChild"), 10)
            unharmed(page, stranger)
        assert page.ask("document.querySelector('#lure') !== null") == forgotten  # the log of the run

        # the report of a stranger's run, as its frame loads it
        (frame,) = {url for url in page.requests if "/report?" in url}
        page = opened.open(frame)
        assert page.ask("document.querySelector('#lure') !== null") and page.ask(OWN_SCRIPT)
        unharmed(page, stranger)
    finally:
        server.shutdown()
        server.server_close()
