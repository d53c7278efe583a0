"""Traces against one another: what can be compared, what is named, and how near is near enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from difftrain.cli.compare_trace import main
from difftrain.report.compare.trace_summary import sentences
from difftrain.report.trace import (
    AGREE,
    BACKWARD,
    FOLDER,
    NOT_COMPARABLE,
    PART,
    TOLERANCES,
    NotComparable,
    StepComparison,
    Trace,
    compare_traces,
    file_name,
)

# a network of two layers and what is between them: root(x) = last(relu(first(x)))
CALLS: list[dict[str, Any]] = [
    {"module": "first", "kind": "Linear", "entered": 2, "exited": 3, "inputs": {"input.0": "root/0.0/input.x"},
     "outputs": {"output.0": "first/0.0/output.0"}},
    {"module": "last", "kind": "Linear", "entered": 4, "exited": 5, "inputs": {"input.0": "last/0.0/input.0"},
     "outputs": {"output.0": "last/0.0/output.0"}},
    {"module": "root", "kind": "Net", "entered": 1, "exited": 6, "inputs": {"input.x": "root/0.0/input.x"},
     "outputs": {"output.0": "last/0.0/output.0"}},
]  # fmt: skip
FORWARD = ("root/0.0/input.x", "first/0.0/output.0", "last/0.0/input.0", "last/0.0/output.0")
ARRIVE = ("last/0.0/output.0", "last/0.0/input.0/share", "last/0.0/input.0", "first/0.0/output.0")
PARAMETERS = ("last.weight", "last.bias", "first.weight")


def values(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    names = [f"forward/{name}" for name in FORWARD] + [f"backward/{name}" for name in ARRIVE]
    names += [*(f"gradient/{name}" for name in PARAMETERS), "target/0/target", "loss/0/loss"]
    return {name: draw.standard_normal(64, dtype=np.float32) for name in names}


def written(
    run: Path, content: dict[str, np.ndarray], step: int = 3, rank: int = 0, dtype: str = "float32", **facts: str
) -> Path:
    tensors = {
        name: {"dtype": dtype, "shape": [len(each)], "stride": 1, "norm": str(float(np.linalg.norm(each)))}
        for name, each in content.items()
    }
    header = {
        "format": "1", "step": str(step), "rank": str(rank), "ranks": "1", "family": "tiny", "model": "m", "dtype": "float32",
        "precision": "no", "config": "c", "device": "cpu", "torch": "2", "records": "[]", "blocks": '["last"]',
        "calls": json.dumps([{"call": "0.0", **call} for call in CALLS]), "tensors": json.dumps(tensors),
    }  # fmt: skip
    path = run / FOLDER / file_name(step, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(content, path, {**header, **facts})
    return path


def changed(name: str, factor: float = 1.5) -> dict[str, np.ndarray]:
    content = values()
    content[name] = content[name] * np.float32(factor)
    return content


@pytest.fixture
def a(tmp_path: Path) -> Path:
    written(tmp_path / "a", values())
    return tmp_path / "a"


def against(a: Path, content: dict[str, np.ndarray], **facts: str) -> StepComparison:
    written(a.parent / "b", content, **facts)
    (found,) = compare_traces(a, a.parent / "b").steps
    return found


# ---------------------------------------------------------------- what is named

WHERE = {
    "forward/first/0.0/output.0": ("forward", "first", "output.0"),
    "forward/last/0.0/input.0": ("forward", "root", "output.0"),  # made between two modules, by the code around
    "forward/last/0.0/output.0": ("forward", "last", "output.0"),
    "backward/last/0.0/output.0": ("backward", "root", "output.0"),  # from the loss
    "backward/last/0.0/input.0/share": ("backward", "last", "input.0"),
    "backward/last/0.0/input.0": ("backward", "root", "last/0.0/input.0"),  # the one layer that reads it is right
    "backward/first/0.0/output.0": ("backward", "first", "output.0"),
    "gradient/last.weight": ("parameter", "last", "last.weight"),
    "gradient/first.weight": ("parameter", "first", "first.weight"),
}


@pytest.mark.parametrize("name", WHERE)
def test_the_first_that_parts_is_named_with_direction_and_place(a: Path, name: str) -> None:
    found = against(a, changed(name))
    assert found.code == PART and found.parting is not None and found.difference is not None
    assert (found.parting.direction, found.parting.module, found.parting.role) == WHERE[name]
    assert found.difference.tensor == name and found.difference.error == pytest.approx(0.5, rel=1e-2)
    assert found.parting.module not in found.parting.good


def test_all_that_comes_behind_is_no_matter(a: Path) -> None:
    content = {name: each if name.startswith(("forward/root", "target")) else -each for name, each in values().items()}
    found = against(a, content)
    assert found.parting is not None and (found.parting.module, found.parting.direction) == ("first", "forward")


@pytest.mark.parametrize("name", ["forward/root/0.0/input.x", "target/0/target"])
def test_other_inputs_are_not_comparable_and_named(a: Path, name: str) -> None:
    found = against(a, changed(name), records='["other"]')
    assert found.code == NOT_COMPARABLE and [each.tensor for each in found.inputs] == [name] and not found.same_records


OF_THE_NETWORK = {"forward/root/0.0/input.x": "input.x", "target/0/target": "target/0/target"}


@pytest.mark.parametrize("name", OF_THE_NETWORK)
def test_other_values_of_the_same_samples_part_at_what_the_network_reads(a: Path, name: str) -> None:
    """As from a text encoder, a timestep or a cache that went wrong: the samples are the same."""
    found = against(a, changed(name))
    assert found.code == PART and found.parting is not None and found.difference is not None
    assert (found.parting.module, found.parting.role) == ("root", OF_THE_NETWORK[name])
    assert found.difference.tensor == name
    (line,) = (each for each in sentences(compare_traces(a, a.parent / "b")) if each.startswith("first module"))
    assert f"root, {OF_THE_NETWORK[name]}" in line


def test_what_only_one_of_them_calls_is_passed_over(a: Path, tmp_path: Path) -> None:
    """A fused layer runs without its parts."""
    fused = [{"call": "0.0", **call} for call in CALLS if call["module"] != "first"]
    found = against(a, changed("forward/first/0.0/output.0"), calls=json.dumps(fused))
    assert found.alone == ("first",) and found.modules == 2 and found.code == AGREE


# ---------------------------------------------------------------- how near


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", "no"), ("float16", "fp16"), ("bfloat16", "bf16"), ("float32", "bf16")]
)
def test_tolerances_are_those_of_what_was_computed_in(a: Path, dtype: str, precision: str) -> None:
    """Under autocast a norm's output is fp32, and carries what was rounded before."""
    limit = max(TOLERANCES[dtype], TOLERANCES[{"no": "float32", "fp16": "float16", "bf16": "bfloat16"}[precision]])
    for factor, code in ((0.9, AGREE), (1.1, PART)):
        content = changed("forward/first/0.0/output.0", 1 + factor * limit)
        written(a.parent / "b", content, dtype=dtype, precision=precision)
        assert compare_traces(a, a.parent / "b").code == code
        content = changed("backward/first/0.0/output.0", 1 + factor * limit * BACKWARD)
        written(a.parent / "b", content, dtype=dtype, precision=precision)
        assert compare_traces(a, a.parent / "b").code == code


