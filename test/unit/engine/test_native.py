"""The native engine in one process: against a loop written by hand, and against itself after a restart."""

from __future__ import annotations

import logging

import pytest
import torch
from engines import COUNTS, built, config, equal, one_thread, run, saved, weights  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

from difftrain.contracts import Batch, ConfigFault, TrainingFault
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine, update
from difftrain.engine.native import NativeEngine
from difftrain.optim import make_optimizer, make_schedule
from difftrain.testing.family import TinyFamily, tiny_batch, tiny_step


def by_hand(steps: int, max_norm: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training, written as anybody would: mean loss, clip, AdamW, cosine."""
    family = TinyFamily()
    root = family.load().root.train()
    body = [p for n, p in root.named_parameters() if n.startswith("blocks.")]
    rest = [p for n, p in root.named_parameters() if not n.startswith("blocks.")]
    optimizer = torch.optim.AdamW(
        [{"params": body, "lr": 1e-3}, {"params": rest, "lr": 5e-4, "weight_decay": 0.1}], fused=True
    )
    schedule = make_schedule(config().optimizer, optimizer, 20)
    losses = []
    for step in range(steps):
        batch = tiny_step(step, 8)[0]
        x, noise, t = batch.features["pixels"], batch.draws["noise"], batch.draws["timestep"]
        share = (t / 1000)[:, None, None, None]
        loss = (root((1 - share) * x + share * noise, t, {}) - x).square().flatten(1).mean(1).sum() / 8
        loss.backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(root.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in root.named_parameters()}


@pytest.mark.flags("max_grad_norm")
@pytest.mark.parametrize("max_norm", [0.0, 0.1])
def test_it_is_the_loop_that_one_would_write(max_norm):
    engine = built(config({"max_grad_norm": max_norm}))
    losses, expected = by_hand(8, max_norm)
    assert run(engine, 0, 8) == losses
    assert equal(weights(engine), expected)


def test_stats_are_the_global_means_and_the_norm_before_clipping():
    free, clipped = (built(config({"max_grad_norm": norm}), TinyFamily(terms=2)) for norm in (0.0, 1e-3))
    a, b = (engine.step(tiny_step(0, 8), COUNTS) for engine in (free, clipped))
    assert a.sums.keys() == {"square", "absolute", "loss"}
    assert float(a.sums["loss"]) == pytest.approx(float(a.sums["square"] + a.sums["absolute"]))
    assert float(a.grad_norm) == float(b.grad_norm) > 1e-2
    assert float(a.skipped) == 0.0
    assert a.lrs == {"body": 0.0, "rest": 0.0}  # the rates of THIS step: warm-up starts at 0
    assert free.step(tiny_step(1, 8), COUNTS).lrs == {"body": 5e-4, "rest": 2.5e-4}


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_changes_nothing_but_rounding(accumulation):
    whole, parts = built(), built()
    assert run(parts, 0, 20, accumulation) == pytest.approx(run(whole, 0, 20), rel=1e-6)
    for name, tensor in weights(parts).items():
        assert (tensor - weights(whole)[name]).abs().max() < 1e-3


OPTIMIZERS = {
    "AdamW": {},
    "torch.optim.SGD": {"args": ("momentum=0.9",)},
    "torch.optim.SGD ": {"args": ("nesterov=True", "momentum=0.9", "weight_decay=0.01")},
    **{
        f"torch.optim.{name}": {}
        for name in ("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adafactor")
    },
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_is_bit_equal_for_any_optimizer(name, tmp_path):
    cfg = config(type=name.strip(), **OPTIMIZERS[name])
    family = TinyFamily(dropout=0.2, statistics=True)
    straight = built(cfg, family)
    losses = run(straight, 0, 5)
    saved(straight, tmp_path)
    losses += run(straight, 5, 10)
    assert losses[-1] != losses[-2]
    resumed = built(cfg, family)
    run(resumed, 0, 2)  # what it had before does not matter
    resumed.restore(tmp_path)
    assert run(resumed, 5, 10) == losses[5:]
    assert equal(weights(resumed), weights(straight))


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
    with pytest.raises(TrainingFault, match=r"the optimizer keeps .*/hook as a builtin_function_or_method"):
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
    assert "learning rate of body is" in caplog.text


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


@pytest.mark.flags("mixed_precision")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_keeps_fp32_masters_and_stays_near(precision):
    mixed, full = built(config({"mixed_precision": precision})), built()
    assert run(mixed, 0, 10) == pytest.approx(run(full, 0, 10), rel=2e-2)
    assert {p.dtype for _, p, _ in mixed.shards()} == {torch.float32}


def spoilt(step: int, value: float) -> list[Batch]:
    micro = tiny_step(step, 8, accumulation=2)
    micro[0].features["pixels"][1, 0, 0, 0] = value
    return micro


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "torch.optim.SGD"])
def test_what_is_not_finite_never_reaches_the_weights(value, precision, optimizer):
    cfg = config({"mixed_precision": precision}, type=optimizer)
    engine, other = built(cfg), built(cfg)
    run(engine, 0, 3)
    run(other, 0, 3)
    before = weights(engine)
    scale = engine._scaler.get_scale() if engine._scaler else 0.0
    stats = engine.step(spoilt(3, value), COUNTS)
    assert float(stats.skipped) == 1.0 and equal(weights(engine), before)
    if engine._scaler:
        assert engine._scaler.get_scale() == scale / 2
        other._scaler.load_state_dict(engine._scaler.state_dict())
    other.schedule.step()  # the schedule goes on, as the data does
    other.position += 1
    assert run(engine, 4, 6) == run(other, 4, 6) and equal(weights(engine), weights(other))


def test_a_loss_that_overflows_alone_is_skipped_too(monkeypatch):
    """An infinite loss whose gradient is finite: d/dx of (x + inf) is 1."""
    engine = built()
    real = engine.family.loss_sums
    monkeypatch.setattr(engine.family, "loss_sums", lambda *a: {k: v + float("inf") for k, v in real(*a).items()})
    before = weights(engine)
    stats = engine.step(tiny_step(0, 8), COUNTS)
    assert float(stats.skipped) == 1.0 and equal(weights(engine), before)


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


def test_a_snapshot_owns_its_memory(tmp_path):
    engine = built()
    run(engine, 0, 3)
    saved(engine, tmp_path / "at once")
    snapshot = engine.snapshot()
    run(engine, 3, 6)
    (tmp_path / "later").mkdir()
    snapshot.write(tmp_path / "later")
    for path in (tmp_path / "at once").iterdir():
        assert path.read_bytes() == (tmp_path / "later" / path.name).read_bytes()
    engine.snapshot()
    with pytest.raises(RuntimeError, match="belongs to a newer one"):
        snapshot.write(tmp_path / "later")


def test_other_weights_for_a_while(tmp_path):
    engine, other = built(), built()
    run(engine, 0, 3)
    run(other, 0, 3)
    before = weights(engine)
    average = {name: torch.full_like(shard, 0.5) for name, shard, _ in engine.shards()}
    with pytest.raises(ZeroDivisionError), engine.swapped(average):
        assert all(bool((tensor == 0.5).all()) for _, tensor, _ in engine.shards())
        for action in (engine.snapshot, lambda: run(engine, 3, 4), lambda: engine.restore(tmp_path)):
            with pytest.raises(AssertionError, match="other weights are in place"):
                action()
        raise ZeroDivisionError
    assert equal(weights(engine), before)
    assert run(engine, 3, 6) == run(other, 3, 6)
    assert equal(dict(engine.full_weights(average)), average)


def test_evaluation_sums_without_dropout_and_leaves_no_trace():
    family = TinyFamily(dropout=0.5, terms=2, statistics=True)
    engine, other = built(family=family), built(family=family)
    batches = [tiny_batch(range(3)), tiny_batch(range(3, 8))]
    run(engine, 0, 2)
    run(other, 0, 2)
    whole, pieces = engine.evaluate([tiny_batch(range(8))]), engine.evaluate(batches)
    assert whole.keys() == {"square", "absolute", "loss"}
    assert {k: float(v) for k, v in whole.items()} == pytest.approx({k: float(v) for k, v in pieces.items()}, rel=1e-6)
    assert {k: float(v) for k, v in engine.evaluate([]).items()} == {"square": 0.0, "absolute": 0.0, "loss": 0.0}
    inputs = family.inputs(batches[0], engine.parts)
    assert torch.equal(engine.predict(inputs), engine.predict(inputs)) and not engine.predict(inputs).requires_grad
    assert run(engine, 2, 5) == run(other, 2, 5)
    assert built().evaluate([]) == {}


def test_dropout_is_of_the_step_not_of_the_process():
    family = TinyFamily(dropout=0.5)
    engine, other = built(family=family), built(family=family)
    torch.manual_seed(99)
    run(engine, 0, 2)
    torch.manual_seed(100)
    assert run(other, 0, 2) and equal(weights(engine), weights(other))
    for rate in (0.0, 0.5):  # the same batch twice, and nothing learnt between
        still = built(family=TinyFamily(lr=0.0, dropout=rate))
        first, second = (float(still.step(tiny_step(0, 8), COUNTS).sums["loss"]) for _ in range(2))
        assert (first == second) == (rate == 0.0)


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


@pytest.mark.parametrize(
    ("family", "optimizer", "words"),
    [
        (TinyFamily(blocks=4), {}, ["weights missing from it: blocks.3.0.bias", "resume folder of another model"]),
        (TinyFamily(blocks=2), {}, ["weights that this model has not: blocks.2.0.bias"]),
        (TinyFamily(width=8), {}, ["weights of another shape: blocks.0.0.bias"]),
        (
            TinyFamily(),
            {"type": "torch.optim.SGD"},
            ["trained with torch.optim.adamw.AdamW, this run uses torch.optim.sgd.SGD"],
        ),
    ],
)
def test_a_resume_folder_of_another_model_is_refused_and_changes_nothing(family, optimizer, words, tmp_path):
    mine = built()
    run(mine, 0, 2)
    saved(mine, tmp_path)
    engine = built(config(**optimizer), family)
    before = weights(engine)
    with pytest.raises(ConfigFault) as caught:
        engine.restore(tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value
    assert equal(weights(engine), before) and engine.position == 0
    with pytest.raises(ConfigFault, match=r"has no engine\.json"):
        engine.restore(tmp_path / "missing")


def test_parameters_that_take_no_part_are_named():
    family = TinyFamily()
    parts = family.load()
    parts.root.extra = torch.nn.Linear(2, 2)
    engine = make_engine(config(), choose("cpu"), Ranks())
    engine.build(
        family,
        parts,
        lambda g: make_optimizer(config().optimizer, g),
        lambda o: make_schedule(config().optimizer, o, 9),
        [],
    )
    with pytest.raises(ConfigFault, match=r"take no part in the loss: extra\.weight, extra\.bias"):
        engine.step(tiny_step(0, 8), COUNTS)


def test_frozen_parameters_of_root_are_saved_and_not_trained(tmp_path):
    def frozen() -> NativeEngine:
        family = TinyFamily()
        family.load = lambda meta=False, load=family.load: _frozen(load())
        return built(family=family)

    engine = frozen()
    before = weights(engine)
    run(engine, 0, 3)
    after = weights(engine)
    assert {name for name in after if torch.equal(after[name], before[name])} == {"first.weight", "first.bias"}
    assert "first.weight" not in {name for name, _, _ in engine.shards()}
    saved(engine, tmp_path)
    other = frozen()
    other.restore(tmp_path)
    assert equal(weights(other), after)


def _frozen(parts):
    parts.root.first.requires_grad_(False)
    return parts


def test_an_optimizer_that_wants_the_loss_again_is_refused():
    with pytest.raises(ConfigFault, match="LBFGS evaluates the loss several times"):
        cfg = config(type="torch.optim.LBFGS")
        family = TinyFamily()
        family.param_groups = lambda root, groups=family.param_groups: [_one(groups(root))]
        built(cfg, family)


def _one(groups):
    groups[0].named_params += groups[1].named_params
    return groups[0]
