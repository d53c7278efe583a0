"""How a row of blocks is cut into the stages of a pipeline: by parameters, evenly, by the kind of block, or by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from difftrain.config.rules.pipeline import waiting_share
from difftrain.config.schema.names import BY_HAND, BY_KIND, BY_PARAMETERS, EVENLY, PIECES
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault

if TYPE_CHECKING:
    from torch import nn

    from difftrain.config import TrainConfig
    from difftrain.contracts import Chain

METHOD, SPLIT, STAGES = "training.partition_method", "training.partition_split", "training.pipeline_stages"


class Unit(NamedTuple):
    """A block: its name in the root, its class, and how many parameters it has."""

    name: str
    kind: str
    parameters: int


def cut(
    units: Sequence[Unit], stages: int, method: str, split: Sequence[int], *, entering: int = 0, leaving: int = 0
) -> list[range]:
    """Cut blocks into so many runs, each of one block at least; return their numbers, from 0.

    entering, leaving: parameters beside the blocks in the first and in the last run. split: where method is "manual",
    the blocks with which the runs behind the first begin, counted from 1. Raises ConfigFault.
    """
    if len(units) < stages:
        what = f"makes {stages} stages, and the model has {len(units)} blocks: each stage needs one"
        raise ConfigFault([Fault(option(STAGES), what, f"at most {len(units)}")])
    if method == BY_HAND:
        return _by_hand(len(units), stages, split)
    if method == BY_PARAMETERS:
        weights = [unit.parameters for unit in units]
        weights[0] += entering
        weights[-1] += leaving
    elif method == EVENLY:
        weights = [1] * len(units)
    else:
        pattern = re.compile(method.removeprefix(BY_KIND), re.IGNORECASE)
        weights = [int(bool(pattern.search(unit.kind))) for unit in units]
        if sum(weights) < stages:
            kinds = ", ".join(sorted({unit.kind for unit in units}))
            what = f"{method!r} finds {sum(weights)} of {len(units)} blocks, and there are {stages} stages"
            raise ConfigFault([Fault(option(METHOD), what, f"a regular expression for some of: {kinds}")])
    return _balanced(weights, stages)


def _by_hand(count: int, stages: int, split: Sequence[int]) -> list[range]:
    if len(split) != stages - 1:
        what = f"has {len(split)} numbers, and {stages} stages are cut at {stages - 1} places"
        raise ConfigFault([Fault(option(SPLIT), what, "one number for each stage but the first")])
    ends = [1, *split, count + 1]
    if any(first >= second for first, second in pairwise(ends)):
        what = f"is {list(split)}, and the blocks are 1 to {count}"
        raise ConfigFault([Fault(option(SPLIT), what, f"growing numbers from 2 to {count}: with which stages begin")])
    return [range(first - 1, second - 1) for first, second in pairwise(ends)]


def _balanced(weights: Sequence[int], stages: int) -> list[range]:
    """Cut so that the heaviest run is lightest; of several such cuts the one whose runs differ least (exact)."""
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    # best[n][k]: the cost of the first n blocks in k runs, and where the last of these begins
    best: list[dict[int, tuple[tuple[int, int], int]]] = [{} for _ in sums]
    best[0][0] = ((0, 0), 0)
    for end in range(1, len(sums)):
        for runs in range(1, min(stages, end) + 1):
            costs = []
            for begin in range(runs - 1, end):
                if runs - 1 in best[begin]:
                    (most, squares), _ = best[begin][runs - 1]
                    own = sums[end] - sums[begin]
                    costs.append(((max(most, own), squares + own * own), begin))
            best[end][runs] = min(costs)
    runs_found, end = [], len(weights)
    for runs in range(stages, 0, -1):
        _, begin = best[end][runs]
        runs_found.append(range(begin, end))
        end = begin
    return runs_found[::-1]


# --- A model as the configuration cuts it, and in words


@dataclass(frozen=True)
class Cut:
    """How a model is cut. units: names of its blocks; runs: their numbers in each stage; run_of: the stage of each weight."""

    units: list[str]
    runs: list[range]
    run_of: dict[str, int]
    sizes: dict[str, int]

    @classmethod
    def of(cls, cfg: TrainConfig, chain: Chain, root: nn.Module) -> Cut:
        """Cut a root, whole or without memory, as the configuration says. Raises ConfigFault."""
        training = cfg.training
        sizes = {name: value.numel() for name, value in (*root.state_dict().items(), *root.named_parameters())}
        counts = dict.fromkeys(range(-1, len(chain.units) + 1), 0)
        for name, size in sizes.items():
            counts[chain.owner(name)] += size
        units = [Unit(n, type(root.get_submodule(n)).__name__, counts[i]) for i, n in enumerate(chain.units)]
        total = training.pipeline_stages * PIECES[training.pipeline_schedule]
        ends = {"entering": counts[-1], "leaving": counts[len(units)]}
        runs = cut(units, total, training.partition_method, training.partition_split, **ends)
        run_of = {number: run for run, numbers in enumerate(runs) for number in numbers}
        run_of |= {-1: 0, len(units): total - 1}
        return cls(chain.units, runs, {name: run_of[chain.owner(name)] for name in sizes}, sizes)

    def lines(self, cfg: TrainConfig) -> list[str]:
        """Say which blocks and how many weights each stage has, and how long ranks wait for one another."""
        training = cfg.training
        counts = [0] * len(self.runs)
        for name, size in self.sizes.items():
            counts[self.run_of[name]] += size
        device = [f" (device {n % training.pipeline_stages + 1})" for n in range(len(counts))]
        several = len(counts) > training.pipeline_stages
        lines = [
            f"stage {n + 1} of {len(counts)}{device[n] if several else ''}: {self._blocks(run)}, {counts[n]:,} parameters"
            for n, run in enumerate(self.runs)
        ]
        share = waiting_share(training.pipeline_stages, training.accumulation, training.pipeline_schedule)
        lines.append(
            f"pipeline: {training.pipeline_stages} stages, schedule {training.pipeline_schedule}, "
            f"{training.accumulation} micro batches a step: devices wait {100 * share:.0f} % of the time for one another"
        )
        return lines

    def _blocks(self, run: range) -> str:
        first, last = self.units[run.start], self.units[run.stop - 1]
        return first if first == last else f"{first} to {last}"
