"""Everything hostile that a trainer is given, and what became of it: one line a kind, and 1 where anything fell short.

    python test/drills/hostile.py [--only KIND] [--name WORD] [--verbose]

A kind is a row of DRILLS: a function that tries what a regular expression finds among its names, and counts the outcomes.
Tracebacks, runs without an end, silence and code that ran must all be 0.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

DRILLS_DIR = Path(__file__).resolve().parent
sys.path[:0] = [str(DRILLS_DIR), str(DRILLS_DIR.parent / "support")]

import hostile_files  # noqa: E402
import hostile_images  # noqa: E402

# kind -> (names to try, verbose) -> outcomes, in hostile_files.KINDS
DRILLS: dict[str, Callable[[str, bool], Counter[str]]] = {
    "model files": hostile_files.try_models,
    "images": hostile_images.try_images,
}
GOOD = {"refused", "used"}


def fell_short(counts: Counter[str]) -> dict[str, int]:
    """Return the outcomes that must not be. A drill that tried nothing falls short too."""
    bad = {outcome: count for outcome, count in counts.items() if count and outcome not in GOOD}
    return bad if counts.total() else {"nothing tried": 1}


def main(argv: list[str] | None = None) -> int:
    """Try one kind or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(DRILLS))
    parser.add_argument("--name", default="", help="try those whose name a regular expression finds")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args(argv)
    bad: dict[str, int] = {}
    for kind, attempt in DRILLS.items():
        if args.only in (None, kind):
            began = time.monotonic()
            counts = attempt(args.name, args.verbose)
            print(f"{hostile_files.line_of(kind, counts)} ({time.monotonic() - began:.0f} s)", flush=True)
            bad |= fell_short(counts)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
