"""Clips, masked texts and a third encoder in the same files as pictures and CLIP's texts: built, read, trained from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_runs import IN_MEMORY, ON_DISK, batches, config, losses, opened

from difftrain.cache.store.folder import CacheFolder
from difftrain.cache.store.format import ROW, read_header
from difftrain.cache.store.index import Metadata
from difftrain.contracts import Bucket
from difftrain.testing.clips import FROZEN, LENGTH, WIDTH, ClipFamily
from difftrain.testing.pictures import write_folder

SIZES = [(64, 64), (96, 40), (64, 64), (40, 96), (64, 64), (96, 40), (64, 66)]
FRAMES_OF_A_CLIP, LATENT_FRAMES = 9, 3
LONG = "a clip of many words that tell us what can be seen in it from its first frame to its last"


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Seven pictures, of which clips of nine frames are made: no source has clips yet."""
    monkeypatch.setattr(Bucket.__new__, "__defaults__", (FRAMES_OF_A_CLIP,))
    folder = write_folder(tmp_path / "pictures", SIZES)
    (folder / "0002.txt").write_text(LONG)
    return folder


@pytest.mark.parametrize("where", [ON_DISK, IN_MEMORY])
def test_clips_are_trained_from_the_cache_as_they_are_online(pictures: Path, where: dict[str, Any]) -> None:
    family = ClipFamily(seed=1)
    online_parts, parts = family.load(), family.load(deferred=FROZEN)
    online = opened(config(pictures), online_parts)
    cached = opened(config(pictures, where), parts)
    assert parts.offloaded == set(FROZEN) and not any(map(parts.is_loaded, FROZEN))
    pairs = list(
        zip(
            batches(config(pictures, where), family, parts, cached),
            batches(config(pictures), family, online_parts, online),
            strict=True,
        )
    )
    assert len(pairs) > 5
    for (ours,), (theirs,) in pairs:
        shape = Bucket(*ours.bucket[:2], FRAMES_OF_A_CLIP)
        assert ours.bucket == shape and "pixels" not in ours.features
        assert ours.features["moments"].shape == (2, 12, LATENT_FRAMES, shape.height // 8, shape.width // 8)
        assert ours.features["depth"].shape == (2, 1, shape.height // 16, shape.width // 16)
        assert ours.features["t5_hidden"].shape == (2, LENGTH, WIDTH)
        assert ours.features["t5_hidden"].dtype == torch.bfloat16
        assert not ours.features["t5_hidden"][theirs.features["t5_mask"] == 0].any()
        a, b = family.inputs(ours, parts), family.inputs(theirs, online_parts)
        assert torch.allclose(a.x_t, b.x_t, atol=1e-6) and torch.allclose(a.target, b.target, atol=1e-6)
        assert a.conditions.keys() == b.conditions.keys()
        for name, value in b.conditions.items():
            assert torch.allclose(a.conditions[name].float(), value.float(), atol=1e-6), name
    found = losses(config(pictures, where), family, parts, cached)
    wanted = losses(config(pictures), family, online_parts, online)
    assert found == pytest.approx(wanted, rel=1e-6) and len(set(found)) > 5


def test_a_whole_cache_of_another_family_wakes_nothing(pictures: Path) -> None:
    family, cfg = ClipFamily(seed=1), config(pictures, ON_DISK)
    parts = family.load(deferred=FROZEN)
    woken: list[str] = []
    parts.deferred = {
        name: lambda name=name, fill=fill: (woken.append(name), fill()) for name, fill in parts.deferred.items()
    }
    opened(cfg, parts)
    assert sorted(woken) == sorted(FROZEN)
    woken.clear()
    opened(cfg, parts)
    assert not woken


def test_rows_behind_the_mask_take_no_room(pictures: Path) -> None:
    cfg = config(pictures, ON_DISK)
    opened(cfg, ClipFamily(seed=1).load())
    folder = CacheFolder.open(pictures.parent / "cache", create=False)
    (segment,) = [each.name for each in Metadata(folder.database).segments() if each.header["encoder"] == "t5"]
    journal = folder.file(segment, ".idx").read_bytes()
    lengths = sorted(np.frombuffer(journal[read_header(journal)[1] :], ROW)["length"].tolist())
    assert len(lengths) == len(SIZES) + 1  # each its own, and the empty one
    words = len(LONG.split()) - 4  # and all others have four
    assert lengths[-1] - lengths[-2] == pytest.approx(words * WIDTH * 2, abs=128)  # pieces are aligned
    assert lengths[-1] < LENGTH * WIDTH * 2 + 256 and lengths[0] < 512
