"""Stable Diffusion XL (Podell et al. 2023): a UNet that reads two CLIP encoders and the sizes of the picture.

Epsilon or v-prediction over 1000 scaled-linear steps; what it shares with its forerunners is in unet.py.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Batch, Fault, Group, Parts
from difftrain.models.facts import Agree, Lora, OneFile, Text
from difftrain.models.row import UNET_TARGETS
from difftrain.models.unet import (
    IGNORED,
    LATENT_CHANNELS,
    NEEDED,
    UNET_PREFIX,
    VAE_PREFIX,
    UNetFamily,
    block_faults,
    block_groups,
    freeze_blocks,
)
from difftrain.models.weights import keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from difftrain.models.root import DenoiserRoot
    from difftrain.models.weights.keys import Rule


CLIP_SKIP = 2  # SDXL's: hidden_states[-2]; 1 is the last layer's output, before its norm
SIZE_FEATURES = ("original_size", "crop_top_left", "target_size")  # (B, 2) each, height or top first
PREFIXES = {
    "unet": UNET_PREFIX,
    "vae": VAE_PREFIX,
    "text_encoder_1": "conditioner.embedders.0.transformer.",
    "text_encoder_2": "conditioner.embedders.1.model.",
}
# tensors of single files that are no weights of a module: written for readers that expect them, ignored when read
POSITION_IDS = PREFIXES["text_encoder_1"] + "text_model.embeddings.position_ids"
LOGIT_SCALE = PREFIXES["text_encoder_2"] + "logit_scale"
_HUB_IDS = ("openai/clip-vit-large-patch14", "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k")  # kohya's


class SDXLFamily(UNetFamily):
    """The facts of an SDXL model, the UNet's call, and its blocks as kohya's tools count them."""

    name = "sdxl"
    modelspec = "stable-diffusion-xl-v1-base"
    kohya_name = "sdxl_base_v1-0"
    lora = Lora(UNET_TARGETS, kohya="original")  # kohya's SDXL is Stability's own UNet
    own_skip = CLIP_SKIP
    native = 128
    folders = MappingProxyType({"text_encoder_1": "text_encoder"})
    texts: tuple[Text, ...] = (
        Text("text_encoder_1", "tokenizer", "clip", 77, hidden=-CLIP_SKIP, hub=_HUB_IDS[0]),
        Text(
            "text_encoder_2", "tokenizer_2", "clip", 77, hidden=-CLIP_SKIP, pooled="text_embeds", pooled_as="pooled",
            pads_zero=True, hub=_HUB_IDS[1],
        ),
    )  # fmt: skip
    one_file = OneFile(
        prefixes=PREFIXES,
        released="base",
        layout="SDXL's original layout has model.diffusion_model., first_stage_model. and conditioner.embedders.0 and 1",
        beside=(POSITION_IDS, LOGIT_SCALE),
        ignored=IGNORED,
    )
    # dropped captions are trained as the encoded empty text (kohya), so that is what "no prompt" means here, not zeros
    index = MappingProxyType({
        "feature_extractor": [None, None], "image_encoder": [None, None], "force_zeros_for_empty_prompt": False,
    })  # fmt: skip
    needed = MappingProxyType({
        "unet": (
            *NEEDED, "transformer_layers_per_block", "addition_embed_type", "addition_time_embed_dim",
            "projection_class_embeddings_input_dim",
        ),
    })  # fmt: skip
    agree = (
        Agree("unet.cross_attention_dim", lambda s: s["text_encoder_1"]["hidden_size"] + s["text_encoder_2"]["hidden_size"],
              "the text encoders' widths together"),
        Agree("unet.projection_class_embeddings_input_dim",
              lambda s: 6 * s["unet"]["addition_time_embed_dim"] + s["text_encoder_2"]["projection_dim"],
              "6 x addition_time_embed_dim + text_encoder_2's projection_dim"),
        *LATENT_CHANNELS,
    )  # fmt: skip

    # ------------------------------------------------------------------ the UNet

    def conditions(self, made: dict[str, Tensor], batch: Batch | None = None) -> dict[str, Tensor]:
        """Return time_ids (B, 6) and, of each text encoder, its output where it is frozen, else the ids for it."""
        if batch is None:
            return made
        sizes = [batch.features[name] for name in SIZE_FEATURES]
        return {"time_ids": torch.cat(sizes, dim=1).float(), **made}

    def size_features(self, size_hw: tuple[int, int], count: int) -> dict[str, Tensor]:
        """Return the sizes of pictures that are drawn whole: original and target are their own, nothing is cropped."""
        own, corner = torch.tensor(size_hw).repeat(count, 1), torch.zeros((count, 2), dtype=torch.int64)
        return dict(zip(SIZE_FEATURES, (own, corner, own), strict=True))

    def unet_conditions(self, conditions: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Return the states of both text encoders side by side; beside them a vector of the second, and the sizes."""
        first, second = conditions["hidden_1"], conditions["hidden_2"]
        hidden = torch.cat([first, second.to(first.dtype)], dim=-1)
        return hidden, {"text_embeds": conditions["pooled"], "time_ids": conditions["time_ids"]}

    # ------------------------------------------------------------------ rates, checks

    def param_groups(self, root: nn.Module) -> list[Group]:
        """Group parameters by part, and by the UNet's blocks where they have rates of their own."""
        groups, rates = super().param_groups(root), self.cfg.optimizer.block_lr
        if not rates or "unet" not in self.rates:
            return groups
        return [*block_groups(root.get_submodule("unet"), groups[0].named_params, rates), *groups[1:]]

    def freeze(self, parts: Parts, root: DenoiserRoot) -> list[str]:
        notes = super().freeze(parts, root)
        return notes + (freeze_blocks(root.denoiser, self.cfg.optimizer.block_lr) if "unet" in self.rates else [])

    def faults(self, net: nn.Module) -> list[Fault]:
        """Find what a configuration asks of this model and it has not. net: without weights."""
        return super().faults(net) + block_faults(net, self.cfg.optimizer.block_lr)

    # ------------------------------------------------------------------ files

    def rule(self, part: str) -> Callable[[Any], Rule] | None:
        """Return what says, of a part's module, where its tensors lie in the original layout."""
        return keys.clip_rule if part == "text_encoder_2" else super().rule(part)

    def beside(self, parts: Parts) -> dict[str, Tensor]:
        """Return two tensors that the released file has; the contrastive temperature is the loaded file's, or OpenCLIP's."""
        file = self.source.single_file
        stored = file is not None and LOGIT_SCALE in file.marks
        scale = file.get(LOGIT_SCALE) if file and stored else torch.tensor(math.log(1 / 0.07))
        length = self.source.complete("text_encoder_1")["max_position_embeddings"]
        return {POSITION_IDS: torch.arange(length)[None], LOGIT_SCALE: scale}
