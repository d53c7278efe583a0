"""Flags of noise, loss and averages that contradict one another, need one another, or mean nothing alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import is_about

from difftrain.config.parse_flags import parse
from difftrain.contracts import ConfigFault


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    return ["--init_from_config=tiny", f"--train_data_dir={tmp_path}", f"--output_dir={tmp_path}", "--resolution=64,64"]


FAULTS = [
    ("--adaptive_noise_scale=0.1", ["--adaptive_noise_scale", "needs --noise_offset"]),
    ("--min_timestep=500 --max_timestep=500", ["--min_timestep", "500 >= 500", "--max_timestep=501"]),
    ("--min_timestep=700 --max_timestep=500", ["--min_timestep", "700 >= 500"]),
    ("--scale_v_pred_loss_like_noise_pred", ["--scale_v_pred_loss_like_noise_pred", "needs --v_parameterization"]),
    ("--v_pred_like_loss=0.5 --v_parameterization", ["--v_pred_like_loss", "contradicts --v_parameterization"]),
    ("--ema_profiles=0.05,0.1,0.05", ["--ema_profiles", "twice", "0.05"]),
    ("--ema_snapshot_precision=float", ["--ema_snapshot_precision", "needs --ema_profiles"]),
    ("--huber_c=0", ["--huber_c", "above 0"]),
    ("--noise_offset=-0.1", ["--noise_offset", "at least 0"]),
    ("--ema_profiles=0", ["--ema_profiles", "at least 0.001"]),
    ("--ema_profiles=0.05;0.1", ["--ema_profiles", "number", "0.05;0.1"]),
]


@pytest.mark.parametrize(("more", "facts"), FAULTS, ids=[more for more, _ in FAULTS])
def test_one_contradiction_is_one_fault(line: list[str], more: str, facts: list[str]) -> None:
    with pytest.raises(ConfigFault) as caught:
        parse([*line, *more.split()])
    (found,) = map(str, caught.value.faults)
    assert is_about(found, *facts)


SAID = [
    ("--zero_terminal_snr", "--zero_terminal_snr --v_parameterization"),
    ("--noise_offset_random_strength", "--noise_offset_random_strength --noise_offset"),
    ("--noise_offset=0 --adaptive_noise_scale=0.1", "--adaptive_noise_scale --noise_offset=0"),
    ("--multires_noise_discount=0.4", "--multires_noise_discount --multires_noise_iterations"),
    ("--ip_noise_gamma_random_strength", "--ip_noise_gamma_random_strength --ip_noise_gamma"),
    ("--huber_c=0.2", "--huber_c --loss_type=huber smooth_l1"),
    ("--loss_type=huber --huber_scale=2", "--huber_scale --huber_schedule=snr"),
    ("--ema_profiles=0.05 --save_every_n_steps=2", "--ema_profiles single 0.05,0.10"),
    ("--ema_profiles=0.05,0.1", "--ema_profiles --save_every_n_steps --save_every_n_epochs"),
]


@pytest.mark.parametrize(("more", "facts"), SAID, ids=[more for more, _ in SAID])
def test_what_kohya_lets_pass_is_said(line: list[str], more: str, facts: str) -> None:
    (note,) = parse([*line, *more.split()]).notes
    assert is_about(note, *facts.split())


FINE = [
    "--noise_offset=0.1 --adaptive_noise_scale=0.1 --noise_offset_random_strength --multires_noise_iterations=6",
    "--noise_offset=0 --multires_noise_iterations=0 --ip_noise_gamma=0 --min_snr_gamma=0 --v_pred_like_loss=0",
    "--adaptive_noise_scale=0 --min_timestep=0 --max_timestep=1000 --loss_type=l2",
    "--v_parameterization --zero_terminal_snr --scale_v_pred_loss_like_noise_pred --debiased_estimation_loss",
    "--loss_type=smooth_l1 --huber_schedule=exponential --huber_c=0.1 --huber_scale=2",
    "--use_ema --ema_profiles=0.05,0.1 --ema_snapshot_precision=float --save_every_n_epochs=1",
    "--min_timestep=700",
]


@pytest.mark.parametrize("more", FINE)
def test_sound_combinations_pass_in_silence(line: list[str], more: str) -> None:
    assert not parse([*line, *more.split()]).notes


def test_widths_are_read_from_flag_and_file(line: list[str], tmp_path: Path) -> None:
    save = ["--save_every_n_steps=1"]
    assert parse([*line, *save, "--ema_profiles=0.05,0.10"]).config.ema.profiles == (0.05, 0.1)
    (tmp_path / "c.toml").write_text("[ema]\nprofiles = [0.05, 0.2]\n")
    assert parse([*line, *save, f"--config={tmp_path / 'c.toml'}"]).config.ema.profiles == (0.05, 0.2)
