"""Addresses of features: what they were made of, hashed. Equal addresses mean equal features, whoever made them.

The parts are written as JSON, so that neither their order nor their neighbours can be confused; what differs from sample
to sample (the hash of the bytes, the tokens) comes last, so that all else is hashed once for many of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

BYTES = 16
VERSION = 1  # of the words that are hashed; raise it when their meaning changes
V16 = np.dtype("V16")


def media_state(cut: Sequence[Any], fingerprint: str, storage: str) -> hashlib.blake2b:
    """Return the hash of all but the bytes: update a copy with a content to get an address.

    cut: JSON values that say which pixels are made of the bytes: bucket, resized size, crop, flip, filter, decoder.
    """
    return _hash_state(b"difftrain.media", [VERSION, list(cut), fingerprint, storage])


def media_address(content: bytes, cut: Sequence[Any], fingerprint: str, storage: str) -> bytes:
    """Return the address of what an encoder makes of a picture or clip. content: see `content_of`."""
    state = media_state(cut, fingerprint, storage)
    state.update(content)
    return state.digest()


def text_address(tokens: Mapping[str, Any], fingerprint: str, storage: str) -> bytes:
    """Return the address of what an encoder makes of one tokenised caption: ids, masks, weights, bit by bit."""
    return text_addresses({name: np.asarray(each)[None] for name, each in tokens.items()}, (), fingerprint, storage)[0]


def text_addresses(tokens: Mapping[str, Any], inputs: Sequence[str], fingerprint: str, storage: str) -> list[bytes]:
    """Return the addresses of several tokenised captions.

    tokens: arrays, or tensors on the host. inputs: those that decide the outcome, as far as they are there; none: all.
    Shapes: of tokens (B, ...).
    """
    names = sorted(name for name in tokens if name in inputs or not inputs)
    arrays = [np.ascontiguousarray(tokens[name]) for name in names]
    kinds = [[name, each.dtype.str, list(each.shape[1:])] for name, each in zip(names, arrays, strict=True)]
    state = _hash_state(b"difftrain.text", [VERSION, kinds, fingerprint, storage])
    found = []
    for pieces in zip(*([row.tobytes() for row in each] for each in arrays), strict=True):
        own = state.copy()
        for piece in pieces:
            own.update(piece)
        found.append(own.digest())
    return found


def joined_address(alone: Sequence[bytes]) -> bytes:
    """Return the address of what an encoder makes of several things together. alone: theirs, each by that encoder."""
    return hashlib.blake2b(b"".join(alone), digest_size=BYTES, person=b"difftrain.joined").digest()


def as_array(addresses: Sequence[bytes]) -> np.ndarray:
    """Return addresses as an array. Shape: (N,) V16."""
    return np.frombuffer(b"".join(addresses), dtype=V16)


def _hash_state(person: bytes, words: Any) -> hashlib.blake2b:
    text = json.dumps(words, separators=(",", ":"), allow_nan=False).encode()
    state = hashlib.blake2b(digest_size=BYTES, person=person)
    state.update(len(text).to_bytes(8, "little") + text)
    return state
