"""Weights that are cut over ranks: this rank's rows of every parameter, which is all that optimizer, averages and files see."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from difftrain.contracts import Extent, Group
from difftrain.engine.master_weights import MasterWeights
from difftrain.optim import inner
from difftrain.optim.muon import Muon, is_matrix

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from difftrain.distributed.groups import RankGroup
    from difftrain.distributed.ranks import Ranks


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor: the very memory, no copy; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


class ParameterShard:
    """This rank's rows of a parameter: as many as torch.chunk gives it along the first dimension, or none.

    shape: of all of it. local_shape: of the rows. extent: where they lie in it. writes: of several groups that each have
    all rows, this one writes checkpoints.
    """

    def __init__(self, parameter: Tensor, group: RankGroup, *, writes: bool) -> None:
        self._group = group
        self.shape, self.local_shape = tuple(parameter.shape), tuple(local(parameter).shape)
        self._rows = math.ceil(self.shape[0] / group.size)  # of a rank; the last ones have fewer
        self._first = min(group.rank * self._rows, self.shape[0])
        self.extent = Extent(self.shape, self._first * math.prod(self.shape[1:]))

        # what is this rank's to write: rows, where there are some, and with the first of them what counts once
        self.is_written = writes and math.prod(self.local_shape) > 0
        self.leads = self.is_written and self._first == 0
        self.is_complete = self.local_shape == self.shape

    def full_tensor(self, rows: Tensor) -> Tensor:
        """Put every rank's rows together, on the device. Collective. Shapes: local_shape -> shape."""
        own = rows.new_zeros((self._rows, *self.shape[1:]), device=self._group.device)
        own[: len(rows)] = rows
        padded = own.new_empty((self._rows * self._group.size, *self.shape[1:]))
        dist.all_gather_single(padded, own, group=self._group.group)
        return padded[: self.shape[0]]

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a complete tensor. Shapes: shape -> local_shape."""
        return tensor[self._first : self._first + self.local_shape[0]]


class ShardedWeights(MasterWeights):
    """Let an optimizer update this rank's rows, which are plain tensors; what is known of all takes an exchange.

    model: the trained parameters as the model has them, whose gradients FSDP2 reduces. shards: of all parameters.
    """

    def __init__(
        self, model: Mapping[str, nn.Parameter], shards: Mapping[str, ParameterShard], group: RankGroup
    ) -> None:
        super().__init__({name: nn.Parameter(local(parameter)) for name, parameter in model.items()})
        self._model, self._shards, self.group = dict(model), shards, group

    def groups(self, groups: Iterable[Group]) -> list[Group]:
        """Return parameter groups of this rank's rows."""

        # which weights are matrices is asked of complete ones: a rank may have one row of them, or none
        def matrices(group: Group) -> frozenset[str]:
            return frozenset(name for name, weight in group.named_params if is_matrix(name, weight))

        return super().groups(g if g.matrices is not None else replace(g, matrices=matrices(g)) for g in groups)

    def attach(self, optimizer: Optimizer, ranks: Ranks) -> None:
        """Let Muon put its matrices together, which it cannot orthogonalise in pieces."""
        super().attach(optimizer, ranks)
        worker = inner(optimizer)
        if isinstance(worker, Muon):
            worker.shards = {id(weight): self._shards[name] for name, weight in self.weights.items()}

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Hand the rows of reduced gradients to what is updated."""
        for name, parameter in self._model.items():
            if parameter.grad is not None:
                self.weights[name].grad = local(parameter.grad)
                parameter.grad = None

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of all gradients: of the norms of the ranks' rows."""
        assert self.group is not None
        return self.group.norm(super().norm(gradients), gradients[0].device)

    def gathered(self, name: str, tensor: Tensor) -> Tensor:
        """Put the rows of a weight together."""
        return self._shards[name].full_tensor(tensor) if name in self._shards else tensor
