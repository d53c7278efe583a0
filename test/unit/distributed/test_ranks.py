"""What tells of a missing rank, and how that is said: no library's own text, and the rank by its number."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from difftrain.distributed.heartbeats import MOST_NAMED, Roll, sentence
from difftrain.distributed.ranks import lost

# in pieces: the page of messages has the pattern that finds them
TEXTS = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:38553",
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 60000ms for send operation to complete",
    " ".join(
        (
            "[Rank 1] Watchdog caught",
            "collective operation",
            "timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600021 ms",
        )
    ),
    " ".join(
        (
            "NCCL error in: ProcessGroupNCCL.cpp:2317, remote process",
            "exited or there was a",
            "network error, NCCL version 2.26",
        )
    ),
    " ".join(("NCCL communicator", "was aborted", "on rank 3.")),
    "ncclRemoteError: A call failed",
    "EI0002: The wait execution of the Notify register times out. Reason: the Notify register has not received",
)


@pytest.mark.parametrize("text", TEXTS)
def test_words_of_libraries_for_a_rank_that_is_gone(text: str) -> None:
    assert lost(RuntimeError(text)) and lost(dist.DistBackendError(text))


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError(TEXTS[0])])
def test_other_errors_are_a_ranks_own(error: Exception) -> None:
    assert not lost(error)


@pytest.mark.parametrize(
    ("roll", "facts"),
    [
        (Roll(failed=(3,)), ["rank 3 of 64 has", "error"]),
        (Roll(silent=(0, 5)), ["ranks 0, 5 of 64 have", "stopped", "killed"]),
        (Roll(silent=tuple(range(20))), [f"{20 - MOST_NAMED} more"]),
        (Roll(late=(7,)), ["rank 7 of 64 is alive", "30 min"]),
        (Roll(answered=False), ["10.0.0.1:8989"]),
        (Roll(), ["network"]),
    ],
)
def test_who_is_missing_is_said(roll: Roll, facts: list[str]) -> None:
    text = sentence(roll, 64, "30 min", "10.0.0.1:8989")
    assert all(fact in text for fact in facts), text
    # who has failed or is silent is the cause; who is late waits for it, perhaps
    assert sentence(Roll(failed=(1,), silent=(2,), late=(3,)), 4, "", "").startswith("rank 1 ")
    assert sentence(Roll(silent=(2,), late=(3,)), 4, "", "").startswith("rank 2 ")
