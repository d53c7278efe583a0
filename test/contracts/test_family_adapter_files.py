"""Adapters are written for every reader: diffusers, PEFT, ComfyUI and kohya's scripts read what was trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from adapters import ALPHA, RANK, assert_same, modules_of, pairs_of, read_back, with_lengths, written
from diffusers.utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)
from families import Tiny, class_of, config, exported, loaded, pipeline_of, trained_once
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from difftrain.models.export import key_map
from difftrain.models.registry import FAMILIES
from difftrain.models.weights import adapter_layouts
from difftrain.models.weights.adapter_files import find_layer
from difftrain.models.weights.adapter_layouts import AdapterLayouts, LayerKey, LoraPair

DIFFUSERS, PEFT = "pytorch_lora_weights.safetensors", "adapter_model.safetensors"
# one family of each kind of names: UNets, fused layers of equal and of unequal widths, names alike, diffusers' names
KINDS = ("sdxl", "flux", "sd3", "qwen_image", "auraflow")
EVERY = [name if name in KINDS else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES]
SPEAKING = {name for name in FAMILIES if hasattr(getattr(diffusers, FAMILIES[name].pipeline, None), "lora_state_dict")}


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def header(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def product(pair: LoraPair) -> torch.Tensor:
    return pair.delta(torch.Size((pair.b.shape[0], pair.a.shape[1])))


def merged(tiny: Tiny, pairs: dict[LayerKey, LoraPair]) -> None:
    modules = modules_of(tiny)
    for (folder, name), pair in pairs.items():
        with torch.no_grad():
            weight = find_layer(modules[folder], name).weight
            weight.add_(product(pair))
            if pair.lengths is not None:
                weight.mul_((pair.lengths / weight.norm(dim=1))[:, None])


def own_output(tiny: Tiny, net: Any = None) -> torch.Tensor:
    inputs = tiny.inputs()
    if net is not None:
        tiny.parts.root._modules[tiny.family.denoiser] = net
    with torch.no_grad():
        return tiny.family.forward(tiny.parts.root, inputs)[0]


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-5 * max(1.0, float(other.abs().max())), rtol=0)


# ------------------------------------------------------------------ here


@pytest.mark.parametrize("name", EVERY)
def test_every_layout_reads_back_to_the_bit(name: str, tmp_path: Path) -> None:
    tiny = loaded(config(name))
    pairs = pairs_of(tiny)
    folder = written(tiny, pairs, tmp_path / "adapter", metadata=tiny.family.metadata("mine", 0.0))
    names = {path.name for path in files_of(folder)}
    own = "mine.safetensors" if tiny.family.lora.kohya else "mine_comfyui.safetensors"
    assert names == {DIFFUSERS, PEFT, own}
    dora = with_lengths(tiny, pairs)
    of_dora = written(tiny, dora, tmp_path / "dora")
    assert [path.name for path in files_of(of_dora)] == sorted(names)
    for one, own_pairs in ((folder, pairs), (of_dora, dora)):
        for path in (one, *files_of(one)):
            assert_same(own_pairs, read_back(tiny, path))
    for path in files_of(folder):
        about = header(path)
        assert about["ss_network_dim"] == str(RANK) and float(about["ss_network_alpha"]) == ALPHA
        assert about["ss_network_module"] and about["modelspec.architecture"].endswith("/lora")


def test_a_folder_is_whole_or_absent_and_of_the_dtype_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = loaded(config("flux"))
    pairs = pairs_of(tiny)
    folder = written(tiny, pairs, tmp_path / "adapter", dtype=torch.bfloat16)
    before = {path.name: path.read_bytes() for path in files_of(folder)}
    for pair in read_back(tiny, folder).values():
        assert pair.a.dtype == pair.b.dtype == torch.bfloat16

    def fail(*_: Any, **__: Any) -> Iterator[Any]:
        raise OSError("no space left")

    monkeypatch.setattr(adapter_layouts.AdapterLayouts, "fused", fail)  # the last of three files
    with pytest.raises(OSError, match="no space"):
        written(tiny, pairs, tmp_path / "adapter")
    assert {path.name: path.read_bytes() for path in files_of(folder)} == before
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_rslora_and_layers_without_an_alpha_say_the_same_everywhere(tmp_path: Path) -> None:
    tiny = loaded(config("flux"))
    pairs = {key: LoraPair([], pair.a, pair.b) for key, pair in pairs_of(tiny, texts=False).items()}
    folder = written(tiny, pairs, tmp_path / "adapter", alpha=6.0, use_rslora=True)
    for path in files_of(folder):
        for key, pair in read_back(tiny, path).items():
            expected = 6.0 / pairs[key].rank ** 0.5 * pairs[key].b @ pairs[key].a
            torch.testing.assert_close(product(pair), expected, atol=1e-6, rtol=1e-5, msg=f"{path.name} {key}")


# ------------------------------------------------------------------ the original layout, and ComfyUI


def is_original(name: str) -> bool:
    lora = class_of(name).lora
    return lora.original and not lora.kohya and not lora.layers


@pytest.mark.parametrize(("name", "dora"), [*((name, False) for name in filter(is_original, FAMILIES)), ("flux", True)])
def test_comfyui_adds_to_the_original_weights_what_was_trained(name: str, dora: bool, tmp_path: Path) -> None:
    """The rule of ComfyUI: alpha / rank of the up times the down factor, for the weight of that name in the original file,
    whose rows get the lengths of `dora_scale` then.
    """
    tiny = loaded(config(name))
    pairs = pairs_of(tiny, texts=False)
    pairs = with_lengths(tiny, pairs) if dora else pairs
    tensors = load_file(written(tiny, pairs, tmp_path / "adapter") / "mine_comfyui.safetensors")
    places, prefix = key_map(tiny.family, tiny.family.denoiser), tiny.family.lora.comfy
    before = {key: value.clone() for key, value in tiny.net.state_dict().items()}
    merged(tiny, pairs)
    after, changed = tiny.net.state_dict(), set()
    for key, members in places.members.items():
        was = places.joined(key, {member: before[member] for member in members}).clone()
        stem = prefix + key.removesuffix(".weight")
        if key.endswith(".weight") and f"{stem}.lora_A.weight" in tensors:
            a, b = (tensors.pop(f"{stem}.lora_{side}.weight") for side in "AB")
            was += float(tensors.pop(f"{stem}.alpha")) / a.shape[0] * b @ a
            if dora:
                was *= tensors.pop(f"{stem}.dora_scale") / was.norm(dim=1, keepdim=True)
            changed |= set(members)
        now = places.joined(key, {member: after[member] for member in members})
        torch.testing.assert_close(was, now, atol=1e-5, rtol=1e-5, msg=key)
    assert not tensors and {f"{layer}.weight" for _, layer in pairs} <= changed


def test_pieces_of_a_fused_layer_may_be_missing_or_of_other_strengths(tmp_path: Path) -> None:
    tiny = loaded(config("flux"))
    pairs = pairs_of(tiny, texts=False)
    leaves = ("attn.to_k", "proj_mlp", "norm.linear")
    pairs = {key: pair for key, pair in pairs.items() if not key[1].endswith(leaves)}
    odd = ("transformer", "single_transformer_blocks.0.attn.to_v")
    odd_pair = pairs[odd]
    pairs[odd] = LoraPair([], odd_pair.a, odd_pair.b, 5.0)
    halved = ("transformer", "norm_out.linear")  # its halves lie the other way round in the original
    out, into = AdapterLayouts(tiny.family).shapes("transformer")[halved[1]]
    pairs[halved] = LoraPair([], torch.randn(3, into), torch.randn(out, 3), 3.0)
    path = written(tiny, pairs, tmp_path / "adapter") / "mine_comfyui.safetensors"
    read = read_back(tiny, path)
    assert read.keys() == pairs.keys()
    for key, pair in pairs.items():
        torch.testing.assert_close(product(pair), product(read[key]), atol=1e-6, rtol=1e-5, msg=str(key))
    assert torch.equal(pairs[halved].b, read[halved].b)
    up = load_file(path)["diffusion_model.final_layer.adaLN_modulation.1.lora_B.weight"]
    assert torch.equal(up, torch.cat(pairs[halved].b.chunk(2)[::-1]))


def test_others_fused_adapters_are_parted_by_rows_or_by_blocks(tmp_path: Path) -> None:
    """Of a file without a header of ours: blocks where it has them, and else the first factor is every piece's."""
    tiny = loaded(config("flux"))
    width = tiny.net.config.num_attention_heads * tiny.net.config.attention_head_dim
    a, full = torch.randn(6, width), torch.randn(3 * width, 6)
    blocks = torch.block_diag(*torch.randn(3, width, 2))
    stem = "double_blocks.0.img_attn.qkv"
    for prefix, spell in (("diffusion_model.", str), ("lora_unet_", lambda text: text.replace(".", "_"))):
        for up in (full, blocks):
            sides = ("lora_A", "lora_B") if prefix.endswith(".") else ("lora_down", "lora_up")
            made = {f"{prefix}{spell(stem)}.{side}.weight": value for side, value in zip(sides, (a, up), strict=True)}
            save_file(made | {f"{prefix}{spell(stem)}.alpha": torch.tensor(3.0)}, tmp_path / "other.safetensors")
            read = read_back(tiny, tmp_path / "other.safetensors")
            deltas = [product(read["transformer", f"transformer_blocks.0.attn.to_{leaf}"]) for leaf in "qkv"]
            torch.testing.assert_close(torch.cat(deltas), 0.5 * up @ a, atol=1e-5, rtol=1e-5)
            assert {pair.rank for pair in read.values()} == ({6} if up is full else {2})


