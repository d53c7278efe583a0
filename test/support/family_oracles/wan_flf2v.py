"""Wan 2.1 from the first and the last frame: as from the first, with positions for the states of two images."""

from __future__ import annotations

from typing import Any

from family_oracles.wan import raw
from family_oracles.wan_i2v import FIRST, FRAMES, LAST, forward, image_of, options, prompts
from oracle import Conditions, Drawn, Oracle


def both(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    """Name how a clip is drawn from its first frame and its last."""
    return options(ours, negative, scale) | {"last_image": image_of(LAST)}


# diffusers' converter does not know img_emb.emb_pos, and all else is as in wan_i2v
ORACLE = Oracle(
    forward,
    prompts,
    drawn=Drawn(both, raw=raw, t5_length=512, references=(FIRST, LAST), frames=FRAMES),
)
