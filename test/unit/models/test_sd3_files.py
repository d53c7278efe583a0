"""SD3 in folders: exports load in diffusers and here, give the trainer's own velocity, and wrong folders are named."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import names
from safetensors.torch import load_file, save_file
from sd3 import FOLDERS, PARTS, batch_of, config, loaded

from difftrain.contracts import ConfigFault, Parts
from difftrain.models.families.sd3.family import SD3Family
from difftrain.models.registry import make_family
from difftrain.models.weights.files import dtypes_of
from difftrain.sampling import Prompt, draw_pictures

GAMMAS = (0.0, 0.25)


@dataclass(frozen=True)
class Exported:
    """A model whose every weight has moved, and the folder that it was exported to."""

    family: SD3Family
    parts: Parts
    path: Path


def moved(parts: Parts, seed: int = 0) -> Parts:
    """Add noise to every trained weight, so that none is a zero or a one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in parts.root.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=generator))
    return parts


def weights_of(parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, param.detach()) for name, param in parts.root.named_parameters())


def with_gamma(gamma: float, **model: Any) -> Any:
    return config({"loss": {"text_recon_gamma": gamma}}, **model)


@pytest.fixture(scope="module", params=GAMMAS, ids=["plain", "text"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    family, parts = loaded(with_gamma(request.param, enable_uncond_text_dropout=True))
    moved(parts)
    path = tmp_path_factory.mktemp("sd3") / "model-v1.0"
    assert (
        family.export(weights_of(parts), parts, "diffusers_safetensors", path, metadata=family.metadata("m", 0.0))
        == path
    )
    return Exported(family, parts, path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    family, parts = loaded(config())
    moved(parts)
    path = tmp_path_factory.mktemp("plain") / "model"
    return Exported(family, parts, family.export(weights_of(parts), parts, "diffusers_safetensors", path))


@torch.no_grad()
def losses(family: Any, parts: Parts) -> dict[str, float]:
    batch = batch_of(family, parts, ["a red star", "a blue cat", ""], trains=False)
    inputs = family.inputs(batch, parts)
    return {name: float(value) for name, value in family.loss_sums(family.forward(parts.root, inputs), inputs).items()}


def test_diffusers_finds_every_key_and_no_other(exported: Exported, caplog: pytest.LogCaptureFixture) -> None:
    from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection, T5EncoderModel

    kinds = (
        SD3Transformer2DModel,
        AutoencoderKL,
        CLIPTextModelWithProjection,
        CLIPTextModelWithProjection,
        T5EncoderModel,
    )
    for part, kind in zip(PARTS, kinds, strict=True):
        _, told = kind.from_pretrained(exported.path / FOLDERS[part], output_loading_info=True)  # type: ignore[attr-defined]
        assert not any(told.values()), (part, told)
    with caplog.at_level(logging.WARNING):
        pipeline = StableDiffusion3Pipeline.from_pretrained(exported.path)
    assert not [each for each in caplog.records if "weights" in each.getMessage() or "not used" in each.getMessage()]
    assert pipeline.transformer.config.num_layers == 3 and not [
        p for p in pipeline.transformer.parameters() if p.is_meta
    ]


def test_the_velocity_is_the_trainers(exported: Exported) -> None:
    from diffusers import SD3Transformer2DModel

    theirs: Any = SD3Transformer2DModel.from_pretrained(exported.path / "transformer")
    batch = batch_of(exported.family, exported.parts, ["a red star", "a blue cat"])
    inputs = exported.family.inputs(batch, exported.parts)
    with torch.no_grad():
        ours = exported.family.forward(exported.parts.root, inputs)[0]
        found = theirs(
            inputs.x_t,
            encoder_hidden_states=inputs.conditions["tokens"],
            pooled_projections=inputs.conditions["pooled"],
            timestep=inputs.timestep,
        ).sample
    assert ours.abs().mean() > 0.1
    assert torch.allclose(found, ours, rtol=0, atol=1e-6)


def test_the_exported_pipeline_encodes_and_draws_as_the_training_does(exported: Exported) -> None:
    from diffusers import StableDiffusion3Pipeline

    theirs = StableDiffusion3Pipeline.from_pretrained(exported.path)
    theirs.set_progress_bar_config(disable=True)
    with torch.no_grad():
        tokens, _, pooled, _ = theirs.encode_prompt("a red star", None, None, max_sequence_length=16)
        picture = theirs(
            prompt_embeds=tokens,
            pooled_prompt_embeds=pooled,
            negative_prompt_embeds=torch.zeros_like(tokens),
            negative_pooled_prompt_embeds=torch.zeros_like(pooled),
            generator=torch.Generator().manual_seed(1),
            height=64,
            width=48,
            num_inference_steps=3,
        ).images[0]
    prompt = Prompt("a red star", width=48, height=64, sample_steps=3, scale=7.0, seed=1)
    (ours,) = draw_pictures(exported.family.drawer(exported.parts), [prompt], sampler="flow_euler", seed=0)
    assert picture.size == (48, 64)
    assert abs(np.asarray(picture, dtype=int) - np.asarray(ours.image, dtype=int)).max() <= 1


def test_it_is_trained_on_from_its_folder(exported: Exported) -> None:
    cfg = exported.family.cfg
    family, parts = loaded(with_gamma(cfg.loss.text_recon_gamma, pretrained=str(exported.path), init_from_config=None))
    assert losses(family, parts) == losses(exported.family, exported.parts)
    full = exported.path / "transformer_full"
    if cfg.loss.text_recon_gamma:
        assert "ignored" in " ".join(
            SD3Family(config(pretrained=str(exported.path), init_from_config=None)).source.notes
        )
    assert full.is_dir() == bool(cfg.loss.text_recon_gamma) == any("transformer_full" in note for note in parts.notes)


def test_it_says_what_no_text_is(exported: Exported, plain: Exported) -> None:
    told = json.loads((exported.path / "difftrain.json").read_text())
    assert told["unconditional"] == "zeros" and told["num_layers"] == 3
    assert "zeros_like" in (exported.path / "README.md").read_text()
    assert json.loads((plain.path / "difftrain.json").read_text())["unconditional"].startswith("encoded ")
    header = exported.family.metadata("m", 0.0)
    assert (
        header["modelspec.architecture"] == "stable-diffusion-v3" and header["modelspec.prediction_type"] == "velocity"
    )


def test_half_precision_is_of_every_part(exported: Exported, tmp_path: Path) -> None:
    path = exported.family.export(
        weights_of(exported.parts), exported.parts, "diffusers", tmp_path / "half", dtype=torch.bfloat16
    )
    for file in path.rglob("*.safetensors"):
        full = file.parent.name == "transformer_full"  # what training goes on from stays as it is
        assert dtypes_of(file) == {torch.float32 if full else torch.bfloat16}, file


def test_averaged_weights_go_through_the_same_door(exported: Exported, tmp_path: Path) -> None:
    halves = [(name, value / 2) for name, value in weights_of(exported.parts)]
    path = exported.family.export(reversed(halves), exported.parts, "diffusers_safetensors", tmp_path / "ema")
    name = "transformer_blocks.0.attn.to_q.weight"
    stored = load_file(path / "transformer" / "diffusion_pytorch_model.safetensors")
    assert torch.equal(stored[name], dict(halves)[f"transformer.{name}"])
    assert torch.equal(stored["pos_embed.pos_embed"], exported.parts.root.transformer.pos_embed.pos_embed)


def test_sleeping_parts_are_written_from_their_source(plain: Exported, tmp_path: Path) -> None:
    asleep = plain.family.load(deferred=["vae", "text_encoder_1", "text_encoder_2", "text_encoder_3"])
    moved(asleep)
    path = plain.family.export(weights_of(asleep), asleep, "diffusers_safetensors", tmp_path / "asleep")
    for file in plain.path.rglob("*.safetensors"):
        theirs, ours = load_file(file), load_file(path / file.relative_to(plain.path))
        assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs), file
    assert all(not asleep.is_loaded(part) for part in asleep.deferred)


def test_frozen_parts_that_lie_on_disk_are_not_written_again(plain: Exported, tmp_path: Path) -> None:
    family, parts = loaded(config(pretrained=str(plain.path), init_from_config=None))
    path = family.export(weights_of(parts), parts, "diffusers_safetensors", tmp_path / "again")
    for part in PARTS[1:]:
        (ours,) = (path / FOLDERS[part]).glob("*.safetensors")
        assert ours.samefile(plain.path / ours.relative_to(path))
    trained = "transformer/diffusion_pytorch_model.safetensors"
    assert not (path / trained).samefile(plain.path / trained)


def test_a_later_export_does_not_write_them_again_either(tmp_path: Path) -> None:
    """Nothing lies on disk as it must, but for what the run's earlier exports wrote, unless somebody changed that."""
    family, parts = loaded(config())
    paths = [
        family.export(weights_of(parts), parts, "diffusers_safetensors", tmp_path / name, dtype=torch.bfloat16)
        for name in ("one", "two")
    ]
    one, two = (path / "text_encoder_3" / "model.safetensors" for path in paths)
    assert one.samefile(two)
    two.unlink()
    one.write_bytes(b"no longer")
    third = family.export(weights_of(parts), parts, "diffusers_safetensors", tmp_path / "three", dtype=torch.bfloat16)
    assert dtypes_of(third / "text_encoder_3" / "model.safetensors") == {torch.bfloat16}
    full = family.export(weights_of(parts), parts, "diffusers_safetensors", tmp_path / "full")
    assert dtypes_of(full / "text_encoder_3" / "model.safetensors") == {torch.float32}


def test_shards_old_names_and_variants_are_read(plain: Exported, tmp_path: Path) -> None:
    """T5 in shards with an index, its table under its second name; a VAE as an fp16 variant; CLIP as torch's file."""
    folder = tmp_path / "model"
    shutil.copytree(plain.path, folder)
    third, vae, first = folder / "text_encoder_3", folder / "vae", folder / "text_encoder"
    tensors = load_file(third / "model.safetensors")
    tensors["encoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for name, keys in shards.items():
        save_file({key: tensors[key] for key in keys}, third / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, keys in shards.items() for key in keys}}
    (third / "model.safetensors.index.json").write_text(json.dumps(index))
    (third / "model.safetensors").unlink()
    (vae / "diffusion_pytorch_model.safetensors").rename(vae / "diffusion_pytorch_model.fp16.safetensors")
    torch.save(load_file(first / "model.safetensors"), first / "pytorch_model.bin")
    (first / "model.safetensors").unlink()
    family, parts = loaded(config(pretrained=str(folder), init_from_config=None))
    there, same = loaded(config(pretrained=str(plain.path), init_from_config=None))
    assert losses(family, parts) == losses(there, same)
    for part in PARTS:  # what a cache is found by does not hang on how files are cut
        assert family.source.fingerprint(part) == there.source.fingerprint(part), part
    table = parts.frozen["text_encoder_3"]
    assert table.shared.weight is table.encoder.embed_tokens.weight  # type: ignore[union-attr]
    path = family.export(weights_of(parts), parts, "diffusers_safetensors", tmp_path / "again")
    from diffusers import StableDiffusion3Pipeline

    StableDiffusion3Pipeline.from_pretrained(path)
    assert (path / "text_encoder_3" / "model-00002-of-00002.safetensors").is_file()
    assert (path / "vae" / "diffusion_pytorch_model.safetensors").is_file()


def test_shards_of_a_variant_and_an_index_that_names_nothing(plain: Exported, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(plain.path, folder)
    second = folder / "text_encoder_2"
    (second / "model.safetensors").rename(second / "model.fp16-00001-of-00001.safetensors")
    index = second / "model.safetensors.index.fp16.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.fp16-00001-of-00001.safetensors"}}))
    family, parts = loaded(config(pretrained=str(folder), init_from_config=None))
    assert losses(family, parts) == losses(plain.family, plain.parts)
    path = family.export(weights_of(parts), parts, "diffusers_safetensors", tmp_path / "again")
    assert (path / "text_encoder_2" / "model.safetensors").is_file()
    index.write_text("{}")
    with pytest.raises(ConfigFault, match=r"index\.fp16\.json .*no files"):
        make_family(config(pretrained=str(folder), init_from_config=None)).load()