# ------------------------------------------------------------------ diffusers

# its converters are lists of names of their own: of ComfyUI's, with alphas and without, and of kohya's with their own UNet
CONVERTED = {"flux": "kohya", "wan": "alphas", "qwen_image": "alphas", "z_image": "kohya", "flux2": "", "hidream": ""}


@pytest.mark.parametrize("name", CONVERTED)
def test_diffusers_own_converters_find_the_same_layers(name: str, tmp_path: Path) -> None:
    tiny = loaded(config(name))
    pairs = pairs_of(tiny, texts=False)
    if name == "flux":  # the widths of the release stand in its converter of single blocks
        pairs = {key: pair for key, pair in pairs.items() if "single" not in key[1]}
    if not CONVERTED[name]:
        for pair in pairs.values():
            pair.alpha = float(pair.rank)
    tensors = load_file(written(tiny, pairs, tmp_path / "adapter") / "mine_comfyui.safetensors")
    if CONVERTED[name] == "kohya":
        tensors = {kohya_name(key): value for key, value in tensors.items()}
    elif not CONVERTED[name]:
        tensors = {key: value for key, value in tensors.items() if not key.endswith(".alpha")}
    made = getattr(diffusers, FAMILIES[name].pipeline).lora_state_dict(tensors)
    made = made[0] if isinstance(made, tuple) else made
    assert {key.rpartition(".lora_")[0] for key in made} == {".".join(key) for key in pairs}
    for key, pair in pairs.items():
        a, b = (made[f"{'.'.join(key)}.lora_{side}.weight"] for side in "AB")
        torch.testing.assert_close(b @ a, product(pair), atol=1e-6, rtol=1e-5, msg=str(key))


