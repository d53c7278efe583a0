"""Rates for each block of the UNet: which tensors a block has, what a rate of 0 freezes, and what rates do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from sdxl import batch_of, config, loaded, source

from difftrain.contracts import ConfigFault, Parts
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.models.families.sdxl import SDXLFamily
from difftrain.models.unet import block_of, num_blocks
from difftrain.optim import make_optimizer, make_schedule

TINY = 17  # 3 levels of one layer: 6 input, 3 middle and 6 output blocks


def test_base_has_kohyas_23_blocks() -> None:
    unet = source("base").build("unet")
    blocks = block_of(unet)
    assert num_blocks(unet) == 23 and set(blocks.values()) == set(range(23))
    assert set(blocks) == {name for name, _ in unet.named_parameters()}
    found = {
        0: ("time_embedding.linear_1.weight", "add_embedding.linear_2.bias"),
        1: ("conv_in.weight",),
        2: ("down_blocks.0.resnets.0.norm1.weight",),
        3: ("down_blocks.0.resnets.1.conv2.weight",),
        4: ("down_blocks.0.downsamplers.0.conv.weight",),
        5: ("down_blocks.1.resnets.0.conv1.weight", "down_blocks.1.attentions.0.proj_in.weight"),
        9: ("down_blocks.2.resnets.1.conv1.weight", "down_blocks.2.attentions.1.transformer_blocks.9.ff.net.2.bias"),
        10: ("mid_block.resnets.0.conv1.weight",),
        11: ("mid_block.attentions.0.norm.weight",),
        12: ("mid_block.resnets.1.conv1.weight",),
        13: ("up_blocks.0.resnets.0.conv1.weight",),
        15: ("up_blocks.0.resnets.2.conv1.weight", "up_blocks.0.upsamplers.0.conv.weight"),
        21: ("up_blocks.2.resnets.2.conv_shortcut.weight",),
        22: ("conv_norm_out.weight", "conv_out.bias"),
    }
    for block, tensors in found.items():
        assert {blocks[name] for name in tensors} == {block}
    assert not {name.split(".")[0] for name, block in blocks.items() if block == 12} - {"mid_block"}


def family_of(*rates: float, te: bool = False, **optimizer: Any) -> tuple[SDXLFamily, Parts]:
    section = {"learning_rate": 1e-3, "type": "torch.optim.SGD", "block_lr": rates, **optimizer}
    return loaded(config({"optimizer": section}, train_text_encoder=te))


@pytest.mark.flags("block_lr", "text_encoder_lr")
def test_groups_are_blocks_with_their_rates_and_the_encoders_keep_theirs() -> None:
    rates = [0.0, *(i / 100 for i in range(1, TINY))]
    family, parts = family_of(*rates, te=True, text_encoder_lr=(5.0, 0.0))
    groups = family.param_groups(parts.root)
    assert [(group.name, group.lr) for group in groups] == [
        *((f"block{i}", i / 100) for i in range(1, TINY)),
        ("text_encoder_1", 5.0),
    ]
    held = [name for group in groups for name, _ in group.named_params]
    trained = {name for name, parameter in parts.root.named_parameters() if parameter.requires_grad}
    assert len(held) == len(set(held)) and set(held) == trained
    assert not any("embedding.linear" in name for name in trained)
    assert "UNet blocks 0 are frozen: --block_lr is 0 there" in parts.notes


@pytest.mark.flags("block_lr", "learning_rate")
def test_an_update_follows_the_rate_of_its_block_and_frozen_ones_stay() -> None:
    rates = [0.0 if i % 5 == 0 else 0.01 * i for i in range(TINY)]
    moved = []
    for given in (tuple(rates), ()):
        family, parts = family_of(*given, learning_rate=0.02)
        engine = make_engine(family.cfg, choose("cpu"), Ranks())
        before = {name: each.detach().clone() for name, each in parts.root.named_parameters()}
        engine.build(
            family,
            parts,
            lambda groups, cfg=family.cfg: make_optimizer(cfg.optimizer, groups),
            lambda optimizer, cfg=family.cfg: make_schedule(cfg.optimizer, optimizer, 4),
            [],
        )
        stats = engine.step([batch_of(family, parts, ["a red star"])], {"samples": 1.0})
        if given:
            assert stats.lrs == {f"block{i}": rate for i, rate in enumerate(rates) if rate}
            frozen = [each for each in parts.root.parameters() if not each.requires_grad]
            assert frozen and all(each.grad is None for each in frozen)
        norm = float(stats.grad_norm.clamp(min=1.0))  # the norm of what is trained clips: another one of the whole
        moved.append({name: (each.detach() - before[name]) * norm for name, each in parts.root.named_parameters()})
    blocks = block_of(parts.root.unet)
    for name, block in blocks.items():
        expected = moved[1][f"unet.{name}"] * (rates[block] / 0.02)
        torch.testing.assert_close(moved[0][f"unet.{name}"], expected, rtol=1e-2, atol=1e-5)
        assert (rates[block] > 0) == bool(moved[0][f"unet.{name}"].any()) or not expected.any()


@pytest.mark.parametrize("number", [TINY - 1, 23])
def test_another_size_wants_another_number(number: int) -> None:
    with pytest.raises(ConfigFault) as caught:
        family_of(*[1.0] * number)
    assert re.search(rf"--block_lr: has {number} values, .* 17 blocks \(1 .*, 6 input", str(caught.value))


def test_all_blocks_frozen_is_a_frozen_unet() -> None:
    family, parts = family_of(*[0.0] * TINY, te=True)
    assert [group.name for group in family.param_groups(parts.root)] == ["text_encoder_1", "text_encoder_2"]
    assert not any(each.requires_grad for each in parts.root.unet.parameters())
    with pytest.raises(ConfigFault, match="--learning_rate: is 0 "):
        family_of(*[0.0] * TINY)


@pytest.mark.flags("unet_lr")
def test_the_unet_has_a_rate_of_its_own() -> None:
    family, parts = family_of(te=True, unet_lr=7.0)
    assert {group.name: group.lr for group in family.param_groups(parts.root)} == {
        "unet": 7.0,
        "text_encoder_1": 1e-3,
        "text_encoder_2": 1e-3,
    }
