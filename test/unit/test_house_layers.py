"""Who may import whom (DESIGN.md 1), read from the source: also imports inside functions and for type checkers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "library" / "difftrain"

LAYERS = [
    {"contracts"},
    {"config"},
    {"diffusion", "device", "distributed"},
    {"engine", "data", "models", "adapters", "optim", "checkpoint", "sampling", "evaluation", "report"},
    {"train"},
    {"cli"},
    {"testing"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
ALLOWED = {("engine", "optim")}
NARROW = {"sampling", "evaluation"}  # contracts and the layer below, nothing else
# imported only in their one room, and only where they are used
OPTIONAL = {
    "torch_npu": "device",
    "wandb": "report",
    "pyarrow": "data",
    "tensorboard": "report",
    "deepspeed": "engine",
    "fairscale": "engine",
    "accelerate": "engine",
    "bitsandbytes": "optim",
    "av": "data",
}
LAZY_FILES = {"data/sources/parquet.py"}  # imported where a source of that kind is opened, so they may import on top
DEVICE_NAME = re.compile(r"(cuda|npu|hccl|nccl)(?![a-z])", re.IGNORECASE)


def room_of(path: Path) -> str:
    """Return the room of a file: its first folder, or its own name at the top."""
    inner = path.relative_to(PACKAGE).parts
    return inner[0].removesuffix(".py") if len(inner) > 1 or inner[0] != "__init__.py" else ""


FILES = sorted(path for path in PACKAGE.rglob("*.py") if room_of(path))


def imports(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """Yield (module, line, at the top of the file) of every import, by from-import with the name joined on."""
    top = {id(node) for node in ast.iter_child_nodes(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno, id(node) in top


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def breaks(source: str, target: str) -> str:
    """Say which rule an import from one room of another breaks, or nothing."""
    if source == target or (source, target) in ALLOWED:
        return ""
    if target not in LEVEL:
        return f"{target} is no room of the house"
    if LEVEL[target] >= LEVEL[source]:
        return f"{source} may not import {target}"
    if source in NARROW and target != "contracts" and LEVEL[target] != LEVEL[source] - 1:
        return f"{source} imports nothing but contracts and the layer below, not {target}"
    return ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_keep_to_the_layers(path: Path) -> None:
    source = room_of(path)
    assert source in LEVEL, f"{source}: give this room a layer in DESIGN.md and here"
    wrong = []
    for module, line, _ in imports(parsed(path)):
        parts = module.split(".")
        if parts[0] in ("test", "third_patch", "sd_scripts_xl", "benchmarks"):
            wrong.append(f"line {line}: library/ imports nothing of {parts[0]}/")
        elif parts[0] == "difftrain" and parts[1:2] not in ([], ["__version__"]):
            wrong += [f"line {line}: {reason}" for reason in [breaks(source, parts[1])] if reason]
    assert not wrong, "\n".join(wrong)


def test_the_rule_itself_bites() -> None:
    assert breaks("data", "models") and breaks("config", "device") and breaks("contracts", "config")
    assert breaks("optim", "engine") and breaks("sampling", "config") and breaks("train", "cli")
    assert breaks("train", "nowhere") and breaks("diffusion", "device") and breaks("data", "testing")
    assert not breaks("engine", "optim") and not breaks("train", "data") and not breaks("sampling", "device")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_optional_packages_stay_in_their_room_and_out_of_the_top_of_files(path: Path) -> None:
    wrong = []
    for module, line, top in imports(parsed(path)):
        package = module.split(".")[0]
        if package not in OPTIONAL:
            continue
        if room_of(path) != OPTIONAL[package]:
            wrong.append(f"line {line}: {package} belongs to {OPTIONAL[package]}/")
        if top and str(path.relative_to(PACKAGE)) not in LAZY_FILES:
            wrong.append(f"line {line}: import {package} where it is used")
    assert not wrong, "\n".join(wrong)


def test_files_that_import_on_top_are_themselves_imported_late() -> None:
    late = {f"difftrain.{name.removesuffix('.py').replace('/', '.')}" for name in LAZY_FILES}
    for path in FILES:
        tops = {module for module, _, top in imports(parsed(path)) if top}
        assert not {m for m in tops for name in late if m == name or m.startswith(f"{name}.")}, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_device_room_names_devices(path: Path) -> None:
    if room_of(path) == "device":
        return
    tree = parsed(path)
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    wrong = [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
        if DEVICE_NAME.match(node.value)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ["config", "contracts"])
def test_rooms_without_torch_import_none_of_it(room: str) -> None:
    for path in (PACKAGE / room).glob("*.py"):
        tops = {module.split(".")[0] for module, _, top in imports(parsed(path)) if top}
        assert not tops & {"torch", "numpy", "diffusers", "transformers", "PIL"}, path


def test_every_field_of_the_configuration_is_read_by_somebody() -> None:
    """A flag that nobody reads would do nothing."""
    from difftrain.config.validate import fields

    outside = [path for path in FILES if room_of(path) not in ("config", "contracts", "testing")]
    read = {node.attr for path in outside for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)}
    whole = {"metadata"}  # read as a whole section
    unread = [path for path in fields() if path.split(".")[1] not in read and path.split(".")[0] not in whole]
    assert not unread, unread
