"""Keys: every random choice is a function of an unambiguous hash of what it is for."""

from __future__ import annotations

import hashlib
import operator

# Part of every key. Raise it when any mapping from key to value changes: runs of different versions never mix.
STREAM_VERSION = 1

_PERSON = b"difftrain.draws"  # blake2b's personalisation, at most 16 bytes


def _encode(part: bytes | str | int) -> bytes:
    """Encode one part with its type and length, so that ("ab", "c") and ("a", "bc"), 1 and "1" differ."""
    if isinstance(part, bytes):
        tag, body = b"b", part
    elif isinstance(part, str):
        tag, body = b"s", part.encode()
    else:
        tag, body = b"i", b"%d" % operator.index(part)
    return b"%s%d:%s" % (tag, len(body), body)


def key_of(*parts: bytes | str | int, size: int = 16) -> bytes:
    """Hash parts (and the stream version) to `size` bytes, the same on every machine and in every release."""
    text = b"".join(map(_encode, (STREAM_VERSION, *parts)))
    return hashlib.blake2b(text, digest_size=size, person=_PERSON).digest()


def words_of(*parts: bytes | str | int, count: int = 8) -> list[int]:
    """Hash parts to `count` (at most 8) unsigned 64-bit words."""
    digest = key_of(*parts, size=8 * count)
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(count)]


def module_seed(seed: int, step: int, micro: int, dp_rank: int = 0) -> int:
    """Return the seed of dropout inside modules for one micro batch: in [0, 2^63), resumable, unlike on other splits."""
    return words_of("module", seed, step, micro, dp_rank, count=1)[0] >> 1
