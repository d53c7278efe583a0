"""The pipeline engine: torch.distributed.pipelining over a family's chain of blocks, with data-parallel replicas beside it.

1. The model is cut into runs of blocks (partition.py); each rank keeps its own, under their names in the whole model.
2. Micro batches go through the stages by one of torch's schedules (stages.py); the last stage sums the loss.
3. Gradients are summed over the replicas; their norm is that of all stages, and so is the word whether to skip.
4. Averages, checkpoints and exports go by name: each rank has those of its stage.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from difftrain.config.rules.pipeline import processes_fault
from difftrain.config.schema.names import PIECES
from difftrain.config.spellings.spelling import option
from difftrain.contracts import Batch, ConfigFault, Fault, Group, Inputs, Stats, TensorFile
from difftrain.engine.base import MakeOptimizer
from difftrain.engine.checkpoint_reader import FlatRange, Shape
from difftrain.engine.checkpointing import CheckpointedEngine, CheckpointShare
from difftrain.engine.gradients import check_gradients, check_zeros, largest_of
from difftrain.engine.master_weights import MasterWeights, norms
from difftrain.engine.partition import STAGES, Cut
from difftrain.engine.stages import Grid, Stages, Work, drop
from difftrain.engine.update import TOTAL, AfterBackward, Update, overflow_flags
from difftrain.optim import estimate

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

    name = "pipeline"

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

    def _move_root(self, root: nn.Module) -> nn.Module:
        """Keep this rank's stages of the root alone, and bring them to the device."""
        # --- the whole model, by name: what is stored and exported
        self.chain: Chain = self.family.chain(root)
        self._all_shapes = {name: tuple(value.shape) for name, value in self._state_of(root).items()}
        self._all_trained = [name for name, param in root.named_parameters() if param.requires_grad]
        self._all_groups = self.family.param_groups(root)

        # --- which stage each weight is of
        cut = Cut.of(self.cfg, self.chain, root)
        self.runs, self._run_of = cut.runs, cut.run_of
        self.parts.notes += cut.lines(self.cfg)
        trained = {self._run_of[name] % self.stages for name in self._all_trained}
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
        return root.to(self.device.torch_device)

    def _state_of(self, root: nn.Module) -> dict[str, Tensor]:
        base = self.parts.base
        return {name: value for name, value in root.state_dict().items() if name not in base}

    def _param_groups(self) -> list[Group]:
        """Return the groups of the whole model with this stage's parameters: as many on every rank."""
        own = set(self._trained)
        return [
            Group(g.name, [pair for pair in g.named_params if pair[0] in own], g.lr, g.weight_decay, g.matrices)
            for g in self._all_groups
        ]

    def _assemble(self, groups: list[Group], make_optimizer: MakeOptimizer, warm: list[Batch]) -> Any:
        return self._optimizer_for(groups, make_optimizer)

    def _make_update(self, groups: list[Group]) -> Update:
        return AcrossStages(self)

    # ------------------------------------------------------------------ stepping

    def step(self, micro: list[Batch], counts: dict[str, float]) -> Stats:
        """Make one update from this replica's micro batches, which every rank of it has."""
        self._must_not_be_swapped()
        self._master_weights.position = self.position
        starts = None if self._looked else largest_of(self._master_weights.weights)
        self._stages.position, self._stages.counts, self._stages.scaler = self.position, counts, self._scaler
        if self._scaler is not None:
            self._scaler.scale(torch.zeros(1, device=self.device.torch_device))  # stages without a loss need its scale

        # --- forward and backward: runs of micro batches of one shape through their schedule
        if self._observer is not None:
            for number, batch in enumerate(micro):
                self._observer.before_forward(number, batch)
        sums = self._through(micro, trains=True)
        means = functools.cache(lambda: self._terms.means(self.ranks.sum_(sums), counts))

        # --- gradients of all replicas
        if self.position == 0:
            missing = self.ranks.gather(self._update.missing_gradients())
            check_gradients(list(dict.fromkeys(itertools.chain(*missing))))
        self._sum_gradients()
        if self._observer is not None:
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            self._observer.after_backward(self._gradients(), scale)
        if starts is not None:
            self._looked = True
            self._look(starts, means()[TOTAL])

        # --- update, with the rates of this step
        lrs = {group.get("name", str(i)): float(group["lr"]) for i, group in enumerate(self.optimizer.param_groups)}
        adapted_lr = estimate(self.optimizer)
        done = self._update.finish(lambda: means()[TOTAL])
        self.schedule.step()
        self.position += 1
        return Stats(means(), done.grad_norm, done.skipped, lrs, adapted_lr)

    def _look(self, starts: Mapping[str, Tensor], loss: Tensor) -> None:
        """Look at what the first backward of the session shows, of all stages together: all ranks come to one word."""

        def read(tensors: Mapping[str, Tensor]) -> dict[str, float]:
            values = torch.stack([v.float() for v in tensors.values()]).tolist() if tensors else []
            return dict(zip(tensors, values, strict=True))

        largest: dict[str, Tensor] = {}
        weights: dict[str, Tensor] = {}
        for grads, begun in self.ranks.gather((read(self._update.largest_gradients()), read(starts))):
            largest |= {name: torch.tensor(value) for name, value in grads.items()}
            weights |= {name: torch.tensor(value) for name, value in begun.items()}
        check_zeros(largest, weights, loss.cpu(), self.parts.silent, speaks=self.is_logger)

    def _sum_gradients(self) -> None:
        """Sum gradients over the replicas, in messages of fixed content."""
        if self.dp_size == 1:
            return
        gradients = [weight.grad for weight in self._master_weights.weights.values() if weight.grad is not None]
        for message in _messages(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in message])
            dist.all_reduce(flat, group=self._grid.dp)
            for gradient, piece in zip(message, flat.split([gradient.numel() for gradient in message])):
                gradient.copy_(piece.view_as(gradient))

    def repeat(self, *_: Any, **__: Any) -> bool:
        """Say no: a forward pass takes all ranks of a replica."""
        return False

    # ------------------------------------------------------------------ micro batches through the stages

    def _through(self, micro: Sequence[Batch], *, trains: bool) -> Tensor:
        """Run micro batches, those of one shape in a row together; return the sums of the loss, zeros before the end.

        Every rank calls it: the names of the terms are what the last stages have seen.
        """
        numbered = list(enumerate(micro))
        vectors: list[Tensor] = []
        for key, group in itertools.groupby(numbered, key=lambda item: self._stages.key(item[1])):
            run = list(group)
            for piece in self._pieces([batch for _, batch in run], trains):
                first = run[piece.start][0]
                layout = self._stages.layout(key, run[0][1])
                made = self._stages.run(key, Work([batch for _, batch in run[piece]], layout, trains, True, first))
                vectors += [made[number] for number in sorted(made)]
        if not self._shared_terms:
            self._terms.names = max(self.ranks.gather(self._terms.names), key=len)
            self._shared_terms = bool(self._terms.names)
        if vectors:
            return torch.stack(vectors).sum(0)
        return torch.zeros(len(self._terms.names), device=self.device.torch_device)

    def _pieces(self, micro: Sequence[Batch], trains: bool) -> Iterator[slice]:
        """Cut micro batches into as many as a schedule takes at once: interleaved ones go in rounds of the stages."""
        count = len(micro) if trains else 1
        if PIECES[self.cfg.training.pipeline_schedule] > 1 and count > self.stages:
            count -= count % self.stages
        for begin in range(0, len(micro), count):
            yield slice(begin, min(begin + count, len(micro)))

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
            while (inputs := self._receive()) is not None:
                self.predict(inputs)
            yield None
            return
        try:
            yield self._lead
        finally:
            self._send(None)

    def _lead(self, inputs: Inputs) -> Tensor:
        self._send(inputs)
        return self.predict(inputs)

    def _send(self, inputs: Inputs | None) -> None:
        """Tell the others the shapes of a call: its tensors go through the stages."""
        about = None
        if inputs is not None:
            like = {"x_t": inputs.x_t, "timestep": inputs.timestep, **inputs.conditions}
            about = {name: (tuple(value.shape), value.dtype) for name, value in like.items()}
        dist.broadcast_object_list([about], group=self._grid.pp_host, group_src=0)

    def _receive(self) -> Inputs | None:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, group=self._grid.pp_host, group_src=0)
        if box[0] is None:
            return None
        made = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in box[0].items()}
        x_t, timestep = made.pop("x_t"), made.pop("timestep")
        return Inputs(x_t, timestep, made, x_t, timestep)

    # ------------------------------------------------------------------ weights and checkpoints

    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all that is trained, of every stage."""
        return {name: self._all_shapes[name] for name in self._all_trained}

    def full_weights(self, source: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights by name, on the CPU, as BaseEngine does: each stage of a replica sends its own, one by one."""
        own = super().full_weights(source)  # in the order of the whole model
        for name, shape in self._all_shapes.items():
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

    def _share(self) -> CheckpointShare:
        """Choose what this rank writes: the first replica writes, each rank of it its stage."""
        own = self._own_state()
        names = set(own) if self.dp_rank == 0 else set()
        kept: dict[str, Tensor] = {}
        states = self._state.parameters(names, kept.__setitem__)
        return CheckpointShare(self._master_weights.chosen(names, own), states, kept)

    def average_file(self, kind: str, averages: Mapping[str, Tensor], about: Mapping[str, str]) -> TensorFile | None:
        """Return what this rank writes of averages: in the first replica those of its stage."""
        if self.dp_rank:
            return None
        return TensorFile(f"{kind}-{self.ranks.rank:05d}.safetensors", averages, about)

    def _stored_shapes(self) -> tuple[Mapping[str, Shape], Iterable[str]]:
        return self._all_shapes, self._all_trained

    def _range_of(self, name: str, shape: Shape) -> FlatRange | None:
        """Return all of a weight of this stage."""
        return FlatRange(0, shape) if self._run_of[name] % self.stages == self.stage else None


