"""Figures that others have published, to stand beside ours and never among them."""

from __future__ import annotations

from typing import NamedTuple

from difftrain.config.families import family_titled

LABEL = "published by others, not ours"


class Baseline(NamedTuple):
    """One published row, as its source states it."""

    source: str
    task: str
    figures: str
    family: str  # as [model] type spells it; "" of a model that is none of them


SDXL, SD3, FLUX = map(family_titled, ("SDXL", "SD3", "Flux.1"))
_MINDSPEED = 'MindSpeed-MM, 8 x Atlas 900 A2 / the GPU server "A"'

PUBLISHED: tuple[Baseline, ...] = (
    Baseline(
        "sd-scripts-xl, 2023-12", "SDXL fp16, batch 4, 8 cards", "20.2 FPS (A), 10.4 FPS (NPU-910); compute FPS", SDXL
    ),
    Baseline(_MINDSPEED, "SDXL train 1024 bf16 b4", "29.92 / 30.65 FPS", SDXL),
    Baseline(_MINDSPEED, "SDXL pretrain 1024 buckets bf16 b4", "19.79 / 21.14 FPS", SDXL),
    Baseline(_MINDSPEED, "SD3 full 512 bf16 b8", "26.24 / 28.33 FPS", SD3),
    Baseline(_MINDSPEED, "SD3 LoRA 512 fp16 b8", "47.93 / 47.95 FPS", SD3),
    Baseline(_MINDSPEED, "Flux.1 full 256 bf16 b16", "55.23 / 53.65 FPS", FLUX),
    Baseline("Mosaic, A100, cached latents, SD2 UNet", "256 px / 512 px per card", "137.5 / 36.3 img/s", ""),
    Baseline("Stability AI, SD3 2B MMDiT, H100", "resolution not stated", "37.2 img/s per card", SD3),
)


def published(family: str) -> list[Baseline]:
    """Return all rows, those about this family first: nothing else may be laid beside its figures."""
    return sorted(PUBLISHED, key=lambda row: row.family != family)
