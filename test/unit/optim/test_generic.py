"""GenericOptim against formulas in fp64, AdamW of torch and Muon; what its state takes, and what 8 bits keep of a value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from difftrain.config.schema.sections import OptimizerSection
from difftrain.contracts import ConfigFault, Group
from difftrain.optim import eight_bits, make_optimizer
from difftrain.optim.generic import subset_of, subspace
from difftrain.optim.muon import orthogonalised

RATE = 0.01


def group(*shapes: tuple[int, ...]) -> Group:
    drawn = torch.Generator().manual_seed(1)
    named = [
        (f"blocks.0.w{n}", torch.nn.Parameter(torch.randn(shape, generator=drawn))) for n, shape in enumerate(shapes)
    ]
    return Group("g", named, RATE)


def trained(of: Group, *args: str, type: str = "GenericOptim", steps: int = 5) -> Any:
    """Take steps down gradients that are the same for every optimizer; return it."""
    optimizer: Any = make_optimizer(OptimizerSection(type=type, learning_rate=RATE, args=args), [of], fused_ok=False)
    drawn = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for _, weight in of.named_params:
            weight.grad = torch.randn(weight.shape, generator=drawn)
        optimizer.step()
    return optimizer


def gradients(shape: tuple[int, ...], steps: int = 5) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(2)
    return [torch.randn(shape, generator=drawn).double() for _ in range(steps)]


def values(of: Group) -> list[Tensor]:
    return [weight.detach().clone() for _, weight in of.named_params]


def test_with_its_defaults_it_is_adamw() -> None:
    """But for eps, which it adds before the bias is corrected."""
    one, other = group((40, 50), (7,)), group((40, 50), (7,))
    trained(one, "eps=0.0", "weight_decay=0.1", "betas=(0.8, 0.95)")
    trained(other, "eps=0.0", "weight_decay=0.1", "betas=(0.8, 0.95)", type="AdamW")
    for ours, theirs in zip(values(one), values(other)):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["adamuon", "normuon"])
@pytest.mark.parametrize("shape", [(40, 64), (64, 40)])
def test_second_moments_of_an_orthogonalised_momentum(way: str, shape: tuple[int, int]) -> None:
    """The formulas of both papers in fp64; what Newton and Schulz' iteration makes is taken as it is."""
    of = group(shape)
    expected = values(of)[0].double()
    made = trained(of, f"{way}=True", "betas=(0.9, 0.95)")
    momentum, second = torch.zeros(shape).double(), 0.0
    for gradient in gradients(shape):
        momentum = 0.9 * momentum + 0.1 * gradient
        turned = orthogonalised(momentum.float(), 5).double()
        squares = turned.square()
        if way == "normuon":
            squares = squares.mean(1 if shape[0] > shape[1] else 0, keepdim=True)
        second = 0.95 * second + 0.05 * squares
        evened = turned / (second.sqrt() + 1e-6)
        if way == "adamuon":  # root mean square 0.2
            step = 0.2 * evened / evened.square().mean().sqrt()
        else:  # the size of Muon's
            step = 0.2 * math.sqrt(max(shape)) * evened * turned.norm() / evened.norm()
        expected -= RATE * step
    torch.testing.assert_close(values(of)[0].double(), expected, rtol=2e-2, atol=2e-4)  # bf16 rounds another way
    numbers = sum(value.numel() for value in made.state[of.named_params[0][1]].values() if torch.is_tensor(value))
    assert numbers == shape[0] * shape[1] * (2 if way == "adamuon" else 1) + (max(shape) if way == "normuon" else 0)


def test_two_ways_to_update_matrices_contradict() -> None:
    with pytest.raises(ConfigFault) as refused:
        trained(group((40, 64)), "muon=True", "normuon=True")
    assert "muon and normuon" in refused.value.faults[0].what


