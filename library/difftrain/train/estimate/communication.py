"""What ranks send one another in an update: payloads of each engine's collectives, and bytes by ring algorithms.

1. spread_of    how an engine spreads a model over the ranks: who shares a copy, what is sharded, in which precision
2. collectives  the payloads of one update, as each engine sends them: the formulas that its authors give
3. sent         bytes that a rank sends for a payload
4. scaling      what that takes for any number of ranks, at named speeds

test/integration/test_communication.py counts the payloads of each engine and holds the formulas to 5 %. What an engine
sends of its own figures (a loss, a norm: a few bytes) is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from difftrain.device.step_memory import AcceleratorMaths
from difftrain.engine.partition import Cut
from difftrain.models.flops import blank_inputs
from difftrain.models.placeholder import DTYPES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.config import TrainConfig
    from difftrain.contracts import Bucket


Kind = Literal["all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "point to point"]
FP32, HALF = 4, 2
# DeepSpeed 0.19: tensors up to this many elements stay whole, and weights that are needed again within so many are kept
PERSISTENT, REUSE = 100_000, 1_000_000_000


@dataclass(frozen=True)
class ModelSize:
    """What of a model decides the payloads.

    weights: elements of each tensor. trained: elements that have a gradient. blocks: elements within the blocks that are
    sharded one by one. cuts: of a pipeline, bytes that a micro batch sends over each cut, forward, and as gradients back.
    stages: trained elements of each of its stages.
    """

    weights: tuple[int, ...]
    trained: int
    blocks: int = 0
    cuts: tuple[tuple[float, float], ...] = ()
    stages: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Return how many elements there are."""
        return sum(self.weights)


@dataclass(frozen=True)
class Spread:
    """How an engine spreads a model.

    way: ddp; oss, torch's ZeRO 1; fairscale; zero1, zero2, zero3 of DeepSpeed; fsdp; pipeline. shard: ranks that share a
    copy, of fsdp. micro: micro batches of an update. weight_bytes: of a weight that is sent; gradient_bytes: likewise.
    """

    way: str
    ranks: int
    shard: int = 1
    stages: int = 1
    micro: int = 1
    weight_bytes: int = FP32
    gradient_bytes: int = FP32
    reshards: bool = True  # fsdp gathers a block once more for its backward
    reduces_each: bool = False  # fsdp reduces gradients of each micro batch
    largest: float = 0.0  # the share of a pipeline's largest stage; 0: all are alike

    @property
    def replicas(self) -> int:
        """Return how many copies of the model there are, of which each sees data of its own."""
        return self.ranks // self.stages

    # --- what is left of it on a rank

    @property
    def weights_share(self) -> float:
        """Return the share of the weights that a rank holds between steps."""
        stage = self.largest or 1 / self.stages
        return {"zero3": 1 / self.ranks, "fsdp": 1 / self.shard, "pipeline": stage}.get(self.way, 1.0)

    @property
    def gradients_share(self) -> float:
        """Return the share of the gradients that a rank holds at the update."""
        if self.way == "fsdp":
            return 1.0 if self.micro > 1 and not self.reduces_each else 1 / self.shard
        if self.way == "pipeline":
            return self.weights_share
        return {"zero2": 1 / self.ranks, "zero3": 1 / self.ranks}.get(self.way, 1.0)

    @property
    def state_share(self) -> float:
        """Return the share of the optimizer's state."""
        if self.way in ("oss", "fairscale", "zero1", "zero2", "zero3"):
            return 1 / self.ranks
        return self.weights_share

    @property
    def averages_share(self) -> float:
        """Return the share of averaged weights: DeepSpeed's are gathered for them."""
        return 1.0 if self.way == "zero3" else self.weights_share


