"""Counter-based draws: each a function of (stream version, seed, record key, occurrence, purpose), made on the host.

torch.randn differs between CPU kernels and devices, and numpy promises stable Philox *bits* but not stable normals.
So: Philox bits, and a fixed mapping of them by IEEE-exact operations. The same record draws the same noise on every
device, rank, worker count and restart.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import statistics
from collections.abc import MutableSequence, Sequence
from typing import TypeVar

import numpy as np

from difftrain.contracts import NoiseMix

__all__ = ["STREAM_VERSION", "Stream", "choice", "integer", "key_of", "normal", "uniform"]

_BINS = 1 << 16
_GRID = 1 << 20  # table entries are multiples of 2^-20: exact in fp32, and so is the sum of two of them
_TABLE_SHA256 = "25aeee68ac62b72ab71f3f459454303ed0e46452ea5dbb32ef84ae75809e995e"
_CHUNK = 1 << 15  # normals a piece: index and value buffers stay in the second-level cache

T = TypeVar("T")


@functools.cache
def _table() -> np.ndarray:
    """Build the quantiles of N(0, 1/2) at the middles of 65536 equal bins, scaled to variance 1/2 exactly.

    Rounding to a fixed-point grid hides the last bits of the machine's libm; the hash proves that it did.
    """
    inverse = statistics.NormalDist().inv_cdf
    # the upper half; the lower is its mirror, so that the mean is 0 exactly
    upper = [inverse((_BINS + 2 * i + 1) / (2 * _BINS)) for i in range(_BINS // 2)]
    scale = math.sqrt(0.5 / (math.fsum(x * x for x in upper) * 2 / _BINS))
    half = np.rint(np.array(upper) * (scale * _GRID)) / _GRID
    table = np.concatenate([-half[::-1], half]).astype("<f4")
    digest = hashlib.sha256(table.tobytes()).hexdigest()
    if digest != _TABLE_SHA256:
        raise RuntimeError(
            f"the normal quantile table hashes to {digest} on this machine, not to {_TABLE_SHA256}: "
            "its math library is off by more than 1e-10, and its noise would differ from other machines"
        )
    return table.astype(np.float32)


def normal(seed: int, key: bytes, occurrence: int, purpose: str, shape: Sequence[int]) -> np.ndarray:
    """Draw standard normals as x = T[u] + T[u'] with u, u' consecutive 16-bit words of a Philox stream.

    Shape: `shape`, fp32. Range: within 6.2. Element i depends on the key and i only, not on the shape.
    """
    count = math.prod(shape)
    bits = np.random.Philox(key=np.frombuffer(key_of(seed, key, occurrence, purpose), dtype="<u8").astype(np.uint64))
    # four 16-bit words of each raw one, two for an element
    raw = bits.random_raw(count + 1 >> 1)
    words = raw.astype("<u8", copy=False).view("<u2")
    table, out = _table(), np.empty(count, dtype=np.float32)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        pair = table.take(words[2 * start : 2 * stop].astype(np.intp), mode="clip")
        np.add(pair[0::2], pair[1::2], out=out[start:stop])
    return out.reshape(tuple(shape))


class Stream:
    """Hand out small draws one after another: captions, crops, flips, timesteps.

    Words come from blake2b in counter mode; draw k of a stream is fixed by the key and k.
    """

    def __init__(self, seed: int, key: bytes, occurrence: int, purpose: str) -> None:
        self._key = key_of(seed, key, occurrence, purpose)
        self._block = 0
        self._words: list[int] = []

    def word(self) -> int:
        """Return the next 64 random bits."""
        if not self._words:
            self._words = words_of(self._key, self._block)[::-1]
            self._block += 1
        return self._words.pop()

    def integer(self, high: int) -> int:
        """Draw an integer in [0, high) by multiply and shift; bias below high / 2^64."""
        if high < 1:
            raise ValueError(f"integer() needs high >= 1, got {high}")
        return self.word() * high >> 64

    def uniform(self) -> float:
        """Draw a multiple of 2^-53 in [0, 1)."""
        return (self.word() >> 11) * 2.0**-53

    def shuffle(self, items: MutableSequence[T]) -> None:
        """Shuffle in place (Fisher-Yates, from the end)."""
        for i in range(len(items) - 1, 0, -1):
            j = self.integer(i + 1)
            items[i], items[j] = items[j], items[i]

    def permutation(self, n: int) -> list[int]:
        """Draw one of the n! orders of range(n), each as likely as the others."""
        order = list(range(n))
        self.shuffle(order)
        return order


def integer(seed: int, key: bytes, occurrence: int, purpose: str, high: int) -> int:
    """Draw one integer in [0, high): the first of the stream."""
    return Stream(seed, key, occurrence, purpose).integer(high)


def choice(seed: int, key: bytes, occurrence: int, purpose: str, places: int, kept: int) -> np.ndarray:
    """Draw `kept` of so many places, each set as likely as any other. Shape: (kept,) int64, ascending.

    The places with the lowest of as many 64-bit words of a Philox stream stay.
    """
    if not 0 <= kept <= places:
        raise ValueError(f"{kept} of {places} positions cannot be chosen")
    bits = np.random.Philox(key=np.frombuffer(key_of(seed, key, occurrence, purpose), dtype="<u8").astype(np.uint64))
    # stable, so that equal words keep the order of their places everywhere
    order = np.argsort(bits.random_raw(places), kind="stable")
    return np.sort(order[:kept]).astype(np.int64)


def uniform(seed: int, key: bytes, occurrence: int, purpose: str) -> float:
    """Draw one fp64 number in [0, 1): the first of the stream."""
    return Stream(seed, key, occurrence, purpose).uniform()


# --- Keys: every random choice is a function of an unambiguous hash of what it is for


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


# --- Noise that is not white: offset per channel, and sums over resolutions. Made on the host, a sample at a time
# Every operation is exact by IEEE 754 and every sum that matters is of integers, so that the noise is the same bits on
# every machine, whatever its vector units; nothing looks at the rest of the batch.
# Source: Guttenberg 2023 (offset noise); Whitaker 2023 (multi-resolution noise); kohya's forms of both.


_SUM_GRID = 1 << 16  # squares are summed as integers: exact in any order, and good to 2^-17 of an element
_RATIO_LOW, _RATIO_SPAN = 2.0, 2.0  # a level is this much smaller, to its power, than the one before


def mixed(seed: int, key: bytes, occurrence: int, name: str, shape: tuple[int, ...], mix: NoiseMix) -> np.ndarray:
    """Draw the noise of one sample. Shape: (C, H, W) fp32.

    The white noise, the offset's and each level's are draws of their own, named after `name`.
    """
    noise = normal(seed, key, occurrence, name, shape)
    if mix.offset:
        strength = np.float32(mix.offset)
        if mix.offset_random:
            strength *= np.float32(uniform(seed, key, occurrence, f"{name}_offset_strength"))
        noise += strength * normal(seed, key, occurrence, f"{name}_offset", (shape[0], 1, 1))
    if mix.iterations:
        _add_levels(noise, seed, key, occurrence, name, mix)
        if mix.normalise:
            noise /= np.float32(deviation(noise))
    return noise


def _add_levels(noise: np.ndarray, seed: int, key: bytes, occurrence: int, name: str, mix: NoiseMix) -> None:
    """Add coarser and coarser noise, stretched, in place: level i is discount^i strong and r^i smaller, r in [2, 4)."""
    channels, height, width = noise.shape
    ratios = Stream(seed, key, occurrence, f"{name}_multires")
    share = 1.0
    for i in range(mix.iterations):
        ratio = ratios.uniform() * _RATIO_SPAN + _RATIO_LOW
        smaller = math.prod([ratio] * i)
        size = max(1, int(height / smaller)), max(1, int(width / smaller))
        level = normal(seed, key, occurrence, f"{name}_multires_{i}", (channels, *size))
        noise += stretch(level, (height, width)) * np.float32(share)
        share *= mix.discount
        if 1 in size:
            return


def stretch(image: np.ndarray, size_hw: tuple[int, int]) -> np.ndarray:
    """Enlarge bilinearly, pixel centres half a pixel in, edges held. Shapes: (C, h, w) -> (C, H, W) fp32."""
    for axis, size in ((1, size_hw[0]), (2, size_hw[1])):
        if image.shape[axis] != size:
            image = _stretched(image, axis, size)
    return image


def _stretched(image: np.ndarray, axis: int, size: int) -> np.ndarray:
    size_in = image.shape[axis]
    position = np.maximum((np.arange(size) + 0.5) * (size_in / size) - 0.5, 0.0)
    low = np.minimum(position.astype(np.intp), size_in - 1)
    high = np.minimum(low + 1, size_in - 1)
    shape = [1, 1, 1]
    shape[axis] = size
    weight = (position - low).astype(np.float32).reshape(shape)
    return image.take(low, axis) * (np.float32(1) - weight) + image.take(high, axis) * weight


def deviation(noise: np.ndarray) -> float:
    """Return the sample standard deviation (over n - 1), by integers: the same in whatever order they are added."""
    integers = np.rint(noise.astype(np.float64) * _SUM_GRID).astype(np.int64)
    n, total = integers.size, int(integers.sum())
    squares = sum((integers * integers).sum(axis=-1).ravel().tolist())  # a row fits 64 bits, a video's latent may not
    return math.sqrt((n * squares - total * total) / (n * (n - 1))) / _SUM_GRID
