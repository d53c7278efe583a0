"""Which families there are: one row each, from which configuration, help, docs and the commands are derived.

A row is literal data that is read without torch: what a family is called, what it is made of, which fields of the
configuration mean something to it. The maths stands where `target` says. This file imports nothing but contracts and
the standard library, so that configuration, which lies below the models, may read it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from difftrain.contracts import ConfigFault, Family, Fault

LAYOUTS = ("ckpt", "safetensors", "diffusers", "diffusers_safetensors")
_FOLDER_LAYOUTS = ("diffusers", "diffusers_safetensors")


@dataclass(frozen=True, kw_only=True)
class FamilyRow:
    """Say of a family what is known without its weights.

    title: what people call it; network: what logs and reports call it, by train_type where one has a name of its own.
    target: "module:Class". pipeline: diffusers' class. parts: name -> "library:Class", the denoiser first (where a folder
    of diffusers calls one otherwise, its class maps it in `folders`); encoders: the kinds of its text encoders, in their
    order. text_features: what frozen text encoders make of captions. multiple: pixels of which both sides are multiples.
    sizes: random models by name; sizes_multiple: of those whose multiple is smaller. layouts: those of exports. trains:
    what can be trained, nothing of a family that is known as a form only. told_by: ("part.argument", value) in a folder's
    config.json, where families share a pipeline.

    takes: fields and whole sections, of those that not every family has, that mean something to this one; reasons: why
    another one means nothing, where config/schema/families.py has no sentence that fits. defaults: "section.field" -> value
    that differs from the field's own.
    """

    title: str
    network: str
    target: str
    pipeline: str
    parts: Mapping[str, str]
    encoders: tuple[str, ...]
    objective: Literal["ddpm", "flow"]
    multiple: int
    text_features: tuple[str, ...]
    tasks: tuple[str, ...] = ("text-to-image",)
    sizes: tuple[str, ...] = ()
    sizes_multiple: Mapping[str, int] = field(default_factory=dict)
    layouts: tuple[str, ...] = LAYOUTS
    trains: tuple[str, ...] = ()
    clips: bool = False  # whether data may hold clips
    control: int = 0  # reference images that it is shown, at most; each has the image's own size
    told_by: tuple[str, Any] | None = None
    takes: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    networks_by_train_type: Mapping[str, str] = field(default_factory=dict)

    @property
    def denoiser(self) -> str:
        """Return the name of the part that is trained."""
        return next(iter(self.parts))

    def has(self, path: str) -> bool:
        """Tell whether a field, or its whole section, is named in `takes`."""
        return path in self.takes or path.partition(".")[0] in self.takes


# what every rectified flow over a transformer has
_FLOW_FIELDS = ("flow", "repa", "model.transformer")
# of those whose positions are added to tokens, so that blocks may see some of them; rotary ones hang on a token's place
_ROUTED_FIELDS = ("tread", "patch_masking")
# of those that edit: images that they are shown
_CONTROL_FIELDS = ("data.control_dirs", "data.num_control", "data.control_columns", "data.control_dropout")
# what every UNet over CLIP has
_UNET_FIELDS = (
    "noise", "model.prediction_type", "model.fp8_frozen", "model.clip_skip", "model.max_token_length",
    "model.train_text_encoder", "model.tokenizer1", "loss.min_snr_gamma", "loss.min_snr_plus_one",
    "loss.scale_v_pred_like_noise_pred", "loss.v_pred_like", "loss.debiased_estimation", "loss.huber_schedule", "loss.huber_scale",
    "optimizer.learning_rate_te1", "optimizer.text_encoder_lr", "optimizer.unet_lr", "captions.weighted",
)  # fmt: skip
_ONE_ENCODER = {
    "optimizer.learning_rate_te2": "the model has one text encoder",
    "optimizer.block_lr": "is for the 23 blocks of SDXL's UNet",
}
_FLOW_DEFAULTS: dict[str, Any] = {
    "cache.latents_to_disk": True,
    "cache.text_to_disk": True,
    "optimizer.learning_rate": 1e-4,
    "sample.sampler": "flow_euler",
}


def _flow_row(*, takes: Iterable[str] = (), defaults: Mapping[str, Any] | None = None, **row: Any) -> FamilyRow:
    """Make the row of a rectified flow over a transformer: what such rows share, and each encoder's own fields."""
    kinds = row["encoders"]
    paths = {f"model.{name}{i}" for i in range(1, len(kinds) + 1) for name in ("text_encoder", "tokenizer")}
    lengths = {"model.t5_max_length"} if {"t5", "umt5"} & set(kinds) else set()
    lengths |= {"model.llm_max_length"} & {f"model.{kind}_max_length" for kind in kinds}
    shared = {"objective": "flow", "multiple": 16, "layouts": ("safetensors", *_FOLDER_LAYOUTS)}
    fields = frozenset({*_FLOW_FIELDS, *paths, *lengths, *takes})
    return FamilyRow(**{**shared, **row}, takes=fields, defaults={**_FLOW_DEFAULTS, **(defaults or {})})


