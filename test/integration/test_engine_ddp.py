"""The native engine on 2 and 3 gloo ranks, and nightly 4: one launch a world size, its cases in sequence, judged here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from difftrain import checkpoint
from difftrain.config.schema.sections import OptimizerSection, TrainConfig, TrainingSection
from difftrain.contracts import ConfigFault
from difftrain.device import choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.engine import ddp, make_engine
from difftrain.engine.native import NativeEngine
from difftrain.optim import make_optimizer, make_schedule
from difftrain.report.trace import FOLDER, Trace, file_name
from difftrain.testing.family import TinyFamily, tiny_batch, tiny_step, tiny_uneven_step
from difftrain.testing.spawn import run_ranks
from difftrain.train.diagnosis.non_finite import NonFinite
from difftrain.train.diagnosis.tracing import Tracing
from difftrain.train.shared_checkpoint import newest
from difftrain.train.state import Position, TrainedModel

GLOBAL_BATCH = 12  # on 2, 3 and 4 ranks, whole and in pieces
COUNTS = {"samples": float(GLOBAL_BATCH)}
LR = 1e-4
STEPS = 20
WORLDS, WIDEST = (2, 3), 4
PIECES = {1: 4, 2: 3, 3: 2, 4: 3}
PLAIN = {"lr": LR, "terms": 2}
ROUGH = {"lr": 1e-2, "dropout": 0.2, "statistics": True, "blocks": 6}


def built(
    ranks: Ranks, family: TinyFamily, optimizer: str = "AdamW", fused: dict | None = None, **training
) -> NativeEngine:
    cfg = TrainConfig(
        training=TrainingSection(seed=3, **training),
        optimizer=OptimizerSection(type=optimizer, scheduler="cosine", warmup_steps=2, **(fused or {})),
    )
    engine = make_engine(cfg, choose("cpu"), ranks)
    engine.build(
        family,
        family.load(),
        lambda groups: make_optimizer(cfg.optimizer, groups, dp_size=ranks.size),
        lambda made: make_schedule(cfg.optimizer, made, 2 * STEPS),
        [tiny_batch(range(100, 102))],
    )
    return engine


def run(engine: NativeEngine, first: int, last: int, pieces: int = 1) -> list[float]:
    deal = (GLOBAL_BATCH, engine.dp_rank, engine.dp_size, pieces)
    return [float(engine.step(tiny_step(step, *deal), COUNTS).sums["loss"]) for step in range(first, last)]


def weights(engine: NativeEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_weights()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def commit(engine: NativeEngine, parent: Path, name: str) -> Path:
    snapshot = engine.snapshot()
    return checkpoint.commit(parent, f"{name}-state", snapshot.write, engine.ranks, {"step": engine.position})


def tensors_of(*folders: Path) -> dict[str, torch.Tensor]:
    """Return everything that checkpoint folders hold, by kind and name."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(path for folder in folders for path in folder.glob("*.safetensors")):
        kind = path.name.partition("-")[0]
        found |= {f"{kind} {name}": tensor for name, tensor in load_file(path).items()}
    return found


# ---------------------------------------------------------------- what the ranks run


def cases(folder: str, before: str) -> None:
    """Run every case on these ranks; rank 0 writes what the tests look at. before: a checkpoint of another size."""
    launch = Launch.from_environment()
    out = Path(folder)
    found: dict[str, object] = {}
    with Ranks.open(launch, choose("cpu"), 2.0) as ranks:
        for case in (
            same_as_alone,
            uneven,
            shared_state,
            resume,
            options,
            not_finite,
            origin,
            traced,
            sums,
            evaluation,
            half,
            fused,
        ):
            found[case.__name__] = case(ranks, out)
        found["disks"] = disks(ranks, out)
        found["other_size"] = other_size(ranks, out, Path(before)) if before else {}
        found["unused"] = unused(ranks)  # the last: it leaves a reducer waiting
        gathered = ranks.gather(found)
        if ranks.is_logger:
            (out / "found.json").write_text(json.dumps(gathered))


def same_as_alone(ranks: Ranks, out: Path) -> dict:
    whole, split = built(ranks, TinyFamily(**PLAIN)), built(ranks, TinyFamily(**PLAIN))
    losses = {"whole": run(whole, 0, STEPS), "split": run(split, 0, STEPS, PIECES[ranks.size])}
    if ranks.is_logger:
        save_file(weights(whole), out / "whole.safetensors")
        save_file(weights(split), out / "split.safetensors")
    return losses


