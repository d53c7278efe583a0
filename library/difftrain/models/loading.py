"""The parts of a family in memory: what is trained in the root, the rest frozen, or described and loaded later.

1. All parts that are needed now are built hollow and compared with the source: every misfit is named at once.
2. The root is filled, or waits for the caches to be built (Parts.load_root): encoders and root are never both in memory.
3. Frozen parts are filled, or stand as placeholders until they are loaded.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Parts
from difftrain.models import placeholder, speedups
from difftrain.models.materialise import fill, hollow_dtype
from difftrain.models.placeholder import in_8_bits, to_8_bits, untrained
from difftrain.models.root import DenoiserRoot

if TYPE_CHECKING:
    from difftrain.models.base import BaseFamily

_TITLES = {"unet": "UNet"}


def load(family: BaseFamily, *, meta: bool = False, deferred: Collection[str] = ()) -> Parts:
    """Build root and frozen parts; names and shapes only where meta. Raises ConfigFault.

    deferred: frozen parts that a placeholder counts for until they are loaded, also beside others without weights; with
    "root" the denoiser's weights are read by Parts.load_root, once the encoders have filled the caches.
    """
    cfg, source, inside = family.cfg, family.source, family.in_root
    frozen = [part for part in family.parts if part not in inside]
    waiting = [part for part in frozen if part in deferred]
    modules = {part: source.build(part) for part in family.parts if part not in waiting}
    net = modules[family.denoiser]
    problems = [*source.faults(modules), *family.faults(net)]
    if problems:
        raise ConfigFault(problems)

    # --- the root: hollow until it is loaded
    for part in inside:
        hollow_dtype(modules[part], partial(family.storage_dtype, part))
    encoders = {part: modules[part] for part in inside[1:]}
    root = DenoiserRoot(family, family.denoiser, net, encoders=encoders, **family.root_options(net, meta=meta))
    parts = Parts(root)
    parts.notes += family.freeze(parts, root)

    def load_root() -> None:
        base = frozenset(parts.base)
        for part in inside:
            mapped = lambda name, part=part: f"{part}.{name}" in base  # noqa: E731
            fill(modules[part], source.weights(part, modules[part]), partial(family.storage_dtype, part), mapped=mapped)

    # frozen layers of the root are put into 8 bits below, where they have weights
    if "root" in deferred and not meta and cfg.model.fp8_frozen is None:
        parts.load_root = load_root
    elif not meta:
        load_root()

    # --- frozen parts
    for part in frozen:
        dtype = family.storage_dtype(part)
        if part in waiting:
            parts.frozen[part] = placeholder.make_placeholder(source, part, dtype)
            parts.deferred[part] = partial(
                placeholder.load_part, source, part, parts, dtype, eight_bits=in_8_bits(cfg, part)
            )
        else:
            placeholder.fill_part(source, part, modules[part], dtype, meta=meta)
            parts.frozen[part] = untrained(modules[part])
    parts.notes += _in_8_bits(family, parts)
    speedups.add_encoder(cfg, parts, meta=meta, deferred=deferred)

    if parts.base and not meta:
        parts.base_fingerprints = {family.denoiser: source.fingerprint(family.denoiser)}

    # --- what else is to be known
    parts.config = family.architecture()
    parts.notes += [*source.notes, *family.built_in(), *family.remarks()]
    if cfg.training.gradient_checkpointing:
        net.enable_gradient_checkpointing()
        for encoder in encoders.values():
            _recompute(encoder)
    return parts


def _in_8_bits(family: BaseFamily, parts: Parts) -> list[str]:
    """Put frozen layers into 8 bits, of all parts but the VAE or of the denoiser alone; return what is to be said."""
    which = family.cfg.model.fp8_frozen
    if which is None:
        return []
    chosen: dict[str, Any] = {family.denoiser: parts.root.get_submodule(family.denoiser)}
    chosen |= {name: module for name, module in parts.frozen.items() if in_8_bits(family.cfg, name)}
    said = to_8_bits(chosen)
    if not said:
        flag = option("model.fp8_frozen", "all") if which == "all" else option("model.fp8_frozen", "unet")
        return [f"{flag} has no effect: it is for frozen layers, and here all that it is about are trained"]
    return [f"in 8 bits, because they are frozen: {said}; exports and checkpoints hold them as they were"]


def _recompute(encoder: Any) -> None:
    """Compute activations again in the backward pass."""
    newer = getattr(encoder, "activation_checkpointing_enable", None)  # its name since transformers 5
    (newer or encoder.gradient_checkpointing_enable)({"use_reentrant": False})
