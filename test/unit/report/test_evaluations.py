"""Evaluation sets in report.json and report.html: taken apart by set, one curve a quantile, distances with their error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from reports import config, facts

from difftrain.report.evaluations import by_set, panels, summary
from difftrain.report.facts import PUBLISHED, not_enabled, published
from difftrain.report.metrics import JsonLines
from difftrain.report.report import make_report, write_report
from difftrain.report.run_page import build_html


def lines() -> list[dict[str, Any]]:
    found = []
    for step in (0, 10, 20):
        line: dict[str, Any] = {"step": step, "epoch": 1, "samples_seen": 4 * step, "a/b/samples": 5, "c/samples": 7}
        for prefix, factor in (("", 1.0), ("ema_", 0.5)):
            line |= {f"a/b/{prefix}loss_quantile_0.{k}0": factor * k / (step + 1) for k in range(1, 10)}
            line |= {f"a/b/{prefix}loss": factor * 5 / (step + 1), f"a/b/{prefix}denoise_loss": factor}
        line |= {"c/loss": 1.0}
        if step != 10:
            line |= {"a/b/kid_efflite0": 0.5 - step / 100, "a/b/kid_efflite0_error": 0.01 if step else None}
            line |= {"a/b/kid_efflite0_vae": 0.1}
        found.append(line)
    return found


def test_lines_are_taken_apart_by_set() -> None:
    sets = by_set(lines())
    assert [each.name for each in sets] == ["a/b", "c"]
    first = sets[0]
    assert first.quantiles("loss") == first.quantiles("ema_loss") == [f"0.{k}0" for k in range(1, 10)]
    assert first.last("samples") == 5 and first.values["kid_efflite0"] == [(0, 0.5), (20, 0.3)]
    assert sets[1].quantiles("loss") == first.quantiles("denoise_loss") == []


def test_a_summary_says_how_it_began_and_where_it_is() -> None:
    row = summary(lines())[0]
    assert row["set"] == "a/b" and row["records"] == 5
    assert row["ema_loss"] == {"first": 2.5, "at_step": 0, "last": 2.5 / 21, "last_step": 20}
    assert row["kid_efflite0"] == {"first": 0.5, "at_step": 0, "last": 0.3, "last_step": 20}
    assert not any("quantile" in key for key in row)


def test_the_page_has_a_curve_for_each_quantile() -> None:
    page = "".join(panels(lines()))
    assert sum('class="curve ramp"' in panel for panel in page.split("<h3>")) == 2
    shades = [
        float(shade) for shade in re.findall(r'class="curve ramp" points="[^"]+" style="--shade: ([\d.]+)"', page)
    ]
    assert len(shades) == 18 and shades[:9] == sorted(set(shades[:9])) and (shades[0], shades[8]) == (0, 1)
    assert "a/b, 5 records: KID-efflite0" in page and "c, 7 records: mean loss" in page
    assert page.count("through the VAE") == 3 and "kid efflite0 vae" not in page  # SVG, legend and data
    assert "denoise loss" in page and "KID-efflite0 of" not in "".join(panels([lines()[1]]))


def test_what_was_measured_beside_the_loss_has_its_quantiles_too() -> None:
    measured = lines()
    for line in measured:
        for prefix in ("", "ema_"):
            loss = line[f"a/b/{prefix}loss"]
            for term in ("denoise_loss", "text_recon_loss"):
                line |= {f"a/b/{prefix}{term}_quantile_0.{k}0": k * loss for k in range(1, 10)}
                line[f"a/b/{prefix}{term}"] = 5 * loss
        line |= {f"c/denoise_loss_quantile_0.{k}0": 1.0 for k in range(1, 10)} | {
            "c/denoise_loss": 1.0
        }  # all of the loss
    assert [key for key in summary(measured)[0] if "quantile" in key] == []
    titles = re.findall("<h3>(.*?)</h3>", "".join(panels(measured)))
    assert not any("quantile 0" in title for title in titles)
    for term in ("loss", "denoise loss", "text recon loss"):
        for whose in ("raw weights", "averaged weights"):
            assert (
                sum(
                    re.fullmatch(rf"a/b, 5 records: {term} .*quantile .*, .*{whose}", title) is not None
                    for title in titles
                )
                == 1
            )
    of_c = [title for title in titles if title.startswith("c, 7 records: ")]
    assert len(of_c) == 2 and "nine quantiles" in of_c[0] and of_c[1] == "c, 7 records: denoise loss"


def test_report_and_page_have_them(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "evaluation.jsonl")
    for line in lines():
        file.write(line)
    file.close()
    write_report(tmp_path, make_report(config(), facts(tmp_path)))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["evaluation"] == lines()
    assert [row["set"] for row in report["evaluation_summary"]] == ["a/b", "c"]
    metrics = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        early = {"train/repa_loss": 0.5} if step == 1 else {}  # no longer measured at the end
        metrics.write({"step": step, "step_loss": 1.0, "train/text_recon_loss": 0.5 / step, **early})
    metrics.close()
    page = build_html(tmp_path).read_text()
    assert "<h3>Text recon loss</h3>" in page and "text recon loss, " in page
    assert "<h3>Repa loss</h3>" in page
    assert "KID-efflite0 of" in page and "no FID" in page


def test_figures_of_others_about_the_same_family_come_first() -> None:
    rows = published("sd3")
    assert [row.family for row in rows[:3]] == ["sd3"] * 3 and sorted(rows) == sorted(PUBLISHED)
    assert published("sdxl")[0].family == "sdxl"


def test_what_a_flow_did_without_is_named() -> None:
    off = not_enabled(config(model={"family": "sd3"}, loss={"text_recon_gamma": 0.1}))
    assert "token routing (TREAD)" in off and "text reconstruction" not in off and "min-SNR weighting" not in off
    assert "min-SNR weighting" in not_enabled(config())
    assert any(each.startswith("evaluation on ") for each in off)
    held = {"sets": ({"name": "held", "config": "held.toml"},)}
    assert not any(each.startswith("evaluation on ") for each in not_enabled(config(eval=held)))


def test_the_distance_of_middle_frames_has_its_own_name() -> None:
    lines = [
        {"step": step, "a/kid_efflite0_middle_frame": 0.5, "a/kid_efflite0_middle_frame_error": 0.01} for step in (0, 5)
    ]
    text = "".join(panels(lines))
    assert text.count("middle frames") == 1
    assert "0.5" in text and "generated images" not in text
