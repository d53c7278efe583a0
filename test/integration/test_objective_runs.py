"""Runs with every noise, a bent loss and averages by width: exact resume, and averages of other widths afterwards."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from doors import Door, losses, write_pictures
from safetensors import safe_open
from safetensors.torch import load_file

from difftrain.cli import main

LOT = (
    "--epoch_batches=whole",  # which more ranks may split
    "--v_parameterization", "--zero_terminal_snr", "--min_timestep=20",
    "--noise_offset=0.1", "--noise_offset_random_strength", "--adaptive_noise_scale=0.05",
    "--multires_noise_iterations=6", "--multires_noise_discount=0.4",
    "--ip_noise_gamma=0.1", "--ip_noise_gamma_random_strength",
    "--loss_type=huber", "--huber_schedule=exponential", "--huber_c=0.2", "--debiased_estimation_loss",
    "--validation_split=0.2", "--validate_every_n_steps=3", "--use_ema", "--ema_decay=0.9",
    "--ema_profiles=0.05,0.10", "--save_every_n_steps=1",
)  # fmt: skip

NAME, KEY = "unet.conv_in.weight", "model.diffusion_model.input_blocks.0.0.weight"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Door:
    pictures = write_pictures(tmp_path_factory.mktemp("pictures"))
    return Door(pictures, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def straight(door: Door, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("straight") / "out"
    return out, door.run(door.flags(out, *LOT, steps=6))


def same(a: Path, b: Path) -> bool:
    first, second = load_file(a), load_file(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.flags("ema_profiles", "ema_snapshot_precision", "use_ema", "ema_decay")
def test_a_resumed_run_is_the_same_bit_by_bit(door: Door, straight: tuple[Path, str], tmp_path: Path) -> None:
    out, said = straight
    assert " 0.05 (gamma 16.972), 0.1 (gamma 6.937)" in said
    assert " in ema_snapshots/" in said
    state, again = out / "NAME-step00000003-state", tmp_path / "again"
    door.run([*door.flags(again, *LOT, "--ema_snapshot_precision=float", steps=6), f"--resume={state}"])
    assert losses(again) == losses(out)[3:]
    for name in ("NAME.safetensors", "NAME-ema.safetensors", "NAME-state/ema_0.05-00000.safetensors"):
        assert same(out / name, again / name), name
    for name in ("0.05-00000004", "0.1-00000004", "0.05-00000006", "0.1-00000006"):
        half, whole = (load_file(folder / "ema_snapshots" / f"{name}.safetensors") for folder in (out, again))
        assert {each.dtype for each in half.values()} == {torch.float16}
        assert {each.dtype for each in whole.values()} == {torch.float32}
        assert all(half[key].equal(whole[key].half()) for key in whole)


def test_a_validation_loss_is_there_and_finite(straight: tuple[Path, str]) -> None:
    lines = [json.loads(line) for line in (straight[0] / "validation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6] and all(0 < line["loss"] < 10 for line in lines)


def test_snapshots_are_the_power_function_average_of_the_exported_weights(straight: tuple[Path, str]) -> None:
    """Every step is exported here, so the average can be computed from the exports by its definition."""
    out, _ = straight
    steps = [load_file(out / f"NAME-step{k:08d}.safetensors")[KEY].double() for k in range(1, 7)]
    found = load_file(out / "NAME-state" / "ema_0.1-00000.safetensors")[NAME].double()
    with safe_open(out / "ema_snapshots" / "0.1-00000006.safetensors", "pt") as file:
        assert file.metadata()["width"] == "0.1" and file.metadata()["updates"] == "6"
        gamma = float(file.metadata()["gamma"])
        assert file.get_tensor(NAME).equal(found.half())
    shares = (torch.arange(7, dtype=torch.float64) / 6).pow(gamma + 1).diff()
    expected = sum(share * weights for share, weights in zip(shares, steps))
    off, moved = (found - expected).norm(), (steps[5] - expected).norm()
    assert off < moved / 1000, (off, moved)


def exported(folder: Path, width: str, to: Path, *more: str) -> dict[str, torch.Tensor]:
    assert main(["export", f"--ema_width={width}", str(folder), f"--output={to}", *more]) == 0
    return load_file(to)


def test_averages_of_other_widths_are_made_after_the_run(
    straight: tuple[Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, _ = straight
    stored = exported(out, "0.05", tmp_path / "stored.safetensors")
    assert stored[KEY].equal(load_file(out / "ema_snapshots" / "0.05-00000006.safetensors")[NAME].float())
    assert re.search(r" 6 updates .* 12 snapshots: .* 0\.00%", capfd.readouterr().err)
    plain = load_file(out / "NAME.safetensors")
    assert stored.keys() == plain.keys()
    frozen = [each for each in plain if not each.startswith("model.diffusion_model")]
    assert frozen and all(stored[each].equal(plain[each]) for each in frozen)
    wide = load_file(out / "ema_snapshots" / "0.1-00000006.safetensors")[NAME].float()
    between = exported(out, "0.08", tmp_path / "between.safetensors")[KEY]
    apart = (stored[KEY] - wide).norm()
    assert (between - stored[KEY]).norm() < apart and (between - wide).norm() < apart
    half = exported(out, "0.08", tmp_path / "half.safetensors", "--save_precision=fp16")
    assert half[KEY].equal(between.half())
    with safe_open(tmp_path / "half.safetensors", "pt") as file:
        assert file.metadata()["modelspec.prediction_type"] == "v"


def test_a_run_goes_on_with_its_averages_on_more_ranks(door: Door, straight: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = straight
    state = out / "NAME-step00000005-state"
    door.run([*door.flags(tmp_path / "two", *LOT, batch=1, steps=6), f"--resume={state}"], ranks=2)
    ours, theirs = (
        load_file(folder / "ema_snapshots" / "0.05-00000006.safetensors") for folder in (tmp_path / "two", out)
    )
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-4  # one rate


def test_another_set_of_widths_is_refused(door: Door, straight: tuple[Path, str], tmp_path: Path) -> None:
    state = straight[0] / "NAME-step00000003-state"
    flags = door.flags(tmp_path / "other", *LOT, "--ema_profiles=0.05,0.2", steps=6)
    said = door.run([*flags, f"--resume={state}"], expect=2)
    assert re.search(r"--ema_profiles.* no average .* 0\.2\b", said)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--ema_width=0.08"], ["--ema_width", "needs RUN_FOLDER"]),
        (["--ema_width=0.08", "{run}/nowhere"], ["/nowhere", "config.toml"]),
        (["--ema_width=0.4", "{run}"], ["--ema_width", "at most 0.28", "0.4"]),
        (["--ema_width=wide", "{run}"], ["--ema_width", "number"]),
        (["{run}"], ["--key=value"]),
        (["--ema_width=0.08", "{bare}"], ["no snapshots", "--ema_profiles"]),
    ],
)
def test_wrong_requests_are_faults(
    straight: tuple[Path, str], tmp_path: Path, words: list[str], says: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text((straight[0] / "config.toml").read_text())
    line = [word.format(run=straight[0], bare=tmp_path) for word in words]
    assert main(["export", *line, f"--output={tmp_path / 'x.safetensors'}"]) == 2
    said = capfd.readouterr().err
    assert all(part in said for part in says), said
    assert not (tmp_path / "x.safetensors").exists()


def test_snapshots_of_two_runs_are_not_mixed(
    straight: tuple[Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    (tmp_path / "ema_snapshots").mkdir()
    (tmp_path / "config.toml").write_text((straight[0] / "config.toml").read_text())
    for step, run in ((2, "a 1"), (4, "b 1")):
        about = {"gamma": "7.0", "width": "0.1", "updates": str(step), "run": run}
        save_file({"w": torch.ones(1)}, tmp_path / "ema_snapshots" / f"0.1-{step:08d}.safetensors", about)
    (tmp_path / "torn").mkdir()
    line = ["export", "--ema_width=0.1", str(tmp_path), f"--output={tmp_path / 'x'}"]
    assert main(line) == 2
    assert "another run" in capfd.readouterr().err
    (tmp_path / "ema_snapshots" / "0.1-00000004.safetensors").write_bytes(b"torn")
    assert main(line) == 2
    assert "0.1-00000004.safetensors is not a " in capfd.readouterr().err
