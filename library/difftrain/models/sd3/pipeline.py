"""A diffusers pipeline over the modules in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Parts
from difftrain.models.quiet import quiet_imports
from difftrain.models.text.encode import encode

with quiet_imports():
    from diffusers import StableDiffusion3Pipeline

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.models.sd3.family import SD3Family
    from difftrain.models.text.tokenize import Tokenize


class CaptionPipeline(StableDiffusion3Pipeline):
    """Encode prompts as this training encodes captions; no text is what the training took for it."""

    family: SD3Family
    tokenize: Tokenize
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
        if not any(negatives) and self.family.cfg.model.enable_uncond_text_dropout:
            return tokens, torch.zeros_like(tokens), pooled, torch.zeros_like(pooled)
        no_tokens, no_pooled = self._encode(negatives, num_images_per_prompt)
        return tokens, no_tokens, pooled, no_pooled

    def prepare_latents(self, *asked: Any) -> Tensor:
        """Leave given noise as precise as it is: diffusers rounds it to the precision of the prompts."""
        *_, device, _, noise = asked
        return super().prepare_latents(*asked) if noise is None else noise.to(device)  # type: ignore[misc]

    def _encode(self, prompts: list[str], repeats: int) -> tuple[Tensor, Tensor]:
        device = next(self.text_encoder.parameters()).device
        ids = {name: value.to(device) for name, value in self.tokenize(prompts).items()}
        made: dict[str, Tensor] = {}
        for place, encoder in enumerate((self.text_encoder, self.text_encoder_2, self.text_encoder_3), start=1):
            made |= encode(self.family.texts, place, encoder, ids)
        wide = {name: value.float() if value.is_floating_point() else value for name, value in made.items()}
        tokens, pooled = self.family.conditions(wide).values()
        return tokens.repeat_interleave(repeats, 0), pooled.repeat_interleave(repeats, 0)


def make_pipeline(family: SD3Family, parts: Parts) -> Any:
    """Make a StableDiffusion3Pipeline over awake parts, that draws as the training taught."""
    cfg = family.cfg
    first, second, third = (vocabulary.transformers_tokenizer() for vocabulary in family.vocabularies)
    pipeline = CaptionPipeline(
        transformer=parts.root.get_submodule("transformer"),
        scheduler=family.scheduler(),
        vae=parts.frozen["vae"],
        text_encoder=parts.frozen["text_encoder_1"],
        text_encoder_2=parts.frozen["text_encoder_2"],
        text_encoder_3=parts.frozen["text_encoder_3"],
        tokenizer=first,
        tokenizer_2=second,
        tokenizer_3=third,
    )
    pipeline.family, pipeline.tokenize = family, family.tokenizer(parts)
    resolution = cfg.data.resolution or next((each.resolution for each in cfg.data.datasets if each.resolution), None)
    pipeline.native_size = (resolution[1], resolution[0]) if resolution else None
    return pipeline
