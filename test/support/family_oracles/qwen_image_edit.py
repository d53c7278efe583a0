"""Qwen-Image-Edit: QwenImageTransformer2DModel and QwenImageEditPipeline, whose encoder sees the image that is shown."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import Conditions, Drawn, Oracle
from PIL import Image

from difftrain.contracts import control_name
from difftrain.models import passes

from . import flux_kontext, qwen_image

AREA = 64 * 96  # of drawn images; the pipelines bring references to a million pixels


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    from diffusers import QwenImagePipeline

    count, channels, _, height, width = x.shape
    shown = [told[control_name(number)] for number in range(3) if control_name(number) in told]
    packed = [QwenImagePipeline._pack_latents(each, count, channels, *each.shape[-2:]) for each in (x, *shown)]
    out = net(
        hidden_states=torch.cat(packed, dim=1),
        timestep=t / 1000,
        encoder_hidden_states=told["tokens"],
        encoder_hidden_states_mask=told.get("mask"),
        img_shapes=[[(1, each.shape[-2] // 2, each.shape[-1] // 2) for each in (x, *shown)]] * count,
        return_dict=False,
    )[0]
    return QwenImagePipeline._unpack_latents(out[:, : packed[0].shape[1]], 8 * height, 8 * width, 8)


# ------------------------------------------------------------------ the pipeline, as far as it runs here


def processor_class() -> type:
    """Make a Qwen2VLProcessor that needs no torchvision: transformers 5.24 makes none of its own without it."""
    from transformers import Qwen2VLProcessor

    class Processor(Qwen2VLProcessor):
        def __init__(self, tokenizer: Any, images: Any, brought_to: Any) -> None:
            self.tokenizer, self.image_processor, self._brought_to = tokenizer, images, brought_to

        def __call__(self, text: list[str], images: Any, **options: Any) -> Any:
            from transformers import BatchFeature

            images = images if isinstance(images, list) else [images]
            made = self.image_processor([self._brought_to(each) for each in images], return_tensors="pt")
            rows = [int(grid.prod()) // self.image_processor.merge_size**2 for grid in made["image_grid_thw"]]
            texts, marks = [], iter(rows)
            for each in text:
                for _ in range(each.count("<|image_pad|>")):
                    each = each.replace("<|image_pad|>", "<|seen|>" * next(marks), 1)
                texts.append(each.replace("<|seen|>", "<|image_pad|>"))
            return BatchFeature({**self.tokenizer(texts, padding=True, return_tensors="pt"), **made})

    return Processor


def with_positions(module: Any, args: Any, options: dict[str, Any]) -> Any:
    """Tell images from texts: without it rows and columns have no positions (huggingface/diffusers issue 14194)."""
    told = (options["input_ids"] == module.config.image_token_id).int()
    return args, options | {"mm_token_type_ids": told}


def load(kind: Any, folder: Path, area: int | None = 1024 * 1024, **more: Any) -> Any:
    """Load a folder, with references of the drawn size. area: that the processor is given in place of the pipeline."""
    import diffusers
    from diffusers.image_processor import VaeImageProcessor
    from transformers import Qwen2Tokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    module = getattr(diffusers.pipelines.qwenimage, kind.__module__.rpartition(".")[2])
    original = getattr(module, "original_dimensions", module.calculate_dimensions)
    module.original_dimensions = original

    @functools.wraps(original)
    def dimensions(target_area: int, ratio: float) -> Any:
        return original(AREA if target_area == 1024 * 1024 else target_area, ratio)

    module.calculate_dimensions = dimensions

    def brought_to(image: Image.Image) -> Any:
        if area is None:
            return image
        width, height = original(area, image.width / image.height)[:2]
        return VaeImageProcessor(vae_scale_factor=16).resize(image, height, width)

    images = Qwen2VLImageProcessorPil.from_pretrained(folder / "processor")
    processor = processor_class()(Qwen2Tokenizer.from_pretrained(folder / "processor"), images, brought_to)
    # not the class's own, which a test may put this in the place of
    pipe = diffusers.DiffusionPipeline.from_pretrained.__func__(kind, folder, processor=processor, **more)
    pipe.text_encoder.register_forward_pre_hook(with_positions, with_kwargs=True)
    return pipe


def pictures(features: Conditions, row: int) -> list[Image.Image]:
    """Return the references of a sample."""
    named = [f"{control_name(number)}_pixels" for number in range(3)]
    return [Image.fromarray(features[name][row].movedim(0, -1).numpy()) for name in named if name in features]


def shown(pipe: Any, captions: list[str], length: int, features: Conditions, area: int | None = None) -> Conditions:
    """Ask for one caption after the other; the pipeline cuts none, and what is cut changes nothing of what stays.

    area: that the pipeline brings images to before its encoder is given them.
    """
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as module

    tokens, masks = [], []
    for row, caption in enumerate(captions):
        images = pictures(features, row)
        if area is not None:
            sizes = [module.calculate_dimensions(area, each.width / each.height) for each in images]
            images = [
                pipe.image_processor.resize(each, size[1], size[0]) for each, size in zip(images, sizes, strict=True)
            ]
        made, _ = pipe.encode_prompt(caption, images, device="cpu")
        rows = pipe.processor.image_processor
        grids = rows([pipe.processor._brought_to(each) for each in images], return_tensors="pt")["image_grid_thw"]
        kept = length + sum(int(grid.prod()) // rows.merge_size**2 - 1 for grid in grids)
        made = made[:, :kept]
        tokens.append(torch.nn.functional.pad(made[0], (0, 0, 0, kept - made.shape[1])))
        masks.append(torch.arange(kept) < made.shape[1])
    return {"tokens": torch.stack(tokens), "mask": torch.stack(masks)}


def options_of(images: Sequence[np.ndarray]) -> Any:
    def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
        return qwen_image.options(ours, negative, scale) | {"image": [Image.fromarray(each) for each in images]}

    return options


def drawn(images: Sequence[np.ndarray], **more: Any) -> Drawn:
    return Drawn(
        options_of(images),
        lambda x: passes.pack(x[:, :, 0], 2),
        lambda x, size_hw: passes.unpack(x, 2, (size_hw[0] // 16, size_hw[1] // 16)).unsqueeze(2),
        qwen_image.raw,
        references=tuple(torch.from_numpy(each).movedim(-1, 0)[None] for each in images),
        **more,
    )


LENGTH = 640  # tokens that tests keep: in bytes the template takes most of them
ORACLE = Oracle(forward, shown=shown, load=load, drawn=drawn([flux_kontext.reference()]), text_length=LENGTH)
