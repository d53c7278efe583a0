"""What an engine is: wrapping, precision, scaling, optimizer, schedule and groups. It never names a family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from difftrain.contracts.family import Family, Group, Inputs, Parts
from difftrain.contracts.records import Batch

if TYPE_CHECKING:
    from torch import Tensor


class Extent(NamedTuple):
    """Place of a shard in the whole tensor: the global shape and the offset of its first flat element."""

    shape: tuple[int, ...]
    offset: int


@dataclass
class Stats:
    """What a step leaves behind, as device tensors: nothing here has synchronised the host.

    sums: this step's GLOBAL loss sums by term, already divided by the global count ("loss" is their total, to which
    those named METRIC... do not belong).
    grad_norm: before clipping, unscaled, global. skipped: 1.0 where the update was not applied. lrs: by group.
    adapted_lr: the optimizer's own estimate of the learning rate, which the group's rates multiply; None without one.
    """

    sums: dict[str, Tensor]
    grad_norm: Tensor
    skipped: Tensor
    lrs: dict[str, float] = field(default_factory=dict)
    adapted_lr: float | Tensor | None = None


class Snapshot(Protocol):
    """One rank's part of a checkpoint, in memory of its own: training may go on while it is written."""

    def write(self, directory: Path) -> list[Path]: ...


@dataclass(frozen=True)
class TensorFile:
    """Tensors and texts that make one file."""

    name: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


class StepObserver(Protocol):
    """Look at a step from inside, on one rank, without changing a bit of it.

    number: of the micro batch, from 0. terms: sums of the loss. gradients: of parameters by name, behind the last micro
    batch and before they are unscaled and clipped; scale: what the loss was multiplied by.
    """

    def before_forward(self, number: int, batch: Batch) -> None: ...
    def after_forward(self, inputs: Inputs, terms: dict[str, Tensor]) -> None: ...
    def after_backward(self, gradients: Iterator[tuple[str, Tensor]], scale: float) -> None: ...


class Engine(Protocol):
    """Run steps of any family."""

    dp_rank: int
    dp_size: int
    is_logger: bool
    all_forward: bool  # no rank holds the weights whole: every forward takes all ranks
    leads: bool  # whether this rank draws for its replica, see `drawing`

    def faults(self) -> list[str]: ...
    def build(
        self,
        family: Family,
        parts: Parts,
        make_optimizer: Callable[[list[Group]], Any],
        make_schedule: Callable[[Any], Any],
        warm: list[Batch],
    ) -> None: ...
    def step(self, micro: list[Batch], counts: dict[str, float]) -> Stats: ...
    def observe(self, observer: StepObserver | None) -> None: ...  # of every step from the next one on; None: of none
    def repeat(
        self,
        number: int,
        batch: Batch,
        counts: dict[str, float],
        observer: StepObserver,
        *,
        position: int,
        skipped: int = 0,
    ) -> bool: ...  # one micro batch once more, on this rank alone; skipped: updates from then to now
    def evaluate(self, micro: list[Batch]) -> dict[str, Tensor]: ...
    def own_sums(self, micro: list[Batch]) -> dict[str, Tensor]: ...  # of this rank's share alone; collective, too
    def predict(self, inputs: Inputs) -> Tensor: ...
    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]: ...  # of the whole model, whoever holds it
    def shards(self) -> Iterator[tuple[str, Tensor, Extent]]: ...

    # a replica's ranks enter together; in it modules of the root may be called. Who leads gets what calls the denoiser, or
    # None: the root itself can be called. Ranks that do not lead answer its calls until it has left
    def drawing(self) -> AbstractContextManager[Callable[[Inputs], Tensor] | None]: ...

    # collective where no rank holds the weights whole, as evaluate is
    def swapped(self, weights: dict[str, Tensor]) -> AbstractContextManager[None]: ...
    def averaged_weights(
        self,
    ) -> AbstractContextManager[None]: ...  # an optimizer's own averages in place, where it has some
    def full_weights(self, source: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]: ...
    def average_file(
        self, kind: str, averages: Mapping[str, Tensor], about: Mapping[str, str]
    ) -> TensorFile | None: ...  # this rank's part of averages of the trained weights
    def snapshot(self) -> Snapshot: ...
    def reserve_snapshot(self) -> Callable[[], None]: ...  # its memory, ahead of the first; what touches it is returned
    def restore(
        self, path: Path, *, optimizer: bool = True, params: bool = True, schedule_from: int = 0
    ) -> None: ...  # optimizer: its state too; params: and what it changed in its groups; schedule_from: a position
