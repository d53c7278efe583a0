"""Updates during the backward pass, against updates after it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from engines import COUNTS, built, config, equal, one_thread, run, saved, weights  # noqa: F401

from difftrain.contracts import ConfigFault, Group
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine, update
from difftrain.engine.fused import parts_of
from difftrain.engine.native import NativeEngine
from difftrain.optim import make_optimizer, make_schedule
from difftrain.testing.family import TinyFamily, tiny_step

FREE = {"max_grad_norm": 0.0}
ONE = {"fused_backward": True}


def alive(engine: NativeEngine) -> int:
    return sum(each.grad.untyped_storage().nbytes() for each in engine._trained.values() if each.grad is not None)


def peak(engine: NativeEngine) -> int:
    """Return the most bytes of gradients that a step holds at once."""
    most = 0

    def comes(gradient):
        nonlocal most
        most = max(most, alive(engine) + gradient.untyped_storage().nbytes())

    handles = [each.register_hook(comes) for each in engine._trained.values()]
    engine.step(tiny_step(0, 8), COUNTS)
    for handle in handles:
        handle.remove()
    return most


@pytest.mark.flags("fused_backward_pass", "fused_optimizer_groups")
@pytest.mark.parametrize("how", [ONE, {"fused_groups": 4}])
@pytest.mark.parametrize(
    ("optimizer", "args"),
    [
        ("AdamW", ()),
        ("torch.optim.SGD", ("momentum=0.9",)),
        ("Adafactor", ()),
        ("torch.optim.RAdam", ()),
        ("GenericOptim", ("momentum_type='sm'", "rank=2")),
        ("Automagic", ()),
        ("AdamW8bitKahan", ()),
    ],
)
def test_without_clipping_it_is_the_same_training(how, optimizer, args, tmp_path):
    family = TinyFamily(dropout=0.1, terms=2)
    after = built(config(FREE, type=optimizer, args=args), family)
    during = built(config(FREE, type=optimizer, args=args, **how), family)
    assert run(after, 0, 3) == run(during, 0, 3) and equal(weights(after), weights(during))
    saved(during, tmp_path)  # and the checkpoint is that of any other run
    resumed = built(config(FREE, type=optimizer, args=args), family)
    resumed.restore(tmp_path)
    back = built(config(FREE, type=optimizer, args=args, **how), family)
    back.restore(tmp_path)
    losses = run(after, 3, 6)
    assert run(during, 3, 6) == losses == run(resumed, 3, 6) == run(back, 3, 6)
    assert equal(weights(back), weights(after))


@pytest.mark.flags("fused_backward_pass", "fused_optimizer_groups")
def test_gradients_are_freed_as_they_are_used():
    family = TinyFamily(width=64, blocks=8)
    whole = peak(built(config(), family))
    sizes = [4 * each.numel() for each in family.load().root.parameters()]
    assert whole >= sum(sizes)
    assert peak(built(config(**ONE), family)) == max(sizes)
    groups = peak(built(config(fused_groups=8), family))
    assert max(sizes) < groups < 0.3 * sum(sizes)


@pytest.mark.flags("fused_backward_pass", "fused_optimizer_groups")
@pytest.mark.parametrize("how", [ONE, {"fused_groups": 3}])
def test_each_gradient_is_clipped_by_its_own_norm(how):
    """As kohya's hooks do: clip_grad_norm_ of one tensor."""
    engine = built(config({"max_grad_norm": 0.01}, type="torch.optim.SGD", scheduler="constant", warmup_steps=0, **how))
    plain = built(config(FREE, type="torch.optim.SGD", scheduler="constant", warmup_steps=0))
    expected = {name: each.detach().clone() for name, each in plain._trained.items()}
    terms = plain._forward(tiny_step(0, 8)[0], plain.root)
    (sum(terms.values()) / 8).backward()
    norms = []
    for name, each in plain._trained.items():
        norms.append(float(torch.nn.utils.clip_grad_norm_([each], 0.01)))
        rate = 1e-3 if name.startswith("blocks.") else 5e-4
        decay = 0.1 if rate == 5e-4 else 0.0
        expected[name] -= rate * (each.grad + decay * expected[name])
    stats = engine.step(tiny_step(0, 8), COUNTS)
    assert sum(norm > 0.01 for norm in norms) > 3
    for name, each in weights(engine).items():
        assert torch.allclose(each, expected[name], rtol=0, atol=1e-8), name
    assert float(stats.grad_norm) == pytest.approx(sum(norm**2 for norm in norms) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("device_reads", [False, True])
@pytest.mark.parametrize("how", [ONE, {"fused_groups": 3}])
def test_a_loss_that_is_not_finite_skips_the_whole_step(how, device_reads, monkeypatch):
    if device_reads:
        monkeypatch.setattr(update, "_looking_is_free", lambda tensor: False)
    engine = built(config(**how))
    run(engine, 0, 3)
    before, state = weights(engine), _state(engine)
    bad = tiny_step(3, 8)
    bad[0].features["pixels"][1, 0, 0, 0] = float("inf")
    stats = engine.step(bad, COUNTS)
    assert float(stats.skipped) == 1.0 and equal(weights(engine), before) and equal(_state(engine), state)
    assert alive(engine) == 0
    assert all(0 < loss < 10 for loss in run(engine, 4, 6)) and not equal(weights(engine), before)


def _state(engine: NativeEngine) -> dict[str, torch.Tensor]:
    names = {id(each): name for name, each in engine._trained.items()}
    state = engine.optimizer.state
    return {f"{names[id(p)]} {k}": v.clone() for p, s in state.items() for k, v in s.items() if torch.is_tensor(v)}


@pytest.mark.parametrize("device_reads", [False, True])
def test_a_gradient_that_is_not_finite_never_reaches_a_weight(device_reads, monkeypatch):
    """It turns up in the middle of the backward: what came before is applied, it and all after it are not."""
    if device_reads:
        monkeypatch.setattr(update, "_looking_is_free", lambda tensor: False)
    engine = built(config(**ONE), TinyFamily(blocks=3))
    run(engine, 0, 3)
    before = weights(engine)
    spoil = engine.root.blocks[1][1].weight.register_hook(lambda gradient: gradient * float("inf"))
    stats = engine.step(tiny_step(3, 8), COUNTS)
    spoil.remove()
    after = weights(engine)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert float(stats.skipped) == 1.0 and all(bool(value.isfinite().all()) for value in after.values())
    assert {"last.weight", "blocks.2.4.weight"} <= moved
    assert not moved & {"blocks.1.1.weight", "blocks.0.4.weight", "blocks.0.1.weight", "first.weight"}
    assert float(engine.step(tiny_step(4, 8), COUNTS).skipped) == 0.0


def test_groups_wait_for_the_last_micro_batch():
    after, during = built(config(FREE)), built(config(FREE, fused_groups=3))
    assert run(after, 0, 4, accumulation=4) == run(during, 0, 4, accumulation=4)
    assert equal(weights(after), weights(during))


@pytest.mark.parametrize("kept", ["kahan", "stochastic", "none"])
@pytest.mark.parametrize("how", [ONE, {"fused_groups": 3}])
def test_half_weights_update_during_the_backward_too(kept, how):
    training = {"mixed_precision": "bf16", "full_precision": "bf16", "master_weights": kept, **FREE}
    after, during = built(config(training)), built(config(training, **how))
    assert run(after, 0, 4) == run(during, 0, 4) and equal(weights(after), weights(during))
    engine = built(config({**training, "max_grad_norm": 1e-3}, **how))
    assert run(engine, 0, 4) != run(after, 4, 8) and all(bool(v.isfinite().all()) for v in weights(engine).values())


def groups_of(sizes_and_rates: list[tuple[int, float]]) -> list[Group]:
    made, count = [], 0
    for size, rate in sizes_and_rates:
        named = [(f"p{count + i}", torch.nn.Parameter(torch.zeros(2))) for i in range(size)]
        made.append(Group(f"g{len(made)}", named, rate))
        count += size
    return made


@pytest.mark.flags("fused_optimizer_groups")
@pytest.mark.parametrize(
    ("sizes_and_rates", "count", "expected"),
    [
        ([(10, 1e-3)], 4, [3, 3, 3, 1]),  # ceil(10 / 4) = 3 a run
        ([(10, 1e-3)], 1, [10]),
        ([(10, 1e-3)], 20, [1] * 10),
        ([(5, 1e-3), (4, 1e-4)], 2, [5, 4]),
        ([(4, 1e-3), (4, 1e-4), (4, 1e-4)], 2, [4, 6, 2]),  # a run ends where the rate changes, not where a group does
    ],
)
def test_groups_are_cut_as_kohya_cuts_them(sizes_and_rates, count, expected):
    found = parts_of(groups_of(sizes_and_rates), count)
    assert [len(names) for names in found] == expected
    assert [name for names in found for name in names] == [f"p{i}" for i in range(sum(expected))]
    assert parts_of(groups_of(sizes_and_rates), None) == [[f"p{i}"] for i in range(sum(expected))]


class Together(torch.optim.SGD):
    """An optimizer of a package that nobody knows to step parameters apart."""


def test_an_optimizer_that_may_look_at_all_gradients_is_refused(monkeypatch):
    Together.__module__ = "elsewhere.optim"
    monkeypatch.setattr(torch.optim, "Together", Together, raising=False)
    with pytest.raises(ConfigFault, match=r"--optimizer_type: elsewhere\.optim\.Together .*gradients"):
        built(config(type="torch.optim.Together", **ONE))


def test_parameters_that_take_no_part_are_named():
    family = TinyFamily()
    parts = family.load()
    parts.root.extra = torch.nn.Linear(2, 2)
    family.load = lambda meta=False: parts
    with pytest.raises(ConfigFault, match=r": extra\.bias, extra\.weight"):
        run(built(config(**ONE), family), 0, 1)


def test_running_statistics_are_refused_on_several_ranks():
    """DistributedDataParallel shares them, and there is none here."""
    cfg, family = config(**ONE), TinyFamily(statistics=True)
    engine = make_engine(cfg, choose("cpu"), Ranks(size=2))
    with pytest.raises(ConfigFault, match="running statistics"):
        engine.build(
            family,
            family.load(),
            lambda groups: make_optimizer(cfg.optimizer, groups),
            lambda optimizer: make_schedule(cfg.optimizer, optimizer, 20),
            [],
        )
    assert run(built(cfg, family), 0, 2)


@pytest.mark.parametrize("how", [{}, ONE, {"fused_groups": 4}])
def test_weights_are_let_go_of_with_their_engine(how):
    """Hooks of tensors are out of the garbage collector's sight: a cycle through one would stay for ever."""
    engine = built(config(FREE, **how), TinyFamily())
    run(engine, 0, 2)
    weight = weakref.ref(next(engine.root.parameters()))
    del engine
    gc.collect()
    assert weight() is None
