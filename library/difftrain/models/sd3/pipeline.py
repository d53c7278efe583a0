"""A diffusers pipeline over the modules in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Parts
from difftrain.models.parts.quiet import quiet_imports
from difftrain.models.sd3 import text
from difftrain.models.sd3.export import ZEROS, unconditional
from difftrain.models.sd3.schedule import make_scheduler
from difftrain.models.sd3.tokens import SD3Tokenize

with quiet_imports():
    from diffusers import StableDiffusion3Pipeline

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.models.sd3.family import SD3Family


class CaptionPipeline(StableDiffusion3Pipeline):
    """Encode prompts as this training encodes captions; no text is what the training took for it."""

    tokenize: SD3Tokenize
    zeros_for_no_text: bool
    width: int  # of a token
    native_size: tuple[int, int] | None  # (height, width) that the training saw
    text_encoder: Any
    text_encoder_2: Any
    text_encoder_3: Any

    def encode_prompt(
        self,
        prompt: str | list[str],
        *_: Any,
        num_images_per_prompt: int = 1,
        do_classifier_free_guidance: bool = True,
        negative_prompt: str | list[str] | None = None,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        pooled_prompt_embeds: Tensor | None = None,
        negative_pooled_prompt_embeds: Tensor | None = None,
        **__: Any,
    ) -> tuple[Tensor | None, ...]:
        """Return tokens and pooled vectors of prompts and of negative prompts, in diffusers' order."""
        tokens, pooled = prompt_embeds, pooled_prompt_embeds
        if tokens is None or pooled is None:
            tokens, pooled = self._encode([prompt] if isinstance(prompt, str) else prompt, num_images_per_prompt)
        if not do_classifier_free_guidance:
            return tokens, None, pooled, None
        if negative_prompt_embeds is not None:
            return tokens, negative_prompt_embeds, pooled, negative_pooled_prompt_embeds
        count = len(tokens) // num_images_per_prompt
        negative = negative_prompt or ""
        negatives = [negative] * count if isinstance(negative, str) else negative
        if self.zeros_for_no_text and not any(negatives):
            return tokens, torch.zeros_like(tokens), pooled, torch.zeros_like(pooled)
        no_tokens, no_pooled = self._encode(negatives, num_images_per_prompt)
        return tokens, no_tokens, pooled, no_pooled

    def prepare_latents(self, *asked: Any) -> Tensor:
        """Leave given noise as precise as it is: diffusers rounds it to the precision of the prompts."""
        *_, device, _, noise = asked
        return super().prepare_latents(*asked) if noise is None else noise.to(device)  # type: ignore[misc]

    def _encode(self, prompts: list[str], repeats: int) -> tuple[Tensor, Tensor]:
        encoders = {"text_encoder_1": self.text_encoder, "text_encoder_2": self.text_encoder_2}
        encoders["text_encoder_3"] = self.text_encoder_3
        device = next(self.text_encoder.parameters()).device
        given = {name: value.to(device) for name, value in self.tokenize(prompts).items()}
        found: dict[str, Tensor] = {}
        for part, encoder in encoders.items():
            found |= text.encode(part, encoder, given)
        tokens, pooled = text.joined(found, [None] * len(encoders), self.width)
        return tokens.repeat_interleave(repeats, 0), pooled.repeat_interleave(repeats, 0)


def make_pipeline(family: SD3Family, parts: Parts) -> Any:
    """Make a StableDiffusion3Pipeline over awake parts, that draws as the training taught."""
    cfg, three = family.cfg, family.vocabularies
    pipeline = CaptionPipeline(
        transformer=parts.root.get_submodule("transformer"),
        scheduler=make_scheduler(cfg, family.source),
        vae=parts.frozen["vae"],
        text_encoder=parts.frozen["text_encoder_1"],
        text_encoder_2=parts.frozen["text_encoder_2"],
        text_encoder_3=parts.frozen["text_encoder_3"],
        tokenizer=three.first.transformers_tokenizer(),
        tokenizer_2=three.second.transformers_tokenizer(),
        tokenizer_3=three.third.transformers_tokenizer(),
    )
    pipeline.tokenize = family.tokenizer(parts)
    pipeline.zeros_for_no_text = unconditional(cfg) == ZEROS
    pipeline.width = family.source.architecture.transformer["joint_attention_dim"]
    resolution = cfg.data.resolution or next((each.resolution for each in cfg.data.datasets if each.resolution), None)
    pipeline.native_size = (resolution[1], resolution[0]) if resolution else None
    return pipeline
