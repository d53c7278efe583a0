"""A diffusers pipeline over the modules in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Parts
from difftrain.models.quiet import quiet_imports
from difftrain.models.text.encode import encode

with quiet_imports():
    from diffusers import StableDiffusionXLPipeline

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.models.sdxl.family import SDXLFamily


class CaptionPipeline(StableDiffusionXLPipeline):
    """Encode prompts as this training encodes captions: in chunks of 75 tokens, with weights, from its layers."""

    tokenize: Any
    texts: Any
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
        read = {name: value.to(device) for name, value in self.tokenize(prompts).items()}
        made = encode(self.texts, 1, self.text_encoder, read) | encode(self.texts, 2, self.text_encoder_2, read)
        hidden = torch.cat([made["hidden_1"], made["hidden_2"].to(made["hidden_1"].dtype)], dim=-1)
        return hidden.repeat_interleave(repeats, 0), made["pooled"].repeat_interleave(repeats, 0)


def make_pipeline(family: SDXLFamily, parts: Parts) -> Any:
    """Make a StableDiffusionXLPipeline; where captions are encoded in another way than diffusers', prompts are too."""
    held, tokenize = {**dict(parts.root.named_children()), **parts.frozen}, family.tokenizer(parts)
    plain = tokenize.num_chunks == 1 and not tokenize.weighted and not family.skips
    kind = StableDiffusionXLPipeline if plain else CaptionPipeline
    pipeline = kind(
        vae=held["vae"],
        text_encoder=held["text_encoder_1"],
        text_encoder_2=held["text_encoder_2"],
        tokenizer=parts.tokenizers["tokenizer"].transformers_tokenizer(),
        tokenizer_2=parts.tokenizers["tokenizer_2"].transformers_tokenizer(),
        unet=held["unet"],
        scheduler=family.scheduler(),
        # dropped captions are trained as the encoded empty text (kohya), so that is what no prompt means, not zeros
        force_zeros_for_empty_prompt=False,
        add_watermarker=False,
    )
    if isinstance(pipeline, CaptionPipeline):
        pipeline.tokenize, pipeline.texts = tokenize, family.texts
    return pipeline
