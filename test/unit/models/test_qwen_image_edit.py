"""Qwen-Image-Edit beside what every family is held to: releases whose references are modulated as at time 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import config, diffusers_forward, loaded, own_pass

from difftrain.models.registry import make_family
from difftrain.models.weights.find import shipped_sizes


@pytest.mark.parametrize("name", ["qwen_image_edit", "qwen_image_edit_plus"])
def test_references_at_time_0_are_those_of_diffusers(name: str, tmp_path: Path) -> None:
    sizes = shipped_sizes(make_family(config(name)), "tiny")  # type: ignore[arg-type]
    sizes["transformer"] |= {"zero_cond_t": True}
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    tiny = loaded(config(name, init_from_config=str(tmp_path / "sizes.json")))
    inputs = tiny.inputs()
    with torch.no_grad():
        ours, theirs = own_pass(tiny, inputs), diffusers_forward(tiny, inputs)
        assert torch.equal(ours, theirs)
        tiny.net.zero_cond_t = False
        for block in tiny.net.transformer_blocks:
            block.zero_cond_t = False
        assert not torch.equal(own_pass(tiny, inputs), ours)
    tiny.loss(inputs)
