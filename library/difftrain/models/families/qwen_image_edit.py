"""Qwen-Image-Edit (Alibaba 2025, arXiv:2508.02324): Qwen-Image that edits an image, which its language model sees too.

Tokens of a reference stand behind those that are drawn, with rows and columns of their own and its number, from 1 on, as
the frame. Its text encoder reads the caption and an image of about a million pixels together. Since the release 2511 tokens
of references are modulated as at time 0 (zero_cond_t). Source: diffusers, pipelines/qwenimage/pipeline_qwenimage_edit.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import control_name
from difftrain.models import passes
from difftrain.models.facts import Text
from difftrain.models.families.qwen_image import QwenImage
from difftrain.models.passes import Tokens

if TYPE_CHECKING:
    from torch import Tensor

# around a caption; its first 64 tokens say nothing of the images and are cut off
TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, background), "
    "then explain how the user's text instruction should alter or modify the image. Generate a new image that meets the "
    "user's requirements while maintaining consistency with the original input where appropriate.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


class QwenImageEdit(QwenImage):
    """The facts of Qwen-Image-Edit where they are not Qwen-Image's."""

    name = "qwen_image_edit"
    modelspec = "qwen-image-edit"
    texts = (
        Text(
            "text_encoder", "tokenizer", "llm", 1024, hidden=-1, template=TEMPLATE, drop=64, masked=True, passes_mask=True,
            strips=("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"), picture=IMAGE, area=1024 * 1024,
        ),
    )  # fmt: skip

    def enter(self, net: Any, x_t: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tokens:
        """Make tokens. Shapes: x_t and references (B, C, 1, h, w), t (B,) in 0..1000 -> image (B, N, D) of all."""
        shown = [conditions[name] for number in range(self.num_control) if (name := control_name(number)) in conditions]
        images = [x_t, *shown]
        image = net.img_in(torch.cat([passes.pack(one[:, :, 0], self.patch) for one in images], dim=1))
        text = net.txt_in(net.txt_norm(conditions["tokens"]))
        sizes = tuple((1, one.shape[-2] // self.patch, one.shape[-1] // self.patch) for one in images)
        rope = self.rope(net, sizes, text.shape[1], x_t.device)
        more = {"mask": conditions.get("mask")}
        times = t / 1000.0
        if net.zero_cond_t:
            times = torch.cat((times, times * 0))
            behind = torch.arange(image.shape[1], device=image.device) >= sizes[0][1] * sizes[0][2]
            more["which"] = behind.int().expand(len(image), -1)  # 1: modulated by the second half of temb
        return Tokens(image, text, net.time_text_embed(times, image), sizes[0], rope=rope, more=more)

    def block(self, block: Any, tokens: Tokens) -> Tokens:
        """Run one block, which takes and returns text and images apart."""
        which = tokens.more.get("which")
        text, image = block(
            tokens.image, tokens.text, tokens.more["mask"], tokens.temb, tokens.rope, modulate_index=which
        )
        return replace(tokens, text=text, image=image)

    def leave(self, net: Any, tokens: Tokens) -> Tensor:
        """Return the velocity of the image that is drawn, (B, C, 1, H, W)."""
        temb = tokens.temb.chunk(2)[0] if net.zero_cond_t else tokens.temb
        patches = net.proj_out(net.norm_out(tokens.image, temb))
        drawn = tokens.size[-2] * tokens.size[-1]
        return passes.unpack(patches[:, :drawn], self.patch, tokens.size).unsqueeze(2)
