"""Limits of a comparison: defaults by precision, files of TOML and JSON, and every fault of a file at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from difftrain.contracts import ConfigFault
from difftrain.report.compare.thresholds import FULL, HALF, Thresholds, read_thresholds


def test_defaults_follow_the_precision() -> None:
    assert Thresholds().for_precision(False) == FULL and Thresholds().for_precision(True) == HALF
    assert FULL.step_relative_error == 1e-5 and HALF.step_relative_error == 2e-2
    given = Thresholds(mean_relative_error=0.0, min_fps_ratio=0.9)
    assert given.for_precision(True) == HALF.model_copy(update={"mean_relative_error": 0.0, "min_fps_ratio": 0.9})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("limits.toml", "mean_relative_error = 0.02\nmin_fps_ratio = 1\n"),
        ("limits.json", '{"mean_relative_error": 0.02, "min_fps_ratio": 1}'),
    ],
)
def test_a_file_of_either_kind(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_thresholds(tmp_path / name) == Thresholds(mean_relative_error=0.02, min_fps_ratio=1.0)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("mean_relativ_error = 0.02", ["mean_relativ_error", "mean_relative_error"]),
        (
            "mean_relative_error = '2 %'\nmin_fps_ratio = 0\nx = 1",
            ["mean_relative_error", "'2 %'", "min_fps_ratio", "x"],
        ),
        ("step_relative_error = -1.0", ["step_relative_error", "-1"]),
        ("step_relative_error = inf", ["step_relative_error"]),
        ("step_relative_error = nan", ["step_relative_error"]),
        ("max_memory_ratio = true", ["max_memory_ratio"]),
        ("max_memory_ratio = 2026-01-01", ["max_memory_ratio"]),
        ("[mean_relative_error]\na = 1", ["mean_relative_error"]),
        ("mean_relative_error = ", ["limits.toml"]),
    ],
)
def test_faults_name_the_key_and_the_value(tmp_path: Path, text: str, named: list[str]) -> None:
    (tmp_path / "limits.toml").write_text(text)
    with pytest.raises(ConfigFault) as raised:
        read_thresholds(tmp_path / "limits.toml")
    assert all(name in str(raised.value) for name in named), str(raised.value)


@pytest.mark.parametrize("content", [b"[0.02]", b"\xff\xfe\x00", b"", b"[" * 100_000, b'{"mean_relative_error": NaN}'])
def test_files_that_are_no_table(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "limits.json").write_bytes(content)
    for path in (tmp_path / "limits.json", tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(ConfigFault):
            read_thresholds(path)
