"""The fsdp engine on 2, 3 and 4 gloo ranks: one launch a world size, its cases in sequence, judged here."""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))  # the ranks are no pytest
from family_engines import EMA, LR, assembled, commit, equal, family_case, family_engine, family_run, weights
from family_engines import STEPS as FAMILY_STEPS

from difftrain.checkpoint.tensor_files import PIECES, CheckpointReader
from difftrain.config.schema.sections import (
    FsdpSection,
    OptimizerSection,
    TrainConfig,
    TrainingSection,
)
from difftrain.contracts import ConfigFault
from difftrain.device import choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.engine.checkpointing import CheckpointedEngine
from difftrain.engine.snapshot import OPTIMIZER, WEIGHTS
from difftrain.testing.family import TinyFamily, tiny_batch, tiny_step
from difftrain.testing.spawn import run_ranks
from difftrain.train.averages import Averages

GLOBAL_BATCH = 12  # on 2, 3 and 4 ranks, whole and in pieces
COUNTS = {"samples": float(GLOBAL_BATCH)}
STEPS = 10
WORLDS = (2, 3)
WIDEST = 4
PIECES_OF_BATCH = {1: 4, 2: 3, 3: 2, 4: 3}
PLAIN: dict[str, Any] = {"lr": LR, "terms": 2, "width": 10}  # rows that do not divide by 3 or 4
ROUGH: dict[str, Any] = {"lr": 1e-2, "dropout": 0.2, "statistics": True, "width": 10}
NARROW: dict[str, Any] = {"lr": LR, "width": 2}  # fewer rows than ranks: some own nothing of a weight
OPTIMIZERS = (
    "AdamW", "Lion", "SGDNesterov", "AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree", "Muon", "torch.optim.ASGD",
    "torch.optim.Adadelta", "torch.optim.Adagrad", "torch.optim.Adam", "torch.optim.Adamax", "torch.optim.NAdam",
    "torch.optim.RAdam", "torch.optim.RMSprop", "torch.optim.Rprop", "torch.optim.SGD",
)  # fmt: skip


def built(
    ranks: Ranks, options: dict, way: str = "fsdp", fsdp: dict | None = None, optimizer: str = "AdamW", **training
) -> CheckpointedEngine:
    cfg = TrainConfig(
        training=TrainingSection(seed=3, engine=way, **training),
        fsdp=FsdpSection(**(fsdp or {})),
        optimizer=OptimizerSection(type=optimizer, scheduler="cosine", warmup_steps=2),
    )
    return assembled(cfg, ranks, TinyFamily(**options), None, [tiny_batch(range(100, 102))])


def run(engine: CheckpointedEngine, first: int, last: int, pieces: int = 1) -> list[float]:
    deal = (GLOBAL_BATCH, engine.dp_rank, engine.dp_size, pieces)
    return [float(engine.step(tiny_step(step, *deal), COUNTS).sums["loss"]) for step in range(first, last)]


def off(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def held(folder: Path, kinds: tuple[str, ...] = (WEIGHTS, OPTIMIZER)) -> dict[str, torch.Tensor]:
    """Return everything that a checkpoint holds, whole, by kind and name."""
    found: dict[str, torch.Tensor] = {}
    for kind in kinds:
        reader = CheckpointReader(folder, kind, Ranks())
        found |= {f"{kind} {name}": tensor.clone() for name, tensor in reader.tensors(lambda _: True)}
    return found


# ---------------------------------------------------------------- what the ranks run


def cases(folder: str, before: str) -> None:
    """Run every case on these ranks; rank 0 writes what the tests look at. before: a checkpoint of another size."""
    warnings.simplefilter("ignore")
    out, found = Path(folder), {}
    with Ranks.open(Launch.from_environment(), choose("cpu"), 2.0) as ranks:
        for case in (same_as_alone, optimizers, narrow, resume, crossing, not_finite, evaluation, gradients, averages):
            found[case.__name__] = case(ranks, out)
        found["disks"] = disks(ranks, out)
        found["other_size"] = other_size(ranks, out, Path(before)) if before else {}
        if ranks.size != 3:  # which adds nothing to these
            found["held"] = family_case(ranks, out, HELD, "fsdp")
            found["bf16"] = {name: in_bf16(ranks, name, "fsdp") for name in IN_BF16}
        found["unused"] = unused(ranks)
        gathered = ranks.gather(found)
        if ranks.is_logger:
            (out / "found.json").write_text(json.dumps(gathered))


HELD, IN_BF16 = "flux-attention", ("sdxl", "sd3")


def in_bf16(ranks: Ranks, name: str, way: str) -> list[float]:
    return family_run(family_engine(ranks, name, way, "bf16"), 0, FAMILY_STEPS)


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "last": {"fsdp": {"reduce": "last"}},
    "each": {"fsdp": {"reduce": "each"}},
    "never": {"fsdp": {"reshard_after_forward": "never"}},
    "hybrid": {"fsdp": {"shard": "hybrid", "shard_size": 2, "reduce": "each"}},
    "bf16": {"mixed_precision": "bf16"},
}


