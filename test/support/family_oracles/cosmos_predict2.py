"""Cosmos-Predict2: CosmosTransformer3DModel, Cosmos2TextToImagePipeline and the original layout.

diffusers' forward resizes the mask of padding with torchvision, and its pipeline asks cosmos_guardrail about prompts and
pictures. Neither is installed here: what stands in for them resizes with torch, and lets everything pass.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.transformers import transformer_cosmos
from diffusers.pipelines.cosmos import pipeline_cosmos2_text2image
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle


def resize(mask: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
    return torch.nn.functional.interpolate(mask, size=size, mode=interpolation)


class SafetyChecker:
    def to(self, device: Any) -> SafetyChecker:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


transformer_cosmos.transforms = SimpleNamespace(
    functional=SimpleNamespace(resize=resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
)
pipeline_cosmos2_text2image.CosmosSafetyChecker = SafetyChecker


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    mask = torch.zeros(1, 1, 8 * x.shape[-2], 8 * x.shape[-1])
    return net(
        hidden_states=x, timestep=t / 1000, encoder_hidden_states=told["tokens"], padding_mask=mask, return_dict=False
    )[0]


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    return {"tokens": pipe.encode_prompt(captions, None, False, device="cpu", max_sequence_length=length)[0]}


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    """Name how a picture is drawn: the pipeline adds its scale times the difference to the prediction with text."""
    made = {"prompt": PROMPT, "guidance_scale": scale - 1, "max_sequence_length": 32}
    return made if negative is None else made | {"negative_prompt": NEGATIVE}


def raw(x: torch.Tensor, vae: Any) -> torch.Tensor:
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.latents_mean, vae.latents_std))
    return x * std + mean


SMALL = {"num_attention_heads": 16, "rope_scale": (1.0, 4.0, 4.0), "extra_pos_embed_type": None}
ORACLE = Oracle(
    forward,
    prompts,
    "convert_cosmos_transformer_checkpoint_to_diffusers",
    released={"2B": (SMALL, 567), "14B": (SMALL | {"num_attention_heads": 40, "num_layers": 36}, 727)},
    drawn=Drawn(options, unpack=lambda x, size_hw: x.unsqueeze(2), raw=raw, t5_length=32),
)
