"""The pipeline engine: torch.distributed.pipelining over a family's chain of blocks, with data-parallel replicas beside it.

1. The model is cut into runs of blocks (partition.py); each rank keeps its own, under their names in the whole model.
2. The first stage makes inputs and sends what goes from block to block, and with it what the loss needs; the last one
   sums the loss. One schedule of torch for each shape and number of micro batches.
3. Gradients are summed over the replicas; their norm is that of all stages, and so is the word whether to skip.
4. Averages, checkpoints and exports go by name: each rank has those of its stage.

Ranks: stage s of replica d is rank s * dp_size + d, so that neighbours are replicas.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.utils import _pytree as pytree

from difftrain.config.rules.engine import processes_fault
from difftrain.config.schema.names import PIECES
from difftrain.config.spellings.spelling import option
from difftrain.contracts import Batch, ConfigFault, Fault, Group, Inputs, Stats, TensorFile
from difftrain.diffusion.draws import module_seed
from difftrain.distributed.ranks import DEFAULT_TIMEOUT_MIN
from difftrain.engine.base import MakeOptimizer
from difftrain.engine.checkpointing import CheckpointedEngine, check_compatibility, engine_file
from difftrain.engine.gradients import check_gradients, check_zeros, largest_of
from difftrain.engine.master_weights import MasterWeights, norms
from difftrain.engine.optimizer_state import merge_states
from difftrain.engine.partition import STAGES, cut_lines, runs_of
from difftrain.engine.snapshot import OPTIMIZER, WEIGHTS, CheckpointReader, NativeSnapshot
from difftrain.engine.update import TOTAL, AfterBackward, Update
from difftrain.optim import estimate

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.contracts import Chain
    from difftrain.device import Device
    from difftrain.distributed.ranks import Ranks

_SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zb": ScheduleInterleavedZeroBubble,
}
_RIDERS = ("timestep", "target", "weight", "mask")  # of Inputs: what the loss needs of them
_REDUCED = 1 << 23  # elements of gradients that are summed over replicas in one message
Predict = Callable[[Inputs], "Tensor"]


class Layout(NamedTuple):
    """What stages know of a shape: the chain's layout, the riders that there are, and those of further terms."""

    chain: Any
    riders: tuple[str, ...]
    aux: tuple[str, ...]


class _Work(NamedTuple):
    """What a schedule is run for. sums: the loss is summed; else the denoiser's output is kept. micro: numbers of a step."""

    batches: Sequence[Batch | Inputs]
    layout: Layout
    trains: bool
    sums: bool
    first: int = 0


