"""The benchmark of an accelerator is rehearsed where there is none: checks and rows of a family, on tiny sizes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarked import benchmark


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("gpu")
    code, said = benchmark("gpu", "--rehearse", "--families=sd3", "--warm_up=1", "--steps=1", "--repeats=2", cwd=folder)
    assert code == 0, said
    (written,) = folder.iterdir()
    return said, json.loads(written.read_text())


@pytest.mark.nightly
def test_every_check_passes(rehearsed: tuple[str, dict[str, Any]]) -> None:
    said, found = rehearsed
    assert "FAIL" not in said and all(row["passed"] for row in found["checks"])
    assert sum("attention" not in row["check"] for row in found["checks"]) == 6


@pytest.mark.nightly
def test_rows_have_figures(rehearsed: tuple[str, dict[str, Any]]) -> None:
    _, found = rehearsed
    assert found["rehearsal"] is True
    for row in found["speed"]:
        assert row["family"] == "sd3" and row["size"] == "tiny" and row["fps"] > 0 and len(row["rounds"]) == 2
        assert row["mfu"] is None and row["matmul_utilisation"] > 0  # a CPU has no vendor's peak
    full = [row for row in found["speed"] if row["trains"] == "full"]
    assert {row["precision"] for row in full} == {"bf16", "fp16"} and {row["compile"] for row in full} == {"", "eager"}
    assert all(row["flops_per_sample"] == row["formula_flops_per_sample"] for row in full)
    ours, plain = (
        next(row["loss"] for row in full if (row["loop"] == "difftrain") is mine and row["precision"] == "bf16")
        for mine in (True, False)
    )
    assert abs(ours - plain) < 0.1 * plain  # the same batches and weights, but for what rows before have trained
    with_lora = "lora" in {row["trains"] for row in found["speed"]}
    assert with_lora is (importlib.util.find_spec("peft") is not None) is not bool(found["left_out"])


def test_without_an_accelerator_nothing_is_written(tmp_path: Path) -> None:
    code, said = benchmark("gpu", cwd=tmp_path)
    assert code == 0 and "not measured on a GPU" in said and not list(tmp_path.iterdir())
