"""Families that stand on the kit, a tiny one of each with a batch, and diffusers' own way of saying what they say."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from difftrain.config import TrainConfig
from difftrain.contracts import Batch, Bucket, Draw, Inputs, Parts
from difftrain.data.samples import host_draws
from difftrain.models import passes
from difftrain.models.family import ModelFamily
from difftrain.models.registry import FAMILIES, make_family
from difftrain.models.weights.folder_export import is_second_name

# rows whose class is not built from facts yet; a test fails where this is no longer so
NOT_ON_THE_KIT: set[str] = set()
T5_LENGTH = 16
CAPTIONS = ("a red cat on a table", "two dogs")
Conditions = dict[str, torch.Tensor]


def class_of(name: str) -> type | None:
    """Import the class of a family; None where there is none yet."""
    module, _, attribute = FAMILIES[name].target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("difftrain."):
            return None
        raise


ON_KIT = tuple(name for name in FAMILIES if (made := class_of(name)) is not None and issubclass(made, ModelFamily))


# ------------------------------------------------------------------ a tiny one


@dataclass
class Tiny:
    """A family of the size tiny with its modules, and two captioned pictures (or clips) of an odd shape."""

    family: ModelFamily
    parts: Parts
    batch: Batch

    @property
    def net(self) -> Any:
        """Return the denoiser."""
        return self.parts.root.get_submodule(self.family.denoiser)

    def inputs(self) -> Inputs:
        """Encode and noise the batch anew."""
        return self.family.inputs(self.batch, self.parts)

    def loss(self, inputs: Inputs | None = None) -> torch.Tensor:
        """Run a step as far as its loss, of the whole batch."""
        inputs = inputs or self.inputs()
        return self.family.loss_sums(self.family.forward(self.parts.root, inputs), inputs)["loss"]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what root holds, by plain names."""
        return dict(self.parts.root.state_dict())


def config(name: str, sections: Mapping[str, Any] | None = None, **model: Any) -> TrainConfig:
    """Return a configuration of the tiny size, with fields of [model] by keyword and other sections as tables."""
    if "pretrained" not in model:
        model = {"init_from_config": "tiny"} | model
    if "model.t5_max_length" in FAMILIES[name].takes:
        model = {"t5_max_length": T5_LENGTH} | model
    base = {"training": {"seed": 1}, "optimizer": {"learning_rate": 1e-3}}
    given = {"model": {"family": name} | model, **base}
    for section, table in (sections or {}).items():
        given[section] = {**given.get(section, {}), **table}
    return TrainConfig.model_validate(given)


def bucket_of(name: str) -> Bucket:
    """Return a shape that is neither square nor a power of two; of families of clips five frames."""
    frames = 5 if any("video" in task for task in FAMILIES[name].tasks) else 1
    multiple = FAMILIES[name].multiple
    return Bucket(2 * max(32, multiple), 3 * max(32, multiple), frames)


def batch_of(
    family: ModelFamily, bucket: Bucket, captions: tuple[str, ...] = CAPTIONS, *, seed: int = 0, parts: Any = None
) -> Batch:
    """Make a batch of noise pictures with these captions, and the draws that a loader makes for them."""
    generator, count = torch.Generator().manual_seed(seed), len(captions)
    frames = (bucket.frames,) if bucket.frames > 1 else ()
    shape = (count, 3, *frames, bucket.height, bucket.width)
    features = {"pixels": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)}
    features |= family.tokenizer(parts)(list(captions))
    for place, (name, value) in enumerate(family.size_features((bucket.height, bucket.width), count).items()):
        features[name] = value + 8 * place + torch.arange(count)[:, None]  # no two are alike, so that none is mistaken
    uses = [Draw(i, i.to_bytes(16, "little"), seed) for i in range(count)]
    draws = {name: host_draws(name, spec, bucket, uses, 0) for name, spec in family.features.draws.items()}
    ids = torch.arange(count)
    return Batch(bucket, ids, torch.zeros_like(ids), features, draws, keys=tuple(use.key for use in uses), step=0)


