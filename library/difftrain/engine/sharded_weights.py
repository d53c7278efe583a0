"""Weights that are cut over ranks: this rank's rows of every parameter, which is all that optimizer, averages and files see."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from difftrain.contracts import Extent, Group
from difftrain.engine.checkpoint_reader import FlatRange, Shape
from difftrain.engine.gradients import largest_of
from difftrain.engine.master_weights import MasterWeights
from difftrain.optim import inner
from difftrain.optim.muon import Muon, is_matrix

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from difftrain.distributed.ranks import Ranks


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor: the very memory, no copy; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


class ShardGroup:
    """The ranks that share one copy of the model. writes: of several such groups, this one writes checkpoints."""

    def __init__(self, group: Any, device: torch.device, *, writes: bool) -> None:
        self.group, self.device, self.writes = group, device, writes
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over the group, also what lies on the host, for which a device's group has no way."""
        moved = tensor.to(self.device)
        dist.all_reduce(moved, op, group=self.group)
        return moved.to(tensor.device)


class ParameterShard:
    """This rank's rows of a parameter: as many as torch.chunk gives it along the first dimension, or none.

    shape: of the whole. local_shape: of the rows. offset: of their first element in the whole, flat.
    """

    def __init__(self, parameter: Tensor, group: ShardGroup) -> None:
        self._group = group
        self.shape, self.local_shape = tuple(parameter.shape), tuple(local(parameter).shape)
        self._rows = math.ceil(self.shape[0] / group.size)  # of a rank; the last ones have fewer
        self.numel, self._row = math.prod(self.local_shape), math.prod(self.shape[1:])
        self.offset = min(group.rank * self._rows, self.shape[0]) * self._row

    @property
    def extent(self) -> Extent:
        """Return where the rows lie in the whole."""
        return Extent(self.shape, self.offset)

    @property
    def range(self) -> FlatRange:
        """Return the same as a reader of checkpoints takes it."""
        return FlatRange(self.offset, self.local_shape)

    @property
    def is_written(self) -> bool:
        """Tell whether this rank writes its rows into checkpoints: where it has some, and no other rank writes them."""
        return self._group.writes and self.numel > 0

    @property
    def leads(self) -> bool:
        """Tell whether this rank writes what belongs to the parameter as one, such as how often it was updated."""
        return self.is_written and self.offset == 0

    @property
    def is_complete(self) -> bool:
        """Tell whether the rows are all there are."""
        return self.local_shape == self.shape

    def full_tensor(self, rows: Tensor) -> Tensor:
        """Put every rank's rows together, on the device. Collective. Shapes: local_shape -> shape."""
        own = rows.new_zeros((self._rows, *self.shape[1:]), device=self._group.device)
        own[: len(rows)] = rows
        padded = own.new_empty((self._rows * self._group.size, *self.shape[1:]))
        dist.all_gather_single(padded, own, group=self._group.group)
        return padded[: self.shape[0]]

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a whole tensor. Shapes: shape -> local_shape."""
        begin = self.offset // self._row if self._row else 0
        return tensor[begin : begin + self.local_shape[0]]


class ShardedWeights(MasterWeights):
    """Let an optimizer update this rank's rows, which are plain tensors; what is known of all takes an exchange.

    model: the trained parameters as the model has them, whose gradients FSDP2 reduces. shards: of all parameters.
    """

    def __init__(
        self, model: Mapping[str, nn.Parameter], shards: Mapping[str, ParameterShard], group: ShardGroup
    ) -> None:
        super().__init__({name: nn.Parameter(local(parameter)) for name, parameter in model.items()})
        self._model, self._shards, self._group = dict(model), shards, group

    def groups(self, groups: Iterable[Group]) -> list[Group]:
        """Return parameter groups of this rank's rows."""
        names = {id(parameter): name for name, parameter in self._model.items()}
        made = []
        for group in groups:
            # which weights are matrices is asked of whole ones: a rank may have one row of them, or none
            matrices = group.matrices
            if matrices is None:
                matrices = frozenset(name for name, weight in group.named_params if is_matrix(name, weight))
            rows = [(name, self.weights[names[id(weight)]]) for name, weight in group.named_params]
            made.append(replace(group, named_params=rows, matrices=matrices))
        return made

    def attach(self, optimizer: Optimizer, ranks: Ranks) -> None:
        """Let Muon put its matrices together, which it cannot orthogonalise in pieces."""
        worker = inner(optimizer)
        if isinstance(worker, Muon):
            worker.shards = {id(weight): self._shards[name] for name, weight in self.weights.items()}

    # ------------------------------------------------------------------ gradients

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Hand the rows of reduced gradients to what is updated."""
        for name, parameter in self._model.items():
            if parameter.grad is not None:
                self.weights[name].grad = local(parameter.grad)
                parameter.grad = None

    def gradients(self, names: Iterable[str] | None = None) -> list[Tensor]:
        """Return this rank's rows of the gradients."""
        self.take_gradients()
        return super().gradients(names)

    def missing_gradients(self) -> list[str]:
        """Name the weights without a gradient."""
        self.take_gradients()
        return super().missing_gradients()

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of all gradients: of the norms of the ranks' rows."""
        norms_by_rank = torch.zeros(self._group.size, device=gradients[0].device)
        norms_by_rank[self._group.rank] = super().norm(gradients)
        return torch.linalg.vector_norm(self._group.all_reduce(norms_by_rank))

    def largest_gradients(self) -> dict[str, Tensor]:
        """Return the largest magnitude of each gradient over all ranks."""
        self.take_gradients()
        return self._largest({name: weight.grad for name, weight in self.weights.items()})

    def largest_weights(self) -> dict[str, Tensor]:
        """Return the largest magnitude of each weight over all ranks."""
        return self._largest(self.weights)

    def _largest(self, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        own, device = largest_of(tensors), next(iter(self.weights.values())).device
        zero = torch.zeros((), device=device)
        names = [name for name, tensor in tensors.items() if tensor is not None]  # the same ones on every rank
        values = torch.stack([own.get(name, zero) for name in names])
        return dict(zip(names, self._group.all_reduce(values, dist.ReduceOp.MAX)))

    def share_overflow(self, infinities: Sequence[Tensor]) -> None:
        """Let all ranks know of an infinity in one rank's rows, so that their loss scales stay one."""
        for value in infinities:
            value.copy_(self._group.all_reduce(value, dist.ReduceOp.MAX))

    # ------------------------------------------------------------------ weights of the whole model, also frozen ones

    def range_of(self, name: str, shape: Shape) -> FlatRange:
        """Return which elements of a weight this rank holds."""
        return self._shards[name].range if name in self._shards else FlatRange(0, shape)

    @torch.no_grad()
    def take(self, name: str, value: Tensor, region: Tensor) -> None:
        """Take the rows of a weight from a checkpoint."""
        local(region).copy_(value)
