"""report.html: whole, self-contained, escaped, and drawn from what the files say."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from reports import config, facts

from difftrain.contracts import DataFault
from difftrain.report.charts import Curve, bar_chart, line_chart, thinned, ticks
from difftrain.report.metrics import JsonLines
from difftrain.report.report import ScoreTarget, make_report, write_report
from difftrain.report.run_page import build_html, sample_pictures

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
    Image.effect_noise((1500, 1000), 90).convert("RGB").save(noise, "PNG", compress_level=1)
    for number in range(6):
        (tmp_path / "sample" / f"last_e{number:06d}_grid.png").write_bytes(noise.getvalue())
    run_folder(tmp_path)
    text = build_html(tmp_path).read_text()
    page = Page(text)
    for tag, attrs in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "base"), tag
        for name in ("src", "href", "srcset", "action", "xlink:href"):
            assert attrs.get(name, "data:").startswith(("data:image/", "data:", "#")), (tag, attrs)
        assert "style" not in attrs or "url(" not in attrs["style"]
    assert not re.search(r"url\(|@import", text)
    assert "default-src 'none'; img-src data:" in text
    anchors = {attrs["id"] for tag, attrs in page.tags if tag == "section"}
    assert anchors == {attrs["href"][1:] for tag, attrs in page.tags if tag == "a"} and "curves" in anchors
    assert page.count("img") == 4 and page.count("svg") >= 6
    assert len(text) < 4_000_000


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
    assert page.count("script") == 0
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
        "published by others, not ours",
        "Ascend910B3",
        "sdxl_pretrain.py",
        "min-SNR",
        "What is not enabled",
        "the resolved configuration",
    ):
        assert word in text, word


def test_a_run_that_recorded_nothing_still_has_a_page(tmp_path: Path) -> None:
    write_report(tmp_path, make_report(config(), facts(tmp_path, steps=0)))
    page = Page(build_html(tmp_path).read_text())
    assert "nothing was recorded" in " ".join(page.text) and "not finished" in " ".join(page.text)


def test_a_folder_without_a_report_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataFault, match=r"report\.json"):
        build_html(tmp_path)
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(DataFault, match="no JSON"):
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
    assert "nothing was recorded" in line_chart([Curve("a", [1], [None])], x_label="step")
    assert "<circle" in line_chart([Curve("a", [5], [3.0])], x_label="step")
    assert "e-" not in re.sub(r"<[^>]*>", "", line_chart([Curve("a", [1, 2], [1e-7, 5e-7])], x_label="step"))


def test_the_first_and_the_newest_grids_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / "sample"
    folder.mkdir()
    names = [f"my_grid_run_{step:06d}_{kind}" for step in range(6) for kind in ("00_20240131_1", "grid")]
    for place, name in enumerate(names):
        Image.new("RGB", (4, 4)).save(folder / f"{name}.png")
        os.utime(folder / f"{name}.png", (place, place))
    chosen = [path.stem.split("_")[-2:] for path in sample_pictures(tmp_path)]
    assert chosen == [[f"{step:06d}", "grid"] for step in (0, 3, 4, 5)]
    for path in folder.glob("*_grid.png"):
        path.unlink()
    assert [path.stem[-1] for path in sample_pictures(tmp_path)] == ["1"] * 4
    assert sample_pictures(tmp_path / "nowhere") == []


def test_thinning_keeps_the_ends_of_every_stretch() -> None:
    points = [(float(x), 1000.0 if x == 70_001 else float(x % 7)) for x in range(100_000)]
    kept = thinned(points, 600)
    assert len(kept) <= 600 and (70_001.0, 1000.0) in kept and kept == sorted(kept)
    assert thinned(points[:50], 600) == points[:50]


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
    assert "nothing was recorded" in bar_chart(["a"], [float("nan")], x_label="q")
