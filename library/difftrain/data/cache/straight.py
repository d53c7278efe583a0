"""Entries whose bytes are a tensor's: how they are read straight into a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from difftrain.data.cache.format import FeaturePlace
from difftrain.data.cache.storage import nbytes_of

if TYPE_CHECKING:
    from torch import Tensor

_NUMPY = {"bfloat16": "int16", "float8_e4m3fn": "uint8"}  # which numpy has not got: as many bytes


class Step(NamedTuple):
    """How one feature gets from a payload into a tensor: its bytes are the tensor's."""

    name: str
    shape: tuple[int, ...]
    rows: int  # that are stored, of the first axis
    gap: bytearray | None  # takes what lies before it, since the feature before


class Kind(NamedTuple):
    """Entries whose features lie alike: read in one go, the table that says so with them."""

    table: bytes
    head: int  # bytes before the first feature
    size: int  # bytes to the end of the last
    steps: tuple[Step, ...]


def made_as(dtype: str) -> tuple[np.dtype[Any], torch.dtype | None]:
    """Return the numpy dtype that a feature's memory is made as, and what torch is to see in it."""
    same = _NUMPY.get(dtype)
    return np.dtype(same or dtype), getattr(torch, dtype) if same else None


class Filling:
    """Tensors of a batch, made when the first entry has said how large they are."""

    def __init__(self, count: int, made_as: Mapping[str, tuple[np.dtype[Any], torch.dtype | None]]) -> None:
        self._count, self._made_as = count, made_as
        self._arrays: dict[str, np.ndarray] = {}
        self.tensors: dict[str, Tensor] = {}

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return a feature's memory. Raises ValueError where an entry has another shape than the first of its batch."""
        made = self._arrays.get(name)
        if made is None:
            dtype, seen_as = self._made_as[name]
            made = self._arrays[name] = np.empty((self._count, *shape), dtype)
            tensor = torch.from_numpy(made)
            self.tensors[name] = tensor if seen_as is None else tensor.view(seen_as)
        elif made.shape[1:] != shape:
            raise ValueError(f"{name} is {shape}, and {made.shape[1:]} of the first sample of this batch")
        return made

    def add_parts(self, buffers: list[Any], steps: Sequence[Step], number: int) -> bool:
        """Add one sample's memory of each feature, in order; tell whether their shapes are those of this batch."""
        for name, shape, rows, gap in steps:
            made = self._arrays.get(name)
            if made is None:
                made = self.array(name, shape)
            elif made.shape[1:] != shape:
                return False
            part = made[number]
            if rows < shape[0]:
                part[rows:] = 0
                part = part[:rows]
            if gap is not None:
                buffers.append(gap)
            buffers.append(part)
        return True

    def clear(self) -> None:
        """Forget what was made for an entry that was of another kind."""
        self._arrays.clear()
        self.tensors.clear()


@lru_cache(maxsize=1024)
def steps_of(
    found: tuple[FeaturePlace, ...], dtypes: tuple[tuple[str, str], ...]
) -> tuple[int, int, tuple[Step, ...]] | None:
    """Return where the first feature that is wanted begins, where the last ends, and how each is read.

    None where one is stored otherwise than it is wanted, and has to be converted. Raises: ValueError.
    """
    wanted = dict(dtypes)
    here = sorted((each for each in found if each.name in wanted), key=lambda each: each.start)
    if len(here) < len(wanted):
        raise ValueError(f"it holds {', '.join(each.name for each in found)}, not {', '.join(wanted)}")
    steps: list[Step] = []
    end = here[0].start
    for each in here:
        if each.codec or each.scales or each.dtype != wanted[each.name]:
            return None
        size = nbytes_of(each.dtype, each.shape, each.rows)
        if each.stop - each.start != size:
            raise ValueError(f"{each.name} has {each.stop - each.start} bytes, not {size}")
        gap = bytearray(each.start - end) if each.start > end else None
        steps.append(Step(each.name, each.shape, each.rows, gap))
        end = each.stop
    return here[0].start, end, tuple(steps)
