"""SD3 in one file of the original layout: names, values and depth as its other readers have them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import names as names_facts
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sd3 import FOLDERS, PARTS, batch_of, config, loaded, of_sizes, sizes_of

from difftrain.contracts import ConfigFault, Parts
from difftrain.models.build import build
from difftrain.models.families.sd3.family import LIGHT, SD3Family
from difftrain.models.families.sd3.original_layout import CLIP_L_PROJECTION, infer, keys
from difftrain.models.weights.detect import family_of_file
from difftrain.models.weights.files import dtypes_of
from difftrain.models.weights.keys import KeyMap, table_rule

LOSS = {False: "loss", True: "denoise"}  # with a text term, whose branch begins anew
LINEAR = ("weight", "bias")
NET = "model.diffusion_model."


def names(*owners: str) -> set[str]:
    return {f"{owner}.{leaf}" for owner in owners for leaf in LINEAR}


def public_layout(blocks: int, clip_layers: tuple[int, int], t5_layers: int, vae_levels: int) -> set[str]:
    """List the keys of a whole model as its release has them, but for the VAE's inner blocks."""
    made = {"pos_embed"} | names(
        "x_embedder.proj", "context_embedder", "t_embedder.mlp.0", "t_embedder.mlp.2", "y_embedder.mlp.0",
        "y_embedder.mlp.2", "final_layer.linear", "final_layer.adaLN_modulation.1",
    )  # fmt: skip
    for block in range(blocks):
        x, context = f"joint_blocks.{block}.x_block", f"joint_blocks.{block}.context_block"
        made |= names(f"{x}.adaLN_modulation.1", f"{x}.attn.qkv", f"{x}.attn.proj", f"{x}.mlp.fc1", f"{x}.mlp.fc2")
        made |= names(f"{context}.adaLN_modulation.1", f"{context}.attn.qkv")
        if block < blocks - 1:  # the text ends with the last one
            made |= names(f"{context}.attn.proj", f"{context}.mlp.fc1", f"{context}.mlp.fc2")
    found = {NET + name for name in made}
    for name, layers in zip(("clip_l", "clip_g"), clip_layers, strict=True):
        prefix = f"text_encoders.{name}.transformer."
        found |= {
            f"{prefix}text_projection.weight",
            *(f"{prefix}{key}" for key in names("text_model.final_layer_norm")),
        }
        found |= {f"{prefix}text_model.embeddings.{table}_embedding.weight" for table in ("token", "position")}
        for layer in range(layers):
            inner = (
                "layer_norm1",
                "layer_norm2",
                "mlp.fc1",
                "mlp.fc2",
                *(f"self_attn.{p}_proj" for p in "qkv"),
                "self_attn.out_proj",
            )
            found |= names(*(f"{prefix}text_model.encoder.layers.{layer}.{each}" for each in inner))
    t5 = "text_encoders.t5xxl.transformer."
    found |= {f"{t5}{key}.weight" for key in ("shared", "encoder.embed_tokens", "encoder.final_layer_norm")}
    for layer in range(t5_layers):
        block = f"{t5}encoder.block.{layer}.layer"
        found |= {f"{block}.{part}.layer_norm.weight" for part in (0, 1)}
        found |= {f"{block}.0.SelfAttention.{each}.weight" for each in "qkvo"}
        found |= {f"{block}.1.DenseReluDense.{each}.weight" for each in ("wi_0", "wi_1", "wo")}
    found.add(f"{t5}encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
    for coder in ("encoder", "decoder"):
        found |= names(*(f"first_stage_model.{coder}.{each}" for each in ("conv_in", "conv_out", "norm_out")))
        found |= names(
            *(f"first_stage_model.{coder}.mid.attn_1.{each}" for each in ("norm", "q", "k", "v", "proj_out"))
        )
        sides = {"encoder": "down", "decoder": "up"}
        levels = (f"{coder}.{sides[coder]}.{level}.block.0.conv1" for level in range(vae_levels))
        found |= names(*(f"first_stage_model.{level}" for level in levels))
    return found


@dataclass(frozen=True)
class Exported:
    """A model whose every weight has moved, as one file and as a folder."""

    family: SD3Family
    parts: Parts
    file: Path
    folder: Path


def weights_of(parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, param.detach()) for name, param in parts.root.named_parameters())


