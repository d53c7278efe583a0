"""The pipeline engine on 2 gloo ranks, and nightly on 2 stages of 2 replicas: one launch each, its cases in sequence."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from safetensors.torch import load_file, save_file

from difftrain import checkpoint
from difftrain.config import TrainConfig
from difftrain.config.schema.sections import EmaSection, OptimizerSection, TrainingSection
from difftrain.contracts import Batch, ConfigFault, Inputs
from difftrain.device import choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.engine.pipeline import PipelineEngine
from difftrain.optim import make_optimizer, make_schedule
from difftrain.testing.family import TinyFamily, tiny_batch, tiny_step
from difftrain.testing.spawn import run_ranks
from difftrain.train.averages import Averages

FAMILIES = ("sdxl", "sd3", "flux")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb")
MICRO, STEPS, AT = 3, 4, 2  # micro batches of a step, steps, and after how many of them a checkpoint is written
LR = 1e-3
COUNTS = {"samples": 12.0}
DECAY = 0.5
ON_PATH = {"PYTHONPATH": os.pathsep.join((str(Path(families.__file__).parent), os.environ.get("PYTHONPATH", "")))}


# ---------------------------------------------------------------- engines and what they are given


def config(name: str, **training: Any) -> TrainConfig:
    """Return a tiny family's configuration: SDXL with its text encoders, SD3-Light with all that rides along."""
    model = {"sdxl": {"train_text_encoder": True}, "sd3": {"train_type": "sd3_light_pretrain", "num_layers": 4}}
    sections: dict[str, dict[str, Any]] = {"training": {"seed": 3, **training}}
    if name == "sd3":
        sections |= {
            "loss": {"text_recon_gamma": 0.2, "text_recon_target_layer": 1},
            "tread": {"share": 0.5, "start": 2, "end": 3},
        }
    return families.config(name, sections, **model.get(name, {}))


def built(cfg: TrainConfig, ranks: Ranks, family: Any = None) -> Any:
    engine: Any = make_engine(cfg, choose("cpu"), ranks)
    family = family or families.made(cfg)
    engine.build(
        family,
        family.load(),
        lambda groups: make_optimizer(cfg.optimizer, groups, dp_size=engine.dp_size),
        lambda made: make_schedule(cfg.optimizer, made, 20),
        [],
    )
    return engine


def micro_of(engine: Any, step: int, replicas: int) -> list[Batch]:
    """Return a rank's micro batches: of all of a step number r, r + replicas, ..., as the loader deals them."""
    every = range(MICRO * replicas)
    own = every[engine.dp_rank :: engine.dp_size]
    family, parts = engine.family, engine.parts
    bucket = families.bucket_of(family.name)
    captions = ("a red cat on a table", "two dogs")
    return [families.batch_of(family, bucket, captions, seed=100 * step + n, parts=parts) for n in own]


def run(engine: Any, averages: Averages | None, first: int, last: int, replicas: int) -> list[float]:
    losses = []
    for step in range(first, last):
        counts = {"samples": 2.0 * MICRO * replicas}
        losses.append(float(engine.step(micro_of(engine, step, replicas), counts).sums["loss"]))
        if averages is not None:
            averages.update(step)
    return losses


def weights(engine: Any, source: Any = None) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().contiguous() for name, tensor in engine.full_weights(source)}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def averages_of(engine: Any) -> Averages:
    return Averages(EmaSection(enable=True, decay=DECAY, update_every=1), engine)


def commit(engine: Any, averages: Averages | None, parent: Path, name: str) -> Path:
    snapshot = engine.snapshot()

    def write(folder: Path) -> list[Path]:
        return snapshot.write(folder) + (averages.snapshot()(folder) if averages is not None else [])

    return checkpoint.commit(parent, f"{name}-state", write, engine.ranks, {"step": engine.position})


def restored(cfg: TrainConfig, ranks: Ranks, path: Path) -> tuple[Any, Averages]:
    engine = built(cfg, ranks)
    engine.restore(path)
    averages = averages_of(engine)
    averages.load(path, ranks, engine.position)
    return engine, averages


def drawn(engine: Any, inputs: Inputs) -> torch.Tensor | None:
    """Call the denoiser twice as a sampler does: on the rank that leads, while the others answer."""
    with engine.drawing() as predict:
        if not engine.leads:
            return None
        predict = predict or engine.predict
        with torch.no_grad():
            return torch.stack([predict(inputs), predict(inputs)])