UNEVEN = ((4, 1, 3, 2, 4), (2,), (1, 4, 3))  # samples of each micro batch of a step: on some ranks there is none


UNEVEN_WAYS = {"ddp": {}, "oss": {"optimizer": "oss"}, "fused": {"fused": {"fused_backward": True}}}


def run_uneven(engine: NativeEngine, steps: int) -> list[float]:
    found = []
    for step in range(steps):
        sizes = UNEVEN[step % len(UNEVEN)]
        micro = tiny_uneven_step(step, sizes, engine.dp_rank, engine.dp_size)
        found.append(float(engine.step(micro, {"samples": float(sum(sizes))}).sums["loss"]))
    return found


def uneven(ranks: Ranks, out: Path) -> dict:
    """Every rank has micro batches of other sizes, or none; the samples that an idle rank runs count nothing."""
    found = {}
    for name, how in UNEVEN_WAYS.items():
        engine = built(ranks, TinyFamily(**PLAIN), max_grad_norm=0.0, **how)
        found[name] = run_uneven(engine, 12)
        if ranks.is_logger:
            save_file(weights(engine), out / f"uneven-{name}.safetensors")
    return found


def shared_state(ranks: Ranks, out: Path) -> dict:
    """Optimizer state sharded against whole, from its files too."""
    oss, adamw = (built(ranks, TinyFamily(**ROUGH), kind) for kind in ("oss", "AdamW"))
    same = run(oss, 0, 6) == run(adamw, 0, 6) and equal(weights(oss), weights(adamw))
    paths = commit(oss, out, "oss"), commit(adamw, out, "adamw")
    own = sum(tensor.numel() for state in oss.optimizer.optim.state.values() for tensor in state.values())
    crossed = []
    for kind, path in zip(("AdamW", "oss"), paths):
        other = built(ranks, TinyFamily(**ROUGH), kind)
        other.restore(path)
        commit(other, out, f"{kind}-again")
        crossed.append(run(other, 6, 10))
    straight = run(oss, 6, 10)
    return {"same": same, "own": own, "crossed": [each == straight for each in crossed]}


def resume(ranks: Ranks, out: Path) -> dict:
    """Straight to 10 against 5, a new engine, 5; and once without the warm passes, which must be seen to matter."""
    same = {}
    for kind in ("AdamW", "oss", "torch.optim.SGD"):
        straight = built(ranks, TinyFamily(**ROUGH), kind)
        run(straight, 0, 5)
        path = commit(straight, out, f"resume-{kind}")
        losses = run(straight, 5, 10)
        resumed = built(ranks, TinyFamily(**ROUGH), kind)
        resumed.restore(newest(out, f"resume-{kind}", ranks))
        same[kind] = [run(resumed, 5, 10) == losses, equal(weights(resumed), weights(straight))]
    passes, ddp.WARM_PASSES = ddp.WARM_PASSES, 0
    cold = built(ranks, TinyFamily(**ROUGH), kind)
    ddp.WARM_PASSES = passes
    cold.restore(path)
    run(cold, 5, 10)
    return {"same": same, "cold": equal(weights(cold), weights(straight))}


def options(ranks: Ranks, out: Path) -> dict:
    found = {}
    for name in ("ddp_bucket_view", "ddp_static_graph"):
        engine = built(ranks, TinyFamily(**PLAIN), **{name: True})
        reached = [engine._wrapped.gradient_as_bucket_view, engine._wrapped.static_graph]
        found[name] = [run(engine, 0, 6, PIECES[ranks.size]), reached]
    return found


def not_finite(ranks: Ranks, out: Path) -> dict:
    """The last rank alone meets a bad sample."""
    found = {}
    for kind, precision in (("AdamW", "no"), ("oss", "no"), ("oss", "fp16")):
        engine = built(ranks, TinyFamily(**PLAIN), kind, mixed_precision=precision)
        run(engine, 0, 3)
        before = weights(engine)
        micro = tiny_step(3, GLOBAL_BATCH, ranks.rank, ranks.size)
        if ranks.rank == ranks.size - 1:
            micro[0].features["pixels"][0, 0, 0, 0] = float("nan")
        skipped = float(engine.step(micro, COUNTS).skipped)
        kept = equal(weights(engine), before)
        after = run(engine, 4, 6)
        scale = engine._scaler.get_scale() if engine._scaler else 0.0
        found[f"{kind} {precision}"] = [skipped, kept, scale, after, _hash(engine)]
    return found


