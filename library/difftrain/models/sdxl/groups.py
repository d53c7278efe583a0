"""Parameter groups: one for each part, or for each block of the UNet, with rates of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from difftrain.contracts import Group
from difftrain.models.sdxl.blocks import block_of
from difftrain.models.sdxl.load import learning_rates

if TYPE_CHECKING:
    from torch import nn

    from difftrain.config import TrainConfig


def param_groups(root: nn.Module, cfg: TrainConfig) -> list[Group]:
    """Group what is trained, under the names that root gives it; blocks are called as in kohya's logs."""
    groups = []
    for part, rate in learning_rates(cfg).items():
        named = [(n, p) for n, p in root.named_parameters() if n.startswith(f"{part}.") and p.requires_grad]
        if part == "unet" and cfg.optimizer.block_lr:
            groups += _by_block(root, named, cfg.optimizer.block_lr)
        else:
            groups.append(Group(part, named, rate))
    return groups


def _by_block(root: Any, named: list[tuple[str, nn.Parameter]], rates: tuple[float, ...]) -> list[Group]:
    blocks = block_of(root.unet)
    groups = {block: Group(f"block{block}", [], rate) for block, rate in enumerate(rates) if rate > 0}
    for name, parameter in named:
        groups[blocks[name.removeprefix("unet.")]].named_params.append((name, parameter))
    return list(groups.values())