@pytest.mark.parametrize("more", [(), ("state_bits=8",), ("momentum_type='sm'", "rank=4"), ("adamuon=True",)])
def test_averages_on_the_host_change_no_bit(more: tuple[str, ...]) -> None:
    one, other = group((80, 64), (7,)), group((80, 64), (7,))
    trained(one, *more)
    made = trained(other, "cpu_offload=True", *more)
    assert all(torch.equal(a, b) for a, b in zip(values(one), values(other)))
    assert all(
        value.device.type == "cpu" for value in made.state[other.named_params[0][1]].values() if torch.is_tensor(value)
    )


def test_its_muon_is_muon_along_the_plain_momentum_and_short_sides_are_adamws() -> None:
    one, other, short, plain = group((40, 50)), group((40, 50)), group((16, 50)), group((16, 50))
    made = trained(one, "muon=True", "betas=(0.9, 0.99)", "weight_decay=0.01")
    trained(other, "momentum=0.9", "nesterov=False", "weight_decay=0.01", type="Muon")
    assert torch.equal(values(one)[0], values(other)[0])
    assert {key for state in made.state.values() for key in state} == {"step", "exp_avg"}, "no second moment is kept"
    trained(short, "muon=True")
    trained(plain)
    assert torch.equal(values(short)[0], values(plain)[0])


@pytest.mark.parametrize("shape", [(40, 12), (12, 40)])
def test_momentum_of_a_subspace_follows_its_formula(shape: tuple[int, int]) -> None:
    one = group(shape)
    weight = one.named_params[0][1].detach().double()
    made = trained(
        one, "momentum_type='sm'", "rank=3", "update_proj_gap=2", "second_moment_type='none'", "betas=(0.5, 0.9)"
    )
    tall, average, basis = shape[0] > shape[1], None, None
    for step, gradient in enumerate(gradients(shape), 1):
        if step % 2 == 1:  # a new subspace, whose momentum begins at 0
            basis, average = subspace(gradient, 3).double(), None
        low = gradient @ basis if tall else basis.T @ gradient
        average = (0 if average is None else 0.5 * average) + 0.5 * low
        back = (lambda x: x @ basis.T) if tall else (lambda x: basis @ x)  # noqa: B023
        weight -= RATE / (1 - 0.5**step) * (back(average) + gradient - back(low))
    torch.testing.assert_close(values(one)[0].double(), weight, rtol=1e-5, atol=1e-5)
    assert basis is not None and torch.allclose(basis.T @ basis, torch.eye(3).double(), atol=1e-5)
    kept = sum(value.numel() for value in made.state[one.named_params[0][1]].values() if torch.is_tensor(value))
    assert kept == 3 * (40 + 12), "momentum and basis of that rank"


@pytest.mark.parametrize(("size", "kept"), [("4", 120), ("-1", 24), ("'heuristics'", 24)])
def test_subset_norms_follow_their_formula(size: str, kept: int) -> None:
    one = group((24, 20))
    weight = one.named_params[0][1].detach().double()
    args = ("momentum_type='none'", "second_moment_type='sn'", f"subset_size={size}", "betas=(0.9, 0.75)", "eps=1e-3")
    made = trained(one, *args)
    v: Any = 0.0
    for step, gradient in enumerate(gradients((24, 20)), 1):
        rows = gradient if size == "'heuristics'" else gradient.view(-1, {"4": 4, "-1": 20}[size])
        v = 0.75 * v + 0.25 * rows.square().sum(1, keepdim=True)
        change = rows / (v.sqrt() + 1e-3) * math.sqrt(1 - 0.75**step)
        weight -= RATE * change.view(24, 20)
    torch.testing.assert_close(values(one)[0].double(), weight, rtol=1e-5, atol=1e-5)
    (state,) = made.state.values()
    assert state["exp_avg_sq"].numel() == kept


