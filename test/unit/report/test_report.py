"""report.json, CaseName.log and the closing lines from a run's files."""

from __future__ import annotations

import json
import math
import platform
import re
from pathlib import Path

import pytest
from reports import config, facts

from difftrain.report.environment import HIDDEN
from difftrain.report.facts import LABEL, not_enabled
from difftrain.report.metrics import JsonLines
from difftrain.report.report import (
    ScoreTarget,
    case_log,
    case_name,
    final_lines,
    make_report,
    write_case_log,
    write_report,
)
from difftrain.report.sessions import Sessions

CONTRACT = [
    "fps",
    "compute_fps",
    "final_loss",
    "steps",
    "world_size",
    "global_batch",
    "device",
    "config",
    "versions",
    "dataset",
]
REPEATABLE = [
    "command",
    "code_version",
    "machine",
    "weights",
    "seed",
    "ips",
    "training_time_s",
    "e2e_training_time_s",
    "peak_memory_gib",
    "mfu",
    "matmul_utilisation",
    "flops_per_sample",
    "not_enabled",
    "definitions",
    "validation",
    "quantile_losses",
    "scores",
    "targets",
    "verdict",
    "rejected",
    "sessions",
    "skipped_steps",
    "published_baselines",
    "samples_seen",
]


def write_metrics(run_dir: Path, losses: list[float]) -> None:
    lines = JsonLines(run_dir / "metrics.jsonl")
    for step, loss in enumerate(losses, 1):
        lines.write({"step": step, "step_loss": loss, "avr_loss": 0.5})
    lines.close()


def test_everything_that_the_contract_and_an_outsider_need_is_there(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.3, 0.1, 0.2])
    write_report(tmp_path, make_report(config(), facts(tmp_path)))
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(CONTRACT) | set(REPEATABLE) <= report.keys()
    assert report["device"]["name"] == "Ascend910B3" and report["machine"] == {"cpu": "Kunpeng"}
    assert report["versions"]["driver"] == "24.1" and report["config"]["training"]["batch_size"] == 8
    assert report["published_baselines"]["label"] == LABEL and "not ours" in LABEL
    assert len(report["published_baselines"]["rows"]) == 8
    text = (tmp_path / "report.json").read_text()
    assert "abc" not in report["command"] and "secret" not in text and "NaN" not in text


def test_no_secret_of_the_configuration_is_in_the_report(tmp_path: Path) -> None:
    """Of an address its login; of the rest of the configuration nothing is lost."""
    cfg = config(
        model={"pretrained": "https://me:pass-word@hub/model"}, data={"dirs": ("https://u:other-word@h/x", "/d")}
    )
    report = make_report(cfg, facts(tmp_path))
    written = write_report(tmp_path, report).read_text()
    assert "pass-word" not in written and "other-word" not in written
    assert report["config"]["model"]["pretrained"] == f"https://{HIDDEN}@hub/model"
    assert report["config"]["data"]["dirs"] == [f"https://{HIDDEN}@h/x", "/d"]


def test_speed_figures_are_what_their_definitions_say(tmp_path: Path) -> None:
    report = make_report(config(), facts(tmp_path))
    assert report["fps"] == pytest.approx(960 / 30) and report["compute_fps"] == pytest.approx(960 / 24)
    assert report["training_time_s"] == pytest.approx(2.0)
    assert report["ips"] == pytest.approx(report["global_batch"] / report["training_time_s"] / report["world_size"])
    per_card = 960 * 2e12 / 30 / 8
    assert report["model_flops_per_s_and_card"] == pytest.approx(per_card)
    assert report["mfu"] == pytest.approx(per_card / 294.912e12)
    assert report["matmul_utilisation"] == pytest.approx(per_card / 25e12)
    assert report["measured_steps"] == 15 and report["warmup_steps"] == 5
    assert set(report) >= {"definitions"} and {"fps", "compute_fps", "mfu", "ips"} <= report["definitions"].keys()


def test_what_was_not_measured_is_null_not_nought(tmp_path: Path) -> None:
    report = make_report(config(), facts(tmp_path, device={"name": "AMD EPYC"}, matmul_flops=None))
    assert report["mfu"] is None and report["mfu_peak"] is None and report["matmul_utilisation"] is None
    assert report["final_loss"] is None and report["loss_std"] is None


def test_losses_come_from_the_recorded_lines(tmp_path: Path) -> None:
    write_metrics(tmp_path, [9.0] * 30 + [0.1, 0.3] * 50 + [math.nan])
    report = make_report(config(), facts(tmp_path))
    assert report["final_loss"] == 0.3 and report["loss_window"] == 100
    assert report["loss_mean"] == pytest.approx(0.2) and report["loss_std"] == pytest.approx(0.1005, rel=1e-2)


