"""A fault in one module of any family that trains is found by its name: two traces, one of them of the faulty network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from traced import Stepped, attribute, stepped

from difftrain.models.registry import FAMILIES
from difftrain.report.trace import AGREE, PART, StepComparison, Trace, compare_traces, traces_of

Fault = Callable[[Stepped], Any]


# one of each kind of network; the others nightly: a trace is of modules, and knows no family
KINDS = ("sdxl", "sd3", "flux", "qwen_image", "lumina_2", "hidream", "wan", "cosmos_predict2", "hunyuan_video")


@pytest.fixture(
    params=[name if name in KINDS else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES],
    scope="module",
)
def steady(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Stepped, Path]:
    """A family whose weights stay as they are, and the trace of a step of it."""
    sections = {"optimizer": {"learning_rate": 1e-30}}
    cfg = families.config(request.param, sections)
    family = families.made(cfg)
    made = stepped(cfg, family, lambda parts: [families.batch_of(family, families.bucket_of(family.name), parts=parts)])
    families.trained_once(families.Tiny(family, made.parts, made.micro[0]))
    made.step()  # tables of positions are made in the first one, and kept
    return made, made.traced(tmp_path_factory.mktemp(request.param))


def block(made: Stepped) -> tuple[str, nn.Module]:
    """Return the block in the middle that has attention."""
    units = [(name, unit) for name, unit in made.family.units(made.parts) if any(map(is_attention, unit.modules()))]
    return units[len(units) // 2]


def is_attention(module: nn.Module) -> bool:
    return hasattr(module, "processor") and hasattr(module, "to_q")


def inside(made: Stepped, wanted: Callable[[nn.Module], object]) -> tuple[str, Any]:
    """Return the first module of that block that is wanted, by its name in the root."""
    prefix, unit = block(made)
    return next((f"{prefix}.{name}", module) for name, module in unit.named_modules() if wanted(module))


# ---------------------------------------------------------------- faults, and the module that each is in


@contextlib.contextmanager
def other_gelu(made: Stepped) -> Iterator[str]:
    """One feed-forward layer has the other of the two GELUs, or a GELU in place of a SiLU."""
    kinds = ("GELU", "GEGLU", "Flux2SwiGLU", "FP32SiLU")
    if not any(type(each).__name__ in kinds or is_gated(each) for each in block(made)[1].modules()):
        pytest.skip("its feed-forward layers have none")
    name, module = inside(made, lambda each: type(each).__name__ in kinds or is_gated(each))
    forward = module.forward

    def gated(x: torch.Tensor) -> torch.Tensor:
        value, gate = module.proj(x).chunk(2, dim=-1)
        return value * F.gelu(gate, approximate="tanh")

    def plain(x: torch.Tensor) -> torch.Tensor:
        other = "none" if module.approximate == "tanh" else "tanh"
        return F.gelu(module.proj(x) if hasattr(module, "proj") else x, approximate=other)

    def no_silu(x: torch.Tensor) -> torch.Tensor:
        with attribute(F, "silu", lambda x, *_, **__: F.gelu(x)):
            return forward(x)

    def folded(x: torch.Tensor) -> torch.Tensor:
        gate, value = x.chunk(2, dim=-1)
        return F.gelu(gate) * value

    ways = {"GEGLU": gated, "GELU": plain, "Flux2SwiGLU": folded}
    with attribute(module, "forward", ways.get(type(module).__name__, no_silu)):
        yield name


def is_gated(module: nn.Module) -> bool:
    """Tell a feed-forward layer that gates by SiLU inside, with no module of its own for that."""
    names = dict(module.named_children())
    return type(module).__name__.endswith("FeedForward") and "linear_1" in names and "silu" not in names


@contextlib.contextmanager
def inverted_mask(made: Stepped) -> Iterator[str]:
    """One attention looks at the keys that it should not see, or at half of them where it should see all."""
    name, module = inside(made, is_attention)
    forward, attend = module.forward, F.scaled_dot_product_attention

    def other(query: Any, key: Any, value: Any, attn_mask: Any = None, *more: Any, **options: Any) -> Any:
        seen = torch.arange(key.shape[-2]) < key.shape[-2] // 2 if attn_mask is None else attn_mask
        return attend(
            query, key, value, ~seen.expand(query.shape[-2], -1) if attn_mask is None else ~seen, *more, **options
        )

    def wrong(*args: Any, **options: Any) -> Any:
        with attribute(F, "scaled_dot_product_attention", other):
            return forward(*args, **options)

    with attribute(module, "forward", wrong):
        yield name


@contextlib.contextmanager
def wrong_epsilon(made: Stepped) -> Iterator[str]:
    name, module = inside(made, lambda each: isinstance(getattr(each, "eps", None), float))
    with attribute(module, "eps", 1e-2):
        yield name


@contextlib.contextmanager
def zeroed_gradient(made: Stepped) -> Iterator[str]:
    """One layer hands nothing back."""
    _, attention = inside(made, is_attention)
    out = getattr(attention, "to_out", None) or attention.to_q
    name, module = inside(made, lambda each: each is (out[0] if isinstance(out, torch.nn.ModuleList) else out))
    hook = module.register_full_backward_hook(
        lambda _, given, __: tuple(None if each is None else 0 * each for each in given)
    )
    try:
        yield name
    finally:
        hook.remove()


@contextlib.contextmanager
def dropped_scale(made: Stepped) -> Iterator[str]:
    """The loss that is backpropagated is not divided by the number of samples."""
    terms: Any = made.engine._terms  # type: ignore[attr-defined]
    with attribute(terms, "loss", lambda sums, counts: sum(each.sum() for each in sums.values())):
        yield "root"


@contextlib.contextmanager
def lost_parameter_gradient(made: Stepped) -> Iterator[str]:
    name, module = inside(made, lambda each: isinstance(each, nn.Linear))
    hook = module.weight.register_hook(torch.zeros_like)
    try:
        yield name
    finally:
        hook.remove()


FAULTS: dict[str, tuple[Fault, str]] = {
    "gelu": (other_gelu, "forward"),
    "mask": (inverted_mask, "forward"),
    "epsilon": (wrong_epsilon, "forward"),
    "zeroed": (zeroed_gradient, "backward"),
    "scale": (dropped_scale, "backward"),
    "parameter": (lost_parameter_gradient, "parameter"),
}


def compared(steady: tuple[Stepped, Path], folder: Path) -> StepComparison:
    (found,) = compare_traces(steady[1], folder).steps
    return found


@pytest.mark.flags("trace")
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_found_by_the_name_of_its_module(steady: tuple[Stepped, Path], kind: str, tmp_path: Path) -> None:
    plant, direction = FAULTS[kind]
    with plant(steady[0]) as name:
        found = compared(steady, steady[0].traced(tmp_path))
    assert found.code == PART and found.parting is not None and found.difference is not None
    assert (found.parting.module, found.parting.direction) == (name, direction)
    assert found.difference.error > found.difference.tolerance and name not in found.parting.good
    assert len(found.parting.good) > 3 or kind == "scale"


def test_another_timestep_is_named_as_what_the_network_reads(steady: tuple[Stepped, Path], tmp_path: Path) -> None:
    """As from another shift of the schedule: the same samples, later times."""
    made, _ = steady
    inputs: Any = made.family.inputs

    def later(*args: Any) -> Any:
        right = inputs(*args)
        return replace(right, timestep=(right.timestep * 1.1).to(right.timestep.dtype))

    with attribute(made.family, "inputs", later):
        found = compared(steady, made.traced(tmp_path))
    assert found.code == PART and found.same_records and found.parting is not None
    assert (found.parting.module, found.parting.role) == ("root", "input.timestep")
    assert [each.tensor for each in found.inputs] == ["forward/root/0.0/input.timestep"]


def test_a_fault_in_a_frozen_text_encoder_is_found_inside_it(steady: tuple[Stepped, Path], tmp_path: Path) -> None:
    """Where a step runs it; from a cache it is named as what the network reads."""
    made, before = steady
    called = {call.module for path in traces_of(before).values() for call in Trace.read(path).calls}
    encoders = [name for name in made.parts.frozen if name.startswith("text_encoder") and name in called]
    if not encoders:
        pytest.skip("all its text encoders are trained")
    name, norm = next(
        (f"{part}.{name}", module)
        for part in encoders
        for name, module in made.parts.frozen[part].named_modules()
        if "Norm" in type(module).__name__ and f"{part}.{name}" in called
    )
    hook = norm.register_forward_hook(lambda _, __, output: output * 1.5)
    try:
        found = compared(steady, made.traced(tmp_path))
    finally:
        hook.remove()
    assert found.code == PART and found.parting is not None
    assert (found.parting.module, found.parting.direction) == (name, "forward")


def test_a_recomputed_forward_is_no_second_call(steady: tuple[Stepped, Path], tmp_path: Path) -> None:
    """With gradient checkpointing everything is what it is without, to the bit, gradients of activations too."""
    made, _ = steady
    net: Any = made.parts.root.get_submodule(made.family.denoiser)  # type: ignore[attr-defined]
    net.enable_gradient_checkpointing()
    try:
        found = compared(steady, made.traced(tmp_path))
    finally:
        net.disable_gradient_checkpointing()
    assert found.code == AGREE and found.unequal is None
    assert found.modules > 20 and found.a.tensors.keys() == found.b.tensors.keys()
    assert {call.call for call in found.b.calls if call.module == block(made)[0]} == {"0.0"}
