"""Qwen-Image-Edit-2509: QwenImageTransformer2DModel and QwenImageEditPlusPipeline, which is shown several images."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from oracle import Oracle

from . import flux_kontext, qwen_image_edit


def load(kind: Any, folder: Path, **more: Any) -> Any:
    """Load a folder; this pipeline brings what its encoder sees to 384 x 384 pixels by itself."""
    return qwen_image_edit.load(kind, folder, area=None, **more)


FIRST = flux_kontext.reference()
SECOND = np.ascontiguousarray(255 - FIRST[::-1])

ORACLE = Oracle(
    qwen_image_edit.forward,
    shown=functools.partial(qwen_image_edit.shown, area=384 * 384),
    load=load,
    text_length=qwen_image_edit.LENGTH,
    drawn=qwen_image_edit.drawn([FIRST, SECOND], kinds=({"data": {"num_control": 2}},)),
)
