"""The native engine in one process: state of every kind, the loss scale, and what the host waits for.

What every engine promises: test/contracts/test_engine.py.
"""

from __future__ import annotations

import logging

import pytest
import torch
from engines import COUNTS, built, config, equal, one_thread, run, saved, spoilt, weights  # noqa: F401
from refusals import names
from torch.utils._python_dispatch import TorchDispatchMode

from difftrain.contracts import TrainingFault
from difftrain.engine import update
from difftrain.testing.family import TinyFamily, tiny_step


class Odd(torch.optim.Optimizer):
    """Keep state of every kind, and learn a scale in its groups, as Prodigy does."""

    def __init__(self, params, lr: float = 1e-3, d: float = 1.0):
        super().__init__(params, {"lr": lr, "d": d, "seen": torch.zeros(2), "dtype": torch.float32, "history": ()})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["d"] *= 1.1
            group["seen"] = group["seen"] + 1
            group["history"] = (*group["history"][-2:], group["d"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"count": 0, "none": None, "flag": True, "rows": [p.new_zeros(p.shape[0])], "by": {}}
                state["count"] += 1
                state["rows"][0] += p.grad.flatten(1).mean(1) if p.ndim > 1 else p.grad
                state["by"][state["count"] % 3] = (float(p.grad.sum()), p.grad.half())
                p -= group["lr"] * group["d"] * (p.grad + 0.1 * state["rows"][0].view(-1, *[1] * (p.ndim - 1)))


def test_state_of_every_kind_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.optim, "Odd", Odd, raising=False)
    cfg = config(type="torch.optim.Odd")
    straight, resumed = built(cfg), built(cfg)
    losses = run(straight, 0, 5)
    saved(straight, tmp_path)
    resumed.restore(tmp_path)
    for group, other in zip(straight.optimizer.param_groups, resumed.optimizer.param_groups):
        assert group["d"] == other["d"] and group["history"] == other["history"]
        assert torch.equal(group["seen"], other["seen"])
        for p, q in zip(group["params"], other["params"]):
            a, b = straight.optimizer.state[p], resumed.optimizer.state[q]
            assert a.keys() == b.keys() and a["count"] == b["count"] and a["none"] is b["none"] is None
            assert a["by"].keys() == b["by"].keys() and all(isinstance(v, tuple) for v in b["by"].values())
            assert all(a["by"][k][0] == b["by"][k][0] and torch.equal(a["by"][k][1], b["by"][k][1]) for k in a["by"])
    losses += run(straight, 5, 10)
    assert run(resumed, 5, 10) == losses[5:]
    assert equal(weights(resumed), weights(straight))


def test_state_that_cannot_be_stored_is_named(tmp_path, monkeypatch):
    engine = built()
    run(engine, 0, 1)
    engine.optimizer.state[next(iter(engine.optimizer.state))]["hook"] = print
    with pytest.raises(TrainingFault, match=r"/hook as a builtin_function_or_method, .*checkpoint"):
        engine.snapshot()


@pytest.mark.parametrize(
    ("scheduler_type", "args"),
    [
        ("CosineAnnealingWarmRestarts", ("T_0=4",)),
        ("ExponentialLR", ("gamma=0.9",)),
        ("CyclicLR", ("base_lr=1e-4", "max_lr=1e-2", "step_size_up=3")),  # moves the momentum too
    ],
)
def test_resume_is_bit_equal_for_schedules_without_a_formula(scheduler_type, args, tmp_path):
    cfg = config(type="torch.optim.SGD", args=("momentum=0.9",), scheduler_type=scheduler_type, scheduler_args=args)
    straight, resumed = built(cfg), built(cfg)
    losses = run(straight, 0, 5)
    saved(straight, tmp_path)
    resumed.restore(tmp_path)
    losses += run(straight, 5, 10)
    assert run(resumed, 5, 10) == losses[5:]
    assert equal(weights(resumed), weights(straight))


