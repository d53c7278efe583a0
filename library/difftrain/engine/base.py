"""What engines share whose ranks run the same model side by side: building, the step, evaluation, weights."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from difftrain.config.datasets.datasets import has_buckets
from difftrain.config.spellings.spelling import option
from difftrain.contracts import (
    Batch,
    ConfigFault,
    Extent,
    Family,
    Fault,
    Group,
    Inputs,
    Parts,
    Stats,
    StepObserver,
)
from difftrain.device.attention_modules import share_tokens
from difftrain.device.block_swap import BlockSwap
from difftrain.device.compiling import compile_blocks, compile_faults
from difftrain.device.offload import offload_checkpoints
from difftrain.device.sequence import TokenShare, sharing
from difftrain.diffusion.draws import module_seed
from difftrain.engine import ddp
from difftrain.engine.gradients import check_gradients, check_zeros, largest_of
from difftrain.engine.half_precision import make_master_weights
from difftrain.engine.update import TOTAL, AfterBackward, LossTerms, Update, add, is_loss
from difftrain.optim import averages, check_optimizer, estimate, inner
from difftrain.optim.state import NamedState, ScheduleState

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.config import TrainConfig
    from difftrain.device import Device
    from difftrain.distributed.ranks import Ranks
    from difftrain.engine.master_weights import MasterWeights


log = logging.getLogger("difftrain")
MakeOptimizer = Callable[[list[Group]], Any]


class BaseEngine:
    """Own precision, scaler, optimizer and schedule. Collective: build, step, evaluate, restore.

    An engine says how the model is wrapped and the optimizer made, and where gradients, updates and state differ, what
    replaces MasterWeights, Update and NamedState.
    """

    name, all_forward, leads = "", False, True
    repeats = True  # a forward pass takes this rank alone, and it sees whole gradients
    sees_gradients = True

    def __init__(self, cfg: TrainConfig, device: Device, ranks: Ranks) -> None:
        self.cfg, self.device, self.ranks, self.is_logger = cfg, device, ranks, ranks.is_logger
        together = cfg.training.sequence_parallel
        self.dp_rank, self.dp_size = ranks.rank // together, ranks.size // together
        self._token_share = TokenShare.among(together, ranks.rank, ranks.size, cfg.training.ddp_timeout_min)
        if self._token_share is not None:
            self.leads, self.repeats = self._token_share.rank == 0, False
        self.position = 0  # updates done or skipped
        self._terms = LossTerms()
        self._spare: list[Batch] = []  # run for nothing by ranks with fewer, where every forward takes all ranks
        self._observer: StepObserver | None = None
        self.block_swap: BlockSwap | None = None
        self._swapped = self._looked = False  # looked: at what the first backward of this session shows

    # ------------------------------------------------------------------ building

    def faults(self) -> list[str]:
        """Say what is asked and cannot be done; touches no device."""
        return compile_faults(self.cfg.training, self.device)

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
        # --- the model, on the device
        self.family, self.parts = family, parts
        parts.fill_root()  # the encoders have filled the caches by now: never both in memory
        self.root = parts.root
        self._shapes = {name: tuple(value.shape) for name, value in self._own_state().items()}  # whoever holds them
        self._trained_names = [name for name, param in self.root.named_parameters() if param.requires_grad]
        self._move_root()
        self.root.train()
        for name in parts.frozen:
            parts.frozen[name].eval()
            if name in parts.offloaded:
                parts.offload(name)
            else:
                parts.load(name)
                parts.frozen[name].to(self.device.torch_device)

        # --- what is trained, and the fp32 values behind half weights
        self._trained = {name: param for name, param in self.root.named_parameters() if param.requires_grad}
        if not self._trained:
            what = "nothing is trained: every parameter is frozen"
            raise ConfigFault([Fault(option("optimizer.learning_rate"), what)])
        self._parameters = {name for name, _ in self.root.named_parameters(remove_duplicate=False)}
        self._master_weights = self._make_master_weights()

        # --- activations on the host, blocks compiled
        if self.cfg.training.cpu_offload_checkpointing:
            self.offloaded = offload_checkpoints(self.root, self.device)
        if self.cfg.training.compile:
            blocks, buckets = family.repeated(parts), has_buckets(self.cfg)
            spares = bool(self.cfg.tread.share or self.cfg.patch_masking.share)
            parts.notes.append(compile_blocks(blocks, self.cfg.training, self.device, buckets=buckets, spares=spares))

        # --- loss scale, wrapping, optimizer, schedule
        half = self.cfg.training.full_precision == "fp16"
        self._scaler = self.device.scaler(self.cfg.training.mixed_precision, half_gradients=half)
        groups = self._param_groups()
        self._wrapped: Any = self.root
        if self._token_share is not None:
            parts.notes.append(share_tokens(self.root, self._token_share, getattr(family, "sequence", ())))
        self.optimizer = self._assemble(groups, make_optimizer, warm)
        self._master_weights.attach(self.optimizer, self.ranks)
        if self.block_swap is not None:
            self.block_swap.optimizer = inner(self.optimizer)
        self._update = self._make_update(groups)
        self.schedule = make_schedule(self.optimizer)
        self.optimizer._opt_called = True  # the rate goes on where an update is skipped: no warning at the first

        # --- their state, by name, for checkpoints
        self._state = self._make_state()
        self._schedule_state = ScheduleState(self.schedule, self.optimizer)

    def _move_root(self) -> None:
        """Bring the root to the device, but for blocks that wait on the host."""
        if self.cfg.memory.swap_blocks:
            units = self.family.units(self.parts)
            waiting, trained = self.cfg.memory.swap_blocks, not self.cfg.holds_base
            self.block_swap = BlockSwap(units, self.parts.base, waiting, self.device, trained=trained)
            self.parts.notes.append(self.block_swap.sentence(len(units)))
        self.root.to(self.device.torch_device)
        if self.block_swap is not None:
            self.block_swap.settle()

    def _param_groups(self) -> list[Group]:
        return self.family.param_groups(self.root)

    def _make_master_weights(self) -> MasterWeights:
        return make_master_weights(self.root, self._trained, self.cfg.training)

    def _assemble(self, groups: list[Group], make_optimizer: MakeOptimizer, warm: list[Batch]) -> Any:
        """Wrap the root, if need be, and make the optimizer, in the order that the wrapping wants; return it."""
        return self._optimizer_for(groups, make_optimizer)

    def _make_update(self, groups: list[Group]) -> Update:
        return AfterBackward(self._master_weights, self._scaler, self.cfg.training.max_grad_norm)

    def _make_state(self) -> NamedState:
        names = {id(parameter): name for name, parameter in self._master_weights.updated.items()}
        return NamedState(self.optimizer, names)

    def _optimizer_for(self, groups: list[Group], make_optimizer: MakeOptimizer) -> Any:
        """Make the optimizer of what is updated. Raises ConfigFault where it cannot be stepped."""
        optimizer = make_optimizer(self._master_weights.groups(groups))
        check_optimizer(optimizer, self._master_weights.updated)
        return optimizer

    def _dummy_backward(self, batch: Batch) -> None:
        with sharing(self._token_share):
            terms = self._forward(batch, self._wrapped)
            add(value for name, value in terms.items() if is_loss(name)).backward()
        check_gradients(self._master_weights.missing_gradients())

    # ------------------------------------------------------------------ stepping

    def step(self, micro: list[Batch], counts: dict[str, float]) -> Stats:
        """Make one update from this rank's micro batches, on every rank as many; the host waits for nothing on an accelerator.

        counts: the GLOBAL number of samples of this step, known before the backward: loss = global sum / that.
        """
        self._must_not_be_swapped()
        micro = self.ranks.same_batches(micro, self.cfg.training.sequence_parallel)
        self._master_weights.position = self.position
        starts = None if self._looked else largest_of(self._master_weights.weights)
        sums: list[Tensor] = []
        means = functools.cache(lambda: self._terms.means(self.ranks.sum_(torch.stack(sums).sum(0)), counts))

        # --- forward and backward, and a look at what they show
        self._accumulate(micro, counts, sums, lambda: means()[TOTAL])
        if self.position == 0:
            missing = self.ranks.gather(self._update.missing_gradients())
            check_gradients(list(dict.fromkeys(itertools.chain(*missing))))
        if self._observer is not None:
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            self._observer.after_backward(self._gradients(), scale)
        if starts is not None:  # once a session: the host waits for it
            self._looked = True
            largest = self._update.largest_gradients() if self.sees_gradients else {}
            check_zeros(
                largest, starts, means()[TOTAL], self.parts.silent, speaks=self.is_logger, gather=self.ranks.gather
            )

        # --- update, with the rates of this step
        lrs = {group.get("name", str(i)): float(group["lr"]) for i, group in enumerate(self.optimizer.param_groups)}
        adapted_lr = estimate(self.optimizer)
        done = self._update.finish(lambda: means()[TOTAL])
        self._rest()
        self.schedule.step()  # a function of the position alone, so also after a skipped update
        self.position += 1
        measured = {} if self.parts.constrain is None else self.parts.constrain(self._master_weights)
        return Stats({**means(), **measured}, done.grad_norm, done.skipped, lrs, adapted_lr)

    def _rest(self) -> None:
        """Bring trained blocks that take turns on the device to the host, where whoever comes next reads them."""
        if self.block_swap is not None:
            self.block_swap.rest()

    def _accumulate(
        self, micro: list[Batch], counts: dict[str, float], sums: list[Tensor], total: Callable[[], Tensor]
    ) -> None:
        """Run micro batches forward and backward; of several only the last reduces gradients.

        sums: takes those of the loss. total: the global loss, once all have gone forward.
        """
        for number, batch in enumerate(micro):
            last = number + 1 == len(micro)
            with nullcontext() if last else self._unsynchronised(), sharing(self._token_share):
                self.device.seed(module_seed(self.cfg.training.seed or 0, self.position, number, self.dp_rank))
                if self._observer is not None:
                    self._observer.before_forward(number, batch)
                terms = self._forward(batch, self._wrapped, self._observer)
                loss, vector = self._terms.loss(terms, counts), self._terms.vector(terms)
                if batch.idle:
                    loss, vector = loss * 0.0, torch.zeros_like(vector)
                if self._token_share is not None:  # each has all of the loss: it counts once
                    loss, vector = loss / self._token_share.size, vector * self.leads
                sums.append(vector)
                if last and self._update.needs_loss:
                    self._update.ready(total)
                self._backward(loss)

    def _backward(self, loss: Tensor) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def _forward(self, batch: Batch, root: nn.Module, observer: StepObserver | None = None) -> dict[str, Tensor]:
        """Return the sums of this batch's loss terms, fp32. Mixed precision covers inputs and forward only."""
        batch = self.device.to_device(batch)
        with self.device.autocast(self.cfg.training.mixed_precision):
            with torch.no_grad():
                inputs = self.family.inputs(batch, self.parts)
            outputs = self.family.forward(root, inputs)
        terms = self.family.loss_sums(tuple(output.float() for output in outputs), inputs)
        self._terms.learn(terms)
        if observer is not None:
            observer.after_forward(inputs, terms)
        return terms

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients that are there, put together one at a time; with updates during the backward none are left."""
        gradients = ((name, weight.grad) for name, weight in self._trained.items())
        return ((n, self._master_weights.gathered(n, gradient)) for n, gradient in gradients if gradient is not None)

    def _unsynchronised(self) -> Any:
        """Let gradients gather without a reduction: of several micro batches only the last reduces."""
        no_sync = getattr(self._wrapped, "no_sync", nullcontext)
        return no_sync()

    # ------------------------------------------------------------------ looking at a step

    def observe(self, observer: StepObserver | None) -> None:
        """Let an observer look at every step from the next one on; None: nobody."""
        self._observer = observer

    def repeat(
        self,
        number: int,
        batch: Batch,
        counts: dict[str, float],
        observer: StepObserver,
        *,
        position: int,
        skipped: int = 0,
    ) -> bool:
        """Run a micro batch forward and backward once more, with the draws that it had; nothing is updated or kept.

        This rank alone does it, and waits for no other: gradients are asked for, so that nothing is reduced, no hook of
        an update runs, and no .grad is written. position: of the step, updates before it. skipped: updates that were
        skipped from this step on, each of which has lowered the loss scale. Returns whether this engine can: not where
        the forward pass itself takes all ranks.
        """
        if not self.repeats:
            return False
        scale = 1.0
        if self._scaler is not None:
            scale = self._scaler.get_scale() / self._scaler.get_backoff_factor() ** skipped
        names, weights = list(self._trained), list(self._trained.values())
        # compiled blocks run as they are written: what is compiled has no modules inside
        eager = torch.compiler.set_stance("force_eager") if self.cfg.training.compile else nullcontext()
        with ddp.kept_buffers(self.root), eager:
            self.device.seed(module_seed(self.cfg.training.seed or 0, position, number, self.dp_rank))
            observer.before_forward(number, batch)
            loss = self._terms.loss(self._forward(batch, self.root, observer), counts)
            gradients = torch.autograd.grad(loss * scale, weights, allow_unused=True)
            made = ((name, gradient) for name, gradient in zip(names, gradients) if gradient is not None)
            observer.after_backward(made, scale)
        self._rest()
        return True

    # ------------------------------------------------------------------ evaluating

    @torch.no_grad()
    def evaluate(self, micro: list[Batch]) -> dict[str, Tensor]:
        """Return the global sums of the loss terms, and their total; ranks may have different shares, or none."""
        sums = self._evaluated(micro)
        if sums is not None and self._token_share is not None:
            sums = sums * self.leads
        return {} if sums is None else self._terms.sums(self.ranks.sum_(sums))

    @torch.no_grad()
    def own_sums(self, micro: list[Batch]) -> dict[str, Tensor]:
        """Return what `evaluate` does of this rank's share alone; collective as that is.

        Sums over ranks in fp32 depend on who had what: whoever wants the same bits on any number adds up these.
        """
        sums = self._evaluated(micro)
        return {} if sums is None else self._terms.sums(sums)

    def _evaluated(self, micro: list[Batch]) -> Tensor | None:
        """Return this rank's sums of the terms; None where it is the only one and has nothing to evaluate."""
        micro = self.ranks.same_batches(micro, self.cfg.training.sequence_parallel)
        idle = max(self.ranks.gather(len(micro))) - len(micro) if self._spare else 0
        # around both: what is freed between is gathered once more, by every rank or by none
        with self._evaluating(), sharing(self._token_share):
            for _ in range(idle):
                self._forward(self._spare[0], self.root)
            sums = [self._terms.vector(self._forward(batch, self.root)) for batch in micro]
        if not self._terms.names:
            return None
        return torch.stack(sums or [torch.zeros(len(self._terms.names), device=self.device.torch_device)]).sum(0)

    @torch.no_grad()
    def predict(self, inputs: Inputs) -> Tensor:
        """Call the denoiser once, on this rank alone; fp32."""
        with self._evaluating(), self.device.autocast(self.cfg.training.mixed_precision):
            return self.family.forward(self.root, inputs)[0].float()

    @contextmanager
    def drawing(self) -> Iterator[Callable[[Inputs], Tensor] | None]:
        """Let modules of the root be called by themselves: every rank has all of them, and its root can be called."""
        try:
            yield None
        finally:
            self._rest()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.root.modules()]
        self.root.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            self._rest()

    # ------------------------------------------------------------------ weights

    def shards(self) -> Iterator[tuple[str, Tensor, Extent]]:
        """Yield the trained weights' exact values, fp32 where such masters are kept: every rank owns all, whole.

        The very tensors, or copies that are made one at a time (--master_weights=kahan).
        """
        for name, value in self._master_weights.values():
            yield name, value, Extent(tuple(value.shape), 0)

    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all that is trained, by name, whoever holds it."""
        return {name: self._shapes[name] for name in self._trained_names}

    @contextmanager
    def swapped(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Put other weights in place for a while, on this rank; the trained ones come back bit by bit."""
        with self._swapping(), self._master_weights.swapped(weights):
            yield

    @contextmanager
    def _swapping(self) -> Iterator[None]:
        self._must_not_be_swapped()
        self._swapped = True
        try:
            yield
        finally:
            self._swapped = False

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Put the averages of a schedule-free optimizer in place for a while, on this rank; nothing with any other.

        Its own way back would round, so the trained weights are kept: they come back bit by bit.
        """
        self._must_not_be_swapped()
        if not averages(self.optimizer):
            yield
            return
        kept = {name: value.clone() for name, value in self._master_weights.values()}
        with self._swapping():
            try:
                self._master_weights.step(lambda optimizer: optimizer.eval())  # type: ignore[attr-defined]
                yield
            finally:
                self._master_weights.step(lambda optimizer: optimizer.train())  # type: ignore[attr-defined]
                for name, value in kept.items():
                    self._master_weights.put(name, value)

    def _must_not_be_swapped(self) -> None:
        assert not self._swapped, "other weights are swapped in for the trained ones"

    def _own_state(self) -> dict[str, Tensor]:
        """Return the root's weights but those that are held as their source has them."""
        return {name: value for name, value in self.root.state_dict().items() if name not in self.parts.base}

    def full_weights(self, source: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the root's weights by name, on the CPU, those of `source` in place of the trained ones; not its base.

        source: as shards() has them. Half weights come as the model computes with them; to be rounded to another precision,
        as the values they stand for.
        """
        weights = self._own_state()
        assert source is None or source.keys() <= weights.keys(), "weights of another model"
        exact = self._trained if self.cfg.export_precision and not self._swapped else {}
        for name, tensor in weights.items():
            value = (source or {}).get(name)
            if value is None:
                value = self._master_weights.value(name) if name in exact else tensor
            yield name, self._master_weights.gathered(name, value).detach().to("cpu")
