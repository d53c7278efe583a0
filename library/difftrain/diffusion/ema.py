"""Moving averages of the trained weights, in fp32, over whatever (name, tensor) pairs a rank owns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

_PART = 1 << 26


class Average:
    """Hold averaged weights, which start from the first ones; what is taken in goes to all at once, with no host wait."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.weights = {name: _fp32(tensor).clone(memory_format=torch.contiguous_format) for name, tensor in named}

    @torch.no_grad()
    def blend(self, named: Iterable[tuple[str, Tensor]], share: float) -> None:
        """Move by a share of the way to other weights; the same names in the same order as at the start.

        Half weights are made wide a part at a time.
        """
        given = 0
        for part in _parts(named):
            given += len(part)
            averages = [self.weights[name] for name, _ in part]
            torch._foreach_lerp_(averages, [_fp32(tensor) for _, tensor in part], share)
        if given != len(self.weights):
            raise ValueError(f"the average holds {len(self.weights)} tensors, but {given} were given")

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
        self.updates = 0

    @property
    def start_share(self) -> float:
        """Return how much of it is still what it began with."""
        return self.decay**self.updates

    def update(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Take in the weights after an update."""
        self.updates += 1
        self.blend(named, 1.0 - self.decay)


def _parts(named: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Cut into runs of about _PART elements."""
    part: list[tuple[str, Tensor]] = []
    held = 0
    for name, tensor in named:
        part.append((name, tensor))
        held += tensor.numel()
        if held >= _PART:
            yield part
            part, held = [], 0
    if part:
        yield part


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32)
