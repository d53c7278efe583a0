"""What gpu.py measures, in the order of what is most worth knowing: a command that is ended early has the first of it.

Rows of one model stand together, so that its weights are filled once; loops that others write have a model of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from workload import Case

from difftrain.config.hidden_imports import is_installed
from difftrain.models.registry import FAMILIES

OURS = ""  # the trainer's engine; else a style of plain_loops.py
# blocks of Flux.1's shapes, 12 of its 57: weights, gradients and AdamW's state of all in fp32 fit no card
FLUX_BLOCKS = {
    "transformer": {
        "num_layers": 4,
        "num_single_layers": 8,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "axes_dims_rope": [16, 56, 56],
    },
    "text_encoder": {"hidden_size": 768, "projection_dim": 768, "num_attention_heads": 12},
    "text_encoder_2": {"d_model": 4096},
}
COMPILING_S, STARTING_S = 120.0, 12.0  # what a row may take before its first step that counts


@dataclass(frozen=True)
class Entry:
    """A row to come: a case, and whose loop makes its steps."""

    case: Case
    loop: str = OURS

    @property
    def least_s(self) -> float:
        """Return the seconds that must be left for it to be begun."""
        return COMPILING_S if self.case.compile == "inductor" else STARTING_S


def entries() -> Iterator[Entry]:
    """Yield all rows, the most worth first."""
    # --- SDXL at 1024: beside a plain loop and kohya's, then precision, memory, adapters
    sdxl = Case("sdxl", "base", 1024, 4, "bf16")
    yield Entry(sdxl)
    yield Entry(sdxl, "plain")
    yield Entry(sdxl, "kohya")
    yield Entry(replace(sdxl, precision="fp16"))
    yield Entry(replace(sdxl, checkpointing=True))
    yield Entry(replace(sdxl, trains="lora"))

    # --- SD3-Light at 256, the recipe of the launchers
    light = Case("sd3", "light", 256, 64, "bf16")
    yield Entry(light)
    yield Entry(light, "plain")
    yield Entry(replace(light, precision="fp16"))

    # --- blocks of Flux.1's shapes
    flux = Case("flux", "tiny", 256, 16, "bf16", sizes=json.dumps(FLUX_BLOCKS, sort_keys=True))
    yield Entry(flux)
    yield Entry(replace(flux, resolution=1024, batch_size=4))
    yield Entry(flux, "plain")
    yield Entry(replace(flux, trains="lora"))

    # --- Stable Diffusion at 512, the oldest figure that people know
    sd = Case("sd1", "base", 512, 16, "fp16")
    yield Entry(sd)
    yield Entry(sd, "plain")
    yield Entry(sd, "kohya")

    # --- SDXL again: what the settings are worth
    yield Entry(replace(sdxl, compile="inductor"))
    yield Entry(replace(sdxl, layout="channels_last"))
    yield Entry(replace(sdxl, adamw="foreach"))
    yield Entry(sdxl, "graphs")
    yield Entry(replace(sdxl, precision="fp16"), "kohya")
    yield Entry(replace(sdxl, precision="fp16", checkpointing=True))
    yield Entry(replace(sdxl, trains="lora", checkpointing=True))
    yield Entry(replace(sdxl, trains="lora", compile="inductor"))
    yield Entry(replace(light, compile="inductor"))
    yield Entry(replace(light, trains="lora"))
    yield Entry(replace(flux, resolution=1024, batch_size=4, trains="lora"))


def chosen(families: list[str], rehearse: bool) -> list[Entry]:
    """Return the rows of some families. rehearse: the same ways on tiny sizes, each once. Raises ValueError for a family unknown."""
    every = list(entries())
    known = list(dict.fromkeys(entry.case.family for entry in every))
    for name in families:
        if name not in known:
            raise ValueError(f"--families: got {name!r}, one of {', '.join(known)}")
    kept = [entry for entry in every if entry.case.family in (families or known) and entry.case.family in FAMILIES]
    return list(dict.fromkeys(tiny(entry) for entry in kept)) if rehearse else kept


def tiny(entry: Entry) -> Entry:
    """Return the same way on a tiny model; compiled without a compiler's code, which takes minutes on a CPU."""
    case = replace(entry.case, size="tiny", sizes="", resolution=64, batch_size=2)
    return replace(entry, case=replace(case, compile="eager" if case.compile else ""))


def missing(entry: Entry) -> str:
    """Name a package that a row needs and this environment lacks; empty where it has all."""
    return "peft" if entry.case.trains == "lora" and not is_installed("peft") else ""
