"""Dropout of fused operators: seed and offset from the device's generator, masks that follow from them."""

from __future__ import annotations

import torch
from torch import Tensor

PHILOX_STEP = 12  # philox_engine_inputs(10), rounded up to a multiple of 4 as torch's generators do
MASK_BITS = 128  # packed masks are padded to whole blocks of this many bits


def draw_seed_and_offset() -> tuple[int, int]:
    """Take seed and offset from the current device's generator and move it on; the CPU's generator without a device."""
    if hasattr(torch, "npu") and torch.npu.is_available():
        torch.npu.init()  # the generators are there from then on
        generator = torch.npu.default_generators[torch.npu.current_device()]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + PHILOX_STEP)
        return seed, offset
    return int(torch.randint(2**62, ())), 0


def kept(numel: int, keep_prob: float, seed: int, offset: int) -> Tensor:
    """Return which of numel elements are kept: a function of the arguments, as the kernel's stateless mask is."""
    mixed = (seed * 0x9E3779B97F4A7C15 + offset * 0xBF58476D1CE4E5B9 + 1) % 2**63
    return torch.rand(numel, generator=torch.Generator().manual_seed(mixed)) < keep_prob


def pack(bits: Tensor) -> Tensor:
    """Return a mask as the device keeps it: one bit an element, least significant first, padded to 128 bits."""
    padded = torch.zeros(-(-bits.numel() // MASK_BITS) * MASK_BITS, dtype=torch.uint8)
    padded[: bits.numel()] = bits.flatten()
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)
    return (padded.view(-1, 8) * weights).sum(-1, dtype=torch.uint8)


def unpack(mask: Tensor, numel: int) -> Tensor:
    """Return the first numel elements of a packed mask as bools."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((mask.unsqueeze(-1) >> shifts) & 1).flatten()[:numel].bool()
