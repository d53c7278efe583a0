"""kohya's names of saves: NAME-step00000004, NAME-000001, NAME; a checkpoint's folder ends in "-state"."""

from __future__ import annotations

import re
from dataclasses import dataclass

STATE = "-state"


@dataclass(frozen=True, order=True)
class SaveName:
    """Say which save a name stands for: kind "step", "epoch" or "end", and its number (0 for the end)."""

    kind: str
    number: int = 0

    def of(self, output_name: str, *, state: bool = False) -> str:
        """Spell it."""
        middle = {"step": f"-step{self.number:08d}", "epoch": f"-{self.number:06d}", "end": ""}[self.kind]
        return f"{output_name}{middle}{STATE if state else ''}"


_NUMBERED = re.compile(r"-step(\d{8,})|-(\d{6,})")


def parse(name: str, output_name: str, *, state: bool = False) -> SaveName | None:
    """Read a name back, without its suffix; None where it is not a save of output_name."""
    if state:
        if not name.endswith(STATE):
            return None
        name = name[: -len(STATE)]
    if not name.startswith(output_name):
        return None
    rest = name[len(output_name) :]
    if not rest:
        return SaveName("end")
    found = _NUMBERED.fullmatch(rest)
    if not found:
        return None
    step, epoch = found.groups()
    return SaveName("step", int(step)) if step else SaveName("epoch", int(epoch))
