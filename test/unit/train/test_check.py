"""What is found wrong before a device is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from difftrain.config.schema.sections import TrainConfig
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
