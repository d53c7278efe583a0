"""Frozen layers in 8 bits: how near they are, what flows through them, and that nothing is lost on the way out."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from refusals import names
from sdxl import batch_of, config, loaded
from torch import nn
from torch.utils.checkpoint import checkpoint

from difftrain.device import fp8
from difftrain.models.families import sdxl

ROOT = Path(__file__).resolve().parents[3]


def layers(requires_grad: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(24, 192, 3, stride=2, padding=1), nn.SiLU(), nn.Flatten(2), nn.Linear(192, 96))
    return made.requires_grad_(requires_grad)


@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e6])
def test_a_value_keeps_four_bits_and_rounding_twice_is_rounding_once(spread):
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)) * spread
    weight[3] *= 1e-3  # a scale for each output: a small row keeps its digits beside a large one
    weight[5] = 0.0
    small, scale = fp8.compress(weight)
    back = fp8.expand(small, scale, torch.float32)
    close = weight.abs() > weight.abs().amax(1, keepdim=True) * 2**-14
    assert ((back - weight).abs() / weight.abs())[close].max() <= 2**-4
    assert torch.equal(fp8.expand(small, scale, torch.bfloat16).float(), back)
    assert torch.equal(fp8.expand(*fp8.compress(back), torch.float32), back)
    assert bool((torch.log2(scale) % 1 == 0).all()) and float(small.float().abs().max()) <= 448


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_compute_with_the_rounded_weights_and_pass_gradients_on(dtype):
    module = layers().to(dtype)
    rounded = copy.deepcopy(module)
    for layer in (rounded[0], rounded[3]):
        layer.weight.data = fp8.expand(*fp8.compress(layer.weight.detach()), dtype)
    assert fp8.store(module) == ["0", "3"]
    assert [each.element_size() for each in (module[0].weight, module[3].weight)] == [1, 1]
    outputs = []
    for each in (module, rounded):
        x = torch.randn(2, 24, 16, 8, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
        y = each[3](each[:3](x).transpose(1, 2))
        y.square().sum().backward()
        outputs.append((y, x.grad))
    for a, b in zip(*outputs):
        torch.testing.assert_close(a, b)


def test_autocast_decides_what_they_compute_in():
    module = layers()[3]
    x = torch.randn(4, 192)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = module(x)
        fp8.store(holder := nn.Sequential(module))
        found = holder(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_only_the_8_bits_wait_for_the_backward_pass():
    module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).requires_grad_(False)
    fp8.store(module)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(torch.randn(2, 256, requires_grad=True))
    assert {t.dtype for t in kept if t.numel() == 256 * 256} == {torch.float8_e4m3fn}
    x = torch.randn(2, 256, requires_grad=True)
    straight = torch.autograd.grad(module(x).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(checkpoint(module, x, use_reentrant=False).sum(), x)[0], straight)


def test_a_state_dict_gives_what_went_in_and_what_comes_back_is_rounded_anew():
    module = layers()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.randn(2, 192)
    fp8.store(module)
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    first = module[3](x)
    with torch.no_grad():
        for value in module.state_dict().values():
            value.mul_(2.0)
    assert not torch.equal(module[3](x), 2 * first)
    fp8.refresh(module)
    torch.testing.assert_close(module[3](x), 2 * first)


def test_what_is_trained_odd_or_small_stays_as_it_is():
    module = nn.ModuleDict({
        "trained": nn.Linear(256, 64),
        "small": nn.Conv2d(16, 320, 3).requires_grad_(False),
        "reflecting": nn.Conv2d(64, 8, 3, padding=1, padding_mode="reflect").requires_grad_(False),
        "same": nn.Conv2d(64, 8, 3, padding="same").requires_grad_(False),
        "half trained": nn.Linear(256, 64),
        "embedding": nn.Embedding(100, 64).requires_grad_(False),
        "norm": nn.LayerNorm(64).requires_grad_(False),
    })  # fmt: skip
    module["half trained"].weight.requires_grad_(False)
    assert fp8.store(module) == [] and list(fp8.stored_names(module)) == []


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Make configurations of a model whose text encoders have layers wide enough."""
    sizes = json.loads((ROOT / "library/difftrain/models/sizes_shipped/sdxl.tiny.json").read_text())
    for name in ("text_encoder", "text_encoder_2"):
        sizes[name] |= {"hidden_size": 192, "intermediate_size": 256}
    sizes["unet"]["cross_attention_dim"] = 2 * 192
    path = tmp_path_factory.mktemp("wide") / "wide.json"
    path.write_text(json.dumps(sizes))
    return lambda **model: config(
        {"training": {"seed": 1, "mixed_precision": "bf16"}}, init_from_config=str(path), **model
    )


@pytest.mark.flags("fp8_base", "fp8_base_unet")
def test_frozen_encoders_are_held_in_8_bits_and_the_vae_is_not(wide):
    (plain, plain_parts), (family, parts) = loaded(wide()), loaded(wide(fp8_frozen="all"))
    sizes = {
        name: [
            sum(p.numel() * p.element_size() for p in each.frozen[name].parameters()) for each in (plain_parts, parts)
        ]
        for name in parts.frozen
    }
    assert sizes["vae"][0] == sizes["vae"][1]
    for name in ("text_encoder_1", "text_encoder_2"):
        linear = sum(m.weight.numel() for m in plain_parts.frozen[name].modules() if isinstance(m, nn.Linear))
        assert sizes[name][0] - sizes[name][1] == linear > 0
    assert all(p.dtype == torch.float32 for p in parts.root.parameters())  # the trained UNet, never
    batch = batch_of(family, parts, ["a large red star", "a small blue circle"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before, after = (each.text(batch, these) for each, these in ((plain, plain_parts), (family, parts)))
    for key in ("hidden_1", "hidden_2", "pooled"):
        a, b = before[key].float(), after[key].float()
        assert 0 < (a - b).norm() < 0.1 * a.norm(), key
    (note,) = [note for note in parts.notes if "8 bits" in note]
    assert "layers of text_encoder_1" in note and "unet" not in note
    _, only = loaded(wide(fp8_frozen="unet"))
    assert any(names(note, "--fp8_base_unet") for note in only.notes)
    assert not list(fp8.stored_names(only.frozen["text_encoder_1"]))


@pytest.mark.flags("fp8_base", "fp8_base_unet")
@pytest.mark.parametrize("which", ["all", "unet"])
def test_frozen_blocks_of_the_unet_are_held_in_8_bits(which):
    unet = loaded(config())[1].root.unet
    count = sdxl.num_blocks(unet)
    frozen = [block for block in range(count) if block % 3]
    rates = [0.0 if block in frozen else 1e-4 for block in range(count)]
    _, parts = loaded(config({"optimizer": {"block_lr": rates}}, fp8_frozen=which))
    places = sdxl.block_of(parts.root.unet)
    found = {places[name] for name in fp8.stored_names(parts.root.unet)}
    assert found <= set(frozen) and len(found) > count / 3
    assert not any(p.requires_grad for n, p in parts.root.unet.named_parameters() if p.dtype == fp8.FP8)
    original = dict(unet.state_dict())
    assert all(torch.equal(value, original[name]) for name, value in parts.root.unet.state_dict().items())


@pytest.mark.flags("fp8_base")
def test_a_run_where_all_is_trained_says_that_it_has_no_effect():
    _, parts = loaded(config(train_text_encoder=True, fp8_frozen="all"))
    assert any(names(note, "--fp8_base") for note in parts.notes)
    assert not list(fp8.stored_names(parts.root))
