"""Image encoders from transformers' folders: their tokens over the model's own, what tells them apart, what they lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import names
from sd3_speedups import KINDS, SIZES, vision_folder

from difftrain.contracts import Bucket, ConfigFault
from difftrain.models import vision
from difftrain.models.vision import VisionFolder, encoder, tokens_of

PIXELS = torch.randint(256, (2, 3, 64, 64), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def by_hand(folder: Path, kind: str, pixels: torch.Tensor) -> torch.Tensor:
    """Encode at the encoder's own size, (B, 4 x 4, D), in the plainest way."""
    import transformers

    name = {"dinov2": "Dinov2Model", "clip_vision_model": "CLIPVisionModel", "siglip_vision_model": "SiglipVisionModel",
            "vit": "ViTModel"}[kind]  # fmt: skip
    model = getattr(transformers, name).from_pretrained(folder).eval()
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    small = torch.nn.functional.interpolate((pixels / 255 - mean) / std, size=(16, 16), mode="bicubic")
    with torch.no_grad():
        return model(small).last_hidden_state[:, -16:]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_encoders_own_laid_over_the_picture(kind: str, tmp_path: Path) -> None:
    path = vision_folder(tmp_path / "vision", kind)
    folder = VisionFolder(path)
    assert folder.faults() == [] and folder.grid(4, 4) == (4, 4)
    module = folder.build(torch.float32)
    assert not any(each.requires_grad for each in module.parameters()) and not module.training
    found = tokens_of(folder, module, PIXELS, 16)
    assert found.shape == (2, 12, 4, 4) and found.dtype == torch.bfloat16
    expected = by_hand(path, kind, PIXELS).transpose(1, 2).unflatten(2, (4, 4))
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_of_other_shapes_have_other_grids(kind: str, tmp_path: Path) -> None:
    folder = VisionFolder(vision_folder(tmp_path / "vision", kind))
    module = folder.build(torch.float32)
    wide = tokens_of(folder, module, PIXELS.repeat(1, 1, 1, 2)[..., :96], 16)
    assert wide.shape == (2, 12, 4, 6)
    large = tokens_of(folder, module, PIXELS.repeat(1, 1, 3, 3), 16)  # 144 tokens, of which the encoder sees 64
    assert folder.grid(12, 12) == (8, 8) and large.shape == (2, 12, 12, 12)


def test_it_is_told_by_settings_sizes_colours_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = vision_folder(tmp_path / "vision", "dinov2")
    told = {VisionFolder(path).fingerprint("a"), VisionFolder(path).fingerprint("b")}
    assert VisionFolder(path).fingerprint("a") in told
    scaling = json.loads((path / "preprocessor_config.json").read_text())
    (path / "preprocessor_config.json").write_text(json.dumps(scaling | {"image_mean": [0.5, 0.5, 0.5]}))
    told.add(VisionFolder(path).fingerprint("a"))
    told.add(VisionFolder(vision_folder(tmp_path / "other", "dinov2", num_hidden_layers=1)).fingerprint("a"))
    assert len(told) == 4
    same = vision_folder(tmp_path / "same", "dinov2")
    again = vision_folder(tmp_path / "again", "dinov2")
    assert VisionFolder(same).fingerprint("a") == VisionFolder(again).fingerprint("a")


def test_what_is_cached_of_it(tmp_path: Path) -> None:
    path = vision_folder(tmp_path / "vision", "dinov2")
    found = encoder(VisionFolder(path), {}, 16, "bf16")
    assert found.source == {"pixels"} and found.modules == ("vision",) and found.inputs == ()
    assert found.features["vision"].shape(Bucket(64, 96)) == (12, 4, 6)


def spoilt(path: Path, file: str, change: Any) -> None:
    content = json.loads((path / file).read_text())
    change(content)
    (path / file).write_text(json.dumps(content))


FAULTS = {
    "no config": (lambda p: (p / "config.json").unlink(), r"no config\.json"),
    "another encoder": (lambda p: spoilt(p, "config.json", lambda c: c.update(model_type="t5")), "of type 't5'.*one of dinov2"),
    "no sizes": (lambda p: spoilt(p, "config.json", lambda c: c.pop("patch_size")), " patch_size"),
    "no colours": (lambda p: (p / "preprocessor_config.json").unlink(), " image_mean, image_std"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "no weights"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "words"), FAULTS.values(), ids=FAULTS)
def test_what_a_folder_lacks_is_named(spoil: Any, words: str, tmp_path: Path) -> None:
    path = vision_folder(tmp_path / "vision", "dinov2")
    spoil(path)
    with pytest.raises(ConfigFault, match=f"--repa.encoder: .*{words}"):
        encoder(VisionFolder(path), {}, 16, "no")


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = vision_folder(tmp_path / "vision", "dinov2")
    held = load_file(path / "model.safetensors")
    save_file({name: value for name, value in held.items() if "layer.1" not in name}, path / "model.safetensors")
    with pytest.raises(ConfigFault, match=r"lacks \d+ weights .* Dinov2Model: encoder.layer.1"):
        VisionFolder(path).build(torch.float32)


