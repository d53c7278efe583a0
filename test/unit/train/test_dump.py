"""--dump_dataset: pictures, captions and masks of the first epoch, as training sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached import ON_DISK, config, make, write_data
from fetched import photographs
from PIL import Image

from difftrain.contracts import ConfigFault
from difftrain.train.dump import dump_dataset


def dumped(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def pixels(folder: Path, number: int, suffix: str = "") -> np.ndarray:
    return np.asarray(Image.open(folder / f"{number:06d}{suffix}.png"))


def test_the_first_epoch_from_a_cache_and_without_one(tmp_path: Path) -> None:
    write_data(tmp_path)
    found = {}
    for name, cache in (("online", {}), ("cached", ON_DISK)):
        cfg = config(tmp_path, tmp_path / "cache", cache)
        count = dump_dataset(cfg, tmp_path / name)
        found[name] = dumped(tmp_path / name)
        assert count == len(found[name]) > 6
        for each in found[name]:
            assert pixels(tmp_path / name, each["number"]).shape[:2] == tuple(each["size"][::-1])
            told = (tmp_path / name / f"{each['number']:06d}.txt").read_text()
            assert told.rstrip("\n") == each["caption"] != "" and Path(each["record"].split("!")[0]).exists()
    assert found["online"] == found["cached"]
    for each in found["online"]:
        a, b = (pixels(tmp_path / name, each["number"]).astype(int) for name in found)
        assert np.abs(a - b).max() <= 1  # encoded in other batches
    with pytest.raises(ConfigFault, match=str(tmp_path / "online")):
        dump_dataset(cfg, tmp_path / "online")


def test_masks_lie_beside_their_pictures(tmp_path: Path) -> None:
    write_data(tmp_path)
    Image.new("L", (9, 9), 102).save(tmp_path / "mask.png")
    subsets = [{"image_dir": str(tmp_path / "folder"), "default_mask": str(tmp_path / "mask.png")}]
    data = {"dirs": (), "datasets": [{"subsets": subsets, "resolution": (64, 64), "batch_size": 2}]}
    cfg = config(tmp_path, tmp_path / "cache", data=data, loss={"masked": True})
    assert dump_dataset(cfg, tmp_path / "out") == 8
    assert all((pixels(tmp_path / "out", number, "_mask") == 102).all() for number in range(8))


def test_real_pictures_are_themselves_but_for_the_vae(tmp_path: Path) -> None:
    """The tiny model's VAE is one of few weights: about 20 dB for photographs."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, path in enumerate(photographs()):
        with Image.open(path) as picture:
            picture.convert("RGB").resize((256, 192)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(path.stem)
    data = {"dirs": (str(folder),), "resolution": (128, 96), "enable_bucket": False, "flip": False}
    cfg = config(tmp_path, tmp_path / "cache", data=data)
    count = dump_dataset(cfg, tmp_path / "out")
    assert count == len(photographs()) // 3 * 3 > 3
    made = make(cfg)
    wanted = [each for batch in made.batches() for each in batch.features["pixels"].permute(0, 2, 3, 1).numpy()]
    for number, picture in enumerate(wanted):
        found = pixels(tmp_path / "out", number).astype(float)
        psnr = 10 * np.log10(255**2 / np.mean((found - picture) ** 2))
        far = 10 * np.log10(255**2 / np.mean((found - wanted[number - 1]) ** 2))
        assert psnr > 16 and psnr > far + 4, (number, psnr, far)
