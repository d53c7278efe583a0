"""Automagic and AdamW8bitKahan against their formulas, an element and a step at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from difftrain.config.schema.sections import OptimizerSection
from difftrain.contracts import ConfigFault, Group
from difftrain.optim import make_optimizer


def made(weight: torch.nn.Parameter, type: str, rate: float, *args: str) -> Any:
    group = Group("g", [("w", weight)], rate)
    return make_optimizer(OptimizerSection(type=type, learning_rate=rate, args=args), [group])


@pytest.mark.parametrize("shape", [(30,), (6, 5)])
def test_rates_go_up_while_a_gradient_keeps_its_sign_and_down_where_it_changes(shape: tuple[int, ...]) -> None:
    drawn = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(shape, generator=drawn))
    optimizer = made(
        weight, "Automagic", 3e-4, "max_lr=4e-4", "min_lr=1e-4", "lr_bump=5e-5", "beta2=0.9", "weight_decay=0.5"
    )
    expected = weight.detach().double()
    rates, last, rows, columns, square = torch.full(shape, 3e-4).double(), None, 0.0, 0.0, 0.0
    for _ in range(12):
        gradient = torch.randn(shape, generator=drawn)
        weight.grad = gradient.clone()
        optimizer.step()
        g = gradient.double()
        if len(shape) == 1:
            square = 0.9 * square + 0.1 * g**2
            root: Any = square
        else:
            rows, columns = 0.9 * rows + 0.1 * (g**2).mean(1), 0.9 * columns + 0.1 * (g**2).mean(0)
            root = torch.outer(rows, columns) / rows.mean()  # type: ignore[arg-type, union-attr]
        direction = g / root.sqrt()
        direction /= max(1.0, float(direction.square().mean().sqrt()))
        if last is not None:
            rates = (rates + torch.where(last == (g > 0), 5e-5, -5e-5)).clamp(1e-4, 4e-4)
        last = g > 0
        expected = expected - rates * direction - 0.5 * rates * expected
        torch.testing.assert_close(weight.detach().double(), expected, rtol=0, atol=1e-6)
    kept = optimizer.state[weight]["rate"]
    assert kept.dtype == torch.int16 and torch.equal(kept > 0, last)
    assert len(set(kept.abs().flatten().tolist())) > 2, "weights have rates of their own"


def test_a_schedule_multiplies_all_rates() -> None:
    one, other = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))
    full, half = (made(weight, "Automagic", 1e-4) for weight in (one, other))
    half.param_groups[0] |= {"initial_lr": 1e-4, "lr": 5e-5}
    for optimizer, weight in ((full, one), (half, other)):
        weight.grad = torch.linspace(-1, 1, 8)
        optimizer.step()
    torch.testing.assert_close(2 * (1 - other.detach()), 1 - one.detach(), rtol=0, atol=2.5e-7)


@pytest.mark.parametrize("args", [("min_lr=0.01",), ("lr_bump=0.0",), ("max_lr=1.0",), ("beta2=1.0",)])
def test_rates_that_are_no_range_are_refused(args: tuple[str, ...]) -> None:
    with pytest.raises(ConfigFault, match="Automagic"):
        made(torch.nn.Parameter(torch.ones(2)), "Automagic", 1e-6, *args)


@pytest.mark.parametrize("count", [100, 4096])  # state in 32 bits, and in 8
def test_a_stable_adamw_goes_slower_where_a_gradient_is_above_its_average(count: int) -> None:
    pytest.importorskip("bitsandbytes")
    weight = torch.nn.Parameter(torch.zeros(count))
    optimizer = made(weight, "AdamW8bitKahan", 0.1, "betas=(0.9, 0.5)", "weight_decay=0.0", "eps=1e-8")
    first, second, expected = 0.0, 0.0, 0.0
    for step, size in enumerate((0.1, 0.1, 4.0, 0.1), 1):
        weight.grad = torch.full((count,), size)
        optimizer.step()
        first, second = 0.9 * first + 0.1 * size, 0.5 * second + 0.5 * size**2
        v = second / (1 - 0.5**step)
        rms = size / math.sqrt(v)
        expected -= 0.1 / max(1.0, rms) * first / (1 - 0.9**step) / math.sqrt(v)
        assert rms > 1.2 or size < 1
        torch.testing.assert_close(
            weight.detach(), torch.full((count,), expected), rtol=0.02 if count > 4000 else 1e-5, atol=1e-6
        )
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_bounded_update_never_waits_for_the_host() -> None:
    """No number of a tensor is asked for: on an accelerator the host would wait there, once for each weight."""
    pytest.importorskip("bitsandbytes")
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 5000))
    optimizer = made(weight, "AdamW8bitKahan", 0.1)
    for _ in range(2):
        weight.grad = weight.detach().sin()
        with Waits() as waits:
            optimizer.step()
    assert waits.seen == []


class Waits(TorchDispatchMode):
    """Note what brings a tensor's number to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "local_scalar_dense" in str(func) or "is_nonzero" in str(func):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_without_it_the_update_is_bitsandbytes_own() -> None:
    pytest.importorskip("bitsandbytes")
    pair = [torch.nn.Parameter(torch.linspace(-1, 1, 5000)) for _ in range(2)]
    for weight, optimizer in zip(
        pair, (made(pair[0], "AdamW8bitKahan", 0.1, "stabilize=False"), made(pair[1], "AdamW8bit", 0.1))
    ):
        for _ in range(3):
            weight.grad = weight.detach().sin()
            optimizer.step()
    assert torch.equal(*(weight.detach() for weight in pair))
