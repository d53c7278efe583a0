"""The fsdp engine: FSDP2 cuts every weight, gradient and state over the ranks, and puts a block together when it runs.

The model's parameters are DTensors, and nothing outside this file and sharded_weights.py sees them: the optimizer,
averages and checkpoints see this rank's rows as plain tensors. Gradients are summed, never averaged. Collective, because
every forward is: step, evaluate, own_sums, predict, drawing, full_weights, swapped where the model then runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from difftrain.checkpoint.tensor_files import FlatRange, Shape
from difftrain.config.rules.pipeline import undivided
from difftrain.config.spellings.spelling import option
from difftrain.contracts import Batch, Extent, Group, Stats
from difftrain.distributed.groups import RankGroup
from difftrain.engine import ddp
from difftrain.engine.base import MakeOptimizer
from difftrain.engine.checkpointing import CheckpointedEngine, CheckpointShare
from difftrain.engine.master_weights import DTYPES, MasterWeights
from difftrain.engine.sharded_weights import ParameterShard, ShardedWeights, local

if TYPE_CHECKING:
    from torch import Tensor


_REPLICATE, _SHARD = "replicate", "shard"


class FsdpEngine(CheckpointedEngine):
    """Shard over all ranks, or over groups of them that each hold one copy of the model (hybrid)."""

    name, all_forward, repeats = "fsdp", True, False

    # ------------------------------------------------------------------ building

    def faults(self) -> list[str]:
        """Say what is asked and cannot be done; touches no device."""
        problems = super().faults()
        size = self._shard_size
        if self.ranks.size % size:
            groups = f"groups of {option('fsdp.shard_size')}={size}"
            problems.append(f"{undivided(self.ranks.size, groups)}: give a divisor of {self.ranks.size}")
        if self.cfg.fsdp.cpu_offload and self.device.module is None:
            problems.append(
                f"{option('fsdp.cpu_offload', True)} has no effect on cpu: the weights are on the host already"
            )
        return problems

    @property
    def _shard_size(self) -> int:
        """Return how many ranks share one copy."""
        section = self.cfg.fsdp
        if section.shard_size is not None:
            return section.shard_size
        return self.ranks.local_size if section.shard == "hybrid" else self.ranks.size

    def _move_root(self) -> None:
        """Bring this rank's rows of each block to the device, block after block, then the rest."""
        ddp.one_process_group(self.device)
        self._mesh = self._make_mesh()
        self._group = RankGroup(self._mesh.get_group(_SHARD), self.device.torch_device)
        root, section = self.root, self.cfg.fsdp
        ddp.make_contiguous(root)

        # --- blocks, inner ones first, then what is left
        how: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": self._precision(),
            "offload_policy": CPUOffloadPolicy() if section.cpu_offload else OffloadPolicy(),
        }
        for block in reversed(self.family.repeated(self.parts)):
            fully_shard(block, reshard_after_forward=section.reshard_after_forward == "always", **how)
        fully_shard(root, **how)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                # the loss is divided by the global count, so gradients are summed; there are devices without averages
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        # a module that is called by itself before the root (drawing) would else be taken for the root
        root._get_fsdp_state()._lazy_init()  # type: ignore[operator,union-attr]
        self._buffer_versions = {
            f"{prefix}.{name}": buffer._version
            for prefix, module in root.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
        }
        # of what a model returns nothing is changed in place
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)

    def _make_mesh(self) -> DeviceMesh:
        kind, size = self.device.torch_device.type, self._shard_size
        if size == self.ranks.size:
            return init_device_mesh(kind, (size,), mesh_dim_names=(_SHARD,))
        return init_device_mesh(kind, (self.ranks.size // size, size), mesh_dim_names=(_REPLICATE, _SHARD))

    def _precision(self) -> MixedPrecisionPolicy:
        """Gather half weights where the model computes with such; masters and sums are fp32.

        Autocast alone is no nearer to one device's losses (both within 4e-4 over eight steps of tiny families, as far as
        bf16 itself is from fp32). It would gather fp32, twice the bytes, and keep its half copies of all weights until
        the backward: nothing of the model would be sharded then.
        """
        half = DTYPES.get(self.cfg.training.mixed_precision)
        # inputs stay as autocast wants them
        return MixedPrecisionPolicy(half, None if half is None else torch.float32, cast_forward_inputs=False)

    def _make_master_weights(self) -> MasterWeights:
        writes = self._mesh.ndim == 1 or self._mesh.get_local_rank(_REPLICATE) == 0
        self._shards = {n: ParameterShard(p, self._group, writes=writes) for n, p in self.root.named_parameters()}
        self._sharded = ShardedWeights(self._trained, self._shards, self._group)
        self._trained = self._sharded.weights
        return self._sharded

    def _assemble(self, groups: list[Group], make_optimizer: MakeOptimizer, warm: list[Batch]) -> Any:
        self._spare = [ddp.as_evaluated(batch, self.family.features) for batch in warm]
        if self._group.size == 1:
            self.parts.notes.append("fsdp: one process holds all of the model, nothing is sharded")
        return self._optimizer_for(groups, make_optimizer)

    # ------------------------------------------------------------------ stepping

    def step(self, micro: list[Batch], counts: dict[str, float]) -> Stats:
        """Make one update; running statistics are the first rank's, as with DistributedDataParallel."""
        stats = super().step(micro, counts)
        for prefix, module in self.root.named_modules():
            own = {f"{prefix}.{name}": buffer for name, buffer in module.named_buffers(recurse=False)}
            # a forward that counts has written the others too, which no version shows; so on every rank alike
            if any(buffer._version != self._buffer_versions[name] for name, buffer in own.items()):
                for name, buffer in own.items():
                    if self.dp_size > 1:
                        dist.broadcast(buffer, src=0)
                    self._buffer_versions[name] = buffer._version
        return stats

    @contextmanager
    def _unsynchronised(self) -> Iterator[None]:
        """Keep whole gradients until the last micro batch, or where each one is reduced, at least within a copy alone."""
        root: Any = self.root
        if self.cfg.fsdp.reduce == "each":
            root.set_requires_all_reduce(False)
        else:
            root.set_requires_gradient_sync(False)
            root.set_is_last_backward(False)
        try:
            yield
        finally:
            root.set_requires_all_reduce(True)
            root.set_requires_gradient_sync(True)
            root.set_is_last_backward(True)

    def _accumulate(self, *args: Any) -> None:
        """Run micro batches forward and backward; gradients then are those of this rank's rows."""
        super()._accumulate(*args)
        self._sharded.take_gradients()

    # ------------------------------------------------------------------ evaluating

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with super()._evaluating():
            try:
                yield
            finally:
                self._reshard()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let modules of the root be called by themselves, by every rank alike: what is no block's is put together."""
        root: Any = self.root
        root.unshard()
        try:
            yield None
        finally:
            self._reshard()

    def _reshard(self) -> None:
        """Free whole weights: a forward without a backward leaves some."""
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # ------------------------------------------------------------------ weights

    def shards(self) -> Iterator[tuple[str, Tensor, Extent]]:
        """Yield this rank's rows of the trained weights, fp32: the very tensors."""
        for name, value in self._sharded.values():
            yield name, value, self._shards[name].extent

    def _own_state(self) -> dict[str, Tensor]:
        return {name: local(tensor) for name, tensor in super()._own_state().items()}

    # ------------------------------------------------------------------ checkpoints

    def _share(self) -> CheckpointShare:
        """Choose this rank's rows of everything: nothing is gathered."""
        own = self._own_state()
        rows, pieces = self._rows({name: tensor for name, tensor in own.items() if name in self._shards})
        if self.ranks.rank == 0:  # running statistics, and constants
            rows |= {name: tensor for name, tensor in own.items() if name not in self._shards}

        # state that is cut as its weight is, and what counts once for a parameter
        tensors: dict[str, Tensor] = {}
        states = self._state.parameters(self._state.owned, tensors.__setitem__)
        kept: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            shard = self._shards[key.partition("/")[0]]
            if tuple(tensor.shape) == shard.local_shape:
                cut, places = self._rows({key: tensor}, shard)
                kept |= cut
                pieces |= places
            elif shard.leads:
                kept[key] = tensor
        led = {name: state for name, state in states.items() if self._shards[name].leads}
        return CheckpointShare(rows.items(), led, kept, pieces)

    def _rows(
        self, tensors: Mapping[str, Tensor], shard: ParameterShard | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Extent]]:
        """Return what this rank writes of tensors that are cut as weights are, or as one is; pieces are flat."""
        rows: dict[str, Tensor] = {}
        pieces: dict[str, Extent] = {}
        for name, tensor in tensors.items():
            of = shard or self._shards[name]
            if of.is_written:
                rows[name] = tensor if of.is_complete else tensor.reshape(-1)
                if not of.is_complete:
                    pieces[name] = of.extent
        return rows, pieces

    def _range_of(self, name: str, shape: Shape) -> FlatRange | None:
        """Return this rank's rows of a weight."""
        shard = self._shards.get(name)
        return super()._range_of(name, shape) if shard is None else FlatRange(shard.extent.offset, shard.local_shape)
