"""report.html: whole, self-contained, escaped, and drawn from what the files say."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from reports import config, facts

from difftrain.contracts import DataFault
from difftrain.report.charts import Curve, bar_chart, line_chart, thinned, ticks
from difftrain.report.metrics import JsonLines
from difftrain.report.page import POLICY, asset
from difftrain.report.report import ScoreTarget, make_report, write_report
from difftrain.report.run_page import build_html
from difftrain.report.samples import MOST_CELLS, MOST_STEPS, sample_images

VOID = {"meta", "img", "br", "line", "rect", "circle", "polyline", "link", "input", "hr"}
EVIL = '<script>alert("1")</script>&"\''


class Page(HTMLParser):
    """Collect tags and text; refuse what is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def run_folder(tmp_path: Path, lines: int = 40, **changes: Any) -> Path:
    metrics = JsonLines(tmp_path / "metrics.jsonl")
    for step in range(1, lines + 1):
        metrics.write(
            {"step": step, "step_loss": 1 / step, "avr_loss": 1.5 / step, "lr": 1e-6, "grad_norm": 0.3, "fps": 9.0}
            | {"compute_fps": 9.5, "data_wait_s": 0.01, "peak_memory_gib": 2.5}
        )
    metrics.close()
    report = make_report(config(), facts(tmp_path, **changes))
    write_report(tmp_path, report)
    return tmp_path


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    (tmp_path / "sample").mkdir()
    noise = io.BytesIO()  # the worst that can be compressed
    Image.effect_noise((1100, 300), 90).convert("RGB").save(noise, "PNG", compress_level=1)
    for number in range(2):
        for prompt in range(3):
            (tmp_path / "sample" / sample_name(number, prompt)).write_bytes(noise.getvalue())
    run_folder(tmp_path)
    text = build_html(tmp_path).read_text()
    page = Page(text)
    for tag, attrs in page.tags:
        assert tag not in ("iframe", "object", "base"), tag
        for name in ("src", "href", "srcset", "action", "xlink:href"):
            assert attrs.get(name, "data:").startswith(("data:image/", "data:", "#")), (tag, attrs)
        assert "style" not in attrs or "url(" not in attrs["style"]
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttpRequest|eval\(", text)
    script = re.search("<script>(.*?)</script>", text, re.S)
    assert script is not None and script[1] == asset("page.js") and page.count("script") == 1
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"content=\"{POLICY}; script-src 'sha256-{digest}'\"" in text
    anchors = {attrs["id"] for tag, attrs in page.tags if tag == "section"}
    assert anchors == {attrs["href"][1:] for tag, attrs in page.tags if tag == "a"} and "curves" in anchors
    assert page.count("img") == 6 and page.count("svg") >= 6
    assert len(text) < 2_000_000


def test_everything_from_outside_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "rejected.jsonl").write_text(json.dumps({"path": EVIL, "reason": EVIL}) + "\n")
    run_folder(
        tmp_path,
        argv=[EVIL],
        weights=EVIL,
        device={"name": EVIL, EVIL: EVIL},
        dataset={"name": EVIL, EVIL: [{"path": EVIL, EVIL: 1}], "nested": {EVIL: [EVIL]}},
        scores={EVIL: EVIL},
        targets=[ScoreTarget(EVIL, 1.0, 2.0)],
        quantile_losses=[{"quantile": 0.5, "timestep": 500, "loss": 0.1, EVIL: EVIL}],
        notes={EVIL: EVIL},
        network=EVIL.replace("/", ""),
    )
    text = build_html(tmp_path).read_text()
    page = Page(text)
    assert page.count("script") == 1 and EVIL not in text
    assert "alert(" in " ".join(page.text)


