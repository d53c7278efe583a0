"""Where the members of a tar lie, from its headers alone: ustar, GNU and pax, read once and never unpacked.

The standard library's reader stops at the first fault; this one says what was whole before it, and what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from difftrain.data.sources.base import printable
from difftrain.io.files import open_regular

_BLOCK = 512
_NAME = slice(0, 100)
_SIZE = slice(124, 136)
_CHECKSUM = slice(148, 156)
_TYPE = slice(156, 157)
_MAGIC = slice(257, 263)
_PREFIX = slice(345, 500)
_REGULAR = (b"0", b"\0", b"7")
_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"5": "a folder",
    b"6": "a pipe",
}
_MAX_ZEROS = 1 << 24  # bytes looked through behind an end mark for another archive: tar itself pads to 10 KiB
_MAX_EXTENDED = 1 << 20  # a pax or long-name header of more than this is damage, not a name


class Member(NamedTuple):
    """One member. fault: why its bytes cannot be used, "" where they can; kind: "a file" or what else it is."""

    name: str
    offset: int
    size: int
    kind: str = "a file"
    fault: str = ""


class TarDamage(NamedTuple):
    """The archive cannot be followed any further."""

    reason: str


class _HeaderFault(Exception):
    pass


def read_members(path: Path) -> Iterator[Member | TarDamage]:
    """Iterate over the members of a tar in their order; a Damage, if any, comes last.

    Raises: OSError where the file cannot be read.
    """
    with open_regular(path) as file:
        end = os.fstat(file.fileno()).st_size
        at: int | None = 0
        try:
            while at is not None:  # archives may be written one behind another
                end_mark = yield from _members(file, at, end)
                at = None if end_mark is None else _behind(file, end_mark, end)
        except _HeaderFault as fault:
            yield TarDamage(f"damaged shard: {fault}")


def _behind(file: IO[bytes], at: int, end: int) -> int | None:
    """Return where the next archive begins behind an end mark; None where nothing but zeros follows.

    Raises: _HeaderFault where something else does, or zeros without an end.
    """
    file.seek(at)
    most = at + _MAX_ZEROS
    while chunk := file.read(1 << 16):
        if rest := chunk.lstrip(b"\0"):
            at += (len(chunk) - len(rest)) // _BLOCK * _BLOCK
            file.seek(at)
            block = file.read(_BLOCK)
            if len(block) < _BLOCK:
                raise _HeaderFault(f"{end - at} bytes behind its end mark are no tar; they are not read")
            _check(block, at)
            return at
        at += len(chunk)
        if at > most:
            raise _HeaderFault(f"more than {_MAX_ZEROS:,} zero bytes follow its end mark; what follows is not read")
    return None


def _members(file: IO[bytes], at: int, end: int) -> Generator[Member | TarDamage, None, int | None]:
    """Follow one archive from a byte on; return the byte behind its end mark, None where it has none."""
    overrides: dict[str, str] = {}  # of the next member
    defaults: dict[str, str] = {}  # of a pax global header
    last = "its start"
    while True:
        file.seek(min(at, end))  # a header may say any size
        block = file.read(min(_BLOCK, max(0, end - at)))  # what a kernel shows as a file may have no end, and no size

        # a block of zeros marks the end; a file that stops before it was cut off
        if len(block) < _BLOCK:
            what = "inside a header" if block else "without an end mark"
            yield TarDamage(f"truncated shard: the tar ends {what} after {printable(last)}; what followed is lost")
            return None
        if block.count(0) == _BLOCK:
            return at + _BLOCK

        # what kind of member follows, and how long it is
        _check(block, at)
        size = _number(block[_SIZE])
        kind = block[_TYPE]
        body = at + _BLOCK

        # headers that describe other members: long names and pax records
        if kind in (b"L", b"K", b"x", b"g", b"X"):
            value = _extended(file, body, size, end)
            if kind == b"L":
                overrides["path"] = value.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif kind == b"g":
                defaults |= _pax(value)
            elif kind in (b"x", b"X"):
                overrides |= _pax(value)
            at = body + _padded(size)
            continue

        # a member: what was said of it before it wins over its own header
        merged = defaults | overrides
        overrides = {}
        name = merged.get("path") or _name(block)
        size = _pax_size(merged["size"]) if "size" in merged else size
        if kind in _KINDS and kind != b"1":
            size = 0
        at = body + _padded(size)
        last = name
        yield _member(name, body, size, kind, merged, end)


def _member(name: str, body: int, size: int, kind: bytes, merged: dict[str, str], end: int) -> Member:
    what = "a file" if kind in _REGULAR else _KINDS.get(kind, f"of type {kind!r}")
    fault = ""
    if kind == b"S" or any(key.startswith("GNU.sparse") for key in merged):
        what, fault = "a sparse file", "not a plain file: the member is stored with holes"
    elif what != "a file":
        fault = f"not a plain file: the member is {what}"
    elif body + size > end:
        fault = f"truncated: the tar ends {body + size - end} bytes before the member does"
    return Member(name, body, size, what, fault)


def _check(block: bytes, at: int) -> None:
    """Raise _HeaderFault unless the checksum (of unsigned or, in old tars, signed bytes) is right."""
    remaining = block[:148] + block[156:]
    unsigned = sum(remaining) + 8 * 32
    try:
        stored = _number(block[_CHECKSUM])
    except _HeaderFault:
        stored = -1
    if stored != unsigned and stored != unsigned - 256 * sum(byte > 127 for byte in remaining):
        raise _HeaderFault(f"no tar header at byte {at}, where one should be; what follows is not read")


def _number(field: bytes) -> int:
    if field[0] in (0x80, 0xFF):  # GNU: binary, big-endian
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    text = field.split(b"\0", 1)[0].strip()
    try:
        return int(text, 8) if text else 0
    except ValueError:
        raise _HeaderFault(f"a header holds {text!r} where a number should be") from None


def _pax_size(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise _HeaderFault(f"a pax header holds {text[:20]!r} where a size should be")
    return int(text)


def _padded(size: int) -> int:
    if size < 0:
        raise _HeaderFault(f"a header gives a member {size} bytes")
    return -(-size // _BLOCK) * _BLOCK


def _name(block: bytes) -> str:
    name = block[_NAME].split(b"\0", 1)[0]
    if block[_MAGIC] == b"ustar\0":  # GNU tars use the prefix field for times
        prefix = block[_PREFIX].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return name.decode("utf-8", "surrogateescape")


def _extended(file: IO[bytes], body: int, size: int, end: int) -> bytes:
    if not 0 <= size <= _MAX_EXTENDED or body + size > end:
        raise _HeaderFault(f"a long-name header of {size} bytes at byte {body - _BLOCK}")
    return file.read(size)


def _pax(data: bytes) -> dict[str, str]:
    """Parse "<length> <keyword>=<value>\\n" records."""
    records = {}
    at = 0
    while at < len(data) and data[at : at + 1] != b"\0":
        number, _, _ = data[at : at + 20].partition(b" ")
        if not number.isdigit() or not int(number):
            raise _HeaderFault(f"a pax header holds {number!r} where a length should be")
        key, _, value = data[at + len(number) + 1 : at + int(number) - 1].partition(b"=")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        at += int(number)
    return records
