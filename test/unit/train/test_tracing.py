"""Steps that are traced: nothing changes by it, what is in the file, and what is said where it cannot be written."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import config, one_thread  # noqa: F401 (a fixture)
from safetensors import safe_open
from safetensors.numpy import load_file
from traced import CLOCK, Stepped, stepped

from difftrain.config.schema.outputs import step_ranges
from difftrain.config.schema.sections import TrainConfig
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.report.trace import AGREE, FOLDER, compare_traces, file_name
from difftrain.testing.family import TinyFamily, tiny_step
from difftrain.train.diagnosis import tracing
from difftrain.train.diagnosis.module_calls import ModuleCalls
from difftrain.train.diagnosis.tracing import LARGEST, Tracing, sample, stride_of
from difftrain.train.state import Position

STEPS = 4


def tiny(training: dict[str, Any] | None = None, **options: Any) -> Stepped:
    return stepped(config(training), TinyFamily(**options), lambda _: tiny_step(0, 8, accumulation=2))


def ran(made: Stepped, folder: Path, trace: str | None) -> list[float]:
    """Train a few steps as the loop does; return their losses."""
    cfg = TrainConfig.model_validate({
        **made.cfg.model_dump(), "logging": {"trace": trace}, "save": {"output_dir": str(folder)},
    })  # fmt: skip
    hook = Tracing(cfg, made.model, choose("cpu"), Ranks(), CLOCK)
    hook.before_training(Position(0, steps_left=STEPS))
    losses = []
    for step in range(STEPS):
        stats = made.engine.step(tiny_step(step, 8, accumulation=2), {"samples": 8.0})
        losses.append(float(stats.sums["loss"]))
        hook.after_step(Position(step + 1, steps_left=STEPS - step - 1))
    return losses


def header(path: Path) -> dict[str, str]:
    with safe_open(path, framework="numpy") as opened:
        return dict(opened.metadata())


WAYS: dict[str, dict[str, Any]] = {
    "fp32": {}, "bf16": {"mixed_precision": "bf16"}, "fp16": {"mixed_precision": "fp16"},
    "half weights": {"full_precision": "bf16", "mixed_precision": "bf16"},
}  # fmt: skip


@pytest.mark.flags("trace")
@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_the_same_to_the_bit_with_it_and_without(way: str, tmp_path: Path) -> None:
    options = {"dropout": 0.2, "statistics": way != "half weights", "terms": 2}
    traced, plain = tiny(WAYS[way], **options), tiny(WAYS[way], **options)
    assert ran(traced, tmp_path, "1,3-4") == ran(plain, tmp_path / "none", None)
    weights = [dict(each.engine.full_weights()) for each in (traced, plain)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [file_name(step, 0) for step in (1, 3, 4)]
    assert not (tmp_path / "none").exists()


def test_steps_that_are_not_traced_have_no_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, made = [], tiny()
    module = made.parts.root.get_submodule("last")
    before = made.engine.step

    def step(*args: Any) -> Any:
        out = before(*args)
        seen.append(len(module._forward_hooks) + len(module._forward_pre_hooks))  # behind the step
        return out

    monkeypatch.setattr(made.engine, "step", step)
    monkeypatch.setattr(ModuleCalls, "before_forward", lambda *_: pytest.fail("nobody asked for it"))
    ran(made, tmp_path, None)
    monkeypatch.undo()
    assert seen == [0] * STEPS
    ran(made, tmp_path, "2")
    assert not module._forward_hooks and not module._forward_pre_hooks


def test_the_file_holds_what_every_module_read_made_and_got_back(tmp_path: Path) -> None:
    made = tiny(terms=2)
    ran(made, tmp_path, "2")
    path = tmp_path / FOLDER / file_name(2, 0)
    facts, values = header(path), load_file(path)
    tensors, calls = json.loads(facts["tensors"]), json.loads(facts["calls"])
    assert facts["family"] == "tiny" and facts["step"] == "2" and facts["micro_batches"] == "2"
    assert facts["format"] == "1" and facts["device"] == "cpu" and facts["dtype"] == "float32"
    assert json.loads(facts["blocks"]) == ["blocks.0", "blocks.1", "blocks.2"] and tensors.keys() == values.keys()

    # both micro batches, every module once in each; a module's input is its neighbour's output
    modules = {
        name or "root" for name, each in made.parts.root.named_modules() if not isinstance(each, torch.nn.ModuleList)
    }
    assert {(each["module"], each["call"]) for each in calls} == {
        (name, call) for name in modules for call in ("0.0", "1.0")
    }
    gelu = next(each for each in calls if each["module"] == "blocks.1.2" and each["call"] == "1.0")
    assert gelu["kind"] == "GELU" and gelu["inputs"] == {"input.0": "blocks.1.1/1.0/output.0"}
    for name in ("forward/root/0.0/input.x_t", "forward/root/0.0/input.timestep", "backward/last/1.0/output.0",
                 "backward/last/1.0/input.0/share", "target/1/target", "loss/0/square", "loss/0/absolute"):  # fmt: skip
        assert name in values, name
    assert {f"gradient/{name}" for name, _ in made.parts.root.named_parameters()} < values.keys()


def test_values_and_gradients_are_the_true_ones(tmp_path: Path) -> None:
    """Against the loss written by hand; unscaled, before clipping, of all micro batches."""
    made = tiny({"mixed_precision": "fp16", "max_grad_norm": 1e-3})
    other = tiny()
    ran(made, tmp_path, "1")
    values = load_file(tmp_path / FOLDER / file_name(1, 0))
    root, total = other.parts.root, torch.zeros(())
    for batch in tiny_step(0, 8, accumulation=2):
        inputs = other.family.inputs(batch, other.parts)
        total = total + other.family.loss_sums(other.family.forward(root, inputs), inputs)["square"] / 8
    total.backward()
    for name, parameter in root.named_parameters():
        found = torch.from_numpy(values[f"gradient/{name}"]).view_as(parameter)
        assert parameter.grad is not None and (found - parameter.grad).norm() < 1e-2 * parameter.grad.norm(), name
    assert float(header(tmp_path / FOLDER / file_name(1, 0))["loss_scale"]) > 1


def test_a_disk_that_is_full_is_said_and_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tracing, "write_bytes", full)
    with caplog.at_level("ERROR", "difftrain"):
        assert len(ran(tiny(), tmp_path, "1-2")) == STEPS
    assert len(caplog.messages) == 2 and all(os.strerror(errno.ENOSPC) in each for each in caplog.messages)
    assert str(tmp_path / FOLDER / file_name(1, 0)) in caplog.messages[0] and not list((tmp_path / FOLDER).iterdir())


def test_steps_that_the_session_does_not_reach_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "difftrain"):
        ran(tiny(), tmp_path, "9,12-14")
    (message,) = caplog.messages
    assert "--trace=9,12-14" in message and "1 to 4" in message and not (tmp_path / FOLDER).exists()


def test_two_runs_of_one_kind_agree_to_the_bit(tmp_path: Path) -> None:
    for name in "ab":
        ran(tiny(), tmp_path / name, "1-3")
    found = compare_traces(tmp_path / "a", tmp_path / "b")
    assert found.code == AGREE and [each.step for each in found.steps] == [1, 2, 3]
    assert all(each.unequal is None and each.modules == 21 for each in found.steps)


# ---------------------------------------------------------------- what is kept of a tensor, which steps


@pytest.mark.parametrize("shape", [(3, 4), (2, 4096, 64), (7, 320, 33, 65), (1, 1), ()])
def test_a_large_tensor_is_sampled_over_all_its_sides(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float32).reshape(shape)
    kept = sample(tensor)
    assert kept.values.numel() <= LARGEST and kept.values.numel() * kept.stride < tensor.numel() + kept.stride
    assert kept.norm == pytest.approx(float(tensor.double().norm()), rel=1e-5)
    sides = torch.unravel_index(kept.values.long(), shape) if shape else ()
    assert all(len(side.unique()) == size for side, size in zip(sides, shape))
    turned = tensor.transpose(0, -1).contiguous().transpose(0, -1) if shape else tensor
    assert torch.equal(sample(turned).values, kept.values)  # whatever the layout in memory


def test_a_small_tensor_is_kept_whole_and_apart() -> None:
    tensor = torch.ones(3, dtype=torch.bfloat16)
    kept = sample(tensor)
    tensor.zero_()
    assert kept.dtype == "bfloat16" and kept.values.tolist() == [1.0, 1.0, 1.0] and stride_of((3,)) == 1


def test_steps_and_ranges() -> None:
    assert [list(each) for each in step_ranges("1,3-5, 9")] == [[1], [3, 4, 5], [9]]
    for wrong in ("0", "5-3", "x", "1,-2", "1.5", "3-"):
        with pytest.raises(ValueError):
            step_ranges(wrong)
