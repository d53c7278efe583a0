"""The page of a data set with clips: their frames, their rates, and what of their videos they leave out."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clip_files import numbered, numbered_bytes, numbers_of
from PIL import Image
from refusals import names

from difftrain.config import TrainConfig
from difftrain.train.inspect import inspect
from difftrain.train.inspect.clips import sheet


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Inspect an image, a long video at another rate, and one that a clip fills."""
    folder = tmp_path_factory.mktemp("clips")
    data = folder / "data"
    data.mkdir()
    (data / "long.mp4").write_bytes(numbered_bytes(72, fps=24))  # 48 frames at 16 a second
    (data / "short.mkv").write_bytes(numbered_bytes(9, form="matroska", fps=16))
    Image.fromarray(numbered(77)).save(data / "image.png")
    (data / "broken.mp4").write_bytes(numbered_bytes(9)[:900])
    for path in list(data.iterdir()):
        path.with_suffix(".txt").write_text(f"number {path.stem}")
    cfg = TrainConfig.model_validate(
        {
            "model": {"family": "wan", "init_from_config": "tiny"},
            "data": {"dirs": [str(data)], "resolution": (64, 48), "frame_buckets": (1, 5, 9), "framerate": 16.0,
                     "workers": 0, "cache_dir": str(folder / "cache")},
            "training": {"seed": 5, "batch_size": 1},
        }
    )  # fmt: skip
    page = inspect(cfg, folder / "page.html", facts=folder / "facts.json", log=lambda _: None)
    return json.loads((folder / "facts.json").read_text()), page.read_text(encoding="utf-8")


def test_clips_are_counted(shown: tuple[dict[str, Any], str]) -> None:
    facts, page = shown
    clips = facts["clips"]
    assert clips["frames"] == [{"frames": 1, "samples": 1}, {"frames": 9, "samples": 2}]
    assert (clips["clips"], clips["videos"], clips["rates"]) == (2, 2, ["16"])
    assert clips["used"] == pytest.approx(18 / 57)
    assert clips["seconds"] == pytest.approx(18 / 16)
    assert [one["frames"] for one in facts["buckets"]] == [1, 9]
    assert "32% of the frames" in page
    assert facts["rejected"]["count"] == 1


def test_videos_of_which_little_is_used_are_named(shown: tuple[dict[str, Any], str]) -> None:
    facts, _ = shown
    assert facts["clips"]["short"] == 1
    finding = next(
        one for one in facts["findings"] if "video_clip_mode" in one["what"] or "frame_buckets" in one["what"]
    )
    assert names(finding["examples"][0], "48") and "long.mp4" in finding["examples"][0]


def test_cards_say_the_rate_and_show_the_frames(shown: tuple[dict[str, Any], str]) -> None:
    facts, page = shown
    cards = {Path(card["name"]).name: card for card in facts["cards"]}
    assert all(card["fault"] is None for card in facts["cards"])
    assert cards["image.png"]["clip"] is None
    long, short = cards["long.mp4"]["clip"], cards["short.mkv"]["clip"]
    assert (long["file_fps"], long["fps"], long["frames"], long["available"]) == (24, 16, 9, 48)
    assert (short["file_fps"], short["available"]) == (pytest.approx(16), 9)
    assert re.search(r", from 0.00 s: 24 [a-z ]+, [a-z ]+ 16<", page)
    sheets = re.findall(r'src="data:image/jpeg;base64,([^"]+)" alt="data/long.mp4, cut"', page)
    with Image.open(io.BytesIO(base64.b64decode(sheets[0]))) as image:
        assert image.size == (4 * 66 - 2, 2 * 50 - 2)


def test_a_sheet_has_the_first_and_the_last_frame() -> None:
    clip = np.stack([numbered(number) for number in range(17)]).transpose(3, 0, 1, 2)
    pixels = np.asarray(sheet(clip))
    cells = [pixels[50 * row : 50 * row + 48, 66 * column : 66 * column + 64] for row in (0, 1) for column in range(4)]
    assert numbers_of(np.stack(cells)) == [0, 2, 5, 7, 9, 11, 14, 16]
    assert sheet(clip[:, :1]).size == (64, 48)
