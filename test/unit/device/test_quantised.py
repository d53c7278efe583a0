"""Frozen layers in few bits: how near they are, what flows through them, and that nothing is lost on the way out."""

from __future__ import annotations

import copy
import json
import weakref
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from refusals import names
from sdxl import batch_of, config, loaded
from torch import nn
from torch.utils.checkpoint import checkpoint

from difftrain.device import nf4_kernel, quantised
from difftrain.models import unet as unets
from difftrain.models.placeholder import fill

ROOT = Path(__file__).resolve().parents[3]


def layers(requires_grad: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(24, 192, 3, stride=2, padding=1), nn.SiLU(), nn.Flatten(2), nn.Linear(192, 96))
    return made.requires_grad_(requires_grad)


KINDS = ("bf16", "fp8", "int8", "nf4")


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(kind, weight, dtype=torch.float32):
    codes, scale = quantised.encode(kind, weight)
    return quantised.decode(kind, weight.shape, dtype, codes, scale, quantised.levels_of(kind))


@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e6])
def test_a_value_of_fp8_keeps_four_bits_and_rounding_twice_is_rounding_once(spread):
    weight = drawn(32, 64) * spread
    weight[3] *= 1e-3  # a scale for each output: a small row keeps its digits beside a large one
    weight[5] = 0.0
    codes, scale = quantised.encode("fp8", weight)
    back = there_and_back("fp8", weight)
    close = weight.abs() > weight.abs().amax(1, keepdim=True) * 2**-14
    assert ((back - weight).abs() / weight.abs())[close].max() <= 2**-4
    assert torch.equal(there_and_back("fp8", weight, torch.bfloat16).float(), back)
    assert torch.equal(there_and_back("fp8", back), back)
    assert bool((torch.log2(scale) % 1 == 0).all()) and float(codes.view(quantised.FP8).float().abs().max()) <= 448


def test_int8_is_the_nearest_of_255_steps_of_each_row():
    weight = drawn(7, 33).numpy()
    weight[2] = 0.0
    steps = np.where((largest := np.abs(weight).max(1, keepdims=True)) > 0, largest / np.float32(127), np.float32(1))
    expected = np.rint(weight / steps).astype(np.float32) * steps
    back = there_and_back("int8", torch.from_numpy(weight)).numpy()
    assert np.array_equal(back, expected) and (np.abs(back - weight) <= steps / 2 * (1 + 1e-6)).all()


def test_levels_of_nf4_are_quantiles_of_a_normal_distribution():
    """QLoRA, appendix E: 8 above zero and 7 below, evenly spaced in probability from a share that both tails leave out."""
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    above, below = ([NormalDist().inv_cdf(p) for p in np.linspace(offset, 0.5, count)[:-1]] for count in (9, 8))
    levels = np.array(sorted([*above, 0.0, *(-each for each in below)]))
    assert np.abs(levels / levels.max() - np.array(quantised.NF4)).max() < 2e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_faster_way_to_make_nf4_wide_has_the_same_bits_and_is_looked_for_once(dtype, monkeypatch, caplog):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(nf4_kernel, "_chosen", {})
    monkeypatch.setattr(nf4_kernel, "_seconds", lambda decode, *tensors: float("scaled" in repr(decode)))
    caplog.set_level("INFO", "difftrain")
    weight = torch.randn(1025, 1025)  # its last block is not full
    codes, scale = quantised.encode("nf4", weight)
    found = [quantised.decode("nf4", weight.shape, dtype, codes, scale, quantised.levels_of("nf4")) for _ in range(2)]
    monkeypatch.setattr(nf4_kernel, "FEWEST", 1 << 30)
    expected = quantised.decode("nf4", weight.shape, dtype, codes, scale, quantised.levels_of("nf4"))
    assert all(torch.equal(value, expected) for value in found)
    assert [("bitsandbytes" in line, "ms" in line) for line in caplog.messages] == [(True, True)]
    assert "decode" in repr(nf4_kernel._chosen[torch.device("cpu").type, dtype])


