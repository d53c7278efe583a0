"""Stable Diffusion 1 (Rombach et al. 2022): a UNet that reads the last states of CLIP-L, and learns noise at 512 px."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from difftrain.contracts import Parts
from difftrain.models.facts import OneFile, Text
from difftrain.models.unet import IGNORED, UNET_PREFIX, VAE_PREFIX, OneEncoderFamily

if TYPE_CHECKING:
    from torch import Tensor


PREFIXES = {"unet": UNET_PREFIX, "vae": VAE_PREFIX, "text_encoder": "cond_stage_model.transformer."}
# of single files what is no weight of a module: written for readers that expect it, ignored when read
POSITION_IDS = PREFIXES["text_encoder"] + "text_model.embeddings.position_ids"


class SD1(OneEncoderFamily):
    """The facts of a Stable Diffusion 1 model."""

    name = "sd1"
    modelspec = "stable-diffusion-v1"
    kohya_name = "sd_v1"
    texts = (Text("text_encoder", "tokenizer", "clip", 77, normed=True, hub="openai/clip-vit-large-patch14"),)
    one_file = OneFile(
        prefixes=PREFIXES,
        released="base",
        layout="Stable Diffusion 1's original layout has model.diffusion_model., first_stage_model. and "
        "cond_stage_model.transformer.",
        beside=(POSITION_IDS,),
        ignored=rf"{IGNORED}|^cond_stage_model\.transformer\.embeddings\.position_ids$",  # as older files call it
    )

    def beside(self, parts: Parts) -> dict[str, Tensor]:
        """Return the table of positions that the released file has."""
        length = self.source.complete("text_encoder")["max_position_embeddings"]
        return {POSITION_IDS: torch.arange(length)[None]}
