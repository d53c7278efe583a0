"""Put the parts of an SDXL model together from the configuration."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from difftrain.config.rates import part_rates
from difftrain.contracts import ConfigFault, Fault, Parts
from difftrain.models.parts.stand_in import DTYPES, give_weights, in_8_bits, stand_in, still, to_8_bits, wake
from difftrain.models.sdxl import blocks
from difftrain.models.sdxl.architecture import PARTS
from difftrain.models.sdxl.root import SDXLRoot
from difftrain.models.sdxl.text import CLIP_SKIP, unused_names

if TYPE_CHECKING:
    from torch import nn

    from difftrain.config import TrainConfig
    from difftrain.models.parts.clip_vocabulary import ClipVocabulary
    from difftrain.models.sdxl.sources import Source


def learning_rates(cfg: TrainConfig) -> dict[str, float]:
    """Return the rate of every part that is trained. Raises ConfigFault where nothing is left to train."""
    rates = part_rates(cfg)
    if not rates:
        raise ConfigFault([Fault("--learning_rate", "is 0 for every part: nothing would be trained")])
    return rates


def by_name(pair: tuple[ClipVocabulary, ClipVocabulary]) -> dict[str, ClipVocabulary]:
    """Name both vocabularies as Parts holds them."""
    return {f"tokenizer_{i}": vocabulary for i, vocabulary in enumerate(pair, start=1)}


def load_parts(
    cfg: TrainConfig,
    source: Source,
    pair: tuple[ClipVocabulary, ClipVocabulary] | None,
    *,
    meta: bool,
    lazy: Collection[str] = (),
) -> Parts:
    """Build all parts; trained ones in fp32, frozen ones in the mixed precision's dtype (the VAE as vae_fp32 says).

    On the meta device with meta=True: names, shapes and dtypes only. lazy: of frozen parts, those for which something
    stands in until they are woken; their weights are looked at then. Raises ConfigFault where weights do not fit.
    """
    rates = learning_rates(cfg)
    lazy_ones = [part for part in PARTS if part in lazy and part != "unet" and part not in rates]
    modules = {part: source.architecture.build(part) for part in PARTS if part not in lazy_ones}
    faults = [*source.faults(modules), *_skipped_too_far(cfg, source)]
    faults += blocks.faults(modules["unet"], cfg.optimizer.block_lr)
    if faults:
        raise ConfigFault(faults)
    for part, module in modules.items():
        give_weights(source, part, module, storage_dtype(cfg, part, rates), meta=meta)
    modules |= {part: stand_in(source, part, storage_dtype(cfg, part)) for part in lazy_ones}
    parts = _sorted_out(modules, rates, clip_skip_of(cfg))
    for part in lazy_ones:
        dtype = storage_dtype(cfg, part)
        parts.lazy[part] = partial(wake, source, part, parts, dtype, eight_bits=in_8_bits(cfg, part))
    if "unet" in rates and (said := blocks.freeze(parts.root.unet, cfg.optimizer.block_lr)):
        parts.notes.append(said)
    parts.notes += _in_8_bits(parts, cfg)
    parts.config = source.architecture.to_dict()
    parts.tokenizers = by_name(pair) if pair else {}
    parts.notes += [*source.notes, *_disagreement(cfg, source), *_skipping(cfg)]
    if cfg.training.gradient_checkpointing:
        _checkpoint(parts.root)
    return parts


def clip_skip_of(cfg: TrainConfig) -> int:
    """Return which hidden states are read, counted from the end; SDXL's where the configuration says nothing."""
    return cfg.model.clip_skip or CLIP_SKIP


def _skipped_too_far(cfg: TrainConfig, source: Source) -> list[Fault]:
    sizes = source.architecture
    layers = min(each["num_hidden_layers"] for each in (sizes.text_encoder_1, sizes.text_encoder_2))
    if clip_skip_of(cfg) <= layers:
        return []
    return [Fault("--clip_skip", f"is {cfg.model.clip_skip}, a text encoder here has {layers} layers", "2 is SDXL's")]