def test_what_fails_or_has_other_bits_is_not_taken(monkeypatch, caplog):
    monkeypatch.setattr(nf4_kernel, "is_installed", lambda name: True)
    caplog.set_level("INFO", "difftrain")
    levels = quantised.levels_of("nf4")

    def ours(codes, scales, levels):
        return codes.float().flatten()

    def fails(dtype):
        raise OSError("no such library")

    for theirs, why in ((fails, "no such library"), (lambda dtype: lambda *args: ours(*args) + 1, "other bits")):
        monkeypatch.setattr(nf4_kernel, "_chosen", {})
        monkeypatch.setattr(nf4_kernel, "_theirs", theirs)
        assert nf4_kernel.faster(torch.device("cpu"), torch.float32, ours, levels) is ours
        assert why in caplog.messages[-1]


@pytest.mark.parametrize("shape", [(6, 64), (5, 33)])  # whole blocks, and one that is filled up
def test_nf4_is_the_nearest_level_of_each_block_of_64(shape):
    weight = drawn(*shape)
    weight.view(-1)[:64] = 0.0
    flat, levels = weight.flatten().double().numpy(), np.array(quantised.NF4, dtype=np.float32)
    back = there_and_back("nf4", weight).flatten().numpy()
    for start in range(0, len(flat), 64):
        block = flat[start : start + 64]
        largest = np.float32(np.abs(block).max())
        nearest = np.abs(block[:, None] - levels.astype(float) * float(largest)).argmin(1) if largest else None
        expected = levels[nearest] * largest if largest else np.zeros(len(block))
        assert np.array_equal(back[start : start + 64], expected.astype(np.float32))
    codes, scale = quantised.encode("nf4", weight)
    assert codes.dtype == torch.uint8 and codes.numel() == -(-weight.numel() // 64) * 32 == 32 * scale.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_compute_with_the_rounded_weights_and_pass_gradients_on(kind, dtype):
    """Bit by bit what a plain layer with the rounded weight gives, forward and backward."""
    torch.manual_seed(0)
    plain = [nn.Linear(96, 40).requires_grad_(False).to(dtype)]
    x = [drawn(2, 5, 96, seed=2).to(dtype)]
    if kind in ("bf16", "fp8"):
        plain.append(nn.Conv2d(24, 48, 3, stride=2, padding=1).requires_grad_(False).to(dtype))
        x.append(drawn(2, 24, 9, 8, seed=2).to(dtype))
    for layer, entering in zip(plain, x):
        few = copy.deepcopy(layer)
        quantised.hollow([few], kind, dtype)
        assert few.weight.is_meta and few.state_dict()["weight"].shape == layer.weight.shape
        few.take(layer.weight)
        layer.weight.data = few.wide(dtype)
        assert (
            few.weight.element_size() * few.weight.numel()
            <= {"bf16": 2, "nf4": 0.51}.get(kind, 1) * layer.weight.numel()
        )
        made = []
        for each in (few, layer):
            start = entering.clone().requires_grad_()
            y = each(start)
            y.square().sum().backward()
            made.append((y, start.grad))
        assert all(torch.equal(a, b) for a, b in zip(*made))


@pytest.mark.parametrize("kind", KINDS)
def test_no_cast_of_a_module_touches_codes_and_scales(kind):
    layer = nn.Linear(64, 8).requires_grad_(False)
    weight = layer.weight.detach().clone()
    quantised.hollow([layer], kind, torch.float32)
    layer.take(weight)
    before = layer.wide(torch.float32)
    layer.to(torch.bfloat16).double().half()
    assert layer.bias.dtype == torch.float16 and torch.equal(layer.wide(torch.float32), before)
    assert layer.to("meta").weight.is_meta and layer.scale.is_meta and layer.scale.dtype == torch.float32


@pytest.mark.parametrize("scale", [torch.tensor(0.37), torch.rand(8, 1) + 0.1])
def test_a_weight_that_is_stored_in_fp8_is_taken_as_it_is(scale):
    stored = quantised.Stored(drawn(8, 64).to(quantised.FP8), scale)
    layers_of = {kind: nn.Linear(64, 8, bias=False).requires_grad_(False) for kind in ("fp8", "int8")}
    for kind, layer in layers_of.items():
        quantised.hollow([layer], kind, torch.bfloat16)
        layer.take(stored, mapped=True)
    fp8 = layers_of["fp8"]
    assert torch.equal(fp8.weight.view(quantised.FP8).float(), stored.codes.float())
    assert fp8.weight.data_ptr() == stored.codes.data_ptr()  # in the map of its file
    assert torch.equal(fp8.wide(torch.float32), stored.codes.float() * scale)
    assert torch.equal(layers_of["int8"].wide(torch.float32), there_and_back("int8", stored.codes.float() * scale))
    fp8.take(stored)
    assert fp8.weight.data_ptr() != stored.codes.data_ptr()
    with pytest.raises(ValueError, match=r"\(8, 32\)"):
        fp8.take(torch.zeros(8, 32))


def test_filling_holds_one_wide_weight_at_a_time():
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False, device="meta") for _ in range(6))).requires_grad_(False)
    quantised.hollow(module, "nf4", torch.float32)
    alive: list[weakref.ref] = []

    def weights():
        for number in range(6):
            assert not any(each() is not None for each in alive)
            value = drawn(64, 64, seed=number)
            alive.append(weakref.ref(value))
            yield f"{number}.weight", value
            del value

    fill(module, weights(), torch.float32)
    assert len(alive) == 6 and not any(parameter.is_meta for parameter in module.parameters())
    assert torch.equal(module[5].wide(torch.float32), there_and_back("nf4", drawn(64, 64, seed=5)))
    assert quantised.count_parameters(module) == 6 * 64 * 64
    assert quantised.scale_bytes(module) == 6 * (64 * 4 + 256 * 2 * 4)