def ways_of(world: int) -> list[str]:
    return [way for way in WAYS if way != "hybrid" or world % 2 == 0]


def same_as_alone(ranks: Ranks, out: Path) -> dict:
    found = {}
    for way in ways_of(ranks.size):
        engine = built(ranks, PLAIN, **WAYS[way])
        losses = run(engine, 0, STEPS, 1 if way in ("whole", "bf16") else PIECES_OF_BATCH[ranks.size])
        rows = sum(shard.numel() for _, shard, _ in engine.shards())
        everything = weights(engine)
        found[way] = [losses, rows, sum(tensor.numel() for tensor in everything.values())]
        if ranks.is_logger:
            save_file(everything, out / f"{way}.safetensors")
    return found


def optimizers_of(world: int) -> tuple[str, ...]:
    """On three ranks, whose rows are uneven: one by elements and one by rows."""
    return OPTIMIZERS if world != 3 else ("AdamW", "Muon")


def optimizers(ranks: Ranks, out: Path) -> dict:
    """Every optimizer that takes elements or rows; resumed from the middle too."""
    found = {}
    for kind in optimizers_of(ranks.size):
        engine = built(ranks, ROUGH_DRY, optimizer=kind)
        losses = run(engine, 0, 3)
        path = commit(engine, out, f"optimizer-{kind}")
        losses += run(engine, 3, 6)
        resumed = built(ranks, ROUGH_DRY, optimizer=kind)
        resumed.restore(path)
        same = run(resumed, 3, 6) == losses[3:] and equal(weights(resumed), weights(engine))
        with engine.averaged_weights():
            averaged = weights(engine)
        found[kind] = [losses, same]
        if ranks.is_logger:
            save_file(averaged, out / f"optimizer-{kind}.safetensors")
    return found


ROUGH_DRY: dict[str, Any] = {**ROUGH, "lr": 1e-3, "dropout": 0.0, "statistics": False, "blocks": 1}


def narrow(ranks: Ranks, out: Path) -> dict:
    engine = built(ranks, NARROW)
    losses = run(engine, 0, 3)
    path = commit(engine, out, "narrow")
    resumed = built(ranks, NARROW)
    resumed.restore(path)
    empty = sum(not shard.numel() for _, shard, _ in engine.shards())
    return {"losses": losses, "same": run(resumed, 3, 5) == run(engine, 3, 5), "empty": empty}


def resume(ranks: Ranks, out: Path) -> list[bool]:
    straight = built(ranks, ROUGH)
    run(straight, 0, 5)
    path = commit(straight, out, "resume")
    losses = run(straight, 5, 10)
    resumed = built(ranks, ROUGH)
    run(resumed, 0, 1)
    resumed.restore(path)
    return [run(resumed, 5, 10) == losses, equal(weights(resumed), weights(straight))]


