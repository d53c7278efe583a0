"""SDXL in files: every layout loads in diffusers and here, gives the same pictures, and wrong files are named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import is_about, names
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sdxl import config, loaded, pipeline_over, sizes

from difftrain.contracts import ConfigFault, Parts
from difftrain.models.families.sdxl import SDXLFamily

LAYOUTS = ("safetensors", "ckpt", "diffusers", "diffusers_safetensors")


@dataclass(frozen=True)
class Exports:
    """One model in every layout, and what its own pipeline draws."""

    paths: dict[str, Path]
    family: SDXLFamily
    parts: Parts
    picture: np.ndarray

    @property
    def folder(self) -> str:
        return str(self.paths["diffusers_safetensors"])


def draw(pipeline: Any) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    return pipeline(
        "a red star", height=64, width=64, num_inference_steps=2, generator=generator, output_type="np"
    ).images


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """A model whose encoders are trained, so that all of root is written from the stream."""
    folder = tmp_path_factory.mktemp("exports")
    family, parts = loaded(config(prediction_type="v_prediction", train_text_encoder=True))
    weights = list(parts.root.state_dict().items())
    # a dot in the name must not be taken for a suffix
    metadata = {"modelspec.title": "v1", "modelspec.prediction_type": "v"}
    paths = {
        layout: family.export(reversed(weights), parts, layout, folder / f"{layout}-v1.0", metadata=metadata)
        for layout in LAYOUTS
    }
    return Exports(paths, family, parts, draw(pipeline_over(family, parts)))


def test_names_follow_the_layout(exports: Exports) -> None:
    found = {layout: path.name for layout, path in exports.paths.items()}
    assert found == {
        "safetensors": "safetensors-v1.0.safetensors",
        "ckpt": "ckpt-v1.0.ckpt",
        "diffusers": "diffusers-v1.0",
        "diffusers_safetensors": "diffusers_safetensors-v1.0",
    }
    suffixes = {p.suffix for p in exports.paths["diffusers"].rglob("*model.*") if p.suffix != ".json"}
    assert suffixes == {".bin"}  # kohya's plain "diffusers"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_diffusers_loads_it_and_draws_the_same(exports: Exports, layout: str) -> None:
    from diffusers import StableDiffusionXLPipeline

    path = exports.paths[layout]
    if path.is_dir():
        pipeline = StableDiffusionXLPipeline.from_pretrained(path)
    else:
        pipeline = StableDiffusionXLPipeline.from_single_file(str(path), config=exports.folder, local_files_only=True)
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    assert pipeline.config.force_zeros_for_empty_prompt is False
    assert np.abs(draw(pipeline) - exports.picture).max() < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_loads_here_bit_for_bit(exports: Exports, layout: str) -> None:
    family, parts = loaded(config(pretrained=str(exports.paths[layout]), train_text_encoder=True))
    expected = exports.parts.root.state_dict() | {
        f"vae.{name}": value for name, value in exports.parts.frozen["vae"].state_dict().items()
    }
    found = parts.root.state_dict() | {f"vae.{name}": v for name, v in parts.frozen["vae"].state_dict().items()}
    assert set(found) == set(expected)
    assert all(value.equal(found[name]) for name, value in expected.items())
    said = any(names(note, "v_prediction", "epsilon") for note in parts.notes)
    assert said == (layout != "ckpt")  # which has no header
    assert family.vocabularies == exports.family.vocabularies
    assert family.features == exports.family.features


@pytest.mark.flags("disable_mmap_load_safetensors")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_mapped_where_that_is_asked(exports: Exports, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, mmap: bool = True, **__: Any) -> None:
        assert not mmap, "a file was mapped"
        return read(*_, mmap=mmap, **__)

    read = torch.load
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr("safetensors.safe_open", refuse)
    path = str(exports.paths[layout])
    _, parts = loaded(config(pretrained=path, vae=path, train_text_encoder=True, disable_mmap=True))
    found, expected = parts.root.state_dict(), exports.parts.root.state_dict()
    assert all(value.equal(found[name]) for name, value in expected.items())
    with pytest.raises((AssertionError, ConfigFault), match="was mapped"):
        loaded(config(pretrained=path))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loading_and_exporting_again_changes_nothing(exports: Exports, layout: str, tmp_path: Path) -> None:
    """Streamed from the file, with parts on the meta device: nothing is built."""
    family = SDXLFamily(config(pretrained=str(exports.paths[layout])))
    meta = family.load(meta=True)
    again = family.export(family.stream(meta), meta, "safetensors", tmp_path / "again")
    first, second = load_file(exports.paths["safetensors"]), load_file(again)
    assert set(first) == set(second)
    assert all(value.equal(second[name]) for name, value in first.items())


def test_weights_that_the_stream_lacks_come_from_the_modules(exports: Exports, tmp_path: Path) -> None:
    """A trainer streams what it trains; averaged weights replace those of the modules."""
    name = "unet.conv_in.weight"
    changed = torch.full_like(exports.parts.root.get_parameter(name), 7.0)
    path = exports.family.export([(name, changed)], exports.parts, "safetensors", tmp_path / "one")
    before, after = load_file(exports.paths["safetensors"]), load_file(path)
    assert [key for key in before if not before[key].equal(after[key])] == [
        "model.diffusion_model.input_blocks.0.0.weight"
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_cast_but_positions_are_not(exports: Exports, layout: str, tmp_path: Path) -> None:
    path = exports.family.export([], exports.parts, layout, tmp_path / "half", dtype=torch.float16)
    tensors = {
        "safetensors": lambda: load_file(path),
        "ckpt": lambda: torch.load(path, weights_only=True),
        "diffusers": lambda: torch.load(path / "unet" / "diffusion_pytorch_model.bin", weights_only=True),
        "diffusers_safetensors": lambda: load_file(path / "text_encoder_2" / "model.safetensors"),
    }[layout]()
    assert {value.dtype for value in tensors.values() if value.is_floating_point()} == {torch.float16}
    if not path.is_dir():
        positions = tensors["conditioner.embedders.0.transformer.text_model.embeddings.position_ids"]
        assert positions.dtype == torch.int64 and positions.tolist() == [list(range(77))]


def test_the_header_holds_metadata_and_sizes(exports: Exports) -> None:
    metadata = header_of(exports)
    assert metadata["modelspec.title"] == "v1"
    assert json.loads(metadata["difftrain.architecture"]) == sizes()
    with safe_open(Path(exports.folder) / "unet" / "diffusion_pytorch_model.safetensors", "pt") as file:
        assert file.metadata()["modelspec.title"] == "v1"


def test_an_older_export_is_replaced_only_by_a_whole_one(exports: Exports, tmp_path: Path) -> None:
    def broken():
        yield next(iter(exports.parts.root.state_dict().items()))
        raise OSError(28, "No space left on device")

    for layout in ("safetensors", "diffusers"):
        path = exports.family.export([], exports.parts, layout, tmp_path / "model")
        before = sorted((p.relative_to(tmp_path), p.stat().st_size) for p in tmp_path.rglob("*"))
        with pytest.raises(OSError, match="No space left"):
            exports.family.export(broken(), exports.parts, layout, tmp_path / "model")
        assert sorted((p.relative_to(tmp_path), p.stat().st_size) for p in tmp_path.rglob("*")) == before
        again = exports.family.export([], exports.parts, layout, tmp_path / "model")
        assert again == path
        assert sorted((p.relative_to(tmp_path), p.stat().st_size) for p in tmp_path.rglob("*")) == before


def header_of(exports: Exports) -> dict[str, str]:
    with safe_open(exports.paths["safetensors"], "pt") as file:
        return file.metadata()


def fault(**model: Any) -> str:
    with pytest.raises(ConfigFault) as error:
        SDXLFamily(config(**model)).load(meta=True)
    return str(error.value)


Edit = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def _renamed(old: str, new: str) -> Edit:
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


def _only(part: str) -> Edit:
    return lambda tensors: {name: value for name, value in tensors.items() if name.startswith(part)}


WRONG: dict[str, tuple[Edit, str]] = {
    "sd1": (
        lambda t: {"cond_stage_model.transformer.text_model.x": torch.ones(1), **_only("model.")(t)},
        "looks like Stable Diffusion 1;",
    ),
    "sd2": (
        lambda t: {"cond_stage_model.model.transformer.resblocks.0.x": torch.ones(1)},
        "looks like Stable Diffusion 2;",
    ),
    "sd3": (lambda t: {"model.diffusion_model.joint_blocks.0.x": torch.ones(1)}, "looks like SD3"),
    "flux": (lambda t: {"double_blocks.0.img_attn.qkv.weight": torch.ones(1)}, "looks like Flux"),
    "lora": (lambda t: {"lora_unet_down_blocks_0.lora_up.weight": torch.ones(1)}, "LoRA"),
    "refiner": (lambda t: {"conditioner.embedders.0.model.transformer.x": torch.ones(1)}, "the SDXL refiner"),
    "unet": (_only("model.diffusion_model"), "UNet"),
    "vae": (_only("first_stage_model"), "VAE"),
    "nothing": (lambda t: {"weight": torch.ones(1)}, "weight"),
    "missing": (
        lambda t: {n: v for n, v in t.items() if "time_embed.0" not in n},
        "2 missing: model.diffusion_model.time_embed.0.weight, model.diffusion_model.time_embed.0.bias",
    ),
    "unexpected": (
        lambda t: t | {"model.diffusion_model.extra": torch.ones(1)},
        "1 unexpected: model.diffusion_model.extra",
    ),
    "shape": (
        lambda t: t | {"model.diffusion_model.out.2.bias": torch.ones(3)},
        "shape: model.diffusion_model.out.2.bias (3,) instead of (16,)",
    ),
    "inpainting": (
        lambda t: t | {"model.diffusion_model.input_blocks.0.0.weight": torch.ones(16, 9, 3, 3)},
        "inpainting",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_named_for_what_it_is(exports: Exports, tmp_path: Path, case: str) -> None:
    edit, expected = WRONG[case]
    path = tmp_path / "wrong.safetensors"
    save_file(edit(load_file(exports.paths["safetensors"])), path, header_of(exports))
    found = fault(pretrained=str(path))
    assert "--pretrained_model_name_or_path" in found and str(path) in found and expected in found


def test_tables_and_marks_beside_the_weights_are_no_fault(exports: Exports, tmp_path: Path) -> None:
    extra = {"betas": torch.ones(2), "model_ema.decay": torch.ones(1), "v_pred": torch.ones(0), "ztsnr": torch.ones(0)}
    path = tmp_path / "extra.safetensors"
    save_file(load_file(exports.paths["safetensors"]) | extra, path, header_of(exports))
    parts = SDXLFamily(config(pretrained=str(path))).load(meta=True)
    assert any(names(note, "v_prediction") for note in parts.notes)


def test_a_released_temperature_survives(exports: Exports, tmp_path: Path) -> None:
    key, path = "conditioner.embedders.1.model.logit_scale", tmp_path / "scaled.safetensors"
    tensors = load_file(exports.paths["safetensors"])
    assert abs(tensors[key].item() - np.log(1 / 0.07)) < 1e-6  # OpenCLIP's start
    save_file(tensors | {key: torch.tensor(4.6052)}, path, header_of(exports))
    family = SDXLFamily(config(pretrained=str(path)))
    meta = family.load(meta=True)
    again = family.export(family.stream(meta), meta, "safetensors", tmp_path / "again")
    assert load_file(again)[key].item() == pytest.approx(4.6052)


def test_wrong_folders_and_paths_are_named(exports: Exports, tmp_path: Path) -> None:
    assert str(tmp_path / "absent") in fault(pretrained=str(tmp_path / "absent"))
    assert "holds nothing, not SDXL" in fault(pretrained=str(tmp_path))
    copy = tmp_path / "copy"
    shutil.copytree(exports.folder, copy)
    (copy / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    assert f"{copy / 'unet'} has no " in fault(pretrained=str(copy))
    (copy / "unet" / "config.json").unlink()
    assert names(fault(pretrained=str(copy)), "config.json")
    (copy / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    assert "holds StableDiffusionPipeline, not SDXL" in fault(pretrained=str(copy))
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(exports.paths["safetensors"].read_bytes()[:5000])
    assert re.search(rf"{cut} .*safetensors file: ", fault(pretrained=str(cut)))
    assert "contradicts --init_from_config" in fault(pretrained=str(cut), init_from_config="tiny")


def test_shards_and_fp16_variants_are_read(exports: Exports, tmp_path: Path) -> None:
    shutil.copytree(exports.folder, tmp_path / "copy")
    unet = tmp_path / "copy" / "unet"
    tensors = load_file(unet / "diffusion_pytorch_model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in halves.items():
        save_file({key: tensors[key] for key in keys}, unet / file)
    index = {"weight_map": {key: file for file, keys in halves.items() for key in keys}}
    (unet / "diffusion_pytorch_model.safetensors").unlink()
    (unet / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    encoder = tmp_path / "copy" / "text_encoder"
    (encoder / "model.safetensors").rename(encoder / "model.fp16.safetensors")
    _, parts = loaded(config(pretrained=str(tmp_path / "copy")))
    assert all(value.equal(parts.root.state_dict()[f"unet.{name}"]) for name, value in tensors.items())


def _whole_model(exports: Exports, path: Path) -> Path:
    return exports.paths["safetensors"]


def _original_vae(exports: Exports, path: Path) -> Path:
    tensors = _only("first_stage_model.")(load_file(exports.paths["safetensors"]))
    save_file(_renamed("first_stage_model.", "")(tensors), path / "vae.safetensors")
    return path / "vae.safetensors"


def _diffusers_vae(exports: Exports, path: Path) -> Path:
    return Path(exports.folder) / "vae" / "diffusion_pytorch_model.safetensors"


def _old_diffusers_vae(exports: Exports, path: Path) -> Path:
    tensors = load_file(_diffusers_vae(exports, path))
    for new, old in (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn")):
        tensors = _renamed(f".{new}.", f".{old}.")(tensors)
    save_file(tensors, path / "old.safetensors")
    return path / "old.safetensors"


def _vae_folder(exports: Exports, path: Path) -> Path:
    return Path(exports.folder) / "vae"


def _model_folder(exports: Exports, path: Path) -> Path:
    return exports.paths["diffusers"]


@pytest.mark.parametrize(
    "place", [_whole_model, _original_vae, _diffusers_vae, _old_diffusers_vae, _vae_folder, _model_folder]
)
def test_a_vae_from_elsewhere(exports: Exports, tmp_path: Path, place: Callable[[Exports, Path], Path]) -> None:
    """Into a model of another seed, whose own VAE is random."""
    given = sizes()
    given["vae"] |= {"scaling_factor": 0.4}  # no longer the shipped VAE's sizes
    (tmp_path / "sizes.json").write_text(json.dumps(given))
    family, parts = loaded(config(init_from_config=str(tmp_path / "sizes.json"), vae=str(place(exports, tmp_path))))
    wanted, found = exports.parts.frozen["vae"].state_dict(), parts.frozen["vae"].state_dict()
    assert all(value.equal(found[name]) for name, value in wanted.items())
    assert any("the VAE is" in note for note in parts.notes)
    from_folder = place in (_vae_folder, _model_folder)
    assert family.source.sizes["vae"]["scaling_factor"] == (0.5 if from_folder else 0.4)


def test_a_vae_that_does_not_fit_is_named(exports: Exports, tmp_path: Path) -> None:
    assert re.search(rf"--vae: .*'{tmp_path / 'absent'}'", fault(vae=str(tmp_path / "absent")))
    save_file({"lora_up.weight": torch.ones(1)}, tmp_path / "no.safetensors")
    assert "LoRA" in fault(vae=str(tmp_path / "no.safetensors"))
    shutil.copytree(Path(exports.folder) / "vae", tmp_path / "vae")
    content = json.loads((tmp_path / "vae" / "config.json").read_text())
    (tmp_path / "vae" / "config.json").write_text(json.dumps(content | {"latent_channels": 4}))
    assert "makes 4 latent channels, the UNet takes 16" in fault(vae=str(tmp_path / "vae"))


def test_wrong_sizes_are_named_all_at_once(tmp_path: Path) -> None:
    def given(content: Any) -> str:
        (tmp_path / "sizes.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return fault(init_from_config=str(tmp_path / "sizes.json"))

    tiny = sizes()
    assert is_about(fault(init_from_config="huge"), "--init_from_config", "'huge'")
    assert "is not JSON" in given("{")
    assert names(given("[]"), "list")
    assert "'vae'" in given({**tiny, "vae": None})
    assert "'uent'" in given(tiny | {"uent": {}})
    bare = given(tiny | {"unet": {}, "vae": {"latents_mean": [0.0]}})
    assert "[unet]: 'cross_attention_dim' is missing" in bare and "[vae]: 'latent_channels' is missing" in bare
    assert "latents_mean is" in given(tiny | {"vae": tiny["vae"] | {"latents_mean": [0.0]}})
    assert "unet: " in given(tiny | {"unet": tiny["unet"] | {"norm_num_groups": 7}})
    odd = given(tiny | {"unet": tiny["unet"] | {"layers_per_block": "x"}})
    assert "[unet] layers_per_block: is 'x', " in odd
    assert re.search(r"\[unet\]: .*'depth'", given(tiny | {"unet": tiny["unet"] | {"depth": 3}}))
    wrong = given(tiny | {"unet": tiny["unet"] | {"cross_attention_dim": 57, "in_channels": 4}})
    assert "[unet] cross_attention_dim: is 57, must be 56" in wrong and "[unet] in_channels: is 4, must be 16" in wrong