LAST_NORMS = {
    "dinov2": ("Dinov2", "layernorm."),
    "dinov2_with_registers": ("Dinov2WithRegisters", "layernorm."),
    "dinov3_vit": ("DINOv3ViT", "norm."),
    "vit": ("ViT", "layernorm."),
    "clip_vision_model": ("CLIPVision", "post_layernorm."),
    "siglip_vision_model": ("SiglipVision", "post_layernorm."),
}


def test_every_kind_has_a_last_norm_here() -> None:
    pictures_and_texts = {"clip", "siglip"}  # folders whose image encoder is one of the others
    assert set(vision.KINDS) - pictures_and_texts == set(LAST_NORMS)


@pytest.mark.parametrize(("kind", "names"), LAST_NORMS.items(), ids=LAST_NORMS)
def test_an_encoder_without_its_last_norm_is_refused(kind: str, names: tuple[str, str], tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file, save_file

    name, norm = names
    more = {} if kind.startswith("dinov2") else {"intermediate_size": 24}
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**SIZES, **more))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    left = {key: value for key, value in held.items() if not key.removeprefix("vision_model.").startswith(norm)}
    assert len(held) - len(left) == 2
    VisionFolder(tmp_path).build(torch.float32)
    save_file(left, file, {"format": "pt"})
    with pytest.raises(ConfigFault, match=rf"lacks 2 weights .* {name}Model: .*{norm}bias"):
        VisionFolder(tmp_path).build(torch.float32)


def test_a_folder_of_pictures_and_texts_gives_its_image_encoder(tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 99, "max_position_embeddings": 77},
        vision_config={**sizes, "image_size": 16, "patch_size": 4},
        projection_dim=8,
    )
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    folder = VisionFolder(tmp_path)
    assert folder.faults() == [] and (folder.width, folder.patch) == (12, 4)
    assert tokens_of(folder, folder.build(torch.float32), PIXELS, 16).shape == (2, 12, 4, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_can_ask_for_nothing_but_sizes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of a hub, code beside the weights, an adapter that names another folder: none is looked for."""
    import transformers

    path = vision_folder(tmp_path / "vision", kind)
    whole = VisionFolder(path).build(torch.float32)
    asked = {
        "attn_implementation": "strangers/kernel", "_attn_implementation": "strangers/kernel", "use_kernels": True,
        "_attn_implementation_internal": "strangers/kernel", "experts_implementation": "strangers/kernel",
        "auto_map": {"AutoModel": "code.Model"}, "quantization_config": {"quant_method": "gptq", "bits": 4},
    }  # fmt: skip
    spoilt(path, "config.json", lambda content: content.update(asked))
    (path / "code.py").write_text("raise SystemExit('it ran')")
    (path / "adapter_config.json").write_text('{"base_model_name_or_path": "strangers/model", "peft_type": "LORA"}')
    # a name of a kernel is taken for one of a hub, and asked for, where it reaches transformers
    monkeypatch.setattr(transformers.utils.hub, "cached_file", lambda *words, **more: pytest.fail(f"{words}"))
    made = VisionFolder(path).build(torch.float32)
    assert all(torch.equal(value, made.state_dict()[name]) for name, value in whole.state_dict().items())
    assert "strangers" not in repr(made.config.to_dict()) and made.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**8), ("num_hidden_layers", "2"), ("hidden_size", True), ("patch_size", 0),
        ("image_size", 10**9), ("hidden_act", 5), ("num_attention_heads", {}),
        ("num_hidden_layers", float("nan")),
    ],
)  # fmt: skip
def test_sizes_of_an_encoder_are_bounded(key: str, value: object, tmp_path: Path) -> None:
    path = vision_folder(tmp_path / "vision", "dinov2")
    spoilt(path, "config.json", lambda content: content.update({key: value}))
    with pytest.raises(ConfigFault) as caught:
        encoder(VisionFolder(path), {}, 16, "no")
    assert names(caught.value, key)


@pytest.mark.parametrize(
    "change", [{"hidden_act": "strange"}, {"num_attention_heads": 5}, {"layer_norm_eps": "x"}], ids=str
)
def test_sizes_that_make_no_encoder(change: dict[str, object], tmp_path: Path) -> None:
    path = vision_folder(tmp_path / "vision", "dinov2")
    spoilt(path, "config.json", lambda content: content.update(change))
    with pytest.raises(ConfigFault):
        folder = VisionFolder(path)
        encoder(folder, {}, 16, "no")
        folder.build(torch.float32)


@pytest.mark.parametrize(
    "scaling", [[1, 2], "abc", [0.1, 0.2, "x"], [0.1, 0.2, float("nan")], {"a": 1, "b": 2, "c": 3}, 5]
)
def test_colours_are_three_numbers(scaling: object, tmp_path: Path) -> None:
    path = vision_folder(tmp_path / "vision", "dinov2")
    spoilt(path, "preprocessor_config.json", lambda content: content.update(image_mean=scaling))
    with pytest.raises(ConfigFault) as caught:
        encoder(VisionFolder(path), {}, 16, "no")
    assert names(caught.value, "image_mean")