@pytest.fixture(scope="module", params=[0.0, 0.25], ids=["plain", "text"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    here = tmp_path_factory.mktemp("sd3")
    # heads of 64, as every release has them, so that all sizes of the transformer stand in its keys
    sizes = sizes_of("tiny")
    sizes["transformer"] |= {"num_layers": 4, "attention_head_dim": 64, "num_attention_heads": 1}
    family = of_sizes(sizes, here)
    cfg = family.cfg.model_copy(update={"loss": family.cfg.loss.model_copy(update={"text_recon_gamma": request.param})})
    family = SD3Family(cfg)
    parts = family.load()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in parts.root.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=generator))
        projection: Any = parts.frozen["text_encoder_1"]
        projection.text_projection.weight.copy_(torch.eye(len(projection.text_projection.weight)))
    header = family.metadata("m", 0.0)
    file = family.export(weights_of(parts), parts, "safetensors", here / "model-v1.0", metadata=header)
    folder = family.export(weights_of(parts), parts, "diffusers_safetensors", here / "folder", metadata=header)
    assert file == here / "model-v1.0.safetensors"
    return Exported(family, parts, file, folder)


def without_header(exported: Exported, path: Path, *, without: tuple[str, ...] = (), **more: torch.Tensor) -> Path:
    """Save it as other tools do, which keep no metadata of ours; leave out what begins with any of `without`."""
    tensors = {key: value for key, value in load_file(exported.file).items() if not key.startswith(without or "?")}
    save_file(tensors | more, path)
    return path


def tensors_of(module: Any) -> dict[str, torch.Tensor]:
    return dict(module.state_dict())


@torch.no_grad()
def losses(family: Any, parts: Parts) -> dict[str, float]:
    batch = batch_of(family, parts, ["a red star", "a blue cat", ""], trains=False)
    inputs = family.inputs(batch, parts)
    return {name: float(value) for name, value in family.loss_sums(family.forward(parts.root, inputs), inputs).items()}


def test_every_key_is_one_of_the_public_layout(exported: Exported) -> None:
    with safe_open(exported.file, "pt") as opened:
        found, header = set(opened.keys()), opened.metadata()
    sizes = sizes_of("tiny")
    layers = (sizes["text_encoder"]["num_hidden_layers"], sizes["text_encoder_2"]["num_hidden_layers"])
    public = public_layout(4, layers, sizes["text_encoder_3"]["num_layers"], len(sizes["vae"]["block_out_channels"]))
    vae = {key for key in found if key.startswith("first_stage_model.")}
    assert public <= found and found - vae <= public
    assert header["modelspec.architecture"] == "stable-diffusion-v3" and header["format"] == "pt"


def test_queries_keys_and_values_lie_in_one_and_norms_without_text_are_swapped(exported: Exported) -> None:
    ours, stored = tensors_of(exported.family.exported("transformer")), load_file(exported.file)
    folder = load_file(exported.folder / "transformer" / "diffusion_pytorch_model.safetensors")
    assert ours.keys() == folder.keys()
    for side, names_of in (("x", ("to_q", "to_k", "to_v")), ("context", ("add_q_proj", "add_k_proj", "add_v_proj"))):
        for leaf in LINEAR:
            joined = torch.cat([folder[f"transformer_blocks.1.attn.{name}.{leaf}"] for name in names_of])
            assert torch.equal(stored[f"{NET}joint_blocks.1.{side}_block.attn.qkv.{leaf}"], joined)
    for key, name in (
        ("joint_blocks.3.context_block", "transformer_blocks.3.norm1_context"), ("final_layer", "norm_out"),
    ):  # fmt: skip
        scale, shift = folder[f"{name}.linear.weight"].chunk(2)
        assert torch.equal(stored[f"{NET}{key}.adaLN_modulation.1.weight"], torch.cat((shift, scale)))
    whole = "joint_blocks.0.context_block.adaLN_modulation.1.weight"
    assert torch.equal(stored[NET + whole], folder["transformer_blocks.0.norm1_context.linear.weight"])


def test_diffusers_loads_the_pipeline_from_it(exported: Exported) -> None:
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    pipe: Any = StableDiffusion3Pipeline.from_single_file(
        str(exported.file), config=str(exported.folder), local_files_only=True
    )
    folder: Any = StableDiffusion3Pipeline.from_pretrained(exported.folder)
    for part in PARTS:
        theirs, ours = tensors_of(getattr(pipe, FOLDERS[part])), tensors_of(getattr(folder, FOLDERS[part]))
        assert theirs.keys() == ours.keys(), part
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == [], part
    alone = SD3Transformer2DModel.from_single_file(
        str(exported.file), config=str(exported.folder), subfolder="transformer", local_files_only=True
    )
    own = tensors_of(folder.transformer)
    assert all(torch.equal(value, own[name]) for name, value in tensors_of(alone).items())


def test_training_begins_from_it(exported: Exported) -> None:
    gamma = exported.family.cfg.loss.text_recon_gamma
    again, parts = loaded(config({"loss": {"text_recon_gamma": gamma}}, pretrained=str(exported.file)))
    made, wanted = losses(again, parts), losses(exported.family, exported.parts)
    assert made.keys() == wanted.keys() and made[LOSS[gamma > 0]] == wanted[LOSS[gamma > 0]]
    assert again.source.scheduler["shift"] == exported.family.scheduler().config["shift"]


