"""One writer a kind of source: the same samples in the form that each kind reads, for test/contracts/test_source.py."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from difftrain.testing.pictures import picture


class Sample(NamedTuple):
    """One picture with its caption; number: it is called so, or lies at this place. data: in place of a whole picture."""

    number: int
    caption: str | None = "a cat"
    size_wh: tuple[int, int] = (24, 20)
    data: bytes | None = None

    @property
    def bytes(self) -> bytes:
        """Return the file of the picture."""
        return picture(self.number, self.size_wh) if self.data is None else self.data


def write_folder(root: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """Write pictures with caption files."""
    root.mkdir(parents=True, exist_ok=True)
    for sample in samples:
        (root / f"{sample.number}.png").write_bytes(sample.bytes)
        if sample.caption is not None:
            (root / f"{sample.number}.txt").write_text(sample.caption)
    return {"dirs": (str(root),)}


def write_tar(root: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """Write a tar of pictures and texts."""
    root.mkdir(parents=True, exist_ok=True)
    with tarfile.open(root / "0.tar", "w") as tar:
        for sample in samples:
            caption = [] if sample.caption is None else [("txt", sample.caption.encode())]
            for suffix, data in (("png", sample.bytes), *caption):
                info = tarfile.TarInfo(f"{sample.number}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return {"dirs": (str(root),)}


def write_parquet(root: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """Write a table of two rows a group."""
    import pyarrow
    from pyarrow import parquet

    root.mkdir(parents=True, exist_ok=True)
    columns = {"image": [sample.bytes for sample in samples], "text": [sample.caption for sample in samples]}
    parquet.write_table(pyarrow.table(columns), root / "0.parquet", row_group_size=2)
    return {"dirs": (str(root),)}


def write_metadata(root: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """Write pictures, and kohya's json that names them."""
    entries = {f"{sample.number}": {} if sample.caption is None else {"caption": sample.caption} for sample in samples}
    write_folder(root / "imgs", [sample._replace(caption=None) for sample in samples])
    (root / "meta.json").write_text(json.dumps(entries))
    return {"dirs": (str(root / "imgs"),), "in_json": str(root / "meta.json")}


def write_imagefolder(root: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """Write pictures, and Hugging Face's metadata.jsonl that captions them."""
    rows = [{"file_name": f"{sample.number}.png", "text": sample.caption} for sample in samples]
    write_folder(root, [sample._replace(caption=None) for sample in samples])
    (root / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"dirs": (str(root),), "caption_column": "text"}


def write_class(root: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    """Write what FilesOfNumbers reads."""
    return write_folder(root, samples) | {"dataset_class": "sources.FilesOfNumbers"}


class FilesOfNumbers:
    """A class as a user would write it, over files."""

    def __init__(self, folder: str) -> None:
        self.files = sorted(Path(folder).glob("*.png"), key=lambda file: int(file.stem))
        every = [*self.files, *Path(folder).glob("*.txt")]
        self.fingerprint = " ".join(f"{file.name} {file.stat().st_mtime_ns}" for file in sorted(every))

    def __len__(self) -> int:
        return len(self.files)

    def name(self, i: int) -> str:
        return self.files[i].name

    def __getitem__(self, i: int) -> tuple[bytes, str | None]:
        caption = self.files[i].with_suffix(".txt")
        return self.files[i].read_bytes(), caption.read_text() if caption.exists() else None


# kind -> (folder, samples) -> what [data] says of it
WRITERS: dict[str, Callable[[Path, Sequence[Sample]], dict[str, Any]]] = {
    "folder": write_folder,
    "tar": write_tar,
    "parquet": write_parquet,
    "imagefolder": write_imagefolder,
    "metadata": write_metadata,
    "class": write_class,
}
