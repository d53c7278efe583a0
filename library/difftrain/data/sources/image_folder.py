"""Pictures with metadata.jsonl, .csv or .parquet beside them, as Hugging Face's imagefolder has it: file_name and columns.

A metadata file captions the pictures of its own folder and of those below it. It counts as one shard whose items lie
elsewhere; a picture that none names is told.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from difftrain.contracts import DataFault, MediaRef
from difftrain.data.sources.base import (
    BadItem,
    DataSource,
    FileRef,
    ListedFile,
    SourceItem,
    can_be_path,
    image_file,
    is_left_out,
    is_media,
    key_path,
    printable,
    read_image,
)
from difftrain.data.sources.captions import MAX_FILE_BYTES, BadCaption, captions_of, decode_text
from difftrain.data.sources.folder import walk
from difftrain.io.files import read_regular, refuse_irregular, text_lines

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_LOOKED_AT = ("", "*/", "*/*/")  # depths at which a first metadata file is looked for
NAME = "file_name"

Row = dict[str, Any]


def has_metadata(root: Path) -> bool:
    """Tell whether pictures are captioned so: in the folder itself, or two levels below at most."""
    return any(path.is_file() for depth in _LOOKED_AT for name in METADATA for path in root.glob(depth + name))


class ImageFolderSource(DataSource):
    """A folder with metadata files; info.caption_column is the column of the captions, a text or a list of texts."""

    def listing(self) -> Iterator[ListedFile]:
        for path, entry in walk(self.root, deep=not self.info.flat):
            if path.rpartition("/")[2] in METADATA and not is_left_out(self.info, path, by_file=False):
                stat = entry.stat()
                yield ListedFile("media", path, stat.st_size, self._stamp(path, stat.st_mtime_ns))

    def _stamp(self, file: str, mtime_ns: int) -> int:
        """Return what changes with the file and with any picture below it: one that came, went or is another is seen."""
        state = hashlib.blake2b(f"{mtime_ns}".encode(), digest_size=7)
        for path, entry in sorted(self._pictures(file).items()):
            stat = entry.stat() if entry.is_file() else None
            state.update(
                f" {path} {stat.st_size} {stat.st_mtime_ns}".encode("utf-8", "surrogateescape") if stat else b" -"
            )
        return int.from_bytes(state.digest(), "little")

    def _pictures(self, file: str) -> dict[str, os.DirEntry[str]]:
        """Return the pictures that a metadata file is for: all below its folder that no nearer one is for."""
        folder = posixpath.dirname(file)
        below = dict(walk(self.root, folder, deep=not self.info.flat))
        nearer = {posixpath.dirname(path) for path in below if path.rpartition("/")[2] in METADATA} - {folder}
        return {
            path: entry
            for path, entry in below.items()
            if is_media(path, self.info)
            and not is_left_out(self.info, path, by_file=False)
            and not any(path.startswith(f"{other}/") for other in nearer)
        }

    def check(self, path: str) -> str:
        rows = self._rows(path)
        columns = sorted({name for row in rows for name in row})
        for column in (NAME, self.info.caption_column):
            if column not in columns:
                available = ", ".join(map(str, columns)) or "none"
                raise DataFault(
                    f"{self.root / path}: no column {column!r} (data.caption_column). Columns found: {available}"
                )
        return ""

    def count(self, path: str, enough: int) -> int:
        return min(len(self._rows(path)), enough)

    def _rows(self, path: str) -> list[Row]:
        """Read a metadata file. Raises DataFault where it cannot be read, and names the line."""
        file = self.root / path
        if file.suffix == ".parquet":
            return _table(file)
        try:
            text = decode_text(read_regular(file, MAX_FILE_BYTES), "it")
        except OSError as error:
            raise DataFault(f"{file}: cannot be read ({error.strerror})") from None
        except BadCaption as error:
            raise DataFault(f"{file}: no text in UTF-8 ({error})") from None
        if file.suffix == ".csv":
            return [dict(row) for row in csv.DictReader(io.StringIO(text))]
        rows = []
        for number, line in enumerate(text_lines(text), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataFault(f"{file}, line {number}: no JSON ({error})") from None
            if not isinstance(row, dict):
                raise DataFault(f'{file}, line {number}: must be an object, {{"file_name": "image.jpg", ...}}')
            rows.append(row)
        return rows

    def items(self, file: FileRef) -> Iterator[SourceItem | BadItem]:
        folder, seen = posixpath.dirname(file.path), set()
        for number, row in enumerate(self._rows(file.path), 1):
            # the picture, which must lie below the root
            name = row.get(NAME)
            if not isinstance(name, str) or not name.strip() or not can_be_path(name):
                yield BadItem(f"row {number}", f"no image: row {number} of {file.path} has no {NAME}")
                continue
            inner = posixpath.normpath(posixpath.join(folder, name.replace("\\", "/")))
            if posixpath.isabs(inner) or inner.split("/")[0] == "..":
                yield BadItem(printable(name), f"outside its folder: {name}")
                continue
            if inner in seen:
                yield BadItem(printable(name), f"same image twice: another row of {file.path} lists it")
                continue
            seen.add(inner)
            if is_left_out(self.info, inner, by_file=False):
                continue

            # its captions
            try:
                size, opener = image_file(self.root / inner)
                captions = captions_of(
                    row.get(self.info.caption_column), f"row {number}", multi_line=self.info.multi_line
                )
            except OSError as error:
                exists = error.errno == errno.EINVAL
                reason = f"cannot be read: {error.strerror}" if exists else f"no image: {name} does not exist"
                yield BadItem(printable(name), reason)
                continue
            except BadCaption as error:
                yield BadItem(printable(name), str(error))
                continue
            lacking = f"no caption: row {number} of {file.path} holds none"
            yield SourceItem(
                printable(name), 0, 0, size, captions, opener, lacking, inner,
                key=key_path(printable(inner), None),
            )  # fmt: skip

        for path in sorted(self._pictures(file.path).keys() - seen):
            yield BadItem(printable(path), f"no caption: {file.path} does not list it")

    def read(self, media: MediaRef) -> bytes:
        return read_image(self.root / media.path)

    def open_media(self, media: MediaRef) -> Path:
        refuse_irregular(self.root / media.path)
        return self.root / media.path


def _table(file: Path) -> list[Row]:
    """Read a parquet file whole. Raises DataFault where it cannot be read."""
    import pyarrow
    from pyarrow import parquet

    try:
        refuse_irregular(file)
        rows: list[Row] = parquet.read_table(file).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataFault(f"{file}: cannot be read ({error})") from None
    return rows
