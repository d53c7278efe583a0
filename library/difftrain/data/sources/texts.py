"""Captions from files: UTF-8 or refused, never guessed."""

from __future__ import annotations

import json
from typing import Any


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
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def one_line(text: str) -> str:
    """Return the whole text on one line: what a text member of a tar means."""
    return " ".join(text.split())


def all_lines(text: str) -> str:
    """Return the lines that are not blank: with --enable_wildcard one of them is drawn at every use."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


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
    return tuple(text for text in texts if text)


def caption_of_json(data: bytes, where: str, *, multi_line: bool = False) -> tuple[str, ...]:
    """Read the `caption` of a sidecar as img2dataset writes it.

    Raises: BadCaption where it is not UTF-8 or not JSON.
    """
    try:
        parsed = json.loads(decode_text(data, where))
    except (ValueError, RecursionError) as error:
        raise BadCaption(f"broken sidecar: {where} is not JSON ({error})") from None
    return captions_of(parsed.get("caption"), where, multi_line=multi_line) if isinstance(parsed, dict) else ()
