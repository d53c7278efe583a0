"""Pages in a real browser: of a data set, by the training door and by the command, and of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, Page, browser
from doors import Door, write_pictures
from PIL import Image
from reports import config, facts

from difftrain.report.report import make_report, write_report
from difftrain.report.run_page import build_html

HOSTILE = '"><img src=x onerror=alert(1)>'
COUNT = 14
LOADED = "[...document.images].every(i => i.complete && i.naturalWidth > 0)"
# elements that stick out of the window, but for tables that scroll inside their panel and what a frame cuts off
OUTSIDE = """[...document.querySelectorAll("body *")].filter(e =>
    e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".wide") && !e.closest(".frame")).length"""


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    """One browser for all pages."""
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, one with a hostile name and caption, one with an alpha channel, a copy, and a file that is no picture."""
    folder = write_pictures(tmp_path_factory.mktemp("shown"), COUNT - 3)
    pixels = np.full((96, 64, 4), 200, np.uint8)
    pixels[:40, :, 3] = 0
    Image.fromarray(pixels).save(folder / f"{HOSTILE}.png")
    (folder / f"{HOSTILE}.txt").write_text(
        "<script>document.title = 'taken'; alert(2)</script> & more, " + "long " * 200
    )
    Image.fromarray(pixels).save(folder / "copy.png")
    (folder / "copy.txt").write_text("a copy, of the same")
    Image.effect_mandelbrot((1400, 300), (-2, -1, 1, 1), 40).convert("RGB").save(folder / "wide.jpg")
    (folder / "wide.txt").write_text("a wide one, with " + "W" * 400)
    (folder / "broken.jpg").write_bytes(b"no picture at all")
    return folder


@pytest.fixture(scope="module")
def written(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The page that the training door writes, and what it prints."""
    root = tmp_path_factory.mktemp("page")
    door, out = Door(data, root / "cache"), root / "out"
    augmented = ("--flip_aug", "--random_crop", "--shuffle_caption", "--alpha_mask", "--masked_loss")
    said = door.run([*door.flags(out, "--debug_dataset", *augmented, "--resolution=128,128")])
    return out / "dataset.html", said


def sound(page: Page, path: Path) -> None:
    """Assert that a page loads nothing, says nothing and fits the window."""
    assert page.errors == []
    assert {url for url in page.requests if not url.startswith("data:image/")} == {path.as_uri()}
    for width in (1280, 400):
        page.resize(width)
        assert page.ask("document.documentElement.scrollWidth") <= width
        assert page.ask(OUTSIDE) == 0, f"at {width} px"
    assert page.ask(LOADED)


@pytest.mark.flags("debug_dataset")
def test_the_door_writes_the_page_and_trains_nothing(written: tuple[Path, str]) -> None:
    path, said = written
    assert said.splitlines()[-1] == str(path)
    assert [each.name for each in path.parent.iterdir()] == ["dataset.html"]


def test_it_is_sound_in_a_browser(opened: Browser, written: tuple[Path, str], tmp_path: Path) -> None:
    page = opened.open(written[0])
    sound(page, written[0])
    page.resize(1280)
    page.picture(tmp_path / "page.png", whole=True)
    assert np.asarray(Image.open(tmp_path / "page.png").convert("L")).std() > 20


def test_what_the_browser_shows_is_the_data(opened: Browser, written: tuple[Path, str]) -> None:
    page = opened.open(written[0])
    assert page.ask("document.title").startswith("Data set")
    cards = dict(
        page.ask("[...document.querySelectorAll('.card')].map(c => [c.children[1].innerText, c.children[0].innerText])")
    )
    assert cards["pictures with captions"] == str(COUNT) and cards["not trained on"] == "1"
    assert cards["copies, byte for byte"] == "1" and cards["captions that are cut"] == "2"
    shots = page.ask("document.querySelectorAll('.shot').length")
    assert shots == COUNT
    assert page.ask("document.querySelectorAll('.shot img').length") == 3 * COUNT  # with masks
    assert page.ask("document.querySelectorAll('#buckets svg rect.bar').length") == page.ask(
        "document.querySelectorAll('#buckets tbody tr').length"
    )
    for table in ("#sources", "#buckets", "#rejected", "#copies"):
        assert page.ask(f"document.querySelectorAll('{table} tbody tr').length") >= 1
    # the cut lies within its picture, and has the bucket's shape
    inside = """[...document.querySelectorAll('.frame')].every(f => { const a = f.getBoundingClientRect(),
        b = f.querySelector('i').getBoundingClientRect(), r = f.closest('.pair').querySelectorAll('img')[1];
        return b.left >= a.left - 2 && b.right <= a.right + 2 && b.top >= a.top - 2 && b.bottom <= a.bottom + 2
            && Math.abs(Math.log(b.width / b.height * r.naturalHeight / r.naturalWidth)) < 0.05; })"""
    assert page.ask(inside)


def test_hostile_text_stays_text(opened: Browser, written: tuple[Path, str]) -> None:
    page = opened.open(written[0])
    assert page.ask("document.title") != "taken" and not page.errors
    assert page.ask("document.scripts.length") == 0
    assert page.ask("[...document.images].every(i => i.src.startsWith('data:image/jpeg'))")
    names = page.ask("[...document.querySelectorAll('.shot h3')].map(h => h.innerText)")
    assert sum(name.endswith(f"{HOSTILE}.png") for name in names) == 1
    assert "<script>document.title" in page.ask("document.body.innerText")


def test_the_page_of_a_run_is_sound_in_a_browser_too(opened: Browser, tmp_path: Path) -> None:
    (tmp_path / "sample").mkdir()
    Image.effect_noise((1500, 700), 90).convert("RGB").save(tmp_path / "sample" / "grid.png")  # too large to stay a PNG
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "step_loss": {1 / n}}}\n' for n in range(1, 9)))
    write_report(tmp_path, make_report(config(), facts(tmp_path, notes={HOSTILE: f"<script>{HOSTILE}"})))
    path = build_html(tmp_path)
    page = opened.open(path)
    sound(page, path)
    assert page.ask("document.scripts.length") == 0 and "<script>" in page.ask("document.body.innerText")
    assert page.ask("document.images.length") == 1
    assert page.ask("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))")


def test_the_command_writes_the_same_facts(data: Path, written: tuple[Path, str], tmp_path: Path) -> None:
    door = Door(data, written[0].parents[1] / "cache")
    words = ["--train_data_dir", str(data), "--resolution=128,128", "--enable_bucket", "--min_bucket_reso=32"]
    words += [
        "--max_bucket_reso=128",
        "--seed=1",
        f"--output={tmp_path / 'page.html'}",
        f"--json={tmp_path / 'facts.json'}",
    ]
    door.env["PYTHONPATH"] = str(door.path.parents[1] / "library")
    door.run_words([sys.executable, "-m", "difftrain.cli", "dataset", "inspect", *words, "--max_pictures=4"])
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["totals"]["records"] == COUNT and len(facts["cards"]) == 4
    assert facts["captions"]["tokens"] is None  # no model was named
