"""A batch that comes out of a parcel is the one that went in, from another process too."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from difftrain.contracts import Batch, Bucket
from difftrain.data.loader import data_loader, from_shared_batch, items_of, to_shared_batch


def batch(number: int = 0) -> Batch:
    return Batch(
        bucket=Bucket(64, 32),
        record_id=torch.tensor([number, 7]),
        occurrence=torch.tensor([0, 3]),
        features={
            "hidden": torch.randn(2, 3, 5).bfloat16(),
            "pixels": torch.randint(256, (2, 3, 9, 7), dtype=torch.uint8),
            "mask": torch.tensor([[True, False, True], [False, False, True]]),
            "turned": torch.randn(4, 2).T,
        },
        draws={"noise": torch.randn(2, 4, 3), "timestep": torch.tensor(0.5)},
        loss_mask=torch.rand(2, 1, 4, 4),
        counts={"samples": 2.0},
        keys=(b"a", b"b"),
        step=number,
    )


def same(one: Batch, other: Batch) -> bool:
    a, b = one.tensors(), other.tensors()
    plain = [each.name for each in fields(Batch) if each.name in ("bucket", "counts", "keys", "rejects", "step")]
    assert a.keys() == b.keys() and all(getattr(one, name) == getattr(other, name) for name in plain)
    assert torch.equal(one.record_id, other.record_id) and torch.equal(one.occurrence, other.occurrence)
    return all(x.dtype == b[name].dtype and x.shape == b[name].shape and x.equal(b[name]) for name, x in a.items())


@pytest.mark.parametrize(
    "change", [{}, {"loss_mask": None}, {"features": {}, "draws": {}}, {"draws": {"none": torch.empty(0, 3)}}]
)
def test_what_comes_out_is_what_went_in(change: dict[str, Any]) -> None:
    whole = replace(batch(), **change)
    parcel = to_shared_batch(whole)
    assert parcel.content.is_shared() and same(from_shared_batch(parcel), whole)
    assert from_shared_batch("a fault") == to_shared_batch("a fault") == "a fault"


class Batches(Dataset[Any]):
    def __getitem__(self, number: int) -> Batch:
        torch.manual_seed(number)
        return batch(number)


def test_it_is_the_same_from_a_worker() -> None:
    alone, sent = (list(items_of(data_loader(Batches(), range(3), workers))) for workers in (0, 1))
    assert all(same(one, other) for one, other in zip(alone, sent, strict=True))