def looked_at(engine: Any, averages: Averages, replicas: int) -> dict[str, Any]:
    """Return what is evaluated, drawn and exported, of raw weights and averaged ones."""
    batch = micro_of(engine, 50, replicas)[0]
    batch = dataclasses.replace(batch, draws={n: v for n, v in batch.draws.items() if n != "keep"}, step=None)
    first = engine.dp_rank == 0  # of several replicas one has something to evaluate
    sums = {name: float(value) for name, value in engine.evaluate([batch] if first else []).items()}
    with averages.averaged():
        own = {name: float(value) for name, value in engine.own_sums([batch] if first else []).items()}
        inputs = engine.family.inputs(batch, engine.parts) if engine.leads else None
        with torch.no_grad():
            if inputs is not None:
                inputs.conditions = engine.root.text(inputs.conditions)
        output = drawn(engine, inputs) if first else None  # type: ignore[arg-type]
    return {"sums": sums, "own": own, "drawn": output}


# ---------------------------------------------------------------- what the ranks run


def cases(folder: str, world: str) -> None:
    """Run every case on these ranks; rank 0 writes what the tests look at."""
    out = Path(folder)
    found: dict[str, Any] = {}
    with Ranks.open(Launch.from_environment(), choose("cpu"), 2.0) as ranks:
        torch.set_num_threads(1)
        for name in FAMILIES if world == "2" else ("flux",):
            found[name] = as_alone(ranks, out, name)
        found["tiny"] = tiny_cases(ranks, out)
        gathered = ranks.gather(found)
        if ranks.is_logger:
            (out / f"found{world}.json").write_text(json.dumps(gathered))


def as_alone(ranks: Ranks, out: Path, name: str) -> dict:
    replicas = ranks.size // 2
    cfg = config(name, pipeline_stages=2, accumulation=MICRO, gradient_checkpointing=name == "flux")
    engine = built(cfg, ranks)
    averages = averages_of(engine)
    held = sum(parameter.numel() for parameter in engine.root.parameters())
    losses = run(engine, averages, 0, AT, replicas)
    path = commit(engine, averages, out, f"{name}{ranks.size}")
    losses += run(engine, averages, AT, STEPS, replicas)
    seen = looked_at(engine, averages, replicas)
    trained, averaged = weights(engine), weights(engine, averages.ema.weights)
    if ranks.is_logger:
        save_file(trained, out / f"{name}{ranks.size}.safetensors")
        save_file(averaged, out / f"{name}{ranks.size}-ema.safetensors")
        save_file({"drawn": seen["drawn"]}, out / f"{name}{ranks.size}-drawn.safetensors")

    # a resume, of its own checkpoint and of one process's
    again, its_averages = restored(cfg, ranks, path)
    resumed = run(again, its_averages, AT, STEPS, replicas) == losses[AT:]
    same = [resumed, equal(weights(again), trained), equal(weights(again, its_averages.ema.weights), averaged)]
    other, _ = restored(cfg, ranks, out / f"{name}{replicas}x-state")
    return {
        "losses": losses,
        "sums": seen["sums"],
        "own": seen["own"],
        "held": held,
        "resumed": same,
        "from_alone": run(other, None, AT, STEPS, replicas),
    }


def tiny_config(**training: Any) -> TrainConfig:
    settings = {"seed": 3, "pipeline_stages": 2, "accumulation": MICRO} | training
    return TrainConfig(
        training=TrainingSection(**settings), optimizer=OptimizerSection(scheduler="cosine", warmup_steps=2)
    )


TINY = {"lr": LR, "terms": 2, "blocks": 6}


def tiny_run(engine: Any, first: int, last: int, pieces: int = MICRO) -> list[float]:
    share = (12, engine.dp_rank, engine.dp_size, pieces)
    return [float(engine.step(tiny_step(step, *share), COUNTS).sums["loss"]) for step in range(first, last)]


