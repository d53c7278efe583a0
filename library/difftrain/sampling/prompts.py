"""Sample prompts as kohya writes them: a prompt a line, options behind it (`--w 512 --d 42 --n blurry`)."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.sampling.samplers import sampler_fault

log = logging.getLogger("difftrain")

FLAG = "--sample_prompts"
MAX_STEPS = 1000


@dataclass(frozen=True)
class Prompt:
    """What to draw. None: the model's native size (at most 512), or the run's sampler or seed."""

    prompt: str
    negative_prompt: str = ""
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    sample_steps: int = 30
    scale: float = 7.5
    sample_sampler: str | None = None


# option -> pattern of its value, field, conversion; kohya ignores the case of the option
_OPTIONS: dict[str, tuple[str, str, Any]] = {
    "w": (r"(\d+)", "width", int),
    "h": (r"(\d+)", "height", int),
    "d": (r"(\d+)", "seed", int),
    "s": (r"(\d+)", "sample_steps", lambda text: max(1, min(MAX_STEPS, int(text)))),
    "l": (r"(\d+\.?\d*|\.\d+)", "scale", float),
    "n": (r"(.+)", "negative_prompt", str),
    "ss": (r"(.+)", "sample_sampler", str.strip),
}
_REFUSED = {
    "g": "embedded guidance, which SDXL has not",
    "cn": "a ControlNet picture, which this trainer does not use",
    "ctr": "a guidance cut-off of Lumina, which SDXL has not",
    "rcfg": "Lumina's guidance renormalisation, which SDXL has not",
    "fs": "a flow shift, which SDXL has not",
}


def parse_prompts(path: Path, sampler: str = "ddim") -> list[Prompt]:
    """Read a text file of prompts; empty lines and lines that begin with # are left out.

    sampler: that of prompts that name none. Raises ConfigFault with every wrong line, where there is nothing to draw,
    or where the sampler cannot be used: at the start of a run, not at its first picture.
    """
    if path.suffix.lower() not in (".txt", ""):
        raise ConfigFault([Fault(FLAG, f"{path} is not a text file", "give a .txt file with a prompt a line")])
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFault([Fault(FLAG, f"{path} cannot be read: {error}", "give a UTF-8 .txt file")]) from None
    prompts, faults = [], []
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.startswith("#"):
            try:
                prompts.append(Prompt(**parse_line(line.strip())))
            except ValueError as error:
                faults.append(Fault(f"{path}, line {number}", str(error)))
    if not prompts and not faults:
        faults.append(Fault(FLAG, f"{path} holds no prompt", "write a prompt a line"))
    unusable = sampler_fault(sampler)
    if unusable:
        faults.append(Fault("--sample_sampler", unusable))
    if faults:
        raise ConfigFault(faults)
    return prompts


def parse_line(line: str) -> dict[str, Any]:
    """Split a line into the fields that it gives. Raises ValueError for an option that cannot be done.

    Text behind " --" that begins with no option's name is dropped as kohya does, and said.
    """
    text, *pieces = line.split(" --")
    fields: dict[str, Any] = {"prompt": text}
    for piece in pieces:
        name, _, value = piece.partition(" ")
        name = name.lower()
        if name in _REFUSED:
            raise ValueError(f"--{name} is {_REFUSED[name]}")
        if name not in _OPTIONS:
            log.warning("%s: %r is no option and no part of the prompt; it is left out", FLAG, f"--{piece}")
            continue
        pattern, field, convert = _OPTIONS[name]
        found = re.match(pattern, value)
        if not found:
            raise ValueError(f"--{name} does not take {value!r}")
        fields[field] = convert(found[1])
    _check(fields)
    return fields


def _check(fields: dict[str, Any]) -> None:
    sampler = fields.get("sample_sampler")
    fault = sampler_fault(sampler) if sampler is not None else None
    if fault:
        raise ValueError(f"--ss: {fault}")
    for side in ("width", "height"):
        if not 0 < fields.get(side, 8) <= 16384:
            raise ValueError(f"{side} must lie in 1 to 16384, got {fields[side]}")
