"""The UNet's blocks as kohya's --block_lr counts them, by the names of the original layout.

Of n input and n output blocks (9 in SDXL): 0 is the time and label embeddings, 1 to n the input blocks, then the three
parts of the middle block, the n output blocks, and last the way out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from difftrain.config.spellings.spelling import option
from difftrain.contracts import Fault, Group
from difftrain.models.weights import original

_MIDDLE = 3


def count(unet: Any) -> int:
    """Count the blocks: 23 in SDXL."""
    return 2 * _inputs(unet) + _MIDDLE + 2


def _inputs(unet: Any) -> int:
    return len(unet.config.block_out_channels) * (unet.config.layers_per_block + 1)


def block_of(unet: Any) -> Mapping[str, int]:
    """Map every tensor of the UNet, by its name in the module, to its block."""
    number = _inputs(unet)
    starts = {"input_blocks": 1, "middle_block": 1 + number, "output_blocks": 1 + number + _MIDDLE}
    found, rule = {}, original.unet_rule(unet)
    for name in unet.state_dict():
        key = rule(name).key
        numbered = re.match(r"(input_blocks|middle_block|output_blocks)\.(\d+)\.", key)
        if numbered:
            found[name] = starts[numbered[1]] + int(numbered[2])
        else:
            found[name] = 0 if key.startswith(("time_embed.", "label_emb.")) else count(unet) - 1
    return found


def faults(unet: Any, rates: tuple[float, ...]) -> list[Fault]:
    """Say where there is not one rate for each block of this UNet."""
    if not rates or len(rates) == count(unet):
        return []
    n = _inputs(unet)
    remedy = f"1 for the embeddings, {n} input, {_MIDDLE} middle, {n} output, 1 for the way out"
    return [Fault(option("optimizer.block_lr"), f"has {len(rates)} values, this UNet has {count(unet)} blocks", remedy)]


def groups(unet: Any, named: list[tuple[str, Any]], rates: tuple[float, ...]) -> list[Group]:
    """Group what is trained by block, named as in kohya's logs. named: parameters under root's names."""
    blocks = block_of(unet)
    found = {block: Group(f"block{block}", [], rate) for block, rate in enumerate(rates) if rate > 0}
    for name, parameter in named:
        found[blocks[name.removeprefix("unet.")]].named_params.append((name, parameter))
    return list(found.values())


def freeze(unet: Any, rates: tuple[float, ...]) -> list[str]:
    """Freeze the blocks whose rate is 0; return a sentence that names them, or nothing."""
    frozen = [block for block, rate in enumerate(rates) if rate == 0]
    for name, block in block_of(unet).items() if frozen else ():
        if block in frozen:
            unet.get_parameter(name).requires_grad_(False)
    return (
        [f"UNet blocks {', '.join(map(str, frozen))} are frozen: {option('optimizer.block_lr')} is 0 there"]
        if frozen
        else []
    )
