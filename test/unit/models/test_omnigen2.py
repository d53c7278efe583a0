"""OmniGen2 against numbers that its published code printed, and against its equations; what it does without references."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import batch_of, bucket_of, config, loaded, made, own_pass
from family_oracles.omnigen2 import Network
from refusals import names

from difftrain.contracts import Bucket, control_name
from difftrain.models.build import class_of
from difftrain.models.families.omnigen2 import SHOWN, OmniGen2
from difftrain.models.networks.omnigen2 import OmniGen2Transformer2DModel
from difftrain.models.registry import FAMILIES
from difftrain.sampling.samplers import make_sampler

Shape = tuple[int, ...]


def wave(shape: Shape, place: int, scale: float = 1.0) -> torch.Tensor:
    """Fill a shape with numbers that every machine makes alike."""
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    return (scale * torch.sin(0.7 * i * (1 + place % 5) + 0.3 * (i % 17) * place + place)).float().view(shape)


SIZES = {
    "in_channels": 4, "hidden_size": 36, "num_layers": 2, "num_refiner_layers": 2, "num_attention_heads": 6,
    "num_kv_heads": 2, "multiple_of": 8, "axes_dim_rope": (2, 2, 2), "axes_lens": (64, 64, 64), "text_feat_dim": 20,
    "timestep_scale": 1000.0,
}  # fmt: skip
# by references: every 24th number of two predictions (2, 4, 4, 6), and the sum of all. Printed by the published class
# (VectorSpaceLab/OmniGen2 at 0f72fa9, fp32 on a CPU, torch 2.13) on the weights and inputs below
PUBLISHED = {
    0: ((-0.598478, 1.074646, -1.241822, -0.356735, 2.156197, -1.652462, 0.225009, 0.024112), 5.250251596793532),
    1: ((0.472939, -0.15027, -0.395134, -0.36441, 3.073431, -2.172187, 0.224085, 0.556491), 10.146887730807066),
    2: ((-1.241226, 1.743977, -1.708609, -0.332686, 1.989954, -1.129983, -0.482588, 0.570168), 3.4357697665691376),
}


def published_weights() -> Any:
    net = class_of(FAMILIES["omnigen2"].parts["transformer"])(**SIZES).eval()
    with torch.no_grad():
        for place, (name, weight) in enumerate(sorted(net.named_parameters())):
            scale = 0.5 if weight.ndim == 1 else 1.5 / math.sqrt(weight.shape[-1])
            is_norm = weight.ndim == 1 and name.endswith("weight")
            weight.copy_(wave(tuple(weight.shape), place, scale) + (1 if is_norm else 0))
    return net


def published_inputs(references: int) -> dict[str, torch.Tensor]:
    shown = {control_name(number): wave((2, 4, 4, 6), 102 + number) for number in range(references)}
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    return {"tokens": wave((2, 9, 20), 110), "mask": mask, **shown}


def by_the_pass(net: Any, conditions: dict[str, torch.Tensor], references: int) -> torch.Tensor:
    family = made(config("omnigen2", {"data": {"num_control": references}}))
    t = 1000 * (1 - torch.tensor([0.25, 0.9]))
    tokens = family.enter(net, wave((2, 4, 4, 6), 101), t, conditions)
    for member in family.blocks:
        for block in net.get_submodule(member):
            tokens = family.block(block, type(tokens)(**{**vars(tokens), "member": member}))
    return -family.leave(net, tokens)


def by_equations(net: Any, conditions: dict[str, torch.Tensor], references: int) -> torch.Tensor:
    network, x = Network(net.state_dict(), net.config), wave((2, 4, 4, 6), 101)
    return torch.stack([
        network(x[i], t, conditions["tokens"][i][conditions["mask"][i]], [conditions[control_name(n)][i] for n in range(references)])
        for i, t in enumerate((0.25, 0.9))
    ])  # fmt: skip


@pytest.mark.parametrize("predict", [by_the_pass, by_equations])
@pytest.mark.parametrize("references", PUBLISHED)
def test_numbers_of_the_published_code(references: int, predict: Callable[..., torch.Tensor]) -> None:
    with torch.no_grad():
        out = predict(published_weights(), published_inputs(references), references)
    some, total = PUBLISHED[references]
    torch.testing.assert_close(out.flatten()[::24].double(), torch.tensor(some, dtype=torch.float64), rtol=0, atol=2e-5)
    assert float(out.double().sum()) == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("references", [0, 1, 3])
def test_the_pass_is_the_equations_of_each_sample(references: int) -> None:
    tiny = loaded(config("omnigen2", {"data": {"num_control": references}}))
    inputs = tiny.inputs()
    network, told = Network(tiny.net.state_dict(), tiny.net.config), inputs.conditions
    with torch.no_grad():
        ours = own_pass(tiny, inputs)
        for i in range(2):
            shown = [told[control_name(number)][i] for number in range(references)]
            text = told["tokens"][i][told["mask"][i]]
            theirs = -network(inputs.x_t[i], 1 - float(inputs.timestep[i]) / 1000, text, shown)
            torch.testing.assert_close(ours[i].double(), theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_a_reference_that_is_dropped_is_no_token() -> None:
    tiny = loaded(config("omnigen2", {"data": {"num_control": 1, "control_dropout": 0.5}}))
    tiny.batch.draws["control_dropout"] = torch.tensor([0.9, 0.1])
    inputs = tiny.inputs()
    assert inputs.conditions[SHOWN].tolist() == [True, False]
    plain = {name: value for name, value in inputs.conditions.items() if name in ("tokens", "mask")}
    with torch.no_grad():
        ours = own_pass(tiny, inputs)
        inputs.conditions = plain
        alone = own_pass(tiny, inputs)
    torch.testing.assert_close(ours[1], alone[1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ours[0], alone[0], atol=1e-3)


def test_without_references_what_is_for_them_is_frozen() -> None:
    tiny = loaded(config("omnigen2", {"data": {"num_control": 0}}))
    tiny.loss().backward()
    named = dict(tiny.net.named_parameters())
    frozen = {name for name, weight in named.items() if not weight.requires_grad}
    assert frozen == {name for name in named if re.match(r"ref_image|image_index", name)}
    assert all((weight.grad is None) == (name in frozen) for name, weight in named.items())
    assert not any("ref_image" in name for name, _ in tiny.family.units(tiny.parts))
    batch = batch_of(tiny.family, bucket_of("omnigen2"))
    assert not [name for name in batch.features if "control" in name]


@pytest.mark.parametrize("side", [256, 512, 1024])
def test_times_are_shifted_as_the_published_scheduler_does(side: int) -> None:
    family = made(config("omnigen2"))
    steps, latents, tokens = 4, side // 8, (side // 16) ** 2
    sampler = make_sampler("flow_euler", family.scheduler().config, tokens, mu=family.shift.mu)
    sampler.set_timesteps(sigmas=torch.linspace(1.0, 1.0 / steps, steps).tolist())
    m, theirs = latents / 40, []
    for n in range(steps):
        t = n / steps
        theirs.append(1 - t / (m - m * t + t))
    torch.testing.assert_close(
        sampler.sigmas.double(), torch.tensor([*theirs, 0.0], dtype=torch.float64), rtol=1e-6, atol=1e-6
    )
    training = made(config("omnigen2", {"flow": {"flux_shift": True}})).features.draws["timestep"].through
    assert training.shift_of(Bucket(side, side)) == pytest.approx(m)  # type: ignore[union-attr]


def test_positions_bound_the_sides() -> None:
    sides = {}
    for references in (0, 3):
        family = made(config("omnigen2", {"data": {"num_control": references}}))
        assert isinstance(family, OmniGen2)
        sides[references] = family.largest_side()
    assert sides == {0: 16 * 300, 3: 16 * ((310 - 256 - 1) // 3)}


def test_axes_that_make_up_no_head_are_an_error() -> None:
    with pytest.raises(ValueError) as caught:
        OmniGen2Transformer2DModel(**{**SIZES, "axes_dim_rope": (2, 2, 4)})
    assert names(caught.value, "axes_dim_rope", 8, 6)
