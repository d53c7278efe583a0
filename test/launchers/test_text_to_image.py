"""The launchers of the Stable Diffusion 1.4 baseline: a real run on tiny weights, and faults before anything starts."""

from __future__ import annotations

import json
import re

import pytest
from launched import Launchers

ONE, EIGHT = "train_full_1m_1p_text_to_image_sd1-4.sh", "train_full_1m_8p_text_to_image_sd1-4.sh"
TINY = ("--init_from_config=tiny", "--resolution=64", "--batch_size=2", "--gradient_accumulation_steps=1")


def test_a_run_ends_with_its_pipeline_its_log_and_its_report(launchers: Launchers) -> None:
    flags = (*TINY, "--max_train_steps=3", "--timed_step=2", "--loss_target=1e-9", "--device_id=20")
    done = launchers.run(ONE, f"--dataset_name={launchers.pictures}", *flags)
    output = launchers.output(20)
    assert done.code == 0, done.text
    for name in (
        "model_index.json",
        "unet",
        "vae",
        "text_encoder",
        "tokenizer",
        "scheduler",
        "report.html",
        "train_20.log",
    ):
        assert (output / name).exists(), name
    case = dict(line.split(" = ") for line in (output / "StableDiffusion1_bs2_1p_acc.log").read_text().splitlines())
    assert (case["RankSize"], case["BatchSize"], case["Network"]) == ("1", "2", "StableDiffusion1")
    report = json.loads((output / "report.json").read_text())
    times = {line["step"]: line for line in map(json.loads, (output / "metrics.jsonl").read_text().splitlines())}
    assert report["timed_step"] == 2 and report["timed_step_s"] == times[2]["step_s"]
    assert report["timed_step_ips"] == pytest.approx(2 / times[2]["step_s"])
    assert [target["met"] for target in report["targets"]] == [False]  # told, and no failure of the run
    assert report["all_steps_loss_mean"] == pytest.approx(sum(line["step_loss"] for line in times.values()) / 3)
    assert re.search(r"^Final Performance images/sec : [0-9.]+$", done.text, re.MULTILINE)


def test_faults_end_with_2_before_anything_starts(launchers: Launchers) -> None:
    more = ("--tokenizer2_path=x", "--variant=fp16", "--trian_batch_size=1", "--device_id=21")
    done = launchers.run(EIGHT, f"--dataset_name={launchers.pictures}", *TINY, *more)
    assert done.code == 2 and not launchers.output(21).exists()
    assert all(name in done.text for name in ("--tokenizer2_path",))
    without = launchers.run(EIGHT, f"--dataset_name={launchers.pictures}", *TINY, *more[1:])
    assert without.code == 2 and "--variant" in without.text and "--trian_batch_size" in without.text
