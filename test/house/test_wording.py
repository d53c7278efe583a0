"""Wording is asserted in one place, the golden page of messages: no other test repeats three words in a row of a sentence.

Tests hold facts: types, settings, values, files, numbers (test/support/refusals.py). So a change of wording is one
change of that page. Counted are literals that something is compared with: those of assertions, tables, `match=`. A text
that is handed to the product, the arguments of a call, is input; so are docstrings, which say what a test is for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsed import parsed
from refusals import is_about, names, raised_by

from difftrain.config.parse_flags import parse
from difftrain.contracts.errors import ConfigFault, Fault

TESTS = Path(__file__).parents[1]
PAGE = TESTS / "golden" / "data" / "messages.txt"
# calls whose arguments are compared, or are a table of what is
_COMPARING = {
    "all", "any", "capitalize", "compile", "count", "endswith", "enumerate", "escape", "find", "findall", "frozenset",
    "fullmatch", "index", "is_about", "join", "list", "match", "names", "param", "parametrize", "partition", "raises",
    "removeprefix", "removesuffix", "replace", "rpartition", "search", "set", "sorted", "split", "startswith", "str",
    "sub", "sum", "tuple", "warns", "zip",
}  # fmt: skip
# words that any sentence is made with: "one of the" is nobody's wording
_SMALL = {
    "a", "an", "and", "are", "as", "at", "be", "by", "for", "from", "has", "have", "in", "is", "it", "its", "no", "not",
    "of", "on", "one", "or", "that", "the", "their", "them", "there", "they", "this", "to", "was", "where", "with",
}  # fmt: skip
# what stands on the page too, and is no sentence of the library's own
EXCEPTED = {
    "a large red star": "a caption of the shapes demo: data",
    "a red cat": "a caption: data",
    "out of memory": "torch's own words, which the library looks for",
}


def test_no_test_repeats_a_sentence_of_the_page() -> None:
    page = {three for line in PAGE.read_text(encoding="utf-8").splitlines() for three in threes(line)}
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        if path.is_relative_to(TESTS / "golden") or path == Path(__file__):
            continue
        # most texts have none of these words anywhere, literals that stand side by side joined: those need no parser
        text = path.read_text(encoding="utf-8")
        if page.isdisjoint(threes(re.sub(r'"\s+f?"', "", text))):
            continue
        for literal in compared(parsed(path)):
            said = literal.value
            for excepted in EXCEPTED:
                said = said.replace(excepted, "|")
            if repeated := [three for three in threes(said) if three in page]:
                found.append(f"{path.relative_to(TESTS)}:{literal.lineno}: {repeated[0]!r}")
    assert not found, "\n".join(["assert facts in place of these words (test/support/refusals.py):", *found])


def test_what_is_compared_and_what_is_input() -> None:
    source = '''
"""The module says so."""
TABLE = [("a", "one of these")]
def test():
    """It says so."""
    write("an input of words")
    assert "no such file" in said("not this one here")
    with pytest.raises(ValueError, match="as it is"):
        raise ValueError("nor is this one")
'''
    literals = [literal.value for literal in compared(ast.parse(source))]
    assert literals == ["a", "one of these", "no such file", "as it is"]
    assert list(threes("--x: no such file, it is. Give {a} one of the 32 such files")) == ["no such file"]


def test_facts_are_whole_words_behind_their_setting() -> None:
    fault = Fault("run.toml [save] steps", "must be at least 17, got 7.5", "see --save_state")
    assert is_about(fault, "[save] steps", 17, "7.5", "--save_state") and is_about(fault, "run.toml [save] steps")
    assert not any(is_about(fault, where) for where in ("[save] step", "save] steps", "steps: must", "[save] other"))
    assert not any(names(fault, fact) for fact in (7, 5, "--save", "state", "1", "ste"))
    assert is_about("--seed=1: is said", "--seed") and not is_about("--seed_more: is said", "--seed")
    with pytest.raises(ConfigFault) as caught:
        parse(["--seed=x"])
    assert raised_by(caught, "resolve_flags") and not raised_by(caught, "parse")


def threes(text: str) -> Iterator[str]:
    """Yield every three plain words in a row, two of which say something: lower case, a blank between, nothing else."""
    for run in re.findall(r"(?<![\w'-])[a-z']+(?: [a-z']+)+(?![\w'-])", text):
        words = run.split(" ")
        for n in range(len(words) - 2):
            if len(_SMALL.intersection(three := words[n : n + 3])) < 2:
                yield " ".join(three)


def compared(tree: ast.AST) -> list[ast.Constant]:
    """Return the literals that something is compared with, in the order of the text."""
    found, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                found.append(node)
        elif isinstance(node, ast.Call) and _name(node.func) not in _COMPARING:
            # input, but for what is compared on the way to it: the calls inside
            waiting += [node.func, *(call for call in _arguments(node) if isinstance(call, ast.Call))]
        elif isinstance(node, ast.Assert):
            waiting.append(node.test)  # without what it says when it fails
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # a docstring
            waiting += ast.iter_child_nodes(node)
    return sorted(found, key=lambda literal: (literal.lineno, literal.col_offset))


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]
