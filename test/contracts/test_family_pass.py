"""A family's pass says what diffusers' own forward says, to the bit, however it is run or cut."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import ORACLES, Tiny, batch_of, bucket_of, diffusers_forward, needs_blocks, own_pass

from difftrain.engine.stages import drop
from difftrain.models import passes
from difftrain.models.registry import FAMILIES

CASES = {
    "masked": ("a cat on a red table", "two dogs"),
    "full": ("a cat on a red table " * 60, "two dogs in the rain " * 60),
    "empty": ("", "a cat"),
}


def inputs_of(tiny: Tiny, captions: tuple[str, ...]) -> Any:
    return tiny.family.inputs(batch_of(tiny.family, bucket_of(tiny.family.name), captions), tiny.parts)


@pytest.mark.parametrize("captions", CASES.values(), ids=CASES)
def test_the_pass_is_diffusers_forward(tiny: Tiny, captions: tuple[str, ...]) -> None:
    inputs = inputs_of(tiny, captions)
    with torch.no_grad():
        assert torch.equal(own_pass(tiny, inputs), diffusers_forward(tiny, inputs))


def test_the_pass_is_diffusers_forward_without_a_mask(tiny: Tiny) -> None:
    inputs = inputs_of(tiny, CASES["masked"])
    inputs.conditions = {name: each for name, each in inputs.conditions.items() if each.dtype != torch.bool}
    with torch.no_grad():
        assert torch.equal(own_pass(tiny, inputs), diffusers_forward(tiny, inputs))


def test_references_may_have_a_size_of_their_own(tiny: Tiny) -> None:
    """Larger than the image that is drawn, and of another shape."""
    if FAMILIES[tiny.family.name].control_area is None:
        pytest.skip("it is shown no references, or such as its image")
    inputs = tiny.inputs()
    for name in [name for name in inputs.conditions if name.startswith("control")]:
        *leading, height, width = inputs.conditions[name].shape
        inputs.conditions[name] = torch.randn(*leading, height + 4, 2 * width)
    with torch.no_grad():
        ours = own_pass(tiny, inputs)
        assert ours.shape == inputs.x_t.shape and torch.equal(ours, diffusers_forward(tiny, inputs))


def test_the_pass_is_diffusers_forward_in_bf16(tiny: Tiny) -> None:
    """At a time that bf16 holds: diffusers rounds others under autocast, the pass keeps them in fp32."""
    inputs = tiny.inputs()
    inputs.timestep = torch.full_like(inputs.timestep, 500)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(own_pass(tiny, inputs), diffusers_forward(tiny, inputs))


def test_what_the_denoiser_is_told_matters(tiny: Tiny) -> None:
    inputs = tiny.inputs()
    with torch.no_grad():
        plain = own_pass(tiny, inputs)
        for name, value in inputs.conditions.items():
            other = ~value if value.dtype == torch.bool else value + 1
            changed = replace(inputs, conditions={**inputs.conditions, name: other})
            assert not torch.equal(own_pass(tiny, changed), plain), name
        assert not torch.equal(own_pass(tiny, replace(inputs, timestep=inputs.timestep / 2)), plain)


def test_frames_may_have_times_of_their_own(tiny: Tiny) -> None:
    """A clip that is begun by a frame without noise; diffusers is told a time a token."""
    inputs = tiny.inputs()
    if inputs.x_t.ndim == 4 or inputs.x_t.shape[2] == 1:
        pytest.skip("its data are pictures")
    if not ORACLES[tiny.family.name].frame_times:
        pytest.skip("a clip has one time")
    frames, (height, width) = inputs.x_t.shape[2], inputs.x_t.shape[-2:]
    inputs.timestep = torch.arange(1.0, 1 + 2 * frames).view(2, frames) * 90
    a_token = inputs.timestep.repeat_interleave(height * width // tiny.family.patch**2, dim=1)
    with torch.no_grad():
        ours = own_pass(tiny, inputs)
        assert torch.equal(ours, diffusers_forward(tiny, replace(inputs, timestep=a_token)))
        one = replace(inputs, timestep=inputs.timestep[:, 0])
        every = replace(one, timestep=one.timestep[:, None].expand(2, frames))
        torch.testing.assert_close(own_pass(tiny, every), own_pass(tiny, one), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours, own_pass(tiny, one))


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_guidance_is_told_as_diffusers_takes_it(name: str, fresh: Any, guidance: float) -> None:
    tiny = fresh(guidance=guidance)
    if not tiny.net.config.get("guidance_embeds"):
        pytest.skip("it is told no guidance")
    inputs = tiny.inputs()
    with torch.no_grad():
        assert torch.equal(own_pass(tiny, inputs), diffusers_forward(tiny, inputs))


def gradients(tiny: Tiny, inputs: Any) -> dict[str, torch.Tensor]:
    named = [(name, each) for name, each in tiny.parts.root.named_parameters() if each.requires_grad]
    grads = torch.autograd.grad(tiny.loss(inputs), [each for _, each in named])
    return {name: grad for (name, _), grad in zip(named, grads, strict=True)}


def test_gradients_are_diffusers_own(tiny: Tiny) -> None:
    inputs = tiny.inputs()
    ours = gradients(tiny, inputs)
    named = {name: each for name, each in tiny.parts.root.named_parameters() if each.requires_grad}
    sums = tiny.family.loss_sums((diffusers_forward(tiny, inputs),), inputs)
    theirs = torch.autograd.grad(sums["loss"], list(named.values()))
    for (name, grad), other in zip(ours.items(), theirs, strict=True):
        assert torch.equal(grad, other), name


def test_recomputed_activations_give_the_same_gradients(tiny: Tiny) -> None:
    inputs = tiny.inputs()
    plain = gradients(tiny, inputs)
    tiny.net.train()
    tiny.net.enable_gradient_checkpointing()
    try:
        again = gradients(tiny, inputs)
    finally:
        tiny.net.disable_gradient_checkpointing()
        tiny.net.eval()
    assert all(torch.equal(grad, again[name]) for name, grad in plain.items())


def _halves(tiny: Tiny, cut: int) -> list[Any]:
    """Cut a copy of the root before unit `cut`: each half has its own weights alone, and no other."""
    halves = []
    for own in (range(-1, cut), range(cut, 10**6)):
        root = copy.deepcopy(tiny.parts.root)
        chain = tiny.family.chain(root)
        names = {name for name in (*root.state_dict(), *dict(root.named_parameters())) if chain.owner(name) in own}
        drop(root, names)
        assert {name for name, _ in root.named_parameters()} <= names
        halves.append((root, chain))
    return halves


def test_a_chain_that_is_cut_anywhere_is_the_whole(tiny: Tiny) -> None:
    """Each half has the weights that it needs, and what goes over the cut is named alike on both sides."""
    inputs = tiny.inputs()
    units = tiny.family.chain(tiny.parts.root).units
    whole = tiny.family.forward(tiny.parts.root, inputs)
    grads = gradients(tiny, inputs)
    assert [tiny.parts.root.get_submodule(name) for name in units] == [
        module for name, module in tiny.family.units(tiny.parts) if name in units
    ]
    for cut in sorted({1, len(units) // 2, len(units) - 1}):
        (first, before), (second, behind) = _halves(tiny, cut)
        carry, layout = before.enter(inputs)
        for number in range(cut):
            assert set(before.names(layout, number)) == carry.keys(), number
            carry = before.unit(number, carry, layout)
        names = behind.names(layout, cut)
        assert set(names) == carry.keys()
        sent = {name: carry[name] for name in names}
        arrived = {name: x.detach().requires_grad_(x.requires_grad) for name, x in sent.items()}
        carry = arrived
        for number in range(cut, len(units)):
            carry = behind.unit(number, carry, layout)
        outputs = behind.leave(carry, layout)
        assert all(torch.equal(mine, other) for mine, other in zip(outputs, whole, strict=True)), cut

        # gradients go back over the cut
        tiny.family.loss_sums(outputs, inputs)["loss"].backward()
        back = [(sent[name], x.grad) for name, x in arrived.items() if x.grad is not None]
        torch.autograd.backward([x for x, _ in back], [grad for _, grad in back])
        mine = {**dict(first.named_parameters()), **dict(second.named_parameters())}
        assert {name for name, param in mine.items() if param.grad is not None} == grads.keys()
        for name, grad in grads.items():  # sums over several roots of a backward pass have their own order
            torch.testing.assert_close(mine[name].grad, grad, rtol=1e-4, atol=1e-6)


def test_what_lies_between_blocks_is_handed_out(tiny: Tiny) -> None:
    needs_blocks(tiny)
    inputs, family, net = tiny.inputs(), tiny.family, tiny.net
    blocks = sum(1 for _ in passes.blocks_of(family, net))
    plan = passes.PassPlan(text=(0, blocks), taps=(1, blocks))
    with torch.no_grad():
        out = passes.run(family, net, inputs.x_t, inputs.timestep, inputs.conditions, plan)
        tokens = family.enter(net, inputs.x_t, inputs.timestep, inputs.conditions)
        first = family.block(next(passes.blocks_of(family, net))[1], tokens)
    own = first.image[:, : math.prod(first.size)]  # what fills up is handed out by nobody
    assert set(out.image_after) == {1, blocks} and torch.equal(out.image_after[1], own)
    assert tokens.text is not None and torch.equal(out.text_after[0], tokens.text)
    assert torch.equal(out.velocity, own_pass(tiny, inputs).detach())