def origin(ranks: Ranks, out: Path) -> dict:
    """A block of the last rank alone makes a NaN, which all ranks look for; then they go on as if they had not."""
    micro = tiny_step(0, GLOBAL_BATCH, ranks.rank, ranks.size, PIECES[ranks.size])
    fault: list[float] = [float("nan")] if ranks.rank == ranks.size - 1 else []
    found: dict = {"skipped": [], "after": [], "sentence": ""}
    for searches in (True, False):
        engine = built(ranks, TinyFamily(**PLAIN), ddp_bucket_view=True)
        block = engine.root.get_submodule("blocks.1")
        hook = block.register_forward_hook(lambda _, __, made: made * fault[0] if fault else made)
        found["skipped"].append(float(engine.step(micro, COUNTS).skipped))
        if searches:
            model = TrainedModel(engine.family, engine.parts, engine, None)
            search = NonFinite(model, ranks, lambda _: micro, lambda _: GLOBAL_BATCH)
            found["sentence"] = search(1, skipped=1, updated=0)
        hook.remove()
        found["after"].append(run(engine, 1, 4, PIECES[ranks.size]))
    return found


def traced(ranks: Ranks, out: Path) -> dict:
    """Every rank writes its own share of a step; the steps are those of a run that nobody looks at."""
    engine = built(ranks, TinyFamily(**PLAIN))
    cfg = engine.cfg.model_copy(update={
        "logging": engine.cfg.logging.model_copy(update={"trace": "2"}),
        "save": engine.cfg.save.model_copy(update={"output_dir": str(out)}),
    })  # fmt: skip
    clock = SimpleNamespace(paused=lambda _: contextlib.nullcontext())
    hook = Tracing(cfg, TrainedModel(engine.family, engine.parts, engine, None), choose("cpu"), ranks, clock)
    hook.before_training(Position(0, steps_left=4))
    losses = []
    for step in range(4):
        losses += run(engine, step, step + 1, PIECES[ranks.size])
        hook.after_step(Position(step + 1, steps_left=3 - step))
    return {"losses": losses}


def sums(ranks: Ranks, out: Path) -> dict:
    """The reduced gradient against the exact sum of every rank's own."""
    engine = built(ranks, TinyFamily(**PLAIN))
    shares = [tiny_batch(range(10 * rank, 10 * rank + 3)) for rank in range(ranks.size)]
    sum(engine._forward(shares[ranks.rank], engine._wrapped).values()).backward()
    reduced = {name: p.grad.clone() for name, p in engine.root.named_parameters()}
    alone = []
    for share in shares:
        engine.root.zero_grad()
        sum(engine._forward(share, engine.root).values()).backward()
        alone.append({name: p.grad.clone() for name, p in engine.root.named_parameters()})
    exact = {name: torch.stack([each[name].double() for each in alone]).sum(0) for name in reduced}
    off = max(float((reduced[name] - exact[name]).abs().max() / exact[name].abs().max()) for name in exact)
    return {"bits": all(torch.equal(reduced[name], exact[name].float()) for name in exact), "off": off}


def evaluation(ranks: Ranks, out: Path) -> dict:
    """Rank r has r batches of r + 1 samples: the first has none."""
    engine = built(ranks, TinyFamily(**PLAIN))
    micro = [
        tiny_batch(range(100 * ranks.rank + 10 * i, 100 * ranks.rank + 10 * i + ranks.rank + 1))
        for i in range(ranks.rank)
    ]
    return {name: float(value) for name, value in engine.evaluate(micro).items()}


def disks(ranks: Ranks, out: Path) -> dict:
    """Every rank is a machine with a disk of its own."""
    apart = dataclasses.replace(ranks, local_rank=0, local_size=1)
    mine = out / f"machine{ranks.rank}"
    same = {}
    for kind in ("AdamW", "oss"):
        straight = built(apart, TinyFamily(**ROUGH), kind)
        run(straight, 0, 3)
        commit(straight, mine, kind)
        resumed = built(apart, TinyFamily(**ROUGH), kind)
        resumed.restore(newest(mine, kind, apart))
        same[kind] = run(straight, 3, 6) == run(resumed, 3, 6) and equal(weights(straight), weights(resumed))
    return same


