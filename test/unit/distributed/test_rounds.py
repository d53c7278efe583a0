"""Ranks that a launcher starts again meet those of the same attempt, whatever earlier ones have left in the store."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from difftrain.distributed.rounds import agree_on_name, needed


def met(store: HashStore, size: int, late: int | None = None, pause_s: float = 0.0) -> set[str]:
    """Let ranks agree at once, one of them later; return the names that they found."""
    names: list[str] = []

    def rank(number: int) -> None:
        names.append(agree_on_name(store, number, size, 20.0))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for number, thread in enumerate(threads):
        if number != late:
            thread.start()
    if late is not None:
        threading.Event().wait(pause_s)
        threads[late].start()
    for thread in threads:
        thread.join(30)
    assert len(names) == size
    return set(names)


@pytest.fixture
def store() -> HashStore:
    made = HashStore()
    made.set_timeout(timedelta(seconds=20))
    return made


@pytest.mark.parametrize("late", [0, 1, 2])
def test_every_attempt_has_a_name_of_its_own(store: HashStore, late: int) -> None:
    """A rank that comes before the first one finds the name of the attempt before, and does not take it."""
    names = [met(store, 3), met(store, 3, late, 0.2), met(store, 3)]
    assert all(len(found) == 1 for found in names) and len(set.union(*names)) == 3


def test_an_attempt_that_was_broken_off_holds_nobody_up(store: HashStore) -> None:
    with pytest.raises(RuntimeError, match=r"1, 2"):
        agree_on_name(store, 0, 3, 0.1)  # its name stays in the store
    with pytest.raises(RuntimeError):
        agree_on_name(store, 1, 3, 0.1)  # and so does an answer to it
    assert len(met(store, 3, 0, 0.2)) == 1


def test_only_a_store_that_outlives_the_ranks_needs_it() -> None:
    assert needed({"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert not needed({"TORCHELASTIC_USE_AGENT_STORE": "False"}) and not needed({})
