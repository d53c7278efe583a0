"""Names of saves, in two ways.

kohya's begin with the run's output name: NAME-step00000004, NAME-000001, NAME; a checkpoint's folder ends in "-state".
Those by step are the same in every run: exports are folders step4 and epoch1, checkpoints are folders global_step4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from difftrain.config.schema.sections import SaveSection


class Own(Enum):
    """Stand for names that hold nothing of a run's own name."""

    STEPS = "steps"


STEPS = Own.STEPS
Naming = str | Own  # kohya's with this output name, or by step
STATE = "-state"
GLOBAL_STEP = "global_step"
ONE_FILE = "model"  # by step, a layout that is one file lies as this in the folder of its name
_AVERAGED = "-ema"  # the averaged weights of a save come and go with it
EXPORT_SUFFIXES = (".safetensors", ".ckpt")  # of files; the other layouts are folders and have none


def naming_of(save: SaveSection) -> Naming:
    """Return how saves are called."""
    return STEPS if save.naming == STEPS.value else save.output_name


@dataclass(frozen=True, order=True)
class SaveName:
    """Say which save a name stands for: kind "step", "epoch" or "end", and its number (0 for the end).

    By step no save is called the end, and the number of a checkpoint is its step whatever it was made for.
    """

    kind: str
    number: int = 0

    def of(self, output_name: Naming, *, state: bool = False) -> str:
        """Spell it."""
        if isinstance(output_name, Own):
            return f"{GLOBAL_STEP if state else self.kind}{self.number}"
        middle = {"step": f"-step{self.number:08d}", "epoch": f"-{self.number:06d}", "end": ""}[self.kind]
        return f"{output_name}{middle}{STATE if state else ''}"


_NUMBERED = re.compile(r"-step(\d{8,})|-(\d{6,})")
_BY_STEP = re.compile(r"(step|epoch)(0|[1-9]\d*)")
_STATE_BY_STEP = re.compile(rf"{GLOBAL_STEP}(0|[1-9]\d*)")


def parse(name: str, output_name: Naming, *, state: bool = False) -> SaveName | None:
    """Read a name back, without its suffix; None where it is not a save of output_name."""
    if isinstance(output_name, Own):
        if state:
            return SaveName("step", int(by_step[1])) if (by_step := _STATE_BY_STEP.fullmatch(name)) else None
        return SaveName(by_step[1], int(by_step[2])) if (by_step := _BY_STEP.fullmatch(name)) else None
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


def parse_export(path: Path, output_name: Naming) -> SaveName | None:
    """Read the name of an export in any layout, averaged or not; None where the path is none of output_name's.

    Only the suffixes of layouts are taken off: what follows another dot belongs to the name.
    """
    name = path.name
    if not path.is_dir():
        if isinstance(output_name, Own):  # always a folder: a layout that is one file lies in it
            return None
        suffix = next((each for each in EXPORT_SUFFIXES if name.endswith(each)), None)
        if suffix is None:
            return None
        name = name.removesuffix(suffix)
    return parse(name, output_name) or parse(name.removesuffix(_AVERAGED), output_name)
