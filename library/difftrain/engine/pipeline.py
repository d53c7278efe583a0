"""The pipeline engine: torch.distributed.pipelining over a family's chain of blocks, with data-parallel replicas beside it.

1. The model is cut into runs of blocks (partition.py); each rank keeps its own, under their names in the whole model.
2. Micro batches go through the stages by one of torch's schedules (stages.py); the last stage sums the loss.
3. Gradients are summed over the replicas; their norm is that of all stages, and so is the word whether to skip.
4. Averages, checkpoints and exports go by name: each rank has those of its stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from difftrain.checkpoint.tensor_files import FlatRange, Shape
from difftrain.config.rules.pipeline import processes_fault
from difftrain.config.schema.names import PIECES
from difftrain.config.spellings.spelling import option
from difftrain.contracts import Batch, ConfigFault, Fault, Group, Inputs
from difftrain.distributed.groups import Grid, RankGroup
from difftrain.distributed.partition import STAGES, Cut
from difftrain.engine.checkpointing import CheckpointedEngine
from difftrain.engine.master_weights import norms, runs
from difftrain.engine.stages import Stages, Work, drop
from difftrain.engine.update import AfterBackward, Update

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.contracts import Chain
    from difftrain.device import Device
    from difftrain.distributed.ranks import Ranks

_REDUCED = 1 << 23  # elements of gradients that are summed over replicas in one message
Predict = Callable[[Inputs], "Tensor"]


class PipelineEngine(CheckpointedEngine):
    """Cut the model over ranks. Collective: as of any engine; predict takes all ranks of a replica, by `drawing`."""

    name, repeats = "pipeline", False

    def __init__(self, cfg: TrainConfig, device: Device, ranks: Ranks) -> None:
        super().__init__(cfg, device, ranks)
        self.stages = cfg.training.pipeline_stages
        if wrong := processes_fault(cfg, ranks.size):
            raise ConfigFault([Fault(option(STAGES), *wrong)])
        self._grid = Grid.open(self.stages, ranks.rank, ranks.size, cfg.training.ddp_timeout_min)
        self.stage, self.dp_rank, self.dp_size = self._grid.stage, self._grid.dp_rank, self._grid.dp_size
        self.leads = self._grid.leads
        self._shared_terms = False

    # ------------------------------------------------------------------ building

    def _move_root(self) -> None:
        """Keep this rank's stages of the root alone, and bring them to the device."""
        # --- the complete model: its groups, and which stage each weight is of
        root = self.root
        self.chain: Chain = self.family.chain(root)
        self._all_groups = self.family.param_groups(root)
        cut = Cut.of(self.cfg, self.chain, root)
        self.runs, self._run_of = cut.runs, cut.run_of
        self.parts.notes += cut.lines(self.cfg)
        trained = {self._run_of[name] % self.stages for name in self._trained_names}
        if idle := sorted(set(range(self.stages)) - trained) if trained else []:
            what = f"stage {idle[0] + 1} of {self.stages} would hold frozen weights alone"
            raise ConfigFault([Fault(option(STAGES), what, "fewer stages, or train more of the model")])

        # --- modules of other stages are given back
        drop(root, {name for name, run in self._run_of.items() if run % self.stages == self.stage})
        if not self.leads:
            self.parts.offloaded |= set(self.parts.frozen)  # encoders run where inputs are made
        self._stages = Stages(
            self.cfg, self.device, self._grid, self.family, self.parts, self.chain, self.runs, self._terms
        )
        self._stages.hold(root, self._run_of)
        root.to(self.device.torch_device)

    def _param_groups(self) -> list[Group]:
        """Return the groups of the complete model with this stage's parameters: as many on every rank."""
        return [
            replace(group, named_params=[pair for pair in group.named_params if pair[0] in self._trained])
            for group in self._all_groups
        ]

    def _make_update(self, groups: list[Group]) -> Update:
        self._master_weights.group, self._master_weights.by_stage = (
            RankGroup(self._grid.pp, self.device.torch_device),
            True,
        )
        return AfterBackward(self._master_weights, self._scaler, self.cfg.training.max_grad_norm, self._norm)

    # ------------------------------------------------------------------ stepping

    def _accumulate(
        self, micro: list[Batch], counts: dict[str, float], sums: list[Tensor], total: Callable[[], Tensor]
    ) -> None:
        """Run this replica's micro batches, which every rank of it has, through the stages; sum gradients over replicas."""
        self._stages.position, self._stages.counts, self._stages.scaler = self.position, counts, self._scaler
        if self._scaler is not None:
            self._scaler.scale(torch.zeros(1, device=self.device.torch_device))  # stages without a loss need its scale
        if self._observer is not None:
            for number, batch in enumerate(micro):
                self._observer.before_forward(number, batch)
        sums.append(self._through(micro, trains=True))
        if self.dp_size > 1:
            self._sum_gradients()

    def _sum_gradients(self) -> None:
        """Sum gradients over the replicas, in messages of fixed content."""
        gradients = self._master_weights.gradients()
        for message in runs(gradients, _REDUCED, torch.numel, lambda gradient: gradient.dtype):
            flat = torch.cat([gradient.reshape(-1) for gradient in message])
            dist.all_reduce(flat, group=self._grid.dp)
            for gradient, piece in zip(message, flat.split([gradient.numel() for gradient in message])):
                gradient.copy_(piece.view_as(gradient))

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the norm over all stages, of the norms of all tensors in the model's order: the bits of one process."""
        numbers = {name: number for number, name in enumerate(self._trained_names)}
        own = [numbers[name] for name, weight in self._master_weights.weights.items() if weight.grad is not None]
        by_tensor = torch.zeros(len(numbers), device=self.device.torch_device)
        by_tensor[own] = torch.stack(norms(gradients))
        dist.all_reduce(by_tensor, group=self._grid.pp)
        return torch.linalg.vector_norm(by_tensor)

    # ------------------------------------------------------------------ micro batches through the stages

    def _through(self, micro: Sequence[Batch], *, trains: bool) -> Tensor:
        """Run micro batches, those of one shape in a row together; return the sums of the loss, zeros before the end.

        Every rank calls it: the names of the terms are what the last stages have seen.
        """
        vectors: list[Tensor] = []
        first = 0
        for key, group in itertools.groupby(micro, key=self._stages.key):
            batches = list(group)
            for run in runs(batches, self._at_once(len(batches)) if trains else 1):
                made = self._stages.run(key, Work(run, self._stages.layout(key, run[0]), trains, True, first))
                vectors += [made[number] for number in sorted(made)]
                first += len(run)
        if not self._shared_terms:
            self._terms.names = max(self.ranks.gather(self._terms.names), key=len)
            self._shared_terms = bool(self._terms.names)
        if vectors:
            return torch.stack(vectors).sum(0)
        return torch.zeros(len(self._terms.names), device=self.device.torch_device)

    def _at_once(self, count: int) -> int:
        """Return how many of so many micro batches a schedule takes at once: interleaved ones go in rounds of the stages."""
        rounds = PIECES[self.cfg.training.pipeline_schedule] > 1 and count > self.stages
        return count - count % self.stages if rounds else count

    # ------------------------------------------------------------------ evaluating

    def _evaluated(self, micro: list[Batch]) -> Tensor | None:
        """Return the sums of the terms: of this replica where this is its last rank, else zeros."""
        with self._evaluating():
            sums = self._through(micro, trains=False)
        return sums if self._terms.names else None

    @torch.no_grad()
    def own_sums(self, micro: list[Batch]) -> dict[str, Tensor]:
        """Return what `evaluate` does of this replica's share alone, on every rank of it."""
        sums = self._evaluated(micro)
        if sums is None:
            return {}
        dist.all_reduce(sums, group=self._grid.pp)
        return self._terms.sums(sums)

    @torch.no_grad()
    def predict(self, inputs: Inputs) -> Tensor:
        """Call the denoiser once: every rank of the replica calls it, and each gets the output; fp32."""
        shapes = [(name, tuple(value.shape)) for name, value in sorted(inputs.conditions.items())]
        key = ("predict", tuple(inputs.x_t.shape), tuple(inputs.timestep.shape), tuple(shapes))
        with self._evaluating():
            work = Work([inputs], self._stages.layout(key, inputs), trains=False, sums=False)
            made = self._stages.run(key, work)
        output = (
            made[0].contiguous() if self._grid.ends else torch.empty(inputs.x_t.shape, device=self.device.torch_device)
        )
        dist.broadcast(output, group=self._grid.pp, group_src=self.stages - 1)
        return output

    @contextmanager
    def drawing(self) -> Iterator[Predict | None]:
        """Let the first rank of a replica call the denoiser; the others answer until it has left, and get None."""
        if not self.leads:
            while (inputs := self._broadcast()) is not None:
                self.predict(inputs)
            yield None
            return
        try:
            yield self._lead
        finally:
            self._broadcast()

    def _lead(self, inputs: Inputs) -> Tensor:
        self._broadcast(inputs)
        return self.predict(inputs)

    def _broadcast(self, inputs: Inputs | None = None) -> Inputs | None:
        """Tell the others the shapes of a call, or that there is none; its tensors go through the stages."""
        box: list[Inputs | None] = [None]
        if inputs is not None:
            x_t, timestep = inputs.x_t.to("meta"), inputs.timestep.to("meta")
            conditions = {name: value.to("meta") for name, value in inputs.conditions.items()}
            box = [Inputs(x_t, timestep, conditions, x_t, timestep)]
        dist.broadcast_object_list(box, group=self._grid.pp_host, group_src=0)
        return box[0]

    # ------------------------------------------------------------------ weights and checkpoints

    def full_weights(self, source: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights by name, on the CPU, as BaseEngine does: each stage of a replica sends its own, one by one."""
        own = super().full_weights(source)  # in the order of the whole model
        for name, shape in self._shapes.items():
            holder = self._run_of[name] % self.stages
            value = torch.empty(0)
            if holder == self.stage:
                mine, value = next(own)
                assert mine == name, f"{mine} comes where {name} is due"
            box: list[Any] = [value.dtype]
            dist.broadcast_object_list(box, group=self._grid.pp_host, group_src=holder)
            value = value.contiguous() if holder == self.stage else torch.empty(shape, dtype=box[0])
            if value.numel():
                dist.broadcast(value.reshape(-1).view(torch.uint8), group=self._grid.pp_host, group_src=holder)
            yield name, value

    def _written(self, weights: Mapping[str, Tensor]) -> set[str]:
        """Choose what this rank writes: the first replica writes, each rank of it its stage."""
        return set(weights) if self.dp_rank == 0 else set()

    def _range_of(self, name: str, shape: Shape) -> FlatRange | None:
        """Return all of a weight of this stage."""
        return FlatRange(0, shape) if self._run_of[name] % self.stages == self.stage else None
