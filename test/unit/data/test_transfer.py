"""What a loader worker hands over is what its parent receives, all of it or nothing."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from difftrain.contracts import Batch, Bucket
from difftrain.data.loader import WorkerDied, data_loader, items_of
from difftrain.data.transfer import receive, send


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
    sent = send(whole)
    assert isinstance(sent.content, torch.Tensor) and sent.content.is_shared() and same(receive(sent), whole)
    assert len(ForkingPickler.dumps((10**9, sent))) + 4 <= select.PIPE_BUF  # a write that is done at once or not at all
    assert receive(send("a fault")) == "a fault" and receive(send(None)) is None


class Batches(Dataset[Any]):
    def __getitem__(self, number: int) -> Batch:
        torch.manual_seed(number)
        return batch(number)


def test_it_is_the_same_from_a_worker() -> None:
    alone, sent = (list(items_of(data_loader(Batches(), range(3), workers))) for workers in (0, 1))
    assert all(same(one, other) for one, other in zip(alone, sent, strict=True))


class LongNames(Dataset[Any]):
    """Items with more to say than a pipe takes at once, as captions and names of a large batch are."""

    def __getitem__(self, number: int) -> list[str]:
        return [f"{number} {position}" * 10 for position in range(2_000)]


@pytest.mark.workers
@pytest.mark.parametrize("watched", [True, False])
def test_a_worker_killed_in_the_middle_of_a_message_is_noticed(watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message goes in one write, or its reader waits for the other half for ever: all workers hold the pipe open."""
    write = Connection._send

    def write_and_die(self: Connection, content: bytes, *more: Any) -> None:
        write(self, content, *more)
        if multiprocessing.parent_process() is not None and len(content) <= 8:  # a header alone
            os.kill(os.getpid(), signal.SIGKILL)

    def too_late(*_: Any) -> None:
        pytest.fail("the loader waits for a dead worker")  # no Exception, which torch would catch

    monkeypatch.setattr(Connection, "_send", write_and_die)
    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(30)
    try:
        loader = data_loader(LongNames(), range(4), 2, watched=watched)
        assert [len(item) for item in items_of(loader, patience_s=20)] == [2_000] * 4
    except WorkerDied:
        pass
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Gone(Dataset[Any]):
    """A dataset whose file has gone."""

    def __getitem__(self, number: int) -> Any:
        raise FileNotFoundError("the file of the dataset")


@pytest.mark.workers
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_is_no_dead_worker(workers: int) -> None:
    with pytest.raises(FileNotFoundError, match="of the dataset"):
        list(items_of(data_loader(Gone(), range(2), workers)))
