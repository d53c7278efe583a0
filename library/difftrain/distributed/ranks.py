"""The ranks of a job: a device group for tensors, a CPU group for decisions, and a time-out for both."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from difftrain.contracts import TrainingFault
from difftrain.distributed.launch import Launch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from torch import Tensor

DEFAULT_TIMEOUT_MIN = 30.0


class _Device(Protocol):
    """What a process group needs to know of the device."""

    @property
    def backend(self) -> str: ...


@dataclass
class Ranks:
    """Know this process's place, and let ranks agree. A single process needs no group and never waits.

    rank, size: in the job. local_rank, local_size: on this machine. control: the CPU group, or None when alone.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    control: Any = None

    @classmethod
    def open(cls, launch: Launch, device: _Device, timeout_min: float | None = None) -> Ranks:
        """Join the job: the device's group first, then a gloo group for decisions on the host.

        timeout_min: how long any collective waits for a rank that does not come. Raises TrainingFault where the ranks
        do not meet in time.
        """
        if not launch.distributed:
            return cls()
        timeout = timedelta(minutes=timeout_min or DEFAULT_TIMEOUT_MIN)
        meeting = f"{launch.size} ranks at {launch.master_addr}:{launch.master_port}"
        with _told(launch.rank, f"{meeting} did not meet within {timeout.total_seconds() / 60:g} min"):
            dist.init_process_group(device.backend, timeout=timeout, rank=launch.rank, world_size=launch.size)
            control = dist.new_group(backend="gloo", timeout=timeout)
        return cls(launch.rank, launch.size, launch.local_rank, launch.local_size, control)

    @property
    def leads_node(self) -> bool:
        """Tell whether this rank does what one process a machine does: downloads, the index."""
        return self.local_rank == 0

    @property
    def is_logger(self) -> bool:
        """Tell whether this rank writes reports and prints."""
        return self.rank == 0

    def agree(self, value: int) -> int:
        """Return the largest value that any rank gave."""
        if self.control is None:
            return int(value)
        box = torch.tensor(int(value), dtype=torch.int64)
        with self._together():
            dist.all_reduce(box, dist.ReduceOp.MAX, group=self.control)
        return int(box)

    def any(self, flag: bool) -> bool:
        """Tell whether any rank said yes."""
        return bool(self.agree(bool(flag)))

    def broadcast(self, value: Any = None) -> Any:
        """Return rank 0's value on every rank (pickled: small, and only between ranks of one job)."""
        if self.control is None:
            return value
        box = [value]
        with self._together():
            dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank."""
        if self.control is None:
            return [value]
        box: list[Any] = [None] * self.size
        with self._together():
            dist.all_gather_object(box, value, group=self.control)
        return box

    def _together(self) -> contextlib.AbstractContextManager[None]:
        return _told(self.rank, "another rank has ended or did not come in time; its own error says why")

    def barrier(self) -> None:
        """Wait for every rank."""
        self.agree(0)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a device tensor over all ranks, in place; asynchronous to the host on an accelerator."""
        if self.control is not None:
            dist.all_reduce(tensor, dist.ReduceOp.SUM)
        return tensor

    def close(self) -> None:
        """Leave the job in good order: wait for the others, then free the groups."""
        if self.control is None:
            return
        self.barrier()
        self.control = None
        dist.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def abort(self) -> None:
        """Leave without waiting: the control group's sockets close, and ranks that wait for this one fail at once.

        An accelerator's group is left to the end of the process: freeing it may wait for the very ranks that are lost.
        """
        if self.control is None:
            return
        control, self.control = self.control, None
        with contextlib.suppress(Exception):  # the first error is the one to be seen
            dist.destroy_process_group(None if dist.get_backend() == "gloo" else control)


@contextlib.contextmanager
def _told(rank: int, what: str) -> Iterator[None]:
    """Turn what the network says when a rank is lost into one line that a user can read."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrainingFault(f"rank {rank}: {what} ({reason})") from error