def test_rejects_are_summed_up_by_reason(tmp_path: Path) -> None:
    lines = [{"path": f"{n}.jpg", "reason": f"truncated: {n} bytes"} for n in range(60)] + [
        {"path": "b", "reason": "no caption"}
    ]
    (tmp_path / "rejected.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rejected = make_report(config(), facts(tmp_path))["rejected"]
    assert rejected["count"] == 61 and rejected["reasons"] == {"truncated": 60, "no caption": 1}
    assert len(rejected["first"]) == 50


def test_end_to_end_time_is_of_all_sessions(tmp_path: Path) -> None:
    Sessions(tmp_path, step=0).note(9, 1000.0, "stopped")
    Sessions(tmp_path, step=9).note(20, 130.0)
    report = make_report(config(), facts(tmp_path))
    assert report["e2e_training_time_s"] == pytest.approx(1140.0) and report["e2e_this_session_s"] == pytest.approx(
        140.0
    )
    assert [s["outcome"] for s in report["sessions"]] == ["stopped", "running"]
    assert make_report(config(), facts(tmp_path / "new"))["e2e_training_time_s"] == pytest.approx(140.0)


def test_targets_decide_the_verdict(tmp_path: Path) -> None:
    good, bad = ScoreTarget("colour", 0.8, 0.7), ScoreTarget("held-out / Wiener", 0.9, 0.8, at_least=False)
    assert make_report(config(), facts(tmp_path))["verdict"].startswith("no target ")
    assert make_report(config(), facts(tmp_path, targets=[good]))["verdict"] == "all 1 targets met"
    both = make_report(config(), facts(tmp_path, targets=[good, bad]))
    assert both["verdict"] == "missed: held-out / Wiener" and [t["met"] for t in both["targets"]] == [True, False]
    assert not ScoreTarget("x", math.nan, 0.0).met


def test_what_is_not_enabled_follows_the_configuration() -> None:
    before = set(not_enabled(config()))
    after = set(not_enabled(config(training={"gradient_checkpointing": True, "compile": True}, ema={"enable": True})))
    assert before - after == {"gradient checkpointing", "torch.compile", "averaged weights (EMA)"}
    assert {line.split(" (")[0] for line in after - before} == {"mixed precision"}
    cached = {"latents": True, "text_to_disk": True}
    dropped = {"enable_bucket": True, "subsets": [{"captions": {"dropout_rate": 0.1}}]}
    after = set(not_enabled(config(cache=cached, data={"datasets": [{}, dropped]})))
    gone = {" ".join(line.split()[:2]) for line in before - after}
    assert gone == {"aspect buckets", "caption dropout", "cached latents", "cached text"}


@pytest.mark.parametrize(
    ("performance", "epochs", "kind"),
    [(False, 120, "acc"), (False, 119, "perf"), (True, 500, "perf"), (False, None, "acc"), (True, None, "perf")],
)
def test_case_names(performance: bool, epochs: int | None, kind: str) -> None:
    name = case_name("StableDiffusionXL", 4, 8, performance=performance, max_epochs=epochs)
    assert name == f"StableDiffusionXL_bs4_8p_{kind}"


def test_the_case_log_has_modelzoos_keys_in_order(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.5, 1e-5])
    report = make_report(config(), facts(tmp_path))
    path = write_case_log(tmp_path, report)
    assert path.name == "StableDiffusionXL_bs8_8p_acc.log" and path.read_text() == case_log(report)
    pairs = [line.split(" = ") for line in path.read_text().splitlines()]
    assert [key for key, _ in pairs] == [
        "Network",
        "RankSize",
        "BatchSize",
        "DeviceType",
        "CaseName",
        "ActualFPS",
        "TrainingTime",
        "ActualLoss",
        "E2ETrainingTime",
    ]
    values = dict(pairs)
    assert values["RankSize"] == "8" and values["BatchSize"] == "8" and values["DeviceType"] == platform.machine()
    assert values["ActualFPS"] == "32.0" and values["TrainingTime"] == "2.0" and values["ActualLoss"] == "0.00001"
    assert all(
        re.fullmatch(r"[0-9.]+", values[key]) for key in ("ActualFPS", "TrainingTime", "ActualLoss", "E2ETrainingTime")
    )


def test_the_three_closing_lines(tmp_path: Path) -> None:
    write_metrics(tmp_path, [0.25])
    assert final_lines(make_report(config(), facts(tmp_path))) == [
        "Final Performance images/sec : 32.0",
        "Final Train Loss : 0.25",
        "E2E Training Duration sec : 140.0",
    ]