def test_the_depth_of_light_is_seen_in_the_keys(exported: Exported, tmp_path: Path) -> None:
    bare = without_header(exported, tmp_path / "bare.safetensors")
    folder = str(exported.folder)
    family = SD3Family(config(pretrained=folder, transformer=str(bare)))
    told, wanted = family.source.sizes["transformer"], exported.family.sizes
    assert {name: told[name] for name in told if name != "sample_size"} == {
        name: wanted[name] for name in told if name != "sample_size"
    }
    assert told["num_layers"] == 4
    family.load()
    # a run of light goes on from a file that says that it is light, and keeps its depth
    light = SD3Family(exported.family.cfg.model_copy(deep=True))
    light.cfg.model.__dict__["train_type"] = LIGHT
    file = light.export(weights_of(exported.parts), exported.parts, "safetensors", tmp_path / "light", metadata={})
    assert SD3Family(config(pretrained=str(file), train_type=LIGHT)).source.readers.keys() >= {"transformer"}
    assert SD3Family(config(pretrained=str(file), train_type=LIGHT)).source.num_layers == 4


@pytest.mark.parametrize("size", ["light", "medium", "later"])
def test_sizes_of_releases_are_told_by_names_and_shapes(size: str) -> None:
    sizes = sizes_of("medium" if size == "later" else size)["transformer"]
    sizes |= {"pos_embed_max_size": 8, "sample_size": 16}  # a table of positions of a release takes seconds
    if size == "later":  # 3.5 medium
        sizes |= {"dual_attention_layers": list(range(13)), "qk_norm": "rms_norm"}
    module = build("diffusers:SD3Transformer2DModel", "transformer", sizes)
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    stored = KeyMap(shapes, table_rule(keys(sizes["num_layers"]), shapes)).stored
    assert infer(stored) == sizes


def test_a_release_lacks_a_matrix_and_may_lack_encoders(exported: Exported, tmp_path: Path) -> None:
    folder = exported.folder
    # as ComfyUI saves one: no projection of CLIP-L, and numbers of its own beside the encoders
    extra = {"text_encoders.clip_l.logit_scale": torch.ones(()), "text_encoders.clip_g.logit_scale": torch.ones(())}
    file = tmp_path / "comfy.safetensors"
    tensors = {key: value for key, value in load_file(exported.file).items() if key != CLIP_L_PROJECTION}
    with safe_open(exported.file, "pt") as opened:
        header = {"difftrain.architecture": opened.metadata()["difftrain.architecture"]}
    save_file(tensors | extra, file, header)
    family, parts = loaded(config(pretrained=str(file)))
    projection: Any = parts.frozen["text_encoder_1"]
    assert torch.equal(projection.text_projection.weight, torch.eye(24))
    assert family.source.scheduler["shift"] == 3.0  # what every reader takes where nothing is said
    assert family_of_file(file, "--weights").is_whole

    # without encoders: those of another folder, or a fault that names them
    bare = without_header(exported, tmp_path / "bare.safetensors", without=("text_encoders.",))
    save_file(load_file(bare), bare, header)
    for each in (bare, without_header(exported, tmp_path / "plain.safetensors", without=("text_encoders.",))):
        assert family_of_file(each, "--weights").name == "sd3" and not family_of_file(each, "--weights").is_whole
    with pytest.raises(ConfigFault) as refused:
        SD3Family(config(pretrained=str(bare))).load()
    assert names_facts(refused.value.faults[0], "text_encoder_1", "text_encoder_3")
    encoders = {f"text_encoder{number}": str(folder) for number in (1, 2, 3)}
    SD3Family(config(pretrained=str(bare), **encoders)).load()


def test_half_precision_is_of_every_tensor(exported: Exported, tmp_path: Path) -> None:
    weights = weights_of(exported.parts)
    file = exported.family.export(weights, exported.parts, "safetensors", tmp_path / "half", dtype=torch.bfloat16)
    assert dtypes_of(file) == {torch.bfloat16}


def test_readers_that_draw_otherwise_are_warned_of(exported: Exported, tmp_path: Path, caplog: Any) -> None:
    family = SD3Family(exported.family.cfg)  # its shift is 1, and its readers take 3
    for name in ("one", "two"):
        family.export(weights_of(exported.parts), exported.parts, "safetensors", tmp_path / name)
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1
    with safe_open(tmp_path / "one.safetensors", "pt") as opened:
        assert json.loads(opened.metadata()["difftrain.json"])["scheduler"]["shift"] == 1.0
