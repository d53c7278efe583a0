"""Which families there are: one row each, from which configuration, help, docs and the commands are derived.

row.py says what a row holds. This file imports nothing but contracts, that and the standard library, so that configuration,
which lies below the models, may read it.
"""

from __future__ import annotations

import importlib
from typing import Any

from difftrain.contracts import ConfigFault, Family, Fault
from difftrain.models.clip_rows import CLIP_FAMILIES
from difftrain.models.row import (
    CONTROL_FIELDS,
    FOLDER_LAYOUTS,
    KONTEXT_SIZES,
    MILLION,
    ONE_ENCODER,
    ROUTED_FIELDS,
    UNET_FIELDS,
    FamilyRow,
    flow_row,
)

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
        takes=frozenset({
            *UNET_FIELDS, "model.tokenizer2", "optimizer.learning_rate_te2", "optimizer.block_lr",
        }),
    ),
    "sd1": FamilyRow(
        title="Stable Diffusion 1",
        network="StableDiffusion1",
        target="difftrain.models.families.sd1:SD1",
        pipeline="StableDiffusionPipeline",
        told_by=(("unet.use_linear_projection", False),),
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
        takes=frozenset(UNET_FIELDS),
        reasons=ONE_ENCODER,
    ),
    "sd2": FamilyRow(
        title="Stable Diffusion 2",
        network="StableDiffusion2",
        target="difftrain.models.families.sd2:SD2",
        pipeline="StableDiffusionPipeline",
        told_by=(("unet.use_linear_projection", True),),
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
        takes=frozenset(UNET_FIELDS),
        reasons=ONE_ENCODER,
        defaults={"model.prediction_type": "v_prediction"},
    ),
    "sd3": flow_row(
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
        takes=(
            *ROUTED_FIELDS, "model.train_type", "model.num_layers", "model.t5_attention_mask",
            "model.enable_uncond_text_dropout", "model.uncond_text_dropout_prob", "loss.text_recon_gamma",
            "loss.text_recon_target_layer",
        ),
        reasons={
            "model.clip_skip": "sd3 reads hidden_states[-2] of CLIP",
            "model.max_token_length": "sd3's CLIP encoders read 77 tokens",
        },
    ),
    "flux": flow_row(
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
        takes=("model.guidance", "model.train_only"),
        reasons={
            "model.clip_skip": "flux takes the pooled output of CLIP",
            "model.max_token_length": "flux's CLIP encoder reads 77 tokens",
        },
        defaults={"model.t5_max_length": 512},
    ),
    "flux2": flow_row(
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
        takes=("model.guidance", "model.train_only"),
        reasons={"model.clip_skip": "flux2 reads three states of its language model"},
    ),
    "flux2_klein": flow_row(
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
        takes=("model.train_only",),
        reasons={"model.clip_skip": "flux2_klein reads three states of its language model"},
    ),
    "chroma": flow_row(
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
        takes=("model.train_only",),
        defaults={"model.t5_max_length": 512},
    ),
    "flux_kontext": flow_row(
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
        control=3,
        control_area=KONTEXT_SIZES,
        takes=("model.guidance", "model.train_only", "data.control_size", *CONTROL_FIELDS),
        reasons={
            "model.clip_skip": "flux_kontext takes the pooled output of CLIP",
            "model.max_token_length": "flux_kontext's CLIP encoder reads 77 tokens",
        },
        defaults={"model.t5_max_length": 512, "data.num_control": 1},
    ),
    "hunyuan_image": flow_row(
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
        layouts=FOLDER_LAYOUTS,
        takes=("model.guidance", "model.train_only"),
        reasons={"model.clip_skip": "hunyuan_image reads one state of Qwen2.5-VL"},
    ),
    "qwen_image": flow_row(
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
        takes=("model.train_only",),
        reasons={"model.clip_skip": "qwen_image reads the last hidden states of Qwen2.5-VL"},
    ),
    "qwen_image_edit": flow_row(
        title="Qwen-Image-Edit",
        network="Qwen-Image-Edit",
        target="difftrain.models.families.qwen_image_edit:QwenImageEdit",
        pipeline="QwenImageEditPipeline",
        parts={
            "transformer": "diffusers:QwenImageTransformer2DModel",
            "vae": "diffusers:AutoencoderKLQwenImage",
            "text_encoder": "transformers:Qwen2_5_VLForConditionalGeneration",
        },
        encoders=("llm",),
        tasks=("image-to-image",),
        control=1,
        control_area=MILLION,
        takes=("model.train_only", "data.control_size", *CONTROL_FIELDS),
        sizes=("tiny", "demo"),
        sizes_multiple={"demo": 8},
        reasons={"model.clip_skip": "qwen_image_edit reads the last hidden states of Qwen2.5-VL"},
        defaults={"data.num_control": 1},
    ),
    "qwen_image_edit_plus": flow_row(
        title="Qwen-Image-Edit-2509",
        network="Qwen-Image-Edit-2509",
        target="difftrain.models.families.qwen_image_edit_plus:QwenImageEditPlus",
        pipeline="QwenImageEditPlusPipeline",
        parts={
            "transformer": "diffusers:QwenImageTransformer2DModel",
            "vae": "diffusers:AutoencoderKLQwenImage",
            "text_encoder": "transformers:Qwen2_5_VLForConditionalGeneration",
        },
        encoders=("llm",),
        tasks=("image-to-image",),
        control=3,
        control_area=MILLION,
        takes=("model.train_only", "data.control_size", *CONTROL_FIELDS),
        reasons={"model.clip_skip": "qwen_image_edit_plus reads the last hidden states of Qwen2.5-VL"},
        defaults={"data.num_control": 1},
    ),
    "z_image": flow_row(
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
        takes=("model.train_only",),
        reasons={"model.clip_skip": "z_image reads the hidden states before the last layer of Qwen3"},
    ),
    "auraflow": flow_row(
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
        takes=(*ROUTED_FIELDS, "model.train_only"),
        defaults={"model.t5_max_length": 256},
    ),
    "lumina_2": flow_row(
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
        takes=("model.train_only",),
    ),
    "hidream": flow_row(
        title="HiDream-I1",
        network="HiDream-I1",
        target="difftrain.models.families.hidream:HiDream",
        pipeline="HiDreamImagePipeline",
        parts={
            "transformer": "diffusers:HiDreamImageTransformer2DModel",
            "vae": "diffusers:AutoencoderKL",
            "text_encoder": "transformers:CLIPTextModelWithProjection",
            "text_encoder_2": "transformers:CLIPTextModelWithProjection",
            "text_encoder_3": "transformers:T5EncoderModel",
            "text_encoder_4": "transformers:LlamaForCausalLM",
        },
        encoders=("clip_l", "clip_g", "t5", "llm"),
        text_features=("pooled_1", "pooled_2", "hidden_3", "hidden_4"),
        takes=("model.train_only",),
        reasons={
            "model.clip_skip": "hidream takes the pooled outputs of CLIP",
            "model.max_token_length": "hidream's CLIP encoders read 128 tokens",
        },
        defaults={"model.t5_max_length": 128},
    ),
    "cosmos_predict2": flow_row(
        title="Cosmos-Predict2",
        network="Cosmos-Predict2",
        target="difftrain.models.families.cosmos_predict2:CosmosPredict2",
        pipeline="Cosmos2TextToImagePipeline",
        parts={
            "transformer": "diffusers:CosmosTransformer3DModel",
            "vae": "diffusers:AutoencoderKLWan",
            "text_encoder": "transformers:T5EncoderModel",
        },
        encoders=("t5",),
        takes=("model.train_only",),
        defaults={"model.t5_max_length": 512},
    ),
    "omnigen2": flow_row(
        title="OmniGen2",
        network="OmniGen2",
        target="difftrain.models.families.omnigen2:OmniGen2",
        pipeline="OmniGen2Pipeline",
        pipeline_module="omnigen2.pipelines.omnigen2.pipeline_omnigen2",
        parts={
            "transformer": "difftrain.models.networks.omnigen2:OmniGen2Transformer2DModel",
            "vae": "diffusers:AutoencoderKL",
            "text_encoder": "transformers:Qwen2_5_VLForConditionalGeneration",
        },
        encoders=("llm",),
        tasks=("text-to-image", "image-to-image"),
        control=3,
        control_least=0,
        takes=("model.train_only", *CONTROL_FIELDS),
        reasons={
            "model.clip_skip": "omnigen2 reads the last hidden states of Qwen2.5-VL",
            "data.control_size": "omnigen2's pass refines references of its image's size",
        },
    ),
    **CLIP_FAMILIES,
}  # fmt: skip
DEFAULT = "sdxl"  # of a configuration that names no family: kohya's command lines name none
# [model] type as diffusion-pipe spells it, where that is another
ALSO = {"ltx-video": "ltx_video", "hunyuan-video": "hunyuan_video"}
# families that are known and have no row yet, as [model] type of diffusion-pipe spells them
LATER = (
    "ernie_image", "ltx2", "anima",
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