class AcrossStages(AfterBackward):
    """Clip by the norm over all stages, and skip on all: the norms of all tensors in the order of the whole model."""

    def __init__(self, engine: PipelineEngine) -> None:
        super().__init__(engine._master_weights, engine.optimizer, engine._scaler, engine.cfg.training.max_grad_norm)
        self._group, self._device = engine._grid.pp, engine.device.torch_device
        self._numbers = {name: number for number, name in enumerate(engine._all_trained)}

    def _norm(self, master_weights: MasterWeights, gradients: Sequence[Tensor], seen: Any) -> Tensor:
        """Return the norm, the same bits as of one process; a loss scaler hears of every stage's overflow."""
        names = [name for name, weight in master_weights.weights.items() if weight.grad is not None]
        by_tensor = torch.zeros(len(self._numbers), device=self._device)
        by_tensor[[self._numbers[name] for name in names]] = torch.stack(norms(gradients))
        dist.all_reduce(by_tensor, group=self._group)
        norm = torch.linalg.vector_norm(by_tensor)
        if self._scaler is not None:
            for overflow in overflow_flags(self._scaler, seen):
                overflow.copy_(torch.isfinite(norm).logical_not())
        return norm


def _messages(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Cut gradients into messages of one dtype and about so many elements."""
    message: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if message and (size + gradient.numel() > _REDUCED or gradient.dtype != message[0].dtype):
            yield message
            message, size = [], 0
        message.append(gradient)
        size += gradient.numel()
    if message:
        yield message
