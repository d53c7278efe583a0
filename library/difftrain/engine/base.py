"""What engines share whose ranks run the same model side by side: the step, evaluation, weights, checkpoints."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.config.datasets import has_buckets
from difftrain.contracts import METRIC, Batch, ConfigFault, Extent, Family, Fault, Group, Inputs, Parts, Stats
from difftrain.device import fp8
from difftrain.device.offload import offload_checkpoints
from difftrain.diffusion.keys import module_seed
from difftrain.engine import compiling
from difftrain.engine.fits import FORMAT, check_fits, engine_file
from difftrain.engine.halves import make_masters, precision_of
from difftrain.engine.place import SchedulePlace
from difftrain.engine.shelf import Shelf
from difftrain.engine.snapshot import ENGINE_FILE, OPTIMIZER, WEIGHTS, NativeSnapshot, TensorFile, shares
from difftrain.engine.state import NamedState, State, merge_states
from difftrain.engine.tensors import HostBuffers
from difftrain.engine.update import AfterBackward, Update
from difftrain.optim import averages, estimate, inner

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.config import TrainConfig
    from difftrain.device import Device
    from difftrain.distributed.ranks import Ranks
    from difftrain.engine.masters import Masters

log = logging.getLogger("difftrain")
TOTAL = "loss"
COUNT = "samples"
MakeOptimizer = Callable[[list[Group]], Any]


class BaseEngine:
    """Own precision, scaler, optimizer and schedule. Collective: build, step, evaluate, restore.

    An engine says how the model is wrapped and the optimizer made, and where gradients, updates and state differ, what
    stands in for Masters, Update and NamedState.
    """

    name = ""

    def __init__(self, cfg: TrainConfig, device: Device, ranks: Ranks) -> None:
        self.cfg, self.device, self.ranks = cfg, device, ranks
        self.dp_rank, self.dp_size, self.is_logger = ranks.rank, ranks.size, ranks.is_logger
        self.position = 0  # updates done or skipped
        self._terms: list[str] = []
        self._swapped = False
        self._snapshots = 0
        self._buffers = HostBuffers()

    # ------------------------------------------------------------------ building

    def faults(self) -> list[str]:
        """Say what is asked and cannot be done; touches no device."""
        return compiling.faults(self.cfg.training, self.device)

    def build(
        self,
        family: Family,
        parts: Parts,
        make_optimizer: Callable[[list[Group]], Any],
        make_schedule: Callable[[Any], Any],
        warm: list[Batch],
    ) -> None:
        """Move, compile and wrap the model, then make optimizer and schedule.

        warm: a real batch, needed by several ranks; it leaves no trace. Raises ConfigFault where parameters that are
        trained get no gradient, or the optimizer cannot be stepped.
        """
        self.family, self.parts = family, parts
        parts.fill_root()  # the encoders have filled the caches by now: never both in memory
        self.root = self._placed(parts.root).train()
        for name in parts.frozen:
            parts.frozen[name].eval()
            if name in parts.resting:
                parts.rest(name)
            else:
                parts.wake(name)
                parts.frozen[name].to(self.device.torch_device)
        self._trained = {name: each for name, each in self.root.named_parameters() if each.requires_grad}
        if not self._trained:
            raise ConfigFault([Fault("--learning_rate", "nothing is trained: every parameter is frozen")])
        self._parameters = {name for name, _ in self.root.named_parameters(remove_duplicate=False)}
        self._masters = self._make_masters()
        if self.cfg.training.cpu_offload_checkpointing:
            self.offloaded = offload_checkpoints(self.root, self.device)
        if self.cfg.training.compile:
            blocks, buckets = family.repeated(parts), has_buckets(self.cfg)
            spares = bool(self.cfg.tread.share or self.cfg.patch_masking.share)
            said = compiling.compile_blocks(blocks, self.cfg.training, self.device, buckets=buckets, spares=spares)
            parts.notes.append(said)
        half = self.cfg.training.full_precision == "fp16"
        self._scaler = self.device.scaler(self.cfg.training.mixed_precision, half_gradients=half)
        groups = family.param_groups(self.root)
        self._wrapped: Any = self.root
        self.optimizer = self._assemble(groups, make_optimizer, warm)
        self._masters.attach(self.optimizer, self.ranks)
        self._update = self._make_update(groups)
        self.schedule = make_schedule(self.optimizer)
        self.optimizer._opt_called = True  # the rate goes on where an update is skipped: no warning at the first
        self._state = self._make_state()
        self._place = SchedulePlace(self.schedule, self.optimizer)

    def _placed(self, root: nn.Module) -> nn.Module:
        """Bring the root to the device."""
        return root.to(self.device.torch_device)

    def _make_masters(self) -> Masters:
        return make_masters(self.root, self._trained, self.cfg.training)

    def _assemble(self, groups: list[Group], make_optimizer: MakeOptimizer, warm: list[Batch]) -> Any:
        """Wrap the root, if need be, and make the optimizer, in the order that the wrapping wants; return it."""
        raise NotImplementedError

    def _make_update(self, groups: list[Group]) -> Update:
        return AfterBackward(self._masters, self.optimizer, self._scaler, self.cfg.training.max_grad_norm)

    def _make_state(self) -> State:
        names = {id(parameter): name for name, parameter in self._masters.updated.items()}
        return NamedState(self.optimizer, names)

    def _optimizer_for(self, groups: list[Group], make_optimizer: MakeOptimizer) -> Any:
        """Make the optimizer of what is updated. Raises ConfigFault where it cannot be stepped."""
        optimizer = make_optimizer(self._masters.groups(groups))
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        left = sorted(name for name, each in self._masters.updated.items() if id(each) not in held)
        assert not left, f"parameters in no group: {left[:5]}"
        closure = inspect.signature(inner(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            what = f"{type(optimizer).__name__} evaluates the loss several times a step"
            raise ConfigFault([Fault("--optimizer_type", what, "use an optimizer that takes gradients as they are")])
        return optimizer

    def _dummy_backward(self, batch: Batch) -> None:
        terms = self._forward(batch, self._wrapped)
        _sum(value for name, value in terms.items() if _counts(name)).backward()
        _check_gradients(self._masters.without_gradient())

    # ------------------------------------------------------------------ stepping

    def step(self, micro: list[Batch], counts: dict[str, float]) -> Stats:
        """Make one update from this rank's micro batches; the host waits for nothing on an accelerator.

        counts: the GLOBAL number of samples of this step, known before the backward: loss = global sum / that.
        """
        self._must_not_be_swapped()
        self._masters.position = self.position
        sums: list[Tensor] = []
        means = functools.cache(lambda: self._means(sums, counts))
        for place, batch in enumerate(micro):
            last = place + 1 == len(micro)
            with nullcontext() if last else self._unsynchronised():
                self.device.seed(module_seed(self.cfg.training.seed or 0, self.position, place, self.dp_rank))
                terms = self._forward(batch, self._wrapped)
                loss = _sum(terms[name] / counts.get(name, counts[COUNT]) for name in self._terms if _counts(name))
                sums.append(self._vector(terms))
                if last:
                    self._update.ready(lambda: means()[TOTAL])
                self._backward(loss)
        if self.position == 0:
            _check_gradients(self._update.left_out())
        lrs = {group.get("name", str(i)): float(group["lr"]) for i, group in enumerate(self.optimizer.param_groups)}
        d = estimate(self.optimizer)
        done = self._update.finish(lambda: means()[TOTAL])
        self.schedule.step()  # a function of the position alone, so also after a skipped update
        self.position += 1
        return Stats(means(), done.grad_norm, done.skipped, lrs, d)

    def _backward(self, loss: Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def _means(self, sums: list[Tensor], counts: dict[str, float]) -> dict[str, Tensor]:
        """Return the global mean of every term, and their total."""
        total = self.ranks.sum_(torch.stack(sums).sum(0))
        means = {name: total[i] / counts.get(name, counts[COUNT]) for i, name in enumerate(self._terms)}
        means[TOTAL] = _sum(value for name, value in means.items() if _counts(name))
        return means

    def _forward(self, batch: Batch, root: nn.Module) -> dict[str, Tensor]:
        """Return the sums of this batch's loss terms, fp32. Mixed precision covers inputs and forward only."""
        batch = self.device.to_device(batch)
        with self.device.autocast(self.cfg.training.mixed_precision):
            with torch.no_grad():
                inputs = self.family.inputs(batch, self.parts)
            outputs = self.family.forward(root, inputs)
        terms = self.family.loss_sums(tuple(each.float() for each in outputs), inputs)
        if not self._terms:
            told = [name for name in terms if _counts(name)]
            assert TOTAL not in told or len(told) == 1, f"{TOTAL} is the total of the terms {sorted(told)}"
            self._terms = sorted(terms)
        return terms

    def _vector(self, terms: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([terms[name].detach().float() for name in self._terms])

    def _unsynchronised(self) -> Any:
        """Let gradients gather without a reduction: of several micro batches only the last reduces."""
        no_sync = getattr(self._wrapped, "no_sync", nullcontext)
        return no_sync()

    # ------------------------------------------------------------------ evaluating

    @torch.no_grad()
    def evaluate(self, micro: list[Batch]) -> dict[str, Tensor]:
        """Return the global sums of the loss terms, and their total; ranks may have different shares, or none."""
        sums = self._evaluated(micro)
        return {} if sums is None else self._named(self.ranks.sum_(sums))

    @torch.no_grad()
    def own_sums(self, micro: list[Batch]) -> dict[str, Tensor]:
        """Return what `evaluate` does of this rank's share alone; collective as that is.

        Sums over ranks in fp32 depend on who had what: whoever wants the same bits on any number adds up these.
        """
        sums = self._evaluated(micro)
        return {} if sums is None else self._named(sums)

    def _evaluated(self, micro: list[Batch]) -> Tensor | None:
        """Return this rank's sums of the terms; None where it is the only one and has nothing to evaluate."""
        with self._evaluating():
            sums = [self._vector(self._forward(batch, self.root)) for batch in micro]
        if not self._terms:
            return None
        return torch.stack(sums).sum(0) if sums else torch.zeros(len(self._terms), device=self.device.torch_device)

    def _named(self, sums: Tensor) -> dict[str, Tensor]:
        found = {name: sums[i] for i, name in enumerate(self._terms)}
        return {**found, TOTAL: _sum(value for name, value in found.items() if _counts(name))}

    @torch.no_grad()
    def predict(self, inputs: Inputs) -> Tensor:
        """Call the denoiser once, on this rank alone; fp32."""
        with self._evaluating(), self.device.autocast(self.cfg.training.mixed_precision):
            return self.family.forward(self.root, inputs)[0].float()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.root.modules()]
        self.root.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    # ------------------------------------------------------------------ weights

    def shards(self) -> Iterator[tuple[str, Tensor, Extent]]:
        """Yield the trained weights' exact values, fp32 where such masters are kept: every rank owns all, whole.

        The very tensors, or copies that are made one at a time (--master_weights=kahan).
        """
        for name, value in self._masters.values():
            yield name, value, Extent(tuple(value.shape), 0)

    @contextmanager
    def swapped(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Put other weights in place for a while, on this rank; the trained ones come back bit by bit."""
        self._must_not_be_swapped()
        kept = {name: self._trained[name].detach().clone() for name in weights}
        self._swapped = True
        try:
            self._put(weights)
            yield
        finally:
            self._put(kept)
            self._swapped = False

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Put the averages of a schedule-free optimizer in place for a while, on this rank; nothing with any other.

        Its own way back would round, so the trained weights are kept: they come back bit by bit.
        """
        self._must_not_be_swapped()
        if not averages(self.optimizer):
            yield
            return
        kept = {name: value.clone() for name, value in self._masters.values()}
        self._swapped = True
        try:
            self._masters.step(self.optimizer, lambda optimizer: optimizer.eval())  # type: ignore[attr-defined]
            yield
        finally:
            self._masters.step(self.optimizer, lambda optimizer: optimizer.train())  # type: ignore[attr-defined]
            for name, value in kept.items():
                self._masters.put(name, value)
            self._swapped = False

    @torch.no_grad()
    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in weights.items():
            self._trained[name].copy_(tensor)

    def _must_not_be_swapped(self) -> None:
        assert not self._swapped, "other weights are in place of the trained ones"

    def _own_state(self) -> dict[str, Tensor]:
        """Return the root's weights but those that are held as their source has them."""
        base = self.parts.base
        return {name: value for name, value in self.root.state_dict().items() if name not in base}

    def full_weights(self, source: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the root's weights by name, on the CPU, those of `source` in place of the trained ones; not its base.

        Half weights come as the model computes with them; to be rounded to another precision, as the values they stand
        for.
        """
        weights = self._own_state()
        assert source is None or source.keys() <= weights.keys(), "weights of another model"
        exact = self._trained if self.cfg.export_precision and not self._swapped else {}
        for name, tensor in weights.items():
            given = (source or {}).get(name)
            if given is None:
                given = self._masters.value(name) if name in exact else self._masters.stored(name, tensor)
            yield name, given.detach().to("cpu")

    # ------------------------------------------------------------------ checkpoints

    def snapshot(self) -> NativeSnapshot:
        """Copy what this rank has to write. Weights and whole state are shared out over the first machine's ranks."""
        self._must_not_be_swapped()
        self._snapshots += 1
        mine = self._snapshots
        weights = self._own_state()
        sharded = inner(self.optimizer) is not self.optimizer
        writes = self.ranks.rank == self.ranks.local_rank  # on the first machine
        shapes = self._masters.shapes(weights)
        share = shares(
            {name: math.prod(shapes[name]) for name in self._parameters & weights.keys()}, self.ranks.local_size
        )
        names = set(share[self.ranks.local_rank]) if writes else set()
        if self.ranks.rank == 0:  # running statistics differ between ranks; rank 0's are the ones that hold
            names |= weights.keys() - self._parameters
        kept: dict[str, Tensor] = {}
        states = self._state.parameters(self._state.owned if sharded else names, kept.__setitem__)
        engine = self._describe(kept.__setitem__) if self.ranks.rank == 0 else None
        chosen = self._masters.chosen(names, weights)
        copies = self._buffers.copy((f"{WEIGHTS} {name}", value) for name, value in chosen)
        state_copies = self._buffers.copy((f"{OPTIMIZER} {name}", tensor) for name, tensor in kept.items())
        self.device.synchronise()
        files = []
        if names:
            tensors = {name: copies[f"{WEIGHTS} {name}"] for name in names}
            files.append(TensorFile(f"{WEIGHTS}-{self.dp_rank:05d}.safetensors", tensors, {}))
        if states or kept:
            tensors = {name: state_copies[f"{OPTIMIZER} {name}"] for name in kept}
            file = f"{OPTIMIZER}-{self.dp_rank:05d}.safetensors"
            files.append(TensorFile(file, tensors, {"states": json.dumps(states)}))
        return NativeSnapshot(files, engine, lambda: mine == self._snapshots)

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
            "schedule": self._place.describe(),
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
        told = self.ranks.gather(engine_file(path))
        about = next((each for each in told if each is not None), None)
        if about is None:
            raise ConfigFault([Fault("--resume", f"{path} has no {ENGINE_FILE}", "give a folder ...-state")])
        weights, stored = Shelf(path, WEIGHTS, self.ranks), Shelf(path, OPTIMIZER, self.ranks)
        states = merge_states(stored.metadata)
        own = self._own_state()
        fitting = states if optimizer else None
        check_fits(path, about, weights, fitting, self._masters.shapes(own), self._trained, self._state.kind)
        for name, tensor in weights.tensors(lambda name: True):
            self._masters.take(name, tensor, own[name])
        self._masters.taken()
        fp8.refresh(self.root)
        if optimizer:
            owned = set(self._state.owned)
            tensors = stored.tensors(lambda key: key.startswith("group ") or key.partition("/")[0] in owned)
            groups = about["groups"] if params else [{} for _ in about["groups"]]
            self._state.load(states, groups, tensors)
        self._restore_scaler(about)
        if not (optimizer and params):
            about = {**about, "schedule": {}}
        self._go_to(int(about["position"]), about, schedule_from)

    def _restore_scaler(self, about: dict[str, Any]) -> None:
        if self._scaler is not None and about["scaler"] is not None:
            self._scaler.load_state_dict(about["scaler"])
        was, now = about["precision"], precision_of(self.cfg.training)
        if was != now and self.is_logger:
            log.warning("the checkpoint was trained in mixed precision %s, this run in %s", was, now)

    def _go_to(self, position: int, about: dict[str, Any], schedule_from: int) -> None:
        """Bring the schedule to a position, and say where it gives other rates than the checkpoint's."""
        self._place.go_to(position - schedule_from, about.get("schedule", {}), about["lrs"])
        self.position = position
        for group, before in zip(self.optimizer.param_groups, about["lrs"]):
            if float(group["lr"]) != before and self.is_logger:
                name = group.get("name", "all")
                log.warning("learning rate of %s is %g, the checkpoint's was %g", name, float(group["lr"]), before)


def _counts(name: str) -> bool:
    """Tell whether a term belongs to the loss."""
    return not name.startswith(METRIC)


def _sum(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum()


def _check_gradients(left: list[str]) -> None:
    """Name parameters that a backward left out; other ranks would wait for them for ever."""
    if left:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        what = f"parameters take no part in the loss: {', '.join(left[:5])}{more}"
        raise ConfigFault([Fault("model", what, "the family must freeze them")])
