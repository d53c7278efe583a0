"""Put the parts of an SD3 model together from the configuration."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from difftrain.config.rates import part_rates
from difftrain.contracts import ConfigFault, Fault, Parts
from difftrain.models.parts.stand_in import DTYPES, give_weights, in_8_bits, stand_in, still, to_8_bits, wake
from difftrain.models.sd3 import speedups
from difftrain.models.sd3.architecture import PARTS
from difftrain.models.sd3.root import SD3Root

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
        give_weights(source, part, module, storage_dtype(cfg, part), meta=meta)
    target = cfg.loss.text_recon_target_layer if cfg.loss.text_recon_gamma else None
    parts = Parts(
        SD3Root(modules[TRAINED], target_layer=target, **speedups.of_root(cfg, source.architecture, meta=meta))
    )
    for part in FROZEN:
        dtype, asleep = storage_dtype(cfg, part), part in lazy_ones
        parts.frozen[part] = stand_in(source, part, dtype) if asleep else still(modules[part])
        if asleep:
            parts.lazy[part] = partial(wake, source, part, parts, dtype, eight_bits=in_8_bits(cfg, part))
    parts.notes += _in_8_bits(parts, cfg)
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


def _in_8_bits(parts: Parts, cfg: TrainConfig) -> list[str]:
    """Put frozen layers into 8 bits, of all parts but the VAE; return what is to be said of it."""
    if cfg.model.fp8_frozen is None:
        return []
    chosen = {name: module for name, module in parts.frozen.items() if in_8_bits(cfg, name)}
    if not chosen:
        return ["--fp8_base_unet has no effect: the transformer is trained, and nothing else is meant"]
    told = to_8_bits(chosen)
    return [f"in 8 bits, because they are frozen: {told}; exports hold them as they were"] if told else []


def _nothing_trained(cfg: TrainConfig) -> list[Fault]:
    return [] if part_rates(cfg) else [Fault("--learning_rate", "is 0: nothing would be trained")]


def _target_layer(cfg: TrainConfig, source: Source) -> list[Fault]:
    """Text is reconstructed from a block before the last: its own tokens would be no target."""
    layer, depth = cfg.loss.text_recon_target_layer, source.architecture.num_layers
    if layer < depth or not layer:
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
