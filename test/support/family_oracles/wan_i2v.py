"""Wan 2.1 from images: WanTransformer3DModel beside frames that are shown, WanImageToVideoPipeline, the original layout."""

from __future__ import annotations

from typing import Any

import torch
from family_oracles.wan import raw
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle
from PIL import Image

FRAMES = 5


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    """Call it as the pipeline does, with 512 rows of text and an image's rows apart."""
    tokens, seen = told["tokens"], told["frame_states"]
    tokens = torch.cat((tokens, tokens.new_zeros(len(tokens), 512 - tokens.shape[1], tokens.shape[2])), dim=1)
    rows = seen.shape[1] // (1 if net.config.pos_embed_seq_len is None else 2)
    return net(
        hidden_states=torch.cat([x, told["frames"]], dim=1),
        timestep=t,
        encoder_hidden_states=tokens,
        encoder_hidden_states_image=seen.reshape(-1, rows, seen.shape[2]),
        return_dict=False,
    )[0]


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    return {"tokens": pipe.encode_prompt(captions, None, False, max_sequence_length=length, device="cpu")[0]}


def reference(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (1, 3, 64, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def image_of(pixels: torch.Tensor) -> Image.Image:
    return Image.fromarray(pixels[0].permute(1, 2, 0).numpy())


FIRST, LAST = reference(1), reference(2)


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    """Name how a clip is drawn from its first frame."""
    made = {
        "prompt": PROMPT, "guidance_scale": scale, "max_sequence_length": 512, "num_frames": FRAMES, "image": image_of(FIRST),
    }  # fmt: skip
    return made if negative is None else made | {"negative_prompt": NEGATIVE}


I2V = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
ORACLE = Oracle(
    forward,
    prompts,
    "convert_wan_transformer_to_diffusers",
    released={"14B": (I2V, 1303)},
    drawn=Drawn(options, raw=raw, t5_length=512, references=(FIRST,), frames=FRAMES),
)