def crossing(ranks: Ranks, out: Path) -> dict:
    """A checkpoint of each engine is taken up by the other: the same state, and the same losses from there."""
    found = {}
    for one, other in (("fsdp", "native"), ("native", "fsdp")):
        writer = built(ranks, PLAIN, one)
        run(writer, 0, 4)
        path = commit(writer, out, f"of-{one}")
        reader = built(ranks, PLAIN, other)
        reader.restore(path)
        commit(reader, out, f"of-{one}-by-{other}")
        found[one] = [run(writer, 4, 8), run(reader, 4, 8)]
    return found


def not_finite(ranks: Ranks, out: Path) -> dict:
    """The last rank alone meets a bad sample."""
    found = {}
    for precision in ("no", "fp16"):
        engine = built(ranks, PLAIN, mixed_precision=precision)
        run(engine, 0, 3)
        before = weights(engine)
        micro = tiny_step(3, GLOBAL_BATCH, ranks.rank, ranks.size)
        if ranks.rank == ranks.size - 1:
            micro[0].features["pixels"][0, 0, 0, 0] = float("nan")
        skipped = float(engine.step(micro, COUNTS).skipped)
        kept = equal(weights(engine), before)
        after = run(engine, 4, 6)
        scale = engine._scaler.get_scale() if engine._scaler else 0.0
        found[precision] = [skipped, kept, scale, after]
    return found


def evaluation(ranks: Ranks, out: Path) -> list[dict]:
    """Rank r has r batches of r + 1 samples: the first has none. Before the first step, and after one."""
    found, engine = [], built(ranks, PLAIN)
    for _ in range(2):
        micro = [
            tiny_batch(range(100 * ranks.rank + 10 * i, 100 * ranks.rank + 10 * i + ranks.rank + 1))
            for i in range(ranks.rank)
        ]
        found.append({name: float(value) for name, value in engine.evaluate(micro).items()})
        run(engine, 0, 1)
    return found


class Gradients:
    """Keep the gradients of a step."""

    def __init__(self) -> None:
        self.of: dict[str, torch.Tensor] = {}

    def before_forward(self, number: int, batch: Any) -> None: ...
    def after_forward(self, inputs: Any, terms: Any) -> None: ...
    def after_backward(self, gradients: Any, scale: float) -> None:
        self.of = {name: gradient.clone() for name, gradient in gradients}


def gradients(ranks: Ranks, out: Path) -> dict:
    """An observer sees whole gradients, which are sums; the norm is that of all."""
    engine, seen = built(ranks, PLAIN), Gradients()
    engine.observe(seen)
    norm = float(engine.step(tiny_step(0, GLOBAL_BATCH, ranks.rank, ranks.size), COUNTS).grad_norm)
    if ranks.is_logger:
        save_file(seen.of, out / "gradients.safetensors")
    return {"norm": norm, "repeats": engine.repeat(0, tiny_batch([0]), COUNTS, seen, position=0)}


def averages(ranks: Ranks, out: Path) -> dict:
    """Averages are kept by shards; as checkpoint, in evaluation and exported they are those of one process."""
    engine = built(ranks, PLAIN)
    mean = Averages(EMA, engine)
    for step in range(4):
        run(engine, step, step + 1)
        mean.update(step)
    path, losses = commit(engine, out, "averages", mean), run(engine, 4, 5)
    before = weights(engine)
    with mean.averaged():
        looked = float(engine.evaluate([tiny_batch(range(3))] if ranks.is_logger else [])["loss"])
    again = Averages(EMA, resumed := built(ranks, PLAIN))
    resumed.restore(path)
    again.load(path, ranks, 4)
    same = run(resumed, 4, 5) == losses
    for one, other in zip((mean.ema, *mean.profiles), (again.ema, *again.profiles), strict=True):
        same = same and equal(one.weights, other.weights) and one.updates == other.updates == 4
    mean.store_snapshots(out, 4, ranks, {"config_digest": "", "seed": 3})
    if ranks.is_logger:
        save_file({name: value for name, value in engine.full_weights(mean.ema.weights)}, out / "ema.safetensors")
    else:
        for _ in engine.full_weights(mean.ema.weights):
            pass
    rows = sum(tensor.numel() for tensor in mean.ema.weights.values())
    return {"same": same, "kept": equal(weights(engine), before), "rows": rows, "loss": looked}


