"""Parquet files that hold pictures as bytes (Hugging Face's `image` struct or plain binary) or as paths."""

from __future__ import annotations

import errno
import io
import os
import posixpath
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
from pyarrow import parquet

from difftrain.contracts import DataFault, MediaRef
from difftrain.data.sources.base import (
    BadItem,
    ControlImage,
    DataSource,
    FileRef,
    FramesRef,
    ListedFile,
    SourceInfo,
    SourceItem,
    can_be_path,
    image_file,
    read_image,
)
from difftrain.data.sources.captions import BadCaption, captions_of
from difftrain.data.sources.tar import list_shards
from difftrain.io.files import refuse_irregular

IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "picture", "photo", "image_bytes", "bytes")
PATH_COLUMNS = ("image_path", "file_name", "filename", "image_file", "filepath", "file_path", "path")
VIDEO_COLUMNS = ("video", "clip", "mp4", "webm", "video_bytes", "video_path")  # looked for first, where videos are read
CAPTION_COLUMNS = ("caption", "text", "txt", "prompt", "description", "captions", "texts", "prompts", "sentence")
_REFERENCE_COLUMNS = (
    "control", "control_image", "reference", "reference_image", "source_image", "input_image", "original_image",
    "conditioning_image",
)  # fmt: skip
_LARGE_GROUP_MIB = 64
_CACHED_GROUPS = 4  # row groups of pictures kept in memory by each process