def spread_of(cfg: TrainConfig, ranks: int) -> Spread:
    """Return how the configured engine spreads the model over a number of ranks."""
    training, kind = cfg.training, cfg.optimizer.type.lower()
    half = HALF if training.full_precision else FP32
    plain = Spread("ddp", ranks, micro=training.accumulation, weight_bytes=half, gradient_bytes=half)
    if training.pipeline_stages > 1:
        return replace(plain, way="pipeline", stages=training.pipeline_stages)
    if cfg.deepspeed.enable:
        computed = FP32 if training.mixed_precision == "no" else HALF
        way = f"zero{cfg.deepspeed.zero_stage}"
        return replace(plain, way=way, weight_bytes=computed, gradient_bytes=computed)
    if training.engine == "fsdp":
        return replace(
            plain,
            way="fsdp",
            shard=shard_size(cfg, ranks),
            weight_bytes=half if training.mixed_precision == "no" else HALF,
            reshards=cfg.fsdp.reshard_after_forward == "always",
            reduces_each=cfg.fsdp.reduce == "each",
        )
    if kind == "oss":
        return replace(plain, way="fairscale" if training.engine == "accelerate" else "oss")
    return plain


def shard_size(cfg: TrainConfig, ranks: int) -> int:
    """Return how many ranks share one copy of weights, gradients and state: one, but with FSDP."""
    if cfg.training.engine != "fsdp":
        return 1
    on_a_machine = int(os.environ.get("LOCAL_WORLD_SIZE") or min(ranks, Cluster.per_machine))
    return min(ranks, cfg.fsdp.shard_size or (on_a_machine if cfg.fsdp.shard == "hybrid" else ranks))


def size_of(root: nn.Module, blocks: Iterable[nn.Module]) -> ModelSize:
    """Measure a model. blocks: those that are sharded one by one."""
    parameters = list(root.parameters())
    return ModelSize(
        tuple(parameter.numel() for parameter in parameters),
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        sum(parameter.numel() for block in blocks for parameter in block.parameters()),
    )


def cut_size(cfg: TrainConfig, family: Any, root: nn.Module, model: ModelSize, bucket: Bucket, batch: int) -> ModelSize:
    """Add what the stages of the configured pipeline hold and send: a pass over tensors without content.

    root: on the meta device. What the loss needs (time, target, weight, mask) rides along to the last stage.
    """
    chain, precision, stages = family.chain(root), cfg.training.mixed_precision, cfg.training.pipeline_stages
    cut = Cut.of(cfg, chain, root)
    by_stage = [0] * stages
    for name, parameter in root.named_parameters():
        by_stage[cut.run_of[name] % stages] += parameter.numel() * parameter.requires_grad

    # --- through the blocks, and at each cut what is there
    inputs = blank_inputs(family, bucket, batch=batch)
    riders = [inputs.timestep, inputs.target, inputs.weight, inputs.mask, *inputs.aux_targets.values()]
    ridden = sum(_bytes(tensor) for tensor in riders if tensor is not None)
    cuts: list[tuple[float, float]] = []
    with AcceleratorMaths(None if precision == "no" else DTYPES[precision]):
        carry, layout = chain.enter(inputs)
        for run in cut.runs[:-1]:
            for number in run:
                carry = chain.unit(number, carry, layout)
            sent_on = [carry[name] for name in chain.names(layout, run.stop)]
            back = sum(_bytes(tensor) for tensor in sent_on if tensor.requires_grad)
            cuts.append((ridden + sum(map(_bytes, sent_on)), float(back)))
    return replace(model, cuts=tuple(cuts), stages=tuple(by_stage))


def _bytes(tensor: Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())


# --- payloads


@dataclass(frozen=True)
class Collective:
    """The payload of one kind in an update, in bytes, and how many ranks it is among.

    apart: how many ranks lie between neighbours of the group: 1 where they are numbered one after another.
    """

    kind: Kind
    payload: float
    among: int
    apart: int = 1

    @property
    def sent(self) -> float:
        """Return the bytes that a rank sends for it."""
        return sent(self.kind, self.payload, self.among)


def sent(kind: Kind, payload: float, among: int) -> float:
    """Return the bytes that a rank sends for a payload.

    With S bytes of payload and n ranks a ring sends (n - 1) / n S for a reduce-scatter and for an all-gather, and both
    for an all-reduce, which no algorithm can do with less. A broadcast or a reduction along a chain passes S on n - 1
    times among n ranks.
    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009; NCCL-tests,
    PERFORMANCE.md.
    """
    if kind == "point to point":
        return payload
    return (2.0 if kind == "all-reduce" else 1.0) * (among - 1) / among * payload