def disks(ranks: Ranks, out: Path) -> bool:
    """Every rank is a machine with a disk of its own."""
    apart = dataclasses.replace(ranks, local_rank=0, local_size=1)
    mine = out / f"machine{ranks.rank}"
    straight = built(apart, ROUGH)
    mean = Averages(EMA, straight)
    run(straight, 0, 3)
    mean.update(2)
    commit(straight, mine, "apart", mean)
    resumed = built(apart, ROUGH)
    path = mine / "apart-state"
    resumed.restore(path)
    again = Averages(EMA, resumed)
    again.load(path, apart, 3)
    same = equal(mean.ema.weights, again.ema.weights)
    return same and run(straight, 3, 6) == run(resumed, 3, 6) and equal(weights(straight), weights(resumed))


def other_size(ranks: Ranks, out: Path, before: Path) -> dict:
    """Take up a checkpoint of another number of ranks, averages too, and write what came of it."""
    engine = built(ranks, PLAIN)
    engine.restore(before / "averages-state")
    mean = Averages(EMA, engine)
    mean.load(before / "averages-state", ranks, 4)
    commit(engine, out, "taken", mean)
    return {"losses": run(engine, 4, 8)}


def unused(ranks: Ranks) -> str:
    family = TinyFamily()
    parts = family.load()
    parts.root.extra = torch.nn.Linear(2, 2)
    engine = assembled(
        TrainConfig(training=TrainingSection(seed=3, engine="fsdp")), ranks, family, parts, [tiny_batch(range(2))]
    )
    try:
        run(engine, 0, 1)
    except ConfigFault as fault:
        return str(fault)
    return ""


# ---------------------------------------------------------------- what is expected


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Launched = dict[int, tuple[Path, list[dict]]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory, request) -> Launched:
    """Run 2 and 3 ranks, and nightly 4, each of which takes up a checkpoint of the one before."""
    found: Launched = {}
    before = ""
    widest = any(item.get_closest_marker("nightly") for item in request.session.items)
    for world in (*WORLDS, *([WIDEST] if widest else [])):
        folder = tmp_path_factory.mktemp(f"world{world}")
        run_ranks(world, f"{__file__}::cases", folder, before, timeout_s=300)
        found[world] = folder, json.loads((folder / "found.json").read_text())
        before = str(folder)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Any]:
    """One process of the native engine: losses and weights of every way that several ranks run."""
    plain, halves = built(Ranks(), PLAIN, "native"), built(Ranks(), PLAIN, "native", mixed_precision="bf16")
    return {
        "losses": run(plain, 0, STEPS),
        "weights": weights(plain),
        "bf16": run(halves, 0, STEPS),
        "held": family_case(Ranks(), _out(tmp_path_factory), HELD, "native"),
        "families in bf16": {name: in_bf16(Ranks(), name, "native") for name in IN_BF16},
        "out": _out(tmp_path_factory),
    }


def _out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.getbasetemp() / "alone"
    folder.mkdir(exist_ok=True)
    return folder


worlds = pytest.mark.parametrize("world", [*WORLDS, pytest.param(WIDEST, marks=pytest.mark.nightly)])


@worlds
@pytest.mark.flags("engine", "shard", "shard_size", "fsdp_reshard_after_forward", "fsdp_reduce")
def test_the_losses_and_weights_are_those_of_one_process(launched: Launched, alone, world: int) -> None:
    folder, found = launched[world]
    for way in ways_of(world):
        losses, _, total = found[0]["same_as_alone"][way]
        assert all(each["same_as_alone"][way][0] == losses for each in found), way
        assert losses == pytest.approx(
            alone["bf16" if way == "bf16" else "losses"], rel=2e-2 if way == "bf16" else 1e-6
        ), way
        if way != "bf16":
            assert off(load_file(folder / f"{way}.safetensors"), alone["weights"]) <= LR, way
        copies = 2 if way == "hybrid" and world == 4 else 1
        assert sum(each["same_as_alone"][way][1] for each in found) == copies * total, way  # nothing is held twice