def tiny_cases(ranks: Ranks, out: Path) -> dict:
    found: dict[str, Any] = {}
    for schedule in SCHEDULES:
        engine = built(tiny_config(pipeline_schedule=schedule), ranks, TinyFamily(**TINY))
        found[schedule] = tiny_run(engine, 0, STEPS), total(engine)
        found[schedule] += tiny_run(engine, STEPS, STEPS + 1, 1), float(engine.evaluate([tiny_batch(range(3))])["loss"])
    for precision in ("no", "fp16"):
        engine = built(tiny_config(mixed_precision=precision), ranks, TinyFamily(**TINY))
        tiny_run(engine, 0, 1)
        before, micro = weights(engine), tiny_step(1, 12, engine.dp_rank, engine.dp_size, MICRO)
        if engine.dp_rank == engine.dp_size - 1:
            micro[1].features["pixels"][0, 0, 0, 0] = float("nan")
        skipped = float(engine.step(micro, COUNTS).skipped)
        scale = engine._scaler.get_scale() if engine._scaler else 0.0
        found[f"skip {precision}"] = [skipped, equal(weights(engine), before), scale, tiny_run(engine, 2, 4)]
    half = {"mixed_precision": "bf16", "full_precision": "bf16"}
    for kept in ("fp32", "kahan", "stochastic"):
        engine = built(tiny_config(**half, master_weights=kept), ranks, TinyFamily(**TINY))
        tiny_run(engine, 0, 2)
        path = commit(engine, None, out, f"half{ranks.size}-{kept}")
        again = built(tiny_config(**half, master_weights=kept), ranks, TinyFamily(**TINY))
        again.restore(path)
        found[f"half {kept}"] = [
            tiny_run(again, 2, 4) == tiny_run(engine, 2, 4),
            equal(weights(again), weights(engine)),
        ]

    # machines with disks of their own
    apart = dataclasses.replace(ranks, local_rank=0, local_size=1)
    engine = built(tiny_config(), apart, TinyFamily(**TINY))
    tiny_run(engine, 0, 2)
    path = commit(engine, None, out / f"machine{ranks.size}-{ranks.rank}", "own")
    again = built(tiny_config(), apart, TinyFamily(**TINY))
    again.restore(path)
    found["disks"] = [tiny_run(again, 2, 4) == tiny_run(engine, 2, 4), equal(weights(again), weights(engine))]
    try:
        make_engine(tiny_config(pipeline_stages=3), choose("cpu"), ranks)
    except ConfigFault as fault:
        found["three"] = str(fault)
    return found


def total(engine: Any) -> float:
    return float(sum(tensor.double().abs().sum() for tensor in weights(engine).values()))


# ---------------------------------------------------------------- what is expected


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


class Alone:
    """What one process does with all micro batches of so many replicas; made before the ranks, who go on from it."""

    def __init__(self, out: Path, name: str, replicas: int) -> None:
        self.cfg = config(name, accumulation=MICRO * replicas, gradient_checkpointing=name == "flux")
        self.replicas = replicas
        engine = built(self.cfg, Ranks())
        averages = averages_of(engine)
        self.size = sum(parameter.numel() for parameter in engine.root.parameters())
        self.losses = run(engine, averages, 0, AT, replicas)
        commit(engine, averages, out, f"{name}{replicas}x")
        self.losses += run(engine, averages, AT, STEPS, replicas)
        self.seen = looked_at(engine, averages, replicas)
        self.weights, self.averaged = weights(engine), weights(engine, averages.ema.weights)


@pytest.fixture(scope="module")
def is_wide(request: pytest.FixtureRequest) -> bool:
    return any(item.get_closest_marker("nightly") for item in request.session.items)


@pytest.fixture(scope="module")
def alone(out: Path, is_wide: bool) -> dict[tuple[str, int], Alone]:
    cases = [*((name, 1) for name in FAMILIES), *([("flux", 2)] if is_wide else [])]
    return {(name, replicas): Alone(out, name, replicas) for name, replicas in cases}


@pytest.fixture(scope="module")
def two(out: Path, alone: Any) -> list[dict]:
    run_ranks(2, f"{__file__}::cases", out, "2", timeout_s=240, env=ON_PATH)
    return json.loads((out / "found2.json").read_text())


@pytest.fixture(scope="module")
def four(out: Path, alone: Any, is_wide: bool) -> list[dict]:
    """Nobody, but in the nightly run."""
    if not is_wide:
        return []
    run_ranks(4, f"{__file__}::cases", out, "4", timeout_s=300, env=ON_PATH)
    return json.loads((out / "found4.json").read_text())


@pytest.mark.parametrize("name", FAMILIES)
def test_two_stages_train_the_bits_of_one_process(two: Any, alone: Any, out: Path, name: str) -> None:
    mine, one = [each[name] for each in two], alone[name, 1]
    assert all(each["losses"] == one.losses for each in mine)
    assert equal(load_file(out / f"{name}2.safetensors"), one.weights)
    assert equal(load_file(out / f"{name}2-ema.safetensors"), one.averaged)
    assert all(each["held"] < 0.75 * one.size for each in mine) and sum(each["held"] for each in mine) == one.size