def test_the_page_shows_what_the_report_says(tmp_path: Path) -> None:
    run_folder(
        tmp_path,
        dataset={"name": "laion", "count": 640, "buckets": [{"bucket": "1024x1024", "records": 500}]},
        targets=[ScoreTarget("colour", 0.5, 0.7)],
        scores={"colour": 0.5},
        quantile_losses=[
            {"quantile": k / 10, "timestep": 100 * k, "loss": 0.1 * k, "samples": 4} for k in range(1, 10)
        ],
        attention="npu_fusion_attention",
    )
    text = " ".join(Page(build_html(tmp_path).read_text()).text)
    for word in (
        "StableDiffusionXL_bs8_8p_acc",
        "missed: colour",
        "1024x1024",
        "laion",
        "npu_fusion_attention",
        "published by",
        "Ascend910B3",
        "sdxl_pretrain.py",
        "min-SNR",
        "Not enabled",
        "resolved configuration",
    ):
        assert word in text, word


def test_a_run_that_recorded_nothing_still_has_a_page(tmp_path: Path) -> None:
    write_report(tmp_path, make_report(config(), facts(tmp_path, steps=0)))
    page = Page(build_html(tmp_path).read_text())
    assert "stopped" in page.text and "<polyline" not in (tmp_path / "report.html").read_text()


def test_a_folder_without_a_report_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataFault, match=r"report\.json"):
        build_html(tmp_path)
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(DataFault, match=r"report\.json: .*JSON"):
        build_html(tmp_path)


