"""The parts of a family in memory: what is trained in the root, the rest frozen, or described and loaded later.

1. All parts that are needed now are built hollow and compared with the source: every misfit is named at once.
2. The root is filled, or waits for the caches to be built (Parts.load_root): encoders and root are never both in memory.
3. Frozen parts are filled, or stand as placeholders until they are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from difftrain.contracts import ConfigFault, Fault, Parts
from difftrain.models import passes, speedups, stand_in
from difftrain.models.facts import Text
from difftrain.models.materialise import fill, hollow_dtype
from difftrain.models.root import DenoiserRoot
from difftrain.models.stand_in import in_8_bits, still, to_8_bits

if TYPE_CHECKING:
    from torch import nn

    from difftrain.config import TrainConfig
    from difftrain.models.family import ModelFamily

_TITLES = {"unet": "UNet"}


def load(family: ModelFamily, *, meta: bool = False, lazy: Collection[str] = ()) -> Parts:
    """Build root and frozen parts; names and shapes only where meta. Raises ConfigFault.

    lazy: frozen parts for which something stands in until they are loaded, also beside others without weights; with
    "root" the denoiser's weights are read by Parts.load_root, once the encoders have filled the caches.
    """
    cfg, source, inside = family.cfg, family.source, family.in_root
    frozen = [part for part in family.parts if part not in inside]
    deferred = [part for part in frozen if part in lazy]
    modules = {part: source.build(part) for part in family.parts if part not in deferred}
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
    if "root" in lazy and not meta and cfg.model.fp8_frozen is None:
        parts.load_root = load_root
    elif not meta:
        load_root()

    # --- frozen parts
    for part in frozen:
        dtype = family.storage_dtype(part)
        if part in deferred:
            parts.frozen[part] = stand_in.stand_in(source, part, dtype)
            parts.lazy[part] = partial(stand_in.wake, source, part, parts, dtype, eight_bits=in_8_bits(cfg, part))
        else:
            stand_in.give_weights(source, part, modules[part], dtype, meta=meta)
            parts.frozen[part] = still(modules[part])
    parts.notes += _in_8_bits(family, parts)
    speedups.add_encoder(cfg, parts, meta=meta, lazy=lazy)

    if parts.base and not meta:
        parts.held = {family.denoiser: source.fingerprint(family.denoiser)}

    # --- what else is to be known
    parts.config = family.architecture()
    parts.notes += [*source.notes, *family.built_in(), *family.remarks()]
    if cfg.training.gradient_checkpointing:
        net.enable_gradient_checkpointing()
        for encoder in encoders.values():
            _recompute(encoder)
    return parts


def freeze(family: ModelFamily, parts: Parts, root: DenoiserRoot) -> list[str]:
    """Freeze what no loss reaches, what is only held and what has no rate; return what is to be said of it."""
    net, notes = root.denoiser, []
    last = sum(1 for _ in passes.blocks_of(family, net)) - 1 if family.blocks else 0
    unread = re.compile(family.unread.replace("{last}", str(last))) if family.unread else None
    for name, each in net.named_parameters():
        if family.is_base(name):
            parts.base.add(f"{family.denoiser}.{name}")
            each.requires_grad_(False)
        elif unread and unread.search(name):
            each.requires_grad_(False)
    if parts.base:
        held = sum(net.get_parameter(name.partition(".")[2]).numel() for name in parts.base)
        notes.append(f"held as their source has them, in no checkpoint: {held:,} weights of the {family.denoiser}")
    if family.denoiser not in family.rates:
        net.requires_grad_(False)
        notes.append(f"the {_TITLES.get(family.denoiser, family.denoiser)} is frozen: its learning rate is 0")
    for text in family.texts:
        if text.part in family.in_root:
            notes += _freeze_unread(text, root.get_submodule(text.part), family.reader(text))
    return notes


def _in_8_bits(family: ModelFamily, parts: Parts) -> list[str]:
    """Put frozen layers into 8 bits, of all parts but the VAE or of the denoiser alone; return what is to be said."""
    which = family.cfg.model.fp8_frozen
    if which is None:
        return []
    chosen: dict[str, Any] = {family.denoiser: parts.root.get_submodule(family.denoiser)}
    chosen |= {name: module for name, module in parts.frozen.items() if in_8_bits(family.cfg, name)}
    said = to_8_bits(chosen)
    if not said:
        flag = "--fp8_base" if which == "all" else "--fp8_base_unet"
        return [f"{flag} has no effect: it is for frozen layers, and here all that it is about are trained"]
    return [f"in 8 bits, because they are frozen: {said}; exports and checkpoints hold them as they were"]


def faults(family: ModelFamily, net: nn.Module) -> list[Fault]:
    """Find what a configuration asks of this denoiser and it has not. net: without weights."""
    nothing = Fault("--learning_rate", "is 0 for every part: nothing would be trained")
    problems = [] if family.rates else [nothing]
    names = [name for name, _ in net.named_parameters()]
    for pattern in family.cfg.model.train_only:
        if not any(re.search(pattern, name) for name in names):
            remedy = f"a regular expression that finds some, such as {names[len(names) // 2]}"
            problems.append(
                Fault("[model] train_only", f"{pattern!r} finds no parameter of the {family.denoiser}", remedy)
            )
    layer, depth = family.cfg.loss.text_recon_target_layer, sum(1 for _ in passes.blocks_of(family, net))
    if layer and layer >= depth:  # its own tokens would be no target
        what = f"is {layer}, the {family.denoiser} has {depth} blocks"
        what += ": the last one's text would be compared with itself" if layer == depth else ""
        remedy = f"0 for what enters the first block, or 1 to {depth - 1} for what leaves one before the last"
        problems.append(Fault("--text_recon_target_layer", what, remedy))
    side, largest = max(_longest_sides(family.cfg), default=0), family.largest_side()
    if largest is not None and side > largest:
        what = f"makes buckets of {side} px, the {family.denoiser}'s positions end at {largest}"
        problems.append(Fault("--resolution", what, "choose a smaller one"))
    return problems + speedups.faults(family, net)


def _longest_sides(cfg: TrainConfig) -> list[int]:
    """Return the longest side that each data set's pictures can have, as far as the configuration says."""
    sides: list[int] = []
    section: Any
    evaluated = [dataset for each in cfg.eval.sets for dataset in each.datasets]
    for section in (cfg.data, *cfg.data.datasets, *evaluated):
        sides += [max(size) for size in section.sizes]
        if section.resolution and not section.sizes:
            sides.append(max(section.resolution))
            if section.enable_bucket:
                width, height = section.resolution
                sides.append(min(section.max_bucket_reso, width * height // section.min_bucket_reso))
    return sides


# ------------------------------------------------------------------ text encoders that are trained with the denoiser


def unread(text: Text, encoder: Any) -> list[str]:
    """Name the parameters of a CLIP encoder that can get no gradient: what comes after the states that are read.

    There are none where a vector is read too: it goes through every layer.
    """
    if text.pooled or not isinstance(text.hidden, int) or text.hidden >= 0:
        return []
    layers = encoder.config.num_hidden_layers
    unused = (*(f"encoder.layers.{i}." for i in range(layers + text.hidden + 1, layers)), "final_layer_norm.")
    return [name for name, _ in encoder.named_parameters() if name.removeprefix("text_model.").startswith(unused)]


def _freeze_unread(text: Text, encoder: Any, reader: str) -> list[str]:
    """Freeze what no loss reaches; return the sentence that says so. reader: who reads the states before it."""
    names = unread(text, encoder)
    for name in names:
        encoder.get_parameter(name).requires_grad_(False)
    if not names or not isinstance(text.hidden, int):
        return []
    layers = encoder.config.num_hidden_layers
    first, last = layers + text.hidden + 1, layers - 1
    which = "" if first == layers else f"layer {first} and " if first == last else f"layers {first} to {last} and "
    return [
        f"{text.part}: {which}final_layer_norm ({len(names)} tensors) stay as they are, "
        f"because {reader} reads the hidden states before them"
    ]


def _recompute(encoder: Any) -> None:
    """Compute activations again in the backward pass."""
    newer = getattr(encoder, "activation_checkpointing_enable", None)  # its name since transformers 5
    (newer or encoder.gradient_checkpointing_enable)({"use_reentrant": False})
