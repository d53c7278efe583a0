"""Pictures from bytes: RGB, upright, over white, or a reason why not. No global state is touched.

What comes out: transparency is composited over white at full size, before any resizing; CMYK, LAB, palettes and bilevel
are converted; 16-bit greys are scaled by 257 and rounded (Pillow itself hands out the high byte of 16-bit colour);
EXIF orientations 1 to 8 are applied; of animations and multi-page files the first picture is taken. Embedded colour
profiles are ignored, as other trainers do: a wide-gamut picture comes out a little duller, never shifted between runs.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
    features,
)

from difftrain.data.media.crop import fit, resize
from difftrain.data.media.decoders import HOST, late_exif, pixels, read_webp_header, seems_whole, shrink_of

__all__ = [
    "MAX_PIXELS",
    "MEDIA_VERSION",
    "MIN_SIDE",
    "Decoded",
    "Header",
    "Unusable",
    "decode",
    "decode_animation",
    "decode_for",
    "decode_rgba",
    "fit",
    "probe",
    "resize",
]

MEDIA_VERSION = 2  # part of what names cached features; raise it when any pixel of any decoded picture changes
MIN_SIDE = 16
MAX_PIXELS = 89_478_485  # where Pillow begins to speak of decompression bombs: 256 MiB of RGB
_ORIENTATION = 0x0112
_SHARP, _SPARE = ("lanczos", "bicubic", "cubic"), 1.5  # see decoders.shrink_of
_BITS_PER_SAMPLE = 258
_SIGNATURE_BYTES = 512

FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"]
_PLUGINS = (  # importing a plugin is what registers its format
    BmpImagePlugin,
    GifImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
with suppress(ImportError):
    from PIL import AvifImagePlugin  # noqa: F401

    FORMATS.append("AVIF")

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_SIGNATURES: dict[str, Callable[[bytes], bool]] = {
    "JPEG": lambda head: head.startswith(b"\xff\xd8\xff"),
    "PNG": lambda head: head.startswith(b"\x89PNG"),
    "WebP": lambda head: head.startswith(b"RIFF") and head[8:12] == b"WEBP",
    "GIF": lambda head: head.startswith(b"GIF8"),
    "BMP": lambda head: head.startswith(b"BM") and len(head) > 14 and head[6:10] == bytes(4),
    "TIFF": lambda head: head.startswith((b"II*\0", b"MM\0*")),
    "AVIF": lambda head: head[4:12] in (b"ftypavif", b"ftypavis"),
}


class Unusable(Exception):
    """Say why a picture cannot be trained on: a kind to sum up by, and the particulars."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {detail}")

    def __reduce__(self) -> tuple[object, ...]:
        return Unusable, (self.kind, str(self)[len(self.kind) + 2 :])


class Header(NamedTuple):
    """What a picture's header says. size_wh is that after EXIF rotation."""

    size_wh: tuple[int, int]
    format: str
    is_complete: bool  # the end of the file is where it should be; False: only decoding can tell


class Decoded(NamedTuple):
    """A picture, perhaps decoded smaller than it is; size_wh is its whole size, after rotation."""

    pixels: np.ndarray  # (H, W, 3 or 4) uint8, read-only
    size_wh: tuple[int, int]


def full_size(pixels: np.ndarray) -> Decoded:
    """Describe a picture that was decoded as large as it is."""
    return Decoded(pixels, (pixels.shape[1], pixels.shape[0]))