def collectives(spread: Spread, model: ModelSize) -> tuple[Collective, ...]:
    """Return what ranks exchange in one update."""
    if spread.ranks == 1:
        return ()
    gradients, weights = spread.gradient_bytes * model.trained, spread.weight_bytes * model.trained
    exchanged = _WAYS[spread.way](spread, model, gradients, weights)
    return tuple(item for item in exchanged if item.payload and item.among > 1)


def _ddp(spread: Spread, model: ModelSize, gradients: float, weights: float) -> Iterator[Collective]:
    """All-reduce gradients, once an update: 2 G. Source: Li et al., PyTorch Distributed, VLDB 2020."""
    yield Collective("all-reduce", gradients, spread.ranks)


def _oss(spread: Spread, model: ModelSize, gradients: float, weights: float) -> Iterator[Collective]:
    """All-reduce gradients as DDP does, then each rank broadcasts the weights that it updated: 2 G + W.

    Source: torch.distributed.optim.ZeroRedundancyOptimizer; Rajbhandari et al., ZeRO, 2020, stage 1.
    """
    yield Collective("all-reduce", gradients, spread.ranks)
    yield Collective("broadcast", weights, spread.ranks)


def _fairscale(spread: Spread, model: ModelSize, gradients: float, weights: float) -> Iterator[Collective]:
    """Reduce each gradient to its owner, which broadcasts the updated weight: G + W.

    Source: Rajbhandari et al., ZeRO, 2020, section 7.1: the same volume as an all-reduce.
    """
    yield Collective("reduce", gradients, spread.ranks)
    yield Collective("broadcast", weights, spread.ranks)


def _zero_1(spread: Spread, model: ModelSize, gradients: float, weights: float) -> Iterator[Collective]:
    """All-reduce gradients in buckets and gather the updated weights: 2 G + W.

    The paper's stage 1 takes a reduce-scatter, G + W; DeepSpeed all-reduces a bucket that belongs to several ranks
    (use_multi_rank_bucket_allreduce, its default) to start fewer operations.
    Source: deepspeed/runtime/zero/stage_1_and_2.py, allreduce_and_scatter.
    """
    yield Collective("all-reduce", gradients, spread.ranks)
    yield Collective("all-gather", weights, spread.ranks)


def _zero_2(spread: Spread, model: ModelSize, gradients: float, weights: float) -> Iterator[Collective]:
    """Do so, but for gradients after every micro batch, since no rank keeps all of them: 2 G m + W."""
    yield Collective("all-reduce", gradients * spread.micro, spread.ranks)
    yield Collective("all-gather", weights, spread.ranks)


