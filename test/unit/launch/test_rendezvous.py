"""Machines that wait for one another: threads of one process, each with a store of its own, on the loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from refusals import names
from torch.distributed import PrefixStore, TCPStore

from difftrain.distributed.ranks import DEFAULT_TIMEOUT_MIN
from difftrain.launch import machines, rendezvous
from difftrain.launch.rendezvous import Machine, RendezvousFailed


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "POLL_S", 0.02)
    monkeypatch.setattr(rendezvous, "LINGER_S", 0.1)
    monkeypatch.setattr(rendezvous, "GONE_S", 0.2)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


class Site:
    """Machines of one job, each waiting in a thread."""

    def __init__(self, pool: ThreadPoolExecutor, port: int) -> None:
        self.pool, self.port = pool, port
        self.said: dict[str, list[str]] = {}

    def start(
        self, rank: int, count: int = 2, wait_s: float = 20.0, notice_s: float = 30.0, name: str = ""
    ) -> Future[Any]:
        said = self.said.setdefault(name or str(rank), [])
        machine = Machine(rank, count, "127.0.0.1", self.port, wait_s)
        return self.pool.submit(rendezvous.meet, machine, said.append, notice_s)

    def until_said(self, name: str, *facts: str) -> None:
        deadline = time.monotonic() + 60
        while not any(all(fact in line for fact in facts) for line in self.said.get(name, [])):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)


@pytest.fixture
def site(pool: ThreadPoolExecutor, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    over, pause = threading.Event(), rendezvous.Waiting.pause

    def until_over(waiting: rendezvous.Waiting, *words: Any) -> None:
        if over.is_set():
            raise RendezvousFailed("the test is over")
        pause(waiting, *words)

    monkeypatch.setattr(rendezvous.Waiting, "pause", until_over)
    yield Site(pool, port)
    over.set()


def test_whoever_comes_first_says_for_whom_it_waits(site: Site) -> None:
    second = site.start(1, 3)
    site.until_said("1", "machine 0 of 3", f"127.0.0.1:{site.port}")
    first = site.start(0, 3)
    site.until_said("0", "machine 1 of 3", "joined")
    site.until_said("0", "machines 1, 2 of 3", f"127.0.0.1:{site.port}", "left")
    third = site.start(2, 3)
    assert all(each.result(60) is not None for each in (first, second, third))


@pytest.mark.nightly
def test_it_is_said_again_and_again_until_the_time_is_over(site: Site) -> None:
    with pytest.raises(RendezvousFailed) as caught:
        site.start(0, wait_s=2.0, notice_s=0.4).result(60)
    waiting = [line for line in site.said["0"] if "machine 1 of 2" in line]
    assert 2 <= len(waiting) <= 6 and caught.value.code == 1
    assert names(caught.value, f"127.0.0.1:{site.port}", "--ddp_timeout", "--node_rank")


def test_a_machine_0_that_never_comes(site: Site) -> None:
    with pytest.raises(RendezvousFailed) as caught:
        site.start(1, wait_s=0.3).result(60)
    assert names(caught.value, "machine 0 of 2", f"127.0.0.1:{site.port}") and caught.value.code == 1


def test_a_name_that_nobody_knows_is_the_reason_that_is_given(port: int) -> None:
    said: list[str] = []
    machine = Machine(1, 2, "no-such-machine.invalid", port, 0.1)
    with pytest.raises(RendezvousFailed, match="name"):
        rendezvous.meet(machine, said.append)


def test_when_machine_0_gives_up_the_others_hear_for_whom(site: Site) -> None:
    first, second = site.start(0, 3, wait_s=0.6), site.start(1, 3, wait_s=30)
    for machine in (first, second):
        with pytest.raises(RendezvousFailed) as caught:
            machine.result(60)
        assert names(caught.value, "machine 2 of 3") and caught.value.code == 1


def test_machines_that_count_differently(site: Site) -> None:
    site.start(0, 2)
    with pytest.raises(RendezvousFailed) as caught:
        site.start(1, 3).result(60)
    assert names(caught.value, "--nnodes", 3, 2) and caught.value.code == 2


def test_a_machine_that_comes_before_the_count_is_said_does_not_sign_in_unseen(site: Site) -> None:
    store = TCPStore("localhost", site.port, None, True, wait_for_workers=False)
    early = site.start(1, 3)
    site.until_said("1", "machine 0 of 3", "store")
    PrefixStore(rendezvous._PREFIX, store).set("count", "2")
    with pytest.raises(RendezvousFailed) as caught:
        early.result(60)
    assert names(caught.value, "--nnodes", 3, 2) and caught.value.code == 2


def test_two_machines_with_one_number(site: Site) -> None:
    site.start(0, 3)
    older = site.start(1, 3)
    site.until_said("0", "machine 1 of 3", "joined")
    site.start(1, 3, wait_s=2.5, name="newer")
    with pytest.raises(RendezvousFailed) as caught:
        older.result(60)
    assert names(caught.value, "--node_rank", "machine 1") and caught.value.code == 2


def test_a_port_that_is_taken(site: Site) -> None:
    with socket.socket() as other:
        other.bind(("", site.port))
        other.listen()
        with pytest.raises(RendezvousFailed) as caught:
            site.start(0).result(60)
    assert names(caught.value, "--master_port", site.port) and caught.value.code == 2


def test_one_that_died_is_missed_again_and_may_come_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = threading.Event()
    pause = rendezvous.Waiting.pause

    def until_killed(waiting: rendezvous.Waiting, *words: Any) -> None:
        if killed.is_set() and waiting.machine.token == "first":
            raise SystemExit
        pause(waiting, *words)

    monkeypatch.setattr(rendezvous.Waiting, "pause", until_killed)
    leader = site.start(0, 3)
    first = Machine(1, 3, "127.0.0.1", site.port, 5.0, token="first")
    mortal = site.pool.submit(rendezvous.meet, first, lambda line: None)
    site.until_said("0", "machine 1 of 3", "joined")
    killed.set()
    site.until_said("0", "machine 1 of 3", "has left")
    with pytest.raises(SystemExit):
        mortal.result(60)
    both = [site.start(1, 3), site.start(2, 3)]
    assert all(machine.result(60) for machine in (leader, *both))


@pytest.mark.nightly  # takes five seconds
def test_a_machine_that_comes_to_a_job_without_it_waits_for_the_next(site: Site) -> None:
    leader, guest = site.start(0), site.start(1)
    store = leader.result(60), guest.result(60)
    late = site.start(1, wait_s=0.5, name="late")
    site.until_said("late", "machine 0 of 2", "started")
    with pytest.raises(RendezvousFailed):
        late.result(60)
    assert store


def test_what_torchrun_is_told() -> None:
    words = ["--nnodes=2", "--node_rank=1", "--nproc_per_node=8", "--master_addr=a", "--master_port=9", "x.py", "--y"]
    found = rendezvous.machine_of(["--rdzv_conf=timeout=120", *words])
    assert found is not None
    assert (found.rank, found.count, found.address, found.port, found.wait_s) == (1, 2, "a", 9, 120)
    assert rendezvous.machine_of(["--nnodes=1", "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "x.py"]) is None
    assert rendezvous.machine_of(["--nnodes=1", "--master_port=9", "x.py"]) is None
    assert machines.WAIT_MIN == DEFAULT_TIMEOUT_MIN


def test_an_address_of_another_machine_is_doubted() -> None:
    assert rendezvous.is_own("127.0.0.1")
    assert not rendezvous.is_own("192.0.2" + ".7") and rendezvous.is_own("no-such-machine.invalid")
    assert Machine(0, 2, "192.0.2" + ".7", 1, 1).doubt and not Machine(1, 2, "192.0.2" + ".7", 1, 1).doubt
