"""kohya's names of saves: NAME-step00000004, NAME-000001, NAME; a checkpoint's folder ends in "-state"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

STATE = "-state"
_AVERAGED = "-ema"  # the averaged weights of a save come and go with it
_EXPORT_SUFFIXES = (".safetensors", ".ckpt")  # of files; the other layouts are folders and have none


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


def parse_export(path: Path, output_name: str) -> SaveName | None:
    """Read the name of an export in any layout, averaged or not; None where the path is none of output_name's.

    Only the suffixes of layouts are taken off: what follows another dot belongs to the name.
    """
    name = path.name
    if not path.is_dir():
        suffix = next((each for each in _EXPORT_SUFFIXES if name.endswith(each)), None)
        if suffix is None:
            return None
        name = name.removesuffix(suffix)
    return parse(name, output_name) or parse(name.removesuffix(_AVERAGED), output_name)
