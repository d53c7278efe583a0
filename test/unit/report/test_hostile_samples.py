"""Images in a run's folder that nobody drew: what is none is left out, and no program is started for any."""

from __future__ import annotations

import io
import os
import subprocess
import zlib
from pathlib import Path

import pytest
from PIL import Image

from difftrain.report.samples import sample_images, samples_section

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\n(%pipe%touch ran) (w) file\nshowpage\n%%EOF\n"


def png(**more: object) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 48), (200, 30, 30)).save(file, "PNG", **more)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


WHOLE = png()
BAD = {
    "empty": b"", "EPS": EPS, "EPS in a DOS header": b"\xc5\xd0\xd3\xc6" + (32).to_bytes(4, "little") + bytes(24) + EPS,
    "cut": WHOLE[:60], "header alone": WHOLE[:33], "text": b"no image", "BMP": b"BM" + bytes(60),
    "bomb": WHOLE[:8] + chunk(b"IHDR", (60000).to_bytes(4, "big") * 2 + bytes((8, 2, 0, 0, 0))) + WHOLE[33:],
    "no data": WHOLE[:33] + WHOLE[-12:], "odd chunk": WHOLE[:33] + chunk(b"zTXt", b"difftrain\0\0no zlib") + WHOLE[33:60],
    "PSD": b"8BPS\0\1" + bytes(40), "FPX": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600),
}  # fmt: skip


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
@pytest.mark.parametrize("name", ["NAME_000004_grid.png", "NAME_000004_00_20260101000000_1.png", "other.png"])
def test_what_is_no_image_is_left_out(tmp_path: Path, data: bytes, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **more: pytest.fail(f"{words} is started"))
    (tmp_path / "sample").mkdir()
    (tmp_path / "sample" / name).write_bytes(data)
    (tmp_path / "sample" / "good.png").write_bytes(WHOLE)
    page = samples_section(sample_images(tmp_path))
    assert page.count("<img") == 1


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "sample"
    folder.mkdir()
    os.mkfifo(folder / "pipe.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "folder.png").mkdir()
    (folder / "sparse.png").write_bytes(WHOLE)
    os.truncate(folder / "sparse.png", 1 << 40)
    assert samples_section(sample_images(tmp_path)) == ""
