"""Rules of run directories and resumes: what has no companion, and what --resume_from_checkpoint can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from refusals import is_about

from difftrain.config.rules.finding import check
from difftrain.config.rules.outputs import SAVE_RULES
from difftrain.config.rules.paths import folders
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.spellings.spelling import option

RUNS = {"run_dirs": True, "naming": "steps"}


def faults(asked: str, **sections: dict[str, Any]) -> tuple[str, str]:
    """Return faults and notes, each as one text: there is one fault, or one note, or nothing."""
    cfg = TrainConfig.model_validate(sections)
    found, notes = check(cfg, (*SAVE_RULES, folders), {asked}, set(), {})
    assert len(found) <= 1 and len(notes) <= 1
    return "\n".join(map(str, found)), "\n".join(notes)


@pytest.mark.parametrize("field", ["reset_dataloader", "reset_optimizer", "reset_optimizer_params"])
def test_nothing_begins_anew_without_a_resume_or_at_each_restart(field: str) -> None:
    asked = f"save.{field}"
    assert is_about(faults(asked, save={field: True})[0], option(asked), "--resume_from_checkpoint")
    assert is_about(faults(asked, save={**RUNS, field: True, "resume": "auto"})[0], option(asked), "restart")
    assert faults(asked, save={**RUNS, field: True, "resume": "latest"}) == ("", "")


def test_what_has_no_effect_is_said() -> None:
    save = {**RUNS, "resume": "latest", "reset_optimizer": True, "reset_optimizer_params": True}
    found, notes = faults("save.reset_optimizer_params", save=save)
    assert not found and is_about(notes, option("save.reset_optimizer_params"), "--reset_optimizer")
    assert is_about(faults("ema.update_every", ema={"update_every": 100})[1], "[ema] update_every", "weights")
    assert is_about(faults("save.run_dirs", save={"run_dirs": True})[0], "[save] run_dirs", "naming = 'steps'")
    assert is_about(faults("sample.test_only", sample={"test_only": True})[0], "[sample] test_only", "prompts")


def test_a_start_has_one_work() -> None:
    both: dict[str, Any] = {"cache": {"only": True}, "sample": {"test_only": True, "prompts": "a.txt"}}
    assert is_about(faults("cache.only", **both)[0], "--cache_only", "contradicts [sample] test_only")


@pytest.mark.parametrize("resume", ["latest", "auto", "2000"])
def test_words_and_steps_are_looked_up_in_run_directories_only(resume: str, tmp_path: Path) -> None:
    assert faults("save.resume", save={**RUNS, "resume": resume, "output_dir": str(tmp_path)})[0] == ""
    alone = faults("save.resume", save={"resume": resume, "output_dir": str(tmp_path)})[0]
    assert (resume == "auto") == (alone == "")


def test_a_run_is_found_by_its_name_below_the_output_folder(tmp_path: Path) -> None:
    save = {**RUNS, "resume": "20260101_10-00-00", "output_dir": str(tmp_path)}
    assert is_about(faults("save.resume", save=save)[0], "--resume", "'20260101_10-00-00'", "global_stepN")
    (tmp_path / "20260101_10-00-00").mkdir()
    assert faults("save.resume", save=save)[0] == ""


def test_weights_given_where_a_run_is_resumed_from_are_told_where_they_belong(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    found, _ = faults("save.resume", save={"resume": str(file)})
    assert str(file) in found and "--pretrained_model_name_or_path" in found
