"""Which scores npu_fusion_attention computes: masks, their shapes, and the nine sparse modes.

In all of this True means masked OUT, as the kernel has it and the opposite of torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from simulator.fused.limits import docs, refuse, require, require_dtype

COMPRESSED = 2048  # side of the triangle that stands for a causal mask of any size
PREFIX_ROWS = 3072  # rows of the compressed prefix mask: the triangle, then a rectangle
MAX_PREFIX_BATCH = 32
NO_BAND = 2147483647

DEFAULT, ALL, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND, PREFIX, PREFIX_COMPRESSED, VARLEN_RIGHT, VARLEN_LEFT = range(9)
_FULL = (DEFAULT, ALL)
_TRIANGLE = (LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND, VARLEN_RIGHT, VARLEN_LEFT)


@dataclass(frozen=True)
class Sparsity:
    """The arguments of a call that decide which scores are computed."""

    op: str
    mode: int
    pre: int
    next: int
    prefix: tuple[int, ...] = ()
    inner_precise: int = 0

    @property
    def source(self) -> str:
        return docs(self.op)


def positions(rows: int, columns: int, shift: int = 0) -> Tensor:
    """Return column - row - shift: 0 on the diagonal that starts at the top left, or, with shift, ends bottom right."""
    return torch.arange(columns) - torch.arange(rows).unsqueeze(1) - shift


@functools.lru_cache(maxsize=1)
def triangle() -> Tensor:
    """Return the compressed causal mask: True above the diagonal of 2048 x 2048."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu_(1)


