"""Lines of figures beside their limits."""

from __future__ import annotations


class Report:
    """Print figures against limits and remember whether one was missed."""

    def __init__(self) -> None:
        self.failed = False

    def check(self, name: str, value: float, limit: float, unit: str, note: str = "") -> None:
        """Print one figure."""
        good = value <= limit
        self.failed |= not good
        print(f"{'PASS' if good else 'FAIL'}  {name:<48} {value:10.3f} {unit:<4} limit {limit:g}  {note}", flush=True)

    def log(self, name: str, value: float, unit: str, note: str = "") -> None:
        """Print a figure that has no limit."""
        print(f"      {name:<48} {value:10.3f} {unit:<4} {note}", flush=True)
