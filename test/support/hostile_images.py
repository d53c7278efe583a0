"""Some three hundred images, good and hostile, made from a seed, and what has to become of each."""

from __future__ import annotations

import io
import os
import random
import re
import struct
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

SEED = 17
SIZE = (80, 64)  # width, height
EPS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\n"
    b"(%pipe%touch $HOSTILE_RAN) (w) file\nshowpage\n%%EOF\n"
)


@dataclass(frozen=True)
class MadeImage:
    """One file. fate: good (used with Pillow's pixels), bad (named), either (named, or used with Pillow's pixels)."""

    name: str
    data: bytes
    fate: str


def picture(mode: str = "RGB", size: tuple[int, int] = SIZE, seed: int = 1) -> Image.Image:
    """Make a smooth image of a mode, the same every time."""
    rng = np.random.Generator(np.random.Philox(seed))
    rgba = Image.fromarray(rng.integers(0, 256, (8, 8, 4), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    if mode == "I;16":
        return Image.fromarray(np.asarray(rgba.convert("L")).astype(np.uint16) * 257)
    return (
        rgba
        if mode == "RGBA"
        else rgba.convert(mode)
        if mode in ("L", "LA", "RGB")
        else rgba.convert("RGB").convert(mode)
    )


def saved(image: Image.Image, form: str, **more: Any) -> bytes:
    """Write an image in a format."""
    file = io.BytesIO()
    image.save(file, form, **more)
    return file.getvalue()


def exif(orientation: int) -> bytes:
    """Make EXIF data with an orientation."""
    made = Image.Exif()
    made[0x0112] = orientation
    return made.tobytes()


def chunk(kind: bytes, data: bytes) -> bytes:
    """Make a chunk of a PNG."""
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def _good() -> Iterator[MadeImage]:
    for mode in ("RGB", "L", "RGBA", "LA", "P", "1", "I;16"):
        yield MadeImage(f"{mode.replace(';', '-')}.png", saved(picture(mode), "PNG"), "good")
    for mode in ("RGB", "L", "CMYK"):
        for quality in (30, 95):
            yield MadeImage(f"{mode}-{quality}.jpg", saved(picture(mode), "JPEG", quality=quality), "good")
    yield MadeImage("progressive.jpg", saved(picture(), "JPEG", progressive=True), "good")
    for orientation in range(1, 9):
        for form, suffix in (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("TIFF", "tif")):
            data = saved(picture(), form, exif=exif(orientation))
            yield MadeImage(f"turned-{orientation}.{suffix}", data, "good")
    for orientation in (0, 9, 65535):
        yield MadeImage(f"turned-{orientation}.jpg", saved(picture(), "JPEG", exif=exif(orientation)), "good")
    for mode in ("RGB", "RGBA"):
        for lossless in (True, False):
            yield MadeImage(f"{mode}-{lossless}.webp", saved(picture(mode), "WEBP", lossless=lossless), "good")
    for mode in ("L", "P", "RGB"):
        yield MadeImage(f"{mode}.gif", saved(picture(mode), "GIF"), "good")
        yield MadeImage(f"{mode}.bmp", saved(picture(mode), "BMP"), "good")
    for pressing in ("raw", "tiff_lzw", "tiff_deflate", "packbits"):
        yield MadeImage(f"{pressing}.tif", saved(picture(), "TIFF", compression=pressing), "good")
    for form, suffix in (("GIF", "gif"), ("WEBP", "webp"), ("PNG", "png"), ("TIFF", "tif")):
        more = [picture(seed=seed) for seed in (2, 3)]
        yield MadeImage(f"several.{suffix}", saved(picture(), form, save_all=True, append_images=more), "good")
    yield MadeImage("a JPEG called.png", saved(picture(), "JPEG"), "good")
    yield MadeImage("a PNG called.jpg", saved(picture(), "PNG"), "good")
    yield MadeImage("smallest.png", saved(picture(size=(16, 16)), "PNG"), "good")
    yield MadeImage("wide.png", saved(picture(size=(400, 16)), "PNG"), "good")
    yield MadeImage("behind.jpg", saved(picture(), "JPEG") + b"PK\3\4 something else", "good")
    whole = saved(picture(), "PNG")
    yield MadeImage("unknown chunk.png", whole[:33] + chunk(b"quQk", b"x" * 50) + whole[33:], "good")
    yield MadeImage("bad profile.png", whole[:33] + chunk(b"iCCP", b"x\0\0junk") + whole[33:], "either")


def _bad() -> Iterator[MadeImage]:
    # --- other formats that Pillow has readers for, some of which start programs
    for suffix in ("png", "jpg", "webp", "tif"):
        yield MadeImage(f"postscript.{suffix}", EPS, "bad")
        dos = b"\xc5\xd0\xd3\xc6" + struct.pack("<II", 32, len(EPS)) + bytes(20) + EPS
        yield MadeImage(f"postscript in DOS.{suffix}", dos, "bad")
    for form in ("PPM", "TGA", "PCX", "ICO", "SGI", "DDS", "IM", "MSP", "SPIDER", "XBM", "BLP", "JPEG2000"):
        mode = {"MSP": "1", "XBM": "1", "SPIDER": "F", "BLP": "P"}.get(form, "RGB")
        try:
            yield MadeImage(f"a {form} called.png", saved(picture("L").convert(mode), form), "bad")
        except (OSError, ValueError, KeyError):  # this build of Pillow does not write it
            continue
    heads = {
        "PSD": b"8BPS\0\1" + bytes(6), "FPX": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "WMF": b"\xd7\xcd\xc6\x9a\0\0",
        "EMF": b"\1\0\0\0" + bytes(36) + b" EMF", "FLI": bytes(4) + b"\x11\xaf", "ELF": b"\x7fELF", "ZIP": b"PK\3\4", "PDF": b"%PDF-1.4\n",
        "GRIB": b"GRIB\0\0\0\1", "HDF5": b"\x89HDF\r\n\x1a\n", "MPEG": b"\0\0\1\xb3", "PCD": bytes(2048) + b"PCD_",
        "SVG": b"<svg width='9' height='9'/>", "HTML": b"<!doctype html><script>alert(1)</script>",
        "script": b"#!/bin/sh\ntouch $HOSTILE_RAN\n", "zeros": bytes(5000), "noise": random.Random(SEED).randbytes(5000),
        "one byte": b"\xff", "pickle": b"\x80\x04cos\nsystem\n(X\x01\0\0\0xtR.", "git pointer": b"version 1\noid sha256:00\nsize 5\n",
    }  # fmt: skip
    for name, head in heads.items():
        yield MadeImage(f"a {name} called.png", head + bytes(600), "bad")
        yield MadeImage(f"a {name} called.jpg", head, "bad")
    yield MadeImage("empty.png", b"", "bad")
    yield MadeImage("empty.jpg", b"", "bad")

    # --- sizes that are too small, or say more than there is
    for size in ((1, 1), (15, 400), (400, 15), (1, 10_000)):
        yield MadeImage(f"tiny {size[0]}x{size[1]}.png", saved(picture(size=size), "PNG"), "bad")
    whole = saved(picture(), "PNG")
    for width, height in ((0, 5), (60_000, 60_000), (2**31 - 1, 1), (2**32 - 1, 2**32 - 1), (20_000, 20_000)):
        head = chunk(b"IHDR", struct.pack(">II", width, height) + bytes((8, 2, 0, 0, 0)))
        yield MadeImage(f"says {width}x{height}.png", whole[:8] + head + whole[33:], "bad")
    gif = saved(picture("P"), "GIF")
    yield MadeImage("says 65535.gif", gif[:6] + b"\xff\xff\xff\xff" + gif[10:], "bad")
    bmp = saved(picture(), "BMP")
    yield MadeImage("says 2^31.bmp", bmp[:18] + struct.pack("<ii", 2**31 - 1, 2**31 - 1) + bmp[26:], "bad")
    yield MadeImage("negative.bmp", bmp[:18] + struct.pack("<ii", -80, 64) + bmp[26:], "bad")
    text = zlib.compress(bytes(80_000_000), 9)
    yield MadeImage("text bomb.png", whole[:33] + chunk(b"zTXt", b"x\0\0" + text) + whole[33:], "either")
    bomb = whole[:33] + chunk(b"IDAT", zlib.compress(bytes(50_000_000), 9)) + whole[-12:]
    yield MadeImage("data bomb.png", bomb, "either")
    for mode in ("F", "I"):
        yield MadeImage(f"{mode}.tif", saved(picture("L").convert(mode), "TIFF"), "bad")
    tif = saved(picture(), "TIFF", compression="raw")
    offset = struct.unpack("<I", tif[4:8])[0]
    yield MadeImage("circle.tif", tif[: len(tif) - 4] + struct.pack("<I", offset), "either")
    yield MadeImage("directory nowhere.tif", tif[:4] + struct.pack("<I", 2**31) + tif[8:], "bad")


def _mutated(count: int) -> Iterator[MadeImage]:
    """Cut good files, and change bytes of them: nobody says what comes of these, but that it is Pillow's or is named."""
    rng = random.Random(SEED)
    sources = [
        ("png", saved(picture(), "PNG")), ("jpg", saved(picture(), "JPEG")), ("webp", saved(picture(), "WEBP")),
        ("gif", saved(picture("P"), "GIF")), ("bmp", saved(picture(), "BMP")), ("tif", saved(picture(), "TIFF")),
    ]  # fmt: skip
    for number in range(count):
        suffix, whole = sources[number % len(sources)]
        data = bytearray(whole)
        if number % 3 == 0:
            del data[rng.randrange(1, len(data)) :]
        else:
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(min(len(data), 200 if number % 3 == 1 else len(data)))] = rng.randrange(256)
        yield MadeImage(f"changed {number}.{suffix}", bytes(data), "either")


def images(mutated: int = 150) -> list[MadeImage]:
    """Make them all."""
    return [*_good(), *_bad(), *_mutated(mutated)]


def pixels_of(data: bytes) -> np.ndarray:
    """Decode as Pillow does: the first image, upright, over white, RGB. Raises whatever Pillow does."""
    image = Image.open(io.BytesIO(data))
    image.load()
    image = ImageOps.exif_transpose(image) if image.format != "TIFF" else image
    if image.mode.startswith("I"):
        grey = ((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8)
        return np.asarray(Image.fromarray(grey).convert("RGB"))
    if not image.has_transparency_data:
        return np.asarray(image.convert("RGB"))
    rgba = image.convert("RGBA")
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(rgba, mask=rgba)
    return np.asarray(white)


def write(folder: Path, made: list[MadeImage]) -> None:
    """Write the files."""
    folder.mkdir(parents=True)
    for image in made:
        (folder / image.name).write_bytes(image.data)


def try_images(word: str, verbose: bool) -> Counter[str]:
    """Index them all; count: refused, used, silent (neither named nor used, or used with other pixels), CODE RAN."""
    from difftrain.config import CaptionSection, DataSection
    from difftrain.data.index.build import build_index
    from difftrain.data.index.index import Index
    from difftrain.data.media.media import decode

    made = [image for image in images() if re.search(word, image.name)]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        ran = Path(place, "ran")
        os.environ["HOSTILE_RAN"] = str(ran)
        write(Path(place, "data"), made)
        began = time.monotonic()
        section = DataSection(dirs=(str(Path(place, "data")),), verify="full", max_rejected_share=1.0)
        index = Index(
            Path(
                build_index(
                    section, CaptionSection(allow_empty=True), Path(place, "index"), log=lambda line: None, workers=1,
                    decode_limit_s=20,
                ).folder
            )
        )  # fmt: skip
        named = {Path(reject.path).name: reject.reason for reject in index.rejects()}
        used = {record.media.path: record for record in index.records(range(index.count))}
        for image in made:
            outcome = fate_of(image, named, image.name in used, decode)
            counts[outcome] += 1
            if verbose or outcome not in ("refused", "used"):
                print(f"  {outcome:10s} {image.name}: {named.get(image.name, '')}", flush=True)
        counts["CODE RAN"] += ran.exists()
        counts["no end"] += sum(reason.startswith("too slow") for reason in named.values())
        if verbose:
            print(f"  {time.monotonic() - began:.1f} s")
    return counts


def fate_of(image: MadeImage, named: dict[str, str], is_used: bool, decode: Any) -> str:
    """Say what became of an image, "silent" where it is not what should have."""
    if is_used == (image.name in named):
        return "silent"
    if not is_used:
        return "refused" if image.fate != "good" else "silent"
    same = image.fate != "bad" and np.array_equal(decode(image.data), pixels_of(image.data))
    return "used" if same else "silent"
