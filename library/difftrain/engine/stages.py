"""The stages that a rank has of a pipeline, and the schedules that run micro batches through them.

1. `layout`: what stages know of a shape beforehand; the first one finds it out and sends it once.
2. `run`: torch's schedule for that shape and number of micro batches calls each stage, on each micro batch.
3. `run_units`: inputs are made where they enter; tensors go from block to block by name, and with them what the loss needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
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

from difftrain.contracts import Batch, Inputs
from difftrain.diffusion.draws import module_seed

if TYPE_CHECKING:
    from torch import Tensor
    from torch.amp import GradScaler

    from difftrain.config import TrainConfig
    from difftrain.contracts import Chain, Family, Parts
    from difftrain.device import Device
    from difftrain.distributed.groups import Grid
    from difftrain.engine.update import LossTerms

_SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zb": ScheduleInterleavedZeroBubble,
}
_RIDERS = ("timestep", "target", "weight", "mask")  # of Inputs: what the loss needs of them


class StageLayout(NamedTuple):
    """What stages know of a shape: the chain's layout, the riders that there are, and those of further terms."""

    chain: Any
    riders: tuple[str, ...]
    aux: tuple[str, ...]


class Work(NamedTuple):
    """What a schedule is run for. sums: the loss is summed; else the denoiser's output is kept. first: number in its step."""

    batches: Sequence[Batch | Inputs]
    layout: StageLayout
    trains: bool
    sums: bool
    first: int = 0