def _skipping(cfg: TrainConfig) -> list[str]:
    """Say how a model is to be used whose text comes from other layers than SDXL's: no file format carries it."""
    if clip_skip_of(cfg) == CLIP_SKIP:
        return []
    return [
        f"clip_skip {cfg.model.clip_skip}: draw with the same clip skip; in diffusers, which counts from SDXL's own, "
        f"that is clip_skip={clip_skip_of(cfg) - CLIP_SKIP}"
    ]


def _sorted_out(modules: dict[str, nn.Module], rates: dict[str, float], clip_skip: int) -> Parts:
    """Put what is trained into root, the rest aside; the UNet is in root even where it is frozen."""
    encoders = {part: modules[part] for part in ("text_encoder_1", "text_encoder_2") if part in rates}
    frozen = {part: still(modules[part]) for part in PARTS if part != "unet" and part not in rates}
    parts = Parts(SDXLRoot(modules["unet"], clip_skip=clip_skip, **encoders), frozen)
    _freeze(parts, rates)
    return parts


def _disagreement(cfg: TrainConfig, source: Source) -> list[str]:
    if source.prediction_type in (None, cfg.model.prediction_type):
        return []
    return [
        f"these weights say that they predict {source.prediction_type}; this run trains {cfg.model.prediction_type}"
    ]


def storage_dtype(cfg: TrainConfig, part: str, rates: Collection[str] = ()) -> torch.dtype:
    """Return the dtype that a part's weights are kept in; the UNet is in root, and root is fp32."""
    if part == "unet" or part in rates or (part == "vae" and cfg.model.vae_fp32):
        return torch.float32
    return DTYPES[cfg.training.mixed_precision]


def _in_8_bits(parts: Parts, cfg: TrainConfig) -> list[str]:
    """Put frozen layers into 8 bits, of all parts but the VAE or of the UNet alone; return what is to be said of it."""
    which = cfg.model.fp8_frozen
    if which is None:
        return []
    chosen: dict[str, Any] = {"unet": parts.root.unet}
    chosen |= {name: module for name, module in parts.frozen.items() if in_8_bits(cfg, name)}
    told = to_8_bits(chosen)
    if not told:
        flag = "--fp8_base" if which == "all" else "--fp8_base_unet"
        return [f"{flag} has no effect: it is for frozen layers, and here all that it is about are trained"]
    return [f"in 8 bits, because they are frozen: {told}; exports and checkpoints hold them as they were"]


def _freeze(parts: Parts, rates: dict[str, float]) -> None:
    """Freeze what is in root but cannot, or shall not, be trained; say which."""
    root: Any = parts.root
    if "unet" not in rates:
        root.unet.requires_grad_(False)
        parts.notes.append("the UNet is frozen: its learning rate is 0")
    if "text_encoder_1" in rates:
        names = unused_names(root.text_encoder_1, root.clip_skip)
        for name in names:
            root.text_encoder_1.get_parameter(name).requires_grad_(False)
        parts.notes.append(_unread(root.text_encoder_1.config.num_hidden_layers, root.clip_skip, len(names)))


def _unread(layers: int, clip_skip: int, tensors: int) -> str:
    first = layers - clip_skip + 1
    unread = (
        ""
        if first == layers
        else f"layer {first} and "
        if first == layers - 1
        else f"layers {first} to {layers - 1} and "
    )
    reader = "SDXL" if clip_skip == CLIP_SKIP else f"--clip_skip={clip_skip}"
    return (
        f"text_encoder_1: {unread}final_layer_norm ({tensors} tensors) stay as they are, "
        f"because {reader} reads the hidden states before them"
    )


def _checkpoint(root: Any) -> None:
    """Recompute activations in the backward pass of the UNet and of trained encoders."""
    root.unet.enable_gradient_checkpointing()
    for part in ("text_encoder_1", "text_encoder_2"):
        if hasattr(root, part):
            encoder = getattr(root, part)
            newer = getattr(encoder, "activation_checkpointing_enable", None)  # its name since transformers 5
            (newer or encoder.gradient_checkpointing_enable)({"use_reentrant": False})
