"""What is found wrong before a device is touched."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from difftrain.config.schema.sections import TrainConfig
from difftrain.config.spellings.spelling import Door, option, speaking
from difftrain.contracts import ConfigFault
from difftrain.models.registry import make_family
from difftrain.train.check import check


def test_weights_that_are_cut_off_are_named_once(tmp_path: Path) -> None:
    """Weights and tokenizers both look into the file."""
    (tmp_path / "x.safetensors").write_bytes(b"")
    cfg = TrainConfig.model_validate({"model": {"pretrained": str(tmp_path / "x.safetensors")}})
    with pytest.raises(ConfigFault) as caught:
        check(cfg, make_family(cfg))
    assert [fault.where for fault in caught.value.faults] == [
        "--pretrained_model_name_or_path"
    ] and "x.safetensors" in str(caught.value)


def test_tokenizers_that_are_still_to_be_fetched_stop_nothing_that_caches_texts(tmp_path: Path) -> None:
    """What a cache saves is known by tokens, which the weights' own tokenizer would make."""
    data = {"model": {"family": "sdxl", "init_from_config": "base"}, "cache": {"text": True, "text_to_disk": True}}
    cfg = TrainConfig.model_validate(data)
    absent = make_family(cfg).missing_tokenizers()
    assert set(absent) == {"model.tokenizer1", "model.tokenizer2"}
    assert check(cfg, make_family(cfg), absent, full=False).root is not None
    for door in get_args(Door):
        with speaking(door):
            with pytest.raises(ConfigFault) as caught:  # none will come
                check(cfg, make_family(cfg), full=False)
            assert [fault.where for fault in caught.value.faults] == [option(field) for field in absent]
