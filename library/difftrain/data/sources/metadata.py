"""kohya's metadata json: which pictures there are, with caption and tags, `{"name or path": {"caption": ..., "tags": ...}}`.

A .jsonl file names a picture a line. Pictures lie in a folder, or are named by whole paths. The file counts as one shard whose
items lie elsewhere.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

from difftrain.contracts import DataFault, MediaRef
from difftrain.data.sources.base import (
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    BadItem,
    DataSource,
    FileRef,
    ListedFile,
    SourceItem,
    image_file,
    is_media,
    printable,
    read_image,
)
from difftrain.data.sources.captions import MAX_FILE_BYTES, BadCaption, all_lines, decode_text, first_line, sound
from difftrain.io.files import read_regular, refuse_irregular

_ORDER = (".png", ".jpg", ".jpeg", ".webp", ".bmp")  # kohya's, where several pictures have the name
_SUFFIXES = (*_ORDER, *(s.upper() for s in _ORDER), *sorted(IMAGE_SUFFIXES.difference(_ORDER)))


class MetadataSource(DataSource):
    """One file; info.only is its path from the root, the folder of the pictures."""

    def listing(self) -> Iterator[ListedFile]:
        stat = (self.root / self.info.only).stat()
        yield ListedFile("media", self.info.only, stat.st_size, self._stamp(stat.st_mtime_ns))

    def _stamp(self, mtime_ns: int) -> int:
        """Return what changes with the file and with any picture: one that came, went or is another has to be seen."""
        state = hashlib.blake2b(f"{mtime_ns}".encode(), digest_size=7)
        for name in self._entries:
            try:
                path = self._find(name)
                seen = path.stat() if path else None
            except OSError:
                seen = None
            state.update(f" {seen.st_size} {seen.st_mtime_ns}".encode() if seen else b" none")
        return int.from_bytes(state.digest(), "little")

    @cached_property
    def _entries(self) -> dict[str, Any]:
        file = os.path.normpath(self.root / self.info.only)
        try:
            text = decode_text(read_regular(file, MAX_FILE_BYTES), "it")
            entries = _of_lines(text, file) if file.endswith(".jsonl") else json.loads(text)
        except OSError as error:
            raise DataFault(f"{file}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError, BadCaption) as error:
            raise DataFault(f"{file}: no JSON in UTF-8 ({error})") from None
        if not isinstance(entries, dict):
            raise DataFault(f'{file}: must be an object, {{"image": {{"caption": "..."}}}}, not {_word(entries)}')
        return entries

    def check(self, path: str) -> str:
        if not self._entries:
            raise DataFault(f"{os.path.normpath(self.root / path)}: does not name an image")
        return ""

    def count(self, path: str, enough: int) -> int:
        return min(len(self._entries), enough)

    def items(self, file: FileRef) -> Iterator[SourceItem | BadItem]:
        seen: dict[str, str] = {}
        for name, entry in self._entries.items():
            try:
                captions_path = self._find(name)
                size, opener = image_file(captions_path) if captions_path else (0, BytesIO)
            except OSError as error:
                yield BadItem(printable(name), f"cannot be read: {error.strerror}")
                continue
            if captions_path is None:
                yield BadItem(printable(name), f"no image: none of this path, and none of this name in {self.root}")
                continue

            # entries may call a picture by several names: it is taken once, for the first of them
            path = Path(os.path.relpath(captions_path, self.root)).as_posix()
            key = printable(name if path.startswith("../") else path)
            if key in seen:
                yield BadItem(printable(name), f"same image twice: {seen[key]!r} lists it too")
                continue
            seen[key] = name

            # the captions of its entry
            try:
                captions = self._captions(entry)
            except BadCaption as error:
                yield BadItem(printable(name), str(error))
                continue
            lacking = "no caption: it has neither caption nor tags"
            yield SourceItem(
                printable(name),
                0,
                0,
                size,
                captions,
                opener,
                lacking,
                path,
                key=key,
            )

    def _find(self, name: str) -> Path | None:
        """Find a picture by its path, below the root, whole or from where we are, or by its name without suffix."""
        here = self.root / name  # a whole path stays one
        by_path = (here, Path.cwd() / name) if is_media(name, self.info) else ()
        suffixes = (*_SUFFIXES, *sorted(VIDEO_SUFFIXES)) if self.info.frame_buckets else _SUFFIXES
        for path in (*by_path, *(here.with_name(here.name + suffix) for suffix in suffixes if here.name)):
            if _is_file(path):
                return path
        return None

    def _captions(self, entry: Any) -> tuple[str, ...]:
        """Put caption and tags together as kohya does. Raises BadCaption where they are no texts."""
        if not isinstance(entry, dict):
            raise BadCaption(f"caption not text: the entry is {_word(entry)}, not an object with caption and tags")
        caption, tags = entry.get("caption"), entry.get("tags")
        for field, value in (("caption", caption), ("tags", tags)):
            if value is not None and not isinstance(value, str):
                raise BadCaption(f"caption not text: {field} is {_word(value)}")
        text = combined(caption, tags, self.info.separator, multi_line=self.info.multi_line)
        return (sound(text, "the entry"),) if text else ()

    def read(self, media: MediaRef) -> bytes:
        return read_image(self.root / media.path)

    def open_media(self, media: MediaRef) -> Path:
        refuse_irregular(self.root / media.path)
        return self.root / media.path


def _of_lines(text: str, file: str) -> dict[str, Any]:
    """Read a picture a line, `{"image_path": ..., "caption": ..., "tags": ...}`. Raises ValueError, DataFault."""
    entries: dict[str, Any] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        entry = json.loads(line)
        name = entry.get("image_path") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise DataFault(f'{file}, line {number}: must be an object, {{"image_path": "...", "caption": "..."}}')
        entries[name] = entry
    return entries


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def combined(caption: str | None, tags: str | None, separator: str, *, multi_line: bool) -> str:
    """Return caption, separator and tags in a row. Of several lines the first counts, unless one is drawn at each use.

    Then every line gets the tags.
    """
    if not caption:
        caption, tags = tags or "", None
    if not multi_line:
        return first_line(f"{caption}{separator}{tags}" if tags else caption)
    if tags:
        ending = separator + tags.replace("\n", separator)
        caption = "\n".join(line + ending for line in caption.split("\n") if line.strip())
    return all_lines(caption)


def _word(value: Any) -> str:
    words = {list: "a list", dict: "an object", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")
