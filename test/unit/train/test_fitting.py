"""[memory] memory_gib: which savers make a run fit, in which order, and what is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import is_about

from difftrain.config import TrainConfig
from difftrain.config.schema import names
from difftrain.contracts import Bucket, ConfigFault, Group
from difftrain.device.block_swap import most_waiting, plan_swap
from difftrain.distributed.launch import Launch
from difftrain.engine.master_weights import steps_apart
from difftrain.optim import make_optimizer
from difftrain.train.estimate import fitting
from difftrain.train.estimate.fitting import changed, fitted, require_fit
from difftrain.train.estimate.footprint import GIB

BUCKET = Bucket(64, 64)
CACHED = {"latents_to_disk": True, "text_to_disk": True}


PLANS: dict[tuple[str, Bucket, int], fitting.Plan] = {}
count_once = fitting.planned


def planned(cfg: TrainConfig, bucket: Bucket, ranks: int = 1) -> fitting.Plan:
    """Plan each configuration once: a limit changes no plan."""
    free = cfg.model_copy(update={"memory": cfg.memory.model_copy(update={"memory_gib": None})})
    key = free.model_dump_json(), bucket, ranks
    if key not in PLANS:
        PLANS[key] = count_once(free, bucket, ranks)
    return dataclasses.replace(PLANS[key], cfg=cfg)


@pytest.fixture(autouse=True)
def nothing_beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tiny model is nothing beside what a driver takes; plans are kept in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fitting, "RESERVE", 0.0)
    monkeypatch.setattr(fitting, "planned", planned)


def config(gib: float | None, **sections: dict[str, Any]) -> TrainConfig:
    base: dict[str, dict[str, Any]] = {
        "model": {"family": "flux", "init_from_config": "tiny", "t5_max_length": 16},
        "adapter": {"type": "lora", "rank": 2},
        "training": {"mixed_precision": "bf16", "batch_size": 4},
        "cache": dict(CACHED),
        "data": {"resolution": (64, 64)},
        "memory": {"memory_gib": gib},
    }
    for name, fields in sections.items():
        base[name] = base.get(name, {}) | fields
    return TrainConfig.model_validate(base)


def total(cfg: TrainConfig) -> float:
    return planned(cfg, BUCKET).total / GIB


def test_what_fits_needs_nothing() -> None:
    plain = config(1.0)
    fit = fitted(plain, BUCKET)
    assert fit.fits and not fit.added
    require_fit(plain, Launch())
    require_fit(config(None), Launch())


def test_the_cheapest_savers_come_first_and_no_more_of_them_than_needed() -> None:
    plain = total(config(1.0))
    recomputed = total(config(1.0, training={"gradient_checkpointing": True}))
    assert recomputed < plain
    limit = (plain + recomputed) / 2
    fit = fitted(config(limit), BUCKET)
    assert not fit.fits and dict(fit.added) == {"training.gradient_checkpointing": True}
    # a little less than recomputing leaves: as few blocks as do it wait on the host
    plan = planned(config(1.0, training={"gradient_checkpointing": True}), BUCKET)
    one = plan_swap(plan.sizes, 1).saved / GIB
    fit = fitted(config(recomputed - one / 2), BUCKET)
    assert dict(fit.added) == {"training.gradient_checkpointing": True, "memory.swap_blocks": 1}
    assert fit.best.total <= (recomputed - one / 2) * GIB and most_waiting(plan.sizes) >= 2


def test_a_run_that_does_not_fit_is_refused_with_what_would_make_it_fit() -> None:
    plain = total(config(1.0))
    with pytest.raises(ConfigFault) as caught:
        require_fit(config(round(0.9 * plain, 6)), Launch())
    [fault] = caught.value.faults
    assert is_about(fault, "--memory_gib", "--gradient_checkpointing")


def test_a_start_plans_once_for_a_machine_and_a_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cfg, count = config(round(0.9 * total(config(1.0)), 6)), []
    monkeypatch.setattr(fitting, "planned", lambda *args: count.append(1) or planned(*args))
    texts = []
    for launch in (Launch(size=2, local_size=2), Launch(1, 2, 1, 2), Launch(size=2, local_size=2)):
        with pytest.raises(ConfigFault) as caught:
            require_fit(cfg, launch)
        texts.append(str(caught.value))
        assert len(count) == 2, "as it is, and with recomputing"
    assert texts[0] == texts[1] == texts[2]
    require_fit(changed(cfg, {"memory.memory_gib": 1.0}), Launch())
    require_fit(changed(cfg, {"training.batch_size": 1, "memory.memory_gib": 1.0}), Launch())
    assert len(count) == 4, "another limit, another batch"

    # a file that is none, and a process whose leader does not come
    (file, *_) = sorted(tmp_path.glob("difftrain/plans/*.json"))
    for other in tmp_path.glob("difftrain/plans/*.json"):
        other.write_text('{"gib": 1') if other == file else other.unlink()
    monkeypatch.setattr(fitting, "_PATIENCE_S", 0.0)
    with pytest.raises(ConfigFault):
        require_fit(cfg, Launch(1, 2, 1, 2))
    assert len(count) == 6


def test_updates_alone_are_suggested_for_the_optimizers_that_can_make_them() -> None:
    saver = next(saver for saver in fitting.SAVERS if "optimizer.fused_backward" in saver.fields)
    for name in (*names.UPDATED_ALONE, "oss", "Prodigy", "AdamWScheduleFree"):
        cfg = config(1.0, adapter={"type": None}, optimizer={"type": name, "learning_rate": 1e-3})
        assert bool(saver.fits(cfg)) == (name in names.UPDATED_ALONE), name
        if name in names.UPDATED_ALONE:
            weight = torch.nn.Parameter(torch.zeros(8, 8))
            assert steps_apart(make_optimizer(cfg.optimizer, [Group("all", [("blocks.0.x", weight)], 1e-3)])), name


@pytest.mark.nightly  # plans with every saver in turn
def test_where_nothing_makes_it_fit_all_that_was_tried_is_named() -> None:
    with pytest.raises(ConfigFault) as caught:
        require_fit(config(1e-5), Launch())
    [fault] = caught.value.faults
    for saver in (
        "--gradient_checkpointing",
        "--blocks_to_swap=",
        "--cpu_offload_checkpointing",
        "nf4",
        "--train_batch_size=1",
    ):
        assert saver in fault.remedy
    assert "--resolution" in fault.remedy


@pytest.mark.nightly
def test_full_training_gets_other_savers() -> None:
    fit = fitted(config(1e-5, adapter={"type": None}, cache={"latents_to_disk": False}), BUCKET)
    assert {"cache.latents_to_disk", "optimizer.fused_backward", "training.full_precision"} <= fit.added.keys()
    assert "model.base_dtype" not in fit.added


def test_what_waits_on_the_host_is_not_counted_on_the_device() -> None:
    steps = []
    for offloads in (False, True):
        cfg = config(1.0, training={"gradient_checkpointing": True, "cpu_offload_checkpointing": offloads})
        steps.append(planned(cfg, Bucket(512, 512)).memory.step)
    assert steps[1] < 0.95 * steps[0]
