"""Two runs side by side: errors against closed forms, the first step apart, and what must be equal before losses are compared."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compared import made_run

from difftrain.report.compare.comparison import (
    RunComparison,
    compare_runs,
    effect_of,
    first_without_loss,
    relative_error,
    running_means,
)
from difftrain.report.compare.thresholds import Thresholds
from difftrain.report.run_files import LoggedStep, RunFiles, measured, read_run


def test_relative_errors() -> None:
    assert relative_error(2.0, 2.5) == 0.25 and relative_error(-2.0, -1.5) == 0.25
    assert relative_error(0.0, 0.0) == 0.0 and relative_error(0.0, 1e-9) == math.inf
    assert relative_error(1.0, math.nan) == relative_error(math.nan, 1.0) == relative_error(1.0, math.inf) == math.inf
    assert math.isnan(relative_error(math.nan, math.nan)) and math.isnan(relative_error(math.inf, math.nan))


def test_the_running_mean_is_the_sum_over_the_count() -> None:
    errors = [1.0 / k for k in range(1, 50)]
    assert running_means(errors) == pytest.approx([sum(errors[:n]) / n for n in range(1, 50)], rel=1e-12)
    assert running_means([math.nan, 2.0, math.nan, 4.0])[1:] == [2.0, 2.0, 3.0]
    assert running_means([1.0, math.inf]) == [1.0, math.inf]


def pair(tmp_path: Path, change: dict[int, dict[str, Any]] | None = None, **more: Any) -> tuple[RunFiles, RunFiles]:
    """Make two runs of twenty steps; change: values of lines of the second, by step."""
    a = read_run(made_run(tmp_path / "a"))
    return a, read_run(made_run(tmp_path / "b", change=change, **more))


def compared(tmp_path: Path, change: dict[int, dict[str, Any]] | None = None, **more: Any) -> RunComparison:
    return compare_runs(*pair(tmp_path, change, **more), Thresholds())


def test_a_constant_factor_is_the_error_at_every_step(tmp_path: Path) -> None:
    """b = a (1 + e): every error is e, so are their mean and the signed one."""
    e = 1e-3
    found = compared(tmp_path, {step: {"step_loss": (1 + e) / step} for step in range(1, 21)})
    assert found.errors is not None
    assert list(found.errors.loss) == pytest.approx([e] * 20, rel=1e-9)
    assert (found.errors.mean, found.errors.signed) == pytest.approx((e, e), rel=1e-9)
    assert (found.verdict, found.exit_code) == ("part", 1)
    assert found.divergence is not None and (found.divergence.step, found.divergence.what) == (1, "step_loss")


def test_errors_of_alternating_sign_have_no_signed_mean(tmp_path: Path) -> None:
    e = 1e-7
    found = compared(tmp_path, {step: {"step_loss": (1 + e * (-1) ** step) / step} for step in range(1, 21)})
    assert found.errors is not None and found.verdict == "agree" and found.exit_code == 0
    assert found.errors.mean == pytest.approx(e, rel=1e-6) and abs(found.errors.signed) < e / 1000


@pytest.mark.parametrize(
    ("key", "value"),
    [("step_loss", 0.5), ("grad_norm", 1.01), ("lr", 2e-4), ("skipped", 1), ("step_loss", None)],
)
def test_the_first_step_apart_is_named_with_what_is_apart(tmp_path: Path, key: str, value: Any) -> None:
    found = compared(tmp_path, {step: {key: value} for step in range(7, 21)})
    assert found.divergence is not None and (found.divergence.step, found.divergence.what) == (7, key)
    assert found.verdict == "part" and not all(check.met for check in found.checks)


def test_a_mean_beyond_its_limit_is_named_from_the_step_on_which_it_stays_there(tmp_path: Path) -> None:
    """Errors of 5e-6 from step 11 on: within a step's 1e-5; the mean (n - 10) 5e-6 / n passes 1e-6 after step 12."""
    found = compared(tmp_path, {step: {"step_loss": (1 + 5e-6) / step} for step in range(11, 21)})
    assert found.divergence is not None
    assert (found.divergence.step, found.divergence.what) == (13, "mean_relative_error")
    assert {check.name for check in found.checks if not check.met} == {"mean_relative_error"}


