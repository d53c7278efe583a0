"""What is only held in few bits: which layers, from which files, and what an export has of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sdxl
import torch
from families import Tiny, config, exported, loaded, made
from refusals import names
from safetensors.torch import load_file, save_file
from torch import Tensor

from difftrain.contracts import ConfigFault
from difftrain.device import quantised
from difftrain.device.quantised import FP8, QuantisedLayer
from difftrain.models.base_weights import chosen
from difftrain.train.estimate.footprint import disk, needs

ONLY = {"train_only": (r"\.attn\.",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny Flux of fp32."""
    return exported(loaded(config("flux")), tmp_path_factory.mktemp("base") / "flux")


@pytest.fixture(scope="module")
def file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write its transformer as one file in the original layout."""
    return exported(loaded(config("flux")), tmp_path_factory.mktemp("file") / "flux", "safetensors")


def few(tiny: Tiny) -> dict[str, QuantisedLayer]:
    return {name: layer for name, layer in tiny.net.named_modules() if isinstance(layer, QuantisedLayer)}


def scaled(
    path: Path, write: Path, *, rows: bool = False, spoil: Callable[[dict[str, Tensor]], Any] = lambda _: None
) -> Path:
    """Write a file as ComfyUI has its scaled fp8: matrices of blocks with a scale beside them, and a mark."""
    tensors: dict[str, Tensor] = {"scaled_fp8": torch.zeros(2, dtype=FP8)}
    for key, value in load_file(path).items():
        if value.ndim == 2 and "_blocks." in key:
            scale = value.abs().amax(1, keepdim=True) / 448 if rows else value.abs().max() / 448
            tensors[key] = (value / scale).to(FP8)
            tensors[key.removesuffix("weight") + ("weight_scale" if rows else "scale_weight")] = (
                scale.flatten() if rows else scale
            )
        else:
            tensors[key] = value
    spoil(tensors)
    save_file(tensors, write)
    return write


def of_file(folder: Path, file: Path, **model: Any) -> Tiny:
    return loaded(config("flux", pretrained=str(folder), transformer=str(file), **model))


def test_layers_of_blocks_that_are_only_held_and_no_others(folder: Path) -> None:
    tiny = loaded(config("flux", pretrained=str(folder), base_dtype="int8", **ONLY))
    linear = {name for name, layer in tiny.net.named_modules() if isinstance(layer, torch.nn.Linear)}
    inside = {name for name in linear if "transformer_blocks." in name}
    assert few(tiny).keys() == {name for name in inside if ".attn." not in name} and len(linear - inside) > 4
    assert all(f"transformer.{name}.weight" in tiny.parts.base for name in few(tiny))
    (note,) = (note for note in tiny.parts.notes if "int8" in note)
    assert f"{len(few(tiny))} layers" in note

    # --- of a UNet those that look at many numbers, convolutions too where that can be
    _, parts = sdxl.loaded(sdxl.config())
    unet = parts.root.unet.requires_grad_(False)
    base = {f"unet.{name}" for name, _ in unet.named_parameters()}
    family = loaded(config("sdxl")).family
    kinds = {}
    for kind in ("fp8", "nf4"):
        layers = chosen(family, "unet", unet, base, kind)
        kinds[kind] = {type(layer) for layer in layers.values()}
        assert all(layer.weight[0].numel() >= quantised.FEWEST_INPUTS for layer in layers.values())
    assert torch.nn.Conv2d in kinds["fp8"] and torch.nn.Conv2d not in kinds["nf4"]


def test_where_nothing_is_only_held_it_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigFault) as fault:
        made(config("flux", pretrained=str(folder), base_dtype="nf4", train_only=(".",))).load(meta=True)
    assert names(str(fault.value), "[model] base_dtype") and "nf4" in str(fault.value)


def test_an_export_has_what_the_source_has(folder: Path, tmp_path: Path) -> None:
    tiny = loaded(config("flux", pretrained=str(folder), base_dtype="nf4", **ONLY))
    weights = ((name, value) for name, value in tiny.weights().items() if name not in tiny.parts.base)
    written = tiny.family.export(weights, tiny.parts, "diffusers_safetensors", tmp_path / "out", metadata={})
    again, before = (
        load_file(each / "transformer" / "diffusion_pytorch_model.safetensors") for each in (written, folder)
    )
    assert again.keys() == before.keys() and all(torch.equal(again[name], before[name]) for name in before)


@pytest.mark.parametrize("rows", [False, True])
def test_scaled_fp8_is_taken_bit_by_bit_and_widened_elsewhere(
    folder: Path, file: Path, rows: bool, tmp_path: Path
) -> None:
    path = scaled(file, tmp_path / "scaled.safetensors", rows=rows)
    stored = load_file(path)
    held, wide = of_file(folder, path, base_dtype="fp8", **ONLY), of_file(folder, path)
    weights, layers = dict(wide.net.named_parameters()), few(held)
    assert len(layers) > 10
    for name, layer in layers.items():
        assert torch.equal(layer.wide(torch.float32), weights[f"{name}.weight"])

    # --- bit by bit, also where a matrix of theirs holds several of ours
    key = "single_blocks.0.linear1"
    codes, scale = stored[f"{key}.weight"], stored[f"{key}.{'weight_scale' if rows else 'scale_weight'}"]
    mlp = layers["single_transformer_blocks.0.proj_mlp"]
    count = mlp.out_features
    assert torch.equal(mlp.weight, codes.view(torch.uint8)[-count:])
    assert torch.equal(mlp.scale.flatten(), scale[-count:] if rows else scale[None])
    assert torch.equal(mlp.wide(torch.float32), codes[-count:].float() * (scale[-count:, None] if rows else scale))
    assert torch.equal(held.loss(), held.loss()) and torch.isfinite(held.loss())


def test_plain_fp8_is_taken_as_it_is(folder: Path, file: Path, tmp_path: Path) -> None:
    tensors = {key: value.to(FP8) for key, value in load_file(file).items()}
    save_file(tensors, tmp_path / "plain.safetensors")
    held = of_file(folder, tmp_path / "plain.safetensors", base_dtype="fp8", **ONLY)
    wide = of_file(folder, tmp_path / "plain.safetensors")
    weights = dict(wide.net.named_parameters())
    for name, layer in few(held).items():
        assert torch.equal(layer.wide(torch.float32), weights[f"{name}.weight"]) and bool((layer.scale == 1).all())


KEY = "double_blocks.0.img_mlp.0"


def spoilt() -> Iterator[tuple[Callable[[dict[str, Tensor]], Any], list[str]]]:
    yield lambda t: t.update({f"{KEY}.weight": t[f"{KEY}.weight"].to(torch.bfloat16)}), ["bfloat16"]
    yield lambda t: t.update({f"{KEY}.scale_weight": torch.ones(3)}), ["3 numbers"]
    yield lambda t: t.update({f"{KEY}.scale_weight": torch.tensor(float("nan"))}), ["not finite"]


@pytest.mark.parametrize(("spoil", "words"), spoilt())
def test_a_scale_that_is_none_is_named(folder: Path, file: Path, tmp_path: Path, spoil: Any, words: list[str]) -> None:
    path = scaled(file, tmp_path / "spoilt.safetensors", spoil=spoil)
    with pytest.raises(ConfigFault) as fault:
        of_file(folder, path)
    (one,) = fault.value.faults
    assert all(word in one.what for word in [f"{KEY}.scale_weight", str(path), *words]) and one.remedy


def test_weights_of_other_tools_are_named(folder: Path, file: Path, tmp_path: Path) -> None:
    tensors = load_file(file)
    key = "double_blocks.0.img_mlp.0.weight"
    tensors[key], tensors[f"{key}.absmax"] = torch.zeros(64, 1, dtype=torch.uint8), torch.zeros(4)
    save_file(tensors, tmp_path / "bnb.safetensors")
    with pytest.raises(ConfigFault, match=r"absmax") as fault:
        of_file(folder, tmp_path / "bnb.safetensors")
    assert "fp8" in (fault.value.faults[0].remedy or "")


def test_a_scale_counts_in_the_fingerprint(folder: Path, file: Path, tmp_path: Path) -> None:
    one = scaled(file, tmp_path / "one.safetensors")
    two = scaled(file, tmp_path / "two.safetensors", spoil=lambda t: t[f"{KEY}.scale_weight"].mul_(2))
    prints = {
        made(config("flux", pretrained=str(folder), transformer=str(path))).source.fingerprint("transformer")
        for path in (one, two)
    }
    assert len(prints) == 2


def test_a_dry_run_counts_what_is_stored() -> None:
    family = made(config("flux", base_dtype="nf4", **ONLY))
    parts = family.load(meta=True)
    items = {item.what: item.size for item in needs(family.cfg, parts, 1)}
    layers = list(quantised.layers_of(parts.root))
    blocks = sum(-(-layer.wide_shape.numel() // 64) for layer in layers)
    assert items["base in nf4"] == blocks * (32 + 4) + len(layers) * 256 * 2 * 4
    plain = made(config("flux", **ONLY))
    wide = {item.what: item.size for item in needs(plain.cfg, plain.load(meta=True), 1)}
    gone = 4 * sum(layer.wide_shape.numel() for layer in layers)
    assert items["weights in fp32"] == wide["weights in fp32"] - gone and "base in nf4" not in wide
    assert (
        disk(family.cfg, parts, 2, 1, 1.0).export_bytes
        == disk(plain.cfg, plain.load(meta=True), 2, 1, 1.0).export_bytes
    )