class PipelineEngine(CheckpointedEngine):
    """Cut the model over ranks. Collective: as of any engine; predict takes all ranks of a replica, by `led`."""

    name = "pipeline"

    def __init__(self, cfg: TrainConfig, device: Device, ranks: Ranks) -> None:
        super().__init__(cfg, device, ranks)
        self.stages = cfg.training.pipeline_stages
        if wrong := processes_fault(cfg, ranks.size):
            raise ConfigFault([Fault(option(STAGES), *wrong)])
        self.dp_size = ranks.size // self.stages
        self.stage, self.dp_rank = divmod(ranks.rank, self.dp_size)
        self.leads = self.stage == 0  # it has what enters the pipeline, and draws for its replica
        self._pp, self._pp_host, self._dp = _groups(self.stages, self.dp_size, cfg.training.ddp_timeout_min, ranks.rank)
        self._layouts: dict[Any, Layout] = {}
        self._schedules: dict[Any, Any] = {}
        self._untried: set[int] = set()  # stages that a new schedule has not run yet
        self._counts: Mapping[str, float] = {}
        self._work: _Work | None = None
        self._made: dict[int, Tensor] = {}  # by the last stage, by micro batch: sums of the loss, or outputs
        self._shared_terms = False

    @property
    def _ends(self) -> bool:
        return self.stage == self.stages - 1

    # ------------------------------------------------------------------ building

    def _move_root(self, root: nn.Module) -> nn.Module:
        """Keep this rank's stages of the root alone, and bring them to the device."""
        # --- the whole model, by name: what is stored and exported
        self.chain: Chain = self.family.chain(root)
        self._all_shapes = {name: tuple(value.shape) for name, value in self._state_of(root).items()}
        self._all_trained = [name for name, param in root.named_parameters() if param.requires_grad]
        self._all_groups = self.family.param_groups(root)

        # --- which stage each weight is of
        total = self.stages * PIECES[self.cfg.training.pipeline_schedule]
        self.runs = runs_of(self.cfg, self.chain, root)
        run_of = {number: run for run, numbers in enumerate(self.runs) for number in numbers}
        run_of |= {-1: 0, len(self.chain.units): total - 1}
        stored = [*root.state_dict(), *(name for name, _ in root.named_parameters())]
        self._run_of = {name: run_of[self.chain.owner(name)] for name in dict.fromkeys(stored)}
        trained = {self._run_of[name] % self.stages for name in self._all_trained}
        if idle := sorted(set(range(self.stages)) - trained) if trained else []:
            what = f"stage {idle[0] + 1} of {self.stages} would hold frozen weights alone"
            raise ConfigFault([Fault(option(STAGES), what, "fewer stages, or train more of the model")])

        # --- modules of other stages are given back
        drop(root, {name for name, run in self._run_of.items() if run % self.stages == self.stage})
        if not self.leads:
            self.parts.offloaded |= set(self.parts.frozen)  # encoders run where inputs are made
        own = range(self.stage, total, self.stages)
        self._modules = [StageModule(self, root, number, self.runs[number]) for number in own]
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

    def sentences(self) -> list[str]:
        """Say how the model is cut, and what that costs."""
        return cut_lines(self.cfg, self.runs, self.chain, self._run_of, self._all_shapes)

    # ------------------------------------------------------------------ stepping

    def step(self, micro: list[Batch], counts: dict[str, float]) -> Stats:
        """Make one update from this replica's micro batches, which every rank of it has."""
        self._must_not_be_swapped()
        self._master_weights.position = self.position
        starts = None if self._looked else largest_of(self._master_weights.weights)
        self._counts = counts
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
            dist.all_reduce(flat, group=self._dp)
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
        for key, group in itertools.groupby(numbered, key=lambda item: self._key(item[1])):
            run = list(group)
            for piece in self._pieces([batch for _, batch in run], trains):
                first = run[piece.start][0]
                work = _Work([batch for _, batch in run[piece]], self._layout(key, run[0][1]), trains, True, first)
                made = self._run(key, work)
                vectors += [made[number] for number in sorted(made)]
        if not self._shared_terms:
            self._terms.names = max(self.ranks.gather(self._terms.names), key=len)
            self._shared_terms = bool(self._terms.names)
        if vectors:
            return torch.stack(vectors).sum(0)
        return torch.zeros(len(self._terms.names), device=self.device.torch_device)

    def _pieces(self, micro: Sequence[Batch], trains: bool) -> Iterator[slice]:
        """Cut micro batches into as many as a schedule takes at once: interleaved ones go in rounds of the stages."""
        whole = len(micro)
        if trains and PIECES[self.cfg.training.pipeline_schedule] > 1 and whole > self.stages:
            whole -= whole % self.stages
        if not trains:
            whole = 1
        for begin in range(0, len(micro), whole) if whole else ():
            yield slice(begin, min(begin + whole, len(micro)))

    def _key(self, batch: Batch) -> Any:
        """Return what decides the shapes of all that goes through the stages; every stage knows it."""
        shapes = [(name, tuple(value.shape)) for name, value in sorted((batch.features | batch.draws).items())]
        masked = batch.loss_mask is not None
        return batch.bucket, len(batch.record_id), tuple(shapes), masked, self.chain.kind(batch)

    def _layout(self, key: Any, sample: Batch | Inputs) -> Layout:
        """Return what stages know of a shape: the first one finds out, the others are sent it once."""
        if key not in self._layouts:
            box: list[Any] = [None]
            if self.leads:
                with torch.no_grad(), self.device.autocast(self.cfg.training.mixed_precision):
                    inputs = self._inputs(sample)
                    chain = self.chain.enter(inputs)[1]
                riders = tuple(name for name in _RIDERS if getattr(inputs, name) is not None)
                box = [_moved(Layout(chain, riders, tuple(sorted(inputs.aux_targets))), "cpu")]
            dist.broadcast_object_list(box, group=self._pp_host, group_src=0)
            self._layouts[key] = _moved(box[0], self.device.torch_device)
        return self._layouts[key]

    def _inputs(self, batch: Batch | Inputs) -> Inputs:
        """Encode, noise and weigh a micro batch, where that is not done yet. Called under autocast."""
        if isinstance(batch, Inputs):
            return batch
        with torch.no_grad():
            return self.family.inputs(self.device.to_device(batch), self.parts)

    def _run(self, key: Any, work: _Work) -> dict[int, Tensor]:
        """Run a schedule; return what the last stage made of each micro batch."""
        count = len(work.batches)
        schedule = self._schedule((key, count, work.trains), count, work.trains)
        index = torch.arange(count)
        args = (index,) if self.leads else ()
        target = {"target": index} if self._ends and work.trains else {}
        self._work, self._made = work, {}
        try:
            if work.trains:
                schedule.step(*args, **target, return_outputs=False, index=index)
            else:
                with torch.no_grad():
                    schedule.eval(*args, return_outputs=False, index=index)
        finally:
            self._work = None
        return self._made

    def _schedule(self, key: Any, count: int, trains: bool) -> Any:
        """Return the schedule for a shape and a number of micro batches; buffers are of that shape."""
        if key not in self._schedules:
            device, total = self.device.torch_device, len(self.runs)
            self._untried = {module.number for module in self._modules}
            stages = [PipelineStage(m, m.number, total, device, group=self._pp) for m in self._modules]
            kind = self.cfg.training.pipeline_schedule
            how = {"loss_fn": (lambda output, _: output.sum()) if trains else None, "scale_grads": False}
            if len(stages) > 1:
                self._schedules[key] = _SCHEDULES[kind if trains else "interleaved"](stages, count, **how)
            else:  # with fewer micro batches than stages there is nothing to alternate
                plain = not trains or count < self.stages
                self._schedules[key] = _SCHEDULES["gpipe" if plain else kind](stages[0], count, **how)
        return self._schedules[key]

    def run_units(self, module: StageModule, received: Sequence[Tensor], place: int) -> Any:
        """Run one stage on one micro batch: what PipelineStage calls."""
        work, chain, training = self._work, self.chain, torch.is_grad_enabled()
        assert work is not None
        layout = work.layout
        if module.number in self._untried:
            # a schedule first finds out shapes, with memory that nobody has written: places in it would be anywhere
            self._untried.discard(module.number)
            with torch.no_grad():
                for tensor in received[: 0 if module.number == 0 else None]:
                    tensor.zero_()
        if training:
            seed, number = self.cfg.training.seed or 0, work.first + place
            self.device.seed(module_seed(seed, self.position, number, self.dp_rank + self.dp_size * module.number))

        # --- what comes in, and the blocks
        with self.device.autocast(self.cfg.training.mixed_precision):
            if module.number == 0:
                inputs = self._inputs(work.batches[place])
                carry, _ = chain.enter(inputs)
                riders = [getattr(inputs, name) for name in layout.riders]
                riders += [inputs.aux_targets[name] for name in layout.aux]
            else:
                names = chain.names(layout.chain, module.units.start)
                arrived = [_Contiguous.apply(x) if x.requires_grad else x for x in received]
                carry, riders = dict(zip(names, arrived)), arrived[len(names) :]
            for number in module.units:
                carry = chain.unit(number, carry, layout.chain)
            if module.number < len(self.runs) - 1:
                names = chain.names(layout.chain, module.units.stop)
                assert set(names) == carry.keys(), f"{sorted(carry)} behind block {module.units.stop}, not {names}"
                return tuple(_whole(tensor) for tensor in (*(carry[name] for name in names), *riders))
            outputs = tuple(output.float() for output in chain.leave(carry, layout.chain))
        if not work.sums:
            self._made[place] = outputs[0]
            return outputs[0]

        # --- the loss
        tensors = dict(zip(layout.riders, riders))
        aux = dict(zip(layout.aux, riders[len(layout.riders) :]))
        time, target, weight, mask = (tensors.get(name) for name in _RIDERS)
        assert time is not None and target is not None and weight is not None
        # no loss looks at what entered the first stage
        terms = self.family.loss_sums(outputs, Inputs(target, time, {}, target, weight, mask, aux))
        self._terms.learn(terms)
        vector, batch = self._terms.vector(terms), work.batches[place]
        if not work.trains:
            self._made[place] = vector
            return vector
        loss = self._terms.loss(terms, self._counts)
        if isinstance(batch, Batch) and batch.idle:
            loss, vector = loss * 0.0, torch.zeros_like(vector)
        self._made[place] = vector
        return torch.stack([loss if self._scaler is None else self._scaler.scale(loss)])

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
        dist.all_reduce(sums, group=self._pp)
        return self._terms.sums(sums)

    @torch.no_grad()
    def predict(self, inputs: Inputs) -> Tensor:
        """Call the denoiser once: every rank of the replica calls it, and each gets the output; fp32."""
        shapes = [(name, tuple(value.shape)) for name, value in sorted(inputs.conditions.items())]
        key = ("predict", tuple(inputs.x_t.shape), tuple(inputs.timestep.shape), tuple(shapes))
        with self._evaluating():
            made = self._run(key, _Work([inputs], self._layout(key, inputs), trains=False, sums=False))
        output = made[0].contiguous() if self._ends else torch.empty(inputs.x_t.shape, device=self.device.torch_device)
        dist.broadcast(output, group=self._pp, group_src=self.stages - 1)
        return output

    @contextmanager
    def led(self) -> Iterator[Predict | None]:
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
        dist.broadcast_object_list([about], group=self._pp_host, group_src=0)

    def _receive(self) -> Inputs | None:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, group=self._pp_host, group_src=0)
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
            dist.broadcast_object_list(box, group=self._pp_host, group_src=holder)
            value = value.contiguous() if holder == self.stage else torch.empty(shape, dtype=box[0])
            if value.numel():
                dist.broadcast(value.reshape(-1).view(torch.uint8), group=self._pp_host, group_src=holder)
            yield name, value

    def snapshot(self) -> NativeSnapshot:
        """Copy what this rank has to write: the first replica writes, each rank of it its stage."""
        self._must_not_be_swapped()
        self._snapshots += 1
        snapshots = self._snapshots
        weights = self._own_state()
        names = set(weights) if self.dp_rank == 0 else set()
        kept: dict[str, Tensor] = {}
        states = self._state.parameters(names, kept.__setitem__)
        engine = self._describe(kept.__setitem__) if self.ranks.rank == 0 else None
        chosen = self._master_weights.chosen(names, weights)
        copies = self._buffers.copy((f"{WEIGHTS} {name}", value) for name, value in chosen)
        state_copies = self._buffers.copy((f"{OPTIMIZER} {name}", tensor) for name, tensor in kept.items())
        self.device.synchronise()
        if not names:
            return NativeSnapshot([], engine, lambda: snapshots == self._snapshots)
        number = self.ranks.rank
        tensors = {name: copies[f"{WEIGHTS} {name}"] for name in names}
        state = {name: state_copies[f"{OPTIMIZER} {name}"] for name in kept}
        files = [
            TensorFile(f"{WEIGHTS}-{number:05d}.safetensors", tensors, {}),
            TensorFile(f"{OPTIMIZER}-{number:05d}.safetensors", state, {"states": json.dumps(states)}),
        ]
        return NativeSnapshot(files, engine, lambda: snapshots == self._snapshots)

    def average_file(self, kind: str, averages: Mapping[str, Tensor], about: Mapping[str, str]) -> TensorFile | None:
        """Return what this rank writes of averages: in the first replica those of its stage."""
        if self.dp_rank:
            return None
        return TensorFile(f"{kind}-{self.ranks.rank:05d}.safetensors", averages, about)

    @torch.no_grad()
    def restore(self, path: Path, *, optimizer: bool = True, params: bool = True, schedule_from: int = 0) -> None:
        """Take this stage's part of everything back (see CheckpointedEngine.restore)."""
        self._must_not_be_swapped()
        about = next((header for header in self.ranks.gather(engine_file(path)) if header is not None), None)
        if about is None:
            raise ConfigFault([Fault(option("save.resume"), f"{path} has no engine.json", "give a folder ...-state")])
        weights, stored = (CheckpointReader(path, kind, self.ranks) for kind in (WEIGHTS, OPTIMIZER))
        states = merge_states(stored.metadata)
        own, needed = self._own_state(), states if optimizer else None
        check_compatibility(path, about, weights, needed, self._all_shapes, self._all_trained, self._state.kind)
        for name, tensor in weights.tensors(own.__contains__):
            self._master_weights.take(name, tensor, own[name])
        self._master_weights.taken()
        if optimizer:
            owned = set(self._state.owned)
            tensors = stored.tensors(lambda key: key.startswith("group ") or key.partition("/")[0] in owned)
            groups = about["groups"] if params else [{} for _ in about["groups"]]
            self._state.load(states, groups, tensors)
        self._restore_scaler(about)
        if not (optimizer and params):
            about = {**about, "schedule": {}}
        self._go_to(int(about["position"]), about, schedule_from)


