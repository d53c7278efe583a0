"""Cosmos 1: CosmosTransformer3DModel, CosmosTextToWorldPipeline and the original layout; see cosmos_predict2 for the stand-ins."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.loaders.single_file_utils import convert_cosmos_transformer_checkpoint_to_diffusers
from diffusers.pipelines.cosmos import pipeline_cosmos_text2world
from family_oracles.cosmos_predict2 import SafetyChecker, options, prompts
from oracle import Conditions, Drawn, Oracle

from difftrain.models.objective.flow import Preconditioning

pipeline_cosmos_text2world.CosmosSafetyChecker = SafetyChecker
AROUND = Preconditioning(0.5)  # test/contracts/test_preconditioning.py holds it to the paper


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    t = t / 1000
    output = net(
        hidden_states=AROUND.entering(x, t),
        timestep=AROUND.level(t),
        encoder_hidden_states=told["tokens"],
        fps=30,
        padding_mask=torch.zeros(1, 1, 8 * x.shape[-2], 8 * x.shape[-1]),
        return_dict=False,
    )[0]
    return AROUND.velocity(x, t, output)


def one_frame(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    return options(ours, negative, scale) | {"num_frames": 1}


def raw(x: torch.Tensor, vae: Any) -> torch.Tensor:
    mean, std = (torch.tensor(each).view(1, 16, -1, 1, 1)[:, :, :1] for each in (vae.latents_mean, vae.latents_std))
    return x * std / 0.5 + mean


class Kept(dict):
    """A file from which nothing can be taken: diffusers empties it before it looks for the keys that tell the release."""

    def pop(self, key: str) -> torch.Tensor:
        return self[key]


def converted(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return convert_cosmos_transformer_checkpoint_to_diffusers(
        Kept({f"net.{key}": value for key, value in weights.items()})
    )


LARGE = {"num_attention_heads": 40, "num_layers": 36, "rope_scale": (2.0, 2.0, 2.0)}
ORACLE = Oracle(
    forward,
    prompts,
    converted,
    released={"7B": ({}, 570), "14B": (LARGE, 730)},
    drawn=Drawn(one_frame, raw=raw, t5_length=32),
    frames=9,
    frame_times=False,
)
