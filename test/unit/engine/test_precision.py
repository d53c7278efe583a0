"""Weights in half precision: what is kept beside them, against fp32 masters and against plain rounding."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from engines import COUNTS, built, config, equal, one_thread, run, saved, weights  # noqa: F401

from difftrain.config.schema.sections import SaveSection
from difftrain.contracts import Group
from difftrain.diffusion.ema import Ema
from difftrain.engine import master_weights, update
from difftrain.engine.native import NativeEngine
from difftrain.testing.family import TinyFamily, tiny_batch, tiny_step

KEPT = ("fp32", "kahan", "stochastic", "none")


def half(kept: str | None = None, full: str = "bf16", training: dict | None = None, **optimizer):
    return config(
        {"mixed_precision": full, "full_precision": full, "master_weights": kept, **(training or {})}, **optimizer
    )


def exact(engine: NativeEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor, _ in engine.shards()}


@pytest.mark.parametrize(
    ("optimizer", "args"),
    [
        ("AdamW", ()),
        ("torch.optim.SGD", ("momentum=0.9", "weight_decay=0.01")),
        ("torch.optim.Adafactor", ()),
        ("torch.optim.Rprop", ()),
    ],
)
@pytest.mark.flags("full_bf16", "master_weights")
def test_compensated_weights_are_fp32_masters_bit_by_bit(optimizer, args):
    family = TinyFamily(dropout=0.1)
    whole, kahan = (built(half(kept, type=optimizer, args=args), family) for kept in ("fp32", None))
    assert run(whole, 0, 6) == run(kahan, 0, 6)
    assert equal(exact(whole), exact(kahan)) and equal(weights(whole), weights(kahan))
    rounded = {name: value.to(torch.bfloat16) for name, value in exact(kahan).items()}
    assert equal(rounded, weights(kahan))  # what the model computes with is the nearest


@pytest.mark.flags("full_bf16", "full_fp16", "master_weights")
@pytest.mark.parametrize(
    ("full", "kept", "master", "state"),
    [
        ("bf16", "fp32", 4, 8),
        ("bf16", "kahan", 2, 8),
        ("bf16", "stochastic", 0, 8),
        ("bf16", "none", 0, 4),
        ("fp16", "fp32", 4, 8),
        ("fp16", None, 0, 4),
    ],
)
def test_bytes_of_a_parameter(full, kept, master, state):
    engine = built(half(kept, full))
    gradients = []
    for weight in engine._trained.values():
        weight.register_post_accumulate_grad_hook(lambda weight: gradients.append(weight.grad.element_size()))
    run(engine, 0, 2)
    count = sum(weight.numel() for weight in engine._trained.values())
    assert {weight.element_size() for weight in engine._trained.values()} == {2} == set(gradients)
    kept_tensors = [*getattr(engine._master_weights, "_low", {}).values()]
    if engine._master_weights.updated is not engine._master_weights.weights:
        kept_tensors += engine._master_weights.updated.values()
    held = sum(each.untyped_storage().nbytes() for each in kept_tensors)
    assert held == master * count
    states = [v for s in engine.optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.ndim]
    assert sum(each.untyped_storage().nbytes() for each in states) == state * count
    assert all(each.grad is None for each in (*engine._trained.values(), *engine._master_weights.updated.values()))


@pytest.mark.flags("full_bf16", "master_weights")
def test_small_updates_count_where_something_is_kept_and_are_lost_where_not():
    """Updates of 2e-5 to weights of about 0.1, whose neighbours in bf16 are 5e-4 away."""
    slow = {"scheduler": "constant", "warmup_steps": 0}
    family = TinyFamily(lr=2e-5)
    engines = {"fp32": built(config({"mixed_precision": "bf16"}, **slow), family)}
    engines |= {kept: built(half(kept, **slow), family) for kept in ("kahan", "stochastic", "none")}
    start, batch = exact(engines["fp32"]), [tiny_batch(range(8))]
    gained = {}
    for name, engine in engines.items():
        before = float(engine.evaluate(batch)["loss"])
        for _ in range(30):
            engine.step(batch, COUNTS)
        gained[name] = before - float(engine.evaluate(batch)["loss"])
    assert gained["fp32"] > 0.05
    assert gained["kahan"] == pytest.approx(gained["fp32"], rel=0.05)
    assert gained["stochastic"] == pytest.approx(gained["fp32"], rel=0.1)
    assert abs(gained["none"]) < 0.2 * gained["fp32"]
    ended = exact(engines["fp32"])
    assert _far(exact(engines["kahan"]), ended) < 0.05 * _far(ended, start) < _far(exact(engines["none"]), ended)


def _far(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([(a[name].float() - b[name].float()).square().sum() for name in a]).sum().sqrt())


@pytest.mark.parametrize(("full", "kept"), [*itertools.product(["bf16"], KEPT), ("fp16", "none"), ("fp16", "fp32")])
def test_every_way_stays_near_mixed_precision(full, kept):
    slow = {"args": ("eps=1e-4",)} if (full, kept) == ("fp16", "none") else {}
    expected = run(built(config({"mixed_precision": full}, **slow)), 0, 10)
    assert run(built(half(kept, full, **slow)), 0, 10) == pytest.approx(expected, rel=2e-2)


@pytest.mark.flags("full_bf16", "full_fp16", "master_weights")
@pytest.mark.parametrize(("full", "kept"), [*itertools.product(["bf16"], KEPT), ("fp16", "none"), ("fp16", "fp32")])
def test_resume_is_bit_equal(full, kept, tmp_path):
    cfg = half(kept, full)
    family = TinyFamily(dropout=0.2)
    straight = built(cfg, family)
    losses = run(straight, 0, 5)
    saved(straight, tmp_path)
    losses += run(straight, 5, 10)
    resumed = built(cfg, family)
    run(resumed, 0, 2)
    resumed.restore(tmp_path)
    assert run(resumed, 5, 10) == losses[5:]
    assert equal(exact(resumed), exact(straight)) and equal(weights(resumed), weights(straight))


def test_a_checkpoint_holds_what_the_weights_stand_for(tmp_path):
    """So fp32 training goes on where a compensated one stopped, without a loss, and the other way round."""
    kahan, mixed = built(half()), built(config({"mixed_precision": "bf16"}))
    run(kahan, 0, 3)
    saved(kahan, tmp_path / "kahan")
    mixed.restore(tmp_path / "kahan")
    assert equal(exact(mixed), exact(kahan)) and {v.dtype for v in exact(kahan).values()} == {torch.float32}
    run(mixed, 3, 5)
    saved(mixed, tmp_path / "mixed")
    kahan.restore(tmp_path / "mixed")
    assert equal(exact(mixed), exact(kahan))


def test_a_checkpoint_of_another_precision_is_said(tmp_path, caplog):
    kahan, mixed = built(half()), built(config({"mixed_precision": "bf16"}))
    saved(kahan, tmp_path)
    with caplog.at_level("WARNING", "difftrain"):
        mixed.restore(tmp_path)
    assert re.search(r"in bf16 \(.*kahan\), .* in bf16", caplog.text)


def test_averages_and_exports_see_the_exact_values():
    fine = half().model_copy(update={"save": SaveSection(precision="float")})
    engine, plain = built(fine), built(half())
    run(engine, 0, 3)
    run(plain, 0, 3)
    average = Ema(((name, value) for name, value, _ in engine.shards()), 0.5)
    assert equal(average.weights, exact(engine)) and equal(dict(engine.full_weights()), exact(engine))
    assert {value.dtype for value in weights(plain).values()} == {torch.bfloat16}  # as kohya: what they are kept in
    before, model = exact(engine), {name: value.clone() for name, value in engine.root.state_dict().items()}
    with engine.swapped({name: torch.full_like(value, 0.3) for name, value in before.items()}):
        assert {float(value.flatten()[0]) for value in engine.root.state_dict().values()} == {0.30078125}
    assert equal(exact(engine), before) and equal(engine.root.state_dict(), model)


@pytest.mark.parametrize("device_reads", [False, True])
@pytest.mark.parametrize("kept", KEPT)
def test_what_is_not_finite_never_reaches_half_weights(kept, device_reads, monkeypatch):
    if device_reads:  # as on an accelerator, where a fused optimizer obeys a flag on the device
        monkeypatch.setattr(update, "_looking_is_free", lambda tensor: False)
    engine = built(half(kept))
    run(engine, 0, 3)
    before = exact(engine)
    bad = tiny_step(3, 8)
    bad[0].features["pixels"][1, 0, 0, 0] = float("nan")
    assert float(engine.step(bad, COUNTS).skipped) == 1.0
    assert equal(exact(engine), before)
    assert all(0 < loss < 10 for loss in run(engine, 4, 6)) and not equal(exact(engine), before)


@pytest.mark.flags("full_fp16")
@pytest.mark.parametrize("kept", ["none", "fp32"])
def test_fp16_gradients_are_unscaled_and_an_overflow_halves_the_scale(kept):
    engine = built(half(kept, "fp16", {"max_grad_norm": 0.0}, type="torch.optim.SGD"))
    mixed = built(config({"mixed_precision": "fp16", "max_grad_norm": 0.0}, type="torch.optim.SGD"))
    scaled, expected = (each.step(tiny_step(0, 8), COUNTS) for each in (engine, mixed))
    assert float(scaled.grad_norm) == pytest.approx(float(expected.grad_norm), rel=1e-2)
    before, scale = exact(engine), engine._scaler.get_scale()
    engine._scaler.load_state_dict({**engine._scaler.state_dict(), "scale": 2.0**40})
    assert float(engine.step(tiny_step(1, 8), COUNTS).skipped) == 1.0 and equal(exact(engine), before)
    assert engine._scaler.get_scale() == 2.0**39 != scale


def test_clipping_is_done_in_fp32():
    """The norm of many bf16 gradients, and the factor, keep more than bf16's two digits."""
    sgd = {"type": "torch.optim.SGD", "scheduler": "constant", "warmup_steps": 0}
    clipped = built(half("fp32", training={"max_grad_norm": 1e-3}, **sgd), TinyFamily(lr=1.0))
    free = built(half("fp32", training={"max_grad_norm": 0.0}, **sgd), TinyFamily(lr=1.0))
    start = exact(free)
    norm = float(free.step(tiny_step(0, 8), COUNTS).grad_norm)
    assert float(clipped.step(tiny_step(0, 8), COUNTS).grad_norm) == norm
    gradient = {name: (start[name] - value) for name, value in exact(free).items() if name.startswith("blocks.")}
    moved = {name: (start[name] - value) for name, value in exact(clipped).items() if name.startswith("blocks.")}
    ratio = _far(moved, dict.fromkeys(moved, torch.zeros(1))) / _far(gradient, dict.fromkeys(gradient, torch.zeros(1)))
    assert ratio == pytest.approx(1e-3 / norm, rel=1e-3)


