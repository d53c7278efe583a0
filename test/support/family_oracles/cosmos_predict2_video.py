"""Cosmos-Predict2 from a first frame: CosmosTransformer3DModel beside a mask, Cosmos2VideoToWorldPipeline."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.pipelines.cosmos import pipeline_cosmos2_video2world
from family_oracles.cosmos_predict2 import ORACLE as PICTURES
from family_oracles.cosmos_predict2 import SMALL, SafetyChecker, prompts, raw
from family_oracles.wan_i2v import FIRST, FRAMES, image_of
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle

pipeline_cosmos2_video2world.CosmosSafetyChecker = SafetyChecker


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    """Call it as the pipeline does; of the given frame the velocity is that from it to the noisy one."""
    latents, mask = told["frames"][:, -x.shape[1] :], torch.zeros_like(x[:, :1])
    mask[:, :, 0] = 1
    seconds = t.view(-1, 1, 1, 1, 1) / 1000
    times = torch.where(mask[:, :, :, :1, :1] > 0, torch.tensor(1e-4 / (1e-4 + 1)), seconds)
    out = net(
        hidden_states=torch.where(mask > 0, latents, x),
        timestep=times,
        encoder_hidden_states=told["tokens"],
        fps=16,
        condition_mask=mask,
        padding_mask=torch.zeros(1, 1, 8 * x.shape[-2], 8 * x.shape[-1]),
        return_dict=False,
    )[0]
    return torch.where(mask > 0, (x - latents) / seconds, out)


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    """Name how a clip is drawn from its first frame: the pipeline adds its scale times the difference."""
    made = {
        "prompt": PROMPT, "guidance_scale": scale - 1, "max_sequence_length": 32, "num_frames": FRAMES, "image": image_of(FIRST),
    }  # fmt: skip
    return made if negative is None else made | {"negative_prompt": NEGATIVE}


def by_mean(pipe: Any) -> Any:
    """Let the first frame be the posterior's mean, as it is in training, where the pipeline draws from it."""
    encode = pipe.vae.encode

    def of_mean(x: torch.Tensor) -> Any:
        made = encode(x)
        made.latent_dist.sample = lambda generator=None: made.latent_dist.mode()
        return made

    pipe.vae.encode = of_mean
    return pipe


LARGE = SMALL | {
    "in_channels": 17, "num_attention_heads": 40, "num_layers": 36, "rope_scale": (20 / 24, 2.0, 2.0),
}  # fmt: skip
ORACLE = Oracle(
    forward,
    prompts,
    PICTURES.converter,
    released={
        "2B": (SMALL | {"in_channels": 17, "rope_scale": (1.0, 3.0, 3.0)}, 567),
        "14B": (LARGE, 727),
    },
    drawn=Drawn(options, raw=raw, t5_length=32, references=(FIRST,), frames=FRAMES, mended=by_mean),
    frame_times=False,
    steps=2,
)
