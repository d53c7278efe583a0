"""At which line of a TOML file a fault is: readers of values do not know, so the file is looked at once more."""

from __future__ import annotations

import re
from pathlib import Path

_WHERE = re.compile(r"(?P<file>.*?\.toml)(?: (?P<inside>.+))?$")
_HEADER = re.compile(r"(\[\[?)\s*([\w.\"' -]+?)\s*\]\]?$")
_KEY = re.compile(r"(\"[^\"]*\"|'[^']*'|[\w-]+)\s*[.=]")
_STRINGS = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'")
_LARGEST = 1 << 20  # bytes: no configuration is longer, and a fault must be told at once


def with_line(where: str) -> str:
    """Put a line behind the file of where a fault is: "FILE [model] x" becomes "FILE:12 [model] x".

    A place that no line can be told of stays as it is.
    """
    match = _WHERE.match(where)
    if match is None or not match["inside"]:
        return where
    try:
        file = Path(match["file"])
        if not file.is_file() or file.stat().st_size > _LARGEST:
            return where
        lines = lines_of(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError):
        return where
    inside = match["inside"]
    # of a value inside a value, and of what a table lacks, the nearest that has a line
    candidates = (inside, inside.partition(".")[0], re.split(r"(?<=[\]\d]) (?=[^\[\d]+$)", inside)[0])
    line = next((lines[name] for name in candidates if name in lines), None)
    return where if line is None else f"{file}:{line} {inside}"


def lines_of(text: str) -> dict[str, int]:
    """Return the line of every table and key, as faults name them: "[model] lr", "[[datasets]] 2 [[datasets.subsets]] 1"."""
    lines: dict[str, int] = {}
    table, counts = "", dict[str, int]()
    depth, quote = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        # --- inside a string or a list of several lines
        if quote:
            quote = "" if line.count(quote) % 2 else quote
            continue
        quote = next((mark for mark in ('"""', "'''") if line.count(mark) % 2), "")
        bare = _STRINGS.sub("''", line).partition("#")[0].strip()
        if depth:
            depth += bare.count("[") - bare.count("]")
            continue

        # --- a table, or a key of the last one
        header, key = _HEADER.match(bare), _KEY.match(line.strip())
        if header and header[1] == "[[":
            name = header[2]
            outer = name.rpartition(".")[0]
            before = f"{table_of(outer, counts)} " if outer else ""
            counts = {other: count for other, count in counts.items() if not other.startswith(f"{name}.")}
            counts[name] = counts.get(name, 0) + 1
            table = f"{before}[[{name}]] {counts[name]}"
            lines.setdefault(f"[[{name}]]", number)
            lines.setdefault(table, number)
        elif header:
            table = f"[{header[2]}]"
            lines.setdefault(table, number)
        elif key:
            lines.setdefault(f"{table} {key[1].strip(chr(34) + chr(39))}".strip(), number)
            depth = bare.count("[") - bare.count("]")
    return lines


def table_of(name: str, counts: dict[str, int]) -> str:
    """Return how faults call the last table of a list."""
    outer = name.rpartition(".")[0]
    return f"{f'{table_of(outer, counts)} ' if outer else ''}[[{name}]] {counts.get(name, 0)}"
