"""A diffusers pipeline over the modules in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Parts
from difftrain.models.parts.quiet import quiet_imports
from difftrain.models.sdxl.text import encode_first, encode_second
from difftrain.models.sdxl.tokens import SDXLTokenize

with quiet_imports():
    from diffusers import StableDiffusionXLPipeline

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.models.sdxl.schedule import SchedulerConfig


class LongPromptPipeline(StableDiffusionXLPipeline):
    """Encode prompts as captions are encoded: in chunks of 75 tokens, where training takes more than one."""

    tokenize: SDXLTokenize
    text_encoder: Any
    text_encoder_2: Any

    def encode_prompt(
        self,
        prompt: str | list[str],
        *,
        num_images_per_prompt: int = 1,
        do_classifier_free_guidance: bool = True,
        negative_prompt: str | list[str] | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Return hidden states and pooled states of prompts and of negative prompts, which are encoded even if empty."""
        prompts = [prompt] if isinstance(prompt, str) else prompt
        hidden, pooled = self._encode(prompts, num_images_per_prompt)
        if not do_classifier_free_guidance:
            return hidden, None, pooled, None
        negative = negative_prompt or ""
        negatives = [negative] * len(prompts) if isinstance(negative, str) else negative
        negative_hidden, negative_pooled = self._encode(negatives, num_images_per_prompt)
        return hidden, negative_hidden, pooled, negative_pooled

    def _encode(self, prompts: list[str], repeats: int) -> tuple[Tensor, Tensor]:
        device = next(self.text_encoder.parameters()).device
        ids = {name: value.to(device) for name, value in self.tokenize(prompts).items()}
        first = encode_first(self.text_encoder, ids["input_ids_1"])
        second, pooled = encode_second(self.text_encoder_2, ids["input_ids_2"])
        hidden = torch.cat([first, second.to(first.dtype)], dim=-1)
        return hidden.repeat_interleave(repeats, 0), pooled.repeat_interleave(repeats, 0)


def make_pipeline(parts: Parts, tokenize: SDXLTokenize, schedule: SchedulerConfig) -> Any:
    """Make a StableDiffusionXLPipeline; prompts longer than 77 tokens are taken where captions are."""
    held = {**dict(parts.root.named_children()), **parts.frozen}
    kind = StableDiffusionXLPipeline if tokenize.num_chunks == 1 else LongPromptPipeline
    pipeline = kind(
        vae=held["vae"],
        text_encoder=held["text_encoder_1"],
        text_encoder_2=held["text_encoder_2"],
        tokenizer=parts.tokenizers["tokenizer_1"].transformers_tokenizer(),
        tokenizer_2=parts.tokenizers["tokenizer_2"].transformers_tokenizer(),
        unet=held["unet"],
        scheduler=schedule.make("EulerDiscreteScheduler"),
        # dropped captions are trained as the encoded empty text (kohya), so that is what no prompt means, not zeros
        force_zeros_for_empty_prompt=False,
        add_watermarker=False,
    )
    if isinstance(pipeline, LongPromptPipeline):
        pipeline.tokenize = tokenize
    return pipeline
