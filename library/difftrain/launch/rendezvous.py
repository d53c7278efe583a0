"""Machines that wait for one another before torchrun starts, and say for whom.

torchrun's own meeting says nothing until it is over. So this one is held first: machine 0 keeps a store on the master's
port, the others sign in, and every machine says every half minute who is missing and how long it still waits. Once all
are there, torchrun starts in the same process, takes over machine 0's store and finds everybody at once.

In the store: here/RANK is who signed in as that machine, beat/RANK counts as long as it lives, missing is what machine 0
waits for, begun names those that it began with, fault ends them all. A machine that was restarted signs in anew; one
that comes to a job which has begun without it waits until that is over.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

NOTICE_S = 30.0  # how often it is said who is missing
POLL_S = 0.5
GONE_S = 10.0  # a machine that has not counted on for so long is no more
CONNECT_S = 5.0
LINGER_S = 3 * POLL_S  # as long as the others take to read why it is over
_PREFIX = "difftrain/machines"
_CHECK = (
    "check that every machine was started, with the same --nnodes and --master_ip and a --node_rank of its own, that the "
    "address reaches machine 0 from every machine, and that no firewall blocks the port; --ddp_timeout is the limit, in "
    "minutes"
)


class RendezvousFailed(Exception):
    """Say why the machines did not meet. code: 2 where what was asked for cannot work, 1 where somebody did not come."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Machine:
    """This machine among those of a job. wait_s: how long it waits for the others."""

    rank: int
    count: int
    address: str
    port: int
    wait_s: float
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def meeting(self) -> str:
        """Return where the machines meet."""
        return f"{self.address}:{self.port}"

    @cached_property
    def doubt(self) -> str:
        """Return what is odd about machine 0: the address of machine 0 is not its own."""
        if self.rank or is_own(self.address):
            return ""
        return f" ({self.address} is not an address of this machine: is --node_rank=0 right here?)"


@dataclass
class Waiting:
    """Say at intervals who is missing, until the time is over."""

    machine: Machine
    log: Callable[[str], None]
    notice_s: float
    start: float = field(default_factory=time.monotonic)
    noticed_at: float = float("-inf")

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self.start + self.machine.wait_s - time.monotonic()

    def pause(self, missing: list[int], why: str = "") -> None:
        """Wait a moment. missing: nobody where that is not known yet. why: what keeps them, as far as it can be seen.

        Raises: RendezvousFailed where the time is over.
        """
        names = _names(missing or [0], self.machine.count)
        because = f" ({why})" if why else self.machine.doubt
        if self.left_s() <= 0:
            raise RendezvousFailed(
                f"{names} did not reach {self.machine.meeting} within {_duration(self.machine.wait_s)}{because}: {_CHECK}"
            )
        if missing and time.monotonic() - self.noticed_at >= self.notice_s:
            self.noticed_at = time.monotonic()
            self.log(f"waiting for {names} at {self.machine.meeting}{because}, {_duration(self.left_s())} left")
        time.sleep(min(POLL_S, max(0.0, self.left_s())))


def machine_of(torchrun: list[str]) -> Machine | None:
    """Return this machine's place as torchrun's arguments have it; None where there is no other machine."""
    from torch.distributed.run import parse_args

    words = parse_args(torchrun)
    if words.rdzv_backend != "static" or int(words.nnodes) < 2:
        return None
    settings = dict(pair.split("=", 1) for pair in words.rdzv_conf.split(",") if "=" in pair)
    wait_s = float(settings.get("timeout", 600))  # torchrun's own
    return Machine(words.node_rank, int(words.nnodes), words.master_addr, words.master_port, wait_s)


def meet(machine: Machine, log: Callable[[str], None], notice_s: float = NOTICE_S) -> Any:
    """Wait until every machine is there; return the store, which must be kept until torchrun has begun.

    Raises: RendezvousFailed.
    """
    waiting = Waiting(machine, log, notice_s)
    return _lead(machine, waiting) if machine.rank == 0 else _follow(machine, waiting)


# --- machine 0


@dataclass
class Guest:
    """Another machine, as machine 0 sees it."""

    token: str
    host: str
    beat: int
    seen: float
    alive: bool = False  # it has counted on since it was first seen


def _lead(machine: Machine, waiting: Waiting) -> Any:
    """Keep the store until all have signed in, and begin with them."""
    from torch.distributed import PrefixStore

    store = _serve(machine)
    table = PrefixStore(_PREFIX, store)
    table.set("count", str(machine.count))
    guests: dict[int, Guest] = {}
    while True:
        for rank in range(1, machine.count):
            _look(machine, table, rank, guests, waiting.log)
        missing = [rank for rank in range(1, machine.count) if rank not in guests or not guests[rank].alive]
        table.set("missing", ",".join(map(str, missing)))
        if not missing:
            table.set("begun", " ".join(guest.token for guest in guests.values()))
            return store
        try:
            waiting.pause(missing)
        except RendezvousFailed as failed:
            _end(table, str(failed), failed.code)
            raise