@pytest.mark.parametrize(
    ("world", "kind"),
    [
        pytest.param(world, kind, marks=pytest.mark.nightly if world == WIDEST else ())
        for world in (*WORLDS, WIDEST)
        for kind in optimizers_of(world)
    ],
)
def test_every_optimizer_that_takes_elements_or_rows(launched: Launched, world: int, kind: str) -> None:
    folder, found = launched[world]
    engine = built(Ranks(), ROUGH_DRY, "native", optimizer=kind)
    losses, same = found[0]["optimizers"][kind]
    # directions of Muon are made in bf16: a last bit of a gradient moves them by a thousandth
    assert losses == pytest.approx(run(engine, 0, 6), rel=2e-3 if kind == "Muon" else 1e-5)
    assert all(each["optimizers"][kind] == [losses, True] for each in found) and same
    with engine.averaged_weights():
        assert off(load_file(folder / f"optimizer-{kind}.safetensors"), weights(engine)) <= 1e-3


@worlds
def test_a_rank_may_own_nothing_of_a_weight(launched: Launched, world: int) -> None:
    losses = run(built(Ranks(), NARROW, "native"), 0, 3)
    found = [each["narrow"] for each in launched[world][1]]
    assert all(each["losses"] == pytest.approx(losses, rel=1e-6) and each["same"] for each in found)
    assert (found[-1]["empty"] > 0) == (world > 2)


@worlds
def test_resume_is_bit_equal(launched: Launched, world: int) -> None:
    folder, found = launched[world]
    assert all(each["resume"] == [True, True] for each in found)
    for kind in (WEIGHTS, OPTIMIZER):  # every rank has written its own
        paths = sorted((folder / "resume-state").glob(f"{kind}-*"))
        assert len(paths) == world
        sizes = [path.stat().st_size for path in paths]
        assert max(sizes) < 2 * min(sizes)
        with safe_open(paths[0], framework="pt") as file:
            assert PIECES in file.metadata()


@worlds
def test_each_engine_takes_up_the_others_checkpoint(launched: Launched, world: int) -> None:
    folder, found = launched[world]
    for one, other in (("fsdp", "native"), ("native", "fsdp")):
        assert equal(held(folder / f"of-{one}-state"), held(folder / f"of-{one}-by-{other}-state"))
        straight, taken = found[0]["crossing"][one]
        assert taken == pytest.approx(straight, rel=1e-6)
    assert off(held(folder / "of-fsdp-state"), held(folder / "of-native-state")) < LR


@worlds
def test_more_ranks_take_up_where_fewer_were_and_one_process_where_several_were(
    launched: Launched, alone, world: int, tmp_path: Path
) -> None:
    folder, found = launched[world]
    kinds = (WEIGHTS, OPTIMIZER, "ema", "ema_0.1")
    if world > WORLDS[0]:
        before = launched[world - 1][0]
        assert equal(held(folder / "taken-state", kinds), held(before / "averages-state", kinds))
        assert found[0]["other_size"]["losses"] == pytest.approx(alone["losses"][4:8], rel=1e-6)
    for way in ("native", "fsdp"):
        engine = built(Ranks(), PLAIN, way)
        engine.restore(folder / "averages-state")
        mean = Averages(EMA, engine)
        mean.load(folder / "averages-state", Ranks(), 4)
        assert equal(held(commit(engine, tmp_path, way, mean), kinds), held(folder / "averages-state", kinds))
        assert run(engine, 4, 8) == pytest.approx(alone["losses"][4:8], rel=1e-6)


@worlds
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_bad_sample_on_one_rank_is_skipped_by_all(launched: Launched, world: int, precision: str) -> None:
    found = [each["not_finite"][precision] for each in launched[world][1]]
    assert all(each == found[0] for each in found)
    skipped, kept, scale, after = found[0]
    assert skipped == 1.0 and kept and all(0 < loss < 10 for loss in after)
    assert scale == (65536.0 / 2 if precision == "fp16" else 0.0)


