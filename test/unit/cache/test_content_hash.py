"""Contents of every kind of source: an index that looked quickly leads to the addresses of one that read all bytes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from difftrain.cache.decoding import DecodingDataset
from difftrain.cache.manifest.manifest import CacheManifest, ManifestRequest
from difftrain.cache.request import build_manifests
from difftrain.config import TrainConfig
from difftrain.contracts import PIXELS, Encoder, Feature
from difftrain.data.prepare import Data, open_data, prepare
from difftrain.testing.pictures import picture, write_folder, write_tar

SIZES = [(64, 64), (64, 48), (50, 64), (64, 64)]
PICTURES = ManifestRequest(
    "latents",
    Encoder(PIXELS, {"made": Feature(4, factor=8)}, (), "", lambda batch: {}, lambda: ""),
    "vae",
    "fp32",
    3,
)
OWN = """
import numpy as np
class Own:
    fingerprint = "first"
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return np.full((40 + i, 64, 3), 10 * i, dtype=np.uint8), "an array"
"""


def tokenize(captions: list[str]) -> Any:
    raise AssertionError("no caption is asked for")


def folder_of(root: Path) -> dict[str, Any]:
    return {"dirs": (str(write_folder(root / "a", SIZES)),)}


def tars_of(root: Path) -> dict[str, Any]:
    write_tar(root / "a" / "1.tar", SIZES)
    return {"dirs": (str(write_tar(root / "a" / "0.tar", SIZES[:2], start=9).parent),)}


def parquet_of(root: Path) -> dict[str, Any]:
    (root / "a").mkdir()
    images = [{"bytes": picture(i, size), "path": None} for i, size in enumerate(SIZES)]
    parquet.write_table(
        pyarrow.table({"image": images, "text": list("abcd")}), root / "a" / "0.parquet", row_group_size=2
    )
    return {"dirs": (str(root / "a"),)}


def paths_of(root: Path) -> dict[str, Any]:
    write_folder(root / "a" / "pictures", SIZES)
    names = [f"pictures/{i:04d}.png" for i in range(len(SIZES))]
    parquet.write_table(pyarrow.table({"file_name": names, "caption": list("abcd")}), root / "a" / "0.parquet")
    return {"dirs": (str(root / "a"),)}


def metadata_of(root: Path) -> dict[str, Any]:
    write_folder(root / "a", SIZES[:2])
    write_folder(root / "elsewhere", SIZES[2:], start=7)
    names = ["0000", "0001", *(str(root / "elsewhere" / f"000{i}.png") for i in (7, 8))]
    (root / "meta.json").write_text(json.dumps({name: {"caption": "x"} for name in names}))
    return {"dirs": (str(root / "a"),), "in_json": str(root / "meta.json")}


def class_of(root: Path) -> dict[str, Any]:
    (root / "own_pictures.py").write_text(OWN)
    return {"dirs": (), "dataset_class": "own_pictures.Own"}


KINDS = [folder_of, tars_of, parquet_of, paths_of, metadata_of, class_of]


def opened(root: Path, data: dict[str, Any], verify: str) -> Data:
    given = {"resolution": (64, 64), "cache_dir": str(root / f"cache-{verify}"), "verify": verify, "workers": 0}
    cfg = TrainConfig.model_validate({"data": data | given, "training": {"seed": 1}})
    return open_data(cfg, prepare(cfg, log=lambda line: None))


def listed(data: Data) -> CacheManifest:
    return CacheManifest(build_manifests(data, [PICTURES], tokenize, log=lambda line: None)["latents"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_quick_index_leads_to_the_same_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "own_pictures", raising=False)
    given = kind(tmp_path)
    full, quick = (opened(tmp_path, given, verify) for verify in ("full", "quick"))
    first, second = listed(full), listed(quick)
    assert not second.passed and first.addresses.tobytes() == second.addresses.tobytes()
    assert first.count == full.index.count >= len(SIZES)
    for n in range(second.batches):
        piece = DecodingDataset(quick, second, tokenize)[n]
        assert len(piece.rows) == len(second.rows(n)) and not piece.passed and not piece.rejected


@pytest.mark.parametrize("kind", [paths_of, metadata_of])
def test_a_picture_that_another_file_names_is_known_by_its_own_time(tmp_path: Path, kind: Any) -> None:
    data = opened(tmp_path, kind(tmp_path), "quick")
    before = listed(data)
    changed = data.index.record(1)
    path = Path(data.index.sources[0].root) / changed.media.path
    path.write_bytes(picture(99, (changed.size_hw[1], changed.size_hw[0])))
    os.utime(path, ns=(5, 5))
    reasons = [each.reason for n in range(before.batches) for each in DecodingDataset(data, before, tokenize)[n].passed]
    assert len(reasons) == 1 and reasons[0].startswith("changed since")
    (data.index.folder / "content.npy").unlink()
    after = listed(data)
    assert len({*map(bytes, after.addresses)} - {*map(bytes, before.addresses)}) == 1 and not after.passed