def _look(machine: Machine, table: Any, rank: int, guests: dict[int, Guest], log: Callable[[str], None]) -> None:
    """See whether a machine has signed in, and lives."""
    if not table.check([f"here/{rank}"]):
        return
    token, host = table.get(f"here/{rank}").decode().split(" ")
    guest, beat = guests.get(rank), table.add(f"beat/{rank}", 0)
    if guest is None or guest.token != token:
        guests[rank] = Guest(token, host, beat, time.monotonic())
    elif beat != guest.beat:
        if not guest.alive:
            log(f"machine {rank} of {machine.count} has joined: {host}")
        guest.beat, guest.seen, guest.alive = beat, time.monotonic(), True
    elif time.monotonic() - guest.seen > GONE_S:
        log(f"machine {rank} of {machine.count} has left: {host}")
        del guests[rank]
        table.delete_key(f"here/{rank}")


def _serve(machine: Machine) -> Any:
    """Open the store on the master's port. Raises: RendezvousFailed where the port is taken."""
    from torch.distributed import TCPStore

    try:
        return TCPStore(
            "localhost", machine.port, None, True, timedelta(seconds=60), wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error) and "in use" not in str(error):
            raise RendezvousFailed(f"machine 0 cannot listen on port {machine.port}: {first_line(error)}") from error
        text = f"--master_port: port {machine.port} of this machine is in use (give another one on every machine)"
        raise RendezvousFailed(text, 2) from error


def _end(table: Any, text: str, code: int) -> None:
    """Let the others know why it is over."""
    table.set("fault", f"{code} {text}")
    time.sleep(LINGER_S)


# --- the others


def _follow(machine: Machine, waiting: Waiting) -> Any:
    """Find machine 0 and sign in, again where it was lost, until it begins."""
    from torch.distributed import TCPStore

    while True:
        try:
            socket.create_connection((machine.address, machine.port), CONNECT_S).close()
            patience = timedelta(seconds=max(1.0, min(60.0, waiting.left_s())))
            store = TCPStore(machine.address, machine.port, None, False, patience, wait_for_workers=False)
            why = _sign_in(machine, store, waiting)
        except OSError as error:
            why = _reason(error)
        except RuntimeError as error:  # machine 0 has ended, or something else listens there
            why = first_line(error)
        if not why:
            return store
        waiting.pause([0], why)


def _sign_in(machine: Machine, store: Any, waiting: Waiting) -> str:
    """Sign in and wait for the beginning; return why it was not let in, or nothing.

    Raises: RendezvousFailed.
    """
    from torch.distributed import PrefixStore

    table = PrefixStore(_PREFIX, store)
    key = f"here/{machine.rank}"
    if table.check(["begun"]):
        return "a job that started without this machine is still running there"
    if not table.check(["count"]):  # its port is open a moment before it says for how many it waits
        return "a store answers there, but no machine 0 of this package yet"
    if int(table.get("count")) != machine.count:
        named = f"--nnodes: {machine.count} on machine {machine.rank}, {table.get('count').decode()} on machine 0"
        raise RendezvousFailed(named, 2)
    table.set(key, f"{machine.token} {socket.gethostname()}")
    while True:
        table.add(f"beat/{machine.rank}", 1)
        if table.check(["fault"]):
            code, text = table.get("fault").decode().split(" ", 1)
            raise RendezvousFailed(f"machine 0 gave up: {text}", int(code))
        if table.check(["begun"]):
            let_in = machine.token in table.get("begun").decode().split(" ")
            return "" if let_in else "the job has started without this machine"
        token, host = table.get(key).decode().split(" ") if table.check([key]) else ("", "")
        if not token:  # machine 0 took this one for gone
            table.set(key, f"{machine.token} {socket.gethostname()}")
        elif token != machine.token:
            raise RendezvousFailed(
                f"--node_rank: {host} was started as machine {machine.rank} too (every machine needs its own number)",
                2,
            )
        missing = table.get("missing").decode() if table.check(["missing"]) else ""
        others = [int(rank) for rank in missing.split(",") if rank and int(rank) != machine.rank]
        waiting.pause(others)


def is_own(address: str) -> bool:
    """Tell whether an address is one of this machine's; one that nobody knows may be."""
    try:
        addresses = socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)
    except OSError:
        return True
    for family, kind, _, _, socket_address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(socket_address)
            return True
    return False


def _reason(error: OSError) -> str:
    """Return why nobody could be reached, in a few words."""
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved"
    if isinstance(error, TimeoutError):
        return "no answer"
    known = {errno.ECONNREFUSED: "nothing listens there yet", errno.EHOSTUNREACH: "no route to it"}
    return known.get(error.errno or 0, error.strerror or str(error))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without the address that torch adds behind it."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _names(missing: list[int], count: int) -> str:
    numbers = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"machine{'s' if len(missing) > 1 else ''} {numbers} of {count}"


def _duration(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