def kohya_name(key: str) -> str:
    layer, _, leaf = key.removeprefix("diffusion_model.").replace(".alpha", ".lora_alpha").partition(".lora_")
    leaf = {"A.weight": "lora_down.weight", "B.weight": "lora_up.weight", "alpha": "alpha"}[leaf]
    return f"lora_unet_{layer.replace('.', '_')}.{leaf}"


def test_hunyuan_images_double_blocks_have_the_names_of_its_video_model(tmp_path: Path) -> None:
    """ComfyUI runs it as HunyuanVideo; diffusers has a converter of that model's own names, which differ in spelling."""
    tiny = loaded(config("hunyuan_image"))
    pairs = {key: pair for key, pair in pairs_of(tiny, texts=False).items() if "single" not in key[1]}
    for pair in pairs.values():
        pair.alpha = float(pair.rank)
    tensors = load_file(written(tiny, pairs, tmp_path / "adapter") / "mine_comfyui.safetensors")
    spelt = {
        "diffusion_model.": "transformer.", "_attn.qkv": "_attn_qkv", "_attn.proj": "_attn_proj",
        "_mlp.0": "_mlp.fc1", "_mlp.2": "_mlp.fc2",
    }  # fmt: skip
    own = {key: value for key, value in tensors.items() if not key.endswith(".alpha")}
    for ours, theirs in spelt.items():
        own = {key.replace(ours, theirs): value for key, value in own.items()}
    made = diffusers.HunyuanVideoPipeline.lora_state_dict(own)
    assert {key.rpartition(".lora_")[0] for key in made} == {".".join(key) for key in pairs}
    for key, pair in pairs.items():
        a, b = (made[f"{'.'.join(key)}.lora_{side}.weight"] for side in "AB")
        torch.testing.assert_close(b @ a, product(pair), atol=1e-6, rtol=1e-5, msg=str(key))


