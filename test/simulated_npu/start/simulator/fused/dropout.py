"""Dropout by masks that are kept: one bit an element (_npu_dropout), or one byte (_dropout_with_byte_mask)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from simulator.fused import randomness
from simulator.fused.limits import WHEEL_META, docs, require


def _npu_dropout(input: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return (result, mask of bits): elements are zeroed with probability p, the rest divided by 1 - p."""
    _check_probability("_npu_dropout", p)
    bits = _draw(input.numel(), p)
    return _applied(input, bits, p), randomness.pack(bits)


def npu_dropout_backward(grad_output: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return the gradient of the input from the mask of bits."""
    return npu_dropout_do_mask(grad_output, mask, p)[0]


def npu_dropout_do_mask(input: Tensor, mask: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return (what a mask of bits leaves of the input, the mask)."""
    _check_probability("npu_dropout_do_mask", p)
    wanted = -(-input.numel() // randomness.MASK_BITS) * randomness.MASK_BITS // 8
    require(
        mask.dtype == torch.uint8 and mask.numel() >= wanted, "npu_dropout_do_mask", f"mask {mask.dtype}, {mask.numel()}",
        f"the mask is uint8, a bit an element in blocks of 128: {wanted} bytes here", WHEEL_META,
    )  # fmt: skip
    return _applied(input, randomness.unpack(mask, input.numel()), p), mask


def _npu_dropout_gen_mask(
    input: Tensor, size: Sequence[int], p: float, seed: int, offset: int, *, parallel: bool | None = True,
    sync: bool | None = None,
) -> Tensor:  # fmt: skip
    """Return a mask of bits for a shape: a function of seed and offset."""
    _check_probability("_npu_dropout_gen_mask", p)
    numel = 1
    for each in size:
        numel *= each
    return randomness.pack(randomness.kept(numel, 1 - p, seed, offset))


def _dropout_with_byte_mask(input: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return (result, mask of bytes)."""
    _check_probability("_dropout_with_byte_mask", p)
    kept = _draw(input.numel(), p)
    return _applied(input, kept, p), kept.to(torch.uint8)


def _dropout_with_byte_mask_backward(grad_output: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return the gradient of the input from the mask of bytes."""
    _check_probability("_dropout_with_byte_mask_backward", p)
    return _applied(grad_output, mask.bool(), p)


def _draw(numel: int, p: float) -> Tensor:
    seed, offset = randomness.draw_seed_and_offset()
    return randomness.kept(numel, 1 - p, seed, offset)


def _applied(x: Tensor, kept: Tensor, p: float) -> Tensor:
    if p == 1:
        return torch.zeros_like(x)
    return torch.where(kept.view(x.shape), x.float() / (1 - p), 0.0).to(x.dtype)


def _check_probability(op: str, p: float) -> None:
    require(0 <= p <= 1, op, f"p {p}", "p is a probability", docs("_npu_dropout"))
