"""What a restore leaves behind: the whole optimizer, or what it changed in its own settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import built, config, equal, one_thread, run, saved, weights
from torch.optim import SGD

from difftrain.contracts import ConfigFault

__all__ = ["one_thread"]


class Changing(SGD):
    """An optimizer that writes into its own groups at each step, as Prodigy does."""

    def step(self, closure=None):  # type: ignore[no-untyped-def,override]
        for group in self.param_groups:
            group["estimate"] = group.get("estimate", 1.0) * 2
            group["momentum"] = 0.5
        return super().step(closure)


SETTINGS = {"scheduler": "constant_with_warmup", "warmup_steps": 4, "learning_rate": 1e-3}


def test_a_new_optimizer_has_no_moments_and_begins_its_schedule_anew(tmp_path: Path) -> None:
    engine = built(config(**SETTINGS))
    run(engine, 0, 6)
    saved(engine, tmp_path / "six")
    fresh = built(config(**SETTINGS))
    fresh.restore(tmp_path / "six", optimizer=False, schedule_from=6)
    assert fresh.position == 6 and equal(weights(fresh), weights(engine)) and not fresh.optimizer.state
    first = built(config(**SETTINGS))
    rates = [float(e.optimizer.param_groups[0]["lr"]) for e in (fresh, first, engine)]
    assert rates[0] == rates[1] < rates[2] == 1e-3
    run(fresh, 6, 8)
    assert {int(state["step"]) for state in fresh.optimizer.state.values()} == {2}
    saved(fresh, tmp_path / "eight")
    again = built(config(**SETTINGS))
    again.restore(tmp_path / "eight", schedule_from=6)  # a later resume: the schedule keeps its beginning
    assert run(again, 8, 11) == run(fresh, 8, 11) and equal(weights(again), weights(fresh))


def test_a_new_optimizer_may_be_another_one(tmp_path: Path) -> None:
    engine = built(config())
    run(engine, 0, 2)
    saved(engine, tmp_path)
    other = config(type="torch.optim.SGD")
    with pytest.raises(ConfigFault, match=r"trained with .*AdamW, .*SGD"):
        built(other).restore(tmp_path)
    taken = built(other)
    taken.restore(tmp_path, optimizer=False, schedule_from=2)
    assert equal(weights(taken), weights(engine))


def test_only_the_optimizers_own_settings_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.optim.SGD", Changing)
    cfg = config(type="torch.optim.SGD", args=("momentum=0.9",))
    engine = built(cfg)
    run(engine, 0, 3)
    saved(engine, tmp_path)
    kept, fresh = built(cfg), built(cfg)
    kept.restore(tmp_path)
    fresh.restore(tmp_path, params=False)
    own, anew = kept.optimizer.param_groups[0], fresh.optimizer.param_groups[0]
    assert own["estimate"] == 8.0 and own["momentum"] == 0.5
    assert "estimate" not in anew and anew["momentum"] == 0.9
    moments = [[s["momentum_buffer"] for s in e.optimizer.state.values()] for e in (engine, fresh)]
    assert moments[0] and all(torch.equal(a, b) for a, b in zip(*moments, strict=True))
