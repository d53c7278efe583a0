"""Parts of a model from single files as ComfyUI keeps them: encoders by their own names, a VAE in its original layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from difftrain.config import ModelSection, TrainConfig, TrainingSection
from difftrain.contracts import ConfigFault
from difftrain.models.families.flux import Flux
from difftrain.models.weights.find import shipped_sizes
from difftrain.models.weights.keys import KeyMap, vae_rule


def config(**model: Any) -> TrainConfig:
    return TrainConfig(
        model=ModelSection(family="flux", t5_max_length=16, **model),  # type: ignore[arg-type]
        training=TrainingSection(seed=1),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose CLIP has heads of 64 channels and whose VAE has 32 groups, as released ones have."""
    home = tmp_path_factory.mktemp("flux")
    sizes = shipped_sizes(Flux(config(init_from_config="tiny")), "tiny")
    sizes["text_encoder"] |= {"hidden_size": 64, "num_attention_heads": 1, "projection_dim": 64}
    sizes["transformer"] |= {"pooled_projection_dim": 64}
    sizes["vae"] |= {"block_out_channels": [32, 32, 32, 32], "norm_num_groups": 32}
    (home / "sizes.json").write_text(json.dumps(sizes))
    family = Flux(config(init_from_config=str(home / "sizes.json")))
    parts = family.load()
    return family.export(iter(parts.root.state_dict().items()), parts, "diffusers", home / "model")


def loaded(folder: Path, **parts: Any) -> Any:
    return Flux(config(pretrained=str(folder), **parts)).load()


@pytest.mark.parametrize("field", ["text_encoder1", "text_encoder2"])
@pytest.mark.parametrize("prefix", ["", "text_encoders.none."])
def test_a_text_encoder_of_one_file_is_the_folder_s(folder: Path, field: str, prefix: str, tmp_path: Path) -> None:
    part = {"text_encoder1": "text_encoder", "text_encoder2": "text_encoder_2"}[field]
    tensors = load_file(folder / part / "model.safetensors")
    save_file({prefix + name: value for name, value in tensors.items()}, tmp_path / "one.safetensors")
    tokenizer = {f"tokenizer{field[-1]}": str(folder / part.replace("text_encoder", "tokenizer"))}
    if prefix:  # of no known layout: named, not guessed
        with pytest.raises(ConfigFault, match=r"\[model\] text_encoder"):
            loaded(folder, **{field: str(tmp_path / "one.safetensors")}, **tokenizer)
        return
    ours = loaded(folder, **{field: str(tmp_path / "one.safetensors")}, **tokenizer).frozen[part].state_dict()
    theirs = loaded(folder).frozen[part].state_dict()
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.parametrize("prefix", ["", "first_stage_model.", "vae."])
def test_a_vae_of_one_file_in_its_original_layout_is_the_folder_s(folder: Path, prefix: str, tmp_path: Path) -> None:
    parts = loaded(folder)
    vae = parts.frozen["vae"]
    ours = vae.state_dict()
    names = KeyMap({name: tuple(value.shape) for name, value in ours.items()}, vae_rule(vae))
    stored = {prefix + key: names.joined(key, ours).contiguous() for key in names.stored}
    save_file(stored, tmp_path / "ae.safetensors")
    again: Any = loaded(folder, vae=str(tmp_path / "ae.safetensors")).frozen["vae"]
    assert all(value.equal(ours[name]) for name, value in again.state_dict().items())
    # the file says its shapes, and the family how its released VAE is scaled
    assert (again.config.scaling_factor, again.config.shift_factor) == (0.3611, 0.1159)


def test_a_clip_whose_heads_no_file_tells_is_refused(folder: Path, tmp_path: Path) -> None:
    width = torch.zeros(8, 24)
    save_file({"text_model.embeddings.token_embedding.weight": width}, tmp_path / "clip.safetensors")
    with pytest.raises(ConfigFault, match=r"head .*CLIP"):
        loaded(folder, text_encoder1=str(tmp_path / "clip.safetensors"))