def made(cfg: TrainConfig) -> ModelFamily:
    """Make a family, which is one of the kit."""
    family = make_family(cfg)
    assert isinstance(family, ModelFamily)
    return family


def loaded(cfg: TrainConfig) -> Tiny:
    """Load a family and make a batch for it."""
    family = made(cfg)
    parts = family.load()
    return Tiny(family, parts, batch_of(family, bucket_of(family.name), parts=parts))


def trained_once(tiny: Tiny) -> Tiny:
    """Make weights that are zeros in a fresh model into others, so that nothing of it is silent."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for each in tiny.parts.root.parameters():
            if not each.any():
                each.copy_(0.05 * torch.randn(each.shape, generator=generator))
    return tiny


def needs_blocks(tiny: Tiny) -> None:
    """Leave a test out for a network without a list of blocks, as a UNet: its family says `denoise` whole."""
    if not tiny.family.blocks:
        pytest.skip("it has no list of blocks")


def exported(tiny: Tiny, folder: Path, layout: str = "diffusers_safetensors") -> Path:
    """Write a family's weights as they are."""
    return tiny.family.export(iter(tiny.weights().items()), tiny.parts, layout, folder, metadata={"title": "tiny"})


# ------------------------------------------------------------------ what diffusers says


@dataclass(frozen=True)
class Oracle:
    """How diffusers runs a family's denoiser, by its own forward, and what its pipeline makes of captions.

    forward: (net, x_t, t, conditions, guidance) -> velocity as x_t. prompts: (pipeline, captions, length) -> conditions,
    under our names; None where a tiny vocabulary cannot agree. converter: of diffusers.loaders.single_file_utils, from
    the original layout. whole: of a file of all parts, by part: (stored, module, prefix) -> weights as diffusers makes
    them. sizes: (pipeline, features of sizes) -> conditions that it makes of them. released: by name, sizes of the denoisers that it is held to, and how many tensors these have.
    """

    forward: Callable[..., torch.Tensor]
    prompts: Callable[[Any, list[str], int], Conditions] | None = None
    converter: str = ""
    whole: Mapping[str, Callable[[Conditions, Any, str], Conditions]] = field(default_factory=dict)
    sizes: Callable[[Any, Conditions], Conditions] | None = None
    released: Mapping[str, tuple[Mapping[str, Any], int]] = field(default_factory=dict)


