"""Everything hostile that a trainer is given, and what became of it: one line a kind, and 1 where anything fell short.

    python test/drills/hostile.py [--only KIND] [--name WORD] [--verbose]
    python test/drills/hostile.py --only recipes --recipes=50 --seed=7

A kind is a row of DRILLS: a function that tries model files and images whose names a regular expression finds, or as many
mutated recipes and command lines as are asked for, and counts the outcomes. Tracebacks, runs without an end, silence and
code that ran must all be 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

DRILLS_DIR = Path(__file__).resolve().parent
ROOT = DRILLS_DIR.parents[1]
sys.path[:0] = [str(DRILLS_DIR), str(DRILLS_DIR.parent / "support"), str(ROOT / "library"), str(ROOT)]

import hostile_files  # noqa: E402
import hostile_images  # noqa: E402
import mutated  # noqa: E402

GOOD = {"refused", "used"}


def try_recipes(args: argparse.Namespace) -> Counter[str]:
    """Try recipes of ours with some of their values made hostile."""
    return _configurations(lambda folder: mutated.recipe_cases(args.seed, args.recipes, folder), args.limit_s)


def try_lines(args: argparse.Namespace) -> Counter[str]:
    """Try command lines of kohya's flags that nobody means."""
    return _configurations(lambda folder: mutated.line_cases(args.seed, args.lines, folder), args.limit_s)


def _configurations(cases: Callable[[Path], Iterable[mutated.Case]], limit_s: float) -> Counter[str]:
    """Run each as a dry run; show each that fell short."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        folder = mutated.prepared(Path(name))
        counts = mutated.counted(cases(folder), folder, limit_s)
        for case, text in counts.tracebacks:
            print(f"  traceback: {_shown(case)}\n    {text.strip().splitlines()[-1] if text.strip() else 'killed'}")
        for kind, some in (("no end", counts.hangs), ("silent", counts.silent)):
            for case in some:
                print(f"  {kind}: {_shown(case)}")
    short = {"traceback": len(counts.tracebacks), "no end": len(counts.hangs), "silent": len(counts.silent)}
    refused = sum(count for code, count in counts.codes.items() if code) - short["traceback"] - short["silent"]
    return Counter({"used": counts.codes[0], "refused": refused, **short})


def _shown(case: mutated.Case) -> str:
    """Return a command as it was; of a recipe also its text, whose file is gone."""
    line = f"{case.command} {' '.join(case.words)}"
    path = Path(case.words[0].partition("=")[2])
    text = path.read_bytes().decode("utf-8", "replace")[:2000] if case.command == "train" and path.is_file() else ""
    return f"{line}\n{text}"[:3000]


# kind -> what tries it -> outcomes, in hostile_files.KINDS
DRILLS: dict[str, Callable[[argparse.Namespace], Counter[str]]] = {
    "recipes": try_recipes,
    "command lines": try_lines,
    "model files": lambda args: hostile_files.try_models(args.name, args.verbose),
    "images": lambda args: hostile_images.try_images(args.name, args.verbose),
}


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
    parser.add_argument("--recipes", type=int, default=2000)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit_s", type=float, default=mutated.LIMIT_S)
    args = parser.parse_args(argv)
    bad: dict[str, int] = {}
    for kind, attempt in DRILLS.items():
        if args.only in (None, kind):
            began = time.monotonic()
            counts = attempt(args)
            print(f"{hostile_files.line_of(kind, counts)} ({time.monotonic() - began:.0f} s)", flush=True)
            bad |= fell_short(counts)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