@pytest.mark.parametrize("kept", ["kahan", "stochastic"])
def test_the_parts_in_which_weights_are_widened_change_nothing(kept, monkeypatch):
    whole = built(half(kept))
    monkeypatch.setattr(master_weights.HalfPrecisionWeights, "PART", 1000)
    parts = built(half(kept))
    assert len(parts._master_weights.parts) > 5 and len(whole._master_weights.parts) == 1
    most = 0

    def look(group):
        nonlocal most
        most = max(most, sum(each.untyped_storage().nbytes() for each in parts._master_weights.updated.values()))

    parts.optimizer.register_step_pre_hook(lambda *_: look(None))
    assert run(whole, 0, 4) == run(parts, 0, 4) and equal(exact(whole), exact(parts))
    assert 0 < most < 4 * sum(each.numel() for each in parts._trained.values()) / 2


class Counting(torch.optim.Optimizer):
    """Scale the update by what it has seen over all gradients, as Prodigy does."""

    def __init__(self, params, lr: float = 1e-3):
        super().__init__(params, {"lr": lr, "seen": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] += float(sum(each.grad.square().sum() for each in group["params"]))
            for each in group["params"]:
                assert each.dtype == each.grad.dtype == torch.float32
                each -= group["lr"] * each.grad / group["seen"] ** 0.5


def test_an_optimizer_that_looks_at_all_gradients_is_stepped_whole(monkeypatch):
    monkeypatch.setattr(torch.optim, "Counting", Counting, raising=False)
    monkeypatch.setattr(master_weights.HalfPrecisionWeights, "PART", 1000)
    whole, kahan = (built(half(kept, type="torch.optim.Counting")) for kept in ("fp32", "kahan"))
    assert len(kahan._master_weights.parts) == 1
    assert run(whole, 0, 4) == run(kahan, 0, 4)
    assert [group["seen"] for group in kahan.optimizer.param_groups] == [
        g["seen"] for g in whole.optimizer.param_groups
    ]


@pytest.mark.parametrize("kept", ["fp32", "kahan", "none"])
def test_a_schedule_free_average_is_what_is_used_and_leaves_no_trace(kept):
    """The averages are put in place of the model's weights, and the trained ones come back with all their bits."""
    cfg = half(kept, type="AdamW", schedulefree_wrapper=True)
    engine, other = built(cfg), built(cfg)
    run(engine, 0, 3)
    run(other, 0, 3)
    before, model = exact(engine), weights(engine)
    with engine.averaged_weights():
        assert not equal(weights(engine), model)
    assert equal(exact(engine), before) and equal(weights(engine), model)
    assert run(engine, 3, 5) == run(other, 3, 5)


def test_frozen_weights_of_root_become_half_too(tmp_path: Path):
    family = TinyFamily()

    def load(meta=False, load=family.load):
        parts = load()
        parts.root.first.requires_grad_(False)
        return parts

    family.load = load
    engine = built(half(), family)
    assert {value.dtype for value in engine.root.state_dict().values()} == {torch.bfloat16}
    run(engine, 0, 2)
    saved(engine, tmp_path)
    other = built(half(), family)
    other.restore(tmp_path)
    assert equal(weights(other), weights(engine)) and equal(exact(other), exact(engine))


def test_groups_keep_names_rates_and_decay():
    engine = built(half())
    names = {id(each): name for name, each in engine._master_weights.updated.items()}
    found = {
        g["name"]: ([names[id(p)] for p in g["params"]], g.get("weight_decay")) for g in engine.optimizer.param_groups
    }
    expected: list[Group] = engine.family.param_groups(engine.root)
    assert found.keys() == {group.name for group in expected}
    assert all(found[group.name][0] == [name for name, _ in group.named_params] for group in expected)
    assert found["rest"][1] == 0.1