def test_a_tolerance_of_ones_own(a: Path, tmp_path: Path) -> None:
    written(tmp_path / "b", changed("forward/first/0.0/output.0", 1.01))
    codes = [compare_traces(a, tmp_path / "b", tolerance=each).code for each in (0.02, 0.005)]
    assert codes == [AGREE, PART]
    (found,) = compare_traces(a, tmp_path / "b", tolerance=0.02).steps
    assert found.unequal is not None and found.largest is not None
    assert found.unequal.tensor == found.largest.tensor == "forward/first/0.0/output.0"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_no_number_on_one_side_parts(a: Path, value: float) -> None:
    content = values()
    content["forward/first/0.0/output.0"][5] = value
    found = against(a, content)
    assert found.difference is not None and np.isinf(found.difference.error)
    written(a, content)
    assert compare_traces(a, a.parent / "b").code == AGREE  # both have it


def test_a_gradient_that_is_only_rounding_is_judged_by_its_module(a: Path) -> None:
    """The bias of keys has none: what is computed of it is what sums leave."""
    for run, factor in ((a, 1e-9), (a.parent / "b", -2e-9)):
        written(run, changed("gradient/last.bias", factor))
    assert compare_traces(a, a.parent / "b").code == AGREE


def test_a_gradient_that_never_came_parts(a: Path) -> None:
    content = values()
    del content["backward/first/0.0/output.0"]
    found = against(a, content)
    assert found.parting is not None and found.parting.module == "first" and found.parting.direction == "backward"


# ---------------------------------------------------------------- what can be compared