def test_losses_that_are_no_number_in_both_runs_do_not_agree(tmp_path: Path) -> None:
    nothing = {step: {"step_loss": None} for step in (5, 6)}
    a, b = (read_run(made_run(tmp_path / name, change=nothing)) for name in "ab")
    found = compare_runs(a, b, Thresholds())
    assert found.exit_code == 1 and found.divergence is not None and found.divergence.step == 5
    assert first_without_loss(a) == 5 and first_without_loss(read_run(made_run(tmp_path / "c"))) is None


def test_limits_follow_the_coarser_precision(tmp_path: Path) -> None:
    change = {step: {"step_loss": (1 + 5e-3) / step} for step in range(1, 21)}
    half = compared(tmp_path, change, training={"mixed_precision": "bf16"})
    assert half.verdict == "agree" and half.thresholds.step_relative_error == 2e-2
    (only,) = [each for each in half.differences if each.group == "configuration"]
    assert (only.effect, only.a, only.b) == ("rounding", "no", "bf16")
    assert compare_runs(half.a, half.b, Thresholds(mean_relative_error=1e-3)).verdict == "part"
    assert compare_runs(half.a, half.b, Thresholds(mean_relative_error=6e-3)).verdict == "agree"


def test_skips_of_fp16_are_no_fault(tmp_path: Path) -> None:
    change = {step: {"skipped": 1} for step in range(2, 21)}
    assert compared(tmp_path, change, training={"mixed_precision": "fp16"}).verdict == "agree"


# --- what must be equal

UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"training": {"seed": 2}}, "training.seed"),
    "global batch": ({"training": {"batch_size": 4}}, "global batch"),
    "learning rate": ({"optimizer": {"learning_rate": 1e-3}}, "--learning_rate"),
    "shift": ({"flow": {"shift": 3.0}}, "[flow] shift"),
    "weights": ({"model": {"pretrained": "/models/other"}}, "--pretrained_model_name_or_path"),
    "data": ({"plan_digest": "f00"}, "plan"),
    "clipping": ({"training": {"max_grad_norm": 0.0}}, "--max_grad_norm"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_not_the_same_work_is_not_compared_by_its_steps(tmp_path: Path, name: str) -> None:
    change, spelt = UNLIKE[name]
    found = compared(tmp_path, **change)
    assert (found.verdict, found.exit_code, found.errors, found.divergence) == ("not comparable", 2, None, None)
    assert any(spelt in reason or "--seed" in reason for reason in found.reasons), found.reasons
    assert found.ratios()["fps"] == 1.0  # speeds are laid side by side anyway


ALIKE: dict[str, dict[str, Any]] = {
    "device": {"training": {"device": "cpu"}},
    "split of the batch": {"training": {"batch_size": 1, "accumulation": 2}},
    "averages": {"ema": {"enable": True}},
    "more steps at a constant rate": {"training": {"max_steps": 4000}},
    "a sharded optimizer": {"optimizer": {"type": "oss"}},
    "data mounted elsewhere": {"data": {"dirs": ("/mnt/other",)}},
    "log_every": {"logging": {"log_every": 7}},
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_leaves_a_step_the_same_work_is_compared(tmp_path: Path, name: str) -> None:
    found = compared(tmp_path, **ALIKE[name])
    assert (found.verdict, found.reasons) == ("agree", ())
    assert [each for each in found.differences if each.group == "configuration"]


def test_without_plan_digests_the_fingerprint_tells(tmp_path: Path) -> None:
    a, b = (read_run(made_run(tmp_path / name, plan_digest=None)) for name in "ab")
    assert compare_runs(a, b, Thresholds()).verdict == "agree"
    c = read_run(made_run(tmp_path / "c", plan_digest=None, fingerprint="other"))
    assert compare_runs(a, c, Thresholds()).exit_code == 2
    d = read_run(made_run(tmp_path / "d", plan_digest=None, fingerprint=None))
    assert compare_runs(a, d, Thresholds()).exit_code == 2, "nobody knows is not the same"
    held_out = read_run(made_run(tmp_path / "e", plan_digest=None, validation={"split": 0.1}))
    assert compare_runs(a, held_out, Thresholds()).exit_code == 2, "the records are those, and fewer are trained on"


def test_data_that_changed_within_a_run_are_not_those_of_another(tmp_path: Path) -> None:
    a, b = pair(tmp_path)
    moved = replace(b, sessions=[{**b.sessions[0], "plan_digest": "before"}, *b.sessions])
    assert compare_runs(a, moved, Thresholds()).exit_code == 2


def test_another_place_in_the_data_is_named_by_its_step(tmp_path: Path) -> None:
    found = compared(tmp_path, {step: {"epoch": 9} for step in range(6, 21)})
    assert found.exit_code == 2 and any("step 6 " in reason for reason in found.reasons)


def test_schedules_of_other_lengths_are_told_by_their_rates(tmp_path: Path) -> None:
    found = compared(tmp_path, {step: {"lr": 5e-5} for step in range(4, 21)}, training={"max_steps": 4000})
    assert found.exit_code == 2 and any("step 4 " in reason for reason in found.reasons)


def test_steps_that_both_have_are_compared(tmp_path: Path) -> None:
    a = read_run(made_run(tmp_path / "a", log_every=4))
    b = read_run(made_run(tmp_path / "b", log_every=6))
    found = compare_runs(a, b, Thresholds())
    assert found.errors is not None and found.errors.steps == (12, 20)  # a line is due at the last step, too
    c = read_run(made_run(tmp_path / "c", first=21, last=30))
    assert compare_runs(a, c, Thresholds()).exit_code == 2


def test_every_field_has_an_effect(tmp_path: Path) -> None:
    """What a run is (config.digest) bears on its losses, unless it is known to be rounding, length or beside them."""
    cfg = read_run(made_run(tmp_path / "a")).identity
    effects = {path: effect_of(path) for path in cfg if path != "global batch"}
    assert effects["optimizer.learning_rate"] == effects["captions.dropout_rate"] == effects["loss.type"] == "losses"
    assert {path for path, effect in effects.items() if effect == "none"} == {
        "data.dirs", "data.reg_dirs", *(path for path in effects if path.split(".")[0] in ("ema", "demo"))
    }  # fmt: skip
    assert effect_of("training.device") == effect_of("logging.log_every") == effect_of("cache.preload") == "none"


# --- speeds


def test_ratios_and_their_limits(tmp_path: Path) -> None:
    a, b = pair(tmp_path, figures={"fps": 15.0, "compute_fps": 22.0, "peak_memory_gib": 30.0})
    given = Thresholds(min_fps_ratio=0.9, min_compute_fps_ratio=1.0, max_memory_ratio=1.4)
    found = compare_runs(a, b, given)
    assert found.ratios()["fps"] == 0.75 and found.ratios()["peak_memory_gib"] == 1.5
    assert (found.verdict, found.exit_code) == ("missed", 1)
    assert {check.name: check.met for check in found.checks if "ratio" in check.name} == {
        "min_fps_ratio": False, "min_compute_fps_ratio": True, "max_memory_ratio": False}  # fmt: skip


def test_a_ratio_that_is_asked_for_and_not_known_is_missed(tmp_path: Path) -> None:
    a, b = pair(tmp_path, figures={"fps": None})
    assert compare_runs(a, b, Thresholds(min_fps_ratio=0.1)).exit_code == 1


def steps_of(*values: tuple[int, float, int, int]) -> dict[int, LoggedStep]:
    """Make lines of (step, seconds a step, images so far, session)."""
    return {
        step: LoggedStep(step, 1.0, step_s=seconds, wait_s=seconds / 4, samples_seen=images, session=session)
        for step, seconds, images, session in values
    }


def test_speed_of_lines_leaves_the_warm_up_of_each_session_out() -> None:
    # twelve steps, four of them warm-up (a third): 8 x 2 images in 8 x 0.5 s, an eighth of a second of it waiting
    lines = steps_of(*((step, 9.0 if step <= 4 else 0.5, 2 * step, 1) for step in range(1, 13)))
    span = measured(lines, [{"session": 1, "from_step": 0}])
    assert (span.steps, span.images, span.fps, span.compute_fps) == (8, 16, 4.0, pytest.approx(16 / 3))
    # a second session goes on from step 9: its first step is warm-up, and steps 10 to 12 are made by it
    later = {step: line for step, line in lines.items() if step <= 9} | steps_of(
        *((step, 7.0 if step == 10 else 1.0, 2 * step, 2) for step in range(10, 13))
    )
    first = {"session": 1, "from_step": 0, "steps_done": 12}
    span = measured(later, [first, {"session": 2, "from_step": 9}])
    assert (span.steps, span.wall_s) == (5 + 2, 5 * 0.5 + 2 * 1.0)


def test_speed_of_lines_far_apart_counts_their_steps() -> None:
    span = measured(steps_of((10, 1.0, 20, 1), (20, 0.5, 40, 1), (30, 0.5, 60, 1)), [{"session": 1, "from_step": 0}])
    assert (span.steps, span.images, span.wall_s) == (20, 40, 10.0)
    assert measured({}, []).fps == 0.0
