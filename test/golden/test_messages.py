"""Every sentence that the library can say is on one page: as kohya's entry points spell it, and the others where they differ.

Read from the source: string literals of three words and more outside docstrings, and outside the rows of flags, keys and
fields and what renders pages of them, which are the documentation's and have tests of their own. What is only when a sentence is said stands in braces by its name. A change of wording is a change of that page, to be read as prose:
`pytest test/golden/test_messages.py --update-golden` writes it.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from difftrain.config.spellings.spelling import Door, option, speaking, spelled

LIBRARY = Path(__file__).resolve().parents[2] / "library" / "difftrain"
HEADING = """# What the library says

Written by test_messages.py from the source. {name}: what is known when it is said; "train.py:", "train_text_to_image.py:"
how that door spells it.

"""

# what is rendered from tables: --help, docs/ and schemas/, whose files are compared by tests of their own
PAGES = ("config/render/",)
# the rows of these tables, by what makes one: the meaning of a flag, a key and a field stands on those pages
ROWS = {"config/spellings/": ("Row", "key", "near", "later", "never"), "config/schema/": ("Field",)}
_SQL = ("SELECT ", "INSERT ", "CREATE ", "DELETE ", "UPDATE ", "PRAGMA ", "ATTACH ", "WITH ", "BEGIN ")
_OTHERS: dict[Door, str] = {"train": "train.py", "text_to_image": "train_text_to_image.py"}


def test_the_page_has_every_sentence_as_it_is(golden_dir: Path, update_golden: bool) -> None:
    file = golden_dir / "messages.txt"
    if update_golden:
        file.write_text(page(), encoding="utf-8")
    before, now = file.read_text(encoding="utf-8").splitlines(), page().splitlines()
    changed = [line for line in difflib.unified_diff(before, now, "messages.txt", "the source", lineterm="", n=0)]
    assert not changed, "\n".join(["read them, then --update-golden:", *changed[:60]])


def test_the_page_shows_every_door() -> None:
    """One sentence of a literal table, one that is made when it is needed."""
    lines = page().splitlines()
    needed = lines.index("- needs --save_state or --save_state_on_train_end: there are no states to upload")
    assert (
        lines[needed + 1]
        == "  train.py: needs --save.state=true or --save.state_on_train_end=true: there are no states to upload"
    )
    made = lines.index("- has no effect: --max_train_epochs wins")
    assert lines[made + 1] == "  train.py: has no effect: --training.epochs wins"
    assert lines[made + 2] == "  train_text_to_image.py: has no effect: --num_train_epochs wins"


@cache
def page() -> str:
    """Return the page: a heading for each file, a line for each sentence."""
    parts: list[str] = []
    for path in sorted(LIBRARY.rglob("*.py")):
        name = path.relative_to(LIBRARY).as_posix()
        if not name.startswith(PAGES) and (lines := list(dict.fromkeys(_sentences(path, _rows(name))))):
            parts += [f"## {name}", *lines, ""]
    return HEADING + "\n".join(parts)


def _rows(name: str) -> tuple[str, ...]:
    return next((makers for folder, makers in ROWS.items() if name.startswith(folder)), ())


def _sentences(path: Path, rows: tuple[str, ...]) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {id(part) for node in ast.walk(tree) for part in _inside(node, rows)}
    for node in ast.walk(tree):
        if id(node) in inner or not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        kohya = " ".join(_text(node, "kohya").split())
        if len(kohya.split()) < 3 or kohya.startswith(_SQL) or kohya[0] == "<":
            continue
        yield f"- {kohya}"
        for door, name in _OTHERS.items():
            if (own := " ".join(_text(node, door).split())) != kohya:
                yield f"  {name}: {own}"


def _inside(node: ast.AST, rows: tuple[str, ...]) -> Iterator[ast.AST]:
    """Yield the docstring of a definition, the parts of an f-string, and those of a table's row."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr):
            yield first.value
    elif isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in rows
    ):
        yield from (part for part in ast.walk(node) if part is not node)


def _text(node: ast.JoinedStr | ast.Constant, door: Door) -> str:
    if isinstance(node, ast.Constant):
        with speaking(door):
            return spelled(node.value) if isinstance(node.value, str) else ""
    return "".join(_text(part, door) if isinstance(part, ast.Constant) else _known(part, door) for part in node.values)


def _known(part: ast.AST, door: Door) -> str:
    """Return an option as it is spelt, anything else by its name."""
    value = part.value if isinstance(part, ast.FormattedValue) else part
    arguments = [argument.value for argument in getattr(value, "args", ()) if isinstance(argument, ast.Constant)]
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "option" and len(arguments) == len(value.args):
        return option(*arguments, door=door)  # type: ignore[arg-type]
    if isinstance(value, ast.Call):
        value = value.func
    name = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else "..."
    return "{" + name + "}"