def other_size(ranks: Ranks, out: Path, before: Path) -> dict:
    """Take up a checkpoint of another number of ranks, and write what came of it."""
    found = {}
    for kind, name in (("AdamW", "adamw-state"), ("oss", "oss-state")):
        engine = built(ranks, TinyFamily(**ROUGH), kind)
        engine.restore(before / name)
        commit(engine, out, f"taken-{kind}")
        plain = built(ranks, TinyFamily(**{**ROUGH, "dropout": 0.0}), kind)  # masks are not equal across splits
        plain.restore(before / name)
        found[kind] = run(plain, 6, 10)
    return found


def unused(ranks: Ranks) -> str:
    family = TinyFamily()
    parts = family.load()
    parts.root.extra = torch.nn.Linear(2, 2)
    family.load = lambda meta=False: parts
    try:
        built(ranks, family)
    except ConfigFault as fault:
        return str(fault)
    return ""


HALF = {"mixed_precision": "bf16", "full_precision": "bf16"}


def half(ranks: Ranks, out: Path) -> dict:
    """Weights in bf16: every way of keeping them, whole and with sharded state, resumed, and met by a bad sample."""
    found = {}
    for kept in ("fp32", "kahan", "stochastic", "none"):
        engines = [
            built(ranks, TinyFamily(**ROUGH_HALF), kind, **HALF, master_weights=kept) for kind in ("AdamW", "oss")
        ]
        losses = [run(engine, 0, 4) for engine in engines]
        equal_ways = losses[0] == losses[1] and equal(_exact(engines[0]), _exact(engines[1]))
        path = commit(engines[1], out, f"half-{kept}")
        resumed = built(ranks, TinyFamily(**ROUGH_HALF), "AdamW", **HALF, master_weights=kept)
        resumed.restore(path)
        same = run(resumed, 4, 7) == run(engines[1], 4, 7) and equal(_exact(resumed), _exact(engines[1]))
        before = _exact(resumed)
        skipped = float(resumed.step(_spoilt(7, ranks), COUNTS).skipped)
        kept_whole = equal(_exact(resumed), before)
        found[kept] = [equal_ways, same, [skipped, kept_whole], losses[0], _hash(resumed)]
    return found


ROUGH_HALF = {"lr": 1e-2, "dropout": 0.2, "blocks": 6}


def _exact(engine: NativeEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor, _ in engine.shards()}


def _spoilt(step: int, ranks: Ranks) -> list:
    micro = tiny_step(step, GLOBAL_BATCH, ranks.rank, ranks.size)
    if ranks.rank == ranks.size - 1:
        micro[0].features["pixels"][0, 0, 0, 0] = float("nan")
    return micro


def fused(ranks: Ranks, out: Path) -> dict:
    """Updates during the backward pass: gradients are summed in the hooks, in one order."""
    found = {}
    for name, how in (("backward", {"fused_backward": True}), ("groups", {"fused_groups": 4})):
        engine = built(ranks, TinyFamily(**PLAIN), fused=how, max_grad_norm=0.0)
        losses = run(engine, 0, 6)
        path = commit(engine, out, f"fused-{name}")
        resumed = built(ranks, TinyFamily(**PLAIN), fused=how, max_grad_norm=0.0)
        resumed.restore(path)
        same = run(resumed, 6, 9) == run(engine, 6, 9) and equal(weights(resumed), weights(engine))
        before = weights(engine)
        skipped = float(engine.step(_spoilt(9, ranks), COUNTS).skipped)
        plain = isinstance(engine._wrapped, type(engine.root))
        found[name] = [losses, same, [skipped, equal(weights(engine), before)], plain, _hash(engine)]
    return found


def _hash(engine: NativeEngine) -> float:
    return float(sum(tensor.double().abs().sum() for tensor in weights(engine).values()))


# ---------------------------------------------------------------- what is expected


@pytest.fixture(scope="module")
def launched(tmp_path_factory, request) -> dict[int, tuple[Path, list[dict]]]:
    """Run 2 and 3 ranks, and nightly 4, each of which takes up a checkpoint of the one before."""
    found: dict[int, tuple[Path, list[dict]]] = {}
    before = ""
    widest = any(item.get_closest_marker("nightly") for item in request.session.items)
    for world in (*WORLDS, *([WIDEST] if widest else [])):
        folder = tmp_path_factory.mktemp(f"world{world}")
        run_ranks(world, f"{__file__}::cases", folder, before, timeout_s=180)
        found[world] = folder, json.loads((folder / "found.json").read_text())
        before = str(folder)
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = built(Ranks(), TinyFamily(**PLAIN))
    return run(engine, 0, STEPS), weights(engine)


