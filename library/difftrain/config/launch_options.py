"""What launchers hand over on the command line: --local_rank and --master_port, for both entry points that take them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from difftrain.config.layers import Layer
from difftrain.contracts.errors import Fault


def local_place(bare: Mapping[str, str], line: Layer) -> None:
    """Put --local_rank and --master_port where the environment has none; a contradiction is a fault."""
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    for name in ("local_rank", "master_port"):
        text = bare.get(name)
        if text is None or (name == "local_rank" and text == "-1"):
            continue
        variable = name.upper()
        environment_value = os.environ.get(variable, "").strip()
        if not text.isdecimal():
            line.faults.append(Fault(f"--{name}", f"must be a number, got {text!r}"))
        elif environment_value and environment_value != text:
            line.faults.append(
                Fault(f"--{name}", f"{text} contradicts {variable}={environment_value} of the environment", "give one")
            )
        elif not environment_value and started:
            os.environ[variable] = text
            line.notes.append(f"--{name}: taken as {variable}={text}, which the launcher did not set")
        elif not environment_value and text != "0" and name == "local_rank":
            what = f"{text}, but the environment has no RANK and no WORLD_SIZE"
            line.faults.append(Fault(f"--{name}", what, "start with torchrun, or leave it out"))
        elif not environment_value:
            line.notes.append(f"--{name}: no effect: this is a single process")
