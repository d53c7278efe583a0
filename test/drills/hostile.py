"""Send what nobody means: thousands of mutated recipes and command lines, and hostile files where that drill is here.

python test/drills/hostile.py                             # 2,000 recipes, 1,000 command lines
python test/drills/hostile.py --recipes=50 --lines=50 --seed=7

It prints how many gave a traceback, did not end, or ended badly without a word; each of them with what it was. Exit code 1
where there is any.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "library"), str(ROOT / "test" / "support"), str(ROOT), str(Path(__file__).parent)]

import mutated  # noqa: E402


def main() -> int:
    """Run all; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=int, default=2000)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit_s", type=float, default=mutated.LIMIT_S)
    parser.add_argument("--configurations_only", action="store_true", help="leave out model files and images")
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        folder = mutated.prepared(Path(name))
        for what, cases in (
            (f"{args.recipes:,} mutated recipes", mutated.recipe_cases(args.seed, args.recipes, folder)),
            (f"{args.lines:,} command lines", mutated.line_cases(args.seed, args.lines, folder)),
        ):
            counts = mutated.counted(cases, folder, args.limit_s)
            bad += len(counts.tracebacks) + len(counts.hangs) + len(counts.silent)
            print(f"{what}: {counts}", flush=True)
            for case, said in counts.tracebacks:
                print(f"  traceback: {_shown(case)}\n    {said.strip().splitlines()[-1] if said.strip() else 'killed'}")
            for kind, some in (("no end", counts.hangs), ("silent", counts.silent)):
                for case in some:
                    print(f"  {kind}: {_shown(case)}")
    if not args.configurations_only and Path(__file__).with_name("hostile_files.py").is_file():
        import hostile_files

        bad += bool(hostile_files.main())
    return 1 if bad else 0


def _shown(case: mutated.Case) -> str:
    """Return a command as it was; of a recipe also its text, whose file is gone."""
    line = f"{case.command} {' '.join(case.words)}"
    path = Path(case.words[0].partition("=")[2])
    text = path.read_bytes().decode("utf-8", "replace")[:2000] if case.command == "train" and path.is_file() else ""
    return f"{line}\n{text}"[:3000]


if __name__ == "__main__":
    raise SystemExit(main())
