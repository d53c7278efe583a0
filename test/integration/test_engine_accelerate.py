"""The accelerate engine on 2 and 3 gloo ranks beside the native one: one launch a world size, judged here."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import third_patch

from difftrain.device import choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.engine import accelerate_zero
from difftrain.engine.base import BaseEngine
from difftrain.evaluation import quantile_losses, validate
from difftrain.testing.family import tiny_batch, tiny_step, tiny_uneven_step
from difftrain.testing.spawn import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))  # the ranks are no pytest
from ways import COUNTS, GLOBAL_BATCH, STEPS, built, commit, digest, equal, off, run, spoilt, tensors_of, weights

LR = 1e-4
WORLDS = (2, 3)
PIECES = {2: 3, 3: 2}
PLAIN = {"lr": LR, "terms": 2}
ROUGH = {"lr": 1e-2, "dropout": 0.2, "blocks": 4}
WAYS = ("ddp", "sharded", "zero1", "zero2", "zero3")
UNEVEN = ((4, 1, 3, 2, 4), (2,), (1, 4, 3))  # samples of each micro batch of a step: on some ranks there is none
SHARDED = ("sharded", "zero1", "zero2", "zero3")


# ---------------------------------------------------------------- what the ranks run


def cases(folder: str, before: str) -> None:
    """Run every case on these ranks. before: the folder of another number of ranks."""
    third_patch.apply_for("accelerate", "oss")
    gc.freeze()  # DeepSpeed collects garbage whenever it is set up
    out = Path(folder)
    with Ranks.open(Launch.from_environment(), choose("cpu"), 2.0) as ranks:
        more = (crossed, half, looked_at) if ranks.size == 2 else ()  # what three ranks add nothing to
        found = {case.__name__: case(ranks, out) for case in (losses, uneven, resume, not_finite, scaled, *more)}
        found["other_size"] = other_size(ranks, out, Path(before)) if before else {}
        gathered = ranks.gather(found)
        if ranks.is_logger:
            (out / "found.json").write_text(json.dumps(gathered))


def losses(ranks: Ranks, out: Path) -> dict:
    """Twelve steps, whole and in pieces, beside plain DistributedDataParallel."""
    native = built(ranks, "native", PLAIN)
    found = {"native": run(native, 0, STEPS)}
    for way in WAYS:
        engines = built(ranks, way, PLAIN), built(ranks, way, PLAIN)
        told = [run(engines[0], 0, STEPS), run(engines[1], 0, STEPS // 2, PIECES[ranks.size])]
        apart = off(weights(engines[0]), weights(native))
        norm = float(engines[0].step(tiny_step(30, GLOBAL_BATCH, ranks.rank, ranks.size), COUNTS).grad_norm)
        found[way] = [*told, apart, norm, type(engines[0]._wrapped).__name__]
    found["norm"] = float(native.step(tiny_step(30, GLOBAL_BATCH, ranks.rank, ranks.size), COUNTS).grad_norm)
    return found


def uneven(ranks: Ranks, out: Path) -> dict:
    """Every rank has micro batches of other sizes, or none; the samples that an idle rank runs count nothing."""
    found = {}
    for way in ("native", *WAYS):
        engine = built(ranks, way, PLAIN)
        found[way] = []
        for step in range(9):
            sizes = UNEVEN[step % len(UNEVEN)]
            micro = tiny_uneven_step(step, sizes, ranks.rank, ranks.size)
            found[way].append(float(engine.step(micro, {"samples": float(sum(sizes))}).sums["loss"]))
        found[way].append(digest(engine))
    return found


def resume(ranks: Ranks, out: Path) -> dict:
    """Straight to 8 against 4, a new engine, 4."""
    found = {}
    for way in WAYS:
        straight = built(ranks, way, ROUGH)
        run(straight, 0, 4)
        path = commit(straight, out, f"resume-{way}")
        told = run(straight, 4, 8)
        resumed = built(ranks, way, ROUGH)
        resumed.restore(path)
        again = commit(resumed, out, f"again-{way}")
        same = equal(tensors_of(path), tensors_of(again))
        found[way] = [same, run(resumed, 4, 8) == told, equal(weights(resumed), weights(straight))]
    return found


def crossed(ranks: Ranks, out: Path) -> dict:
    """A state of one engine, taken up by another and written again, is the same state."""
    found = {}
    for way in SHARDED:
        state = out / f"resume-{way}-state"
        native = built(ranks, "native", ROUGH)
        native.restore(state)
        there = commit(native, out, f"native-of-{way}")
        back = built(ranks, way, ROUGH)
        back.restore(there)
        again = commit(back, out, f"back-{way}")
        same = [equal(tensors_of(state), tensors_of(there)), equal(tensors_of(state), tensors_of(again))]
        found[way] = [*same, run(native, 4, 6), run(back, 4, 6)]
    return found


def not_finite(ranks: Ranks, out: Path) -> dict:
    """The last rank alone meets a bad sample, as the first of two micro batches too."""
    found = {}
    for way in WAYS:
        engine = built(ranks, way, PLAIN)
        run(engine, 0, 3)
        before = weights(engine)
        skipped = [float(engine.step(spoilt(3, ranks, value), COUNTS).skipped) for value in (float("nan"), 1e30)]
        kept = equal(weights(engine), before)
        found[way] = [skipped, kept, run(engine, 4, 6), digest(engine)]
    return found


def scaled(ranks: Ranks, out: Path) -> dict:
    """fp16: the scale begins where it is told, halves on all ranks where one overflows, and comes back from a state."""
    found = {}
    for way in ("ddp", "sharded"):
        engine = built(ranks, way, PLAIN, mixed_precision="fp16")
        native = built(ranks, "native", PLAIN, mixed_precision="fp16")
        told = [run(engine, 0, 6), run(native, 0, 6)]
        before, scale = weights(engine), engine._scaler.get_scale()
        skipped = float(engine.step(spoilt(6, ranks, 6e4), COUNTS).skipped)  # finite, and too large for half gradients
        kept = equal(weights(engine), before)
        path = commit(engine, out, f"scaled-{way}")
        other = built(ranks, way, PLAIN, mixed_precision="fp16")
        other.restore(path)
        scales = [scale, engine._scaler.get_scale(), other._scaler.get_scale()]
        found[way] = [told, skipped, kept, scales, run(engine, 7, 9) == run(other, 7, 9), digest(engine)]
    return found


def half(ranks: Ranks, out: Path) -> dict:
    """bf16 through DeepSpeed: half weights with fp32 values, which checkpoints and exports hold."""
    native = built(ranks, "native", PLAIN, mixed_precision="bf16")
    told = run(native, 0, 6)
    found = {"native": told}
    for way in ("zero2", "zero3"):
        engine = built(ranks, way, PLAIN, mixed_precision="bf16")
        mine = run(engine, 0, 6)
        exact = {str(tensor.dtype) for tensor in weights(engine).values()}
        path = commit(engine, out, f"half-{way}")
        resumed = built(ranks, way, PLAIN, mixed_precision="bf16", zero={"zero3_init": way == "zero3"})
        resumed.restore(path)
        same = run(resumed, 6, 9) == run(engine, 6, 9) and equal(weights(resumed), weights(engine))
        gathered = built(ranks, way, PLAIN, mixed_precision="bf16", zero={"zero3_save_16bit": True})
        short = {str(tensor.dtype) for tensor in weights(gathered).values()}
        kept = {str(tensor.dtype) for name, tensor in tensors_of(path).items() if name.startswith("weights")}
        found[way] = [mine, sorted(exact), sorted(short), sorted(kept), same]
    return found


def looked_at(ranks: Ranks, out: Path) -> dict:
    """Stage 3, every weight cut: nine quantiles and a validation of one batch and of three, other weights in place too."""
    found = {}
    real = accelerate_zero.make_plugin

    def cut(*args) -> Any:
        plugin = real(*args)  # DeepSpeed leaves weights below 100,000 numbers whole, which all are here
        plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return plugin

    def looks(engine: BaseEngine, count: int) -> list[float]:
        mine = [tiny_batch(range(8 * n, 8 * n + 4)) for n in range(count)][ranks.rank :: ranks.size]
        rows = quantile_losses(engine, mine, engine.family.features.draws, gather=ranks.gather)
        return [*(row["loss"] for row in rows), validate(engine, mine, gather=ranks.gather).loss]

    for way in ("native", "zero3"):
        with mock.patch.object(accelerate_zero, "make_plugin", cut):
            engine = built(ranks, way, PLAIN)
        told = [looks(engine, 1), run(engine, 0, 2), looks(engine, 3)]  # of one batch the last rank has none
        before = weights(engine)
        with engine.swapped({name: 0.5 * value for name, value, _ in engine.shards()}):
            told.append(looks(engine, 3))
        found[way] = [*told, equal(weights(engine), before), looks(engine, 3) == told[2], run(engine, 2, 4)]
    return found


def other_size(ranks: Ranks, out: Path, before: Path) -> dict:
    """Take up states of another number of ranks, and write what came of it."""
    found = {}
    for way in WAYS:
        engine = built(ranks, way, {**ROUGH, "dropout": 0.0})  # masks are not equal across splits
        engine.restore(before / f"resume-{way}-state")
        again = commit(engine, out, f"taken-{way}")
        found[way] = [equal(tensors_of(again), tensors_of(before / f"resume-{way}-state")), run(engine, 4, 6)]
    return found


# ---------------------------------------------------------------- what is expected


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> dict[int, list[dict]]:
    """Run 2 and 3 ranks; the second takes up states of the first."""
    found: dict[int, list[dict]] = {}
    before = ""
    for world in WORLDS:
        folder = tmp_path_factory.mktemp(f"world{world}")
        run_ranks(world, f"{__file__}::cases", folder, before, timeout_s=300)
        found[world] = json.loads((folder / "found.json").read_text())
        before = str(folder)
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", WAYS)
def test_losses_and_weights_are_those_of_plain_ddp(launched, world, way):
    found = launched[world]
    native = found[0]["losses"]["native"]
    whole, pieces, apart, norm, wrapped = found[0]["losses"][way]
    assert whole == pytest.approx(native, rel=1e-6) and pieces == pytest.approx(native[: STEPS // 2], rel=1e-6)
    assert apart <= LR and norm == pytest.approx(found[0]["losses"]["norm"], rel=1e-4)
    assert all(each["losses"][way][:2] == [whole, pieces] for each in found)
    kinds = {"ddp": "DistributedDataParallel", "sharded": "ShardedDataParallel"}
    assert wrapped == kinds.get(way, "DeepSpeedEngine")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_of_other_sizes_and_none_on_some_ranks_add_up(launched, world, way):
    for each in launched[world]:
        assert each["uneven"][way] == pytest.approx(each["uneven"]["native"], rel=1e-6)
    assert launched[world][0]["uneven"]["native"][:9] == pytest.approx(
        launched[5 - world][0]["uneven"]["native"][:9], rel=1e-6
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", WAYS)
def test_resume_is_bit_exact(launched, world, way):
    assert all(each["resume"][way] == [True, True, True] for each in launched[world])


@pytest.mark.parametrize("way", SHARDED)
def test_a_state_goes_between_engines(launched, way):
    for each in launched[2]:
        there, back, native, again = each["crossed"][way]
        assert there and back
        assert again == pytest.approx(native, rel=1e-5)  # two steps on, at a hundred times the rate


def test_losses_of_weights_that_no_rank_holds_are_those_of_the_native_engine(launched):
    for each in launched[2]:
        native, cut = each["looked_at"]["native"], each["looked_at"]["zero3"]
        assert native[4:6] == cut[4:6] == [True, True]
        for one, other in zip(native[:4] + native[6:], cut[:4] + cut[6:], strict=True):
            assert other == pytest.approx(one, rel=1e-6)
        assert cut[3] != pytest.approx(cut[2], rel=1e-3)  # other weights were in place


@pytest.mark.parametrize("way", WAYS)
def test_a_state_goes_on_with_another_number_of_ranks(launched, way):
    assert all(each["other_size"][way][0] for each in launched[3])
    two, three = launched[3][0]["other_size"]["ddp"][1], launched[3][0]["other_size"][way][1]
    assert two == pytest.approx(three, rel=1e-4)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_finite_on_one_rank_is_skipped_by_all(launched, world, way):
    told = [each["not_finite"][way] for each in launched[world]]
    assert all(each == told[0] for each in told)
    skipped, kept, after, _ = told[0]
    assert skipped == [1.0, 1.0] and kept and all(loss == loss for loss in after)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", ["ddp", "sharded"])
def test_fp16_scales_and_an_overflow_on_one_rank_is_skipped_by_all(launched, world, way):
    told = [each["scaled"][way] for each in launched[world]]
    assert all(each == told[0] for each in told)
    (mine, native), skipped, kept, scales, same, _ = told[0]
    assert mine == pytest.approx(native, rel=1e-5) and skipped == 1.0 and kept and same
    assert scales == [65536.0, 32768.0, 32768.0]


@pytest.mark.parametrize("way", ["zero2", "zero3"])
@pytest.mark.flags("zero3_init_flag", "zero3_save_16bit_model")
def test_half_precision_through_deepspeed(launched, way):
    mine, exact, short, kept, same = launched[2][0]["half"][way]
    assert mine == pytest.approx(launched[2][0]["half"]["native"], rel=2e-2)
    assert exact == kept == ["torch.float32"] and same
    assert short == ["torch.bfloat16"]
