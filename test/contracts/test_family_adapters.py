"""A LoRA that is merged draws what diffusers' pipeline draws with it loaded by PEFT; another family's is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
from families import Tiny, config, exported, loaded, pipeline_of, trained_once
from safetensors.torch import load_file, save_file

from difftrain.contracts import ConfigFault
from difftrain.models.registry import FAMILIES
from difftrain.models.weights.adapter_files import AdapterChoice, merge_adapter
from difftrain.models.weights.infer import adapter_looks_like

RANK, ALPHA = 4, 8.0
# what PEFT is told to adapt, of a denoiser and of a CLIP text encoder
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
TEXT_TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj"]


def modules_of(tiny: Tiny) -> dict[str, torch.nn.Module]:
    parts, family = tiny.parts, tiny.family
    return {
        family.folder(part): parts.root.get_submodule(part) if part in family.in_root else parts.frozen[part]
        for part in family.parts
    }


def lora_of(tiny: Tiny) -> dict[str, torch.Tensor]:
    """Return a LoRA by diffusers' names, made by hand: of the denoiser, and of CLIP where the family reads it."""
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for folder, module in modules_of(tiny).items():
        targets = TARGETS if folder == tiny.family.folder(tiny.family.denoiser) else TEXT_TARGETS
        if ("text_encoder" in folder and "CLIP" not in type(module).__name__) or folder == "vae":
            continue
        for name, layer in module.named_modules():
            if isinstance(layer, torch.nn.Linear) and name.endswith(tuple(targets)):
                a, b = (RANK, layer.in_features), (layer.out_features, RANK)
                tensors[f"{folder}.{name}.lora_A.weight"] = torch.randn(a, generator=generator) / 8
                tensors[f"{folder}.{name}.lora_B.weight"] = torch.randn(b, generator=generator) / 8
    return tensors


def merged(tiny: Tiny, path: Path, scale: float = 1.0) -> str:
    return merge_adapter(AdapterChoice(path, scale, "--adapter"), tiny.family, modules_of(tiny))


ADAPTED = [name for name in FAMILIES if hasattr(getattr(diffusers, FAMILIES[name].pipeline, None), "load_lora_weights")]


@pytest.mark.parametrize("name", ADAPTED)
def test_a_merged_adapter_is_the_pipeline_with_it(name: str, tmp_path: Path) -> None:
    """Equal where it counts, in the output of every module that it changes."""
    pytest.importorskip("peft")
    tiny = trained_once(loaded(config(name)))
    pipeline = pipeline_of(exported(tiny, tmp_path / "folder"), name)
    tensors = lora_of(tiny)
    denoiser = tiny.family.folder(tiny.family.denoiser)
    # transformers' own loader of adapters takes its base weights for missing: text encoders are compared with the formula
    own = {key: value for key, value in tensors.items() if key.startswith(f"{denoiser}.")}
    save_file(own, tmp_path / "lora.safetensors")
    pipeline.load_lora_weights(dict(own), adapter_name="one")
    pipeline.set_adapters(["one"], [0.5])
    merged(tiny, tmp_path / "lora.safetensors", 0.5)
    inputs = tiny.inputs()
    with torch.no_grad():
        ours = tiny.family.forward(tiny.parts.root, inputs)[0]
        plain = trained_once(loaded(config(name)))
        before = plain.family.forward(plain.parts.root, inputs)[0]
        tiny.parts.root._modules[tiny.family.denoiser] = getattr(pipeline, denoiser)
        theirs = tiny.family.forward(tiny.parts.root, inputs)[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5 * max(1.0, float(theirs.abs().max())), rtol=0)
    assert not torch.allclose(ours, before, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ADAPTED)
def test_every_factor_finds_its_layer_and_scales(name: str, tmp_path: Path) -> None:
    tiny = loaded(config(name))
    before = {f"{folder}.{key}": value.clone() for folder, module in modules_of(tiny).items()
              for key, value in module.state_dict().items()}  # fmt: skip
    tensors = lora_of(tiny)
    save_file(tensors, tmp_path / "lora.safetensors")
    merged(tiny, tmp_path / "lora.safetensors", -2.0)
    after = {f"{folder}.{key}": value for folder, module in modules_of(tiny).items()
             for key, value in module.state_dict().items()}  # fmt: skip
    for key, value in before.items():
        stem = key.removesuffix(".weight")
        delta = torch.zeros_like(value)
        if f"{stem}.lora_A.weight" in tensors:
            delta = -2.0 * tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"]
        torch.testing.assert_close(after[key], value + delta, atol=1e-6, rtol=1e-6)


def kohya_of(tensors: dict[str, torch.Tensor], prefixes: dict[str, str]) -> dict[str, torch.Tensor]:
    """Spell a LoRA as kohya's scripts do, with an alpha for each layer."""
    spelt = {}
    for key, value in tensors.items():
        folder, _, rest = key.partition(".")
        layer, _, side = rest.partition(".lora_")
        name = prefixes[folder] + layer.removeprefix("text_model.").replace(".", "_")
        spelt[f"{name}.lora_{'down' if side.startswith('A') else 'up'}.weight"] = value
        spelt[f"{name}.alpha"] = torch.tensor(ALPHA)
    return spelt


