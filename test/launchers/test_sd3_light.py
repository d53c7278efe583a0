"""SD3-Light's launchers: a hundredth of the demo through both stages, a real job on tiny weights, and faults."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from launched import Launched, Launchers
from PIL import Image

ONE, CACHE = "pretrain_full_1m_1p_sd3_light.sh", "cache_1m_np_sd3_light.sh"
EIGHT, MANY = "pretrain_full_1m_8p_sd3_light.sh", "pretrain_full_nm_np_sd3_light.sh"
SCALE = "--demo_scale=0.002"


@pytest.fixture(scope="module")
def cached(launchers: Launchers) -> Launched:
    """The cache stage of the demo."""
    return launchers.run(CACHE, SCALE)


@pytest.fixture(scope="module")
def demo(launchers: Launchers, cached: Launched, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """The demo behind it, from another folder."""
    return launchers.run(ONE, SCALE, cwd=tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture(scope="module")
def tiny(launchers: Launchers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random model, as a folder."""
    from difftrain.demo.model import write_tiny

    folder = tmp_path_factory.mktemp("weights") / "tiny"
    write_tiny(folder, "sd3")
    return folder


def test_the_cache_stage_trains_nothing(launchers: Launchers, cached: Launched) -> None:
    assert cached.code == 0, cached.text
    assert "VAE fitted" in cached.text and "entries encoded" in cached.text
    assert "step=1 " not in cached.text and not launchers.output().exists()
    assert (launchers.output().parent / "cache_0" / "train_0.log").exists()


def test_one_command_caches_trains_draws_and_reports(launchers: Launchers, demo: Launched) -> None:
    output = launchers.output()
    assert demo.code == 0, demo.text
    for said in ("embedded demo: coloured shapes", "precision fp32: a CPU "):
        assert said in demo.text
    assert "VAE fitted" not in demo.text and "entries encoded" not in demo.text  # the cache stage has done both
    assert re.search(r"\bstep=1 epoch=1 step_loss=[0-9.]+ .*FPS: [0-9.]+$", demo.text, re.MULTILINE)
    assert re.search(r"^Final Performance images/sec : [0-9.]+$", demo.text, re.MULTILINE)
    case = dict(line.split(" = ") for line in next(output.glob("*_bs32_1p_acc.log")).read_text().splitlines())
    assert case["Network"].startswith("SD3") or "Diffusion" in case["Network"]
    assert Image.open(output / "sample" / "shapes_unseen_captions.png").size[0] > 64
    assert "Final Train Loss" in (output / "train_0.log").read_text() and (output / "report.html").exists()


def test_its_scores_are_in_the_report(launchers: Launchers, demo: Launched) -> None:
    scores = json.loads((launchers.output() / "report.json").read_text())["scores"]
    ratio = scores["unseen_over_gaussian"]
    assert ratio == pytest.approx(scores["unseen_loss"] / scores["gaussian_loss"])
    assert {"unseen_over_mean_latent", "unseen_over_nearest_caption", "colour_right"} <= scores.keys()
    assert scores["gaussian_loss"] < scores["mean_latent_loss"] < scores["mean_latent_point_loss"]


@pytest.mark.nightly  # SDXL's demo: test_demo.py
def test_two_processes_move_it_aside(launchers: Launchers, demo: Launched) -> None:
    again = launchers.run(EIGHT, SCALE, "--nproc_per_node=2")
    assert again.code == 0, again.text
    assert "2 processes on the CPU" in again.text and "batch 16 x 2 processes = 32" in again.text
    assert len(launchers.moved_aside()) == 1
    report = json.loads((launchers.output() / "report.json").read_text())
    assert report["world_size"] == 2 and report["global_batch"] == 32


def test_a_real_job_on_tiny_weights(launchers: Launchers, tiny: Path) -> None:
    job = (f"--model_name={tiny}", f"--dataset_name={launchers.pictures}", "--resolution=64", "--batch_size=2",
           "--model.num_layers=3", "--model.t5_max_length=8", "--training.max_steps=2", "--monitoring.logging_steps=1")  # fmt: skip
    done = launchers.run(MANY, *job, "--max_train_epoch=13", "--device_id=7", "--ema.enable=false")
    output = launchers.output(7) / "node0"
    assert done.code == 0, done.text
    assert "recipe: configs/sd3_light/base.toml" in done.text and "speed run: nothing" in done.text
    assert len(list(output.glob("*_bs2_1p_perf.log"))) == 1
    assert len((output / "metrics.jsonl").read_text().splitlines()) == 2


def test_faults_end_with_2_before_anything_starts(launchers: Launchers) -> None:
    done = launchers.run(ONE, "--training.max_stps=3", "--nnodes=2", "--demo_scale=2", "--device_id=5")
    assert done.code == 2 and not launchers.output(5).exists()
    for said in ("--nnodes: .*one machine, got 2", "--demo_scale: .* 0 .* 1, got 2"):
        assert re.search(said, done.text)
    wrong = launchers.run(ONE, "--training.max_stps=3", "--device_id=5")
    assert wrong.code == 2 and "max_stps" in wrong.text and "max_steps" in wrong.text
    assert "Traceback" not in done.text + wrong.text and "torchrun" not in done.text + wrong.text


def test_half_a_job_is_a_fault(launchers: Launchers, tmp_path: Path) -> None:
    assert "--dataset_name: is missing" in launchers.run(ONE, f"--model_name={tmp_path}").text
    done = launchers.run(ONE, f"--dataset_name={tmp_path}")
    assert done.code == 2 and "--model_name: is missing" in done.text and "init sd3_light" in done.text
