"""What the lines of an index say in numbers."""

from __future__ import annotations

import re


def read_again(said: str) -> int | None:
    """How many files were read where the index stays as it is; None where it says how many it read and how many it knew."""
    (how,) = re.findall(r"^index: .* s \((.*)\)$", said, re.MULTILINE)
    numbers = [int(number) for number in re.findall(r"\d+", how)]
    return None if len(numbers) > 1 else sum(numbers)
