"""The embedded demo through its launchers, a hundredth of it: what it prints, leaves and scores."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from launched import Launched, Launchers
from PIL import Image

SCALE = "--demo_scale=0.01"


@pytest.fixture(scope="module")
def demo(launchers: Launchers, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """The first command of the README, from another folder, and shorter still: steps here are all alike."""
    return launchers.run("1m_1p", SCALE, "--max_train_steps=4", cwd=tmp_path_factory.mktemp("elsewhere"))


def test_the_first_command(launchers: Launchers, demo: Launched) -> None:
    output = launchers.output()
    assert demo.code == 0, demo.text
    for said in ("embedded demo: coloured shapes", "precision no: a CPU ", "VAE fitted"):
        assert said in demo.text
    assert re.search(r"^Final Performance images/sec : [0-9.]+$", demo.text, re.MULTILINE)
    assert re.search(r"^Final Train Loss : [0-9.]+$", demo.text, re.MULTILINE)
    for name in ("shapes.safetensors", "shapes-ema.safetensors", "shapes-state", "report.html"):
        assert (output / name).exists(), name
    assert len(list(output.glob("*_bs32_1p_acc.log"))) == 1
    assert Image.open(output / "sample" / "shapes_captions_grid.png").size[0] == 16 * 64
    assert "Final Train Loss" in (output / "train_0.log").read_text()


def test_its_scores_are_in_the_report(launchers: Launchers, demo: Launched) -> None:
    report = json.loads((launchers.output() / "report.json").read_text())
    scores = report["scores"]
    assert {"colour_right", "size_right", "one_piece", "held_out_over_wiener", "wrong_caption_ratio"} <= scores.keys()
    assert scores["held_out_over_wiener"] == pytest.approx(scores["held_out_loss"] / scores["wiener_loss"])
    assert 0.3 < scores["wiener_loss"] < 0.9  # of about 1 for predicting nothing
    assert re.search("wrong.caption.ratio", (launchers.output() / "report.html").read_text())


# eight are started where nothing is said: the dry run of test_real_job.py counts them, and eight train nightly
@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.nightly)])
def test_several_processes_move_it_aside(launchers: Launchers, demo: Launched, count: int) -> None:
    before = len(launchers.moved_aside())
    again = launchers.run("1m_8p", SCALE, "--max_train_steps=2", *([] if count == 8 else [f"--nproc_per_node={count}"]))
    assert again.code == 0, again.text
    batch = 32 // count
    assert f"{count} processes on the CPU" in again.text
    assert f"batch {batch} x {count} processes = {batch * count}" in again.text
    aside = launchers.moved_aside()
    assert len(aside) == before + 1 and (aside[-1] / "shapes.safetensors").exists()
    report = json.loads((launchers.output() / "report.json").read_text())
    assert report["world_size"] == count and report["global_batch"] == batch * count
    assert report["scores"]["pictures"] == 8


@pytest.mark.flags("demo", "demo_score")
def test_real_pictures_come_through_npm(launchers: Launchers) -> None:
    few = ("--max_train_steps=2", "--validation_split=0.01")  # records to score, of all that are there
    done = launchers.run("1m_1p", "--dataset_name=emoji", SCALE, *few, "--device_id=1")
    if shutil.which("npm") is None:
        assert done.code == 2 and "--dataset_name=emoji: " in done.text and "Node.js" in done.text
        return
    assert done.code == 0, done.text
    report = json.loads((launchers.output(1) / "report.json").read_text())
    assert report["dataset"]["count"] == 1852 and report["dataset"]["rejected"] == 0
    assert "held_out_over_wiener" in report["scores"] and "colour_right" not in report["scores"]


def test_a_demo_takes_no_model(launchers: Launchers, tmp_path: Path) -> None:
    done = launchers.run("1m_1p", "--dataset_name=emoji", f"--model_name={tmp_path}", "--demo_scale=2")
    assert done.code == 2
    assert "--model_name: the demo emoji " in done.text and re.search("--demo_scale: .* 0 .* 1, got 2", done.text)
