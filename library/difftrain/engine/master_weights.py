"""What an optimizer updates, which rank holds its state, and how that becomes the weights a model computes with."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from difftrain.contracts import Group
from difftrain.optim import inner

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from difftrain.distributed.groups import RankGroup
    from difftrain.distributed.ranks import Ranks


class ShardedState:
    """Know which rank holds the optimizer state of each parameter. Collective: making it, and broadcast."""

    def __init__(self, own: list[str], ranks: Ranks) -> None:
        self._rank = ranks.rank
        self._owner = {name: rank for rank, names in enumerate(ranks.gather(own)) for name in names}

    def owns(self, name: str) -> bool:
        """Tell whether this rank updates a parameter."""
        return self._owner[name] == self._rank

    @torch.no_grad()
    def broadcast(self, names: list[str], tensors_of: Callable[[str], list[Tensor]]) -> None:
        """Send the tensors of some parameters from their owners to all: one message an owner, bytes as they are."""
        for rank in sorted({self._owner[name] for name in names}):
            tensors = [tensor for name in names if self._owner[name] == rank for tensor in tensors_of(name)]
            # bytes, so that one message carries several dtypes
            message = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
            dist.broadcast(message, src=rank)
            if rank == self._rank:
                continue
            sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
            for tensor, piece in zip(tensors, message.split(sizes)):
                tensor.copy_(_aligned(piece).view(tensor.dtype).view(tensor.shape))


def _aligned(piece: Tensor) -> Tensor:
    """Return bytes that may be read as wider numbers."""
    return piece if piece.storage_offset() % 8 == 0 else piece.clone()


# Packages whose optimizers update each parameter from its own gradient and state alone. Others (Prodigy, D-Adaptation,
# schedule-free) measure something over all gradients, or count updates in their groups: they are stepped whole.
_APART = frozenset({"torch", "bitsandbytes", "transformers", "lion_pytorch"})  # one of ours says it itself


def steps_apart(optimizer: Optimizer) -> bool:
    """Tell whether stepping on parts, one after another, is stepping on the whole."""
    kind = type(inner(optimizer))
    return kind.__module__.partition(".")[0] in _APART or getattr(kind, "steps_apart", False)


@contextmanager
def only(optimizer: Optimizer, parameters: Container[int]) -> Iterator[Optimizer]:
    """Let an optimizer see the parameters with these ids alone, with its state and its settings of now.

    What it would write into its groups is lost: for optimizers that step apart.
    """
    every_group = optimizer.param_groups
    chosen = ((group, [param for param in group["params"] if id(param) in parameters]) for group in every_group)
    # copies of the groups: a rate that a schedule sets counts, what the step writes does not
    optimizer.param_groups = [{**group, "params": params} for group, params in chosen if params]
    try:
        yield optimizer
    finally:
        optimizer.param_groups = every_group


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
Step = Callable[["Optimizer"], None]  # steps an optimizer that sees some of its parameters


class MasterWeights:
    """The weights themselves are what the optimizer updates, in whatever dtype they are."""

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self.weights = dict(weights)
        self.updated: dict[str, nn.Parameter] = self.weights  # what the optimizer is given
        self.parts = [list(self.weights)]  # what is stepped at once
        self.position = 0  # updates done or skipped: the engine's
        self.group: RankGroup | None = None  # the ranks that have the other weights, or rows of these
        self.by_stage = False  # of that group no other rank has a weight that is here

    def groups(self, groups: Iterable[Group]) -> list[Group]:
        """Return parameter groups of what is updated, for groups of weights."""
        return [replace(g, named_params=[(name, self.updated[name]) for name, _ in g.named_params]) for g in groups]

    def attach(self, optimizer: Optimizer, ranks: Ranks) -> None:
        """Take the optimizer, once it is made."""
        self.optimizer = optimizer

    def for_scaler(self) -> Any:
        """Return what a loss scaler takes for the optimizer: it looks for gradients in its groups."""
        return self.optimizer

    # ------------------------------------------------------------------ gradients

    def gradients(self, names: Iterable[str] | None = None) -> list[Tensor]:
        """Return the gradients that are there."""
        chosen = self.weights.values() if names is None else (self.weights[name] for name in names)
        return [weight.grad for weight in chosen if weight.grad is not None]

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm of all gradients, of half ones in fp32: fp16 would overflow, bf16 keep two digits."""
        if gradients[0].dtype == torch.float32:
            return get_total_norm(gradients)
        return torch.linalg.vector_norm(torch.stack(norms(gradients)))

    def missing_gradients(self) -> list[str]:
        """Name the weights without a gradient."""
        return [name for name, weight in self.weights.items() if weight.grad is None]

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale all gradients down where their norm is above max_norm."""
        clip_grads_with_norm_(self.weights.values(), max_norm, norm)

    def multiply(self, name: str, factor: Tensor) -> None:
        """Scale one gradient before it is used."""
        gradient = self.weights[name].grad
        assert gradient is not None
        gradient.mul_(factor)

    def clear(self, names: Iterable[str] | None = None) -> None:
        """Free gradients: all of them where no names are given."""
        for name in self.weights if names is None else names:
            self.weights[name].grad = None

    # ------------------------------------------------------------------ updates

    def step(self, step: Step) -> None:
        """Update everything."""
        step(self.optimizer)

    def step_part(self, names: list[str], step: Step) -> None:
        """Update some, and free their gradients. The optimizer must be one that steps apart."""
        with only(inner(self.optimizer), {id(self.weights[name]) for name in names}) as worker:
            step(worker)
        for name in names:
            self.weights[name].grad = None

    # ------------------------------------------------------------------ values

    def value(self, name: str) -> Tensor:
        """Return the exact value: the very tensor where there is one."""
        return self.weights[name].detach()

    @torch.no_grad()
    def put(self, name: str, value: Tensor) -> None:
        """Take a value, of any dtype and from anywhere."""
        self.weights[name].copy_(value)

    def holds(self, name: str) -> bool:
        """Tell whether a weight is here, or a part of it."""
        return name in self.weights

    def summed(self, values: Tensor) -> Tensor:
        """Add figures of single weights up over the ranks of which each has some of them."""
        return self.group.all_reduce(values) if self.by_stage and self.group is not None else values

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every exact value; one that is made is made when asked for."""
        return ((name, self.value(name)) for name in self.weights)

    @contextmanager
    def swapped(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the model compute with other weights for a while."""
        kept = {name: self.weights[name].detach().clone() for name in weights}
        try:
            self._copy(weights)
            yield
        finally:
            self._copy(kept)

    @torch.no_grad()
    def _copy(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in weights.items():
            self.weights[name].copy_(tensor)

    # ------------------------------------------------------------------ weights of the whole model, also frozen ones

    def gathered(self, name: str, tensor: Tensor) -> Tensor:
        """Return all of a weight; tensor: what this rank has of it, or all, in place or a copy. Every rank calls it."""
        return tensor

    def chosen(self, names: set[str], model: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield what a checkpoint holds of some weights, which may be others on every rank. To be iterated to the end."""
        for name in sorted(names):
            yield name, self.value(name) if name in self.weights else model[name]

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]], model: Mapping[str, Tensor]) -> None:
        """Take weights, or what this rank has of them, from a checkpoint. model: what it has in place."""
        for name, value in tensors:
            if name in self.weights:
                self.put(name, value)
            else:
                model[name].copy_(value)


