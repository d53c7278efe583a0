"""What sizes, pickles and values of strangers may be, before anything is built of them."""

from __future__ import annotations

import io
import json
import math
import zipfile
from pathlib import Path

import pytest
import torch

from difftrain.models import build as known
from difftrain.models.registry import FAMILIES
from difftrain.models.text.clip_vocabulary import ClipVocabulary
from difftrain.models.weights.bounds import count_fault, size_faults
from difftrain.models.weights.detect import class_of
from difftrain.models.weights.files import UnreadableWeights, open_weights
from difftrain.models.weights.source import is_finite

SHIPPED = sorted((Path(known.__file__).parent / "sizes_shipped").glob("*.json"))
HALVES = (torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_size_that_is_shipped_is_within_them(file: Path) -> None:
    name, content = file.name.partition(".")[0], json.loads(file.read_text())
    for part, kind in FAMILIES[name].parts.items():
        section = content.get(class_of(name).folders.get(part, part), {})
        assert not size_faults(section, known.complete(kind, {}), part)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "512"), ("hidden_size", True), ("hidden_size", {}), ("hidden_size", 10**9), ("hidden_size", math.nan),
        ("num_hidden_layers", 10**8), ("num_hidden_layers", 1025), ("num_hidden_layers", -1), ("hidden_act", 5),
        ("layer_norm_eps", 0.0), ("layer_norm_eps", math.inf), ("vocab_size", 2.5), ("vocab_size", 10**12),
    ],
)  # fmt: skip
def test_a_size_outside_is_named(key: str, value: object) -> None:
    (fault,) = size_faults({"projection_dim": 4, key: value}, known.CLIP.defaults, "config")
    assert fault.where == f"config {key}"


def test_no_more_weights_than_bytes() -> None:
    assert not count_fault("vae", 10, 10, "x") and len(count_fault("vae", 11, 10, "x")) == 1


def test_a_record_shorter_than_its_tensor_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100), "b": torch.ones(100)}, tmp_path / "whole.ckpt")
    out = io.BytesIO()
    with zipfile.ZipFile(tmp_path / "whole.ckpt") as whole, zipfile.ZipFile(out, "w") as cut:
        for info in whole.infolist():
            data = whole.read(info)
            cut.writestr(info.filename, data[:200] if info.filename.endswith("/data/1") else data)
    (tmp_path / "cut.ckpt").write_bytes(out.getvalue())
    assert set(open_weights(tmp_path / "whole.ckpt").shapes()) == {"a", "b"}
    for mmap in (True, False):
        with pytest.raises(UnreadableWeights):
            open_weights(tmp_path / "cut.ckpt", mmap=mmap)


@pytest.mark.parametrize("number", ["7", 7.5, 10**40, -1, None, [1]])
def test_ids_are_small_whole_numbers(number: object, tmp_path: Path) -> None:
    ClipVocabulary.learn("a cat a cat", 2).save(tmp_path)
    ids = json.loads((tmp_path / "vocab.json").read_text())
    ClipVocabulary.read(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(ids | {"a": number}))
    with pytest.raises(ValueError):
        ClipVocabulary.read(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
def test_values_are_finite_or_not(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert is_finite(torch.tensor([], dtype=dtype)) and is_finite(
        torch.tensor([largest, largest, -1.0], dtype=torch.float64).to(dtype)
    )
    for bad in (math.nan, math.inf, -math.inf):
        value = torch.tensor([1.0, bad, -2.0]).to(dtype)
        assert is_finite(value) == bool(torch.isfinite(value.float()).all())
