"""Rules of run directories and resumes: what has no companion, and what --resume_from_checkpoint can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from difftrain.config.rules.finding import check
from difftrain.config.rules.outputs import SAVE_RULES
from difftrain.config.rules.paths import folders
from difftrain.config.schema.sections import TrainConfig

RUNS = {"run_dirs": True, "naming": "steps"}


def faults(asked: str, **sections: dict[str, Any]) -> tuple[str, str]:
    """Return faults and notes, each as one text."""
    cfg = TrainConfig.model_validate(sections)
    found, notes = check(cfg, (*SAVE_RULES, folders), {asked}, set(), {})
    return "\n".join(map(str, found)), "\n".join(notes)


@pytest.mark.parametrize("field", ["reset_dataloader", "reset_optimizer", "reset_optimizer_params"])
def test_nothing_begins_anew_without_a_resume_or_at_each_restart(field: str) -> None:
    asked = f"save.{field}"
    assert "there is nothing to begin anew" in faults(asked, save={field: True})[0]
    assert "each restart" in faults(asked, save={**RUNS, field: True, "resume": "auto"})[0]
    assert faults(asked, save={**RUNS, field: True, "resume": "latest"}) == ("", "")


def test_what_has_no_effect_is_said() -> None:
    save = {**RUNS, "resume": "latest", "reset_optimizer": True, "reset_optimizer_params": True}
    found, notes = faults("save.reset_optimizer_params", save=save)
    assert not found and "--reset_optimizer drops all" in notes
    assert "no effect without an average" in faults("ema.update_every", ema={"update_every": 100})[1]
    assert "needs naming = 'steps'" in faults("save.run_dirs", save={"run_dirs": True})[0]
    assert "nothing to draw" in faults("sample.test_only", sample={"test_only": True})[0]


def test_a_start_has_one_work() -> None:
    both: dict[str, Any] = {"cache": {"only": True}, "sample": {"test_only": True, "prompts": "a.txt"}}
    assert "--cache_only: contradicts [sample] test_only" in faults("cache.only", **both)[0]


@pytest.mark.parametrize("resume", ["latest", "auto", "2000"])
def test_words_and_steps_are_looked_up_in_run_directories_only(resume: str, tmp_path: Path) -> None:
    assert faults("save.resume", save={**RUNS, "resume": resume, "output_dir": str(tmp_path)})[0] == ""
    alone = faults("save.resume", save={"resume": resume, "output_dir": str(tmp_path)})[0]
    assert (resume == "auto") == (alone == "")


def test_a_run_is_found_by_its_name_below_the_output_folder(tmp_path: Path) -> None:
    save = {**RUNS, "resume": "20260101_10-00-00", "output_dir": str(tmp_path)}
    assert "global_stepN or a step" in faults("save.resume", save=save)[0]
    (tmp_path / "20260101_10-00-00").mkdir()
    assert faults("save.resume", save=save)[0] == ""
