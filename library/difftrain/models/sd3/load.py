"""Put the parts of an SD3 model together from the configuration."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from difftrain.config.rates import part_rates
from difftrain.contracts import ConfigFault, Fault, Parts
from difftrain.device import fp8
from difftrain.models.parts.materialise import fill
from difftrain.models.parts.stand_in import StandIn
from difftrain.models.sd3 import speedups
from difftrain.models.sd3.architecture import PARTS
from difftrain.models.sd3.counts import count
from difftrain.models.sd3.root import SD3Root
from difftrain.models.sd3.text import DTYPES

if TYPE_CHECKING:
    from difftrain.config import TrainConfig
    from difftrain.models.sd3.sources import Source
    from difftrain.models.sd3.tokens import Vocabularies

TRAINED = "transformer"
FROZEN = PARTS[1:]


def load_parts(
    cfg: TrainConfig, source: Source, three: Vocabularies | None, *, meta: bool, lazy: Collection[str] = ()
) -> Parts:
    """Build all parts; the transformer in fp32, frozen ones in the mixed precision's dtype (the VAE as vae_fp32 says).

    On the meta device with meta=True: names, shapes and dtypes only. lazy: of frozen parts, those for which something
    stands in until they are woken; their weights are looked at then. Raises ConfigFault where weights do not fit.
    """
    lazy_ones = [part for part in FROZEN if part in lazy]
    modules = {part: source.architecture.build(part) for part in PARTS if part not in lazy_ones}
    faults = [*source.faults(modules), *_nothing_trained(cfg), *_target_layer(cfg, source), *_positions(cfg, source)]
    faults += speedups.faults(cfg, source.architecture)
    if faults:
        raise ConfigFault(faults)
    for part, module in modules.items():
        dtype = storage_dtype(cfg, part)
        if meta:
            torch.nn.Module.to(module, dtype)  # diffusers' own warns about dtypes that nothing here depends on
        else:
            fill(module, source.weights(part, module), dtype)
        keep_wide(part, module, dtype)
    target = cfg.loss.text_recon_target_layer if cfg.loss.text_recon_gamma else None
    parts = Parts(
        SD3Root(modules[TRAINED], target_layer=target, **speedups.of_root(cfg, source.architecture, meta=meta))
    )
    for part in FROZEN:
        parts.frozen[part] = _stand_in(cfg, source, part) if part in lazy_ones else _still(modules[part])
    parts.notes += _in_8_bits(parts, cfg)
    parts.lazy = {part: partial(_wake, cfg, source, part, parts) for part in lazy_ones}
    speedups.add_encoder(cfg, parts, meta=meta, lazy=lazy)
    parts.config = source.architecture.to_dict()
    parts.tokenizers = three.by_name() if three else {}
    parts.notes += source.notes
    if cfg.training.gradient_checkpointing:
        modules[TRAINED].enable_gradient_checkpointing()
    return parts


def storage_dtype(cfg: TrainConfig, part: str) -> torch.dtype:
    """Return the dtype that a part's weights are kept in."""
    if part == TRAINED or (part == "vae" and cfg.model.vae_fp32):
        return torch.float32
    return DTYPES[cfg.training.mixed_precision]


def keep_wide(part: str, module: nn.Module, dtype: torch.dtype) -> None:
    """Keep in fp32 what overflows in fp16: the last layer of each feed-forward of T5, as transformers does."""
    if part == "text_encoder_3" and dtype == torch.float16:
        for name, layer in module.named_modules():
            if name.endswith(".wo"):
                layer.float()


def _still(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False).eval()


def _stand_in(cfg: TrainConfig, source: Source, part: str) -> StandIn:
    numbers = count(source.architecture, part)
    return StandIn(numbers, storage_dtype(cfg, part), lambda: _still(source.architecture.build(part)))


def _wake(cfg: TrainConfig, source: Source, part: str, parts: Parts) -> None:
    """Build a part and fill it as it would have been filled at the start: anew each time, resting untied what was tied."""
    module = source.architecture.build(part)
    if faults := source.faults({part: module}):
        raise ConfigFault(faults)
    dtype = storage_dtype(cfg, part)
    fill(module, source.weights(part, module), dtype)
    keep_wide(part, module, dtype)
    if _goes_into_8_bits(cfg, part):
        fp8.store(_still(module))
    parts.frozen[part] = _still(module)


def _goes_into_8_bits(cfg: TrainConfig, part: str) -> bool:
    return cfg.model.fp8_frozen == "all" and part != "vae"


def _in_8_bits(parts: Parts, cfg: TrainConfig) -> list[str]:
    """Put frozen layers into 8 bits, of all parts but the VAE; return what is to be said of it."""
    if cfg.model.fp8_frozen is None:
        return []
    chosen = {name: module for name, module in parts.frozen.items() if _goes_into_8_bits(cfg, name)}
    if not chosen:
        return ["--fp8_base_unet has no effect: the transformer is trained, and nothing else is meant"]
    counts = {name: len(fp8.store(module)) for name, module in chosen.items() if not isinstance(module, StandIn)}
    told = [f"{number} layers of {name}" for name, number in counts.items() if number]
    told += [f"{name} where it is needed" for name, module in chosen.items() if isinstance(module, StandIn)]
    return [f"in 8 bits, because they are frozen: {', '.join(told)}; exports hold them as they were"] if told else []


def _nothing_trained(cfg: TrainConfig) -> list[Fault]:
    return [] if part_rates(cfg) else [Fault("--learning_rate", "is 0: nothing would be trained")]


def _target_layer(cfg: TrainConfig, source: Source) -> list[Fault]:
    """Text is reconstructed from a block before the last: its own tokens would be no target."""
    layer, depth = cfg.loss.text_recon_target_layer, source.architecture.num_layers
    if not cfg.loss.text_recon_gamma or layer < depth:
        return []
    remedy = f"0 for what enters the first block, or 1 to {depth - 1} for what leaves one before the last"
    what = f"is {layer}, the transformer has {depth} blocks"
    if layer == depth:
        what += ": the last one's text would be compared with itself"
    return [Fault("--text_recon_target_layer", what, remedy)]


def _positions(cfg: TrainConfig, source: Source) -> list[Fault]:
    """Pictures are no larger than the table of positions."""
    return [
        Fault(
            "--resolution",
            f"makes buckets of {side} px, the transformer's positions end at {largest}",
            "choose a smaller one",
        )
        for largest in (source.architecture.largest_side,)
        for side in [max(longest_sides(cfg), default=0)]
        if side > largest
    ]


def longest_sides(cfg: TrainConfig) -> list[int]:
    """Return the longest side that each data set's pictures can have, as far as the configuration says."""
    found: list[int] = []
    section: Any
    evaluated = [dataset for each in cfg.eval.sets for dataset in each.datasets]
    for section in (cfg.data, *cfg.data.datasets, *evaluated):
        found += [max(size) for size in section.sizes]
        if section.resolution and not section.sizes:
            found.append(max(section.resolution))
            if section.enable_bucket:
                width, height = section.resolution
                found.append(min(section.max_bucket_reso, width * height // section.min_bucket_reso))
    return found
