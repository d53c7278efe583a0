"""The demo's drawn pictures: what they show, that they repeat, and that the judge reads them as they were drawn."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from difftrain.demo import datasets, judge

SIDE = 64


def picture(caption: str, x: float = 0.5, y: float = 0.5) -> np.ndarray:
    return np.asarray(datasets.draw(datasets.parse(caption)._replace(x=x, y=y), SIDE))


def test_every_combination_has_one_caption() -> None:
    found = datasets.captions()
    assert len(found) == len(set(found)) == 8 * 4 * 2
    assert "a large red star" in found
    assert [datasets.parse(caption).caption for caption in found] == found


@pytest.mark.parametrize("wrong", ["", "a red star", "a huge red star", "a large mauve star", "a large red star now"])
def test_other_captions_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong!r}$"):
        datasets.parse(wrong)


def test_scenes_repeat_and_are_balanced() -> None:
    first, again, other = (list(datasets.scenes(256, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert set(Counter(scene.caption for scene in first).values()) == {4}
    assert len({(scene.x, scene.y) for scene in first}) == 256


def test_a_shape_never_touches_the_border() -> None:
    for scene in datasets.scenes(128, 3):
        pixels = np.asarray(datasets.draw(scene, SIDE))
        border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert (border == 255).all(), scene


def test_the_judge_reads_drawn_pictures_right() -> None:
    scenes = list(datasets.scenes(256, 4))
    found = judge.obedience([np.asarray(datasets.draw(s, SIDE)) for s in scenes], [s.caption for s in scenes])
    assert found["colour_right"] == found["size_right"] == found["one_piece"] == 1.0
    assert found["shape_right"] > 0.97  # the smallest stars are a few pixels


def test_the_judge_sees_what_is_wrong() -> None:
    caption = "a large red star"
    blue, small = picture("a large blue star"), picture("a small red star")
    broken = np.minimum(picture("a small red circle", 0.25, 0.5), picture("a small red circle", 0.75, 0.5))
    empty = np.full((SIDE, SIDE, 3), 255, np.uint8)
    assert judge.obedience([blue], [caption])["colour_right"] == 0
    assert judge.obedience([small], [caption])["size_right"] == 0
    assert judge.obedience([picture("a large red square")], [caption])["shape_right"] == 0
    assert judge.obedience([broken], ["a small red circle"])["one_piece"] == 0
    nothing = judge.obedience([empty], ["a small red circle"])
    assert nothing["colour_right"] == nothing["size_right"] == nothing["one_piece"] == 0
    assert nothing["shape_right"] == 0


def test_largest_piece_counts_four_connected_pixels() -> None:
    mask = np.array([[1, 1, 0, 1], [1, 0, 0, 1], [0, 0, 1, 0]], bool)  # pieces of 3, 2 and 1
    assert judge.largest_piece(mask) == 3 / 6
    assert judge.largest_piece(np.zeros((3, 3), bool)) == 0.0
    spiral = np.array([[1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1]], bool)
    assert judge.largest_piece(spiral) == 1.0


def test_tars_are_what_img2dataset_writes(tmp_path: Path) -> None:
    assert datasets.write(tmp_path, datasets.shape_pictures(70, 32, 1), shard_size=64) == 70
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "00000.tar", "00000_stats.json", "00001.tar", "00001_stats.json",
    ]  # fmt: skip
    with tarfile.open(tmp_path / "00001.tar") as tar:
        names = tar.getnames()
        assert len(names) == 3 * 6 and names[:3] == ["000010000.png", "000010000.txt", "000010000.json"]
        caption = tar.extractfile(names[1]).read().decode()
        facts = json.load(tar.extractfile(names[2]))
        assert facts["caption"] == caption and facts["width"] == 32
        assert Image.open(tar.extractfile(names[0])).size == (32, 32)
    assert json.loads((tmp_path / "00001_stats.json").read_text())["successes"] == 6


def test_tars_repeat_to_the_byte(tmp_path: Path) -> None:
    for name in ("a", "b"):
        datasets.write(tmp_path / name, datasets.shape_pictures(8, 32, 1))
    assert (tmp_path / "a" / "00000.tar").read_bytes() == (tmp_path / "b" / "00000.tar").read_bytes()
