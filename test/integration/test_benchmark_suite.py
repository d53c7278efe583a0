"""The benchmark suite: a matrix file is read strictly, and every trained family goes through it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarked import benchmark

from difftrain.models.registry import FAMILIES

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Let scripts of benchmarks/ be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield
    for name in ("suite", "speed", "workload"):
        sys.modules.pop(name, None)


@pytest.mark.nightly
def test_every_trained_family_is_measured(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(
        '[measure]\nwarm_up = 1\nsteps = 1\nrepeats = 1\n[[run]]\ntrains = ["full", "lora"]\n'
        '[[run]]\nfamily = ["flux"]\nengine = "accelerate"\nsizes.transformer.num_layers = 3\n'
    )
    code, said = benchmark("suite", "--matrix=small.toml", "--device=cpu", cwd=tmp_path)
    assert code == 0, said
    (written,) = tmp_path.glob("suite-small-*.json")
    found = json.loads(written.read_text())
    full = [row for row in found["rows"] if row["trains"] == "full"]
    assert [row["family"] for row in full] == [*FAMILIES, "flux"]
    assert all(row["fps"] > 0 and row["flops_per_sample"] == row["formula_flops_per_sample"] for row in full)
    deeper = [row["flops_per_sample"] for row in full if row["family"] == "flux"]
    assert deeper[1] > deeper[0] and full[-1]["engine"] == "accelerate"
    adapters = [row for row in found["rows"] if row["trains"] == "lora"]
    if importlib.util.find_spec("peft") is None:
        assert len(found["left_out"]) == len(FAMILIES) and not adapters
    else:
        assert [row["family"] for row in adapters] == list(FAMILIES) and all("peft" in row["lora"] for row in adapters)
        assert all(a["flops_per_sample"] < b["flops_per_sample"] for a, b in zip(adapters, full))


def test_time_that_is_over_leaves_cases_out(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text("[[run]]\nfamily = 'flux'\nprecision = ['no', 'bf16']\n")
    code, said = benchmark("suite", "--matrix=small.toml", "--device=cpu", "--budget_s=0", cwd=tmp_path)
    assert code == 0, said
    (written,) = tmp_path.glob("suite-small-*.json")
    found = json.loads(written.read_text())
    assert not found["rows"] and len(found["left_out"]) == 2


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[[run]]\nfamly = ['sdxl']", "famly"),
        ("[measure]\nrounds = 2\n[[run]]", "rounds"),
        ("[measure]\nsteps = 0\n[[run]]", "steps"),
        ("", "[[run]]"),
        ("[[run]]\nfamily = 'nothing'", "nothing"),
        ("[[run]]\nfamily = 'ltx2'", "ltx2"),
        ("[[run]]\nengine = 'megatron'", "megatron"),
        ("[[run]]\nprecision = 'fp64'", "fp64"),
        ("[[run]]\nfamily = 'flux'\nsize = 'dev'", "dev"),
        ("[[run]]\nresolution = 100\nfamily = 'sdxl'", "100"),
        ("[[run]]\nbatch_size = true", "True"),
        ("[[run]]\ncheckpointing = 1", "checkpointing"),
        ("[[run]]\ncompile = 'nobody'", "nobody"),
        ("[[run]]\nfamily = 'flux'\nsizes.unet.layers = 1", "unet"),
        ("[[run]", "line 1"),
    ],
)
def test_a_matrix_that_is_wrong_is_refused_by_name(content: str, named: str, tmp_path: Path) -> None:
    from suite import MatrixFault, read_matrix

    (tmp_path / "m.toml").write_text(content)
    with pytest.raises(MatrixFault) as raised:
        read_matrix(tmp_path / "m.toml")
    assert any(named in fault and "m.toml" in fault for fault in raised.value.faults)


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    from suite import MatrixFault, read_matrix

    (tmp_path / "m.toml").write_text("colour = 1\n[[run]]\nengine = 'a'\nadamw = 'b'\n[[run]]\nfamily = 'c'")
    with pytest.raises(MatrixFault) as raised:
        read_matrix(tmp_path / "m.toml")
    assert len(raised.value.faults) == 4


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "matrices").glob("*.toml")), ids=lambda path: path.stem)
def test_matrices_that_come_with_it_are_right(path: Path) -> None:
    from suite import read_matrix

    _, cases = read_matrix(path)
    assert len(cases) == len(set(cases)) >= len(FAMILIES)
    if path.stem == "tiny":
        assert {case.family for case in cases} == set(FAMILIES)
