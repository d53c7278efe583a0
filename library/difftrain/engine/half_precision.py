"""The ways in which the fp32 value of a half weight is kept between updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from difftrain.diffusion.rounding import by_chance, join, nearest, split
from difftrain.engine.master_weights import DTYPES, HalfPrecisionWeights, MasterWeights

if TYPE_CHECKING:
    from difftrain.config.schema.sections import TrainingSection


def weights_kept(section: TrainingSection) -> str:
    """Return what is kept of trained weights between updates: fp32, kahan, stochastic or none."""
    return section.master_weights or {None: "fp32", "bf16": "kahan", "fp16": "none"}[section.full_precision]


def precision_of(section: TrainingSection) -> str:
    """Say in which precision a run trains: fp32 is called no, as its flag does."""
    if section.full_precision is None:
        return section.mixed_precision
    return (
        f"{section.full_precision} with weights in {section.full_precision} (kept in addition: {weights_kept(section)})"
    )


def make_master_weights(
    root: nn.Module, trained: Mapping[str, nn.Parameter], section: TrainingSection
) -> MasterWeights:
    """Make what the optimizer will update; in full half precision the weights of root become half ones, in place."""
    if section.full_precision is None:
        return MasterWeights(trained)
    dtype = DTYPES[section.full_precision]
    kept = weights_kept(section)
    for parameter in root.parameters():  # frozen ones, and all of them where nothing is kept
        if (kept == "none" or not parameter.requires_grad) and parameter.dtype == torch.float32:
            parameter.data = parameter.detach().to(dtype)
    if kept == "none":
        return MasterWeights(trained)
    if kept == "stochastic":
        return StochasticWeights(trained, dtype, section.seed or 0)
    return {"fp32": Fp32Masters, "kahan": KahanWeights}[kept](trained, dtype)


class Fp32Masters(HalfPrecisionWeights):
    """Keep fp32 masters: the optimizer's parameters are them."""

    keeps_fp32 = True

    def _to_half(self, name: str, value: Tensor) -> None:
        nearest(value, self.weights[name].detach())


class KahanWeights(HalfPrecisionWeights):
    """Keep the 16 bits that bf16 lacks (Kahan's compensation, exact): updates are those of fp32 masters, bit by bit."""

    def __init__(self, weights: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        self._low: dict[str, Tensor] = {}
        super().__init__(weights, dtype)

    def _to_fp32(self, name: str, memory: Tensor) -> None:
        join(self.weights[name].detach(), self._low[name], memory)

    def _to_half(self, name: str, value: Tensor) -> None:
        if name not in self._low:
            self._low[name] = torch.empty_like(value, dtype=torch.int16)
        split(value, self.weights[name].detach(), self._low[name])

    def _kept(self, name: str) -> list[Tensor]:
        return [*super()._kept(name), self._low[name]]


class StochasticWeights(HalfPrecisionWeights):
    """Keep nothing: an update rounds to one of two neighbours by chance, so that small ones count in the mean.

    The chance is a function of (seed, update, parameter, element); a value that bf16 holds stays as it is.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], dtype: torch.dtype, seed: int) -> None:
        self.seed = seed
        for weight in weights.values():  # the first rounding is no update: begin with the nearest
            weight.data = nearest(weight.detach().float(), torch.empty_like(weight, dtype=dtype))
        super().__init__(weights, dtype)

    def _to_fp32(self, name: str, memory: Tensor) -> None:
        memory.copy_(self.weights[name].detach())

    def _to_half(self, name: str, value: Tensor) -> None:
        by_chance(value, self.weights[name].detach(), self.seed, self.position, name)
