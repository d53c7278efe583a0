"""Pages in a real browser: of a data set, by the training door and by the command, and of a run."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, Page, browser, installed
from doors import Door, write_pictures
from PIL import Image
from reports import config, facts

from difftrain.report.report import make_report, write_report
from difftrain.report.run_page import build_html

HOSTILE = '"><img src=x onerror=alert(1)>'
COUNT = 14
LOADED = "[...document.querySelectorAll('main img')].every(i => i.complete && i.naturalWidth > 0)"
# elements that stick out of the window, but for what scrolls inside its own box and what a frame cuts off
OUTSIDE = """[...document.querySelectorAll("body *")].filter(e =>
    e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".wide") && !e.closest(".frame")
    && !e.closest(".strip") && !e.closest("nav")).length"""
# rows of samples that show half of a picture where they begin
CUT = """[...document.querySelectorAll(".strip")].filter(row => [...row.querySelectorAll("figure")].some(one => {
    const [from, to] = ["left", "right"].map(side => one.getBoundingClientRect()[side] - row.getBoundingClientRect().left);
    return from < -1 && to > 1;
})).length"""


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
    (folder / "copy.txt").write_text("a copy, again")
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
    for width in (1280, 390):
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
    assert page.ask("document.title").startswith("Dataset")
    cards = dict(
        page.ask("[...document.querySelectorAll('.card')].map(c => [c.children[1].innerText, c.children[0].innerText])")
    )
    wanted = {"images with": str(COUNT), "not trained": "1", "exact duplicates": "1", "captions longer": "2"}
    for start, number in wanted.items():
        assert [cards[title] for title in cards if title.startswith(start)] == [number], start
    shots = page.ask("document.querySelectorAll('.shot').length")
    assert shots == COUNT
    assert page.ask("document.querySelectorAll('.shot img').length") == 3 * COUNT  # with masks
    assert page.ask("document.querySelectorAll('#buckets .panel:first-child rect.bar').length") == page.ask(
        "document.querySelectorAll('#buckets tbody tr').length"
    )
    for table in ("#sources", "#buckets", "#rejected", "#copies"):
        assert page.ask(f"document.querySelectorAll('{table} tbody tr').length") >= 1
    # the cut lies within its picture, and has the bucket's shape
    page.ask("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    inside = """[...document.querySelectorAll('.frame')].every(f => { const a = f.getBoundingClientRect(),
        b = f.querySelector('i').getBoundingClientRect(), r = f.closest('.pair').querySelectorAll('img')[1];
        return b.left >= a.left - 2 && b.right <= a.right + 2 && b.top >= a.top - 2 && b.bottom <= a.bottom + 2
            && Math.abs(Math.log(b.width / b.height * r.naturalHeight / r.naturalWidth)) < 0.05; })"""
    assert page.ask(inside)


def test_hostile_text_stays_text(opened: Browser, written: tuple[Path, str]) -> None:
    page = opened.open(written[0])
    assert page.ask("document.title") != "taken" and not page.errors
    assert page.ask("document.scripts.length") == 1  # ours
    assert page.ask("[...document.querySelectorAll('main img')].every(i => i.src.startsWith('data:image/jpeg'))")
    names = page.ask("[...document.querySelectorAll('.shot h3')].map(h => h.textContent)")
    assert sum(name.endswith(f"{HOSTILE}.png") for name in names) == 1
    assert "<script>document.title" in page.ask("document.body.textContent")


def test_its_images_are_filtered_and_enlarged(opened: Browser, written: tuple[Path, str]) -> None:
    page = opened.open(written[0])
    shown = "[...document.querySelectorAll('.shot')].filter(s => s.checkVisibility()).length"
    folded = page.ask(shown)
    assert 0 < folded < COUNT
    ask = "const box = document.querySelector('.filter input'); box.value = %r; box.dispatchEvent(new Event('input', {bubbles: true}))"
    page.ask(f"{{ {ask % 'wide one'} }}")
    assert page.ask(shown) == 1
    page.ask(f"{{ {ask % 'nobody wrote this'} }}")
    assert page.ask(shown) == 0
    page.ask(f"{{ {ask % ''} }}")
    page.ask(
        "{ const one = document.querySelector('.filter select'); one.selectedIndex = 1;"
        " one.dispatchEvent(new Event('input', {bubbles: true})) }"
    )
    bucket = "document.querySelector('.filter select').value"
    assert page.ask(shown) == page.ask(f"document.querySelectorAll(`.shot[data-bucket='${{{bucket}}}']`).length") > 0
    page.ask("[...document.querySelectorAll('.shot img.zoom')].find(i => i.checkVisibility()).click()")
    assert page.ask("document.querySelector('dialog').open")
    page.ask("document.querySelector('dialog button[aria-label=close]').click()")
    assert not page.ask("document.querySelector('dialog').open") and page.errors == []


def test_the_page_of_a_run_is_sound_in_a_browser_too(opened: Browser, tmp_path: Path) -> None:
    (tmp_path / "sample").mkdir()
    for step in (0, 4, 8):  # too large to stay PNG
        name = f"{HOSTILE.replace('/', '')}_{step:06d}_00_2024013112000{step}_7.png"
        Image.effect_noise((1500, 700), 90).convert("RGB").save(tmp_path / "sample" / name)
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            f'{{"step": {n}, "step_loss": {1 / n}, "samples_seen": {64 * n}, "elapsed_s": {n / 2}}}\n'
            for n in range(1, 101)
        )
    )
    write_report(tmp_path, make_report(config(), facts(tmp_path, notes={HOSTILE: f"<script>{HOSTILE}"})))
    path = build_html(tmp_path)
    page = opened.open(path)
    sound(page, path)
    phone = opened.open(path, 390)
    assert phone.ask("document.querySelector('.strip').scrollLeft") > 0 and phone.ask(CUT) == 0  # three are too many
    assert page.ask("document.scripts.length") == 1 and "<script>" in page.ask("document.body.textContent")
    assert page.ask("document.images.length") == 4  # three, and the one of the lightbox
    assert page.ask("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))")

    # --- letters of a chart keep their size on a phone
    letters = "document.querySelector('.plot text.tick').getBoundingClientRect().height"
    assert page.ask("innerWidth") == 390 and page.ask(letters) > 10

    # --- the value under the pointer, and what is dragged over is zoomed into
    page.resize(1280)
    point = """{ const svg = document.querySelector('.plot svg'), box = svg.getBoundingClientRect();
        svg.setPointerCapture = () => {};
        for (const [kind, share] of %s) svg.dispatchEvent(new PointerEvent(kind,
            {clientX: box.left + share * box.width, clientY: box.top + 50, bubbles: true})); }"""
    page.ask(point % [["pointermove", 0.999]])
    assert page.ask("document.querySelector('.tip').textContent") == "step 100step loss 0.01"
    ticks = "[...document.querySelector('.plot').querySelectorAll('text[text-anchor=middle].tick')].map(t => +t.textContent)"
    assert max(page.ask(ticks)) == 100
    page.ask(point % [["pointerdown", 0.2], ["pointermove", 0.4], ["pointerup", 0.4]])
    assert max(page.ask(ticks)) < 50
    page.ask("[...document.querySelectorAll('.tools button')].find(b => !b.hidden).click()")
    assert max(page.ask(ticks)) == 100

    # --- other x axes, smoothing, logarithms
    change = "const one = document.querySelector('.controls %s'); one.value = '%s'; one.dispatchEvent(new Event('%s'))"
    page.ask(f"{{ {change % ('select', 'images', 'change')} }}")
    page.ask(point % [["pointermove", 0.999]])
    assert page.ask("document.querySelector('.tip b').textContent") == "6400 images"
    line = "document.querySelector('.plot polyline').getAttribute('points')"
    rough = page.ask(line)
    page.ask(f"{{ {change % ('input', '20', 'input')} }}")
    assert page.ask(line) != rough
    page.ask("document.querySelector('.tools button[aria-pressed]').click()")
    assert page.ask("document.querySelector('.tools button[aria-pressed]').getAttribute('aria-pressed')") == "true"
    assert page.errors == []


def test_the_page_of_a_trained_run_fits_a_phone(opened: Browser, straight: Path, tmp_path: Path) -> None:
    """Its tables lie in one another, four deep, which no made-up report has."""
    shutil.copytree(straight, tmp_path / "run", ignore=shutil.ignore_patterns("*.safetensors", "*-state"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["kernels"]["attention"]["why"], "the deepest table of a run's page"
    path = build_html(tmp_path / "run")
    page = opened.open(path, 390)
    page.ask("document.querySelectorAll('details').forEach(one => one.open = true)")
    sound(page, path)


@pytest.mark.skipif(not installed(), reason="no browser is installed: how fast a fetched one is tells nothing")
def test_the_page_of_100_000_steps_opens_in_two_seconds(opened: Browser, tmp_path: Path) -> None:
    rng = np.random.Generator(np.random.Philox(1))
    keys = ("step_loss", "avr_loss", "fps", "compute_fps", "grad_norm", "lr", "peak_memory_gib", "data_wait_s")
    values = zip(*(rng.random(100_000).round(6).tolist() for _ in keys))
    lines = (
        {"step": step, **dict(zip(keys, numbers)), "samples_seen": 64 * step, "elapsed_s": step / 2}
        for step, numbers in enumerate(values, 1)
    )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(tmp_path, make_report(config(), facts(tmp_path, steps=100_000)))
    path, took = build_html(tmp_path), []
    for _ in range(3):  # the fastest of three: the machine has other work
        page = opened.open(path)
        took.append(page.ask("performance.timing.loadEventEnd - performance.timing.navigationStart") / 1000)
        assert page.ask("document.querySelectorAll('.plot.live').length") >= 5 and page.errors == []
    assert min(took) < 2, took


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
