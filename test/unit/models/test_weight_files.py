"""Weight files: written tensor by tensor, read by the libraries; whole or absent; nothing that runs code."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from difftrain.models.weights.files import DTYPES, UnreadableWeights, open_weights
from difftrain.models.weights.writers import Shapes, safetensors_writer, torch_writer

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


def mapped(path: Path) -> bool:
    """Tell whether this process has a file in its memory map."""
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.flags("disable_mmap_load_safetensors")
@pytest.mark.parametrize("suffix", KINDS)
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not show its memory maps")
def test_files_are_read_without_a_map_where_asked(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    write(path)
    plain = open_weights(path, mmap=False)
    values = {key: plain.get(key) for key in plain.shapes()}
    assert not mapped(path)
    assert values.keys() == VALUES.keys() and all(values[key].equal(value) for key, value in VALUES.items())
    assert all(values[key].dtype == value.dtype for key, value in VALUES.items())
    ours = open_weights(path)
    assert (plain.shapes(), plain.metadata) == (ours.shapes(), ours.metadata)
    assert mapped(path)


def test_every_dtype_of_the_library_is_read_without_a_map(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    values = {str(dtype): torch.arange(-3, 4).to(dtype).view(7, 1) for dtype in DTYPES.values()}
    values |= {"none": torch.ones(0, 3), "scalar": torch.tensor(1.5, dtype=torch.bfloat16)}
    save_file(values, tmp_path / "all.safetensors")
    file = open_weights(tmp_path / "all.safetensors", mmap=False)
    for key, value in values.items():
        assert file.get(key).dtype == value.dtype and file.get(key).shape == value.shape
        assert file.get(key).view(-1).view(torch.uint8).equal(value.view(-1).view(torch.uint8)), key


def test_torch_maps_the_ckpt_into_memory(tmp_path: Path) -> None:
    write(tmp_path / "weights.ckpt")
    assert torch.load(tmp_path / "weights.ckpt", weights_only=True, mmap=True)["stack"].equal(VALUES["stack"])


@pytest.mark.parametrize("suffix", KINDS)
def test_a_broken_write_leaves_the_older_file_and_no_rest(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    write(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"1 tensors .*: ids$"):
        write(path, leave_out="ids")
    with pytest.raises(ValueError, match=r"scalar has .*shape \(2,\), not \(\)"), KINDS[suffix][0](path) as writer:
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
        with pytest.raises(UnreadableWeights, match="weights_only"):
            open_weights(tmp_path / name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"junk", b"notapicture", b"\x80\x02h", b"(.", b"\x8a\xff\x00", b"<html>"])
def test_bytes_that_are_no_weights_are_named(tmp_path: Path, content: bytes) -> None:
    """Such as a page of an error that was saved as a model."""
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(UnreadableWeights, match=r"torch file: |weights_only"):
        open_weights(tmp_path / "x.ckpt")


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("suffix", KINDS)
@pytest.mark.parametrize("keep", [0, 7, 0.5, 0.98])
def test_a_cut_file_is_named(tmp_path: Path, suffix: str, keep: float, mmap: bool) -> None:
    path = tmp_path / f"weights{suffix}"
    write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if keep < 1 else int(keep)])
    with pytest.raises(
        UnreadableWeights, match="safetensors file: " if suffix == ".safetensors" else "torch file: |weights_only"
    ):
        open_weights(path, mmap=mmap)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}x",
        '{"a": 1}',
        '{"a":' + "[" * 100_000,
        '{"__metadata__": {"title": 3}}',
        *(
            f'{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 4]}}}}'
            for shape in ("[2]", "[-1, -1]", "[1.0]")
        ),
    ],
    ids=["list", "more", "number", "deep", "metadata", "long", "negative", "fraction"],
)
def test_a_header_that_does_not_fit_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(8))
    with pytest.raises(UnreadableWeights, match="safetensors file: "):
        open_weights(path, mmap=False)


def test_a_training_checkpoint_gives_its_state_dict(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(2), "epoch": 3}, "global_step": 7}, tmp_path / "last.ckpt")
    assert open_weights(tmp_path / "last.ckpt").shapes() == {"a": (2,)}
    torch.save({"a": torch.ones(2)}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert open_weights(tmp_path / "old.ckpt").get("a").equal(torch.ones(2))
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(UnreadableWeights, match="dictionary"):
        open_weights(tmp_path / "list.ckpt")


def test_our_header_is_the_librarys(tmp_path: Path) -> None:
    """Sizes of the two writers differ in nothing but padding."""
    write(tmp_path / "ours.safetensors")
    save_file(VALUES, tmp_path / "theirs.safetensors", {"title": "é"})
    ours, theirs = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("ours", "theirs"))
    header = int.from_bytes(ours[:8], "little")
    assert header % 8 == 0 and ours[8 + header :] == theirs[8 + int.from_bytes(theirs[:8], "little") :]


def kohyas_hashes(path: Path) -> tuple[str, str]:
    """Return what kohya's tools make of a file whose metadata are its ss_* keys alone: of all tensors, and of a piece."""
    stored = save(load_file(path), {key: text for key, text in metadata_of(path).items() if key.startswith("ss_")})
    behind = 8 + int.from_bytes(stored[:8], "little")
    whole = hashlib.sha256(stored[behind:]).hexdigest()
    return whole, hashlib.sha256(stored[0x100000:][:0x10000]).hexdigest()[:8]


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as opened:
        return dict(opened.metadata())


@pytest.mark.parametrize("training", [{}, {"ss_steps": "4", "ss_note": "é"}], ids=["converted", "trained"])
@pytest.mark.parametrize("rows", [3, 1500], ids=["small", "past-a-mib"])
def test_a_described_file_holds_the_hashes_of_its_tensors(tmp_path: Path, training: dict[str, str], rows: int) -> None:
    path, values = (
        tmp_path / "described.safetensors",
        {"b": torch.randn(rows, 200), "a": torch.randn(7), "c": torch.ones(())},
    )
    shapes: Shapes = {key: (value.dtype, tuple(value.shape)) for key, value in values.items()}
    header = {"modelspec.sai_model_spec": "1.0.1", "modelspec.title": "one", **training}
    with safetensors_writer(path, shapes, header) as writer:
        for key, value in values.items():  # in another order than they lie in
            writer.write(key, value)
    told = metadata_of(path)
    whole, piece = kohyas_hashes(path)
    assert (told["sshs_model_hash"], told["sshs_legacy_hash"]) == (whole, piece)
    content = path.read_bytes()
    own = hashlib.sha256(content[8 + int.from_bytes(content[:8], "little") :]).hexdigest()
    assert told["modelspec.hash_sha256"] == f"0x{own}" and own == whole
    assert {key: told[key] for key in header} == header and load_file(path)["a"].equal(values["a"])


def test_files_without_a_description_have_no_hash(tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    with safetensors_writer(path, {"a": (torch.float32, (2,))}, {"format": "pt"}) as writer:
        writer.write("a", torch.ones(2))
    assert metadata_of(path) == {"format": "pt"}
