"""A feature of one sample as stored bytes, and back: dtype, 8-bit floats with scales, rows that are left out, masks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from difftrain.cache.store.format import StoredFeature
from difftrain.config.spellings.spelling import option

CHOICES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
FP8_MAX = 448.0  # of float8_e4m3fn, which has no infinity: what is larger becomes NaN unless it is cut off
_TINY = torch.finfo(torch.float32).tiny
_LEVEL = 6  # of zlib


class Unstorable(Exception):
    """Say why a feature cannot be stored as it was asked for."""


def stored(name: str, value: Tensor, dtype: str, rows: int | None = None) -> StoredFeature:
    """Return one sample's feature as bytes.

    dtype: float32, bfloat16, float16, float8_e4m3fn (one fp32 scale a row of the first axis, one for a vector), or uint8
    (compressed). rows: of the first axis, how many are kept; those behind them must be zeros.
    Raises: Unstorable for what is not finite, or too large for dtype.
    """
    value = value.detach().cpu()
    if not 1 <= value.dim() <= 6:
        raise ValueError(f"{name}: a feature has 1 to 6 axes, not {value.dim()}")
    shape = tuple(value.shape)
    rows = len(value) if rows is None else rows
    if not 0 <= rows <= len(value):
        raise ValueError(f"{name}: {rows} of {len(value)} rows")
    if rows < len(value) and bool(value[rows:].any()):
        raise Unstorable(f"{name}: rows after the {rows} that are kept are not zeros, and would be lost")
    value = value[:rows].contiguous()

    # whole numbers are compressed
    if dtype == "uint8":
        if value.dtype != torch.uint8:
            raise TypeError(f"{name}: {value.dtype} cannot be stored as uint8 without loss")
        packed = np.frombuffer(zlib.compress(value.numpy().tobytes(), _LEVEL), dtype=np.uint8)
        return StoredFeature(name, dtype, shape, rows, packed, None, "zlib")

    # floats are narrowed, in 8 bits with a scale a row
    _refuse_non_finite(name, value)
    if dtype == "float8_e4m3fn":
        eighth, scales = _quantised(value)
        return StoredFeature(name, dtype, shape, rows, _bytes_of(eighth), scales.numpy())
    narrow = value.to(getattr(torch, dtype))
    if narrow.dtype.itemsize < value.dtype.itemsize or narrow.dtype == torch.float16:
        _refuse_overflow(name, value, narrow)
    return StoredFeature(name, dtype, shape, rows, _bytes_of(narrow))


def restore(stored: StoredFeature, out: Tensor) -> None:
    """Write a stored feature into a tensor of its whole shape, in that tensor's dtype; rows that were left out are zeros.

    Raises: ValueError where the bytes are not as many as the feature takes.
    """
    if tuple(out.shape) != stored.shape:
        raise ValueError(f"{stored.name} has shape {stored.shape}, not {tuple(out.shape)}")
    data = stored.data
    size = nbytes_of(stored.dtype, stored.shape, stored.rows)
    if stored.codec == "zlib":
        data = np.frombuffer(bytearray(_inflated(stored, size)), dtype=np.uint8)
    elif stored.codec:
        raise ValueError(f"{stored.name}: its codec {stored.codec!r} is unknown")
    if data.nbytes != size:
        raise ValueError(f"{stored.name} has {data.nbytes} bytes, not {size}")

    # rows that were left out are zeros
    kept = out[: stored.rows]
    if stored.rows < len(out):
        out[stored.rows :].zero_()
    if not size:
        return
    flat = torch.from_numpy(data)
    if stored.dtype == "float8_e4m3fn":
        if stored.scales is None:
            raise ValueError(f"{stored.name} has no scales")
        _dequantise(flat.view(kept.shape), torch.from_numpy(stored.scales), kept)
    else:
        kept.copy_(flat.view(getattr(torch, stored.dtype)).view(kept.shape))


def nbytes_of(dtype: str, shape: Sequence[int], rows: int | None = None) -> int:
    """Return how many bytes a feature takes before compression, its scales not counted; rows: those that are kept."""
    kept = shape[0] if rows is None else rows
    itemsize: int = getattr(torch, dtype).itemsize
    return kept * math.prod(shape[1:]) * itemsize


def kept_rows(mask: Tensor) -> int:
    """Return how many rows reach to the last one that an attention mask keeps. Shapes: mask (L,)."""
    kept = mask.nonzero()
    return int(kept[-1]) + 1 if len(kept) else 0


def _bytes_of(value: Tensor) -> np.ndarray:
    flat: np.ndarray = value.contiguous().view(-1).view(torch.uint8).numpy()
    return flat


def _refuse_non_finite(name: str, value: Tensor) -> None:
    bad = ~torch.isfinite(value)
    count = int(bad.sum())
    if count:
        first = tuple(int(i) for i in bad.nonzero()[0])
        raise Unstorable(
            f"{name}: {count} of {value.numel()} values are not finite, the first at {list(first)} ({value[first]:g})"
        )


def _refuse_overflow(name: str, value: Tensor, narrow: Tensor) -> None:
    if not torch.isfinite(narrow).all():
        most, dtype = float(value.abs().max()), str(narrow.dtype).removeprefix("torch.")
        raise Unstorable(
            f"{name}: a value of {most:g} is too large for {dtype} (at most {torch.finfo(narrow.dtype).max:g}); "
            f"store it as {option('cache.dtypes')} {name}=fp32, bf16 or fp8"
        )


def _quantised(value: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each row so that its largest value becomes 448. Shapes: value (R, ...) -> the same in 8 bits, scales (R,)."""
    exact = value.float()
    if not exact.numel():  # nothing is kept
        return exact.to(torch.float8_e4m3fn), torch.zeros(len(exact) if exact.dim() > 1 else 1)
    rows = exact.reshape(1, -1) if exact.dim() == 1 else exact.reshape(len(exact), -1)
    most = rows.abs().amax(dim=1)
    # below the smallest normal number a scale has fewer bits than its values; a row of zeros takes 1
    scales = torch.where(most > 0, (most / FP8_MAX).clamp_min(_TINY), torch.ones_like(most))
    # rounded up, 448 scales could be more than the largest fp32
    scales = torch.where(scales * FP8_MAX > most.clamp_min(_TINY * FP8_MAX), scales.nextafter(scales * 0), scales)
    eighth = (rows / scales[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return eighth.view(exact.shape), scales


def _dequantise(raw: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write 8-bit floats times their scales. Shapes: raw (R, ...) uint8, scales (R,) or (1,), out as raw.

    The bits of an e4m3 number, moved to the top of a float16's exponent and mantissa, are that number / 256 (biases 7 and
    15): exact, subnormals too, and 8 times as fast as torch's own conversion on a CPU.
    """
    half = raw.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
    factor = (scales * 256).view(-1, *[1] * (raw.dim() - 1))
    if out.dtype == torch.float32:
        torch.mul(half.float(), factor, out=out)
    else:
        out.copy_(half.float().mul_(factor))


def _inflated(stored: StoredFeature, size: int) -> bytes:
    """Undo zlib, and make no more than is wanted."""
    try:
        return zlib.decompressobj().decompress(stored.data.data, size + 1)
    except zlib.error as error:
        raise ValueError(f"{stored.name} cannot be decompressed ({error})") from None
