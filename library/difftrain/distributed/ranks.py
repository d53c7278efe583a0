"""The ranks of a job: a device group for tensors, a CPU group for decisions, and a time-out for both."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from difftrain.contracts import Batch, TrainingFault
from difftrain.distributed import heartbeats, rounds
from difftrain.distributed.launch import Launch
from difftrain.distributed.loopback import loopback_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from torch import Tensor

DEFAULT_TIMEOUT_MIN = 30.0
NOTICE_S = 30.0  # ranks that have not met by then say what they wait for
log = logging.getLogger("difftrain")

# What libraries say where a rank is gone, or did not come in time: gloo and c10d, NCCL's, then CANN's (EI0002: nobody
# answers, EI0006: no connection, EI0013: the link broke).
_LOST = re.compile(
    r"Connection (?:closed|reset|refused) by peer|Broken pipe|Timed out waiting \d+ms for (?:recv|send)"
    r"|ncclRemoteError|NCCL communicator was aborted|gloo/transport|Watchdog caught collective operation timeout|remote process exited or there was a network error"
    r"|\bEI00(?:02|06|13)\b",
    re.IGNORECASE,
)


_TIME_IS_UP = re.compile(r"timed? ?out|times out", re.IGNORECASE)


class RankLost(TrainingFault):
    """Another rank is gone, or did not come in time; the sentence names it."""


class _Device(Protocol):
    """What a process group needs to know of the device."""

    torch_device: torch.device

    @property
    def backend(self) -> str: ...

    def agree_on_waiting(self, timeout_min: float | None) -> str: ...

    def synchronise(self) -> None: ...


@dataclass
class Ranks:
    """Know this process's place, and let ranks agree. A single process needs no group and never waits.

    rank, size: in the job. local_rank, local_size: on this machine. control: the CPU group, or None when alone.
    heartbeats: what names a rank that is missing. timeout: how long others are waited for, limit: in words, as is where:
    the store.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    control: Any = None
    heartbeats: heartbeats.Heartbeats | None = None
    limit: str = ""
    where: str = ""
    timeout: timedelta = timedelta(minutes=DEFAULT_TIMEOUT_MIN)

    @classmethod
    def open(cls, launch: Launch, device: _Device, timeout_min: float | None = None) -> Ranks:
        """Join the job: the device's group first, then a gloo group for decisions on the host.

        timeout_min: how long any collective waits for a rank that does not come. Raises TrainingFault where the ranks
        do not meet in time.
        """
        if not launch.distributed:
            return cls()
        if (overruled := device.agree_on_waiting(timeout_min)) and launch.local_rank == 0:
            log.warning(overruled)
        timeout = timedelta(minutes=timeout_min or DEFAULT_TIMEOUT_MIN)
        at = f"{launch.size} ranks at {launch.master_addr}:{launch.master_port}"
        with (
            _noticed(f"rank {launch.rank}: waits for {at}, {_minutes(timeout)} at most"),
            _meeting(launch.rank, f"{at} %s; {_TO_CHECK}", timeout),
        ):
            with loopback_only(launch):
                shared = rounds.open_round(launch, timeout) if rounds.needed() else None
                dist.init_process_group(
                    device.backend, timeout=timeout, store=shared, rank=launch.rank, world_size=launch.size
                )
            store: Any = dist.PrefixStore("difftrain/heartbeats", dist.distributed_c10d._get_default_store())
            own = heartbeats.Heartbeats(
                store.clone(),
                launch.rank,
                launch.size,
                timeout.total_seconds(),
                (launch.master_addr, launch.master_port),
            )
            control = dist.new_group(backend="gloo", timeout=timeout)
        if device.torch_device.type != "cpu":
            with _meeting(launch.rank, f"{at} are connected, but their devices %s; {_LINK}", timeout):
                _connect(device, launch.size)
        where = f"{launch.master_addr}:{launch.master_port}"
        limit = _minutes(timeout)
        return cls(launch.rank, launch.size, launch.local_rank, launch.local_size, control, own, limit, where, timeout)

    def beside(self) -> Ranks:
        """Return the same ranks with a CPU group of their own, for the collectives of one other thread. Every rank calls it.

        Groups are not to be used by two threads at once: their collectives would meet in another order on another rank.
        """
        if self.control is None:
            return self
        with self._together():
            group = dist.new_group(backend="gloo", timeout=self.timeout)
        return replace(self, control=group, heartbeats=None)

    @property
    def leads_node(self) -> bool:
        """Tell whether this rank does what one process a machine does: downloads, the index."""
        return self.local_rank == 0

    @property
    def is_logger(self) -> bool:
        """Tell whether this rank writes reports and prints."""
        return self.rank == 0

    def doing(self, what: str) -> None:
        """Let the others know what this rank does from here on; `heartbeats.STEP` and a number while it computes a step."""
        if self.heartbeats:
            self.heartbeats.doing(what)

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

    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        """Return one rank's value on every rank (pickled: small, and only between ranks of one job)."""
        if self.control is None:
            return value
        box = [value]
        with self._together():
            dist.broadcast_object_list(box, src=source, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank."""
        if self.control is None:
            return [value]
        box: list[Any] = [None] * self.size
        with self._together():
            dist.all_gather_object(box, value, group=self.control)
        return box

    def same_batches(self, batches: list[Batch], size: int) -> list[Batch]:
        """Return batches that each `size` ranks which follow one another have in common. Collective where size is above 1.

        Ranks that share the tokens of a sample must have the same one, also where only some of them could read its file: it
        is what the first of them has.
        """
        if size == 1:
            return batches
        uses = self.gather([batch.uses for batch in batches])
        firsts = range(0, self.size, size)
        apart = {first for first in firsts if any(other != uses[first] for other in uses[first : first + size])}
        if not apart:
            return batches
        sent = self.gather([batch.on_host() for batch in batches] if self.rank in apart else None)
        first = self.rank // size * size
        return sent[first] if first in apart else batches

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Turn what the network says when a rank is lost into one line that names it."""
        with self.heartbeats.waiting() if self.heartbeats else contextlib.nullcontext():
            try:
                yield
            except RuntimeError as error:
                raise self._missing(error) from error

    def _missing(self, error: BaseException) -> RankLost:
        """Find out which rank is missing. The library's own text goes to the log of those who want it."""
        log.debug("rank %d: %s: %s", self.rank, type(error).__name__, error)
        roll = heartbeats.Roll(answered=False)
        if self.heartbeats:
            is_late = _TIME_IS_UP.search(str(error)) is not None
            with self.heartbeats.waiting() if is_late else contextlib.nullcontext():
                roll = self.heartbeats.roll(error, stacks=is_late)
        return RankLost(f"rank {self.rank}: {heartbeats.sentence(roll, self.size, self.limit, self.where)}")

    def counter(self, name: str) -> Callable[[], int]:
        """Return what hands out 0, 1, 2, ... to whichever rank asks next: each number once, and nobody waits for another.

        name: of this counter alone in the life of the job.
        """
        tally = self.tally(name)
        return lambda: tally(1) - 1

    def tally(self, name: str) -> Callable[[int], int]:
        """Return what adds to a sum over all ranks and says how large it is by now. name: as for `counter`."""
        if self.control is None:
            return _Sum().add
        store = dist.PrefixStore(f"difftrain/{name}", dist.distributed_c10d._get_default_store())
        return lambda value: int(store.add("sum", value))

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
        if self.heartbeats:
            self.heartbeats.end(heartbeats.LEFT)
        self.control = None
        dist.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        missing = self._missing(error) if error is not None and self.size > 1 and lost(error) else None
        self.abort(missing or error)
        if missing is not None:
            raise missing from error

    def abort(self, error: BaseException | None = None) -> None:
        """Leave without waiting: the control group's sockets close, and ranks that wait for this one fail at once.

        error: why; one of this rank's own is what the others' messages point at.

        An accelerator's group is left to the end of the process: freeing it may wait for the very ranks that are lost.
        """
        if self.control is None:
            return
        control, self.control = self.control, None
        if self.heartbeats:
            self.heartbeats.end(heartbeats.LEFT if isinstance(error, RankLost) else heartbeats.FAILED)
        with contextlib.suppress(Exception):  # the first error is the one to be seen
            dist.destroy_process_group(None if dist.get_backend() == "gloo" else control)


class _Sum:
    """Add up in one process."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, value: int) -> int:
        """Return the sum with another value."""
        self._sum += value
        return self._sum


_TO_CHECK = (
    "check that every machine was started, with the same number of machines and the same master address, that this "
    "address reaches the first machine from here, and that its firewall lets the port through"
)
_LINK = (
    "run `difftrain doctor` on each machine; for NPU check the links with hccn_tool, that HCCL_IF_IP (where it "
    "is set) is an address of this machine that the others reach, and that all have the same CANN"
)


def lost(error: BaseException) -> bool:
    """Tell whether an error of a library means that another rank is gone or did not come in time."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def _connect(device: _Device, size: int) -> None:
    """Let the devices meet: groups of accelerators connect at their first collective, which would be in mid-training."""
    box = torch.ones(1, device=device.torch_device)
    dist.all_reduce(box, dist.ReduceOp.SUM)
    device.synchronise()
    if int(box.item()) != size:
        raise RuntimeError(f"{size} devices that each add 1 gave the sum {box.item():g}")


@contextlib.contextmanager
def _meeting(rank: int, what: str, timeout: timedelta) -> Iterator[None]:
    """Say of ranks that fail to meet whether it took them the whole time. what: with %s for how it failed."""
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        late = time.monotonic() - start > 0.9 * timeout.total_seconds()
        log.debug("rank %d: %s: %s", rank, type(error).__name__, error)
        how = f"did not connect within {_minutes(timeout)}" if late else "could not connect"
        why = "" if late else f" (the library's words: {_first_line(error)})"
        raise TrainingFault(f"rank {rank}: {what % how}{why}") from error


def _minutes(timeout: timedelta) -> str:
    return f"{timeout.total_seconds() / 60:g} min"


@contextlib.contextmanager
def _noticed(log: str) -> Iterator[None]:
    """Say what is waited for once it takes long."""
    timer = threading.Timer(NOTICE_S, print, (log,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
