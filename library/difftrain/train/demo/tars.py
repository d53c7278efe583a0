"""Write captioned pictures the way img2dataset does: shards of .jpg|png|webp + .txt + .json, and stats beside."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple


class Picture(NamedTuple):
    """One sample: the bytes of an image file, its suffix, its caption, its size."""

    content: bytes
    suffix: str
    caption: str
    width: int
    height: int


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # time 0, no owner: the same pictures give the same bytes
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def write(folder: Path, pictures: Iterable[Picture], *, shard_size: int = 1024) -> int:
    """Write 00000.tar … and 00000_stats.json … into a folder; return the number of pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    total = shard = 0
    source = iter(pictures)
    while part := list(islice(source, shard_size)):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number, picture in enumerate(part):
                key = f"{shard:05d}{number:04d}"
                facts = {
                    "caption": picture.caption,
                    "key": key,
                    "status": "success",
                    "width": picture.width,
                    "height": picture.height,
                }
                _add(tar, f"{key}.{picture.suffix}", picture.content)
                _add(tar, f"{key}.txt", picture.caption.encode())
                _add(tar, f"{key}.json", json.dumps(facts).encode())
        stats = {"count": len(part), "successes": len(part), "failed_to_download": 0, "failed_to_resize": 0}
        (folder / f"{shard:05d}_stats.json").write_text(json.dumps(stats, indent=2) + "\n", encoding="utf-8")
        total += len(part)
        shard += 1
    return total
