"""Qwen-Image-Edit-2509 and later (Alibaba 2025): Qwen-Image-Edit that is shown up to three images, numbered in its template.

The language model sees each at 384 x 384 pixels, in its own shape. Source: diffusers,
pipelines/qwenimage/pipeline_qwenimage_edit_plus.py.
"""

from __future__ import annotations

from dataclasses import replace

from difftrain.models.families.qwen_image_edit import IMAGE, QwenImageEdit


class QwenImageEditPlus(QwenImageEdit):
    """The facts of Qwen-Image-Edit-2509 where they are not Qwen-Image-Edit's."""

    name = "qwen_image_edit_plus"
    modelspec = "qwen-image-edit-plus"
    texts = (replace(QwenImageEdit.texts[0], picture="Picture {}: " + IMAGE, area=384 * 384),)
