"""Names of saves by step, what is kept of them, and what a dead run left in their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from difftrain import checkpoint
from difftrain.checkpoint import (
    DIFFUSERS,
    STEPS,
    SaveName,
    clean_exports,
    naming_of,
    newest,
    retain_exports,
    retain_states,
)
from difftrain.checkpoint.find import parse, parse_export
from difftrain.config.schema.sections import SaveSection
from difftrain.distributed.ranks import Ranks


@pytest.mark.parametrize("save", [SaveName("step", 0), SaveName("step", 1200), SaveName("epoch", 3)])
def test_names_are_read_back(save: SaveName, tmp_path: Path) -> None:
    assert save.of(STEPS) == f"{save.kind}{save.number}" and parse(save.of(STEPS), STEPS) == save
    assert save.of(STEPS, state=True) == f"global_step{save.number}"
    assert parse(save.of(STEPS, state=True), STEPS, state=True) == SaveName("step", save.number)
    for name in (save.of(STEPS), f"{save.of(STEPS)}-ema"):
        (tmp_path / name).mkdir()
        assert parse_export(tmp_path / name, STEPS) == save


@pytest.mark.parametrize("name", ["step", "step04", "step4x", "xstep4", "epoch1.safetensors", "global_step04", "save"])
def test_other_names_are_no_saves(name: str, tmp_path: Path) -> None:
    assert parse(name, STEPS) is None and parse(name, STEPS, state=True) is None
    (tmp_path / name).touch()
    assert parse_export(tmp_path / name, STEPS) is None


def test_the_two_ways_do_not_see_each_other(tmp_path: Path) -> None:
    assert (
        naming_of(SaveSection(naming="steps", output_name="N")) is STEPS
        and naming_of(SaveSection(output_name="N")) == "N"
    )
    assert parse("N-step00000004", STEPS) is None and parse("step4", "N") is None
    state(tmp_path, 4)
    assert newest(tmp_path, "N") is None and newest(tmp_path, STEPS) == tmp_path / "global_step4"


def state(parent: Path, step: int, kind: str = "step") -> Path:
    def write(into: Path) -> list[Path]:
        (into / "file").write_text(str(step))
        return [into / "file"]

    return checkpoint.commit(parent, f"global_step{step}", write, Ranks(), {"step": step, "kind": kind})


def export(parent: Path, name: str) -> None:
    (parent / name).mkdir()
    save_file({"w": torch.ones(2)}, parent / name / "model.safetensors")


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def kept(parent: Path, step: int, **flags: Any) -> list[str]:
    save = SaveSection(naming="steps", **flags)
    retain_states(parent, STEPS, save, step)
    retain_exports(parent, STEPS, save, step)
    return names(parent)


def test_a_window_of_steps_keeps_what_it_says_and_never_fewer_than_two(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        state(tmp_path, step)
        export(tmp_path, f"step{step}")
        export(tmp_path, f"step{step}-ema")
    assert kept(tmp_path, 8) == sorted(
        [
            f"{word}{step}{end}"
            for step in (2, 4, 6, 8)
            for word, end in (("global_step", ""), ("step", ""), ("step", "-ema"))
        ]
    )
    both = ["global_step6", "global_step8", "step6", "step6-ema", "step8", "step8-ema"]
    assert kept(tmp_path, 8, last_n_steps=3) == both
    assert kept(tmp_path, 8, last_n_steps=1) == both
    (tmp_path / "step8" / "model.safetensors").write_bytes(b"torn")
    export(tmp_path, "step5")
    assert "step5" in kept(tmp_path, 8, last_n_steps=1), "of three only two can be shown to be whole"


def test_checkpoints_of_epochs_are_told_apart_from_those_of_steps(tmp_path: Path) -> None:
    for step, kind in ((2, "epoch"), (3, "step"), (4, "epoch"), (6, "epoch"), (8, "epoch")):
        state(tmp_path, step, kind)
    assert kept(tmp_path, 8, last_n_epochs_state=3) == ["global_step3", "global_step4", "global_step6", "global_step8"]


def test_what_a_dead_run_left_in_a_folder_of_exports_is_cleared(tmp_path: Path) -> None:
    export(tmp_path, "step4")
    for name in ("step4", "epoch1", "notes"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / ".model.safetensors.0123abcd.tmp").write_bytes(b"x")
    clean_exports(tmp_path, "N")
    assert len(list((tmp_path / "step4").iterdir())) == 2
    clean_exports(tmp_path, STEPS)
    assert names(tmp_path) == ["notes", "step4"] and names(tmp_path / "step4") == ["model.safetensors"]
    assert names(tmp_path / "notes"), "what is no export of ours is not touched"


@pytest.mark.parametrize("step", [0, 7, 1200])
def test_names_of_diffusers_examples(step: int, tmp_path: Path) -> None:
    save = SaveName("step", step)
    assert naming_of(SaveSection(naming="diffusers")) is DIFFUSERS
    assert save.of(DIFFUSERS, state=True) == f"checkpoint-{step}"
    assert (
        parse(f"checkpoint-{step}", DIFFUSERS, state=True) == save
        and parse(f"checkpoint-{step}", STEPS, state=True) is None
    )
    assert (
        parse(f"global_step{step}", DIFFUSERS, state=True) is None
        and parse("checkpoint-07", DIFFUSERS, state=True) is None
    )


def test_the_newest_n_states_are_kept_and_never_fewer_than_two(tmp_path: Path) -> None:
    def after(limit: int) -> list[str]:
        for step in (2, 4, 6, 8, 10):
            checkpoint.commit(
                tmp_path, SaveName("step", step).of(DIFFUSERS, state=True), _write, Ranks(), {"step": step}
            )
            retain_states(tmp_path, DIFFUSERS, SaveSection(naming="diffusers", last_n_states=limit), step)
        return sorted(path.name for path in tmp_path.iterdir())

    assert after(3) == ["checkpoint-10", "checkpoint-6", "checkpoint-8"]
    assert after(1) == ["checkpoint-10", "checkpoint-8"]


def _write(work: Path) -> list[Path]:
    (work / "weights").write_bytes(b"1234")
    return [work / "weights"]


def test_a_folder_with_somebodys_pipeline_is_no_place_for_another(tmp_path: Path) -> None:
    assert isinstance(checkpoint.inspect(tmp_path, DIFFUSERS), checkpoint.Empty)
    (tmp_path / "model_index.json").write_text("{}")
    assert isinstance(checkpoint.inspect(tmp_path, DIFFUSERS), checkpoint.Foreign)
    assert isinstance(checkpoint.inspect(tmp_path, STEPS), checkpoint.Empty)