def test_steps_and_ranks_that_both_have(a: Path, tmp_path: Path) -> None:
    for run, keys in ((a, [(3, 0), (4, 0), (4, 1), (6, 0)]), (tmp_path / "b", [(2, 0), (4, 0), (4, 1), (6, 0)])):
        for step, rank in keys:
            written(run, changed("forward/last/0.0/output.0", 2.0 if rank and run == a else 1.0), step, rank)
    found = compare_traces(a, tmp_path / "b")
    assert [(each.step, each.rank, each.code) for each in found.steps] == [(4, 0, AGREE), (4, 1, PART)]
    assert found.left == 1 and compare_traces(a, tmp_path / "b", step=6).code == AGREE
    with pytest.raises(NotComparable, match="5"):
        compare_traces(a, tmp_path / "b", step=5)


def test_runs_folders_and_files(a: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "b", values())
    renamed = path.rename(tmp_path / "mine.safetensors")
    for one in (a, a / FOLDER, a / FOLDER / file_name(3, 0)):
        assert compare_traces(one, renamed).code == AGREE


REFUSED = {
    "another family": ({"family": "other"}, "other"),
    "another network": ({"model": "n"}, "network"),
    "another format": ({"format": "9"}, "9"),
    "no trace": ({"calls": ""}, "incomplete"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_traces_that_cannot_be_compared(a: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts, says = REFUSED[what]
    path = written(a.parent / "b", values(), **facts)
    assert main(["--trace", str(a), str(a.parent / "b")]) == NOT_COMPARABLE
    assert says in capsys.readouterr().err and path.exists()


@pytest.mark.parametrize("keep", [0.999, 0.5, 0.001, 0.0])
def test_a_torn_file(a: Path, keep: float, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(a.parent / "b", values())
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    assert main([str(a), str(a.parent / "b")]) == NOT_COMPARABLE
    assert path.name in capsys.readouterr().err


def test_other_files_and_folders(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"weight": np.zeros(3)}, tmp_path / "weights.safetensors")
    (tmp_path / "empty").mkdir()
    for other in ("weights.safetensors", "empty", "nowhere"):
        assert main([str(a), str(tmp_path / other)]) == NOT_COMPARABLE
        assert other in capsys.readouterr().err


def test_a_file_reads_as_it_was_written(a: Path) -> None:
    path = a / FOLDER / file_name(3, 0)
    trace = Trace.read(path)
    with safe_open(path, framework="numpy") as opened:
        assert trace.facts == dict(opened.metadata())
    assert all(np.array_equal(trace[name], each) for name, each in load_file(path).items())


# ---------------------------------------------------------------- the command


def test_the_command_names_the_module_and_ends_with_its_code(a: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(a.parent / "b", changed("forward/last/0.0/output.0"))
    assert main(["--trace", str(a), str(a.parent / "b")]) == PART
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith(" last (Linear)") for line in lines) and any("first" in each for each in lines[-2:])
    assert main([str(a), str(a)]) == AGREE and capsys.readouterr().out
    assert main([str(a), str(a.parent / "b"), "--tolerance", "0.9", "--step=3"]) == AGREE
    assert list(sentences(compare_traces(a, a)))


@pytest.mark.parametrize(
    ("words", "names"),
    [([], "2|two|needs"), (["a"], "needs"), (["a", "b", "c"], "3"), (["a", "b", "--tolerance=x"], "--tolerance"),
     (["a", "b", "--tolerance=-1"], "--tolerance"), (["a", "b", "--step=0"], "--step"), (["a", "b", "--stp=1"], "--stp")],
)  # fmt: skip
def test_a_wrong_command_line(words: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", *words]) == 2
    error = capsys.readouterr().err
    assert any(name in error for name in names.split("|"))


def test_json_holds_all_of_it(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "b", changed("forward/last/0.0/output.0", np.inf))
    target = tmp_path / "out" / "x.json"
    assert main(["--trace", str(a), str(tmp_path / "b"), "--json", str(target)]) == PART
    assert capsys.readouterr().out.splitlines()[-1] == str(target)
    read = json.loads(target.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    (step,) = read["steps"]
    assert (read["verdict"], read["exit_code"], step["step"]) == ("part", PART, 3)
    assert step["first_module_that_parts"]["module"] == "last" and step["difference"]["error"] is None
    for wrong in (f"--json={tmp_path}", "--json="):  # a verdict's code is no other fault's
        assert main([str(a), str(a), wrong]) == 2 and "--json" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([str(a), str(a), f"--json={tmp_path / 'file' / 'x.json'}"]) == 2


def test_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0 and "--tolerance" in capsys.readouterr().out
