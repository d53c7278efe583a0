"""The metric line, read the way users' scripts read it, and what metrics.jsonl keeps."""

from __future__ import annotations

import json
import math
import re
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from difftrain.report.line import StepMetrics, exact_json, fixed

METRICS = StepMetrics(
    step=12,
    epoch=2,
    step_loss=0.123456789,
    avr_loss=0.2,
    lr=1e-7,
    grad_norm=1234.5678,
    fps=20.1703,
    compute_fps=21.0,
    data_wait_s=0.0031,
    peak_memory_gib=31.254,
    samples_seen=384,
)


@given(st.floats(min_value=1e-12, max_value=1e12), st.booleans(), st.integers(3, 9))
def test_fixed_never_has_an_exponent_and_keeps_its_digits(size: float, negative: bool, significant: int) -> None:
    value = -size if negative else size
    text = fixed(value, significant)
    assert re.fullmatch(r"-?[0-9]+\.[0-9]+", text)
    assert float(text) == pytest.approx(value, rel=0.51 * 10 ** (1 - significant))


def test_fixed_of_odd_values() -> None:
    assert (
        fixed(0.0) == "0.0" and fixed(1e-5) == "0.00001" and fixed(3.0) == "3.0" and fixed(123456789.0) == "123456789.0"
    )
    assert fixed(math.nan) == "nan" and fixed(math.inf) == "inf"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_records_keep_every_bit_in_fixed_point(value: float) -> None:
    text = exact_json({"x": value, "nested": [value]})
    assert "e" not in text.replace("nested", "").lower()
    back = json.loads(text)
    assert float(back["x"]) == value and float(back["nested"][0]) == value


def test_what_json_cannot_say_is_null_and_text_is_escaped() -> None:
    assert json.loads(exact_json({"a": math.nan, "b": -math.inf, "c": True, "d": 'ä"\n', "e": None})) == {
        "a": None,
        "b": None,
        "c": True,
        "d": 'ä"\n',
        "e": None,
    }


def test_the_greps_of_users_scripts_read_the_line() -> None:
    line = METRICS.line()

    def shell(command: str) -> str:
        return subprocess.run(["sh", "-c", command], input=line + "\n", capture_output=True, text=True).stdout.strip()

    assert shell("grep -o 'step_loss=[0-9.]*' | cut -d= -f2") == "0.123457"
    assert shell("grep 'step_loss=' | awk -F 'step_loss=' '{print $2}' | awk '{print $1}'") == "0.123457"
    assert shell("grep 'FPS: ' | awk '{print $NF}'") == "20.17"
    assert shell("grep -a 'FPS: ' | awk -F 'FPS: ' '{print $2}'") == "20.17"
    assert shell("grep -o ' lr=[0-9.]*' | cut -d= -f2") == "0.0000001"
    assert re.fullmatch(
        r"step=12 epoch=2 step_loss=[0-9.]+ avr_loss=[0-9.]+ lr=[0-9.]+ grad_norm=[0-9.]+ data_wait=[0-9.]+ mem=[0-9.]+ "
        r"FPS: [0-9.]+",
        line,
    )


def test_small_numbers_stay_readable_numbers() -> None:
    line = replace(METRICS, step_loss=3e-9, lr=0.0, grad_norm=2e-8, fps=0.00123, data_wait_s=2e-9).line()
    assert "e-" not in line and "step_loss=0.000000003 " in line and line.endswith("FPS: 0.00123")
    assert "data_wait=0.0 " in line and "lr=0.0 " in line


def test_an_estimated_rate_is_shown_beside_the_factor_that_was_given() -> None:
    assert "d" not in METRICS.record() and "adapted" not in METRICS.line()
    adapted = replace(METRICS, lr=0.5, d=2e-5, lrs={"unet": 0.5, "text_encoder_1": 1.0})
    assert " lr=0.5 adapted=0.00001 grad_norm=" in adapted.line()
    assert adapted.record()["d"] == 2e-5
    scalars = {name: value for name, value in adapted.scalars().items() if name.startswith("lr/")}
    assert scalars == {
        "lr/unet": 0.5,
        "lr/text_encoder_1": 1.0,
        "lr/d*lr/unet": 1e-5,  # kohya's tags
        "lr/d*lr/text_encoder_1": 2e-5,
    }


def test_a_skipped_step_is_seen_in_the_line() -> None:
    line = replace(METRICS, step_loss=math.nan, skipped=3).line()
    assert "step_loss=nan" in line and "skipped=3" in line and line.endswith("FPS: 20.17")


def test_the_record_has_the_keys_of_the_contract_and_groups_only_where_there_are_several() -> None:
    keys = [
        "step",
        "epoch",
        "step_loss",
        "avr_loss",
        "lr",
        "grad_norm",
        "fps",
        "compute_fps",
        "data_wait_s",
        "peak_memory_gib",
        "samples_seen",
    ]
    record = METRICS.record()
    assert set(keys) <= record.keys() and "lrs" not in record and "terms" not in record
    both = replace(METRICS, lrs={"unet": 1e-6, "text_encoder_1": 1e-7}, terms={"denoise": 0.1, "text": 0.02})
    assert both.record()["lrs"] == {"unet": 1e-6, "text_encoder_1": 1e-7} and both.record()["terms"]["text"] == 0.02
    assert both.scalars()["lr/text_encoder_1"] == 1e-7 and both.scalars()["loss/text"] == 0.02
    assert "loss/current" not in replace(METRICS, step_loss=math.nan).scalars()