def _flux(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    from diffusers import FluxPipeline

    (count, _, height, width), tokens = x.shape, told["tokens"]
    packed = FluxPipeline._pack_latents(x, *x.shape)
    ids = FluxPipeline._prepare_latent_image_ids(count, height // 2, width // 2, x.device, x.dtype)
    out = net(
        hidden_states=packed,
        timestep=t / 1000,
        guidance=torch.full_like(t, guidance) if net.config.guidance_embeds else None,
        pooled_projections=told["pooled"],
        encoder_hidden_states=tokens,
        txt_ids=torch.zeros(tokens.shape[1], 3),
        img_ids=ids,
        return_dict=False,
    )[0]
    return FluxPipeline._unpack_latents(out, 8 * height, 8 * width, 8)


def _flux_prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    tokens, pooled, _ = pipe.encode_prompt(captions, None, device="cpu", max_sequence_length=length)
    return {"tokens": tokens, "pooled": pooled}


def _sd3(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    return net(
        hidden_states=x,
        encoder_hidden_states=told["tokens"],
        pooled_projections=told["pooled"],
        timestep=t,
        return_dict=False,
    )[0]


def _sdxl(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    added = {"text_embeds": told["pooled"], "time_ids": told["time_ids"]}
    hidden = torch.cat([told["hidden_1"], told["hidden_2"]], dim=-1)
    return net(x, t, hidden, added_cond_kwargs=added, return_dict=False)[0]


def _wan(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    return net(hidden_states=x, timestep=t, encoder_hidden_states=told["tokens"], return_dict=False)[0]


def _wan_prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    return {"tokens": pipe.encode_prompt(captions, None, False, max_sequence_length=length, device="cpu")[0]}


def _qwen(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    from diffusers import QwenImagePipeline

    count, channels, _, height, width = x.shape
    out = net(
        hidden_states=QwenImagePipeline._pack_latents(x, count, channels, height, width),
        timestep=t / 1000,
        encoder_hidden_states=told["tokens"],
        encoder_hidden_states_mask=told.get("mask"),
        img_shapes=[[(1, height // 2, width // 2)]] * count,
        return_dict=False,
    )[0]
    return QwenImagePipeline._unpack_latents(out, 8 * height, 8 * width, 8)


def _qwen_prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    """Ask for one caption after the other: together they are padded to the longest, and not to the length."""
    tokens, masks = [], []
    for caption in captions:
        made, _ = pipe.encode_prompt(caption, device="cpu", max_sequence_length=length)
        tokens.append(torch.nn.functional.pad(made[0], (0, 0, 0, length - made.shape[1])))
        masks.append(torch.arange(length) < made.shape[1])
    return {"tokens": torch.stack(tokens), "mask": torch.stack(masks)}


def _sdxl(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    return net(
        sample=x,
        timestep=t,
        encoder_hidden_states=torch.cat([told["hidden_1"], told["hidden_2"]], dim=-1),
        added_cond_kwargs={"text_embeds": told["pooled"], "time_ids": told["time_ids"]},
        return_dict=False,
    )[0]


def _sdxl_prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    hidden, _, pooled, _ = pipe.encode_prompt(captions, device="cpu", do_classifier_free_guidance=False)
    widths = [pipe.text_encoder.config.hidden_size, pipe.text_encoder_2.config.hidden_size]
    return {**dict(zip(("hidden_1", "hidden_2"), hidden.split(widths, dim=-1), strict=True)), "pooled": pooled}


def _sdxl_sizes(pipe: Any, features: Conditions) -> Conditions:
    named = [features[name].tolist() for name in ("original_size", "crop_top_left", "target_size")]
    width = pipe.text_encoder_2.config.projection_dim
    rows = [pipe._get_add_time_ids(*map(tuple, each), torch.float32, width) for each in zip(*named, strict=True)]
    return {"time_ids": torch.cat(rows)}


def _sd(net: Any, x: torch.Tensor, t: torch.Tensor, told: Conditions, guidance: float) -> torch.Tensor:
    return net(sample=x, timestep=t, encoder_hidden_states=told["hidden_1"], return_dict=False)[0]


def _sd_prompts(pipe: Any, captions: list[str], length: int) -> Conditions:
    hidden, _ = pipe.encode_prompt(captions, "cpu", 1, False)
    return {"hidden_1": hidden}


def _ldm(converter: str) -> Callable[[Conditions, Any, str], Conditions]:
    def convert(stored: Conditions, module: Any, prefix: str) -> Conditions:
        from diffusers.loaders import single_file_utils

        return getattr(single_file_utils, converter)(dict(stored), dict(module.config))

    return convert


def _kind(module: Any) -> str:
    return f"{type(module).__module__.partition('.')[0]}:{type(module).__name__}"


def _of_prefix(converter: str) -> Callable[[Conditions, Any, str], Conditions]:
    def convert(stored: Conditions, module: Any, prefix: str) -> Conditions:
        from diffusers.loaders import single_file_utils

        inside = {key: value for key, value in stored.items() if key.startswith(prefix)}
        made = getattr(single_file_utils, converter)(inside)
        return {key: value for key, value in made.items() if not is_second_name(_kind(module), key)}

    return convert


def _ldm_clip(stored: Conditions, module: Any, prefix: str) -> Conditions:
    from diffusers.loaders.single_file_utils import convert_ldm_clip_checkpoint

    return convert_ldm_clip_checkpoint(dict(stored), remove_prefix=prefix)


def _open_clip(stored: Conditions, module: Any, prefix: str) -> Conditions:
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    return convert_open_clip_checkpoint(module, dict(stored), prefix=prefix)


def _open_clip_of_24(stored: Conditions, module: Any, prefix: str) -> Conditions:
    """Leave out the layer that nothing reads, as diffusers does of the release by its number, 23."""
    unread = f"{prefix}transformer.resblocks.{module.config.num_hidden_layers}."
    assert any(key.startswith(unread) for key in stored)
    return _open_clip({key: value for key, value in stored.items() if not key.startswith(unread)}, module, prefix)


# FLUX.1-dev is what diffusers' defaults are but for its guidance; Wan 2.1's 14 B are its defaults
_I2V = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
_SMALL_WAN = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
ORACLES: dict[str, Oracle] = {
    "sdxl": Oracle(
        _sdxl,
        _sdxl_prompts,
        whole={
            "unet": _ldm("convert_ldm_unet_checkpoint"),
            "vae": _ldm("convert_ldm_vae_checkpoint"),
            "text_encoder_1": _ldm_clip,
            "text_encoder_2": _open_clip,
        },
        sizes=_sdxl_sizes,
    ),
    "sd1": Oracle(
        _sd,
        _sd_prompts,
        whole={
            "unet": _ldm("convert_ldm_unet_checkpoint"),
            "vae": _ldm("convert_ldm_vae_checkpoint"),
            "text_encoder": _ldm_clip,
        },
    ),
    "sd2": Oracle(
        _sd,
        _sd_prompts,
        whole={
            "unet": _ldm("convert_ldm_unet_checkpoint"),
            "vae": _ldm("convert_ldm_vae_checkpoint"),
            "text_encoder": _open_clip_of_24,
        },
    ),
    "sd3": Oracle(
        _sd3,
        whole={
            "transformer": _of_prefix("convert_sd3_transformer_checkpoint_to_diffusers"),
            "vae": _ldm("convert_ldm_vae_checkpoint"),
            "text_encoder_1": _ldm_clip,
            "text_encoder_2": _ldm_clip,
            "text_encoder_3": _of_prefix("convert_sd3_t5_checkpoint_to_diffusers"),
        },
    ),
    "flux": Oracle(
        _flux,
        _flux_prompts,
        "convert_flux_transformer_checkpoint_to_diffusers",
        released={"dev": ({"guidance_embeds": True}, 1160), "schnell": ({"guidance_embeds": False}, 1156)},
    ),
    "wan": Oracle(
        _wan,
        _wan_prompts,
        "convert_wan_transformer_to_diffusers",
        released={"t2v-14B": ({}, 1095), "t2v-1.3B": (_SMALL_WAN, 825), "i2v-14B": (_I2V, 1303)},
    ),
    "qwen_image": Oracle(_qwen, _qwen_prompts),
}


def diffusers_forward(tiny: Tiny, inputs: Inputs) -> torch.Tensor:
    """Predict by diffusers' own forward."""
    oracle = ORACLES[tiny.family.name]
    guidance = tiny.family.cfg.model.guidance
    return oracle.forward(tiny.net, inputs.x_t, inputs.timestep, inputs.conditions, guidance)


def own_pass(tiny: Tiny, inputs: Inputs) -> torch.Tensor:
    """Predict by the family's pass."""
    return tiny.family.denoise(tiny.net, inputs.x_t, inputs.timestep, inputs.conditions, passes.PassPlan()).velocity


def pipeline_of(folder: Path, name: str) -> Any:
    """Load an export into the family's pipeline."""
    import diffusers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = getattr(diffusers, FAMILIES[name].pipeline).from_pretrained(folder)
    return pipe
