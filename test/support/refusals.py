"""What a refusal names (the setting, values, paths), for tests that hold facts and leave the wording to its golden page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).resolve().parents[2] / "library"


def names(refusal: object, *facts: object) -> bool:
    """Return whether every fact stands in a text, a fault or an exception, as a word of its own: 7 is not in 17, nor in 7.5."""
    text = str(refusal)
    return all(re.search(rf"(?<![\w.-]){re.escape(str(fact))}(?![-.]?\w)", text) for fact in facts)


def is_about(refusal: object, where: str, *facts: object) -> bool:
    """Return whether a fault or note is of this setting, and names the facts behind it.

    where: what stands before the first colon, without its value, the path of its file or the line: "--seed",
    "[save] precision".
    """
    place, _, rest = str(refusal).strip().partition(": ")
    place = re.sub(r"\.toml:\d+ ", ".toml ", place)
    is_its = where in (place, place.partition("=")[0]) or place.endswith((f" {where}", f"/{where}"))
    return is_its and names(rest, *facts)


def raised_by(caught: Any, function: str) -> bool:
    """Return whether an exception, as pytest.raises caught it, left the library from this function: its innermost frame."""
    frames = [entry for entry in caught.traceback if Path(entry.path).is_relative_to(LIBRARY)]
    return bool(frames) and frames[-1].name == function
