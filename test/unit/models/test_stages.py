"""The blocks of a transformer as a chain: what rides along with routed, masked and aligned tokens, and reconstructed text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sd3_speedups import batch_of, config, vision_folder

from difftrain.config.schema.objective import LossSection, PatchMaskingSection, RepaSection, TreadSection
from difftrain.config.schema.sections import ModelSection
from difftrain.contracts import Bucket
from difftrain.models.families.sd3.family import SD3Family

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "routed": {"tread": TreadSection(share=0.5, start=2, end=3)},
    "masked": {"patch_masking": PatchMaskingSection(share=0.5, mixer_layers=1)},
    "text": {"loss": LossSection(text_recon_gamma=0.3, text_recon_target_layer=2)},
    "text from the start": {"loss": LossSection(text_recon_gamma=0.3, text_recon_target_layer=0)},
}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("aligns", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_chain_gives_the_bits_of_the_root(tmp_path: Path, way: str, aligns: bool, trains: bool) -> None:
    sections = dict(WAYS[way])
    if aligns:
        sections["repa"] = RepaSection(encoder=str(vision_folder(tmp_path / "vit", "dinov2")), layer=2, hidden=16)
    family = SD3Family(config(model=ModelSection(family="sd3", init_from_config="tiny", train_type="sd3_light_pretrain", num_layers=4), **sections))  # fmt: skip
    parts = family.load()
    batch = batch_of(family, parts, Bucket(64, 96), 2, 0 if trains else None, trains=trains)
    with torch.no_grad():
        inputs = family.inputs(batch, parts)
        whole = family.forward(parts.root, inputs)
        chain = family.chain(parts.root)
        carry, layout = chain.enter(inputs)
        for number in range(len(chain.units)):
            assert list(carry) and set(chain.names(layout, number)) == carry.keys(), number
            carry = chain.unit(number, carry, layout)
        outputs = chain.leave(carry, layout)
    assert len(outputs) == len(whole) and all(torch.equal(mine, other) for mine, other in zip(outputs, whole))
    assert (layout.keeps, layout.aligns) == (trains and way in ("routed", "masked"), aligns and trains)
    assert chain.kind(batch) == (layout.keeps, layout.aligns)  # every stage knows it without inputs


def test_each_weight_has_one_owner() -> None:
    family = SD3Family(config())
    root = family.load(meta=True).root
    chain = family.chain(root)
    owners = {name: chain.owner(name) for name in root.state_dict()}
    last = len(chain.units)
    assert owners["transformer.pos_embed.proj.weight"] == -1 and owners["transformer.proj_out.weight"] == last
    assert owners["transformer.norm_out.linear.weight"] == last
    assert set(owners.values()) == set(range(-1, last + 1))
