"""The section about the model: which one, from where, and how its parts are held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from difftrain.config.schema.section import NonNegative, PositiveInt, Section, Share
from difftrain.models.registry import DEFAULT, FAMILIES

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]  # the choices are those of the rows

_SIZES = "; ".join(f"{name}: {', '.join(row.sizes)}" for name, row in FAMILIES.items())


class ModelSection(Section):
    """Which model, from where."""

    family: FamilyName = Field(DEFAULT, description="what is trained")
    train_type: Literal["normal_training", "sd3_light_pretrain"] = Field(
        "normal_training",
        description="normal_training: weights go on; sd3_light_pretrain: SD3-Light's depth, from random weights",
    )
    num_layers: PositiveInt | None = Field(
        None, description="joint blocks; unset: those of the weights, 15 in SD3-Light"
    )
    init_from_config: str | None = Field(None, description=f"random weights of a size ({_SIZES}) or FILE.json")
    pretrained: str | None = Field(
        None,
        description="diffusers folder, single .safetensors/.ckpt file in the family's original layout, or a hub id of either",
    )
    vae: str | None = Field(None, description="another VAE: diffusers folder, single file or a hub id")
    transformer: str | None = Field(
        None,
        description="the transformer from another source: its folder, a whole model's folder, or one file in its original layout",
    )
    text_encoder1: str | None = Field(
        None, description="the family's first text encoder from another source: its folder, or a whole model's folder"
    )
    text_encoder2: str | None = Field(None, description="the same for its second")
    text_encoder3: str | None = Field(None, description="the same for its third")
    text_encoder4: str | None = Field(None, description="the same for its fourth")
    tokenizer1: str | None = Field(None, description="folder of the first tokenizer (CLIP-L), or a hub id")
    tokenizer2: str | None = Field(None, description="folder of the second tokenizer (OpenCLIP bigG), or a hub id")
    tokenizer3: str | None = Field(None, description="folder of the third tokenizer (T5), or a hub id")
    tokenizer4: str | None = Field(None, description="folder of the fourth tokenizer (a language model's)")
    t5_max_length: PositiveInt = Field(256, description="tokens that T5 reads")
    llm_max_length: PositiveInt | None = Field(
        None,
        description="tokens of a caption that are kept of what a language model reads; unset: the pipeline's number",
    )
    guidance: NonNegative = Field(1.0, description="guidance value passed to a guidance-distilled model (Flux.1)")
    first_frame_conditioning_p: Share = Field(
        0.0, description="how often a clip's first frame is given, almost without noise and without a loss"
    )
    expert: Literal["high", "low"] = Field(
        "high",
        description="which expert of Wan 2.2 is trained: that of high noise or of low noise; each is a run of its own",
    )
    t5_attention_mask: bool = Field(False, description="T5 reads with the mask; rows at its pad positions are zeros")
    enable_uncond_text_dropout: bool = Field(
        False, description="zeros in place of a text encoder's outputs, by chance for each"
    )
    uncond_text_dropout_prob: Share = Field(0.464, description="how often")
    train_only: tuple[str, ...] = Field(
        (), description="regular expressions: parameters of the denoiser that are trained; the others are only held"
    )
    tokenizer_cache_dir: str | None = Field(
        None, description="keep tokenizers that are fetched from a hub here, as kohya does, a folder each"
    )
    max_token_length: Literal[75, 77, 150, 225] = Field(77, description="77 (or 75), or 150 or 225 in chunks of 75")
    clip_skip: PositiveInt | None = Field(
        None, description="take hidden_states[-n] of CLIP; unset: what the family reads, 2 for SDXL"
    )
    prediction_type: Literal["epsilon", "v_prediction"] = Field("epsilon", description="what the denoiser predicts")
    train_text_encoder: bool = Field(False, description="train the text encoders too")
    vae_fp32: bool = Field(True, description="the VAE computes in fp32; false: in the mixed precision")
    vae_batch_size: PositiveInt | None = Field(
        None, description="images that the VAE takes at once; unset: the micro batch"
    )
    fp8_frozen: Literal["all", "unet"] | None = Field(
        None, description="frozen layers that are held in 8 bits; all: but the VAE's; unet: of the UNet alone"
    )
    base_dtype: Literal["bf16", "fp8", "int8", "nf4"] | None = Field(
        None,
        description="what layers of the denoiser's blocks that are not trained (adapters, train_only) are stored in, and are computed "
        "with in the run's precision; unset: bf16 or fp16 with mixed precision, else fp32",
    )
    disable_mmap: bool = Field(False, description="read weights without a memory map, for network disks")
