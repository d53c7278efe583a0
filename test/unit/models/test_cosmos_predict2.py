"""Cosmos-Predict2: files as they were released, and what is another model of the same network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import config, exported, loaded, made
from refusals import names
from safetensors.torch import load_file

from difftrain.contracts import ConfigFault
from difftrain.models.weights.find import shipped_sizes


def test_a_released_file_has_counters_and_buffers_beside_the_weights(tmp_path: Path) -> None:
    tiny = loaded(config("cosmos_predict2"))
    folder = exported(tiny, tmp_path / "folder")
    stored = load_file(exported(tiny, tmp_path / "one", "safetensors"))
    more = {
        "accum_iteration": torch.zeros(1),
        "pos_embedder.seq": torch.arange(128),
        "pos_embedder.dim_spatial_range": torch.zeros(4),
        "blocks.0.self_attn.q_norm._extra_state": torch.zeros(0, dtype=torch.uint8),
    }
    torch.save({f"net.{key}": value for key, value in (stored | more).items()}, tmp_path / "model.pt")
    again = loaded(config("cosmos_predict2", pretrained=str(folder), transformer=str(tmp_path / "model.pt")))
    weights, others = tiny.net.state_dict(), again.net.state_dict()
    assert weights.keys() == others.keys() and all(torch.equal(weights[key], others[key]) for key in weights)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("extra_pos_embed_type", "learnable"), ("in_channels", 17), ("use_crossattn_projection", True)],
)
def test_other_models_of_the_network_are_errors(argument: str, value: Any, tmp_path: Path) -> None:
    """Cosmos 1, the one that goes on from pictures, and 2.5."""
    sizes = shipped_sizes(made(config("cosmos_predict2")), "tiny")
    sizes["transformer"][argument] = value
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    with pytest.raises(ConfigFault) as refusal:
        made(config("cosmos_predict2", init_from_config=str(tmp_path / "sizes.json"))).load()
    assert names(refusal.value, argument, value)


@pytest.mark.parametrize(("argument", "value"), [("extra_pos_embed_type", None), ("in_channels", 17)])
def test_what_is_not_cosmos_1_is_an_error_there(argument: str, value: Any, tmp_path: Path) -> None:
    sizes = shipped_sizes(made(config("cosmos")), "tiny")
    sizes["transformer"][argument] = value
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    with pytest.raises(ConfigFault) as refusal:
        made(config("cosmos", init_from_config=str(tmp_path / "sizes.json"))).load()
    assert names(refusal.value, argument, value)


def test_clips_end_where_the_vaes_statistics_do() -> None:
    family = made(config("cosmos"))
    assert family.vae.longest == 121 and made(config("wan")).vae.longest is None
    assert not [fault for fault in family.faults(family.source.build("transformer")) if "frame" in str(fault)]
    longer = made(config("cosmos", {"data": {"frame_buckets": (1, 129)}}))
    with pytest.raises(ConfigFault) as refusal:
        longer.load(meta=True)
    assert names(refusal.value, "frame_buckets", 121)


def test_a_network_without_the_channel_of_padding_trains(tmp_path: Path) -> None:
    sizes = shipped_sizes(made(config("cosmos_predict2")), "tiny")
    sizes["transformer"]["concat_padding_mask"] = False
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    tiny = loaded(config("cosmos_predict2", init_from_config=str(tmp_path / "sizes.json")))
    assert torch.isfinite(tiny.loss()) and tiny.net.patch_embed.proj.in_features == 64