@functools.lru_cache(maxsize=1)
def prefix_rectangle() -> Tensor:
    """Return the compressed prefix mask: the triangle, and below it 1024 rows whose right half is masked."""
    below = torch.zeros(PREFIX_ROWS - COMPRESSED, COMPRESSED, dtype=torch.bool)
    below[:, COMPRESSED // 2 :] = True
    return torch.cat((triangle(), below))


def masked_out(mask: Tensor | None, how: Sparsity, batch: int, heads: int, rows: int, columns: int) -> Tensor | None:
    """Return the scores that one non-varlen call leaves out, broadcastable to [B, N, Sq, Skv], or None for none.

    Without a mask the sparse mode and both token counts are ignored: full attention, also where causal was meant.
    Raises: Refused where shape, dtype or content of the mask is not what the mode wants.
    """
    _check_mode(how, varlen=False)
    if mask is None:
        return None
    require_dtype(how.op, "atten_mask", mask, (torch.bool, torch.uint8), how.source)
    out = mask.bool()
    if how.mode in _TRIANGLE:
        _check_compressed(out, how)
        return _triangular(how, rows, columns)
    if how.mode == PREFIX_COMPRESSED:
        require(
            out.shape == prefix_rectangle().shape and torch.equal(out, prefix_rectangle()),
            how.op,
            f"sparse_mode 6 with an atten_mask of shape {list(mask.shape)}",
            "sparse_mode 6 wants the compressed prefix mask of 3072 x 2048",
            how.source,
        )
        return _prefixed(how, batch, rows, columns)
    _check_full(out, how, batch, heads, rows, columns)
    if how.mode == DEFAULT:
        _check_agrees(out, _outside_band(how, rows, columns, shift=0), how, "pre_tockens and next_tockens")
    if how.mode == PREFIX:
        _check_agrees(out, _prefixed(how, batch, rows, columns), how, "prefix")
    return out


def varlen_masked_out(
    mask: Tensor | None, how: Sparsity, index: int, lengths: list[tuple[int, int]], longest: tuple[int, int]
) -> Tensor | None:
    """Return the scores that a TND call leaves out in its sequence number `index`, [Sq, Skv], or None for none."""
    if mask is None:
        return None
    require_dtype(how.op, "atten_mask", mask, (torch.bool, torch.uint8), how.source)
    rows, columns = lengths[index]
    out = mask.bool()
    if how.mode in _TRIANGLE:
        _check_compressed(out, how)
        return _triangular(_of_sequence(how, index, lengths), rows, columns)
    if how.mode == PREFIX_COMPRESSED:
        require(
            out.shape == prefix_rectangle().shape and torch.equal(out, prefix_rectangle()),
            how.op, f"atten_mask of shape {list(mask.shape)}", "sparse_mode 6 wants a mask of 3072 x 2048", how.source,
        )  # fmt: skip
        return _prefixed(how, len(lengths), rows, columns)[index, 0]
    require(
        tuple(out.shape) == longest,
        how.op,
        f"atten_mask {list(mask.shape)} with longest sequences {list(longest)}",
        "with TND the mask is SS, of the longest Sq and Skv",
        how.source,
    )
    piece = out[:rows, :columns]
    require(
        not bool(piece.all(-1).any()), how.op, "a row of atten_mask is wholly masked",
        "with TND no row of the mask may be all ones", how.source,
    )  # fmt: skip
    return piece


def check_varlen_mode(how: Sparsity) -> None:
    """Refuse the modes that TND does not have."""
    _check_mode(how, varlen=True)


def zeroes_empty_rows(how: Sparsity) -> bool:
    """Tell whether a row with no score left gives zeros: asked for by inner_precise 2, or seen by the kernel itself."""
    return how.inner_precise == 2 or how.mode in (*_TRIANGLE, PREFIX, PREFIX_COMPRESSED)


def _check_mode(how: Sparsity, *, varlen: bool) -> None:
    allowed = (0, 1, 2, 3, 4, 6, 7, 8) if varlen else (0, 1, 2, 3, 4, 5, 6)
    require(
        how.mode in allowed,
        how.op,
        f"sparse_mode {how.mode} with {'TND' if varlen else 'a layout other than TND'}",
        f"sparse_mode is one of {', '.join(map(str, allowed))} there",
        how.source,
    )


def _check_compressed(out: Tensor, how: Sparsity) -> None:
    flat = out[0, 0] if out.ndim == 4 and out.shape[:2] == (1, 1) else out
    require(
        flat.shape == triangle().shape and torch.equal(flat, triangle()),
        how.op,
        f"sparse_mode {how.mode} with an atten_mask of shape {list(out.shape)}",
        f"sparse_mode {how.mode} wants the compressed 2048 x 2048 mask, True above the diagonal",
        how.source,
    )


def _check_full(out: Tensor, how: Sparsity, batch: int, heads: int, rows: int, columns: int) -> None:
    four = [(batch, heads, rows, columns), (batch, 1, rows, columns)]
    shapes = four if how.mode == PREFIX else [*four, (1, 1, rows, columns), (rows, columns)]
    if tuple(out.shape) not in shapes:
        words = "BNSS or B1SS" if how.mode == PREFIX else "BNSS, B1SS, 11SS or SS, with the full Sq (no broadcasting)"
        refuse(
            how.op,
            f"atten_mask has shape {list(out.shape)} for scores [{batch}, {heads}, {rows}, {columns}]",
            f"atten_mask must be {words}",
            how.source,
        )


def _check_agrees(out: Tensor, required: Tensor, how: Sparsity, names: str) -> None:
    """Refuse a mask that keeps what the kernel, led by the sparse arguments, does not compute."""
    if bool((required & ~out).any()):
        refuse(
            how.op,
            f"atten_mask keeps scores outside of {names} (sparse_mode {how.mode}, {how.pre}, {how.next})",
            f"atten_mask must agree with {names}, or the result is wrong",
            how.source,
        )


def _triangular(how: Sparsity, rows: int, columns: int) -> Tensor:
    if how.mode == LEFT_UP_CAUSAL:
        return positions(rows, columns) > 0
    shift = columns - rows
    if how.mode == RIGHT_DOWN_CAUSAL:
        return positions(rows, columns, shift) > 0
    return _outside_band(how, rows, columns, shift)


def _outside_band(how: Sparsity, rows: int, columns: int, shift: int) -> Tensor:
    pre, following = how.pre, how.next
    require(
        pre + following >= 0 and (following >= 0 or -following < columns) and (pre >= 0 or -pre < rows),
        how.op,
        f"pre_tockens {pre} and next_tockens {following} for {rows} x {columns} scores",
        "the band between pre_tockens and next_tockens must cross the scores",
        how.source,
    )
    where = positions(rows, columns, shift)
    return (where > following) | (where < -pre)


def _prefixed(how: Sparsity, batch: int, rows: int, columns: int) -> Tensor:
    low = max(0, columns - rows)
    require(
        len(how.prefix) == batch <= MAX_PREFIX_BATCH and all(low <= each <= columns for each in how.prefix),
        how.op,
        f"prefix {list(how.prefix)} for a batch of {batch} with Sq {rows} and Skv {columns}",
        f"prefix has one number for each of at most 32 sequences, from {low} to {columns} here",
        how.source,
    )
    causal = positions(rows, columns, columns - rows) > 0
    kept = torch.arange(columns) < torch.tensor(how.prefix).view(batch, 1, 1, 1)
    return causal & ~kept


def _of_sequence(how: Sparsity, index: int, lengths: list[tuple[int, int]]) -> Sparsity:
    """Return what modes 7 and 8 are for one sequence: a band for the last or the first, causal for the others."""
    if how.mode not in (VARLEN_RIGHT, VARLEN_LEFT):
        return how
    right = how.mode == VARLEN_RIGHT
    banded = len(lengths) - 1 if right else 0
    if len(lengths) > 1:
        wide = lengths[banded][1]
        require(
            how.pre >= wide and (not right or how.next <= 0),
            how.op,
            f"sparse_mode {how.mode} with pre_tockens {how.pre}, next_tockens {how.next}",
            f"pre_tockens must be at least {wide}" + (" and next_tockens at most 0" if right else ""),
            how.source,
        )
    causal = RIGHT_DOWN_CAUSAL if right else LEFT_UP_CAUSAL
    return Sparsity(how.op, BAND if index == banded else causal, how.pre, how.next)
