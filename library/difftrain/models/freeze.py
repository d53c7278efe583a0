"""What a configuration trains of a model: what it asks and the model has not, and what stays frozen."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from difftrain.config.spellings.spelling import option
from difftrain.contracts import Fault, Parts
from difftrain.models import passes, speedups
from difftrain.models.facts import Text
from difftrain.models.root import DenoiserRoot

if TYPE_CHECKING:
    from torch import nn

    from difftrain.config import TrainConfig
    from difftrain.models.description import Description

_TITLES = {"unet": "UNet"}


def faults(family: Description, net: nn.Module) -> list[Fault]:
    """Find what a configuration asks of this denoiser and it has not. net: without weights."""
    nothing = Fault(option("optimizer.learning_rate"), "is 0 for every part: nothing would be trained")
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
        problems.append(Fault(option("loss.text_recon_target_layer"), what, remedy))
    side, largest = max(_longest_sides(family.cfg), default=0), family.largest_side()
    if largest is not None and side > largest:
        what = f"makes buckets of {side} px, the {family.denoiser}'s positions end at {largest}"
        problems.append(Fault(option("data.resolution"), what, "choose a smaller one"))
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


def freeze(family: Description, parts: Parts, root: DenoiserRoot) -> list[str]:
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
