"""What waits in host memory: its keys and flags, and what it cannot go with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from refusals import is_about

from difftrain.config.parse_flags import parse
from difftrain.config.rules.engine import offloading, swapping
from difftrain.config.rules.finding import check
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.spellings.keys import OPTIONS, SHORT, key_at
from difftrain.contracts import ConfigFault

LINE = ["--init_from_config=tiny", f"--train_data_dir={Path(__file__).parent}", "--output_dir=/out", "--resolution=64,64"]  # fmt: skip
LORA = {"adapter": {"type": "lora"}, "memory": {"swap_blocks": 2}}


def found(sections: dict[str, Any]) -> list[Any]:
    cfg = TrainConfig.model_validate({"model": {"family": "flux"}} | sections)
    return check(cfg, (swapping,), {"memory.swap_blocks"}, set(), {})[0]


@pytest.mark.flags("blocks_to_swap")
def test_the_flag_and_both_keys_are_one_field() -> None:
    assert parse([*LINE, "--network_module=networks.lora", "--blocks_to_swap=3"]).config.memory.swap_blocks == 3
    for table, name in (("memory", "swap_blocks"), ("", "blocks_to_swap"), ("training", "blocks_to_swap")):
        key = key_at(table, name)
        assert key is not None and key.to == "memory.swap_blocks" and key.status == "offered"


@pytest.mark.flags("memory_gib")
def test_the_memory_of_a_device_is_a_flag_at_both_doors() -> None:
    assert parse([*LINE, "--memory_gib=23.5"]).config.memory.memory_gib == 23.5
    assert SHORT["memory_gib"] == "memory.memory_gib" and "memory_gib" in OPTIONS
    with pytest.raises(ConfigFault) as caught:
        parse([*LINE, "--memory_gib=0"])
    assert any(is_about(fault, "--memory_gib", 0) for fault in caught.value.faults)


def test_blocks_to_compute_again_need_recomputing() -> None:
    cfg = TrainConfig.model_validate({"model": {"family": "flux"}, "training": {"checkpoint_blocks": 2}})
    (fault,), _ = check(cfg, (offloading,), {"training.checkpoint_blocks"}, set(), {})
    assert is_about(fault, "[training] checkpoint_blocks", "--gradient_checkpointing")


def test_what_never_changes_can_wait_on_one_device_and_on_several_with_a_copy_each() -> None:
    assert found(LORA) == found({"memory": LORA["memory"], "model": {"family": "flux", "train_only": ["attn"]}}) == []


def test_what_is_trained_can_wait_once_it_has_been_updated() -> None:
    (fault,) = found({"memory": LORA["memory"]})
    assert is_about(fault, "--blocks_to_swap", 2, "--fused_backward_pass")
    fused = {"memory": LORA["memory"], "optimizer": {"fused_backward": True}}
    assert found(fused) == []
    half = {"full_precision": "bf16", "mixed_precision": "bf16"}
    (fault,) = found(fused | {"training": half})
    assert is_about(fault, "--blocks_to_swap", "--full_bf16", "--mixed_precision=bf16")


@pytest.mark.parametrize(
    ("sections", "facts"),
    [
        ({"training": {"engine": "fsdp"}}, ("--engine=fsdp", "--engine=native")),
        ({"training": {"engine": "accelerate"}}, ("--engine=accelerate", "--engine=native")),
        ({"training": {"pipeline_stages": 2}}, ("--pipeline_stages=2", "--pipeline_stages=1")),
        ({"training": {"compile": True}}, ("--torch_compile",)),
        ({"model": {"family": "sdxl", "fp8_frozen": "all"}}, ("--fp8_base", "base_dtype")),
    ],
)
def test_what_moves_weights_itself_is_named(sections: dict[str, Any], facts: tuple[str, ...]) -> None:
    (fault,) = found(LORA | sections)
    assert is_about(fault, "--blocks_to_swap", *facts)
