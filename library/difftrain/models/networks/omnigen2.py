"""The denoiser of OmniGen2 (VectorSpaceLab 2025, arXiv:2506.18871): four lists of Lumina 2's blocks, and two patch embedders.

It holds weights, sizes and tables alone, under the names of the release's files; its pass is the family's
(models/families/omnigen2.py). The weights and the published code are under Apache-2.0; nothing of the code is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models import ModelMixin
from diffusers.models.embeddings import Timesteps
from diffusers.models.normalization import LuminaLayerNormContinuous
from diffusers.models.transformers.transformer_lumina2 import (
    Lumina2CombinedTimestepCaptionEmbedding,
    Lumina2RotaryPosEmbed,
    Lumina2TransformerBlock,
)
from torch import nn

MAX_REFERENCES = 5  # rows of image_index_embedding
_THETA = 10000
_MODULATION = 1024  # channels of the time's embedding, at most
_FREQUENCIES = 256


class OmniGen2Transformer2DModel(ModelMixin, ConfigMixin, PeftAdapterMixin):  # type: ignore[misc]
    """Hold the denoiser's weights. Defaults are the sizes of the release.

    context_refiner refines text, noise_refiner the image, ref_image_refiner one reference after another; layers run over
    all of them. timestep_scale: a time in 0..1 is multiplied by it before its sines.
    Raises ValueError where the axes of positions do not make up a head.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["Lumina2TransformerBlock"]  # type: ignore[misc, assignment]

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        patch_size: int = 2,
        in_channels: int = 16,
        out_channels: int | None = None,
        hidden_size: int = 2520,
        num_layers: int = 32,
        num_refiner_layers: int = 2,
        num_attention_heads: int = 21,
        num_kv_heads: int = 7,
        multiple_of: int = 256,
        ffn_dim_multiplier: float | None = None,
        norm_eps: float = 1e-5,
        axes_dim_rope: Sequence[int] = (40, 40, 40),
        axes_lens: Sequence[int] = (1024, 1664, 1664),
        text_feat_dim: int = 2048,
        timestep_scale: float = 1000.0,
    ) -> None:
        super().__init__()
        head = hidden_size // num_attention_heads
        if sum(axes_dim_rope) != head:
            raise ValueError(f"axes_dim_rope is {sum(axes_dim_rope)} in all, a head has {head} channels")
        entering, leaving = (patch_size**2 * (channels or in_channels) for channels in (in_channels, out_channels))

        # --- what enters
        self.rope_embedder = Lumina2RotaryPosEmbed(_THETA, list(axes_dim_rope), list(axes_lens), patch_size)
        self.x_embedder = nn.Linear(entering, hidden_size)
        self.ref_image_patch_embedder = nn.Linear(entering, hidden_size)
        self.image_index_embedding = nn.Parameter(torch.empty(MAX_REFERENCES, hidden_size))
        self.time_caption_embed = Lumina2CombinedTimestepCaptionEmbedding(
            hidden_size, text_feat_dim, _FREQUENCIES, norm_eps
        )
        self.time_caption_embed.time_proj = Timesteps(_FREQUENCIES, True, 0.0, scale=timestep_scale)  # type: ignore[arg-type]

        # --- blocks
        make: Any = Lumina2TransformerBlock
        sizes = (hidden_size, num_attention_heads, num_kv_heads, multiple_of, ffn_dim_multiplier, norm_eps)

        def blocks(count: int, *, modulation: bool = True) -> nn.ModuleList:
            return nn.ModuleList(make(*sizes, modulation=modulation) for _ in range(count))

        self.noise_refiner = blocks(num_refiner_layers)
        self.ref_image_refiner = blocks(num_refiner_layers)
        self.context_refiner = blocks(num_refiner_layers, modulation=False)
        self.layers = blocks(num_layers)

        # --- what leaves
        self.norm_out = LuminaLayerNormContinuous(
            hidden_size, min(hidden_size, _MODULATION), elementwise_affine=False, eps=1e-6, bias=True, out_dim=leaving
        )
        self.gradient_checkpointing = False
        nn.init.normal_(self.image_index_embedding, std=0.02)
