"""How cached features lie in bytes: headers, journal rows and payloads. Little-endian, checksums are crc32c.

A segment is two files that begin with the same header: payloads one behind another, each aligned to 64 bytes (.bin), and
a journal of fixed rows that say where they lie (.idx). A row counts once its own checksum is right, and it is written
after its payload is durable: a journal that was cut anywhere still tells the truth about what stands before the cut.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

FORMAT = 1  # of everything in this file; raise it when the meaning of a byte changes
ALIGN = 64
ADDRESS_BYTES = 16  # blake2b of 128 bits
ADDRESS = np.dtype("V16")
ROW = np.dtype(
    [
        ("address", "V16"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("crc", "<u4"),  # of the payload
        ("kind", "<u4"),
        ("spare", "<u4"),
        ("row_crc", "<u4"),  # of the 44 bytes before it
    ]
)
FEATURES, REJECT = 0, 1  # kinds of entries: what an encoder made, or why it could make nothing
MOST_AXES = 6
HEADER_START = 32  # bytes that tell the size of a header

_ROW_BODY = ROW.itemsize - 4
_MAGIC = b"difftrain cache\n"
_HEAD = struct.Struct("<16sIIII")  # magic, format, size of the block, length of the words in it, crc of the words
_PAYLOAD = struct.Struct("<4sHHII")  # magic, features, spare, bytes until the meta, bytes of the meta
_PAYLOAD_MAGIC = b"ftr1"
_FEATURE = struct.Struct("<HHIQQQ6I")  # bytes of its names, axes, rows, place and size of data, place of scales, shape


class Damaged(Exception):
    """Say what is wrong with bytes of the cache."""


class OtherFormat(Damaged):
    """Say which format bytes are of."""


def crc32c(buffer: Any, crc: int = 0) -> int:
    """Return the checksum of contiguous bytes, or go on from that of the bytes before them."""
    if isinstance(buffer, memoryview | bytearray):  # which are not taken
        buffer = np.asarray(memoryview(buffer))
    value: int = google_crc32c.extend(crc, buffer)
    return value


# --- headers ---


def header_block(facts: Mapping[str, Any]) -> bytes:
    """Return the block that begins both files of a segment; its size is a multiple of the alignment."""
    words = json.dumps({"format": FORMAT, **facts}, sort_keys=True).encode()
    size = _aligned(_HEAD.size + len(words))
    return (_HEAD.pack(_MAGIC, FORMAT, size, len(words), crc32c(words)) + words).ljust(size, b"\0")


def header_size(start: Any) -> int:
    """Return how many bytes a header block takes. start: its first 32 bytes at least. Raises Damaged."""
    return _header(start)[0]


def read_header(buffer: Any) -> tuple[dict[str, Any], int]:
    """Return facts and size of the header block that begins a buffer. Raises Damaged, OtherFormat."""
    size, length, crc = _header(buffer)
    words = bytes(memoryview(buffer)[_HEAD.size : _HEAD.size + length])
    if len(words) != length or len(buffer) < size or crc32c(words) != crc:
        raise Damaged("its header is incomplete")
    facts: dict[str, Any] = json.loads(words)
    return facts, size


def _header(start: Any) -> tuple[int, int, int]:
    if len(start) < _HEAD.size:
        raise Damaged(f"it has {len(start)} bytes, which is less than a header")
    magic, version, size, length, crc = _HEAD.unpack_from(start)
    if magic != _MAGIC:
        raise Damaged("it is not a cache file: its first bytes differ")
    if version != FORMAT:
        raise OtherFormat(f"it is of format {version}, this version reads format {FORMAT}")
    if size % ALIGN or size < _HEAD.size + length:
        raise Damaged("its header is incomplete")
    return size, length, crc


# --- journal rows ---


@cache
def _row_tables() -> np.ndarray:
    """Return what each value of each byte of a row adds to its checksum, which is linear. Shapes: (44, 256) uint32."""
    nothing = crc32c(bytes(_ROW_BODY))
    tables = np.empty((_ROW_BODY, 256), np.uint32)
    for byte in range(_ROW_BODY):
        for value in range(256):
            tables[byte, value] = crc32c(bytes(byte) + bytes([value]) + bytes(_ROW_BODY - byte - 1)) ^ nothing
    return tables


def row_crcs(rows: np.ndarray) -> np.ndarray:
    """Return the checksum of each row. Shapes: rows (N,) ROW, result (N,) uint32."""
    body = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), ROW.itemsize)
    crcs = np.full(len(rows), crc32c(bytes(_ROW_BODY)), np.uint32)
    for byte, table in enumerate(_row_tables()):
        crcs ^= table[body[:, byte]]
    return crcs


def whole_rows(buffer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows in a buffer, and which of them are right. A rest that is shorter than a row is left out."""
    rows = np.frombuffer(buffer, ROW, count=len(buffer) // ROW.itemsize)
    return rows, rows["row_crc"] == row_crcs(rows)


# --- payloads ---


@dataclass(frozen=True)
class StoredFeature:
    """One feature of an entry as bytes.

    Shapes: data is flat uint8; shape is that of the whole feature, of which the first `rows` along the first axis are
    stored, the others are zeros; scales (rows,) float32, of a vector (1,): a value is what is stored times
    the scale of its row.
    """

    name: str
    dtype: str  # "float32", "bfloat16", "float16", "float8_e4m3fn", "uint8"
    shape: tuple[int, ...]
    rows: int
    data: np.ndarray
    scales: np.ndarray | None = None
    codec: str = ""  # or "zlib"


class FeatureSpan(NamedTuple):
    """Where data and scales of a feature lie in a payload; the scales are there where scales is not 0."""

    name: str
    dtype: str
    codec: str
    shape: tuple[int, ...]
    rows: int
    start: int
    stop: int
    scales: int
    scales_stop: int


@dataclass(frozen=True)
class PackedEntry:
    """What is appended to a segment: an address, and the pieces of its payload."""

    address: bytes
    pieces: Sequence[Any]
    kind: int = FEATURES


def pack(features: Sequence[StoredFeature], meta: Mapping[str, Any]) -> list[bytes | np.ndarray]:
    """Return the pieces of one payload. meta: few facts, such as the name of the record."""
    names = [f"{feature.name}\0{feature.dtype}\0{feature.codec}".encode() for feature in features]
    words = json.dumps(meta).encode()
    until_meta = _PAYLOAD.size + len(features) * _FEATURE.size + sum(map(len, names))
    offset = _aligned(until_meta + len(words))
    head = [_PAYLOAD.pack(_PAYLOAD_MAGIC, len(features), 0, until_meta, len(words))]
    pieces: list[bytes | np.ndarray] = []
    for feature, name in zip(features, names):
        if len(feature.shape) > MOST_AXES:
            raise ValueError(f"{feature.name} has {len(feature.shape)} axes, the cache stores at most {MOST_AXES}")
        data, scales = offset, 0
        offset = _padded(pieces, offset, feature.data)
        if feature.scales is not None:
            scales = offset
            offset = _padded(pieces, offset, np.ascontiguousarray(feature.scales, dtype="<f4").view(np.uint8))
        shape = (*feature.shape, *[0] * (MOST_AXES - len(feature.shape)))
        sizes = len(name), len(feature.shape), feature.rows, data, feature.data.nbytes, scales
        head.append(_FEATURE.pack(*sizes, *shape))
    start = b"".join([*head, *names, words])
    return [start.ljust(_aligned(len(start)), b"\0"), *pieces]


def unpack(payload: np.ndarray) -> list[StoredFeature]:
    """Return the features of a payload (uint8) as views of it. Raises Damaged."""
    features = []
    for name, dtype, codec, shape, rows, start, stop, scales, scales_end in _features(_payload_table(payload)):
        scale = payload[scales:scales_end].view("<f4") if scales else None
        features.append(StoredFeature(name, dtype, shape, rows, payload[start:stop], scale, codec))
    return features


def feature_spans(head: bytes) -> tuple[FeatureSpan, ...]:
    """Return where features lie in a payload that begins so, to the end of its table at least. Raises Damaged."""
    return _features(head[_PAYLOAD.size : table_end(head)])


TABLE_AT = _PAYLOAD.size  # where the table of features begins in a payload


def table_end(head: Any) -> int:
    """Return where the table of features ends in a payload that begins so. Raises Damaged."""
    if len(head) < _PAYLOAD.size:
        raise Damaged(f"a payload of {len(head)} bytes holds no features")
    magic, _, _, end, _ = _PAYLOAD.unpack_from(head)
    if magic != _PAYLOAD_MAGIC:
        raise Damaged("a payload does not begin with the header of features")
    return int(end)


def meta_of(payload: np.ndarray) -> dict[str, Any]:
    """Return the facts that were packed with the features of a payload. Raises Damaged."""
    _, _, _, start, length = _PAYLOAD.unpack_from(payload.data)
    _payload_table(payload)
    meta: dict[str, Any] = json.loads(bytes(payload[start : start + length]))
    return meta


def reject(address: bytes, name: str, reason: str) -> PackedEntry:
    """Return the entry that says why nothing can be made of something."""
    return PackedEntry(address, [json.dumps({"name": name, "reason": reason}).encode()], REJECT)


def rejected(payload: Any) -> tuple[str, str]:
    """Return name and reason of a rejected entry."""
    facts = json.loads(bytes(payload))
    return facts["name"], facts["reason"]


def _payload_table(payload: np.ndarray) -> bytes:
    """Return the table of a payload's features: equal for all whose features have the same shapes. Raises Damaged."""
    return payload[_PAYLOAD.size : table_end(payload)].tobytes()


@lru_cache(maxsize=1024)
def _features(start: bytes) -> tuple[FeatureSpan, ...]:
    numbers: list[tuple[int, ...]] = []
    size = 0
    while len(numbers) * _FEATURE.size + size < len(start):
        numbers.append(_FEATURE.unpack_from(start, len(numbers) * _FEATURE.size))
        size += numbers[-1][0]
    offset = len(numbers) * _FEATURE.size
    features = []
    for length, axes, rows, data, data_size, scales, *shape in numbers:
        name, dtype, codec = start[offset : offset + length].decode().split("\0")
        offset += length
        count = (rows if axes > 1 else 1) if scales else 0  # a vector has one scale
        place_of = (rows, data, data + data_size, scales, scales + 4 * count)
        features.append(FeatureSpan(name, dtype, codec, tuple(shape[:axes]), *place_of))
    return tuple(features)


def _padded(pieces: list[bytes | np.ndarray], offset: int, data: np.ndarray) -> int:
    """Add data and what fills it up to the alignment; return the place behind it."""
    end = offset + data.nbytes
    pieces.append(data)
    if fill := _aligned(end) - end:
        pieces.append(bytes(fill))
    return end + fill


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
