"""Read a SentencePiece model file (spiece.model) without SentencePiece: pieces, scores, and its table of characters.

The file is a protocol buffer, ModelProto of sentencepiece_model.proto: field 1 is a piece (1 text, 2 score as fp32, 3
kind), field 2 how it was trained (3 kind of model), field 3 how texts are normalised (2 compiled table of characters).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

UNIGRAM, UNKNOWN = 1, 2  # kind of model; kind of piece


@dataclass(frozen=True)
class PieceFile:
    """The content of a Unigram model: pieces in the order of their ids. characters: empty where texts stay as they are."""

    pieces: tuple[tuple[str, float], ...]
    unknown: int
    characters: bytes


def read_pieces(content: bytes) -> PieceFile:
    """Read a file's content. Raises ValueError where it is none, or is no Unigram model."""
    pieces: list[tuple[str, float]] = []
    unknown, model, characters = 0, UNIGRAM, b""
    for number, value in _fields(content):
        if number == 1:
            piece = dict(_fields(_bytes(value)))
            if piece.get(3, 1) == UNKNOWN:
                unknown = len(pieces)
            pieces.append((_bytes(piece[1]).decode("utf-8"), _score(piece.get(2))))
        elif number == 2:
            model = dict(_fields(_bytes(value))).get(3, UNIGRAM)
        elif number == 3:
            characters = _bytes(dict(_fields(_bytes(value))).get(2, b""))
    if not pieces:
        raise ValueError("holds no pieces")
    if model != UNIGRAM:
        raise ValueError("is no Unigram model")
    return PieceFile(tuple(pieces), unknown, characters)


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a message: whole numbers, or bytes of texts, messages and numbers of fixed width."""
    place = 0
    while place < len(content):
        tag, place = _whole(content, place)
        kind = tag & 7
        if kind == 0:
            value: Any
            value, place = _whole(content, place)
        else:
            if kind == 2:
                size, place = _whole(content, place)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
            else:
                raise ValueError("is no protocol buffer")
            value, place = content[place : place + size], place + size
            if place > len(content):
                raise ValueError("ends too early")
        yield tag >> 3, value


def _whole(content: bytes, place: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        if place >= len(content) or shift > 63:
            raise ValueError("ends too early")
        byte = content[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("is no SentencePiece model")
    return value


def _score(value: Any) -> float:
    return float(struct.unpack("<f", value)[0]) if value is not None else 0.0
