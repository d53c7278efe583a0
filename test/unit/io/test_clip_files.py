"""Clips that are written are read back with their frames, colours and rate, whole or not at all."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from clip_files import numbered, numbers_of

from difftrain.data.media.clips import decode_clip, probe_clip
from difftrain.io.clip_files import write_clip


@pytest.mark.parametrize("suffix", [".mp4", ".webp"])
@pytest.mark.parametrize("fps", [16, 23.976, Fraction(30000, 1001)])
def test_what_is_written_is_read_back(tmp_path: Path, suffix: str, fps: float | Fraction) -> None:
    frames = np.stack([numbered(number) for number in range(17)])
    path = write_clip(tmp_path / f"clip 100%{suffix}", frames, fps)
    assert [path.name for path in tmp_path.iterdir()] == [path.name]
    header = probe_clip(path)
    assert (header.size_wh, header.frames) == ((64, 48), 17)
    assert header.fps == pytest.approx(float(fps), rel=2e-3)
    back = decode_clip(path, first=0, frames=17, fps=Fraction(fps).limit_denominator(1001))
    assert numbers_of(back) == list(range(17))


@pytest.mark.parametrize("size", [(48, 64), (720, 1280)])
def test_colours_stay(tmp_path: Path, size: tuple[int, int]) -> None:
    for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255), (200, 100, 50)):
        path = write_clip(tmp_path / "clip.mp4", np.full((2, *size, 3), colour, np.uint8), 16)
        assert np.abs(decode_clip(path, first=0, frames=2, fps=Fraction(16)).astype(int) - colour).max() <= 4


def test_an_mp4_says_how_it_was_made_and_begins_with_its_index(tmp_path: Path) -> None:
    frames = np.stack([numbered(number) for number in range(5)])[:, :47, :63]
    first = write_clip(tmp_path / "a.mp4", frames, 25, about={"comment": '{"prompt": "ein Bär"}'})
    second = write_clip(tmp_path / "b.mp4", frames, 25, about={"comment": '{"prompt": "ein Bär"}'})
    data = first.read_bytes()
    assert data == second.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")
    assert probe_clip(first).size_wh == (64, 48)
    with av.open(str(first)) as container:
        assert container.metadata["comment"] == '{"prompt": "ein Bär"}'


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match=r"\.mov"):
        write_clip(tmp_path / "clip.mov", np.zeros((2, 48, 64, 3), np.uint8), 16)

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("difftrain.io.clip_files.fsync_file", fails)
    with pytest.raises(OSError, match="No space"):
        write_clip(path, np.zeros((2, 48, 64, 3), np.uint8), 16)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("clip.mp4", b"old")]