def test_factored_moments_are_those_of_a_matrix_that_is_a_product() -> None:
    """Adafactor's formula is exact for squares of rank 1."""
    one, other = group((12, 20)), group((12, 20))
    rows, columns = torch.rand(12, 1) + 0.5, torch.rand(1, 20) + 0.5
    for of, kind in ((one, "factored"), (other, "ema")):
        args = (f"second_moment_type='{kind}'", "betas=(0, 0.9)")
        optimizer: Any = make_optimizer(OptimizerSection(type="GenericOptim", learning_rate=RATE, args=args), [of])
        for sign in (1.0, -0.5, 2.0):
            of.named_params[0][1].grad = sign * rows * columns
            optimizer.step()
    torch.testing.assert_close(values(one)[0], values(other)[0])


def test_8_bits_are_near_32_and_take_a_quarter() -> None:
    one, other = group((64, 80)), group((64, 80))
    narrow, wide = trained(one, "state_bits=8", steps=30), trained(other, steps=30)
    before = values(group((64, 80)))[0]
    error = (values(one)[0] - values(other)[0]).norm() / (values(other)[0] - before).norm()
    assert 0 < float(error) < 0.05
    bits = [sum(value.nbytes for value in made.state[of.named_params[0][1]].values() if torch.is_tensor(value))
            for made, of in ((narrow, one), (wide, other))]  # fmt: skip
    assert bits == [2 * 5120 + 2 * 4 * 20, 8 * 5120]


@pytest.mark.parametrize("signed", [True, False])
def test_a_value_in_8_bits_comes_back_within_half_a_level(signed: bool) -> None:
    drawn = torch.Generator().manual_seed(0)
    value = torch.randn(37, 131, generator=drawn) * torch.logspace(-6, 3, 131)
    value = value if signed else value.square()
    value[0, 0] = 0.0
    state: dict[str, Any] = {}
    eight_bits.keep(state, "x", value, signed=signed)
    back = eight_bits.load(state, "x", value, signed=signed)
    assert state["x"].dtype == torch.uint8 and state["x_scale"].numel() == -(-value.numel() // eight_bits.BLOCK)
    blocks = torch.nn.functional.pad(value.flatten(), (0, -value.numel() % eight_bits.BLOCK)).view(-1, eight_bits.BLOCK)
    largest = blocks.abs().amax(1, keepdim=True).expand_as(blocks).reshape(-1)[: value.numel()].view(value.shape)
    far = value.abs() > largest * eight_bits.SMALLEST[signed]
    ratio = {True: 1e5 ** (1 / 126), False: 1e8 ** (1 / 254)}[signed]
    assert ((back - value).abs()[far] <= (ratio - 1) / 2 * 1.001 * value.abs()[far]).all()
    assert back[0, 0] == 0 and (signed or (back[value > 0] > 0).all()), "Adam would divide by it"
    eight_bits.keep(state, "x", back, signed=signed)
    assert torch.equal(eight_bits.load(state, "x", back, signed=signed), back), "what is a level stays one"


def test_subsets_divide_a_weight() -> None:
    assert [subset_of(480, size) for size in (4, 7, 1000, -1, -2)] == [4, 6, 480, 20, 10]


@pytest.mark.parametrize(
    "args",
    [
        ("momentum_type='sm'",), ("rank=4",), ("second_moment_type='sn'",), ("subset_size=4",), ("momentum_type='x'",),
        ("state_bits=4",), ("momentum_type='sm'", "rank=2", "proj_type='topk'"), ("betas=(1.0, 0.9)",),
        ("second_moment_type='sn'", "subset_size=0"), ("momentum_type='sm'", "rank=2", "update_proj_gap=0"),
    ],
)  # fmt: skip
def test_what_contradicts_is_refused(args: tuple[str, ...]) -> None:
    with pytest.raises(ConfigFault) as refused:
        trained(group((8, 8)), *args)
    assert refused.value.faults[0].where == "--optimizer_args" and "GenericOptim" in refused.value.faults[0].what
