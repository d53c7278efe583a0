"""Captions beside pictures: texts of one picture, and files that caption many."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from difftrain.contracts import DataFault
from difftrain.data.sources.base import SourceInfo
from difftrain.io.files import read_regular, text_lines

MAX_FILE_BYTES = 1 << 32  # of one file that captions many images


class BadCaption(Exception):
    """Say why a caption cannot be used; the text starts with the kind, as every reason does."""


def decode_text(data: bytes, where: str) -> str:
    """Decode UTF-8, with or without a byte order mark.

    Raises: BadCaption that names the byte and its position.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise BadCaption(f"caption not UTF-8: byte 0x{byte:02x} at position {error.start} of {where}") from None


def first_line(text: str) -> str:
    """Return the first line that is not blank: what kohya takes of a caption file."""
    return next((line.strip() for line in text_lines(text) if line.strip()), "")


def one_line(text: str) -> str:
    """Return the whole text on one line: what a text member of a tar means."""
    return " ".join(text.split())


def all_lines(text: str) -> str:
    """Return the lines that are not blank: with --enable_wildcard one of them is drawn at every use."""
    return "\n".join(line.strip() for line in text_lines(text) if line.strip())


def captions_of(value: Any, where: str, *, multi_line: bool = False) -> tuple[str, ...]:
    """Take captions out of a JSON or parquet value: a string, or a list of which one is drawn each time.

    multi_line: keep the lines of a text apart. Raises: BadCaption for anything else.
    """
    if value is None:
        return ()
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(entry, (str, bytes)) for entry in values):
        kinds = ", ".join(sorted({type(entry).__name__ for entry in values}))
        raise BadCaption(f"caption not text: {where} holds {kinds}")
    shaped = all_lines if multi_line else one_line
    texts = [shaped(decode_text(entry, where) if isinstance(entry, bytes) else entry) for entry in values]
    return tuple(sound(text, where) for text in texts if text)


def sound(text: str, where: str) -> str:
    """Return a text that can be written down. Raises BadCaption for half of a surrogate pair, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise BadCaption(
            f"caption not text: half of a surrogate pair, {half}, at position {error.start} of {where}"
        ) from None
    return text


def caption_of_json(data: bytes, where: str, *, multi_line: bool = False) -> tuple[str, ...]:
    """Read the `caption` of a sidecar as img2dataset writes it.

    Raises: BadCaption where it is not UTF-8 or not JSON.
    """
    try:
        parsed = json.loads(decode_text(data, where))
    except (ValueError, RecursionError) as error:
        raise BadCaption(f"broken sidecar: {where} is not JSON ({error})") from None
    return captions_of(parsed.get("caption"), where, multi_line=multi_line) if isinstance(parsed, dict) else ()


def digest_of(info: SourceInfo) -> str:
    """Return what changes with the file, or "" where a source has none."""
    if not info.captions_file:
        return ""
    return hashlib.blake2b(_bytes(_path(info)), digest_size=8).hexdigest()


def names_in(info: SourceInfo) -> set[str]:
    """Return the names that the file of a source has captions for. Raises DataFault where it cannot be read."""
    return set(_entries(info))


def blanks_in(info: SourceInfo) -> int:
    """Return how many empty captions stand in lists beside others: no use draws one."""
    lists = [value for value in _entries(info).values() if isinstance(value, list)]
    blank = [sum(isinstance(caption, str) and not caption.strip() for caption in value) for value in lists]
    return sum(count for count, value in zip(blank, lists, strict=True) if count < len(value))


def named_by(names: set[str], path: str) -> str | None:
    """Return the name that a picture goes by: its path in the source, else its bare name; None where neither is there."""
    return next((name for name in (path, path.rpartition("/")[2]) if name in names), None)


def captions_in(info: SourceInfo, name: str) -> tuple[str, ...]:
    """Return the captions of a picture: by its path in the source, else by its bare name. Raises BadCaption."""
    entries = _entries(info)
    value = entries.get(name, entries.get(name.rpartition("/")[2]))
    return captions_of(value, f"{info.captions_file}, {name!r},", multi_line=info.multi_line)


def lacking(info: SourceInfo, name: str) -> str:
    """Say why a picture has no caption."""
    bare = name.rpartition("/")[2]
    present = bool(_entries(info).keys() & {name, bare})
    what = (
        f"{info.captions_file} has an empty caption for {bare!r}"
        if present
        else f"{info.captions_file} has no caption for {bare!r}"
    )
    return f"{'empty' if present else 'no'} caption: {what}"


def _path(info: SourceInfo) -> Path:
    return Path(info.root) / info.captions_file


def _bytes(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise DataFault(f"{path}: cannot be read ({error.strerror})") from None


def _entries(info: SourceInfo) -> dict[str, Any]:
    path = _path(info)
    try:
        stat = path.stat()
    except OSError as error:
        raise DataFault(f"{path}: cannot be read ({error.strerror})") from None
    return _parsed(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _parsed(path: Path, size: int, mtime_ns: int) -> dict[str, Any]:
    """Read a file once a process, as long as it stays as it is."""
    try:
        entries = json.loads(decode_text(_bytes(path), "it"))
    except (ValueError, RecursionError, BadCaption) as error:
        raise DataFault(f"{path}: no JSON in UTF-8 ({error})") from None
    if not isinstance(entries, dict):
        raise DataFault(f'{path}: must be an object, {{"image.jpg": ["caption", ...]}}')
    return entries
