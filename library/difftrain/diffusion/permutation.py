"""Keyed permutations of [0, n) that need no table: any element in constant time, the same for ever.

A Feistel network over a x b >= n, with cycle walking for the few values outside [0, n). Library shuffles change
between versions; this one is fixed by golden values.
"""

from __future__ import annotations

import math
from typing import overload

import numpy as np

from difftrain.diffusion.draws import Stream, key_of, words_of

_ROUNDS = 8
_SMALL = 128  # below: one Fisher-Yates table; halves of a dozen values mix badly in a Feistel network
_CHUNK = 1 << 13
_FEW = 8  # up to so many, one after another is faster than as an array
_LIMIT = 1 << 48  # the 32-bit hash still reaches every value of a half evenly
_MASK = (1 << 64) - 1
# The multipliers and shifts of a 64-bit finaliser (Stafford's mix 13), whose every input bit reaches every output bit.
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_S1, _S2 = 30, 27


class Permutation:
    """Permute [0, n), keyed by parts: `Permutation(n, seed, bucket, pass_)(i)`; takes an int or an int64 array."""

    def __init__(self, n: int, *parts: bytes | str | int) -> None:
        if not 0 < n <= _LIMIT:
            raise ValueError(f"a permutation needs 1 <= n <= 2^48, got {n}")
        self.n = n
        key = key_of("permutation", n, *parts)
        self._table: np.ndarray | None = None
        if n < _SMALL:
            self._table = np.array(Stream(0, key, 0, "order").permutation(n), dtype=np.int64)
            return
        # a x b just above n: few values lie outside [0, n), so that few are walked again
        self._a = math.isqrt(n - 1) + 1
        self._b = -(-n // self._a)
        self._keys = words_of(key, count=_ROUNDS)

    @overload
    def __call__(self, i: int) -> int: ...
    @overload
    def __call__(self, i: np.ndarray) -> np.ndarray: ...
    def __call__(self, i: int | np.ndarray) -> int | np.ndarray:
        """Return where i goes. Raises IndexError outside [0, n)."""
        if isinstance(i, np.ndarray):
            return self._many(i)
        i = int(i)
        if not 0 <= i < self.n:
            raise IndexError(f"{i} is outside [0, {self.n})")
        if self._table is not None:
            return int(self._table[i])
        i = self._walk(i)
        while i >= self.n:
            i = self._walk(i)
        return i

    def _walk(self, x: int) -> int:
        """Permute [0, a b) once: left += F(right) mod a, right += F(left) mod b, in turn."""
        a, b = self._a, self._b
        left, right = divmod(x, b)
        for r in range(0, _ROUNDS, 2):
            # 32 random bits to [0, a) by multiply and shift; the sum is reduced without a division
            left += _mix(right ^ self._keys[r]) * a >> 32
            left -= a if left >= a else 0
            right += _mix(left ^ self._keys[r + 1]) * b >> 32
            right -= b if right >= b else 0
        return left * b + right

    def _many(self, i: np.ndarray) -> np.ndarray:
        flat = np.ascontiguousarray(i, dtype=np.int64).reshape(-1)
        if flat.size and (flat.min() < 0 or flat.max() >= self.n):
            raise IndexError(f"values outside [0, {self.n})")
        if self._table is not None:
            return self._table[flat].reshape(i.shape)
        if flat.size <= _FEW:
            return np.array([self(index) for index in flat.tolist()], dtype=np.int64).reshape(i.shape)
        out = flat.view(np.uint64).copy()
        for start in range(0, out.size, _CHUNK):
            piece = out[start : start + _CHUNK]
            piece[:] = self._walk_many(piece)
            # cycle walking: a permutation of [0, a b) followed until it comes back into [0, n)
            outside = np.flatnonzero(piece >= self.n)
            while outside.size:
                piece[outside] = self._walk_many(piece[outside])
                outside = outside[piece[outside] >= self.n]
        return out.view(np.int64).reshape(i.shape)

    def _walk_many(self, x: np.ndarray) -> np.ndarray:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left = x // b
        right = x - left * b
        for r in range(0, _ROUNDS, 2):
            _add_mod(left, right, self._keys[r], a)
            _add_mod(right, left, self._keys[r + 1], b)
        left *= b
        left += right
        return left


def _mix(x: int) -> int:
    """Hash 64 bits to 32."""
    x = (x ^ x >> _S1) * _M1 & _MASK
    x = (x ^ x >> _S2) * _M2 & _MASK
    return x >> 32


def _add_mod(target: np.ndarray, source: np.ndarray, key: int, modulus: np.uint64) -> None:
    """Add the keyed hash of source, reduced to [0, modulus), to target modulo modulus, in place (as `_walk`)."""
    x = source ^ np.uint64(key)
    x ^= x >> np.uint64(_S1)
    x *= np.uint64(_M1)
    x ^= x >> np.uint64(_S2)
    x *= np.uint64(_M2)
    x >>= np.uint64(32)
    x *= modulus
    x >>= np.uint64(32)
    target += x
    target -= modulus * (target >= modulus)
