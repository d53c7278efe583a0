"""Retention: kohya's flags, and never fewer than the last two good ones."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from difftrain.checkpoint import commit, retain_exports, retain_states
from difftrain.checkpoint.find import SaveName, parse
from difftrain.checkpoint.retain import export_is_whole
from difftrain.config.schema.sections import SaveSection
from difftrain.distributed.ranks import Ranks


def write(work: Path) -> list[Path]:
    (work / "weights").write_bytes(b"1234")
    return [work / "weights"]


def state(parent: Path, kind: str, number: int, step: int) -> Path:
    return commit(parent, SaveName(kind, number).of("N", state=True), write, Ranks(), {"step": step})


def left(parent: Path, suffix: str = "-state") -> list[str]:
    return sorted(path.name.removeprefix("N-").removesuffix(suffix) for path in parent.iterdir())


def kohya_removes(step: int, every: int, last: int) -> int | None:
    """The step that kohya's get_remove_step_no names after a save at `step`."""
    gone = step - last - 1
    gone -= gone % every
    return gone if gone > 0 else None


@pytest.mark.parametrize(("every", "last"), [(10, 30), (4, 8), (4, 9), (3, 10)])
def test_the_window_of_steps_is_kohyas(tmp_path, every, last):
    kept_there: set[int] = set()
    for step in range(every, 20 * every, every):
        state(tmp_path, "step", step, step)
        kept_there.add(step)
        kept_there.discard(kohya_removes(step, every, last))
        retain_states(tmp_path, "N", SaveSection(every_n_steps=every, last_n_steps=last), step)
        assert left(tmp_path) == [f"step{each:08d}" for each in sorted(kept_there)]


def test_epochs_are_counted_and_the_state_flag_wins(tmp_path):
    for epoch in range(1, 7):
        state(tmp_path, "epoch", epoch, 10 * epoch)
        retain_states(tmp_path, "N", SaveSection(last_n_epochs=2, last_n_epochs_state=4), 10 * epoch)
    assert left(tmp_path) == ["000003", "000004", "000005", "000006"]


def test_kinds_are_apart_and_the_end_stays(tmp_path):
    state(tmp_path, "step", 4, 4)
    for epoch in range(1, 6):
        state(tmp_path, "epoch", epoch, 10 * epoch)
    state(tmp_path, "end", 0, 60)
    retain_states(tmp_path, "N", SaveSection(last_n_epochs=2), 60)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "N-000004-state",
        "N-000005-state",
        "N-state",
        "N-step00000004-state",
    ]


def test_the_last_two_good_ones_stay_whatever_the_flags_say(tmp_path):
    for step in range(1, 6):
        state(tmp_path, "step", step, step)
    retain_states(tmp_path, "N", SaveSection(last_n_steps=1), 500)
    assert left(tmp_path) == ["step00000004", "step00000005"]


def test_a_branch_that_was_left_is_none_of_the_last_two(tmp_path):
    for step in (10, 40, 50):
        state(tmp_path, "step", step, step)
    for step in (20, 30):  # gone on from 10
        state(tmp_path, "step", step, step)
        retain_states(tmp_path, "N", SaveSection(every_n_steps=10, last_n_steps=5), step)
    assert left(tmp_path) == [f"step{each:08d}" for each in (20, 30, 40, 50)]


def test_good_means_read_back(tmp_path):
    paths = [state(tmp_path, "step", step, step) for step in range(1, 6)]
    (paths[4] / "weights").write_bytes(b"123x")
    (paths[3] / "manifest.json").unlink()
    said: list[str] = []
    retain_states(tmp_path, "N", SaveSection(last_n_steps=1), 5, said.append)
    assert left(tmp_path) == ["step00000002", "step00000003", "step00000004", "step00000005"]
    (paths[2] / "weights").unlink()
    said.clear()
    assert retain_states(tmp_path, "N", SaveSection(last_n_steps=1), 500, said.append) == []
    assert re.match(r"nothing .* 4 saves only 1 ", said[0])


