"""The faster decoders give Pillow's pixels, and a JPEG is decoded no larger than it is needed."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from difftrain.data.media import decoders
from difftrain.data.media.media import Unusable, decode, decode_for, decode_rgba

pytest.importorskip("simplejpeg")
pytest.importorskip("imagecodecs")
WHOLE = (1 << 20, 1 << 20)  # larger than any: nothing is left out


def scene(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Draw soft shapes with some detail, as photographs have."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    waves = [np.sin(x / (7 + 9 * c)) + np.cos(y / (5 + 8 * c)) + np.sin((x + y) / 41) for c in range(4)]
    array = np.clip(128 + 40 * np.stack(waves, -1), 0, 255).astype(np.uint8)
    return Image.fromarray(array).convert(mode) if mode != "RGB" else Image.fromarray(array[..., :3].copy())


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


FILES = {
    "jpeg": encoded(scene(203, 131), "JPEG", quality=90),
    "jpeg 4:4:4": encoded(scene(203, 131), "JPEG", subsampling=0),
    "jpeg progressive": encoded(scene(203, 131), "JPEG", progressive=True),
    "jpeg grey": encoded(scene(203, 131, "L"), "JPEG"),
    "jpeg cmyk": encoded(scene(203, 131, "CMYK"), "JPEG"),
    "jpeg turned": encoded(
        scene(203, 131), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"
    ),
    "png": encoded(scene(203, 131), "PNG"),
    "png grey": encoded(scene(203, 131, "L"), "PNG"),
    "png alpha": encoded(scene(203, 131, "RGBA"), "PNG"),
    "webp": encoded(scene(203, 131), "WEBP", quality=80),
    "webp alpha": encoded(scene(203, 131, "RGBA"), "WEBP", quality=80),
}
FAST = {name for name in FILES if name != "jpeg cmyk"}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for every picture whether a faster decoder took it."""
    seen: list[bool] = []
    fast = decoders._fast

    def spy(*given: object) -> object:
        seen.append((found := fast(*given)) is not None)
        return found

    monkeypatch.setattr(decoders, "_fast", spy)
    return seen


def by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "_module", lambda name: None)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("least", [WHOLE, (101, 60), (40, 30), (20, 12)], ids=str)
def test_pixels_are_pillows(
    name: str, least: tuple[int, int], taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, layers = decode_for(FILES[name], least), decode_rgba(FILES[name])
    by_pillow(monkeypatch)
    slow = decode_for(FILES[name], least)
    assert taken == [name in FAST, name in FAST, False]
    assert fast.size_wh == slow.size_wh and np.array_equal(fast.pixels, slow.pixels)
    assert np.array_equal(layers.pixels, decode_rgba(FILES[name]).pixels)


def test_only_jpegs_are_made_smaller_and_never_below_what_is_needed() -> None:
    for name, data in FILES.items():
        turned = name == "jpeg turned"
        whole = (131, 203) if turned else (203, 131)
        for by in (1, 2, 4, 8):
            least = (whole[0] // by, whole[1] // by)
            found = decode_for(data, least)
            assert found.size_wh == whole
            shrinks = by if name.startswith("jpeg") and name != "jpeg cmyk" else 1
            assert found.pixels.shape[1::-1] == (-(-whole[0] // shrinks), -(-whole[1] // shrinks)), (name, by)
        sharp = decode_for(data, (whole[0] // 4, whole[1] // 4), "lanczos").pixels  # keeps more to work on
        assert sharp.shape[1] == (-(-whole[0] // 2) if shrinks > 1 else whole[0])
        assert decode_for(data, (whole[0] // 8, whole[1] // 8), "nearest").pixels.shape[1::-1] == whole
        odd = decode_for(data, (whole[0] // 2 + 2, 1)).pixels
        assert odd.shape[1::-1] == whole


def test_a_smaller_jpeg_is_the_mean_of_what_it_leaves_out() -> None:
    """Real photographs against Lanczos are in benchmarks/decode.py."""
    data = encoded(scene(1280, 800), "JPEG", quality=92)
    for by in (2, 4, 8):
        small = decode_for(data, (1280 // by, 800 // by)).pixels
        want = np.asarray(Image.fromarray(decode(data)).reduce(by))
        assert np.abs(small.astype(int) - want).mean() <= 1.0


@pytest.mark.parametrize("name", FILES)
def test_damage_is_judged_by_pillow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = FILES[name]
    cases = [data[: len(data) * 2 // 3], data[:-14], data[:200] + bytes(60) + data[260:]]

    def verdict(case: bytes) -> object:
        try:
            return decode(case).tobytes()
        except Unusable as error:
            return str(error)

    fast = [verdict(case) for case in cases]
    by_pillow(monkeypatch)
    assert fast == [verdict(case) for case in cases]
    assert isinstance(fast[0], str)