def test_building_the_page_imports_no_torch(tmp_path: Path) -> None:
    run_folder(tmp_path)
    code = (
        "import sys; from pathlib import Path; from difftrain.report.run_page import build_html; "
        "build_html(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    library = str(Path(__file__).parents[3] / "library")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env={"PYTHONPATH": library})
    assert done.returncode == 0


def test_curves_are_where_their_points_are() -> None:
    svg = line_chart([Curve("a", [0, 50, 100], [0.0, 10.0, None])], x_label="step")
    points = re.search(r'points="([^"]+)"', svg)
    assert points is not None
    (x0, y0), (x1, y1) = [tuple(map(float, pair.split(","))) for pair in points.group(1).split()]
    assert x0 < x1 and y0 > y1  # later is right, more is up
    assert "<svg" not in line_chart([Curve("a", [1], [None])], x_label="step")
    assert "<circle" in line_chart([Curve("a", [5], [3.0])], x_label="step")
    assert "e-" not in re.sub(r"<[^>]*>", "", line_chart([Curve("a", [1, 2], [1e-7, 5e-7])], x_label="step"))


# --- samples


def sample_name(step: int, prompt: int, name: str = "my_run", time: str = "") -> str:
    return f"{name}_{step:06d}_{prompt:02d}_{time or f'2024013112{step:04d}'}_7.png"


def write_sample(folder: Path, name: str, drawn: Any = None) -> Path:
    text = PngInfo()
    if drawn is not None:
        text.add_text("difftrain", drawn if isinstance(drawn, str) else json.dumps(drawn))
    folder.mkdir(exist_ok=True)
    Image.new("RGB", (4, 4)).save(folder / name, pnginfo=text)
    return folder / name


def test_samples_stand_in_rows_of_prompts_over_steps(tmp_path: Path) -> None:
    folder = tmp_path / "sample"
    for step in range(12):
        for prompt in range(3):
            write_sample(folder, sample_name(step, prompt), {"prompt": f"words {prompt} {EVIL}", "seed": 7, "cfg": 3})
        write_sample(folder, f"my_run_{step:06d}_grid.png")
    write_sample(folder, "my_run_unseen_captions.png")
    write_sample(folder, sample_name(5, 0, "earlier", "20230101000000"))  # another run's, in the same folder
    again = sample_name(11, 0, time="20240131125959")
    later = write_sample(folder, again, {"prompt": EVIL})  # drawn again after a restart
    images = sample_images(tmp_path)
    assert len(images.steps) == MOST_STEPS and (images.steps[0], images.steps[-1]) == ("000000", "000011")
    assert images.prompts == [0, 1, 2] and len(images.cells) == 3 * MOST_STEPS and images.total_steps == 12
    assert images.cells[0, "000011"] == later and [path.stem for path in images.extras] == ["my_run_unseen_captions"]
    text = build_html(run_folder(tmp_path)).read_text()
    page = Page(text)
    assert page.count("img") == 3 * MOST_STEPS + 1 and page.count("script") == 1
    assert text.index('id="samples"') < text.index('id="curves"')
    notes = [attrs["data-note"] for tag, attrs in page.tags if tag == "img"]
    assert sum(EVIL in text for text in notes) == 3 * MOST_STEPS
    assert sum(f"words 1 {EVIL}" in text for text in page.text) == 1  # once, below its row


def test_many_prompts_and_steps_keep_to_the_room_there_is(tmp_path: Path) -> None:
    for step in range(9):
        for prompt in range(40):
            (tmp_path / "sample").mkdir(exist_ok=True)
            (tmp_path / "sample" / sample_name(step, prompt)).touch()
    images = sample_images(tmp_path)
    assert len(images.cells) <= MOST_CELLS and (images.steps[0], images.steps[-1]) == ("000000", "000008")
    assert sample_images(tmp_path / "nowhere").cells == {}


@pytest.mark.parametrize("drawn", ["{", "[" * 9999, '"text"', "[1]", '{"prompt": {"a": 1}, "cfg": [1], "seed": null}'])
def test_images_that_say_nothing_sound_are_shown_all_the_same(tmp_path: Path, drawn: str) -> None:
    folder = tmp_path / "sample"
    write_sample(folder, sample_name(1, 0), drawn)
    (folder / sample_name(1, 1)).write_bytes(b"half a fi")
    page = Page(build_html(run_folder(tmp_path)).read_text())
    assert page.count("img") == 1


def test_grids_are_shown_where_there_is_nothing_else(tmp_path: Path) -> None:
    write_sample(tmp_path / "sample", "old_000100_grid.png")
    assert [path.name for path in sample_images(tmp_path).extras] == ["old_000100_grid.png"]


# --- its state


@pytest.mark.parametrize(
    ("status", "kind", "refreshes"), [("running", "busy", 1), ("stopped", "plain", 0), ("failed", "bad", 0)]
)
def test_a_page_says_how_its_run_is(tmp_path: Path, status: str, kind: str, refreshes: int) -> None:
    run_folder(tmp_path, steps=10)
    report = json.loads((tmp_path / "report.json").read_text())
    write_report(tmp_path, report | {"status": status, "last_error": EVIL if status == "failed" else None})
    page = Page(build_html(tmp_path).read_text())
    assert ("span", {"class": f"badge {kind}"}) in page.tags
    assert sum(attrs.get("http-equiv") == "refresh" for _, attrs in page.tags) == refreshes
    assert (EVIL in page.text) == (status == "failed")


def test_the_title_is_the_runs_name(tmp_path: Path) -> None:
    folder = tmp_path / "20240131_fox"
    folder.mkdir()
    run_folder(folder)
    page = build_html(folder).read_text()
    assert "<title>20240131_fox</title>" in page
    write_report(folder, make_report(config(save={"output_name": "red fox"}), facts(folder)))
    assert "<title>red fox</title>" in build_html(folder).read_text()


def test_what_was_not_measured_has_no_card_and_numbers_have_units(tmp_path: Path) -> None:
    run_folder(tmp_path)
    text = build_html(tmp_path).read_text()
    assert "2 TFLOP<" in text and "40.5 GiB" in text and "40.0 GiB" not in text
    assert "rejected.jsonl" not in text and "validation loss" not in text


# --- long runs, and axes


@pytest.mark.nightly
def test_a_run_of_100_000_steps_keeps_to_six_megabytes(tmp_path: Path) -> None:
    write_report(tmp_path, make_report(config(), facts(tmp_path)))
    keys = ("step_loss", "avr_loss", "lr", "grad_norm", "fps", "compute_fps", "data_wait_s", "peak_memory_gib")
    noise = np.random.default_rng(0).random((1000, len(keys)))
    lines = ["".join(f', "{key}": {value:.16f}' for key, value in zip(keys, row)) for row in noise]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 100_001):
            spike = ', "step_loss": 77.5' if step == 70_001 else ""
            session = 1 + (step > 50_000)
            file.write(
                f'{{"step": {step}, "session": {session}, "elapsed_s": {step % 50_000 / 4}, "samples_seen": {64 * step}'
                f"{lines[step % 1000]}{spike}}}\n"
            )
    (tmp_path / "sample").mkdir()
    grain = io.BytesIO()
    Image.effect_noise((160, 160), 90).convert("RGB").save(grain, "PNG", compress_level=1)
    for step in range(8):
        for prompt in range(8):
            (tmp_path / "sample" / sample_name(step, prompt)).write_bytes(grain.getvalue())
    started = time.process_time()
    path = build_html(tmp_path)
    assert time.process_time() - started < 15  # about 2 s on an idle core
    assert path.stat().st_size < 6_000_000
    page = Page(path.read_text())
    assert page.count("img") == 64
    plots = [json.loads(attrs["data-plot"]) for _, attrs in page.tags if "data-plot" in attrs]
    loss = plots[0]["curves"][0]
    assert max(loss["y"]) == 77.5 and loss["x"][loss["y"].index(77.5)] == 70_001
    assert (loss["x"][0], loss["x"][-1]) == (1, 100_000) and max(loss["my"]) < 2  # a mean of many is no spike
    axes = next(json.loads(attrs["data-axes"]) for _, attrs in page.tags if "data-axes" in attrs)
    assert axes["time"] == sorted(axes["time"]) and axes["time"][-1] > 20_000  # both sessions
    assert axes["images"][-1] == 6_400_000 and len(axes["step"]) <= 400


