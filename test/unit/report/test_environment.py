"""What a report says of the environment, and the secrets that it does not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import difftrain
from difftrain.report import environment


def test_secrets_never_stand_in_a_command() -> None:
    line = environment.command(
        [
            "train.py",
            "--wandb_api_key",
            "abc def",
            "--huggingface_token=hunter2",
            "--vae=https://me:pw@host/vae",
            "hf_" + "A" * 30,
        ]
    )
    for secret in ("abc def", "hunter2", "me:pw", "AAAA"):
        assert secret not in line
    assert "--wandb_api_key" in line and "https://" in line and "/vae" in line


def test_the_script_stands_before_bare_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sd_scripts_xl/sdxl_pretrain.py", "--seed=1"])
    assert environment.command(["--seed=1"]).split()[1:] == ["sd_scripts_xl/sdxl_pretrain.py", "--seed=1"]
    assert environment.command([]).split()[1:] == ["sd_scripts_xl/sdxl_pretrain.py"]


def test_the_command_of_an_installed_package_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/env/bin/difftrain", "cache", "build", "--seed=1"])
    assert environment.command(["--seed=1"]).split()[1:] == ["/env/bin/difftrain", "cache", "build", "--seed=1"]
    monkeypatch.setattr(sys, "argv", ["/env/difftrain/__main__.py", "train", "--config", "x.toml"])
    assert environment.command(["--config", "x.toml"]).split()[1:] == ["-m", "difftrain", "train", "--config", "x.toml"]


def test_harmless_flags_stay_readable_and_can_be_typed_again() -> None:
    argv = ["sd_scripts_xl/sdxl_pretrain.py", "--keep_tokens=1", "--max_token_length=75", "--train_data_dir=/my data"]
    line = environment.command(argv)
    words = subprocess.run(["sh", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True).stdout.splitlines()
    assert words[1:] == argv


def test_a_launchers_process_count_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert re.search(r"# 16 processes, 8 ", environment.command(["a.py"]))


def test_redacted_configurations_keep_everything_else() -> None:
    config = {
        "hub": {"token": "t", "tokens": 77},
        "dirs": ["https://u:p@h/x", "/data"],
        "keep_tokens": 2,
        "empty_token": "",
    }
    assert environment.redacted(config) == {
        "hub": {"token": environment.HIDDEN, "tokens": 77},
        "dirs": [f"https://{environment.HIDDEN}@h/x", "/data"],
        "keep_tokens": 2,
        "empty_token": "",
    }


def test_versions_take_over_what_the_device_knows() -> None:
    found = environment.versions(
        {"kind": "x", "name": "card", "driver": "550.1", "cann": "8.1", "threads": 4, "nccl": None}
    )
    assert found["driver"] == "550.1" and found["cann"] == "8.1" and found["difftrain"] == difftrain.__version__
    assert {"python", "torch", "diffusers", "transformers"} <= found.keys()
    assert not {"name", "threads", "nccl", "kind"} & found.keys()


def test_the_commit_is_named_only_in_a_checkout_that_tracks_this_code(tmp_path: Path) -> None:
    assert environment.code_version(tmp_path) == f"{difftrain.__version__} (package)"
    git = shutil.which("git")
    if git is None or not (Path(__file__).parents[3] / ".git").exists():
        pytest.skip("not in a checkout")
    commit = subprocess.run(
        [git, "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert commit[:12] in environment.code_version()
    # a wheel inside somebody else's checkout has nothing to do with that checkout's commit
    subprocess.run([git, "init", "-q", str(tmp_path)], check=True)
    inside = tmp_path / ".venv" / "difftrain"
    inside.mkdir(parents=True)
    assert environment.code_version(inside) == f"{difftrain.__version__} (package)"


def test_the_age_of_this_process_grows_with_the_clock() -> None:
    first = environment.process_age_s()
    time.sleep(0.1)
    assert 0.05 < environment.process_age_s() - first < 5
    assert 0 < first < 24 * 3600