def _zero_3(spread: Spread, model: ModelSize, gradients: float, weights: float) -> Iterator[Collective]:
    """Gather weights for the forward and for the backward, reduce-scatter gradients, for every micro batch: m (2 W + G).

    Of tensors up to stage3_param_persistence_threshold elements every rank keeps a copy, which is gathered once after the
    update; what a backward needs again within stage3_max_reuse_distance elements is not gathered a second time.
    Source: Rajbhandari et al., ZeRO, 2020, section 7.2.2; deepspeed/runtime/zero/partitioned_param_coordinator.py.
    """
    small = sum(count for count in model.weights if count <= PERSISTENT)
    large = model.elements - small
    again = max(0, large - REUSE // 2)  # from its forward to its backward lies twice what is behind it
    gathered = small + spread.micro * (large + again)
    yield Collective("all-gather", spread.weight_bytes * gathered, spread.ranks)
    yield Collective("reduce-scatter", gradients * spread.micro, spread.ranks)


def _fsdp(spread: Spread, model: ModelSize, gradients: float, weights: float) -> Iterator[Collective]:
    """Gather each block for its forward and its backward, reduce-scatter gradients: m 2 W + G, or m (2 W + G).

    What is of no block stays from forward to backward. Hybrid shards within a group, and all-reduces the shards of
    gradients among the groups: 2 G / s more.
    Source: Zhao et al., PyTorch FSDP, VLDB 2023, section 3.2; torch.distributed.fsdp.fully_shard.
    """
    gathered = model.elements + (model.blocks if spread.reshards else 0)
    times = spread.micro if spread.reduces_each else 1
    yield Collective("all-gather", spread.weight_bytes * gathered * spread.micro, spread.shard)
    yield Collective("reduce-scatter", gradients * times, spread.shard)
    yield Collective("all-reduce", gradients / spread.shard, spread.ranks // spread.shard, apart=spread.shard)


def _pipeline(spread: Spread, model: ModelSize, gradients: float, weights: float) -> Iterator[Collective]:
    """Send activations to the next stage and their gradients back, of every micro batch; replicas all-reduce their stage.

    Of a stage between two others: m (A + dA), and 2 G / p among the replicas; of all stages, what the busiest sends.
    Ranks of one stage are numbered one after another; of several pieces of the model a stage has every p-th.
    Source: Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021, section 3.2.
    """
    pieces = len(model.cuts) + 1
    sent_by = [
        sum(model.cuts[piece][0] for piece in range(stage, pieces - 1, spread.stages))
        + sum(model.cuts[piece - 1][1] for piece in range(stage, pieces, spread.stages) if piece)
        for stage in range(spread.stages)
    ]
    yield Collective("point to point", spread.micro * max(sent_by), spread.stages, apart=spread.replicas)
    yield Collective("all-reduce", spread.gradient_bytes * max(model.stages), spread.replicas)


_WAYS = {
    "ddp": _ddp, "oss": _oss, "fairscale": _fairscale, "zero1": _zero_1, "zero2": _zero_2, "zero3": _zero_3,
    "fsdp": _fsdp, "pipeline": _pipeline,
}  # fmt: skip


# --- what it takes


@dataclass(frozen=True)
class Cluster:
    """Speeds that are assumed: none of them is measured here."""

    per_machine: int = 8  # devices
    flops: float = 120e12  # a second that a device reaches in training, not its peak
    inside: float = 100e9  # bytes a second that a device sends to others of its machine
    outside: float = 20e9  # bytes a second that a device sends to other machines: a 200 Gbit/s port, at 80 %

    def sentence(self) -> str:
        """Say what is assumed."""
        return (
            f"assumed: {self.flops / 1e12:g} TFLOP/s a device, {self.per_machine} devices a machine, "
            f"{self.inside / 1e9:g} GB/s from a device within a machine and {self.outside / 1e9:g} GB/s to others"
        )

    def seconds(self, item: Collective) -> float:
        """Return how long a collective takes: its slowest link counts; latency is left out."""
        crosses = item.among * item.apart > self.per_machine
        return item.sent / (self.outside if crosses else self.inside)


@dataclass(frozen=True)
class Scaling:
    """One number of ranks: what each sends in an update, and how long it computes and communicates."""

    spread: Spread
    exchanged: tuple[Collective, ...]
    compute_s: float
    communication_s: float

    @property
    def sent(self) -> float:
        """Return the bytes that a rank sends in an update."""
        return sum(item.sent for item in self.exchanged)

    @property
    def bubble(self) -> float:
        """Return the share of a pipeline's time in which a stage waits: (p - 1) / (m + p - 1), of GPipe and 1F1B."""
        return (self.spread.stages - 1) / (self.spread.micro + self.spread.stages - 1)

    @property
    def efficiency(self) -> tuple[float, float]:
        """Return the speed of a rank as a share of its speed alone: nothing overlaps, and all of it does."""
        busy = 1 - self.bubble
        worst = self.compute_s / (self.compute_s + self.communication_s)
        best = self.compute_s / max(self.compute_s, self.communication_s)
        return worst * busy, best * busy

    @property
    def step_s(self) -> tuple[float, float]:
        """Return the seconds of an update, with all overlap and with none."""
        worst, best = self.efficiency
        return self.compute_s / best, self.compute_s / worst


def scaling(spread: Spread, model: ModelSize, flops: float, cluster: Cluster) -> Scaling:
    """Estimate an update. flops: of one rank's share of it."""
    exchanged = collectives(spread, model)
    return Scaling(spread, exchanged, flops / cluster.flops, sum(cluster.seconds(item) for item in exchanged))


def kinds(exchanged: Sequence[Collective]) -> dict[Kind, float]:
    """Return the bytes that a rank sends by kind."""
    sizes: dict[Kind, float] = {}
    for item in exchanged:
        sizes[item.kind] = sizes.get(item.kind, 0.0) + item.sent
    return sizes
