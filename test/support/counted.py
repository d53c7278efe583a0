"""Figures of a step that hang on no machine: operators, copies, waits, allocations, graphs; and those that are committed.

On the CPU they are counted where operators are dispatched below autograd, not in kernels: which kernel a CPU takes, and
what that allocates inside, differs between machines; aten operators of one version of torch do not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from difftrain.config import TrainConfig
from difftrain.contracts import EVERY, Batch
from difftrain.device import choose, use_attention
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.models.registry import make_family
from difftrain.optim.registry import make_optimizer
from difftrain.optim.schedule import make_schedule
from difftrain.testing.batches import cached_batch, tiny_bucket

FILE = Path(__file__).parents[1] / "golden" / "data" / "counters.json"
COPIES = ("aten::copy_", "aten::_to_copy", "aten::clone", "aten::_copy_from", "aten::_copy_from_and_resize")
# what makes the host look at a value
WAITS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::is_nonzero",
    "aten::unique_dim",
    "aten::_unique2",
)
Figures = dict[str, int]
# by how much a figure may differ: whether the device's runtime adds gradients in place hangs on when their last holder goes
SLACK = {("npu", "allocations"): 2}


class TinyStep:
    """The engine around a family's tiny size, and a step of it on what a cache serves."""

    def __init__(self, name: str, device: str = "cpu", **training: Any) -> None:
        cfg = TrainConfig.model_validate(
            {
                "model": {"family": name, "init_from_config": "tiny"},
                "training": {"seed": 1, "device": device, **training},
                "optimizer": {"learning_rate": 1e-4},
            }
        )
        self.family: Any = make_family(cfg)
        parts = self.family.load(deferred=EVERY)
        parts.fill_root()
        parts.frozen.clear()  # all that they make comes with the batch
        self.device = choose(device)
        use_attention(parts.root, self.device, fused=True, choice="auto", precision=cfg.training.mixed_precision)
        self.engine: Any = make_engine(cfg, self.device, Ranks())
        self.engine.build(
            self.family,
            parts,
            lambda groups: make_optimizer(cfg.optimizer, groups, fused_ok=self.device.fused_optimizer),
            lambda optimizer: make_schedule(cfg.optimizer, optimizer, 1000),
            [],
        )

    def batch(self, seed: int) -> Batch:
        """Make a batch, the same for a seed."""
        return cached_batch(self.family, tiny_bucket(self.family.name), 2, seed=seed)

    def step(self, batch: Batch) -> None:
        """Make one update."""
        self.engine.step([batch], dict(batch.counts))


class OperatorCount(TorchDispatchMode):
    """Count what is dispatched, and the memory that operators return which none of their inputs had."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.allocations = self.allocated_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operator and run it."""
        out = func(*args, **(kwargs or {}))
        self.operators[func._schema.name] += 1
        known = {_storage(each) for each in tree_leaves((args, kwargs or {})) if isinstance(each, torch.Tensor)}
        made = {_storage(each): each for each in tree_leaves(out) if isinstance(each, torch.Tensor)}
        for storage, tensor in made.items():
            if storage not in known:
                self.allocations += 1
                self.allocated_bytes += tensor.untyped_storage().nbytes()
        return out


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def on_cpu(name: str) -> Figures:
    """Count a step that is not the first."""
    run = TinyStep(name)
    for seed in range(2):
        run.step(run.batch(seed))
    batch = run.batch(2)
    with OperatorCount() as counted:
        run.step(batch)
    return {
        "operators": counted.operators.total(),
        "copies": sum(counted.operators[each] for each in COPIES),
        "host_waits": sum(counted.operators[each] for each in WAITS),
        "allocations": counted.allocations,
        "allocated_kib": -(-counted.allocated_bytes // 1024),
    }


def compiled(name: str) -> Figures:
    """Compile the blocks without a compiler's code, and count graphs, breaks, and what is compiled again afterwards."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    run = TinyStep(name, compile=True, compile_backend="eager")
    run.step(run.batch(0))
    graphs = counters["stats"]["unique_graphs"]
    for seed in (1, 2):
        run.step(run.batch(seed))
    figures = {
        "graphs": graphs,
        "graph_breaks": sum(counters["graph_break"].values()),
        "recompilations": counters["stats"]["unique_graphs"] - graphs,
    }
    torch._dynamo.reset()
    return figures


@cache
def on_npu(name: str) -> Figures:
    """Count a step that is not the first on the simulated device: what is launched there, and what the host waits for."""
    import simulator

    run = TinyStep(name, "npu")
    for seed in range(2):
        run.step(run.batch(seed))
    batch = run.batch(2)
    torch.npu.synchronize()
    before = torch.npu.memory_stats()["allocation.all.allocated"]
    with simulator.counting() as counted:
        run.step(batch)
    kernels = {each: n for each, n in counted.items() if "::" in each and not each.startswith(("fallback ", "sync "))}
    return {
        "kernels": sum(kernels.values()),
        "copies": sum(n for each, n in counted.items() if each.startswith("copy ") or each in COPIES),
        "host_waits": sum(simulator.host_syncs(counted).values()),
        "fallbacks": sum(simulator.fallbacks(counted).values()),
        "allocations": torch.npu.memory_stats()["allocation.all.allocated"] - before,
    }


class DtypeCount(TorchDispatchMode):
    """Note the dtypes of what operators of a device take and make."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.dtypes = device, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one operator and run it."""
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves((args, kwargs or {}, out)) if isinstance(each, torch.Tensor)]
        self.dtypes |= {each.dtype for each in tensors if each.device.type == self.device}
        return out


def dtypes_on_npu(name: str) -> set[torch.dtype]:
    """Return the dtypes of the first two steps on the simulated device: tables are made in the first."""
    run = TinyStep(name, "npu")
    with DtypeCount("npu") as seen:
        for seed in range(2):
            run.step(run.batch(seed))
    return seen.dtypes


# --- the committed figures


def judge(name: str, way: str, count: Callable[[str], Figures], update: bool) -> None:
    """Compare a family's figures with the committed ones: one that rose is a fault, one that fell is to be written down."""
    figures, known = count(name), json.loads(FILE.read_text()) if FILE.is_file() else {}
    if update:
        known.setdefault(name, {})[way] = figures
        ordered = {family: dict(sorted(ways.items())) for family, ways in sorted(known.items())}
        FILE.write_text(json.dumps(ordered, indent=1) + "\n")
        return
    limits = known.get(name, {}).get(way)
    assert limits is not None and limits.keys() == figures.keys(), f"{name} has no such figures: --update-golden"
    apart = {key: value - limits[key] for key, value in figures.items()}
    changed = {key: by for key, by in apart.items() if abs(by) > SLACK.get((way, key), 0)}
    rose = {key: (limits[key], figures[key]) for key, by in changed.items() if by > 0}
    assert not rose, f"{name}, {way}: a step does more than it did, (committed, now): {rose}"
    fell = {key: (limits[key], figures[key]) for key, by in changed.items() if by < 0}
    assert not fell, f"{name}, {way}: less than is committed; keep it by --update-golden, (committed, now): {fell}"
