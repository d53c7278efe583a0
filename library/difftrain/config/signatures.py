"""What a class or a function takes by name, read from its source: nothing is imported, so that an error comes at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

_DEPTH = 8  # of names that one module has from another


class Signature(NamedTuple):
    """Names of arguments with their defaults: None also for what is no literal. anything: further ones are taken too."""

    positional: dict[str, Any]
    by_name: dict[str, Any]  # those that are given by name alone
    anything: bool


@cache
def signature(path: str) -> Signature | None:
    """Return the arguments of package.module.name, without self; None where its source does not tell."""
    module, _, name = path.rpartition(".")
    found = _defined(module, name, _DEPTH)
    return found and _signature(*found, _DEPTH)


def _signature(module: str, node: ast.stmt, depth: int) -> Signature | None:
    if isinstance(node, ast.FunctionDef):
        return _of(node.args, ())
    if not isinstance(node, ast.ClassDef) or not depth:
        return None
    own = next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
    if own is not None:
        return _of(own.args, (own.args.posonlyargs + own.args.args)[:1])
    for base in node.bases:  # the first that says something
        if isinstance(base, ast.Name) and (found := _defined(module, base.id, depth - 1)):
            return _signature(*found, depth - 1)
    return None


def _of(args: ast.arguments, without: tuple[ast.arg, ...] | list[ast.arg]) -> Signature:
    ordered = args.posonlyargs + args.args
    first = [None] * (len(ordered) - len(args.defaults))
    positional = {
        each.arg: _literal(default) for each, default in zip(ordered, [*first, *args.defaults]) if each not in without
    }
    by_name = {each.arg: _literal(default) for each, default in zip(args.kwonlyargs, args.kw_defaults)}
    return Signature(positional, by_name, args.kwarg is not None)


def _literal(node: ast.expr | None) -> Any:
    try:
        return node and ast.literal_eval(node)
    except ValueError:
        return None


def _defined(module: str, name: str, depth: int) -> tuple[str, ast.stmt] | None:
    """Return the statement that defines a name, and its module, through all modules that hand it on."""
    file = _file(module)
    if file is None or not depth:
        return None
    statements = list(_statements(_tree(file).body))
    for each in reversed(statements):  # the last one counts
        if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == name:
            return module, each
        if not isinstance(each, ast.ImportFrom):
            continue
        for alias in each.names:
            if name == (alias.asname or alias.name) or alias.name == "*":
                other = _absolute(module, file, each)
                found = _defined(other, name if alias.name == "*" else alias.name, depth - 1)
                if found is not None or alias.name != "*":
                    return found
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those within if and try too: what is there in some case."""
    for each in body:
        yield each
        if isinstance(each, ast.If | ast.Try):
            yield from _statements(each.body)


def _absolute(module: str, file: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    package = parts if file.name == "__init__.py" else parts[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *filter(None, [node.module])])


@cache
def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _file(module: str) -> Path | None:
    """Return a module's source, looked for as the import system would, but for what is imported."""
    first, *rest = module.split(".")
    try:
        spec = PathFinder.find_spec(first) if first else None
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        place = Path(folder, *rest)
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if file.is_file():
                return file
    return None
