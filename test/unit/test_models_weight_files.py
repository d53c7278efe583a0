"""Weight files: written tensor by tensor, read by the libraries; whole or absent; nothing that runs code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from difftrain.models.parts.weight_files import UnreadableWeights, open_weights
from difftrain.models.parts.weight_writers import Shapes, safetensors_writer, torch_writer

STACK, IDS = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.arange(3)[None]
VALUES = {"stack": STACK.half(), "ids": IDS, "scalar": torch.tensor(2.5), "odd": torch.ones(3, 5).bfloat16()}
SHAPES: Shapes = {key: (value.dtype, tuple(value.shape)) for key, value in VALUES.items()}
KINDS = {
    ".safetensors": (lambda path: safetensors_writer(path, SHAPES, {"title": "é"}), load_file),
    ".ckpt": (lambda path: torch_writer(path, SHAPES), lambda path: torch.load(path, weights_only=True)),
}


def write(path: Path, leave_out: str = "") -> None:
    """Write in an order of its own: the stack in three pieces of another dtype, a transposed view."""
    with KINDS[path.suffix][0](path) as writer:
        writer.write("stack", STACK[4:], 2, 3)
        writer.write("odd", torch.ones(5, 3).T)
        writer.write("stack", STACK[:2], 0, 3)
        writer.write("scalar", torch.tensor(2.5))
        if leave_out != "ids":
            writer.write("ids", IDS)
        writer.write("stack", STACK[2:4], 1, 3)


@pytest.mark.parametrize("suffix", KINDS)
def test_libraries_read_what_is_written_in_pieces(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    write(path)
    loaded = KINDS[suffix][1](path)
    assert set(loaded) == set(VALUES)
    for key, value in VALUES.items():
        assert loaded[key].dtype == value.dtype and loaded[key].equal(value), key
    ours = open_weights(path)
    assert ours.shapes() == {key: tuple(value.shape) for key, value in VALUES.items()}
    assert all(ours.get(key).equal(value) for key, value in VALUES.items())
    assert ours.metadata == ({"title": "é"} if suffix == ".safetensors" else {})


def test_torch_maps_the_ckpt_into_memory(tmp_path: Path) -> None:
    write(tmp_path / "weights.ckpt")
    assert torch.load(tmp_path / "weights.ckpt", weights_only=True, mmap=True)["stack"].equal(VALUES["stack"])


@pytest.mark.parametrize("suffix", KINDS)
def test_a_broken_write_leaves_the_older_file_and_no_rest(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    write(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="1 tensors were not written whole: ids"):
        write(path, leave_out="ids")
    with pytest.raises(ValueError, match=r"scalar has the shape \(2,\), not \(\)"), KINDS[suffix][0](path) as writer:
        writer.write("scalar", torch.ones(2))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


class Runs:
    """A pickle that creates a file when it is read without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1), "x": Runs(tmp_path / "ran")}, tmp_path / "bad.ckpt")
    (tmp_path / "worse.ckpt").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    for name in ("bad.ckpt", "worse.ckpt"):
        with pytest.raises(UnreadableWeights, match="not a file of plain tensors"):
            open_weights(tmp_path / name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("suffix", KINDS)
@pytest.mark.parametrize("keep", [0, 7, 0.5, 0.98])
def test_a_cut_file_is_named(tmp_path: Path, suffix: str, keep: float) -> None:
    path = tmp_path / f"weights{suffix}"
    write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if keep < 1 else int(keep)])
    with pytest.raises(UnreadableWeights, match="is not a"):
        open_weights(path)


def test_a_training_checkpoint_gives_its_state_dict(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(2), "epoch": 3}, "global_step": 7}, tmp_path / "last.ckpt")
    assert open_weights(tmp_path / "last.ckpt").shapes() == {"a": (2,)}
    torch.save({"a": torch.ones(2)}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert open_weights(tmp_path / "old.ckpt").get("a").equal(torch.ones(2))
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(UnreadableWeights, match="holds no dictionary of tensors"):
        open_weights(tmp_path / "list.ckpt")


def test_our_header_is_the_librarys(tmp_path: Path) -> None:
    """Sizes of the two writers differ in nothing but padding."""
    write(tmp_path / "ours.safetensors")
    save_file(VALUES, tmp_path / "theirs.safetensors", {"title": "é"})
    ours, theirs = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("ours", "theirs"))
    header = int.from_bytes(ours[:8], "little")
    assert header % 8 == 0 and ours[8 + header :] == theirs[8 + int.from_bytes(theirs[:8], "little") :]