class HalfPrecisionWeights(MasterWeights):
    """The model computes with half weights; the optimizer sees an fp32 parameter for each, filled where it is stepped.

    Between steps such a parameter keeps its shape and gives its memory back, save where it is the master itself. A way of
    keeping says how a half is made (_to_half), and where there are no masters, how it is undone (_to_fp32).
    """

    keeps_fp32 = False  # the optimizer's parameters are masters
    _to_fp32: Callable[[str, Tensor], None]  # name, memory
    _to_half: Callable[[str, Tensor], None]  # name, value: also what is kept beside the half
    # so many at once, whose fp32 values and gradients are in memory: 0.5 GB of both
    PART = 1 << 26

    @torch.no_grad()
    def __init__(self, weights: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__(weights)
        self.updated = {}
        self._factors: dict[str, Tensor] = {}
        self._sharded_state: ShardedState | None = None
        for name, weight in self.weights.items():
            value = weight.detach().float()
            weight.data = torch.empty_like(value, dtype=dtype)
            weight.grad = None
            self.updated[name] = nn.Parameter(value.clone())
            self._round(name)
        self._grouped = SimpleNamespace(param_groups=[{"params": list(self.weights.values())}])

    def attach(self, optimizer: Optimizer, ranks: Ranks) -> None:
        """Cut into parts what the optimizer can step apart; find out who owns which state."""
        super().attach(optimizer, ranks)
        if steps_apart(optimizer):
            self.parts = list(runs(self.weights, self.PART, lambda name: self.weights[name].numel()))
        if inner(optimizer) is not optimizer:
            owned = {id(param) for group in inner(optimizer).param_groups for param in group["params"]}
            self._sharded_state = ShardedState(
                [name for name, weight in self.updated.items() if id(weight) in owned], ranks
            )

    def for_scaler(self) -> Any:
        """Return groups of the weights: gradients are theirs, not those of what the optimizer holds."""
        return self._grouped

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale gradients down when they are taken, in fp32."""
        # half gradients scaled in their dtype would lose digits or underflow
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's own
        self._factors = dict.fromkeys(self.weights, factor)

    def multiply(self, name: str, factor: Tensor) -> None:
        """Scale one gradient when it is taken, in fp32."""
        self._factors[name] = factor

    def clear(self, names: Iterable[str] | None = None) -> None:
        """Free gradients: all of them where no names are given."""
        super().clear(names)
        self._factors.clear()

    def step(self, step: Step) -> None:
        """Update part by part."""
        for names in self.parts:
            self.step_part(names, step)

    @torch.no_grad()
    def step_part(self, names: list[str], step: Step) -> None:
        """Make fp32 of weights and gradients, step on them, and make halves again; all ranks come out equal."""
        own = names if self._sharded_state is None else [name for name in names if self._sharded_state.owns(name)]
        for name in own:
            self._fill(name)
            self._take_gradient(name)
        if len(names) == len(self.weights):
            step(self._worker())
        elif own:
            with only(self._worker(), {id(self.updated[name]) for name in own}) as worker:
                step(worker)
        for name in own:
            self.updated[name].grad = None
            self._round(name)
        if self._sharded_state is not None:
            self._sharded_state.broadcast(names, self._kept)
            for name in names:
                if self.keeps_fp32 and not self._sharded_state.owns(name):
                    self._round(name)
        for name in names:
            self.weights[name].grad = None
            self._factors.pop(name, None)

    def _worker(self) -> Optimizer:
        """Return the optimizer that holds the state, set as the one that schedules see."""
        worker = inner(self.optimizer)
        if worker is not self.optimizer:
            for group, seen in zip(worker.param_groups, self.optimizer.param_groups):
                group |= {key: value for key, value in seen.items() if key != "params"}
        return worker

    def _take_gradient(self, name: str) -> None:
        gradient = self.weights[name].grad
        if gradient is None:
            return
        taken = gradient.float()
        if name in self._factors:
            taken.mul_(self._factors[name])
        self.weights[name].grad = None  # its memory may serve the next one
        self.updated[name].grad = taken

    def value(self, name: str) -> Tensor:
        """Return the fp32 value: a copy that nobody else holds, or the master."""
        value = self._fill(name)
        if self.keeps_fp32:
            return value
        value = value.clone()
        self._release(name)
        return value

    @torch.no_grad()
    def put(self, name: str, value: Tensor) -> None:
        """Take a value, of any dtype and from anywhere."""
        self._fill(name).copy_(value)
        self._round(name)

    def _fill(self, name: str) -> Tensor:
        """Return the optimizer's parameter with the fp32 value in it."""
        parameter = self.updated[name].detach()
        if not self.keeps_fp32:
            parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
            self._to_fp32(name, parameter)
        return parameter

    def _round(self, name: str) -> None:
        """Make the half weight of the optimizer's parameter, which gives its memory back."""
        self._to_half(name, self.updated[name].detach())
        if not self.keeps_fp32:
            self._release(name)

    def _release(self, name: str) -> None:
        self.updated[name].untyped_storage().resize_(0)

    def _kept(self, name: str) -> list[Tensor]:
        """Return the tensors that make a value, on the rank that updates it and on the others."""
        return [(self.updated if self.keeps_fp32 else self.weights)[name].detach()]


T = TypeVar("T")


def runs(
    items: Iterable[T], most: int, size: Callable[[T], int] = lambda _: 1, kind: Callable[[T], Any] = lambda _: None
) -> Iterator[list[T]]:
    """Cut a row of items of some sizes into runs of one kind, of at most so much each, but of at least one item."""
    run: list[T] = []
    filled = 0
    for item in items:
        if run and (filled + size(item) > most or kind(item) != kind(run[-1])):
            yield run
            run, filled = [], 0
        run.append(item)
        filled += size(item)
    if run:
        yield run


def norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each gradient, in fp32."""
    return list(torch._foreach_norm(list(gradients), 2, dtype=torch.float32))
