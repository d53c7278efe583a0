"""What the tests know of a family beside its own facts: how diffusers runs it. A file a family lies in family_oracles/."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from difftrain.models.weights.folder_export import is_second_name

Conditions = dict[str, torch.Tensor]
PROMPT, NEGATIVE = 'a red cat beside a "sign"', "blurry"  # of drawn pictures


@dataclass(frozen=True)
class Drawn:
    """How a pipeline is called: options(our conditions, those of the negative or None, scale) -> what it takes beside sizes.

    pack, unpack: of its latents of so many pixels, (x, (height, width)). raw: what its pipeline gives the VAE to decode,
    (latents, the VAE's configuration). guidance: what a distilled model is told. t5_length: tokens that T5 keeps.
    references: images that it is shown, (1, 3, H, W) uint8 each. frames: of what is drawn. edits: classes
    that begin at a picture, without a mask and with one, where diffusers does not know them by the family's. mended: puts
    right what is wrong in a pipeline.
    scales: of classifier-free guidance, as far as the pipeline has it. returned: turns what the pipeline returns as latents
    into those that the denoiser takes. pixels: decodes these by the pipeline's parts, to -1..1, where the VAE's weights count.
    kinds: what it may be made with, as sections, that decides how pictures are drawn.
    """

    options: Callable[[Conditions, Conditions | None, float], dict[str, Any]]
    pack: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    unpack: Callable[[torch.Tensor, tuple[int, int]], torch.Tensor] = lambda x, size_hw: x
    raw: Callable[[torch.Tensor, Any], torch.Tensor] = lambda x, vae: x / vae.scaling_factor + (vae.shift_factor or 0.0)
    guidance: float | None = None
    t5_length: int | None = None
    edits: tuple[str, str] = ("AutoPipelineForImage2Image", "AutoPipelineForInpainting")
    mended: Callable[[Any], Any] = lambda pipe: pipe
    references: tuple[torch.Tensor, ...] = ()
    frames: int = 1
    kinds: tuple[Mapping[str, Any], ...] = ({},)
    scales: tuple[float, ...] = (1.0, 3.0)
    returned: Callable[[Any, torch.Tensor], torch.Tensor] = lambda pipe, x: x
    pixels: Callable[[Any, torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class Oracle:
    """How diffusers runs a family's denoiser, by its own forward, and what its pipeline makes of captions.

    forward: (net, x_t, t, conditions, guidance) -> velocity as x_t. prompts: (pipeline, captions, length) -> conditions,
    under our names; None where a tiny vocabulary cannot agree. converter: of diffusers.loaders.single_file_utils, from
    the original layout, or a function that does the same. whole: of a file of all parts, by part: (stored, module, prefix) -> weights as diffusers makes
    them. sizes: (pipeline, features of sizes) -> conditions that it makes of them. released: by name, sizes of the denoisers
    that it is held to, and how many tensors these have. drawn: how its pipeline is called, once it trains.
    pipeline: loads an export, where diffusers has no pipeline of the family. num_control: references that a sample has,
    of a model that also learns without. frames: of the clips of tests, of a family of clips. steps: the
    fewest that its pipeline can walk. frame_times: frames may have times of their own. sized: its pipeline is told a size.
    captions: of two pictures, where those of all say too little. by_depth: sizes of the denoiser that follow its number of
    blocks. text_length: tokens of a language model that tests keep, where another number gives other bits than diffusers' own, or takes long.
    shown: (pipeline, captions, length, features) -> conditions, in place of prompts, where its encoder sees references too.
    load: (class of the pipeline, folder, options) -> the pipeline, where it cannot be loaded as it is; small: what the call in an
    export's page needs for a picture of 64 x 64 px.
    """

    forward: Callable[..., torch.Tensor]
    prompts: Callable[[Any, list[str], int], Conditions] | None = None
    converter: str | Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = ""
    whole: Mapping[str, Callable[[Conditions, Any, str], Conditions]] = field(default_factory=dict)
    sizes: Callable[[Any, Conditions], Conditions] | None = None
    released: Mapping[str, tuple[Mapping[str, Any], int]] = field(default_factory=dict)
    drawn: Drawn | None = None
    captions: tuple[str, ...] = ()
    by_depth: Callable[[int], dict[str, Any]] = lambda blocks: {}
    text_length: int | None = None
    shown: Callable[[Any, list[str], int, Conditions], Conditions] | None = None
    load: Callable[..., Any] | None = None
    small: str = ""
    pipeline: Callable[[Path], Any] | None = None
    num_control: int | None = None
    frames: int = 5
    steps: int = 1
    frame_times: bool = True
    sized: bool = True


# ------------------------------------------------------------------ whole files, by diffusers' converters


def ldm(converter: str) -> Callable[[Conditions, Any, str], Conditions]:
    def convert(stored: Conditions, module: Any, prefix: str) -> Conditions:
        from diffusers.loaders import single_file_utils

        return getattr(single_file_utils, converter)(dict(stored), dict(module.config))

    return convert


def _kind(module: Any) -> str:
    return f"{type(module).__module__.partition('.')[0]}:{type(module).__name__}"


def of_prefix(converter: str) -> Callable[[Conditions, Any, str], Conditions]:
    def convert(stored: Conditions, module: Any, prefix: str) -> Conditions:
        from diffusers.loaders import single_file_utils

        inside = {key: value for key, value in stored.items() if key.startswith(prefix)}
        made = getattr(single_file_utils, converter)(inside)
        return {key: value for key, value in made.items() if not is_second_name(_kind(module), key)}

    return convert


def ldm_clip(stored: Conditions, module: Any, prefix: str) -> Conditions:
    from diffusers.loaders.single_file_utils import convert_ldm_clip_checkpoint

    return convert_ldm_clip_checkpoint(dict(stored), remove_prefix=prefix)


def open_clip(stored: Conditions, module: Any, prefix: str) -> Conditions:
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    return convert_open_clip_checkpoint(module, dict(stored), prefix=prefix)


def open_clip_of_24(stored: Conditions, module: Any, prefix: str) -> Conditions:
    """Leave out the layer that nothing reads, as diffusers does of the release by its number, 23."""
    unread = f"{prefix}transformer.resblocks.{module.config.num_hidden_layers}."
    assert any(key.startswith(unread) for key in stored)
    return open_clip({key: value for key, value in stored.items() if not key.startswith(unread)}, module, prefix)