worlds = pytest.mark.parametrize("world", [*WORLDS, pytest.param(WIDEST, marks=pytest.mark.nightly)])


@worlds
@pytest.mark.parametrize("way", UNEVEN_WAYS)
def test_micro_batches_of_other_sizes_and_none_on_some_ranks_add_up(launched, world, way):
    engine = built(Ranks(), TinyFamily(**PLAIN), max_grad_norm=0.0)
    wanted = run_uneven(engine, 12)
    folder, found = launched[world]
    assert all(each["uneven"][way] == found[0]["uneven"][way] for each in found)
    assert found[0]["uneven"][way] == pytest.approx(wanted, rel=1e-6)
    theirs = load_file(folder / f"uneven-{way}.safetensors")
    assert max(float((theirs[name] - value).abs().max()) for name, value in weights(engine).items()) <= LR


@worlds
def test_the_rank_and_the_module_that_made_a_nan_are_named_to_all(launched, world):
    _, found = launched[world]
    for each in found:
        searched, plain = each["origin"]["after"]
        assert each["origin"]["skipped"] == [1.0, 1.0] and searched == plain == found[0]["origin"]["after"][1]
        assert re.findall(r"rank (\d).*? is (blocks\.\d)\b", each["origin"]["sentence"]) == [
            (str(world - 1), "blocks.1")
        ]
        assert len(re.findall(r"ranks? \d", each["origin"]["sentence"])) == 1


@pytest.mark.flags("trace")
@worlds
def test_each_rank_traces_its_own_share_and_one_of_them_the_gradients_of_all(launched, world):
    folder, found = launched[world]
    assert all(each["traced"]["losses"] == found[0]["same_as_alone"]["split"][:4] for each in found)
    traces = [Trace.read(folder / FOLDER / file_name(2, rank)) for rank in range(world)]
    assert len(list((folder / FOLDER).iterdir())) == world
    assert len({each["forward/root/0.0/input.x_t"].tobytes() for each in traces}) == world
    assert [any(name.startswith("gradient/") for name in each.tensors) for each in traces] == [True] + [False] * (
        world - 1
    )
    if world > WORLDS[0]:  # the sum over all ranks is that of any number
        other = Trace.read(launched[WORLDS[0]][0] / FOLDER / file_name(2, 0))
        for name in (each for each in traces[0].tensors if each.startswith("gradient/")):
            assert traces[0][name] == pytest.approx(other[name], rel=1e-3, abs=1e-6)


@worlds
@pytest.mark.parametrize("way", ["whole", "split"])
def test_ranks_and_pieces_give_the_losses_of_one_process(launched, alone, world, way):
    folder, found = launched[world]
    losses, expected = alone
    assert all(each["same_as_alone"][way] == found[0]["same_as_alone"][way] for each in found)
    assert found[0]["same_as_alone"][way] == pytest.approx(losses, rel=1e-6)
    got = load_file(folder / f"{way}.safetensors")
    assert got.keys() == expected.keys()
    assert max(float((got[name] - expected[name]).abs().max()) for name in got) <= LR


@worlds
def test_sharded_and_whole_optimizer_state_are_one(launched, world):
    folder, found = launched[world]
    assert all(each["shared_state"]["same"] for each in found)
    assert all(each["shared_state"]["crossed"] == [True, True] for each in found)
    oss, adamw = tensors_of(folder / "oss-state"), tensors_of(folder / "adamw-state")
    assert len(oss) > 80 and equal(oss, adamw)
    assert equal(tensors_of(folder / "AdamW-again-state"), oss) and equal(tensors_of(folder / "oss-again-state"), oss)
    state = sum(t.numel() for name, t in oss.items() if name.startswith("optimizer"))
    assert sum(each["shared_state"]["own"] for each in found) == state  # nothing is held twice
    assert all(each["shared_state"]["own"] < 0.75 * state for each in found)
    assert len(list((folder / "adamw-state").glob("weights-*.safetensors"))) == world  # ranks share the writing


@worlds
def test_resume_is_bit_equal(launched, world):
    _, found = launched[world]
    for each in found:
        assert each["resume"]["same"] == {kind: [True, True] for kind in ("AdamW", "oss", "torch.optim.SGD")}
    if world > 2:  # a sum of two is the same in either order
        assert not any(each["resume"]["cold"] for each in found)


@pytest.fixture(scope="module")
def free() -> list[float]:
    """The losses of one process that does not clip."""
    return run(built(Ranks(), TinyFamily(**PLAIN), max_grad_norm=0.0), 0, 6)