def test_no_flag_deletes_nothing(tmp_path):
    for step in range(1, 5):
        state(tmp_path, "step", step, step)
    assert retain_states(tmp_path, "N", SaveSection(), 4) == []
    assert len(left(tmp_path)) == 4


def test_exports_go_the_same_way_in_every_layout_with_their_average(tmp_path):
    def export(step: int) -> None:
        for ema in ("", "-ema"):
            save_file({"w": torch.ones(3)}, tmp_path / f"N-step{step:08d}{ema}.safetensors")

    for step in (4, 8, 12):
        export(step)
    folder = tmp_path / "N-step00000002" / "unet"
    folder.mkdir(parents=True)
    (tmp_path / "N-step00000001.ckpt").write_bytes(b"torn")
    (tmp_path / "N-step00000001.txt").write_text("not ours")
    save_file({"w": torch.ones(3)}, tmp_path / "N.safetensors")
    state(tmp_path, "step", 4, 4)
    retain_exports(tmp_path, "N", SaveSection(last_n_steps=4), 12)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "N-step00000001.txt",
        "N-step00000004-state",
        "N-step00000008-ema.safetensors",
        "N-step00000008.safetensors",
        "N-step00000012-ema.safetensors",
        "N-step00000012.safetensors",
        "N.safetensors",
    ]


LAYOUTS = {"safetensors": ".safetensors", "ckpt": ".ckpt", "diffusers": "", "diffusers_safetensors": ""}


def export_as(layout: str, path: Path) -> Path:
    """Write what a layout has of an export."""
    path = path.with_name(path.name + LAYOUTS[layout])
    weights = {"w": torch.ones(3)}
    if layout == "safetensors":
        save_file(weights, path)
    elif layout == "ckpt":
        torch.save(weights, path)
    else:
        for part, stem in (("unet", "diffusion_pytorch_model"), ("text_encoder", "pytorch_model")):
            (path / part).mkdir(parents=True)
            binary = layout == "diffusers"
            (torch.save if binary else save_file)(weights, path / part / f"{stem}.{'bin' if binary else 'safetensors'}")
        (path / "model_index.json").write_text("{}")
    return path


@pytest.mark.parametrize("name", ["N", "sdxl-v1.0"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_deleted_and_a_torn_one_does_not_count(tmp_path, layout, name):
    names = [SaveName("step", step).of(name) for step in (4, 8, 12, 16)]
    paths = [export_as(layout, tmp_path / each) for each in names]
    for age, path in enumerate(paths):
        os.utime(path, (age, age))
    weights = next(
        path for path in [paths[3], *sorted(paths[3].rglob("*.*"))] if path.is_file() and path.suffix != ".json"
    )
    weights.write_bytes(weights.read_bytes()[:-30])
    assert not export_is_whole(paths[3])
    assert retain_exports(tmp_path, name, SaveSection(last_n_steps=1), 500) == [paths[0].name, paths[3].name]
    assert sorted(tmp_path.iterdir()) == paths[1:3]


def test_an_export_that_was_cut_is_not_good(tmp_path):
    good, cut = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({"w": torch.ones(30)}, good)
    cut.write_bytes(good.read_bytes()[:-1])
    assert export_is_whole(good) and not export_is_whole(cut)
    cut.write_bytes(good.read_bytes()[:5])
    assert not export_is_whole(cut)
    torch.save({"w": torch.ones(30)}, tmp_path / "c.ckpt")
    assert export_is_whole(tmp_path / "c.ckpt")
    (tmp_path / "d.ckpt").write_bytes((tmp_path / "c.ckpt").read_bytes()[:-30])
    assert not export_is_whole(tmp_path / "d.ckpt")


@pytest.mark.parametrize("each", [SaveName("step", 4), SaveName("step", 10**9), SaveName("epoch", 1), SaveName("end")])
def test_names_read_back(each):
    for state_of in (True, False):
        assert parse(each.of("my-name", state=state_of), "my-name", state=state_of) == each
    assert parse(each.of("my-name"), "my") is None