def test_thinning_keeps_the_ends_of_every_stretch() -> None:
    points = np.array([(x, 1000.0 if x == 70_001 else x % 7) for x in range(100_000)], dtype=float)
    kept = thinned(points, 600).tolist()
    assert len(kept) <= 600 and [70_001.0, 1000.0] in kept and kept == sorted(kept)
    assert kept[0][0] == 0 and kept[-1][0] == 99_999
    assert thinned(points[:50], 600).tolist() == points[:50].tolist()


def test_curves_are_named_where_they_end_without_overlap() -> None:
    curves = [Curve(f"q{k}", [0, 1], [5.0, 1.0 + k / 1000], "ramp", shade=k / 8) for k in range(9)]
    text = line_chart(curves, x_label="step", ends=True)
    downs = [float(down) for down in re.findall(r'class="end" x="[^"]+" y="([^"]+)"', text)]
    assert len(downs) == 9 and all(b - a > 10 for a, b in zip(sorted(downs), sorted(downs)[1:]))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0371, 0.0374), (-3.0, 1e6), (1e-9, 5e-9), (999.0, 1001.0)])
def test_ticks_are_round_and_span_the_range(low: float, high: float) -> None:
    marks = ticks(low, high)
    step = marks[1] - marks[0]
    assert marks[0] <= low + 1e-6 * step and marks[-1] >= high - 1e-6 * step and 3 <= len(marks) <= 8
    assert f"{step:.0e}"[0] in "125"


def test_bars_name_their_values() -> None:
    svg = bar_chart(["0.1", "0.2"], [0.5, 1.0], x_label="q")
    heights = [float(h) for h in re.findall(r'height="([0-9.]+)"><title>', svg)]
    assert heights[1] == pytest.approx(2 * heights[0], rel=0.01)
    assert "<svg" not in bar_chart(["a"], [float("nan")], x_label="q")
