"""Random weights that are the same on every machine: each a function of (seed, parameter name) alone.

torch's own initialisation depends on the kernels of the CPU and on the order in which modules are made; two devices
whose loss curves are to be laid over one another must start from the same bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from difftrain.diffusion.draws import key_of, normal

if TYPE_CHECKING:
    from torch import Tensor, nn

Scale = Callable[[str, torch.Size], float]  # standard deviation of a parameter by name and shape
# Raise it where the same seed and name give other weights, scales included: what was made with them is found by it.
DRAW_VERSION = 1


def initial_weights(
    module: nn.Module, part: str, seed: int, scale: Scale, only: Callable[[str], bool] = lambda _: True
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of a module (which may be on the meta device) as fp32: N(0, scale^2), or ones for a norm.

    only: tells which names are wanted; the others are not drawn.
    Scales of exactly 0 give zeros; the part's name is part of the key, so equal names in two parts differ.
    """
    norms = {name for name, child in module.named_modules() if "Norm" in type(child).__name__}
    tensors = module.state_dict(keep_vars=True)  # in their own shapes, also where a layer stores its weight in few bits
    for name in [name for name, _ in module.named_parameters()]:  # filled while they are given
        if not only(name):
            continue
        param = tensors[name]
        owner, _, kind = name.rpartition(".")
        if owner in norms:
            value = torch.ones(param.shape) if kind == "weight" else torch.zeros(param.shape)
        else:
            value = _normal(seed, f"{part}.{name}", param.shape, scale(name, fan_shape(tensors, name)))
        yield name, value


def _normal(seed: int, name: str, shape: torch.Size, std: float) -> Tensor:
    if not std:
        return torch.zeros(shape)
    draw = torch.from_numpy(normal(seed, key_of("initial weights", name), 0, "init", shape))
    return draw.mul_(std)


def fan_shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size:
    """Return the shape that sets a parameter's fan-in: for a bias, that of its weight."""
    owner, _, kind = name.rpartition(".")
    weight = tensors.get(f"{owner}.weight".lstrip(".")) if kind == "bias" else None
    return tensors[name].shape if weight is None else weight.shape


def by_fan_in(name: str, shape: torch.Size) -> float:
    """Give the variance of torch's default for linear layers and convolutions, 1 / (3 fan_in)."""
    return (3 * math.prod(shape[1:])) ** -0.5


def clip_scale(num_layers: int, width: int) -> Scale:
    """Give CLIP's scales (Radford et al. 2021, section 2.5 and its code), biases zero."""
    depth = (2 * num_layers) ** -0.5
    rules = [
        (r"bias$", 0.0),
        (r"(token|position)_embedding\.weight$", 0.02),
        (r"\.(q|k|v)_proj\.weight$", width**-0.5 * depth),
        (r"\.out_proj\.weight$", width**-0.5),
        (r"\.fc1\.weight$", (2 * width) ** -0.5),
        (r"\.fc2\.weight$", width**-0.5 * depth),
        (r"text_projection\.weight$", width**-0.5),
    ]

    return _by_rules(rules)


def _by_rules(rules: list[tuple[str, float]]) -> Scale:
    def scale(name: str, shape: torch.Size) -> float:
        for pattern, std in rules:
            if re.search(pattern, name):
                return std
        raise KeyError(f"no scale for {name}")

    return scale


def t5_scale(width: int, head: int, heads: int, inner: int) -> Scale:
    """Give T5's scales (Mesh TensorFlow's, as transformers has them): attention is not divided by sqrt(head)."""
    rules = [
        (r"(^|\.)(shared|embed_tokens)\.weight$", 1.0),
        (r"\.SelfAttention\.q\.weight$", (width * head) ** -0.5),
        (r"\.SelfAttention\.(k|v)\.weight$", width**-0.5),
        (r"\.SelfAttention\.o\.weight$", (heads * head) ** -0.5),
        (r"\.relative_attention_bias\.weight$", width**-0.5),
        (r"\.(wi|wi_0|wi_1)\.weight$", width**-0.5),
        (r"\.wo\.weight$", inner**-0.5),
    ]
    return _by_rules(rules)
