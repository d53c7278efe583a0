"""HiDream-I1: HiDreamImageTransformer2DModel, HiDreamImagePipeline and single files, whose names are diffusers' own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from oracle import NEGATIVE, PROMPT, Conditions, Drawn, Oracle

from difftrain.device import patches


@contextlib.contextmanager
def own_experts(net: Any) -> Iterator[None]:
    """Let experts run as diffusers has them: in evaluation without gradients, so that where there are some they train.

    The network itself evaluates: in training it returns no picture.
    """
    experts = [module for module in net.modules() if type(module).__name__ in ("MOEFeedForwardSwiGLU", "MoEGate")]
    before, net.training = net.training, False
    for module in experts:
        module.training = torch.is_grad_enabled()
    try:
        with patches.without("routed_experts"):
            yield
    finally:
        for module in (net, *experts):
            module.training = before


def forward(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    layers = sorted({*net.config.llama_layers})
    states = told["states"].unflatten(-1, (len(layers), -1)).movedim(2, 0)
    with own_experts(net):
        out = net(
            hidden_states=x,
            timesteps=t,
            encoder_hidden_states_t5=told["tokens"],
            encoder_hidden_states_llama3={layer: states[place] for place, layer in enumerate(layers)},
            pooled_embeds=told["pooled"],
            return_dict=False,
        )[0]
    return -out


def prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    """Ask each encoder as the pipeline does, which reads as far with one as with another; tests keep less of T5."""
    from families import T5_LENGTH

    pooled = [
        pipe._get_clip_prompt_embeds(tokenizer, encoder, captions, 128, "cpu")
        for tokenizer, encoder in ((pipe.tokenizer, pipe.text_encoder), (pipe.tokenizer_2, pipe.text_encoder_2))
    ]
    states = pipe._get_llama3_prompt_embeds(captions, length, "cpu")
    layers = sorted({*pipe.transformer.config.llama_layers})
    return {
        "tokens": pipe._get_t5_prompt_embeds(captions, T5_LENGTH, "cpu"),
        "states": torch.cat([states[layer] for layer in layers], dim=-1),
        "pooled": torch.cat(pooled, dim=-1),
    }


def options(ours: Conditions, negative: Conditions | None, scale: float) -> dict[str, Any]:
    made = {"prompt": PROMPT, "guidance_scale": scale}
    return made if negative is None else made | {"negative_prompt": NEGATIVE}


def of_any_size(pipe: Any) -> Any:
    """Have the pipeline draw what it is asked for, which it brings to the area of 1024 x 1024."""

    class Asked(type(pipe)):  # type: ignore[misc]
        def __call__(self, *args: Any, height: int, width: int, **more: Any) -> Any:
            # a little more than the side, since what it makes of both sides is rounded down
            self.default_sample_size = math.sqrt(height * width) / self.vae_scale_factor * (1 + 1e-9)
            return super().__call__(*args, height=height, width=width, **more)

    pipe.__class__ = Asked
    return pipe


# HiDream-I1-Full, Dev and Fast
RELEASED = {
    "patch_size": 2, "in_channels": 16, "out_channels": 16, "caption_channels": [4096, 4096],
    "axes_dims_rope": (64, 32, 32), "llama_layers": [min(number, 31) for number in range(48)],
}  # fmt: skip
ORACLE = Oracle(
    forward,
    prompts,
    "convert_hidream_transformer_to_diffusers",
    released={"i1": (RELEASED, 1615)},
    by_depth=lambda blocks: {"llama_layers": [number % 4 for number in range(blocks)]},
    drawn=Drawn(options, t5_length=128, mended=of_any_size),
)
