"""Checkpoints of an engine: what each rank writes, and how everything is taken back, on any number of ranks.

1. `snapshot` copies what this rank writes: its share of what all have, or its pieces (snapshot.py writes it).
2. `restore` reads the files wherever they lie (checkpoint_reader.py) and names every way in which they do not fit.
3. Weights, optimizer state by name (optimizer_state.py), loss scale and schedule are taken back.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.checkpoint.compatibility import ENGINE_FILE, FORMAT, check_compatibility, engine_file
from difftrain.checkpoint.tensor_files import CheckpointReader, FlatRange, Shape, pieces_metadata
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Extent, Fault, TensorFile
from difftrain.device import quantised
from difftrain.engine.base import BaseEngine
from difftrain.engine.half_precision import precision_of
from difftrain.engine.snapshot import OPTIMIZER, WEIGHTS, HostBuffers, NativeSnapshot, shares
from difftrain.optim import inner
from difftrain.optim.state import merge_states

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.device import Device
    from difftrain.distributed.ranks import Ranks

log = logging.getLogger("difftrain")


@dataclass(frozen=True)
class CheckpointShare:
    """What one rank writes into a checkpoint, not copied yet. pieces: names of both that are pieces, and where each lies.

    states: of parameters by name, as JSON, whose tensors are in `state_tensors`.
    """

    weights: Iterable[tuple[str, Tensor]]
    states: dict[str, Any]
    state_tensors: dict[str, Tensor]
    pieces: dict[str, Extent] = field(default_factory=dict)


class CheckpointedEngine(BaseEngine):
    """Save and restore what BaseEngine trains. Collective: restore, and where ranks hold pieces snapshot."""

    def __init__(self, cfg: TrainConfig, device: Device, ranks: Ranks) -> None:
        super().__init__(cfg, device, ranks)
        self._snapshots = 0
        self._buffers = HostBuffers()

    def snapshot(self) -> NativeSnapshot:
        """Copy what this rank has to write."""
        self._must_not_be_swapped()
        self._snapshots += 1
        snapshots = self._snapshots

        # --- copies, in memory of their own
        share = self._share()
        engine = deepcopy(self._describe(share.state_tensors.__setitem__)) if self.ranks.rank == 0 else None
        copies = {
            kind: self._buffers.copy(tensors, kind)
            for kind, tensors in ((WEIGHTS, share.weights), (OPTIMIZER, share.state_tensors.items()))
        }
        self.device.synchronise()

        # --- as files
        files = []
        for kind, tensors in copies.items():
            about = pieces_metadata({name: share.pieces[name] for name in share.pieces.keys() & tensors.keys()})
            if kind == OPTIMIZER:
                about |= {"states": json.dumps(dict(sorted(share.states.items())))}
            if tensors or (kind == OPTIMIZER and share.states):
                files.append(TensorFile(f"{kind}-{self.ranks.rank:05d}.safetensors", tensors, about))
        return NativeSnapshot(files, engine, lambda: snapshots == self._snapshots)

    def _share(self) -> CheckpointShare:
        """Choose what this rank writes."""
        weights = self._own_state()
        names, sharded = self._written(weights), inner(self.optimizer) is not self.optimizer
        kept: dict[str, Tensor] = {}
        states = self._state.parameters(self._state.owned if sharded else names, kept.__setitem__)
        return CheckpointShare(self._master_weights.chosen(names, weights), states, kept)

    def _written(self, weights: Mapping[str, Tensor]) -> set[str]:
        """Choose weights that this rank writes, with their states: they are shared out over the first machine's ranks."""
        sizes = {name: math.prod(self._shapes[name]) for name in self._parameters & weights.keys()}
        is_writer = self.ranks.rank == self.ranks.local_rank  # on the first machine
        names = set(shares(sizes, self.ranks.local_size)[self.ranks.local_rank]) if is_writer else set()
        if self.ranks.rank == 0:  # running statistics differ between ranks; rank 0's are the ones that hold
            names |= weights.keys() - self._parameters
        return names

    def average_file(self, kind: str, averages: Mapping[str, Tensor], about: Mapping[str, str]) -> TensorFile | None:
        """Return what this rank writes of averages, which lie as the trained weights do."""
        tensors, pieces = self._rows(averages)
        if not tensors:
            return None
        return TensorFile(f"{kind}-{self.ranks.rank:05d}.safetensors", tensors, {**about, **pieces_metadata(pieces)})

    def _rows(self, tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], dict[str, Extent]]:
        """Return what this rank writes of tensors that lie as its weights do, and which of it are pieces."""
        first = self.dp_rank == 0 and (self._token_share is None or self.leads)
        return tensors if first else {}, {}

    def reserve_snapshot(self) -> Callable[[], None]:
        """Take the memory of snapshots before the first one; return what touches it, as another thread may. As `snapshot`."""
        with self._buffers.reserving():
            self.snapshot()
        return self._buffers.touch

    def _describe(self, keep: Callable[[str, Tensor], None]) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "engine": self.name,
            "position": self.position,
            "ranks": self.dp_size,
            "precision": precision_of(self.cfg.training),
            "optimizer": self._state.kind,
            "groups": self._state.groups(keep),
            "lrs": [float(group["lr"]) for group in self.optimizer.param_groups],
            "schedule": self._schedule_state.describe(),
            "scaler": self._scaler.state_dict() if self._scaler is not None else None,
            "torch": torch.__version__,
        }

    @torch.no_grad()
    def restore(self, path: Path, *, optimizer: bool = True, params: bool = True, schedule_from: int = 0) -> None:
        """Take everything back from a checkpoint folder. Raises ConfigFault, changing nothing, where it does not fit.

        optimizer: its state too, else it begins anew. params: with it what it changed in its own groups, and where a
        schedule without a formula was. schedule_from: the position at which the schedule began.
        """
        self._must_not_be_swapped()

        # --- read what it is, and compare it with this model and this optimizer
        about = next((header for header in self.ranks.gather(engine_file(path)) if header is not None), None)
        if about is None:
            raise ConfigFault([Fault(option("save.resume"), f"{path} has no {ENGINE_FILE}", "give a folder ...-state")])
        weights, stored = (CheckpointReader(path, kind, self.ranks) for kind in (WEIGHTS, OPTIMIZER))
        states = merge_states(stored.metadata)
        needed = states if optimizer else None
        check_compatibility(path, about, weights, needed, self._shapes, self._trained_names, self._state.kind)

        # --- weights, then the optimizer's state and groups
        self._master_weights.load(weights.ranges(self._range_of), self._own_state())
        quantised.refresh(self.root)
        if optimizer:
            groups = about["groups"] if params else [{} for _ in about["groups"]]
            self._state.load(states, groups, self._state_tensors(stored))

        # --- loss scale and schedule
        self._restore_scaler(about)
        if not (optimizer and params):
            about = {**about, "schedule": {}}
        self._go_to(int(about["position"]), about, schedule_from)

    def _range_of(self, name: str, shape: Shape) -> FlatRange | None:
        """Return which elements of a weight this rank takes from a checkpoint; None: it is another's."""
        return FlatRange(0, shape)

    def _state_tensors(self, stored: CheckpointReader) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of this rank's states, each cut as its weight is, and those of groups."""
        owned = set(self._state.owned)

        def wanted(key: str, shape: Shape) -> FlatRange | None:
            name = key.partition("/")[0]
            if key.startswith("group "):
                return FlatRange(0, shape)
            if name not in owned:
                return None
            return self._range_of(name, shape) if shape == self._shapes[name] else FlatRange(0, shape)

        return stored.ranges(wanted)

    def _restore_scaler(self, about: dict[str, Any]) -> None:
        if self._scaler is not None and about["scaler"] is not None:
            self._scaler.load_state_dict(about["scaler"])
        was, now = about["precision"], precision_of(self.cfg.training)
        if was != now and self.is_logger:
            log.warning("the checkpoint was trained in mixed precision %s, this run in %s", was, now)

    def _go_to(self, position: int, about: dict[str, Any], schedule_from: int) -> None:
        """Bring the schedule to a position, and say where it gives other rates than the checkpoint's."""
        self._schedule_state.go_to(position - schedule_from, about.get("schedule", {}), about["lrs"])
        self.position = position
        for group, before in zip(self.optimizer.param_groups, about["lrs"]):
            if float(group["lr"]) != before and self.is_logger:
                name = group.get("name", "all")
                log.warning("learning rate of %s is %g, the checkpoint's was %g", name, float(group["lr"]), before)
