"""Moving averages of the trained weights, in fp32, over whatever (name, tensor) pairs a rank owns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class Average:
    """Hold averaged weights, which start from the first ones; what is taken in goes to all at once, with no host wait."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.weights = {name: _fp32(tensor).clone(memory_format=torch.contiguous_format) for name, tensor in named}

    @torch.no_grad()
    def blend(self, named: Iterable[tuple[str, Tensor]], share: float) -> None:
        """Move by a share of the way to other weights; the same names in the same order as at the start."""
        averages, weights = [], []
        for name, tensor in named:
            averages.append(self.weights[name])
            weights.append(_fp32(tensor))
        if len(averages) != len(self.weights):
            raise ValueError(f"the average holds {len(self.weights)} tensors, but {len(averages)} were given")
        if averages:
            torch._foreach_lerp_(averages, weights, share)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by name: the very tensors, to be copied before the next update."""
        return dict(self.weights)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take averages back, bit by bit. Raises KeyError or ValueError where names or shapes differ."""
        missing, unknown = self.weights.keys() - state.keys(), state.keys() - self.weights.keys()
        if missing or unknown:
            raise KeyError(f"average: missing {sorted(missing)[:5]}, unknown {sorted(unknown)[:5]}")
        for name, average in self.weights.items():
            if average.shape != state[name].shape:
                raise ValueError(f"average of {name}: shape {tuple(state[name].shape)}, not {tuple(average.shape)}")
            average.copy_(state[name])


class Ema(Average):
    """Average weights as ema = decay ema + (1 - decay) weights, once per optimizer update.

    There is no warm-up: the average starts from the first weights, and a short run wants a smaller decay.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(f"the decay of an average lies between 0 and 1, got {decay}")
        super().__init__(named)
        self.decay = decay

    def update(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take in the weights after an update."""
        self.blend(named, 1.0 - self.decay)


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32)