def test_autocast_decides_what_they_compute_in():
    module = layers()[3]
    x = torch.randn(4, 192)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = module(x)
        quantised.store(holder := nn.Sequential(module))
        found = holder(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_only_the_8_bits_wait_for_the_backward_pass():
    module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).requires_grad_(False)
    quantised.store(module)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(torch.randn(2, 256, requires_grad=True))
    assert {t.dtype for t in kept if t.numel() == 256 * 256} == {torch.uint8}
    x = torch.randn(2, 256, requires_grad=True)
    straight = torch.autograd.grad(module(x).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(checkpoint(module, x, use_reentrant=False).sum(), x)[0], straight)


def test_a_state_dict_gives_what_went_in_and_what_comes_back_is_rounded_anew():
    module = layers()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    x = torch.randn(2, 192)
    quantised.store(module)
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    first = module[3](x)
    with torch.no_grad():
        for value in module.state_dict().values():
            value.mul_(2.0)
    assert not torch.equal(module[3](x), 2 * first)
    quantised.refresh(module)
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
    assert quantised.store(module) == [] and list(quantised.stored_names(module)) == []


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
    assert not list(quantised.stored_names(only.frozen["text_encoder_1"]))


@pytest.mark.flags("fp8_base", "fp8_base_unet")
@pytest.mark.parametrize("which", ["all", "unet"])
def test_frozen_blocks_of_the_unet_are_held_in_8_bits(which):
    unet = loaded(config())[1].root.unet
    count = unets.num_blocks(unet)
    frozen = [block for block in range(count) if block % 3]
    rates = [0.0 if block in frozen else 1e-4 for block in range(count)]
    _, parts = loaded(config({"optimizer": {"block_lr": rates}}, fp8_frozen=which))
    places = unets.block_of(parts.root.unet)
    found = {places[name] for name in quantised.stored_names(parts.root.unet) if name.endswith("weight")}
    assert found <= set(frozen) and len(found) > count / 3
    assert not any(p.requires_grad for n, p in parts.root.unet.named_parameters() if p.dtype == torch.uint8)
    original = dict(unet.state_dict())
    assert all(torch.equal(value, original[name]) for name, value in parts.root.unet.state_dict().items())


@pytest.mark.flags("fp8_base")
def test_a_run_where_all_is_trained_says_that_it_has_no_effect():
    _, parts = loaded(config(train_text_encoder=True, fp8_frozen="all"))
    assert any(names(note, "--fp8_base") for note in parts.notes)
    assert not list(quantised.stored_names(parts.root))