def decode(data: bytes, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decode to RGB.

    Shape: (H, W, 3) uint8, read-only, after rotation.
    Raises: Unusable. Neither a size below MIN_SIDE nor bytes after the picture are faults here.
    """
    return _decode(data, _to_rgb, max_pixels).pixels


def decode_for(
    data: bytes,
    resized_wh: tuple[int, int] | None,
    interpolation: str | None = None,
    *,
    max_pixels: int = MAX_PIXELS,
    decoder: str = HOST,
) -> Decoded:
    """Decode to RGB a picture that will then be resized; None: that is wanted as it is.

    decoder: see decoders.DECODERS. A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where that is still enough. Raises: as decode.
    """
    if resized_wh is None or interpolation == "nearest":  # picks pixels, which averages are not
        return _decode(data, _to_rgb, max_pixels, decoder=decoder)
    spare = _SPARE if interpolation in _SHARP else 1.0
    return _decode(
        data, _to_rgb, max_pixels, lambda image, turned: shrink_of(image, _swapped(resized_wh, turned), spare), decoder
    )


def decode_rgba(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Decoded:
    """Decode to the colours that are stored, and alpha, 255 where a picture has none: nothing is composited.

    Shape: (H, W, 4), whole. Raises: Unusable.
    """
    return _decode(data, _to_rgba, max_pixels)


def decode_animation(file: BinaryIO, *, max_pixels: int = MAX_PIXELS) -> Iterator[np.ndarray]:
    """Decode the pictures of an animated GIF or WebP one after the other; the first is what decode makes of the file.

    Shape: (H, W, 3) uint8 of each. Ends where there are no more. Raises: Unusable.
    """
    file.seek(0)
    with _faults():
        image = _open(file, max_pixels)
        turn = _orientation(image, None)
        for index in range(getattr(image, "n_frames", 1)):
            image.seek(index)
            picture = _to_rgb(image)
            yield np.asarray(picture.transpose(_TURNS[turn]) if turn in _TURNS else picture)


def _decode(
    data: bytes,
    convert: Callable[[Image.Image], Image.Image],
    max_pixels: int,
    shrinking: Callable[[Image.Image, bool], int] | None = None,
    decoder: str = HOST,
) -> Decoded:
    with _faults():
        image = _open(io.BytesIO(data), max_pixels)
        turn = _orientation(image, io.BytesIO(data))
        whole_wh = image.size
        shrink = shrinking(image, turn >= 5) if shrinking else 1
        if isinstance(image, TiffImagePlugin.TiffImageFile):  # turned by Pillow itself as it loads
            image.load()
            turn, whole_wh = _orientation(image, None), image.size
        picture = pixels(image, data, shrink, decoder)
        if isinstance(picture, np.ndarray):
            if convert is _to_rgb and turn == 1 and picture.shape[2:] == (3,):
                return Decoded(picture, whole_wh)
            picture = Image.fromarray(picture)
        converted = convert(picture)
        if turn in _TURNS:
            converted = converted.transpose(_TURNS[turn])
        return Decoded(np.asarray(converted), _swapped(whole_wh, turn >= 5))


def _swapped(size_wh: tuple[int, int], turned: bool) -> tuple[int, int]:
    return (size_wh[1], size_wh[0]) if turned else size_wh


def probe(file: BinaryIO | bytes, *, max_pixels: int = MAX_PIXELS) -> Header:
    """Read the size of a picture without decoding it, and look whether its end is there.

    Raises: Unusable, also for sizes that are refused.
    """
    stream = io.BytesIO(file) if isinstance(file, bytes) else file
    with _faults():
        header = _probe_webp(stream, max_pixels) or _probe(stream, max_pixels)
    check_size(*header.size_wh)
    return header


def _probe(stream: BinaryIO, max_pixels: int) -> Header:
    image = _open(stream, max_pixels)
    width, height = image.size
    tiff = isinstance(image, TiffImagePlugin.TiffImageFile)
    if not tiff and _orientation(image, stream) >= 5:
        width, height = height, width
    form = str(image.format)
    return Header((width, height), form, not tiff and seems_whole(stream, form))


def _probe_webp(stream: BinaryIO, max_pixels: int) -> Header | None:
    header = read_webp_header(stream)
    stream.seek(0)
    if header is None or not seems_whole(stream, "WEBP"):
        stream.seek(0)
        return None
    width, height = header.size_wh
    _check_pixels(width, height, max_pixels)
    if header.exif is not None and _orientation_of(header.exif) >= 5:
        width, height = height, width
    return Header((width, height), "WEBP", True)


def check_size(width: int, height: int) -> None:
    """Refuse pictures with a side below MIN_SIDE.

    Raises: Unusable.
    """
    if min(width, height) < MIN_SIDE:
        raise Unusable("too small", f"{width} x {height} px, a side must have at least {MIN_SIDE}")


def _open(stream: BinaryIO, max_pixels: int) -> Image.Image:
    head = stream.read(_SIGNATURE_BYTES)
    if not head:
        raise Unusable("empty", "0 bytes")
    stream.seek(0)
    try:
        if _SIGNATURES["WebP"](head) and not seems_whole(stream, "WEBP"):
            raise Unusable("truncated", "the file is shorter than its header says")
        stream.seek(0)
        image = Image.open(stream, formats=FORMATS)
    except UnidentifiedImageError:
        form = next((name for name, is_it in _SIGNATURES.items() if is_it(head)), None)
        if form == "AVIF" and not features.check("avif"):
            raise Unusable("unsupported format", "this build of Pillow cannot read AVIF") from None
        if form is not None:
            raise Unusable("broken", f"the header of a {form} file that cannot be read") from None
        raise Unusable("not an image", _looks_like(head)) from None
    except Image.DecompressionBombError as error:
        raise Unusable("too many pixels", f"{error}") from None
    _check_pixels(*image.size, max_pixels)
    return image


def _check_pixels(width: int, height: int, most: int) -> None:
    if width * height > most:
        raise Unusable(
            "too many pixels",
            f"{width} x {height} px is more than {most / 1e6:.0f} million (a decompression bomb, or scale it down)",
        )


def _looks_like(head: bytes) -> str:
    """Name what a file with an image's suffix really is, as far as its first bytes tell."""
    start = head.lstrip()[:64].lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    if start.startswith((b"<?xml", b"<svg")):
        return "XML or SVG"
    if not any(byte < 9 or 13 < byte < 32 for byte in head):
        return "a text file" if head.isascii() else "it starts like text"
    if head.count(0) == len(head):
        return "nothing but zero bytes"
    return f"no known image format (starts with {head[:8].hex(' ')})"


@contextmanager
def _faults() -> Iterator[None]:
    """Turn whatever a decoder raises on damaged input into a reason."""
    try:
        yield
    except Unusable:
        raise
    except MemoryError:
        raise Unusable("out of memory", "there was not enough memory to decode it") from None
    except Exception as error:  # decoders of foreign bytes raise anything: struct.error, KeyError, SyntaxError, ...
        text = " ".join(str(error).split()) or type(error).__name__
        cut = any(word in text.lower() for word in ("truncated", "unexpected end", "eof", "not enough data"))
        raise Unusable("truncated" if cut or isinstance(error, EOFError) else "broken", text) from None


def _orientation(image: Image.Image, stream: BinaryIO | None) -> int:
    """Return the EXIF orientation, 1 where there is none or the EXIF data is damaged.

    A PNG may carry EXIF data behind its pixels: `stream` is searched for it, because Pillow would decode to find it.
    """
    try:
        if image.format == "PNG" and "exif" not in image.info and stream is not None:
            late = late_exif(stream)
            if late is not None:
                return _orientation_of(late)
        return _valid(Image.Image.getexif(image).get(_ORIENTATION))
    except Exception:  # damaged EXIF data, in as many ways as there are cameras; the pixels may be fine
        return 1


def _orientation_of(data: bytes) -> int:
    try:
        exif = Image.Exif()
        exif.load(data)
        return _valid(exif.get(_ORIENTATION))
    except Exception:  # as above
        return 1


def _valid(value: object) -> int:
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return _from_integers(image)
    if image.mode == "F":
        raise Unusable("unsupported pixels", "floating-point pixels have no agreed scale")
    if image.mode == "La":
        image = image.convert("LA")
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    over_white = Image.new("RGB", image.size, (255, 255, 255))
    over_white.paste(rgba, mask=rgba)
    return over_white


def _to_rgba(image: Image.Image) -> Image.Image:
    if image.mode == "La":
        image = image.convert("LA")
    layered = image.has_transparency_data and not image.mode.startswith("I")  # else one 16-bit grey is see-through
    return (image if layered else _to_rgb(image)).convert("RGBA")


def _from_integers(image: Image.Image) -> Image.Image:
    """Scale 16-bit greys (or fewer bits in 16) to 8 bits, rounding; Pillow's own conversion would clip at 255."""
    values = np.asarray(image)
    if image.mode == "I" and image.format != "PNG":  # Pillow 10 opens 16-bit PNG greys as I
        raise Unusable("unsupported pixels", "32-bit integer pixels have no agreed scale")
    bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))[0]
    highest = (1 << int(bits)) - 1
    grey = ((values.astype(np.uint32) * 255 + highest // 2) // highest).clip(max=255).astype(np.uint8)
    key = image.info.get("transparency")
    if isinstance(key, int):  # the one grey that is see-through
        grey = np.where(values == key, np.uint8(255), grey)
    return Image.fromarray(grey).convert("RGB")
