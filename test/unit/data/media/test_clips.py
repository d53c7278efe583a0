"""Clips by presentation time: files of many codecs, odd times, colours and shapes, and damage."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from clip_files import SIZE_WH, number_of, numbered, numbered_bytes, numbers_of, video_bytes
from PIL import Image

from difftrain.data.media.clips import FramesFolder, decode_clip, decode_first, frames_in, is_clip, probe_clip
from difftrain.data.media.media import Decoded, Unusable, decode

QUIET = "log-level=none"
KINDS: dict[str, dict[str, Any]] = {
    "mp4": {},
    "mov": {"form": "mov"},
    "mkv": {"form": "matroska"},
    "fragmented": {"container": {"movflags": "frag_keyframe+empty_moov"}},
    "open groups": {"options": {"g": "12", "x264-params": "open-gop=1"}},
    "open groups, mkv": {"form": "matroska", "options": {"g": "12", "x264-params": "open-gop=1"}},
    "intra refresh": {"options": {"g": "12", "x264-params": "intra-refresh=1:bframes=0"}},
    "hevc, open groups": {"codec": "libx265", "options": {"g": "12", "x265-params": f"{QUIET}:open-gop=1"}},
    "10 bits": {"pixels": "yuv420p10le"},
    "vp9": {"form": "webm", "codec": "libvpx-vp9"},
    "av1": {"form": "webm", "codec": "libsvtav1"},
    "avi": {"form": "avi"},
    "avi, xvid": {"form": "avi", "codec": "mpeg4"},
    "avi, mjpeg": {"form": "avi", "codec": "mjpeg", "pixels": "yuvj420p"},
    "29.97": {"fps": Fraction(30000, 1001)},
}
FPS = Fraction(24)


@pytest.fixture(autouse=True)
def _prints_nothing(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    lines = [line for line in capfd.readouterr().err.splitlines() if "Svt[" not in line and line.strip("-")]
    assert not lines


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_is_a_slice_of_the_file(kind: str) -> None:
    data = numbered_bytes(40, **KINDS[kind])
    fps = Fraction(KINDS[kind].get("fps", FPS))
    header = probe_clip(data)
    assert (header.size_wh, header.frames, header.is_constant) == (SIZE_WH, 40, True)
    assert header.fps == pytest.approx(float(fps), rel=1e-3)
    assert header.duration_ms == -(-40_000 * fps.denominator // fps.numerator)
    assert frames_in(header.duration_ms, fps) == 40
    full = decode_clip(data, first=0, frames=40, fps=fps)
    assert numbers_of(full) == list(range(40))
    for first in range(0, 40, 3):
        frames = min(5, 40 - first)
        np.testing.assert_array_equal(
            decode_clip(data, first=first, frames=frames, fps=fps), full[first : first + frames]
        )
    with pytest.raises(Unusable, match="5 of 9 frames") as refused:
        decode_clip(data, first=35, frames=9, fps=fps)
    assert refused.value.kind == "truncated"


def test_rates_close_to_each_other_give_every_frame_once() -> None:
    data = numbered_bytes(200, fps=Fraction(2997, 100))
    assert numbers_of(decode_clip(data, first=0, frames=200, fps=Fraction(30000, 1001))) == list(range(200))
    data = numbered_bytes(200, fps=Fraction(30000, 1001))
    assert numbers_of(decode_clip(data, first=0, frames=200, fps=Fraction(2997, 100))) == list(range(200))


def test_other_rates_repeat_and_leave_out() -> None:
    data = numbered_bytes(40, fps=20)
    assert numbers_of(decode_clip(data, first=0, frames=20, fps=Fraction(10))) == list(range(0, 40, 2))
    assert numbers_of(decode_clip(data, first=3, frames=20, fps=Fraction(40))) == [(3 + i) // 2 for i in range(20)]
    assert numbers_of(decode_clip(data, first=1, frames=3, fps=Fraction(10), start_ms=500)) == [12, 14, 16]


@pytest.mark.parametrize("form", ["mp4", "matroska"])
@pytest.mark.parametrize("start", [0, 700, -400])
def test_uneven_times(form: str, start: int) -> None:
    rng = random.Random(1)
    ticks = [start]
    for _ in range(49):
        ticks.append(ticks[-1] + rng.choice((20, 33, 40, 120, 500)))
    data = numbered_bytes(50, form=form, ticks=ticks, time_base=Fraction(1, 1000))
    header = probe_clip(data)
    shown = [tick for tick in ticks if tick >= 0] if form == "mp4" else ticks  # a list of edits hides what is before 0
    assert (header.frames, header.is_constant) == (len(shown), False)
    assert header.duration_ms > shown[-1] - shown[0]
    frames = frames_in(header.duration_ms, FPS)
    late = 1 / (20 * FPS)
    want = [
        50 - len(shown) + max(k for k, tick in enumerate(shown) if Fraction(tick - shown[0], 1000) <= i / FPS + late)
        for i in range(frames)
    ]
    assert numbers_of(decode_clip(data, first=0, frames=frames, fps=FPS)) == want
    middle = frames // 2
    assert numbers_of(decode_clip(data, first=middle, frames=4, fps=FPS)) == want[middle : middle + 4]


@pytest.mark.parametrize("fps", [1, 1000])
def test_strange_rates(fps: int) -> None:
    data = numbered_bytes(30, fps=fps)
    assert probe_clip(data).fps == pytest.approx(fps)
    assert numbers_of(decode_clip(data, first=0, frames=30, fps=Fraction(fps))) == list(range(30))


def test_a_single_frame() -> None:
    data = numbered_bytes(1, fps=10)
    header = probe_clip(data)
    assert (header.frames, header.duration_ms) == (1, 100)
    assert number_of(decode_first(data)) == 0


# ---------------------------------------------------------------------- pixels


@pytest.mark.parametrize("matrix", ["601", "709", "2020", "unnamed"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("pixels", ["yuv420p", "yuv444p10le"])
def test_colours_come_back_by_matrix_and_range(matrix: str, full: bool, pixels: str) -> None:
    red_share, blue_share, number = {
        "601": (0.299, 0.114, 6),
        "709": (0.2126, 0.0722, 1),
        "2020": (0.2627, 0.0593, 9),
        "unnamed": (0.299, 0.114, 2),
    }[matrix]
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (200, 100, 50)]

    def encoded(colour: np.ndarray) -> av.VideoFrame:
        red, green, blue = (int(value) / 255 for value in colour[0, 0])
        luma = red_share * red + (1 - red_share - blue_share) * green + blue_share * blue
        parts = luma, (blue - luma) / (2 - 2 * blue_share), (red - luma) / (2 - 2 * red_share)
        scale = 4 if "10" in pixels else 1
        frame = av.VideoFrame(64, 48, pixels)
        for index, (plane, part) in enumerate(zip(frame.planes, parts)):
            zero, span = (128, 255 if full else 224) if index else (0 if full else 16, 255 if full else 219)
            plane_array = np.frombuffer(plane, np.uint16 if scale == 4 else np.uint8)
            plane_array[:] = min(round((zero + span * part) * scale), 256 * scale - 1)
        return frame

    def prepare(stream: Any) -> None:
        stream.codec_context.colorspace = number
        stream.codec_context.color_range = 2 if full else 1

    data = video_bytes(
        (np.full((1, 1, 3), colour, np.uint8) for colour in colours),
        form="matroska",
        codec="ffv1",
        pixels=pixels,
        options={},
        prepare=prepare,
        to_frame=encoded,
    )
    clip = decode_clip(data, first=0, frames=len(colours), fps=FPS).astype(int)
    assert np.abs(clip - np.asarray(colours)[:, None, None]).max() <= 3


def test_large_pictures_without_a_matrix_are_709() -> None:
    def encoded(_: np.ndarray) -> av.VideoFrame:
        frame = av.VideoFrame(1280, 16, "yuv420p")
        for plane, value in zip(frame.planes, (63, 102, 240)):
            np.frombuffer(plane, np.uint8)[:] = value
        return frame

    data = video_bytes([np.zeros((1, 1, 3), np.uint8)], form="matroska", codec="ffv1", options={}, to_frame=encoded)
    assert np.abs(decode_first(data).astype(int) - (255, 0, 0)).max() <= 3


def test_grey_and_transparent_pixels() -> None:
    grey = video_bytes([np.full((48, 64, 3), 77, np.uint8)], form="matroska", codec="ffv1", options={}, pixels="gray")
    assert np.abs(decode_first(grey).astype(int) - 77).max() <= 1

    def see_through(_: np.ndarray) -> av.VideoFrame:
        frame = av.VideoFrame(64, 48, "yuva420p")
        for plane, value in zip(frame.planes, (16, 128, 128, 64)):  # black, a quarter of it
            np.frombuffer(plane, np.uint8)[:] = value
        return frame

    for codec, form in (("libvpx-vp9", "webm"), ("ffv1", "matroska")):
        data = video_bytes(
            [numbered(0)] * 3, form=form, codec=codec, options={}, pixels="yuva420p", to_frame=see_through
        )
        assert np.abs(decode_clip(data, first=0, frames=3, fps=FPS).astype(int) - 191).max() <= 3


@pytest.mark.parametrize("degrees", [90, 180, 270])
@pytest.mark.parametrize("mirrored", [False, True])
def test_turned_upright(degrees: int, mirrored: bool) -> None:
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:24, :32], picture[24:, 32:] = (255, 0, 0), (0, 0, 255)
    data = video_bytes([picture] * 2, prepare=lambda stream: stream.set_display_rotation(degrees, hflip=mirrored))
    want = np.rot90(picture, degrees // 90)
    want = want[:, ::-1] if mirrored else want
    got = decode_first(data)
    assert got.shape == want.shape
    assert probe_clip(data).size_wh == want.shape[1::-1]
    for y, x in ((6, 6), (6, -6), (-6, 6), (-6, -6)):
        assert np.abs(got[y, x].astype(int) - want[y, x]).max() < 12


@pytest.mark.parametrize(("aspect", "size_wh"), [(Fraction(4, 3), (85, 48)), (Fraction(1, 2), (64, 96))])
def test_pixels_become_square(aspect: Fraction, size_wh: tuple[int, int]) -> None:
    def prepare(stream: Any) -> None:
        stream.codec_context.sample_aspect_ratio = aspect

    data = video_bytes([numbered(5)] * 2, prepare=prepare)
    assert probe_clip(data).size_wh == size_wh
    assert decode_first(data).shape == (*size_wh[::-1], 3)


def test_odd_sizes() -> None:
    data = video_bytes([numbered(7, (67, 49))] * 2, pixels="yuv444p")
    assert probe_clip(data).size_wh == (67, 49)
    assert number_of(decode_first(data)) == 7


# ---------------------------------------------------------------------- animated pictures and folders


def _animation(form: str, delays: list[int], **options: Any) -> bytes:
    file = io.BytesIO()
    pictures = [Image.fromarray(numbered(number)) for number in range(len(delays))]
    pictures[0].save(file, form, save_all=True, append_images=pictures[1:], duration=delays, loop=0, **options)
    return file.getvalue()


@pytest.mark.parametrize("form", ["GIF", "WEBP"])
def test_animated_pictures(form: str) -> None:
    delays = [100, 50, 200, 50]
    data = _animation(form, delays)
    assert is_clip(data[:64])
    header = probe_clip(data)
    assert header[:5] == (SIZE_WH, form.lower(), 400, 4, 10.0)
    assert not header.is_constant
    assert numbers_of(decode_clip(data, first=0, frames=8, fps=Fraction(20))) == [0, 0, 1, 2, 2, 2, 2, 3]
    assert numbers_of(decode_clip(data, first=3, frames=2, fps=Fraction(20), start_ms=100)) == [2, 2]
    np.testing.assert_array_equal(decode_first(data), decode(data))
    with pytest.raises(Unusable, match="8 of 9 frames"):
        decode_clip(data, first=0, frames=9, fps=Fraction(20))
    for length in range(20, len(data) - 1, len(data) // 40):
        with pytest.raises(Unusable):
            probe_clip(data[:length])


def test_delays_that_no_browser_shows_are_a_tenth_of_a_second() -> None:
    assert probe_clip(_animation("GIF", [0, 10, 20])).duration_ms == 220


def test_stills_are_no_clips() -> None:
    for form in ("GIF", "WEBP", "PNG", "JPEG"):
        file = io.BytesIO()
        Image.fromarray(numbered(1)).save(file, form)
        assert not is_clip(file.getvalue()), form
        assert not is_clip(file.getvalue()[:64]), form
    with pytest.raises(Unusable) as refused:
        probe_clip(file.getvalue())
    assert refused.value.kind == "not a video"


def test_a_folder_of_frames(tmp_path: Path) -> None:
    for number in range(12):
        Image.fromarray(numbered(number)).save(tmp_path / f"{number}.png")
    (tmp_path / "notes.txt").write_text("not a frame")
    clip = FramesFolder(tmp_path, Fraction(12))
    assert clip.probe()[:5] == (SIZE_WH, "frames png", 1000, 12, 12.0)
    assert numbers_of(decode_clip(clip, first=0, frames=12, fps=Fraction(12))) == list(range(12))
    assert numbers_of(decode_clip(clip, first=1, frames=3, fps=Fraction(24), start_ms=500)) == [6, 7, 7]
    with pytest.raises(Unusable, match="2 of 3 frames"):
        decode_clip(clip, first=10, frames=3, fps=Fraction(12))
    Image.fromarray(numbered(3, (80, 48))).save(tmp_path / "3.png")
    with pytest.raises(Unusable) as refused:
        decode_clip(clip, first=0, frames=12, fps=Fraction(12))
    assert refused.value.kind == "changing size"
    (tmp_path / "empty").mkdir()
    with pytest.raises(Unusable, match="no frames"):
        FramesFolder(tmp_path / "empty", Fraction(12)).probe()


def test_frames_are_decoded_no_larger_than_they_are_used(tmp_path: Path) -> None:
    """JPEG at an eighth of its size, PNG whole; both are of one size."""
    for number, suffix in enumerate(("jpg", "png", "jpg")):
        Image.fromarray(numbered(number, (640, 384))).save(tmp_path / f"{number}.{suffix}")
    seen: list[Any] = []

    def cut(frame: Decoded) -> np.ndarray:
        seen.append((frame.pixels.shape[:2], frame.size_wh))
        return np.asarray(Image.fromarray(frame.pixels).resize((80, 48)))

    folder, window = FramesFolder(tmp_path, FPS), {"first": 0, "frames": 3, "fps": FPS}
    clip = decode_clip(folder, **window, cut=cut, resized_wh=(80, 48))
    assert seen == [((48, 80), (640, 384)), ((384, 640), (640, 384)), ((48, 80), (640, 384))]
    whole = decode_clip(folder, **window)
    assert whole.shape == (3, 384, 640, 3) and clip.shape == (3, 48, 80, 3)
    close = np.stack([Image.fromarray(frame).resize((80, 48), Image.Resampling.BOX) for frame in whole])
    assert np.abs(clip.astype(int) - close).mean() < 4


# ---------------------------------------------------------------------- how much is read


class Counting(io.BytesIO):
    """A file that counts the bytes read of it."""

    taken = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        return data


@pytest.mark.parametrize("form", ["mp4", "matroska"])
def test_only_what_is_needed_is_read(form: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (8, 48, 64, 3), np.uint8)
    data = video_bytes(
        (noise[number % 8] for number in range(2000)), form=form, options={"g": "24", "preset": "ultrafast"}
    )
    assert len(data) > 2_000_000
    file = Counting(data)
    calls = []

    def cut(frame: Decoded) -> np.ndarray:
        calls.append(frame.size_wh)
        return frame.pixels[:16, :32]

    clip = decode_clip(file, first=1500, frames=5, fps=FPS, cut=cut)
    assert clip.shape == (5, 16, 32, 3)
    assert len(calls) == 5
    assert file.taken < len(data) / 5
    if form == "mp4":
        file = Counting(data)
        assert probe_clip(file).frames == 2000
        assert file.taken < len(data) / 5


def test_a_path_and_an_open_file_are_the_same(tmp_path: Path) -> None:
    data = numbered_bytes(20)
    (tmp_path / "clip.mp4").write_bytes(data)
    with (tmp_path / "clip.mp4").open("rb") as file:
        file.seek(77)
        assert probe_clip(file) == probe_clip(data) == probe_clip(tmp_path / "clip.mp4")
        np.testing.assert_array_equal(
            decode_clip(file, first=3, frames=9, fps=FPS),
            decode_clip(tmp_path / "clip.mp4", first=3, frames=9, fps=FPS),
        )
        assert not file.closed


# ---------------------------------------------------------------------- what cannot be used


def _sound(cover: bool) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        sound = output.add_stream("aac", rate=8000)
        if cover:
            picture = output.add_stream("mjpeg", rate=1)
            picture.width, picture.height, picture.pix_fmt = 64, 48, "yuvj420p"
            picture.disposition = av.stream.Disposition.attached_pic
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        samples.sample_rate = 8000
        output.mux(sound.encode(samples))
        output.mux(sound.encode(None))
        if cover:
            output.mux(picture.encode(av.VideoFrame.from_ndarray(numbered(0), format="rgb24")))
            output.mux(picture.encode(None))
    return file.getvalue()


@pytest.mark.parametrize("cover", [False, True])
def test_sound_alone_is_no_clip(cover: bool) -> None:
    for work in (probe_clip, decode_first):
        with pytest.raises(Unusable) as refused:
            work(_sound(cover))
        assert refused.value.kind == "no video"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "empty"),
        (b"\0" * 500, "not a video"),
        (b"<html>", "not a video"),
        (b"\x1aE\xdf\xa3" + bytes(99), "broken"),
    ],
)
def test_other_files(data: bytes, kind: str) -> None:
    for work in (probe_clip, decode_first):
        with pytest.raises(Unusable) as refused:
            work(data)
        assert refused.value.kind == kind


def test_sizes_are_checked_before_pixels_are_made() -> None:
    data = numbered_bytes(3)
    with pytest.raises(Unusable) as refused:
        decode_first(data, max_pixels=1000)
    assert "pixels" in refused.value.kind
    with pytest.raises(Unusable) as refused:
        probe_clip(video_bytes([np.zeros((8, 64, 3), np.uint8)] * 3))
    assert refused.value.kind == "too small"


@pytest.mark.parametrize("kind", ["mp4", "mkv", "vp9", "avi, xvid", "avi, mjpeg", "hevc, open groups"])
def test_files_cut_short_anywhere_are_named(kind: str) -> None:
    data = numbered_bytes(40, **KINDS[kind])
    for length in range(len(data) - 2, 0, -max(1, len(data) // 60)):
        for work in (probe_clip, lambda part: decode_clip(part, first=0, frames=40, fps=FPS)):
            with pytest.raises(Unusable):
                work(data[:length])


def test_a_fragmented_file_ends_with_any_fragment() -> None:
    data = numbered_bytes(40, **KINDS["fragmented"])
    counts = set()
    for length in range(len(data) - 1, 0, -1):
        try:
            counts.add(probe_clip(data[:length]).frames)
        except Unusable as reason:
            assert reason.kind in ("truncated", "not a video", "no frames", "no video")
    assert counts == {40, 36, 24, 12}
    assert numbers_of(decode_clip(data[: data.rindex(b"mfra") - 4], first=0, frames=40, fps=FPS)) == list(range(40))


@pytest.mark.parametrize("kind", ["mp4", "fragmented", "mkv", "vp9", "av1", "avi, xvid", "hevc, open groups"])
def test_flipped_bits_give_a_reason_or_a_clip_of_the_right_length(kind: str) -> None:
    data = numbered_bytes(40, **KINDS[kind])
    rng = random.Random(0)
    refused = 0
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 2, 20))):
            at = rng.randrange(len(damaged))
            damaged[at] ^= 1 << rng.randrange(8)
        try:
            probe_clip(bytes(damaged))
            clip = decode_clip(bytes(damaged), first=20, frames=9, fps=FPS)
            assert clip.shape[0] == 9
            assert clip.shape[3] == 3
        except Unusable:
            refused += 1
    assert refused > 10