class Stages:
    """Run micro batches through this rank's stages and the others'. Every rank of a replica makes the same calls.

    position, counts, scaler: of the step, which the engine sets.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        device: Device,
        grid: Grid,
        family: Family,
        parts: Parts,
        chain: Chain,
        runs: Sequence[range],
        terms: LossTerms,
    ) -> None:
        self._training, self._device, self._grid = cfg.training, device, grid
        self._family, self._parts, self._chain, self._runs, self._terms = family, parts, chain, runs, terms
        self.position = 0
        self.counts: Mapping[str, float] = {}
        self.scaler: GradScaler | None = None
        self.modules: list[StageModule] = []
        self._layouts: dict[Any, StageLayout] = {}
        self._schedules: dict[Any, Any] = {}
        self._untried: set[int] = set()  # stages that a new schedule has not run yet
        self._work: Work | None = None
        self._made: dict[int, Tensor] = {}  # by the last stage, by micro batch: sums of the loss, or outputs

    def hold(self, root: nn.Module, run_of: Mapping[str, int]) -> None:
        """Take this rank's stages of a root. run_of: the run of blocks that each weight is of."""
        own = range(self._grid.stage, len(self._runs), self._grid.stages)
        self.modules = [StageModule(self.run_units, root, number, self._runs[number], run_of) for number in own]

    def key(self, batch: Batch) -> Any:
        """Return what decides the shapes of all that goes through the stages; every stage knows it."""
        shapes = [(name, tuple(value.shape)) for name, value in sorted((batch.features | batch.draws).items())]
        masked = batch.loss_mask is not None
        return batch.bucket, len(batch.record_id), tuple(shapes), masked, self._chain.kind(batch)

    def layout(self, key: Any, sample: Batch | Inputs) -> StageLayout:
        """Return what stages know of a shape: the first one finds out, the others are sent it once."""
        if key not in self._layouts:
            box: list[Any] = [None]
            if self._grid.leads:
                with torch.no_grad(), self._device.autocast(self._training.mixed_precision):
                    inputs = self._inputs(sample)
                    chain = self._chain.enter(inputs)[1]
                riders = tuple(name for name in _RIDERS if getattr(inputs, name) is not None)
                box = [_moved(StageLayout(chain, riders, tuple(sorted(inputs.aux_targets))), "cpu")]
            dist.broadcast_object_list(box, group=self._grid.pp_host, group_src=0)
            self._layouts[key] = _moved(box[0], self._device.torch_device)
        return self._layouts[key]

    def _inputs(self, batch: Batch | Inputs) -> Inputs:
        """Encode, noise and weigh a micro batch, where that is not done yet. Called under autocast."""
        if isinstance(batch, Inputs):
            return batch
        with torch.no_grad():
            return self._family.inputs(self._device.to_device(batch), self._parts)

    def run(self, key: Any, work: Work) -> dict[int, Tensor]:
        """Run a schedule; return what the last stage made of each micro batch."""
        count = len(work.batches)
        schedule = self._schedule((key, count, work.trains), count, work.trains)
        index = torch.arange(count)
        args = (index,) if self._grid.leads else ()
        target = {"target": index} if self._grid.ends and work.trains else {}
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
            device, total = self._device.torch_device, len(self._runs)
            self._untried = {module.number for module in self.modules}
            stages = [PipelineStage(m, m.number, total, device, group=self._grid.pp) for m in self.modules]
            kind = self._training.pipeline_schedule
            how = {"loss_fn": (lambda output, _: output.sum()) if trains else None, "scale_grads": False}
            if len(stages) > 1:
                self._schedules[key] = _SCHEDULES[kind if trains else "interleaved"](stages, count, **how)
            else:  # with fewer micro batches than stages there is nothing to alternate
                plain = not trains or count < self._grid.stages
                self._schedules[key] = _SCHEDULES["gpipe" if plain else kind](stages[0], count, **how)
        return self._schedules[key]

    def run_units(self, module: StageModule, received: Sequence[Tensor], number_in_run: int) -> Any:
        """Run one stage on one micro batch: what PipelineStage calls."""
        work, chain, training = self._work, self._chain, torch.is_grad_enabled()
        assert work is not None
        layout = work.layout
        if module.number in self._untried:
            # a schedule first finds out shapes, with memory that nobody has written: places in it would be anywhere
            self._untried.discard(module.number)
            with torch.no_grad():
                for tensor in received[: 0 if module.number == 0 else None]:
                    tensor.zero_()
        if training:
            seed, number = self._training.seed or 0, work.first + number_in_run
            self._device.seed(
                module_seed(seed, self.position, number, self._grid.dp_rank + self._grid.dp_size * module.number)
            )

        # --- what comes in, and the blocks
        with self._device.autocast(self._training.mixed_precision):
            if module.number == 0:
                inputs = self._inputs(work.batches[number_in_run])
                carry, _ = chain.enter(inputs)
                riders = [getattr(inputs, name) for name in layout.riders]
                riders += [inputs.aux_targets[name] for name in layout.aux]
            else:
                names = chain.names(layout.chain, module.units.start)
                arrived = [_Contiguous.apply(x) if x.requires_grad else x for x in received]
                carry, riders = dict(zip(names, arrived)), arrived[len(names) :]
            for number in module.units:
                carry = chain.unit(number, carry, layout.chain)
            if module.number < len(self._runs) - 1:
                names = chain.names(layout.chain, module.units.stop)
                assert set(names) == carry.keys(), f"{sorted(carry)} behind block {module.units.stop}, not {names}"
                return tuple(_sendable(tensor) for tensor in (*(carry[name] for name in names), *riders))
            outputs = tuple(output.float() for output in chain.leave(carry, layout.chain))
        if not work.sums:
            self._made[number_in_run] = outputs[0]
            return outputs[0]

        # --- the loss
        tensors = dict(zip(layout.riders, riders))
        aux = dict(zip(layout.aux, riders[len(layout.riders) :]))
        time, target, weight, mask = (tensors.get(name) for name in _RIDERS)
        assert time is not None and target is not None and weight is not None
        # no loss looks at what entered the first stage
        terms = self._family.loss_sums(outputs, Inputs(target, time, {}, target, weight, mask, aux))
        self._terms.learn(terms)
        vector, batch = self._terms.vector(terms), work.batches[number_in_run]
        if not work.trains:
            self._made[number_in_run] = vector
            return vector
        loss = self._terms.loss(terms, self.counts)
        if isinstance(batch, Batch) and batch.idle:
            loss, vector = loss * 0.0, torch.zeros_like(vector)
        self._made[number_in_run] = vector
        return torch.stack([loss if self.scaler is None else self.scaler.scale(loss)])


# --- A stage of the model


class StageModule(nn.Module):
    """A run of blocks, with what enters or leaves at the ends: the module of a PipelineStage."""

    def __init__(
        self,
        run_units: Callable[[StageModule, Sequence[Tensor], int], Any],
        root: nn.Module,
        number: int,
        units: range,
        run_of: Mapping[str, int],
    ) -> None:
        super().__init__()
        self._run_units, self._run_of = run_units, run_of
        self.root, self.number, self.units = root, number, units

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this run's alone: a rank may have several."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            if self._run_of[name.removeprefix("root.")] == self.number:
                yield name, parameter

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        """Run on the micro batch of a number, (1,) on the host."""
        return self._run_units(self, received, int(index))


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


def _sendable(tensor: Tensor) -> Tensor:
    """Return a tensor that can be sent, and taken out of its graph, as zero-bubble schedules do: no view."""
    return tensor.clone() if tensor._is_view() and tensor.requires_grad else tensor.contiguous()


def _moved(layout: StageLayout, device: Any) -> StageLayout:
    """Bring the tensors of a layout to a device."""
    if not is_dataclass(type(layout.chain)):
        return layout
    values = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), vars(layout.chain))
    return layout._replace(chain=replace(layout.chain, **values))
