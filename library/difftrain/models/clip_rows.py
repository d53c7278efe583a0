"""The rows of families that make clips: as those of registry.py, which takes them in."""

from __future__ import annotations

from difftrain.contracts import ClipFacts
from difftrain.models.row import FamilyRow, flow_row

CLIP_FAMILIES: dict[str, FamilyRow] = {
    "wan": flow_row(
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
        tasks=("text-to-video", "text-to-image"),
        clips=ClipFacts(fps=16, every=4),
        takes=("model.train_only",),
        defaults={"model.t5_max_length": 512},
    ),
    "wan_i2v": flow_row(
        title="Wan 2.1 image to video",
        network="Wan2.1-I2V",
        target="difftrain.models.families.wan_i2v:WanI2V",
        pipeline="WanImageToVideoPipeline",
        told_by=("transformer.pos_embed_seq_len", False),
        parts={
            "transformer": "diffusers:WanTransformer3DModel",
            "vae": "diffusers:AutoencoderKLWan",
            "text_encoder": "transformers:UMT5EncoderModel",
            "image_encoder": "transformers:CLIPVisionModel",
        },
        encoders=("umt5",),
        tasks=("image-to-video",),
        shown_frames=1,
        clips=ClipFacts(fps=16, every=4),
        takes=("model.train_only",),
        defaults={"model.t5_max_length": 512},
    ),
    "wan_flf2v": flow_row(
        title="Wan 2.1 first and last frame to video",
        network="Wan2.1-FLF2V",
        target="difftrain.models.families.wan_flf2v:WanFLF2V",
        pipeline="WanImageToVideoPipeline",
        told_by=("transformer.pos_embed_seq_len", True),
        parts={
            "transformer": "diffusers:WanTransformer3DModel",
            "vae": "diffusers:AutoencoderKLWan",
            "text_encoder": "transformers:UMT5EncoderModel",
            "image_encoder": "transformers:CLIPVisionModel",
        },
        encoders=("umt5",),
        tasks=("image-to-video",),
        shown_frames=2,
        clips=ClipFacts(fps=16, every=4),
        takes=("model.train_only",),
        defaults={"model.t5_max_length": 512},
    ),
    "hunyuan_video": flow_row(
        title="HunyuanVideo",
        network="HunyuanVideo",
        target="difftrain.models.families.hunyuan_video:HunyuanVideo",
        pipeline="HunyuanVideoPipeline",
        parts={
            "transformer": "diffusers:HunyuanVideoTransformer3DModel",
            "vae": "diffusers:AutoencoderKLHunyuanVideo",
            "text_encoder": "transformers:LlamaModel",
            "text_encoder_2": "transformers:CLIPTextModel",
        },
        encoders=("llm", "clip_l"),
        tasks=("text-to-video", "text-to-image"),
        text_features=("hidden_1", "pooled_2"),
        clips=ClipFacts(fps=24, every=4),
        takes=("model.guidance", "model.train_only"),
        reasons={
            "model.clip_skip": "hunyuan_video takes the pooled output of CLIP",
            "model.max_token_length": "hunyuan_video's CLIP encoder reads 77 tokens",
        },
    ),
    "ltx_video": flow_row(
        title="LTX-Video",
        network="LTX-Video",
        target="difftrain.models.families.ltx_video:LtxVideo",
        pipeline="LTXPipeline",
        parts={
            "transformer": "diffusers:LTXVideoTransformer3DModel",
            "vae": "diffusers:AutoencoderKLLTXVideo",
            "text_encoder": "transformers:T5EncoderModel",
        },
        encoders=("t5",),
        tasks=("text-to-video", "image-to-video", "text-to-image"),
        clips=ClipFacts(fps=25, every=8),
        multiple=32,
        takes=("model.train_only", "model.first_frame_conditioning_p"),
        defaults={"model.t5_max_length": 128},
    ),
}  # fmt: skip