def test_a_layer_that_is_dora_in_part_is_in_no_file_that_fuses_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = loaded(config("flux"))
    pairs = with_lengths(tiny, pairs_of(tiny, texts=False))
    of_keys = {key: pair for key, pair in pairs.items() if key[1].endswith("to_k")}
    folder = written(tiny, of_keys, tmp_path / "adapter", targets=("to_k",))
    assert [path.name for path in files_of(folder)] == [PEFT, DIFFUSERS]
    assert "mine_comfyui.safetensors" in caplog.text and "img_attn.qkv" in caplog.text


@pytest.mark.parametrize("name", ["sdxl", "sd1"])
def test_diffusers_reads_what_kohyas_scripts_would_write(name: str, tmp_path: Path) -> None:
    tiny = loaded(config(name))
    pairs = pairs_of(tiny)
    tensors = load_file(written(tiny, pairs, tmp_path / "adapter") / "mine.safetensors")
    loader = getattr(diffusers, FAMILIES[name].pipeline)
    made, alphas = loader.lora_state_dict(dict(tensors), unet_config=tiny.net.config)
    unet = convert_unet_state_dict_to_peft({key: value for key, value in made.items() if key.startswith("unet.")})
    texts = convert_state_dict_to_peft(convert_state_dict_to_diffusers(
        {key: value for key, value in made.items() if not key.startswith("unet.")}
    ))  # fmt: skip
    theirs = {key.replace(".processor", ""): value for key, value in (unet | texts).items()}
    assert {key.rpartition(".lora_")[0] for key in theirs} == {".".join(key) for key in pairs}
    for key, pair in pairs.items():
        assert torch.equal(theirs[f"{'.'.join(key)}.lora_A.weight"], pair.a), key
        assert torch.equal(theirs[f"{'.'.join(key)}.lora_B.weight"], pair.b), key
    assert sorted(alphas.values()) == sorted(pair.alpha for pair in pairs.values())
    # the names of kohya's own UNet, which is Stability's for SDXL and diffusers' for Stable Diffusion 1
    assert any(key.startswith("lora_unet_input_blocks_") for key in tensors) == (name == "sdxl")
    prefixes = {"sdxl": ("lora_te1_text_model_", "lora_te2_text_model_"), "sd1": ("lora_te_text_model_",)}
    assert all(any(key.startswith(prefix) for key in tensors) for prefix in prefixes[name])


PIPELINES = [
    "flux",
    *(pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES if name in SPEAKING - {"flux"}),
]


@pytest.mark.parametrize(("name", "dora"), [*(
    pytest.param(each, False) if isinstance(each, str) else pytest.param(*each.values, False, marks=each.marks)
    for each in PIPELINES
), ("flux", True)])  # fmt: skip
def test_a_pipeline_loads_what_was_trained(name: str, dora: bool, tmp_path: Path) -> None:
    """Load_lora_weights of the folder, with ranks and alphas from its header: the output is that of merged weights."""
    tiny = trained_once(loaded(config(name)))
    pairs = pairs_of(tiny, texts=False)
    pairs = with_lengths(tiny, pairs) if dora else pairs
    pipeline = pipeline_of(exported(tiny, tmp_path / "model"), name)
    pipeline.load_lora_weights(written(tiny, pairs, tmp_path / "adapter"), weight_name=DIFFUSERS, adapter_name="one")
    before = own_output(tiny)
    merged(tiny, pairs)
    ours = own_output(tiny)
    close(ours, own_output(tiny, getattr(pipeline, tiny.family.folder(tiny.family.denoiser))))
    assert not torch.allclose(ours, before, atol=1e-4, rtol=0)


# ------------------------------------------------------------------ PEFT


# hidream: layers of experts are adapted too, which have a path of their own through them
@pytest.mark.parametrize("name", [*(name for name in KINDS), "hidream", *(
    pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES if name not in (*KINDS, "hidream")
)])  # fmt: skip
def test_peft_takes_every_tensor_and_no_other_layer(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    tiny = trained_once(loaded(config(name)))
    pairs = pairs_of(tiny, texts=False)
    folder = written(tiny, pairs, tmp_path / "adapter")
    settings = peft.PeftConfig.from_pretrained(folder)
    twin = trained_once(loaded(config(name)))
    peft.inject_adapter_in_model(settings, twin.net)
    tensors = {key.removeprefix("base_model.model."): value for key, value in load_file(folder / PEFT).items()}
    outcome = peft.set_peft_model_state_dict(twin.net, tensors)
    assert not outcome.unexpected_keys and not [key for key in outcome.missing_keys if "lora_" in key]
    merged(tiny, pairs)
    close(own_output(tiny), own_output(twin))