def test_what_is_kept_in_8_bits_is_exported_as_it_was(plain: Exported, tmp_path: Path) -> None:
    family, parts = loaded(config(pretrained=str(plain.path), init_from_config=None, fp8_frozen="all"))
    moved(parts)
    linked = family.export(weights_of(parts), parts, "diffusers_safetensors", tmp_path / "as-it-lies")
    halved = family.export(weights_of(parts), parts, "diffusers_safetensors", tmp_path / "half", dtype=torch.bfloat16)
    for part in ("text_encoder", "text_encoder_3"):
        stored = load_file(plain.path / part / "model.safetensors")
        assert all(
            torch.equal(value, stored[name]) for name, value in load_file(linked / part / "model.safetensors").items()
        )
        half = load_file(halved / part / "model.safetensors")
        assert all(torch.equal(half[name], value.bfloat16()) for name, value in stored.items())


def test_fingerprints_hang_on_the_weights(plain: Exported, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(plain.path, folder)
    file = folder / "text_encoder_2" / "model.safetensors"
    tensors = load_file(file)
    tensors["text_projection.weight"][0, 0] += 1
    save_file(tensors, file, {"format": "pt"})
    one, other = (make_family(config(pretrained=str(each), init_from_config=None)) for each in (plain.path, folder))
    parted = [part for part in PARTS if one.source.fingerprint(part) != other.source.fingerprint(part)]  # type: ignore[attr-defined]
    assert parted == ["text_encoder_2"]


def test_fingerprints_stay_where_an_export_gives_files_a_second_name(plain: Exported, tmp_path: Path) -> None:
    family, parts = loaded(config(pretrained=str(plain.path), init_from_config=None))
    before = {name: each.fingerprint() for name, each in family.encoders(parts).items()}
    again, others = loaded(config(pretrained=str(plain.path), init_from_config=None))
    path = again.export(weights_of(others), others, "diffusers_safetensors", tmp_path / "linked")
    assert (path / "vae" / "config.json").is_file()
    for each, held in ((family, parts), (again, others)):
        assert {name: encoder.fingerprint() for name, encoder in each.encoders(held).items()} == before


def test_a_whole_last_block_begins_anew_where_none_is_stored(plain: Exported) -> None:
    """Its text branch is new; the velocity stays as it was."""
    family, parts = loaded(with_gamma(0.1, pretrained=str(plain.path), init_from_config=None))
    assert any("text branch" in note for note in parts.notes)
    batch = batch_of(family, parts, ["a red star"])
    inputs = family.inputs(batch, parts)
    with torch.no_grad():
        assert torch.equal(family.forward(parts.root, inputs)[0], plain.family.forward(plain.parts.root, inputs)[0])


def test_sd3_light_begins_at_its_own_depth(plain: Exported, tmp_path: Path) -> None:
    folder = tmp_path / "foreign"
    shutil.copytree(plain.path, folder)
    (folder / "difftrain.json").unlink()
    light = {"pretrained": str(folder), "init_from_config": None, "train_type": "sd3_light_pretrain"}
    family = SD3Family(config(**light))
    assert family.source.num_layers == 15 and "random" in " ".join(family.source.notes)
    stored, parts = loaded(config(**light, num_layers=3))
    assert losses(stored, parts) == losses(plain.family, plain.parts) and "as stored" in parts.notes[0]
    own, parts = loaded(config(**light, num_layers=5))
    assert len(parts.root.transformer.transformer_blocks) == 5
    assert own.source.fingerprint("vae") == stored.source.fingerprint("vae")


def test_parts_come_from_elsewhere(plain: Exported, tmp_path: Path) -> None:
    """A part's own folder, or a whole model's; of SD3-Light the transformer need be nowhere."""
    given = {"vae": "vae", "text_encoder1": "text_encoder", "text_encoder2": "", "text_encoder3": "text_encoder_3"}
    paths = {field: str(plain.path / folder) for field, folder in given.items()}
    family, parts = loaded(config(init_from_config="tiny", **paths))
    assert losses(family, parts) == losses(*loaded(config()))
    assert "the VAE is" in " ".join(family.source.notes)
    whole = config(pretrained=None, init_from_config=None, transformer=str(plain.path), **paths)
    assert losses(*loaded(whole)) == losses(plain.family, plain.parts)
    with pytest.raises(ConfigFault, match=r"joint_attention_dim.*4096"):
        make_family(config(pretrained=None, init_from_config=None, train_type="sd3_light_pretrain", **paths)).load()


def broken(folder: Path) -> None:
    """Break a folder in four places at once."""
    shutil.rmtree(folder / "text_encoder_3")
    (folder / "vae" / "config.json").write_text("{")
    config_of = folder / "transformer" / "config.json"
    content = json.loads(config_of.read_text()) | {"pooled_projection_dim": 7, "caption_projection_dim": 3}
    config_of.write_text(json.dumps(content))


def test_every_fault_of_a_folder_is_named(plain: Exported, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(plain.path, folder)
    broken(folder)
    with pytest.raises(ConfigFault) as found:
        make_family(config(pretrained=str(folder), init_from_config=None, transformer=str(tmp_path / "none"))).load()
    told = str(found.value)
    assert names(told, "text_encoder_3/config.json", "vae/config.json")
    assert re.search(rf"\[model\] transformer: .*{tmp_path / 'none'}", told)
    for part in ("vae", "text_encoder_3"):
        shutil.rmtree(folder / part, ignore_errors=True)
        shutil.copytree(plain.path / part, folder / part)
    with pytest.raises(ConfigFault) as found:
        make_family(config(pretrained=str(folder), init_from_config=None)).load()
    assert len(found.value.faults) == 2
    assert "pooled_projection_dim: is 7, must be 48" in str(found.value)
    assert "caption_projection_dim: is 3, must be 64" in str(found.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": 5}, r"num_layers: is 5, .* 3 "),
        ({"init_from_config": "tiny"}, "contradicts"),
        ({"vae": "/nowhere"}, r"--vae: .*'/nowhere'"),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, Any], says: str, plain: Exported) -> None:
    model = {"pretrained": str(plain.path), "init_from_config": None} | change
    with pytest.raises(ConfigFault, match=says):
        make_family(config(**model)).load()


def test_other_models_and_layouts_are_refused_by_name(plain: Exported, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionXLPipeline"}))
    with pytest.raises(ConfigFault, match="holds StableDiffusionXLPipeline, not SD3") as caught:
        make_family(config(pretrained=str(tmp_path), init_from_config=None)).load()
    assert len(caught.value.faults) == 1
    with pytest.raises(ConfigFault, match=r"ckpt is .*built for SD3"):
        plain.family.export(weights_of(plain.parts), plain.parts, "ckpt", tmp_path / "file")


def test_weights_that_do_not_belong_to_their_sizes_are_named(plain: Exported, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(plain.path, folder)
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    del tensors["proj_out.bias"]
    tensors["something"] = torch.zeros(2)
    tensors["norm_out.linear.bias"] = torch.zeros(3)
    save_file(tensors, file)
    with pytest.raises(
        ConfigFault, match=r"1 missing: proj_out\.bias.*1 unexpected: something.*norm_out\.linear\.bias"
    ):
        make_family(config(pretrained=str(folder), init_from_config=None)).load()
