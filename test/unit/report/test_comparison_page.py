"""The page of a comparison: whole, self-contained, escaped; its logarithmic charts."""

from __future__ import annotations

import math
import re
from pathlib import Path

from compared import made_run

from difftrain.report.charts import Curve, line_chart
from difftrain.report.compare.comparison import compare_runs
from difftrain.report.compare.page import comparison_page
from difftrain.report.compare.thresholds import Thresholds
from difftrain.report.facts import LABEL, PUBLISHED
from difftrain.report.run_files import read_run

EVIL = "<script>alert(1)</script>"


def test_a_logarithmic_axis_has_powers_of_ten(tmp_path: Path) -> None:
    """Three errors a decade apart are drawn at equal distances; what is 0 or no number has no place."""
    chart = line_chart([Curve("e", [1, 2, 3, 4, 5], [1e-6, 1e-5, 1e-4, 0.0, math.inf])], x_label="step", log=True)
    (points,) = re.findall(r'points="([^"]+)"', chart)
    downs = [float(point.split(",")[1]) for point in points.split()]
    assert len(downs) == 3 and abs((downs[0] - downs[1]) - (downs[1] - downs[2])) < 0.11 and downs[0] > downs[2]
    assert [label for label in re.findall(r'text-anchor="end">([^<]+)<', chart)] == ["1e-6", "1e-5", "1e-4"]
    assert "polyline" not in line_chart([Curve("e", [1, 2], [0.0, 0.0])], x_label="step", log=True)


def test_the_page_says_what_was_found(tmp_path: Path) -> None:
    change = {step: {"step_loss": 2.0} for step in range(9, 21)}
    a, b = (
        read_run(made_run(tmp_path / name, change=c)) for name, c in (("a", None), (EVIL.replace("/", "|"), change))
    )
    c = read_run(made_run(tmp_path / "c", training={"seed": 2}))
    names = {"A": a, "B": b, "C": c, "D": ("nowhere", f"nowhere: {EVIL}")}
    text = comparison_page(names, {"B": compare_runs(a, b, Thresholds()), "C": compare_runs(a, c, Thresholds())})
    assert EVIL not in text and text.count("<script") == 1 and "&lt;script&gt;" in text
    assert not re.search(r"(?:src|href)=\"(?!#|data:)", text), "nothing is loaded from anywhere"
    assert "--seed" in text and LABEL in text and all(row.source.split(",")[0] in text for row in PUBLISHED[:1])
    for anchor in ("verdict", "curves", "errors", "speed", "differences", "runs", "comparison"):
        assert f'<section id="{anchor}">' in text
    assert re.search(r"<b>9</b><span>[^<]*B", text), "the first step apart is on a card"


def test_two_runs_without_a_common_step_have_curves_all_the_same(tmp_path: Path) -> None:
    a, b = read_run(made_run(tmp_path / "a")), read_run(made_run(tmp_path / "b", first=21, last=40))
    text = comparison_page({"A": a, "B": b}, {"B": compare_runs(a, b, Thresholds())})
    assert text.count("<polyline") >= 8 and '<section id="errors">' not in text
