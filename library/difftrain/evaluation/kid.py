"""Kernel distance of two sets of pictures' features: the maths of a KID, in fp64 and without any model.

Source: Gretton et al. 2012, A Kernel Two-Sample Test, lemma 6 and equation 4; Binkowski et al. 2018, Demystifying MMD
GANs, whose kernel this is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST = 2  # pictures of either side: fewer have no unbiased estimate
BLOCKS = 10
LEAST_OF_BLOCK = 5  # below this a block's estimate is mostly noise, and there are fewer blocks


@dataclass(frozen=True)
class Kid:
    """An estimate of the squared kernel distance.

    value: of all pictures; unbiased, so it may fall below zero where the two are alike. error: a standard error, by
    disjoint blocks, NaN where there are too few pictures. It is the error of the blocks' mean; that of the value is
    no larger, since of all unbiased estimates from the same pictures the value has the least variance.
    """

    value: float
    error: float
    pictures: int
    blocks: int


def kernel(x: Tensor, y: Tensor) -> Tensor:
    """Return (x . y / d + 1)^3 of every pair.

    Shapes: (M, D), (N, D) -> (M, N), fp64.
    """
    return (x.double() @ y.double().T / x.shape[1] + 1) ** 3


def mmd2(x: Tensor, y: Tensor, *, paired: bool = False) -> float:
    """Return the unbiased estimate of the squared maximum mean discrepancy.

    paired: x[i] and y[i] belong together (a picture drawn for a caption, and the picture that has it), so that they
    are no independent draws: such pairs are left out, as equation 4 does. Otherwise lemma 6.

    Shapes: x (M, D), y (N, D). Raises ValueError for fewer than two of either, and for pairs that are none.
    """
    m, n = len(x), len(y)
    if min(m, n) < LEAST:
        raise ValueError(f"an unbiased estimate needs {LEAST} images on each side, not {m} and {n}")
    if paired and m != n:
        raise ValueError(f"{m} and {n} images do not form pairs")
    xx, yy, xy = kernel(x, x), kernel(y, y), kernel(x, y)
    across = _others(xy) / (m * (m - 1)) if paired else float(xy.sum()) / (m * n)
    return _others(xx) / (m * (m - 1)) + _others(yy) / (n * (n - 1)) - 2 * across


def _others(square: Tensor) -> float:
    """Sum what lies off the diagonal."""
    return float(square.sum() - square.diagonal().sum())


def kid(drawn: Tensor, real: Tensor, *, paired: bool = False, blocks: int = BLOCKS) -> Kid:
    """Return the kernel distance of two sets of features, with its standard error.

    Pictures belong to block number i modulo the number of blocks: disjoint, so that the blocks' estimates are
    independent of one another.

    Shapes: (M, D), (N, D). Raises ValueError as mmd2 does.
    """
    value = mmd2(drawn, real, paired=paired)
    fewest = min(len(drawn), len(real))
    blocks = min(blocks, fewest // LEAST_OF_BLOCK)
    if blocks < 2:
        return Kid(value, math.nan, fewest, 0)
    block_values = torch.tensor(
        [mmd2(drawn[k::blocks], real[k::blocks], paired=paired) for k in range(blocks)], dtype=torch.float64
    )
    return Kid(value, float(block_values.std() / math.sqrt(blocks)), fewest, blocks)
