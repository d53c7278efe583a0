"""Whether the parts of a Stable Diffusion 3 model fit one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from difftrain.contracts import Fault
from difftrain.models.parts.clip_vocabulary import LENGTH


def mismatches(parts: Mapping[str, Mapping[str, Any]], where: str) -> list[Fault]:
    """Say where two parts do not fit together, or a part not into itself: everything at once."""
    faults = [
        Fault(f"{where} {key}", f"is {value}, must be {right}", why)
        for key, value, right, why in _equal(parts)
        if value != right
    ]
    return faults + [Fault(f"{where} {key}", text, why) for key, wrong, text, why in _bounds(parts) if wrong]


def _equal(parts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, int, int, str]]:
    model, vae, first, second, third = parts.values()
    width = model["num_attention_heads"] * model["attention_head_dim"]
    latents, pooled = vae["latent_channels"], first["projection_dim"] + second["projection_dim"]
    return [
        ("[transformer] joint_attention_dim", model["joint_attention_dim"], third["d_model"],
         "text_encoder_3's d_model: its states stand beside those of CLIP"),
        ("[transformer] pooled_projection_dim", model["pooled_projection_dim"], pooled,
         "the CLIP encoders' projection_dim together"),
        ("[transformer] caption_projection_dim", model["caption_projection_dim"], width,
         "num_attention_heads x attention_head_dim"),
        ("[transformer] in_channels", model["in_channels"], latents, "the VAE's latent_channels"),
        ("[transformer] out_channels", model["out_channels"], latents, "the VAE's latent_channels"),
        ("[text_encoder_2] max_position_embeddings", second.get("max_position_embeddings", LENGTH),
         first.get("max_position_embeddings", LENGTH), "text_encoder's: their states stand side by side"),
    ]  # fmt: skip


def _bounds(parts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, bool, str, str]]:
    model, vae, first, second, _ = parts.values()
    width = model["num_attention_heads"] * model["attention_head_dim"]
    clip = first["hidden_size"] + second["hidden_size"]
    grid = model["sample_size"] // model["patch_size"]
    dual = [i for i in model.get("dual_attention_layers") or () if not 0 <= i < model["num_layers"]]
    return [
        ("[text_encoder] hidden_size", clip > model["joint_attention_dim"],
         f"is {first['hidden_size']}, with text_encoder_2's {clip}: more than joint_attention_dim "
         f"{model['joint_attention_dim']}", "both CLIP states stand side by side in one token, filled up with zeros"),
        ("[transformer] attention_head_dim", width % 4 != 0,
         f"makes a width of {width}", "positions need a multiple of 4"),
        ("[transformer] pos_embed_max_size", grid > model["pos_embed_max_size"],
         f"is {model['pos_embed_max_size']}, sample_size / patch_size is {grid}",
         "positions must reach over a picture of sample_size"),
        ("[transformer] sample_size", model["sample_size"] % model["patch_size"] != 0,
         f"is {model['sample_size']}", f"a multiple of patch_size {model['patch_size']}"),
        ("[transformer] dual_attention_layers", bool(dual), f"names block {dual}, of {model['num_layers']}",
         "blocks are counted from 0"),
        ("[vae] latents_mean", vae.get("latents_mean") is not None, "is not SD3's",
         "its latents are shifted by shift_factor and scaled by scaling_factor"),
        ("[text_encoder] max_position_embeddings", first.get("max_position_embeddings", LENGTH) < 3,
         f"is {first.get('max_position_embeddings')}", "a sequence has two marks and at least one token between them"),
        *((f"[{key}] hidden_size", size["hidden_size"] % size["num_attention_heads"] != 0, f"is {size['hidden_size']}",
           f"a multiple of num_attention_heads {size['num_attention_heads']}")
          for key, size in (("text_encoder", first), ("text_encoder_2", second))),
    ]  # fmt: skip