@worlds
@pytest.mark.flags("ddp_gradient_as_bucket_view", "ddp_static_graph")
@pytest.mark.parametrize("name", ["ddp_bucket_view", "ddp_static_graph"])
def test_options_change_no_figure(launched, alone, world, name):
    losses, (views, static) = launched[world][1][0]["options"][name]
    assert losses == pytest.approx(alone[0][:6], rel=1e-6)
    assert (views, static) == (name == "ddp_bucket_view", name == "ddp_static_graph")


@worlds
@pytest.mark.parametrize("kept", ["fp32", "kahan", "stochastic", "none"])
@pytest.mark.flags("full_bf16", "master_weights")
def test_half_weights_on_several_ranks(launched, world, kept):
    found = [each["half"][kept] for each in launched[world][1]]
    for equal_ways, same, skipped, losses, total in found:
        assert equal_ways and same and skipped == [1.0, True]
        assert losses == found[0][3] and total == found[0][4]
    if kept == "kahan":
        assert found[0][3] == launched[world][1][0]["half"]["fp32"][3]


@worlds
@pytest.mark.parametrize("how", ["backward", "groups"])
@pytest.mark.flags("fused_backward_pass", "fused_optimizer_groups")
def test_updates_during_the_backward_on_several_ranks(launched, free, world, how):
    found = [each["fused"][how] for each in launched[world][1]]
    for losses, same, skipped, plain, total in found:
        assert losses == pytest.approx(free, rel=1e-6) and same and skipped == [1.0, True] and plain
        assert total == found[0][4]


@worlds
@pytest.mark.parametrize("how", ["AdamW no", "oss no", "oss fp16"])
def test_a_bad_sample_on_one_rank_is_skipped_by_all(launched, world, how):
    for each in launched[world][1]:
        skipped, kept, scale, after, total = each["not_finite"][how]
        assert skipped == 1.0 and kept
        assert scale == (65536.0 / 2 if "fp16" in how else 0.0)
        assert all(0 < loss < 10 for loss in after)
        assert total == launched[world][1][0]["not_finite"][how][-1]


@worlds
def test_gradients_are_summed_and_not_averaged(launched, world):
    for each in launched[world][1]:
        assert each["sums"]["off"] < 1e-6
        assert each["sums"]["bits"] or world > 2


@worlds
def test_evaluation_takes_uneven_and_empty_shares(launched, world):
    batches = [tiny_batch(range(100 * r + 10 * i, 100 * r + 10 * i + r + 1)) for r in range(world) for i in range(r)]
    engine = built(Ranks(), TinyFamily(**PLAIN))
    expected = {name: float(value) for name, value in engine.evaluate(batches).items()}
    for each in launched[world][1]:
        assert each["evaluation"] == pytest.approx(expected, rel=1e-6)


@worlds
def test_machines_with_disks_of_their_own_resume(launched, world):
    folder, found = launched[world]
    assert all(each["disks"] == {"AdamW": True, "oss": True} for each in found)
    assert not list((folder / "machine1" / "AdamW-state").glob("weights-*"))  # it had to be sent
    everything = tensors_of(*(folder / f"machine{rank}" / "oss-state" for rank in range(world)))
    assert equal(everything, tensors_of(folder / "machine0" / "AdamW-state"))


@pytest.mark.parametrize("world", [*WORLDS[1:], pytest.param(WIDEST, marks=pytest.mark.nightly)])
def test_more_ranks_take_up_where_fewer_were(launched, world):
    folder, found = launched[world]
    before = launched[world - 1][0]
    for kind, name in (("AdamW", "adamw-state"), ("oss", "oss-state")):
        assert equal(tensors_of(folder / f"taken-{kind}-state"), tensors_of(before / name))
        assert found[0]["other_size"][kind] == found[-1]["other_size"][kind]


@worlds
@pytest.mark.parametrize("name", ["adamw-state", "oss-state"])
def test_one_process_takes_up_where_several_were(launched, world, name, tmp_path):
    folder, _ = launched[world]
    engine = built(Ranks(), TinyFamily(**ROUGH))
    engine.restore(folder / name)
    assert equal(tensors_of(commit(engine, tmp_path, "taken")), tensors_of(folder / name))


@worlds
def test_a_parameter_without_a_gradient_is_named_on_every_rank(launched, world):
    for each in launched[world][1]:
        assert ": extra.weight, extra.bias" in each["unused"]
