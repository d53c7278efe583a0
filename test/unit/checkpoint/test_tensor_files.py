"""Checkpoint files that hold pieces of tensors: joined from any layout, read by ranges, refused where they make no whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from difftrain.checkpoint.tensor_files import PIECES, CheckpointReader, FlatRange
from difftrain.contracts import ConfigFault
from difftrain.distributed.ranks import Ranks
from difftrain.engine.snapshot import WEIGHTS


def test_a_reader_joins_pieces_of_any_layout_and_reads_ranges_alone(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(6, 4)
    about = {PIECES: json.dumps({"w": [[6, 4], 0]})}
    save_file({"w": whole.reshape(-1)[:7].clone(), "b": torch.ones(3)}, tmp_path / "weights-00000.safetensors", about)
    save_file(
        {"w": whole.reshape(-1)[7:].clone()},
        tmp_path / "weights-00001.safetensors",
        {PIECES: json.dumps({"w": [[6, 4], 7]})},
    )
    reader = CheckpointReader(tmp_path, WEIGHTS, Ranks())
    assert reader.shapes == {"b": (3,), "w": (6, 4)}
    assert torch.equal(dict(reader.tensors(lambda name: True))["w"], whole)
    for begin, end in ((0, 2), (1, 3), (4, 6), (6, 6)):
        wanted = FlatRange(4 * begin, (end - begin, 4))
        (got,) = dict(reader.ranges(lambda name, shape, it=wanted: it if name == "w" else None)).values()
        assert torch.equal(got, whole[begin:end])


@pytest.mark.parametrize("fault", ["missing", "twice", "shape"])
def test_pieces_that_do_not_make_a_whole_are_refused(tmp_path: Path, fault: str) -> None:
    about = {"missing": [[4], 2], "twice": [[4], 0], "shape": [[5], 1]}[fault]
    save_file({"w": torch.ones(1)}, tmp_path / "weights-00000.safetensors", {PIECES: json.dumps({"w": [[4], 0]})})
    save_file({"w": torch.ones(2)}, tmp_path / "weights-00001.safetensors", {PIECES: json.dumps({"w": about})})
    with pytest.raises(ConfigFault) as caught:
        CheckpointReader(tmp_path, WEIGHTS, Ranks())
    assert "w" in str(caught.value) and str(tmp_path) in str(caught.value)