def test_layouts_say_the_same(tmp_path: Path) -> None:
    """kohya's names and alphas, PEFT's file beside its configuration, and diffusers' settings in a header."""
    plain = lora_of(loaded(config("sdxl")))
    unet = {key: value for key, value in plain.items() if key.startswith("unet.")}
    prefixes = {
        "unet": "lora_unet_", "text_encoder": "lora_te1_text_model_", "text_encoder_2": "lora_te2_text_model_",
    }  # fmt: skip
    peft = {key.replace("unet.", "base_model.model.", 1): value for key, value in unet.items()}
    (tmp_path / "peft").mkdir()
    save_file(peft, tmp_path / "peft" / "adapter_model.safetensors")
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA}))
    save_file(kohya_of(unet, prefixes), tmp_path / "kohya.safetensors")
    about = {"unet.r": RANK, "unet.lora_alpha": ALPHA}
    save_file(unet, tmp_path / "diffusers.safetensors", {"lora_adapter_metadata": json.dumps(about)})
    save_file(unet, tmp_path / "plain.safetensors")  # without an alpha the product counts as it is
    save_file(kohya_of(plain, prefixes), tmp_path / "whole.safetensors")
    made = {}
    for name, scale in {"peft": 1.0, "kohya.safetensors": 1.0, "diffusers.safetensors": 1.0, "plain.safetensors": 2.0,
                        "whole.safetensors": 1.0}.items():  # fmt: skip
        tiny = loaded(config("sdxl"))
        merged(tiny, tmp_path / name, scale)
        made[name] = {folder: module.state_dict() for folder, module in modules_of(tiny).items()}
    for name, folders in made.items():
        for key, value in made["peft"]["unet"].items():
            torch.testing.assert_close(folders["unet"][key], value, atol=1e-6, rtol=1e-6, msg=name)
    query = "encoder.layers.0.self_attn.q_proj.weight"
    texts = [
        next(v for k, v in made[name]["text_encoder"].items() if k.endswith(query))
        for name in ("peft", "whole.safetensors")
    ]
    assert not torch.allclose(*texts)


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path) -> None:
    other = next(name for name in FAMILIES if "transformer" in FAMILIES[name].parts)
    tiny = loaded(config("sdxl"))
    before = {key: value.clone() for key, value in tiny.net.state_dict().items()}
    of_other, own = lora_of(loaded(config(other))), lora_of(tiny)
    first = next(key for key in own if key.startswith("unet."))
    layer = first.removeprefix("unet.").partition(".lora_")[0]
    kohyas = f"lora_unet_{layer.replace('.', '_')}"
    files = {
        "other": of_other,
        "twice": own
        | {
            f"{kohyas}.lora_{side}.weight": own[f"unet.{layer}.lora_{factor}.weight"].clone()
            for side, factor in (("down", "A"), ("up", "B"))
        },
        "factor": own | {first.replace("lora_A", "lora_A.default"): own[first].clone()},
        "odd": own | {"unet.nowhere.lora_A.weight": torch.ones(4, 8), "unet.nowhere.lora_B.weight": torch.ones(8, 4)},
        "shape": own | {first: own[first][:, 1:].contiguous()},
        "dora": own | {"unet.down_blocks.0.dora_scale": torch.ones(4)},
        "none": {"conv_in.weight": torch.ones(4)},
    }
    named = {"other": "transformer.", "odd": "unet.nowhere.lora_A.weight",
             "shape": first, "dora": "DoRA",
             "twice": f"{kohyas}.lora_down.weight, {kohyas}.lora_up.weight, unet.{layer}.", "factor": "lora_A.default", "none": "--adapter"}  # fmt: skip
    for name, tensors in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
        with pytest.raises(ConfigFault) as found:
            merged(tiny, tmp_path / f"{name}.safetensors")
        assert named[name] in str(found.value), name
    with pytest.raises(ConfigFault, match="nothing_here"):
        merged(tiny, tmp_path / "nothing_here.safetensors")
    shutil.copy(tmp_path / "odd.safetensors", tmp_path / "torn.safetensors")
    with (tmp_path / "torn.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ConfigFault, match="torn"):
        merged(tiny, tmp_path / "torn.safetensors")
    assert all(torch.equal(value, before[key]) for key, value in tiny.net.state_dict().items())
    assert load_file(tmp_path / "odd.safetensors")


def test_an_adapter_with_values_that_are_no_numbers_is_named_itself(tmp_path: Path) -> None:
    tiny = loaded(config("sdxl"))
    before = {name: value.clone() for name, value in tiny.weights().items()}
    tensors = lora_of(tiny)
    tensors[next(iter(tensors))][0, 0] = torch.nan
    save_file(tensors, tmp_path / "lora.safetensors")
    with pytest.raises(ConfigFault) as caught:
        merged(tiny, tmp_path / "lora.safetensors")
    (fault,) = caught.value.faults
    assert fault.where == "--adapter" and "lora.safetensors" in fault.what
    assert all(torch.equal(value, before[name]) for name, value in tiny.weights().items())


@pytest.mark.parametrize(
    ("key", "width", "name"),
    [
        (
            "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k.lora_down.weight",
            768,
            "Stable Diffusion 1",
        ),
        ("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.lora_A.weight", 1024, "Stable Diffusion 2"),
        ("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_v.lora_A.weight", 2048, "Stable Diffusion XL"),
        ("transformer.transformer_blocks.0.attn.to_q.lora_A.weight", 1536, "Stable Diffusion 3"),
        ("transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight", 3072, "Flux.1"),
        ("unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.lora_A.weight", 64, ""),
    ],
)
def test_an_adapter_tells_which_model_it_is_for(key: str, width: int, name: str) -> None:
    assert adapter_looks_like({key: (RANK, width)}) == name
