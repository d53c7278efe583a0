"""The training commands: `difftrain train`, `sdxl`, `sdxl_network`, `sd3_light` and `text_to_image`.

The scripts of sd_scripts_xl/ are these functions under their own names, so a script and its command are one entry point.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from difftrain.config.parse_flags import Parsed
from difftrain.config.paths import checkout
from difftrain.train.door import RULES, work

_LIGHT = {"model.family": "sd3", "model.train_type": "sd3_light_pretrain"}


def train(argv: list[str], prog: str = "difftrain train", preset: Mapping[str, Any] | None = None) -> int:
    """Train what a TOML file names; return the exit code. preset: values by "section.field" that it must not change."""
    from difftrain.config.parse_keys import open_train_door
    from difftrain.demo.make import foreseen

    return open_train_door(prog, argv, _work(prog), RULES, preset, demo=foreseen)


def train_sd3_light(argv: list[str], prog: str = "difftrain sd3_light") -> int:
    """Pretrain SD3-Light: train() with `train_type = "sd3_light_pretrain"` and `type = "sd3"`."""
    return train(argv, prog, _LIGHT)


def train_sdxl(argv: list[str], prog: str = "difftrain sdxl") -> int:
    """Pretrain or fine-tune Stable Diffusion XL with kohya's flags; return the exit code."""
    from difftrain.config.door import open_door

    return open_door(prog, argv, _work(prog), RULES)


def train_sdxl_network(argv: list[str], prog: str = "difftrain sdxl_network") -> int:
    """Train an adapter of Stable Diffusion XL with the flags of kohya's sdxl_train_network.py; return the exit code."""
    from difftrain.config.door import open_door
    from difftrain.config.rules.adapter import needs_one

    return open_door(prog, argv, _work(prog), (*RULES, needs_one))


def train_text_to_image(argv: list[str], prog: str = "difftrain text_to_image") -> int:
    """Fine-tune Stable Diffusion with the flags of diffusers' train_text_to_image.py; return the exit code."""
    from difftrain.config.parse_text_to_image import open_text_to_image_door
    from difftrain.hub.identify import identify

    return open_text_to_image_door(prog, argv, _work(prog), identify, RULES)


def _work(prog: str) -> Callable[[Parsed], int]:
    return partial(work, prog=prog, apply_for=apply_patches)


def apply_patches(engine: str, optimizer: str = "") -> list[str]:
    """Apply third_patch's patches for an engine with an optimizer; return a sentence for each that was applied."""
    root = checkout()
    if root is None:
        patches = import_module("difftrain.third_patch")
    else:
        if str(root) not in sys.path:
            sys.path.append(str(root))
        patches = import_module("third_patch")
    applied: list[str] = patches.apply_for(engine, optimizer)
    return applied