FAMILIES: dict[str, FamilyRow] = {
    "sdxl": FamilyRow(
        title="SDXL",
        network="StableDiffusionXL",
        target="difftrain.models.families.sdxl:SDXLFamily",
        pipeline="StableDiffusionXLPipeline",
        parts={
            "unet": "diffusers:UNet2DConditionModel",
            "vae": "diffusers:AutoencoderKL",
            "text_encoder_1": "transformers:CLIPTextModel",
            "text_encoder_2": "transformers:CLIPTextModelWithProjection",
        },
        encoders=("clip_l", "clip_g"),
        objective="ddpm",
        multiple=32,
        text_features=("hidden_1", "hidden_2", "pooled"),
        sizes=("base", "tiny", "demo"),
        sizes_multiple={"demo": 16},
        trains=("full",),
        takes=frozenset({
            *_UNET_FIELDS, "model.tokenizer2", "optimizer.learning_rate_te2", "optimizer.block_lr",
        }),
    ),
    "sd1": FamilyRow(
        title="Stable Diffusion 1",
        network="StableDiffusion1",
        target="difftrain.models.families.sd1:SD1",
        pipeline="StableDiffusionPipeline",
        told_by=("unet.use_linear_projection", False),
        parts={
            "unet": "diffusers:UNet2DConditionModel",
            "vae": "diffusers:AutoencoderKL",
            "text_encoder": "transformers:CLIPTextModel",
        },
        encoders=("clip_l",),
        objective="ddpm",
        multiple=64,
        text_features=("hidden_1",),
        sizes=("base", "tiny"),
        sizes_multiple={"tiny": 16},
        trains=("full",),
        takes=frozenset(_UNET_FIELDS),
        reasons=_ONE_ENCODER,
    ),
    "sd2": FamilyRow(
        title="Stable Diffusion 2",
        network="StableDiffusion2",
        target="difftrain.models.families.sd2:SD2",
        pipeline="StableDiffusionPipeline",
        told_by=("unet.use_linear_projection", True),
        parts={
            "unet": "diffusers:UNet2DConditionModel",
            "vae": "diffusers:AutoencoderKL",
            "text_encoder": "transformers:CLIPTextModel",
        },
        encoders=("clip_h",),
        objective="ddpm",
        multiple=64,
        text_features=("hidden_1",),
        sizes=("base", "tiny"),
        sizes_multiple={"tiny": 16},
        trains=("full",),
        takes=frozenset(_UNET_FIELDS),
        reasons=_ONE_ENCODER,
        defaults={"model.prediction_type": "v_prediction"},
    ),
    "sd3": _flow_row(
        title="SD3",
        network="StableDiffusion3",
        networks_by_train_type={"sd3_light_pretrain": "StableDiffusion3-Light"},
        target="difftrain.models.families.sd3.family:SD3Family",
        pipeline="StableDiffusion3Pipeline",
        parts={
            "transformer": "diffusers:SD3Transformer2DModel",
            "vae": "diffusers:AutoencoderKL",
            "text_encoder_1": "transformers:CLIPTextModelWithProjection",
            "text_encoder_2": "transformers:CLIPTextModelWithProjection",
            "text_encoder_3": "transformers:T5EncoderModel",
        },
        encoders=("clip_l", "clip_g", "t5"),
        text_features=("hidden_1", "pooled_1", "hidden_2", "pooled_2", "hidden_3"),
        sizes=("light", "medium", "medium35", "large35", "tiny", "demo"),
        sizes_multiple={"demo": 8},
        trains=("full",),
        takes=(
            *_ROUTED_FIELDS, "model.train_type", "model.num_layers", "model.t5_attention_mask",
            "model.enable_uncond_text_dropout", "model.uncond_text_dropout_prob", "loss.text_recon_gamma",
            "loss.text_recon_target_layer",
        ),
        reasons={
            "model.clip_skip": "sd3 reads hidden_states[-2] of CLIP",
            "model.max_token_length": "sd3's CLIP encoders read 77 tokens",
        },
        defaults={"save.model_as": "diffusers_safetensors"},
    ),
    "flux": _flow_row(
        title="Flux.1",
        network="Flux.1",
        target="difftrain.models.families.flux:Flux",
        pipeline="FluxPipeline",
        parts={
            "transformer": "diffusers:FluxTransformer2DModel",
            "vae": "diffusers:AutoencoderKL",
            "text_encoder": "transformers:CLIPTextModel",
            "text_encoder_2": "transformers:T5EncoderModel",
        },
        encoders=("clip_l", "t5"),
        text_features=("pooled_1", "hidden_2"),
        sizes=("tiny", "demo"),
        sizes_multiple={"demo": 8},
        trains=("full",),
        takes=("model.guidance", "model.train_only"),
        reasons={
            "model.clip_skip": "flux takes the pooled output of CLIP",
            "model.max_token_length": "flux's CLIP encoder reads 77 tokens",
        },
        defaults={"model.t5_max_length": 512, "save.model_as": "diffusers_safetensors"},
    ),
    "flux2": _flow_row(
        title="Flux.2",
        network="Flux.2",
        target="difftrain.models.families.flux2:Flux2",
        pipeline="Flux2Pipeline",
        parts={
            "transformer": "diffusers:Flux2Transformer2DModel",
            "vae": "diffusers:AutoencoderKLFlux2",
            "text_encoder": "transformers:Mistral3ForConditionalGeneration",
        },
        encoders=("llm",),
        text_features=("hidden_1",),
        sizes=("tiny",),
        trains=("full",),
        takes=("model.guidance", "model.train_only"),
        reasons={"model.clip_skip": "flux2 reads three states of its language model"},
        defaults={"save.model_as": "diffusers_safetensors"},
    ),
    "flux2_klein": _flow_row(
        title="Flux.2 Klein",
        network="Flux.2-Klein",
        target="difftrain.models.families.flux2_klein:Flux2Klein",
        pipeline="Flux2KleinPipeline",
        parts={
            "transformer": "diffusers:Flux2Transformer2DModel",
            "vae": "diffusers:AutoencoderKLFlux2",
            "text_encoder": "transformers:Qwen3ForCausalLM",
        },
        encoders=("llm",),
        text_features=("hidden_1",),
        sizes=("tiny",),
        trains=("full",),
        takes=("model.train_only",),
        reasons={"model.clip_skip": "flux2_klein reads three states of its language model"},
        defaults={"save.model_as": "diffusers_safetensors"},
    ),
    "chroma": _flow_row(
        title="Chroma1",
        network="Chroma1",
        target="difftrain.models.families.chroma:Chroma",
        pipeline="ChromaPipeline",
        parts={
            "transformer": "diffusers:ChromaTransformer2DModel",
            "vae": "diffusers:AutoencoderKL",
            "text_encoder": "transformers:T5EncoderModel",
        },
        encoders=("t5",),
        text_features=("hidden_1",),
        sizes=("tiny",),
        trains=("full",),
        takes=("model.train_only",),
        defaults={"model.t5_max_length": 512, "save.model_as": "diffusers_safetensors"},
    ),
    "flux_kontext": _flow_row(
        title="Flux.1 Kontext",
        network="Flux.1-Kontext",
        target="difftrain.models.families.flux_kontext:FluxKontext",
        pipeline="FluxKontextPipeline",
        parts={
            "transformer": "diffusers:FluxTransformer2DModel",
            "vae": "diffusers:AutoencoderKL",
            "text_encoder": "transformers:CLIPTextModel",
            "text_encoder_2": "transformers:T5EncoderModel",
        },
        encoders=("clip_l", "t5"),
        tasks=("image-to-image",),
        text_features=("pooled_1", "hidden_2"),
        sizes=("tiny", "demo"),
        sizes_multiple={"demo": 8},
        trains=("full",),
        control=3,
        takes=("model.guidance", "model.train_only", *_CONTROL_FIELDS),
        reasons={
            "model.clip_skip": "flux_kontext takes the pooled output of CLIP",
            "model.max_token_length": "flux_kontext's CLIP encoder reads 77 tokens",
        },
        defaults={"model.t5_max_length": 512, "save.model_as": "diffusers_safetensors", "data.num_control": 1},
    ),
    "hunyuan_image": _flow_row(
        title="HunyuanImage 2.1",
        network="HunyuanImage2.1",
        target="difftrain.models.families.hunyuan_image:HunyuanImage",
        pipeline="HunyuanImagePipeline",
        parts={
            "transformer": "diffusers:HunyuanImageTransformer2DModel",
            "vae": "diffusers:AutoencoderKLHunyuanImage",
            "text_encoder": "transformers:Qwen2_5_VLForConditionalGeneration",
            "text_encoder_2": "transformers:T5EncoderModel",
        },
        encoders=("llm", "byt5"),
        text_features=("hidden_1", "hidden_2"),
        multiple=32,
        sizes=("tiny",),
        layouts=_FOLDER_LAYOUTS,
        trains=("full",),
        takes=("model.guidance", "model.train_only"),
        reasons={"model.clip_skip": "hunyuan_image reads one state of Qwen2.5-VL"},
        defaults={"save.model_as": "diffusers_safetensors"},
    ),
    "wan": _flow_row(
        title="Wan 2.1",
        network="Wan2.1",
        target="difftrain.models.families.wan:Wan",
        pipeline="WanPipeline",
        parts={
            "transformer": "diffusers:WanTransformer3DModel",
            "vae": "diffusers:AutoencoderKLWan",
            "text_encoder": "transformers:UMT5EncoderModel",
        },
        encoders=("umt5",),
        tasks=("text-to-video",),
        text_features=("hidden_1",),
        sizes=("tiny",),
        defaults={"model.t5_max_length": 512},
    ),
    "qwen_image": _flow_row(
        title="Qwen-Image",
        network="Qwen-Image",
        target="difftrain.models.families.qwen_image:QwenImage",
        pipeline="QwenImagePipeline",
        parts={
            "transformer": "diffusers:QwenImageTransformer2DModel",
            "vae": "diffusers:AutoencoderKLQwenImage",
            "text_encoder": "transformers:Qwen2_5_VLForConditionalGeneration",
        },
        encoders=("llm",),
        text_features=("hidden_1",),
        sizes=("tiny",),
        trains=("full",),
        takes=("model.train_only",),
        reasons={"model.clip_skip": "qwen_image reads the last hidden states of Qwen2.5-VL"},
        defaults={"save.model_as": "diffusers_safetensors"},
    ),
    "z_image": _flow_row(
        title="Z-Image",
        network="Z-Image",
        target="difftrain.models.families.z_image:ZImage",
        pipeline="ZImagePipeline",
        parts={
            "transformer": "diffusers:ZImageTransformer2DModel",
            "vae": "diffusers:AutoencoderKL",
            "text_encoder": "transformers:Qwen3Model",
        },
        encoders=("llm",),
        text_features=("hidden_1",),
        sizes=("tiny",),
        trains=("full",),
        takes=("model.train_only",),
        reasons={"model.clip_skip": "z_image reads the hidden states before the last layer of Qwen3"},
        defaults={"save.model_as": "diffusers_safetensors"},
    ),
    "auraflow": _flow_row(
        title="AuraFlow",
        network="AuraFlow",
        target="difftrain.models.families.auraflow:AuraFlow",
        pipeline="AuraFlowPipeline",
        parts={
            "transformer": "diffusers:AuraFlowTransformer2DModel",
            "vae": "diffusers:AutoencoderKL",
            "text_encoder": "transformers:UMT5EncoderModel",
        },
        encoders=("umt5",),
        text_features=("hidden_1",),
        sizes=("tiny",),
        trains=("full",),
        takes=(*_ROUTED_FIELDS, "model.train_only"),
        defaults={"model.t5_max_length": 256, "save.model_as": "diffusers_safetensors"},
    ),
    "lumina_2": _flow_row(
        title="Lumina Image 2.0",
        network="Lumina2",
        target="difftrain.models.families.lumina_2:Lumina2",
        pipeline="Lumina2Pipeline",
        parts={
            "transformer": "diffusers:Lumina2Transformer2DModel",
            "vae": "diffusers:AutoencoderKL",
            "text_encoder": "transformers:Gemma2Model",
        },
        encoders=("llm",),
        text_features=("hidden_1",),
        sizes=("tiny",),
        trains=("full",),
        takes=("model.train_only",),
        defaults={"save.model_as": "diffusers_safetensors"},
    ),
}  # fmt: skip
DEFAULT = "sdxl"  # of a configuration that names no family: kohya's command lines name none
TRAINED = tuple(name for name, row in FAMILIES.items() if row.trains)
UNTRAINED = tuple(name for name, row in FAMILIES.items() if not row.trains)
# families that are known and have no row yet, as [model] type of diffusion-pipe spells them
LATER = (
    "ltx-video", "hunyuan-video", "cosmos", "hidream", "cosmos_predict2", "omnigen2",
    "hunyuan_video_15", "ernie_image", "ltx2", "anima",
)  # fmt: skip


def make_family(cfg: Any) -> Family:
    """Make the family that a configuration (a TrainConfig) names. Raises ConfigFault for an unknown one."""
    row = FAMILIES.get(cfg.model.family)
    if row is None:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigFault([Fault("[model] family", f"there is no family {cfg.model.family!r}", f"one of: {known}")])
    module, _, attribute = row.target.partition(":")
    family: Family = getattr(importlib.import_module(module), attribute)(cfg)
    return family