class ParquetSource(DataSource):
    """Every *.parquet below the root, or one of them. A picture is found by its row."""

    def __init__(self, info: SourceInfo) -> None:
        super().__init__(info)
        self._lock = threading.Lock()
        self._groups: OrderedDict[tuple[str, int, int], Any] = OrderedDict()
        self._pid = os.getpid()

    def listing(self) -> Iterator[ListedFile]:
        yield from list_shards(self, ".parquet")

    def count(self, path: str, enough: int) -> int:
        try:
            refuse_irregular(self.root / path)
            return int(parquet.read_metadata(self.root / path).num_rows)
        except pyarrow.ArrowException as error:
            raise OSError(errno.EIO, str(error), path) from None

    def check(self, path: str) -> str:
        try:
            refuse_irregular(self.root / path)
            file = parquet.ParquetFile(self.root / path)
        except (pyarrow.ArrowException, OSError):
            return ""  # a damaged file is listed when it is read
        image, _ = self._columns(file, path)
        self._control_columns(file, path)
        largest = max((file.metadata.row_group(g).total_byte_size for g in range(file.num_row_groups)), default=0) >> 20
        if largest <= _LARGE_GROUP_MIB or _is_text(file.schema_arrow.field(image).type):
            return ""
        return (
            f"{path}: row groups of {largest} MiB; every random access reads a whole group. "
            "Written with row_group_size=100 this file would be read many times faster."
        )

    def items(self, file: FileRef) -> Iterator[SourceItem | BadItem]:
        try:
            refuse_irregular(self.root / file.path)
            opened = parquet.ParquetFile(self.root / file.path)
            image, caption = self._columns(opened, file.path)
            control = self._control_columns(opened, file.path)
            row = 0
            for group in range(opened.num_row_groups):
                table = opened.read_row_group(group, columns=sorted({image, caption, *control}), use_threads=False)
                pairs = zip(*(table.column(name) for name in (image, caption, *control)), strict=True)
                for picture, text, *references in pairs:
                    try:
                        item = self._item(file.path, row, picture.as_py(), text)
                        if isinstance(item, SourceItem) and control:
                            item = self._with_references(item, file.path, row, [one.as_py() for one in references])
                    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # a type of its own kind
                        item = BadItem(str(row), f"no image: the row cannot be read: {' '.join(str(error).split())}")
                    yield item
                    row += 1
        except pyarrow.ArrowException as error:
            yield BadItem(None, f"damaged shard: {' '.join(str(error).split())}")

    def _item(self, file: str, row: int, picture: Any, text: Any) -> SourceItem | BadItem:
        member = str(row)
        try:
            captions = captions_of(text.as_py(), f"row {row}", multi_line=self.info.multi_line)
        except BadCaption as error:
            return BadItem(member, str(error))
        except UnicodeDecodeError as error:
            return BadItem(
                member, f"caption not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start}"
            )
        data, path = _bytes_and_path(picture)
        lacking = f"no caption: row {row} holds none"
        if data:
            return SourceItem(member, row, -1, len(data), captions, _opener(data), lacking)
        if data is not None:
            return BadItem(member, "empty: 0 bytes")
        if not path:
            return BadItem(member, "no image: the row holds neither bytes nor a path")
        return self._file_item(file, member, path, captions, lacking)

    def _file_item(
        self, file: str, member: str, path: str, captions: tuple[str, ...], lacking: str
    ) -> SourceItem | BadItem:
        """Make the item of a row that names a file, relative to the parquet file's own folder."""
        inner_path = posixpath.normpath(posixpath.join(posixpath.dirname(file), path.replace("\\", "/")))
        if posixpath.isabs(inner_path) or inner_path.split("/")[0] == "..":
            return BadItem(member, f"outside its folder: {path}")
        if not can_be_path(inner_path):
            return BadItem(member, f"no image: {path!r} is not a file name")
        try:
            size, opener = image_file(self.root / inner_path)
        except OSError as error:
            exists = error.errno == errno.EINVAL
            return BadItem(
                member, f"cannot be read: {error.strerror}" if exists else f"no image: {path} does not exist"
            )
        return SourceItem(member, 0, 0, size, captions, opener, lacking, path=inner_path)

    def _with_references(self, item: SourceItem, file: str, row: int, values: list[Any]) -> SourceItem | BadItem:
        """Add the reference images of a row: bytes in their columns, or paths of files."""
        references: list[ControlImage] = []
        for number, value in enumerate(values):
            data, path = _bytes_and_path(value)
            if data:
                opener = _opener(data)
                references.append(ControlImage(file, row, -2 - number, len(data), opener, f"{number + 1} of row {row}"))
            elif path:
                other = self._file_item(file, str(row), path, (), "")
                if isinstance(other, BadItem):
                    return BadItem(other.member, f"no reference: {other.reason}")
                references.append(ControlImage(str(other.path), 0, 0, other.size, other.open, path))
            else:
                return BadItem(str(row), f"no reference: row {row} holds none in column {number + 1} of references")
        return replace(item, control=tuple(references))

    def open_media(self, media: MediaRef) -> BinaryIO | Path | FramesRef:
        if media.length >= 0:
            refuse_irregular(self.root / media.path)
            return self.root / media.path
        return super().open_media(media)

    def read(self, media: MediaRef) -> bytes:
        if media.length >= 0:
            return read_image(self.root / media.path)
        path = str(self.root / media.path)
        try:
            starts = _group_starts(path, Path(path).stat().st_mtime_ns)
            group = bisect_right(starts, media.offset) - 1
            column = self._group(path, group, -1 - media.length)
            data, _ = _bytes_and_path(column[media.offset - starts[group]].as_py())
        except (pyarrow.ArrowException, IndexError, ValueError, TypeError) as error:
            raise OSError(errno.EIO, f"row {media.offset} cannot be read: {error}", path) from None
        return data or b""

    def _group(self, path: str, group: int, number: int) -> Any:
        """Return a column of a row group, 0 of the pictures, then of references; the last few stay in memory."""
        with self._lock:
            if self._pid != os.getpid():
                self._groups.clear()
                self._pid = os.getpid()
            column = self._groups.pop((path, group, number), None)
            if column is None:
                file = parquet.ParquetFile(path)
                image, _ = self._columns(file, path)
                name = self._control_columns(file, path)[number - 1] if number else image
                column = file.read_row_group(group, columns=[name], use_threads=False).column(name)
            self._groups[path, group, number] = column
            while len(self._groups) > _CACHED_GROUPS:
                self._groups.popitem(last=False)
            return column

    def _columns(self, file: Any, path: str) -> tuple[str, str]:
        """Choose the picture and caption columns.

        Raises: DataFault that names the columns found.
        """
        schema = file.schema_arrow
        names = (*(VIDEO_COLUMNS if self.info.clips else ()), *IMAGE_COLUMNS, *PATH_COLUMNS)
        image = _choose(schema, self.info.image_column, names, _can_be_picture)
        caption = _choose(schema, self.info.caption_column, CAPTION_COLUMNS, _can_be_caption)
        missing = []
        if image is None:
            missing.append(_missing("pictures", self.info.image_column, "data.image_column", names))
        if caption is None:
            missing.append(_missing("captions", self.info.caption_column, "data.caption_column", CAPTION_COLUMNS))
        if image is None or caption is None:
            columns = ", ".join(f"{field.name} ({field.type})" for field in schema) or "none"
            raise DataFault(f"{self.root / path}: {'; '.join(missing)}. Columns found: {columns}")
        return image, caption

    def _control_columns(self, file: Any, path: str) -> tuple[str, ...]:
        """Choose the columns of reference images, as many as are wanted; none where they lie elsewhere.

        Raises: DataFault that names the columns found.
        """
        number, schema = self.info.num_control, file.schema_arrow
        if not number or self.info.control:
            return ()
        chosen = self.info.control_columns or _reference_columns(schema)
        unfit = [name for name in chosen if name not in schema.names or not _can_be_picture(schema.field(name).type)]
        if unfit or len(chosen) != number:
            columns = ", ".join(f"{field.name} ({field.type})" for field in schema) or "none"
            what = f"no usable column {unfit[0]!r}" if unfit else f"{len(chosen)} columns for {number}"
            raise DataFault(
                f"{self.root / path}: {what} of references (data.num_control = {number}; data.control_columns names "
                f"them, else they are {', '.join(_REFERENCE_COLUMNS)}, or numbered). Columns found: {columns}"
            )
        return chosen