@pytest.mark.parametrize("name", FAMILIES)
def test_evaluation_and_pictures_are_those_of_one_process(two: Any, alone: Any, out: Path, name: str) -> None:
    for each in two:
        assert each[name]["sums"] == alone[name, 1].seen["sums"] and each[name]["own"] == alone[name, 1].seen["own"]
    assert torch.equal(load_file(out / f"{name}2-drawn.safetensors")["drawn"], alone[name, 1].seen["drawn"])


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoints_go_from_stages_to_one_process_and_back(two: Any, alone: Any, out: Path, name: str) -> None:
    assert all(each[name]["resumed"] == [True, True, True] for each in two)
    assert all(each[name]["from_alone"] == alone[name, 1].losses[AT:] for each in two)
    engine, averages = restored(alone[name, 1].cfg, Ranks(), out / f"{name}2-state")
    assert run(engine, averages, AT, STEPS, 1) == alone[name, 1].losses[AT:]
    assert equal(weights(engine), alone[name, 1].weights)
    assert equal(weights(engine, averages.ema.weights), alone[name, 1].averaged)


@pytest.mark.nightly
def test_replicas_of_a_pipeline_add_up(four: Any, alone: Any, out: Path) -> None:
    one = alone["flux", 2]
    for each in four:
        flux = each["flux"]
        assert flux["losses"] == pytest.approx(one.losses, rel=1e-6) and flux["losses"] == four[0]["flux"]["losses"]
        assert flux["resumed"] == [True, True, True]
        assert flux["from_alone"] == pytest.approx(one.losses[AT:], rel=1e-6)
        assert flux["sums"] == pytest.approx(one.seen["sums"], rel=1e-6)
        assert each["tiny"]["disks"] == [True, True]
    assert [each["flux"]["own"] for each in four[:2]] == [each["flux"]["own"] for each in four[2:]]  # of a replica
    theirs = load_file(out / "flux4.safetensors")
    assert max(float((theirs[name] - value).abs().max()) for name, value in one.weights.items()) <= LR
    engine, averages = restored(one.cfg, Ranks(), out / "flux4-state")
    assert run(engine, averages, AT, STEPS, 2) == pytest.approx(one.losses[AT:], rel=1e-6)


@pytest.fixture(scope="module")
def tiny_alone() -> tuple[list[float], float, list[float], float]:
    engine = built(tiny_config(pipeline_stages=1), Ranks(), TinyFamily(**TINY))
    losses = tiny_run(engine, 0, STEPS)
    held = total(engine)
    return losses, held, tiny_run(engine, STEPS, STEPS + 1, 1), float(engine.evaluate([tiny_batch(range(3))])["loss"])


@pytest.mark.flags("pipeline_schedule")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_alike(two: Any, four: Any, tiny_alone: Any, schedule: str) -> None:
    losses, held, one_micro, evaluated = tiny_alone
    for each in two:
        assert each["tiny"][schedule] == [losses, held, one_micro, evaluated]
    for each in four:
        mine = each["tiny"][schedule]
        assert mine[0] == pytest.approx(losses, rel=1e-6) and mine[2] == pytest.approx(one_micro, rel=1e-6)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_bad_sample_is_skipped_by_every_stage(two: Any, four: Any, precision: str) -> None:
    for ranks in (two, four):
        found = [each["tiny"][f"skip {precision}"] for each in ranks]
        for skipped, kept, scale, after in found:
            assert skipped == 1.0 and kept and scale == (65536.0 / 2 if precision == "fp16" else 0.0)
            assert after == found[0][3] and all(0 < loss < 10 for loss in after)


@pytest.mark.parametrize("kept", ["fp32", "kahan", "stochastic"])
def test_half_weights_of_a_stage_resume_to_the_bit(two: Any, four: Any, kept: str) -> None:
    assert all(each["tiny"][f"half {kept}"] == [True, True] for each in (*two, *four))


def test_machines_with_disks_of_their_own_resume(two: Any) -> None:
    assert all(each["tiny"]["disks"] == [True, True] for each in two)


def test_stages_that_do_not_divide_the_ranks_are_named(two: Any) -> None:
    for each in two:
        assert all(word in each["tiny"]["three"] for word in ("pipeline_stages", "3", "2 processes", "1, 2"))


def test_one_process_has_no_stages() -> None:
    with pytest.raises(ConfigFault, match="1 process"):
        PipelineEngine(tiny_config(), choose("cpu"), Ranks())
