"""What a loader worker hands over: pickled, with all its arrays and tensors, into one piece of shared memory.

The message itself stays below what a pipe takes at once (PIPE_BUF, 4 KiB on Linux): a worker that is killed leaves all of
it or nothing. Half a message would let its reader wait for ever, since every other worker can still write into the pipe.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_ALIGN = 64  # bytes: where an array may begin
_SHORT = 1024  # bytes that travel in the message: shared memory takes a connection, a millisecond


class Sent(NamedTuple):
    """An item on its way. content: uint8 bytes in shared memory, or just bytes; head: how many of them say what it is."""

    content: torch.Tensor | bytes
    head: int


class _ItemPickler(pickle.Pickler):
    """Pickle tensors as numpy pickles arrays: their bytes go to the buffers."""

    def reducer_override(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return NotImplemented
        content = item.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return _tensor, (pickle.PickleBuffer(content), item.dtype, tuple(item.shape))


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if len(memoryview(content)) == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(shape)


def send(item: Any) -> Sent:
    """Make an item ready to leave its worker. Pickled in full: raises what pickle raises."""
    # what it is, and the bytes of its arrays one behind another
    buffers: list[pickle.PickleBuffer] = []
    pickled = _pickled(item, buffers.append)
    pieces = [buffer.raw() for buffer in buffers]
    head = pickle.dumps(([piece.nbytes for piece in pieces], pickled))
    if not pieces and len(head) <= _SHORT:
        return Sent(head, len(head))

    # the storage is shared from the start, so that sending it copies nothing
    starts = _starts(len(head), [piece.nbytes for piece in pieces])
    content = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(starts[-1]))
    memory = content.numpy().data
    memory[: len(head)] = head
    for start, piece in zip(starts, pieces, strict=False):
        memory[start : start + piece.nbytes] = piece
    return Sent(content, len(head))


def receive(sent: Sent) -> Any:
    """Return the item; its arrays and tensors look into the shared memory."""
    if isinstance(sent.content, bytes):
        sizes, pickled = pickle.loads(sent.content)
        return pickle.loads(pickled, buffers=())
    memory = sent.content.numpy().data
    sizes, pickled = pickle.loads(memory[: sent.head])
    starts = _starts(sent.head, sizes)
    return pickle.loads(
        pickled, buffers=[memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    )


def _pickled(item: Any, take: Callable[[pickle.PickleBuffer], Any]) -> bytes:
    written = io.BytesIO()
    _ItemPickler(written, protocol=5, buffer_callback=take).dump(item)
    return written.getvalue()


def _starts(head: int, sizes: list[int]) -> list[int]:
    """Return where each array begins behind the head, and last where all ends."""
    steps = [-(-size // _ALIGN) * _ALIGN for size in (head, *sizes)]
    return list(itertools.accumulate(steps))