# --- A stage of the model


class StageModule(nn.Module):
    """A run of blocks, with what enters or leaves at the ends: the module of a PipelineStage."""

    def __init__(self, engine: PipelineEngine, root: nn.Module, number: int, units: range) -> None:
        super().__init__()
        self._engine = (engine,)  # not a module, and so no child
        self.root, self.number, self.units = root, number, units

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this run's alone: a rank may have several."""
        run_of = self._engine[0]._run_of
        for name, parameter in super().named_parameters(*args, **kwargs):
            if run_of[name.removeprefix("root.")] == self.number:
                yield name, parameter

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        """Run on the micro batch of a number, (1,) on the host."""
        return self._engine[0].run_units(self, received, int(index))


class Absent(nn.Module):
    """Stand where another rank has a module."""


def drop(module: nn.Module, kept: set[str], prefix: str = "") -> None:
    """Give back all weights of a module but those of these names; names stay as they are."""
    for leaf, child in list(module.named_children()):
        names = {name for name in child.state_dict()} | {name for name, _ in child.named_parameters()}
        here = {f"{prefix}{leaf}.{name}" for name in names}
        if here and not here & kept:
            module.add_module(leaf, Absent())
        elif not here <= kept:
            drop(child, kept, f"{prefix}{leaf}.")
    for table in (module._parameters, module._buffers):
        for leaf in list(table):
            if f"{prefix}{leaf}" not in kept and leaf not in module._non_persistent_buffers_set:
                table[leaf] = None


