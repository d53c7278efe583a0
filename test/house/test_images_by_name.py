"""Images are opened as one of a closed list of formats: asked for any, Pillow starts Ghostscript for an EPS of another name."""

from __future__ import annotations

import ast
from pathlib import Path

from parsed import parsed

LIBRARY = Path(__file__).resolve().parents[2] / "library"


def test_every_image_is_opened_by_formats() -> None:
    bare = []
    for path in sorted(LIBRARY.rglob("*.py")):
        tree = parsed(path)
        names = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "PIL"
            for alias in node.names
            if alias.name == "Image"
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "open"
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in names
                and not any(keyword.arg == "formats" for keyword in node.keywords)
            ):
                bare.append(f"{path.relative_to(LIBRARY)}:{node.lineno}")
    assert not bare, bare
