"""State of optimizers in 8 bits: a code for each element, and a scale for each block of 256, in plain torch on any device.

A code stands for a share of the largest magnitude of its block. Shares lie evenly on a logarithmic scale, since Adam divides by
the root of its second moment: what counts is the relative error. Source: block-wise quantisation, Dettmers et al. 2022, section 2.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 256
FEWEST = 4096  # smaller tensors stay in fp32
SMALLEST = {True: 1e-5, False: 1e-8}  # share of a block that is told from nothing, signed and unsigned


@cache
def levels(signed: bool) -> Tensor:
    """Return the shares of all codes, ascending: 0, and powers of one ratio. Shape: (256,), of signed ones (255,), fp32."""
    count = 127 if signed else 255
    share = torch.logspace(math.log10(SMALLEST[signed]), 0, count, dtype=torch.float64)
    share[-1] = 1.0
    parts = (
        (-share.flip(0), torch.zeros(1, dtype=torch.float64), share)
        if signed
        else (torch.zeros(1, dtype=torch.float64), share)
    )
    return torch.cat(parts).float()


def load(state: dict[str, Any], name: str, like: Tensor, *, signed: bool) -> Tensor:
    """Return a value of the state in fp32, zeros where there is none yet."""
    if name not in state:
        return torch.zeros_like(like, dtype=torch.float32, memory_format=torch.contiguous_format)
    codes = state[name]
    if codes.dtype != torch.uint8:
        return codes
    shares = levels(signed).to(codes.device)[codes.reshape(-1).int()]
    padded = torch.nn.functional.pad(shares, (0, -len(shares) % BLOCK)).view(-1, BLOCK)
    return (padded * state[f"{name}_scale"].unsqueeze(1)).view(-1)[: len(shares)].view(codes.shape)


def keep(state: dict[str, Any], name: str, value: Tensor, *, signed: bool) -> None:
    """Keep a value in 8 bits, each element as the nearest code; what is not 0 and unsigned is never kept as 0."""
    if value.numel() < FEWEST:
        state[name] = value
        return
    flat = value.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = padded.abs().amax(1)
    shares = (padded / scale.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)).view(-1)[: len(flat)]
    table = levels(signed).to(value.device)
    codes = torch.bucketize(shares, (table[1:] + table[:-1]) / 2)
    if not signed:  # Adam would divide by it
        codes = torch.where(shares > 0, codes.clamp(min=1), codes)
    state[name], state[f"{name}_scale"] = codes.to(torch.uint8).view(value.shape), scale