class _Contiguous(torch.autograd.Function):
    """Pass a tensor on; its gradient leaves laid out in order, as what is sent has to be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.contiguous()


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor that can be sent, and taken out of its graph in place, as zero-bubble schedules do: no view."""
    return tensor.clone() if tensor._is_view() and tensor.requires_grad else tensor.contiguous()


# --- Updates and messages over stages


class AcrossStages(AfterBackward):
    """Clip by the norm over all stages, and skip on all: the norms of all tensors in the order of the whole model."""

    def __init__(self, engine: PipelineEngine) -> None:
        super().__init__(engine._master_weights, engine.optimizer, engine._scaler, engine.cfg.training.max_grad_norm)
        self._group, self._device = engine._pp, engine.device.torch_device
        self._places = {name: place for place, name in enumerate(engine._all_trained)}

    def _norm(self, master_weights: MasterWeights, gradients: Sequence[Tensor], seen: Any) -> Tensor:
        """Return the norm, the same bits as of one process; a loss scaler hears of every stage's overflow."""
        names = [name for name, weight in master_weights.weights.items() if weight.grad is not None]
        each = torch.zeros(len(self._places), device=self._device)
        each[[self._places[name] for name in names]] = torch.stack(norms(gradients))
        dist.all_reduce(each, group=self._group)
        norm = torch.linalg.vector_norm(each)
        if self._scaler is not None:
            for found in self._scaler._per_optimizer_states[id(seen)]["found_inf_per_device"].values():
                found.copy_(torch.isfinite(norm).logical_not())
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


def _moved(layout: Layout, device: Any) -> Layout:
    """Bring the tensors of a layout to a device."""
    chain = layout.chain
    fields = getattr(chain, "__dataclass_fields__", None)
    if fields is not None:
        values = {name: getattr(chain, name) for name in fields}
        chain = type(chain)(**pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values))
    return layout._replace(chain=chain)


def _groups(stages: int, dp_size: int, timeout_min: float | None, rank: int) -> tuple[Any, Any, Any]:
    """Make the groups of every replica's stages, for tensors and on the host, and of every stage's replicas.

    All ranks make all of them, in one order; this rank's are returned.
    """
    timeout = timedelta(minutes=timeout_min or DEFAULT_TIMEOUT_MIN)

    def made(members: list[list[int]], backend: str | None = None) -> Any:
        groups = [dist.new_group(ranks, timeout=timeout, backend=backend) for ranks in members]
        return next(group for group, ranks in zip(groups, members) if rank in ranks)

    pipelines = [[stage * dp_size + replica for stage in range(stages)] for replica in range(dp_size)]
    replicas = [[stage * dp_size + replica for replica in range(dp_size)] for stage in range(stages)]
    return made(pipelines), made(pipelines, "gloo"), made(replicas) if dp_size > 1 else None