def _reference_columns(schema: Any) -> tuple[str, ...]:
    """Return the columns of references by their names: one that is called so, and numbered ones of the same name."""
    lower = {name.lower(): name for name in reversed(schema.names)}
    for name in _REFERENCE_COLUMNS:
        numbered = [lower[f"{name}_{n}"] for n in range(10) if f"{name}_{n}" in lower]
        own = [lower[name]] if name in lower else []
        if own or numbered:
            return (*own, *numbered)
    return ()


def _choose(schema: Any, column: str, names: tuple[str, ...], fits: Callable[[Any], bool]) -> str | None:
    if column:
        return column if column in schema.names and fits(schema.field(column).type) else None
    lower = {name.lower(): name for name in reversed(schema.names)}
    return next((lower[name] for name in names if name in lower and fits(schema.field(lower[name]).type)), None)


def _missing(what: str, column: str, key: str, names: tuple[str, ...]) -> str:
    if column:
        return f"no usable column {column!r} for {what} ({key})"
    return f"no column for {what} (looked for {', '.join(names)}; name yours with {key})"


def _can_be_picture(kind: Any) -> bool:
    if pyarrow.types.is_struct(kind):
        return {kind.field(i).name for i in range(kind.num_fields)} & {"bytes", "path"} != set()
    return _is_binary(kind) or _is_text(kind)


def _can_be_caption(kind: Any) -> bool:
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        kind = kind.value_type
    return _is_text(kind) or _is_binary(kind)


def _is_binary(kind: Any) -> bool:
    return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))


def _is_text(kind: Any) -> bool:
    return bool(pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind))


def _bytes_and_path(value: Any) -> tuple[bytes | None, str]:
    data, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
    if isinstance(value, str):
        data, path = None, value
    if not isinstance(data, bytes | None) or not isinstance(path, str | None):
        raise TypeError(f"bytes are {type(data).__name__}, the path is {type(path).__name__}")
    return data, path or ""


def _opener(data: bytes) -> Callable[[], BinaryIO]:
    return lambda: io.BytesIO(data)


@lru_cache(maxsize=4096)
def _group_starts(path: str, mtime_ns: int) -> list[int]:
    """Return the first row of each row group. mtime_ns: of the file, so that a changed one is looked at again."""
    metadata = parquet.read_metadata(Path(path))
    starts, at = [], 0
    for group in range(metadata.num_row_groups):
        starts.append(at)
        at += metadata.row_group(group).num_rows
    return starts