@worlds
def test_evaluation_takes_uneven_and_empty_shares(launched: Launched, world: int) -> None:
    batches = [tiny_batch(range(100 * r + 10 * i, 100 * r + 10 * i + r + 1)) for r in range(world) for i in range(r)]
    engine = built(Ranks(), PLAIN, "native")
    for number in range(2):
        expected = {name: float(value) for name, value in engine.evaluate(batches).items()}
        for each in launched[world][1]:
            assert each["evaluation"][number] == pytest.approx(expected, rel=1e-6)
        run(engine, 0, 1)


@worlds
def test_an_observer_sees_whole_gradients(launched: Launched, world: int) -> None:
    folder, found = launched[world]
    engine, seen = built(Ranks(), PLAIN, "native"), Gradients()
    engine.observe(seen)
    norm = float(engine.step(tiny_step(0, GLOBAL_BATCH), COUNTS).grad_norm)
    assert all(each["gradients"] == {"norm": pytest.approx(norm, rel=1e-6), "repeats": False} for each in found)
    theirs = load_file(folder / "gradients.safetensors")
    assert theirs.keys() == seen.of.keys() and off(theirs, seen.of) < 1e-6 * norm


@worlds
def test_averages_are_kept_by_shards(launched: Launched, world: int) -> None:
    folder, found = launched[world]
    engine = built(Ranks(), PLAIN, "native")
    mean = Averages(EMA, engine)
    for step in range(4):
        run(engine, step, step + 1)
        mean.update(step)
    run(engine, 4, 5)
    with mean.averaged():
        looked = float(engine.evaluate([tiny_batch(range(3))])["loss"])
    for each in found:
        assert each["averages"]["same"] and each["averages"]["kept"]
        assert each["averages"]["loss"] == pytest.approx(looked, rel=1e-6)
    assert sum(each["averages"]["rows"] for each in found) == sum(t.numel() for t in mean.ema.weights.values())
    assert off(load_file(folder / "ema.safetensors"), mean.ema.weights) <= 1e-6
    (snapshot,) = (folder / "ema_snapshots").glob("*.safetensors")
    assert {name: t.shape for name, t in load_file(snapshot).items()} == {
        n: t.shape for n, t in mean.ema.weights.items()
    }


@worlds
def test_machines_with_disks_of_their_own_resume(launched: Launched, world: int) -> None:
    folder, found = launched[world]
    assert all(each["disks"] for each in found)
    for rank in range(world):  # each has its own rows and no others
        assert [path.name for path in (folder / f"machine{rank}" / "apart-state").glob("weights-*")] == [
            f"weights-{rank:05d}.safetensors"
        ]


@worlds
def test_a_parameter_without_a_gradient_is_named_on_every_rank(launched: Launched, world: int) -> None:
    for each in launched[world][1]:
        assert ": extra.weight, extra.bias" in each["unused"]


@pytest.mark.parametrize("world", [WORLDS[0], pytest.param(WIDEST, marks=pytest.mark.nightly)])
def test_a_base_that_is_held_is_sharded_and_stays(launched: Launched, alone, world: int) -> None:
    folder, found = launched[world]
    theirs, ours = found[0]["held"], alone["held"]
    assert theirs["losses"] == pytest.approx(ours["losses"], rel=1e-6) and theirs["resumed"][1]
    assert theirs["evaluated"] == pytest.approx(ours["evaluated"], rel=1e-6)
    for kind, most in (("trained", LR), ("averaged", LR), ("picture", 2.0)):
        one, other = (
            load_file(out / f"{HELD}-{way}-{kind}.safetensors")
            for out, way in ((folder, "fsdp"), (alone["out"], "native"))
        )
        assert off(one, other) <= most, kind


@pytest.mark.parametrize("world", [WORLDS[0], pytest.param(WIDEST, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", IN_BF16)
def test_bf16_is_near_that_of_one_process(launched: Launched, alone, world: int, name: str) -> None:
    losses = launched[world][1][0]["bf16"][name]
    assert losses == pytest.approx(alone["families in bf16"][name], rel=2e-3)
