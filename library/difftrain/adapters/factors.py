"""What training does to the two factors of LoRA's product B A: rates of their own (LoRA+), and a bound on its norm.

The factors of one layer are `X.lora_A.default.weight` (first) and `X.lora_B.default.weight` (second).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from difftrain.adapters.layers import ADAPTER, adapted_layers
from difftrain.contracts import METRIC, Group

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.contracts import TrainedWeights

_SECOND = f".lora_B.{ADAPTER}."


def by_factor(group: Group, ratio: float) -> list[Group]:
    """Cut second factors out of a group, to learn at `ratio` times its rate; the group as it is where that is 1.

    Source: Hayou et al. 2024 (LoRA+), section 4; groups as kohya's networks.lora and peft's optimizer cut them.
    """
    second = [pair for pair in group.named_params if _SECOND in pair[0]]
    if ratio == 1 or not second:
        return [group]
    first = [pair for pair in group.named_params if _SECOND not in pair[0]]
    return [
        replace(group, named_params=first),
        replace(group, name=f"{group.name}_plus", named_params=second, lr=group.lr * ratio),
    ]


class NormBound:
    """Keep the Frobenius norm of what each pair adds, alpha / rank x B A, at `largest` or below.

    Of a larger one both factors are scaled by the root of largest / norm. Measured: how many were, and mean and maximum of
    the norms from then on. Source: the meaning and the logs of kohya's --scale_weight_norms.
    """

    def __init__(self, root: nn.Module, largest: float) -> None:
        self.largest = largest
        self._pairs: list[tuple[str, str, float]] = []
        for name, layer in adapted_layers(root).items():
            scaling: Any = layer.scaling
            first, second = (f"{name}.lora_{side}.{ADAPTER}.weight" for side in "AB")
            self._pairs.append((first, second, float(scaling[ADAPTER])))

    @torch.no_grad()
    def __call__(self, weights: TrainedWeights) -> dict[str, Tensor]:
        """Scale down what is too large, on the device: the host waits for nothing, and a factor of 1 changes no bit."""
        norms: list[Tensor | None] = []
        scaled: list[tuple[str, Tensor]] = []
        for first, second, scale in self._pairs:
            own = [name for name in (first, second) if weights.holds(name)]
            if not own:  # both are of another stage: a layer is of one
                norms.append(None)
                continue
            values = [weights.value(name) for name in own]
            norm = product_norm(*map(weights.gathered, own, values)) * scale
            norms.append(norm)
            share = (self.largest / norm.clamp(min=self.largest)).sqrt()
            scaled += [(name, value * share) for name, value in zip(own, values)]
        weights.load(scaled, {})
        # --- those of other stages, too: their ranks have them
        like = next(norm for norm in norms if norm is not None)
        every = weights.summed(torch.stack([like.new_zeros(()) if norm is None else norm for norm in norms]))
        bounded = every.clamp(max=self.largest)
        return {
            f"{METRIC}max_norm/keys_scaled": (every > self.largest).sum().float(),
            f"{METRIC}max_norm/average_key_norm": bounded.mean(),
            f"{METRIC}max_norm/max_key_norm": bounded.max(),
        }


def product_norm(a: Tensor, b: Tensor) -> Tensor:
    """Return the Frobenius norm of B A in fp32, without making it: ||B A||^2 = <B^T B, A A^T>.

    Shapes: a (r, ...), b (out, r) or (out, r, 1, 1); of convolutions too.
    """
    first, second = a.float().flatten(1), b.float().flatten(1)
    return ((second.T @ second) * (first @ first.T)).sum().clamp(min=0).sqrt()
