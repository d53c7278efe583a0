"""SD3 in one file as its release, ComfyUI and A1111 lay it out: names of tensors, and what the names and shapes tell.

Such a file says how many joint blocks there are by its keys, so that any depth of the transformer is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from difftrain.models.facts import OneFile
from difftrain.models.weights.infer import count

HEAD_DIM = 64  # of every release without norms of queries and keys, whose shape tells it elsewhere
SAMPLE_SIZE = 128  # latent pixels of every release
SHIFT = 3.0  # what readers shift the times of every such file by: it has no place to say another
_CLIP_L, _CLIP_G, _T5 = (f"text_encoders.{name}.transformer." for name in ("clip_l", "clip_g", "t5xxl"))
CLIP_L_PROJECTION = f"{_CLIP_L}text_projection.weight"
# T5's table of words under its second name: diffusers fills that name from the file, and does not tie the two
COPIES = MappingProxyType({f"{_T5}encoder.embed_tokens.weight": f"{_T5}shared.weight"})

ONE_FILE = OneFile(
    prefixes=MappingProxyType({
        "transformer": "model.diffusion_model.",
        "vae": "first_stage_model.",
        "text_encoder_1": _CLIP_L,
        "text_encoder_2": _CLIP_G,
        "text_encoder_3": _T5,
    }),
    released="medium",
    others=("medium35", "large35"),
    layout="SD3's original layout has model.diffusion_model.joint_blocks., first_stage_model. and text_encoders.clip_l, "
    "clip_g and t5xxl",
    ignored=r"^(text_encoders\.\w+\.(logit_scale|transformer\.(logit_scale|scaled_fp8|text_model\.embeddings\.position_ids"
    r"|encoder\.embed_tokens\.weight))|model_ema\..*|model_sampling\..*)$",
    optional=("text_encoder_1", "text_encoder_2", "text_encoder_3"),
    identity=(CLIP_L_PROJECTION,),  # the release reads CLIP-L's vector as it is, and has no matrix for it
    shift=SHIFT,
)  # fmt: skip

_KEYS = """
pos_embed.pos_embed = pos_embed
pos_embed.proj = x_embedder.proj
context_embedder = context_embedder
time_text_embed.timestep_embedder.linear_1 = t_embedder.mlp.0
time_text_embed.timestep_embedder.linear_2 = t_embedder.mlp.2
time_text_embed.text_embedder.linear_1 = y_embedder.mlp.0
time_text_embed.text_embedder.linear_2 = y_embedder.mlp.2
norm_out.linear = final_layer.adaLN_modulation.1 halves
proj_out = final_layer.linear
transformer_blocks.{}.norm1.linear = joint_blocks.{}.x_block.adaLN_modulation.1
transformer_blocks.{}.norm1_context.linear = joint_blocks.{}.context_block.adaLN_modulation.1
transformer_blocks.{}.attn.to_q + transformer_blocks.{}.attn.to_k + transformer_blocks.{}.attn.to_v = joint_blocks.{}.x_block.attn.qkv
transformer_blocks.{}.attn.add_q_proj + transformer_blocks.{}.attn.add_k_proj + transformer_blocks.{}.attn.add_v_proj = joint_blocks.{}.context_block.attn.qkv
transformer_blocks.{}.attn.norm_q = joint_blocks.{}.x_block.attn.ln_q
transformer_blocks.{}.attn.norm_k = joint_blocks.{}.x_block.attn.ln_k
transformer_blocks.{}.attn.norm_added_q = joint_blocks.{}.context_block.attn.ln_q
transformer_blocks.{}.attn.norm_added_k = joint_blocks.{}.context_block.attn.ln_k
transformer_blocks.{}.attn.to_out.0 = joint_blocks.{}.x_block.attn.proj
transformer_blocks.{}.attn.to_add_out = joint_blocks.{}.context_block.attn.proj
transformer_blocks.{}.attn2.to_q + transformer_blocks.{}.attn2.to_k + transformer_blocks.{}.attn2.to_v = joint_blocks.{}.x_block.attn2.qkv
transformer_blocks.{}.attn2.norm_q = joint_blocks.{}.x_block.attn2.ln_q
transformer_blocks.{}.attn2.norm_k = joint_blocks.{}.x_block.attn2.ln_k
transformer_blocks.{}.attn2.to_out.0 = joint_blocks.{}.x_block.attn2.proj
transformer_blocks.{}.ff.net.0.proj = joint_blocks.{}.x_block.mlp.fc1
transformer_blocks.{}.ff.net.2 = joint_blocks.{}.x_block.mlp.fc2
transformer_blocks.{}.ff_context.net.0.proj = joint_blocks.{}.context_block.mlp.fc1
transformer_blocks.{}.ff_context.net.2 = joint_blocks.{}.context_block.mlp.fc2
"""


def keys(num_layers: int) -> str:
    """Return the table of a transformer of this depth: the last block's text norm ends there, scale before shift."""
    last = num_layers - 1
    block = f"joint_blocks.{last}.context_block.adaLN_modulation.1"
    return f"{_KEYS}transformer_blocks.{last}.norm1_context.linear = {block} halves\n"


def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Read the transformer's sizes off its tensors, without the prefix of a whole model. Raises KeyError."""
    width, channels, patch, _ = shapes["x_embedder.proj.weight"]
    norm = "joint_blocks.0.x_block.attn.ln_q.weight"
    head = shapes[norm][0] if norm in shapes else HEAD_DIM
    depth = count(shapes, r"joint_blocks\.(\d+)\.")
    side = math.isqrt(shapes["pos_embed"][1])
    sizes = {
        "sample_size": min(SAMPLE_SIZE, patch * side),
        "patch_size": patch,
        "in_channels": channels,
        "out_channels": shapes["final_layer.linear.weight"][0] // patch**2,
        "num_layers": depth,
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "caption_projection_dim": shapes["context_embedder.weight"][0],
        "pooled_projection_dim": shapes["y_embedder.mlp.0.weight"][1],
        "pos_embed_max_size": side,
    }
    # what releases after the first have more
    dual = [block for block in range(depth) if f"joint_blocks.{block}.x_block.attn2.qkv.weight" in shapes]
    return (
        sizes | ({"dual_attention_layers": dual} if dual else {}) | ({"qk_norm": "rms_norm"} if norm in shapes else {})
    )
