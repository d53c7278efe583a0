"""The section about adapters: small weights that are trained in place of those of the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from difftrain.config.schema.section import PositiveInt, Section

ADAPTERS = ("lora", "dora", "lokr", "oft", "ia3")
_Alpha = Annotated[float, Field(gt=0)]


class AdapterSection(Section):
    """LoRA and its relatives: what is trained beside a model whose own weights stay as they are."""

    type: Literal["lora", "dora", "lokr", "oft", "ia3"] | None = Field(
        None, description="kind of adapter that is trained, and nothing else; unset: the model itself is"
    )
    rank: PositiveInt = Field(16, description="rank of the product in each layer; of oft the blocks that a layer has")
    alpha: _Alpha | None = Field(
        None, description="the product is weighed by alpha / rank; unset: alpha is the rank of each layer"
    )
    use_rslora: bool = Field(False, description="weigh by alpha / sqrt(rank) (Kalajdzievski 2023)")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of an adapter's inputs that are zeros in a training step"
    )
    target_modules: tuple[str, ...] = Field(
        (),
        description="layers that get one: ends of their names, or regular expressions of whole names; unset: those that the family names",
    )
    exclude_modules: tuple[str, ...] = Field((), description="layers that get none, in the same words")
    rank_pattern: dict[str, PositiveInt] = Field({}, description="another rank for layers, by the same words")
    alpha_pattern: dict[str, _Alpha] = Field({}, description="another alpha for layers, by the same words")
    decompose_factor: Annotated[int, Field(ge=-1)] = Field(
        -1, description="of lokr: size of the left factor; -1: as near to a square as it goes"
    )
    scale_weight_norms: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="largest norm of what LoRA adds to a layer: after every update both factors of a larger one are scaled down",
    )
    loraplus_lr_ratio: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="the second factor of a product learns at this many times the rate of the first (LoRA+, Hayou et al. 2024)",
    )
    loraplus_unet_lr_ratio: Annotated[float, Field(gt=0)] | None = Field(
        None, description="the same in the denoiser alone; wins there"
    )
    loraplus_text_encoder_lr_ratio: Annotated[float, Field(gt=0)] | None = Field(
        None, description="the same in text encoders alone; wins there"
    )
    init_from_existing: str | None = Field(
        None, description="adapter to go on from, in any layout that is read: of the same layers and ranks"
    )
    fuse_adapters: tuple[str, ...] = Field(
        (), description="FILE[:SCALE]: adapters that are added to the model's weights before training"
    )
