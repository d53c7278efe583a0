"""run_ranks itself: what ranks are told, and that a rank that hangs or fails is never taken for a good one."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from difftrain.testing.spawn import run_ranks


def tell(*words: str) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "MORE")
    print(*words, *(os.environ[name] for name in names))


def fail() -> None:
    if os.environ["RANK"] == "1":
        sys.exit("rank 1 will not")


def hang() -> None:
    print("before the hang", flush=True)
    if os.environ["RANK"] == "0":
        time.sleep(600)


def test_ranks_know_their_place() -> None:
    ended = run_ranks(2, f"{__file__}::tell", "a", 3, env={"MORE": "x"})
    assert [e.out.split() for e in ended] == [
        ["a", "3", str(r), "2", str(r), "2", "127.0.0.1", "1", "x"] for r in (0, 1)
    ]


def test_a_script_runs_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, difftrain\nassert __name__ == '__main__'\nprint(sys.argv[1:])\n")
    assert run_ranks(1, script, "--flag", 1)[0].out.strip() == "['--flag', '1']"


def test_a_failing_rank_fails_the_test_with_its_last_words() -> None:
    with pytest.raises(AssertionError, match=r"ranks \[1\] of 2 ended wrong[\s\S]*rank 1 will not"):
        run_ranks(2, f"{__file__}::fail")
    assert [e.code for e in run_ranks(2, f"{__file__}::fail", check=False)] == [0, 1]


def test_a_hanging_rank_is_killed_and_named() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"ranks \[0\] of 2[\s\S]*rank 0: code None[\s\S]*before the hang"):
        run_ranks(2, f"{__file__}::hang", timeout_s=2, check=False)
    assert time.monotonic() - start < 10
