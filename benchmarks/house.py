"""How large and how readable the house is: python benchmarks/house.py [FOLDER OF ANOTHER CHECKOUT ...].

Counts of library/difftrain, a column for each checkout, this one first. Static, but for the last lines: files of data/,
cache/, models/ and diffusion/ that one process enters on its way through a tiny run (left out with --no_runs).
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

LONG, SMALL = 25, 60  # lines of a function that should have paragraphs, of a file that should say why it stands alone
ROOMS = ("data", "cache", "models", "diffusion", "train/cach", "train/encoding")
PICTURES, SIDE = 4, 64

# run in a process of its own, in the checkout that is measured: prints the files whose functions are called
_JOURNEY = """
import os, sys, threading
entered, package = set(), sys.argv[1] + "/library/difftrain/"
def note(frame, event, arg):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(package) and frame.f_code.co_name != "<module>":
        entered.add(name[len(package):])
sys.path[:0] = [sys.argv[1] + "/library", sys.argv[1]]
threading.setprofile(note)
sys.setprofile(note)
sys.argv = ["sdxl_pretrain.py", *sys.argv[2:]]
import runpy
try:
    runpy.run_path(package[: -len("library/difftrain/")] + "sd_scripts_xl/sdxl_pretrain.py", run_name="__main__")
except SystemExit as end:
    if end.code:
        raise
finally:
    sys.setprofile(None)
    print("ENTERED", *sorted(entered))
"""


def modules(package: Path) -> dict[str, ast.Module]:
    """Parse every module, by dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Yield the modules that one imports, inside functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in known | {"difftrain"}:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else node.module


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import one another (Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in number:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], number[other])
        if lowest[node] == number[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                groups.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for node in graph:
        if node not in number:
            visit(node)
    return groups


def counts(root: Path) -> dict[str, str]:
    """Return the static counts of a checkout."""
    package = root / "library" / "difftrain"
    paths = sorted(package.rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8").splitlines() for path in paths}
    trees = modules(package)
    lines = sum(map(len, texts.values()))

    # --- functions
    lengths, bare, long_ones, classes = [], 0, 0, Counter[str]()
    for text in texts.values():
        for node in ast.walk(ast.parse("\n".join(text))):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            documented = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
            first = node.body[documented] if len(node.body) > documented else node.body[0]
            own = text[first.lineno - 1 : node.end_lineno]
            lengths.append(node.end_lineno - node.lineno + 1)  # type: ignore[operator]
            if lengths[-1] > LONG:
                long_ones += 1
                bare += not any(not line.strip() or line.strip().startswith("#") for line in own)

    # --- lines
    comments = sum(line.strip().startswith("#") for text in texts.values() for line in text)
    imported = 0
    for path in paths:
        for node in ast.walk(ast.parse("\n".join(texts[path]))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imported += node.end_lineno - node.lineno + 1  # type: ignore[operator]

    # --- who imports whom
    graph = {name: {each for each in imports(tree, set(trees)) if each != name} for name, tree in trees.items()}
    importers = defaultdict(set)
    for name, others in graph.items():
        for other in others:
            importers[other].add(name)
    single = [name for name in trees if len(importers[name]) == 1 and not is_package(package, name)]
    small = [name for name in single if len(texts[path_of(package, name)]) < SMALL]
    top = max((len(list(folder.glob("*.py"))), folder.name) for folder in package.rglob("*") if folder.is_dir())

    return {
        "files": f"{len(paths)}",
        "lines": f"{lines:,}",
        "mean lines of a file": f"{lines / len(paths):.0f}",
        "mean lines of a function": f"{sum(lengths) / len(lengths):.1f}",
        f"functions over {LONG} lines": f"{long_ones}",
        "  of them without a blank or comment line": f"{bare / max(long_ones, 1):.0%}",
        "comment lines": f"{comments / lines:.1%}",
        "import lines": f"{imported / lines:.1%}",
        "files with one importer": f"{len(single)}",
        f"  of them below {SMALL} lines": f"{len(small)}",
        "class names that exist more than once": f"{sum(count > 1 for count in classes.values())}",
        "import circles, type checking included": f"{len(circles(graph))}",
        "most files in one folder": f"{top[0]} ({top[1]})",
        "files and lines of test/": _tests(root),
    }


def is_package(package: Path, name: str) -> bool:
    """Tell whether a dotted name is a folder's."""
    return path_of(package, name).name == "__init__.py"


def path_of(package: Path, name: str) -> Path:
    """Return the file of a dotted name."""
    path = package.parent.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _tests(root: Path) -> str:
    found = sorted((root / "test").rglob("*.py"))
    return f"{len(found)}, {sum(len(path.read_text(encoding='utf-8').splitlines()) for path in found):,}"


def journeys(root: Path) -> dict[str, str]:
    """Count the files that a tiny SDXL run enters: online, while it fills the cache, and from the cache."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        for number in range(PICTURES):
            Image.new("RGB", (SIDE, SIDE), (60 * number, 0, 0)).save(Path(folder, f"{number}.png"))
            Path(folder, f"{number}.txt").write_text(f"a red picture, number {number}", encoding="utf-8")
        flags = [
            "--init_from_config=tiny", f"--train_data_dir={folder}", f"--resolution={SIDE},{SIDE}", "--seed=1",
            "--train_batch_size=2", "--max_train_steps=1", "--max_data_loader_n_workers=0", "--device=cpu",
            f"--cache_dir={folder}/cache",
        ]  # fmt: skip
        cached = ["--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk"]
        ways = {
            "a step online": [*flags, f"--output_dir={folder}/1"],
            "filling the cache": [*flags, *cached, "--cache_only", f"--output_dir={folder}/2"],
            "a step from the cache": [*flags, *cached, f"--output_dir={folder}/3"],
        }
        return {f"files entered: {name}": _entered(root, words) for name, words in ways.items()}


def _entered(root: Path, words: list[str]) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _JOURNEY, str(root), *words], capture_output=True, text=True, cwd=root, env=environment
    )
    for line in done.stdout.splitlines():
        if line.startswith("ENTERED") and done.returncode == 0:
            return str(sum(name.startswith(ROOMS) for name in line.split()[1:]))
    raise SystemExit(f"{root}: the tiny run failed\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("others", nargs="*", type=Path, help="other checkouts, to compare with")
    parser.add_argument("--no_runs", action="store_true", help="static counts alone")
    options = parser.parse_args()
    roots = [Path(__file__).resolve().parents[1], *(each.resolve() for each in options.others)]
    tables = [counts(root) | ({} if options.no_runs else journeys(root)) for root in roots]
    width = max(map(len, tables[0]))
    for name in tables[0]:
        print(name.ljust(width), *(table[name].rjust(16) for table in tables))


if __name__ == "__main__":
    main()
