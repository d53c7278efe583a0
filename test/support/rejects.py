"""What stands in a reason for which an item of the data is left out, without its wording."""

from __future__ import annotations


def kind(reason: str) -> str:
    """The first and the last word of what stands before the colon, "outside … folder" as "outside folder"."""
    words = reason.partition(":")[0].split()
    return " ".join(words if len(words) < 3 else (words[0], words[-1]))