def test_a_rate_changed_by_the_user_is_taken_and_said(tmp_path, caplog):
    straight = built()
    run(straight, 0, 5)
    saved(straight, tmp_path)
    resumed = built(config(), TinyFamily(lr=2e-3))
    with caplog.at_level(logging.WARNING, "difftrain"):
        resumed.restore(tmp_path)
    assert resumed.step(tiny_step(5, 8), COUNTS).lrs["body"] == 2 * straight.step(tiny_step(5, 8), COUNTS).lrs["body"]
    assert names(caplog.text, "body")


def test_fp16_resumes_with_its_scale_bit_by_bit(tmp_path):
    cfg = config({"mixed_precision": "fp16"})
    straight, resumed = built(cfg), built(cfg)
    straight._scaler.load_state_dict({**straight._scaler.state_dict(), "growth_interval": 3, "scale": 2.0**22})
    losses = run(straight, 0, 5)
    saved(straight, tmp_path)
    scale, tracker = straight._scaler.get_scale(), straight._scaler._get_growth_tracker()
    assert scale != 2.0**22 and tracker
    losses += run(straight, 5, 10)
    resumed.restore(tmp_path)
    assert (resumed._scaler.get_scale(), resumed._scaler._get_growth_tracker()) == (scale, tracker)
    assert run(resumed, 5, 10) == losses[5:]
    assert equal(weights(resumed), weights(straight))


def test_an_overflow_that_only_the_scaler_saw_is_skipped():
    """Hardware that saturates keeps its own record of overflows, which unscale_ hands on with finite gradients."""

    class Saturating(torch.amp.GradScaler):
        def _unscale_grads_(self, *args, **kwargs):
            return {key: torch.ones_like(found) for key, found in super()._unscale_grads_(*args, **kwargs).items()}

    engine = built(config({"mixed_precision": "fp16"}))
    engine._scaler = engine._update._scaler = Saturating("cpu", init_scale=1024.0)
    before = weights(engine)
    stats = engine.step(tiny_step(0, 8), COUNTS)
    assert float(stats.skipped) == 1.0 and torch.isfinite(stats.grad_norm) and equal(weights(engine), before)
    assert engine._scaler.get_scale() == 512.0


class HostReads(TorchDispatchMode):
    """Count what makes a host wait for a device: the value of a tensor, or its copy to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_the_host_reads_nothing_in_a_step(monkeypatch, precision):
    """As on an accelerator, where looking is not free; the fused kernels of the CPU obey found_inf as well."""
    monkeypatch.setattr(update, "_looking_is_free", lambda tensor: False)
    cfg = config({"mixed_precision": precision})
    engine, other = built(cfg, TinyFamily(dropout=0.1)), built(cfg, TinyFamily(dropout=0.1))
    run(engine, 0, 2)
    with HostReads() as reads:
        good = engine.step(tiny_step(2, 8, accumulation=2), COUNTS)
        before = weights(engine)
        bad = engine.step(spoilt(3, float("nan")), COUNTS)
    assert reads.count == 0
    assert float(good.skipped) == 0.0 and float(bad.skipped) == 1.0 and equal(weights(engine), before)
    run(other, 0, 2)
    monkeypatch.undo()
    other.step(tiny_step(2, 8, accumulation=2), COUNTS)
    with HostReads() as reads:
        other.step(spoilt(3, float("nan")), COUNTS)
    assert reads.count > 0
    assert run(engine, 4, 6) == run(other, 4, 6) and equal(weights(engine), weights(other))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_a_step_on_cuda_does_not_synchronise(precision):
    cfg = config({"mixed_precision": precision})
    engine = built(cfg, device="cuda")
    run(engine, 0, 2)
    batches = [tiny_step(step, 8, accumulation=2) for step in range(2, 6)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats = [engine.step(micro, COUNTS) for micro in [*batches, spoilt(6, float("nan"))]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [float(each.skipped) for each in stats] == [0.0, 0.0, 0.0, 0.0, 1.0]
