"""The npm packages of emoji, as if they had been fetched: plain squares in two styles, of which one lacks the last."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from PIL import Image

from difftrain.demo import datasets, pairs

CODES = [f"1f6{number:02x}" for number in range(64)]
FEWER = CODES[:-1]


def write_packages(folder: Path) -> None:
    """Write all three into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = ",".join(f'{{"hexcode": "{code.upper()}", "label": "{code}"}}' for code in CODES)
    for package, members in (
        (datasets.LABELS, {"en/data.json": f"[{labels}]".encode()}),
        (datasets.PICTURES, {f"assets/{code}.webp": _drawn(n, False, "WEBP") for n, code in enumerate(CODES)}),
        (
            pairs.FLAT,
            {f"img/google/64/{code}.png": _drawn(n, True, "PNG") for n, code in enumerate(FEWER)}
            | {f"img/google/sheets/{code}.png": b"not this" for code in CODES},
        ),
    ):
        name = package.strip("@").replace("/", "-").replace("@", "-")
        with tarfile.open(folder / f"{name}.tgz", "w:gz") as tar:
            for path, content in members.items():
                info = tarfile.TarInfo(f"package/{path}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def _drawn(number: int, flat: bool, kind: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGBA", (16, 16), (number, 255 * flat, 0, 255)).save(
        stream, kind, **({"lossless": True} if kind == "WEBP" else {})
    )
    return stream.getvalue()
