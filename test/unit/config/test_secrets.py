"""Tokens move to the environment, and nothing that is written holds one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from difftrain.config.parse_flags import parse
from difftrain.config.secrets import looks_secret, redact, redact_text
from difftrain.config.toml import dump
from difftrain.contracts import ConfigFault

KEY, TOKEN = "0123456789abcdef0123", "tok-en-of-a-hub-77"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "")


def test_redact_knows_both_spellings() -> None:
    argv = ["door.py", f"--wandb_api_key={KEY}", "--huggingface_token", TOKEN, "--seed=1", "--wandb_api_key"]
    assert redact(argv) == [
        "door.py",
        "--wandb_api_key=***",
        "--huggingface_token",
        "***",
        "--seed=1",
        "--wandb_api_key",
    ]


@pytest.mark.parametrize("name", ["key", "token", "secret", "password"])
def test_a_name_that_ends_in_what_secrets_are_called_is_one(name: str) -> None:
    assert redact([f"--monitoring.own_{name}={TOKEN}", f"--monitoring.{name}", TOKEN]) == [
        f"--monitoring.own_{name}=***",
        f"--monitoring.{name}",
        "***",
    ]
    assert looks_secret(name, 1) and looks_secret(f"hub.own_{name}", 1) and not looks_secret(f"keep_{name}s", TOKEN)


def test_redact_knows_shapes_and_what_the_environment_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert redact_text(f"a {TOKEN} b hf_abcdefghijklmnopqrst c") == "a *** b *** c"
    assert redact_text("half_vae hf_short seed") == "half_vae hf_short seed"


@pytest.mark.flags("huggingface_token", "wandb_api_key")
def test_tokens_move_to_the_environment(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    parsed = parse(
        [
            f"--wandb_api_key={KEY}",
            "--huggingface_token",
            TOKEN,
            "--init_from_config=tiny",
            f"--train_data_dir={tmp_path / 'data'}",
            f"--output_dir={tmp_path}",
            "--resolution=64",
        ]
    )
    assert os.environ["WANDB_API_KEY"] == KEY and os.environ["HF_TOKEN"] == TOKEN
    written = dump(parsed.config) + "".join(parsed.notes) + " ".join(parsed.argv) + repr(parsed.config)
    assert KEY not in written and TOKEN not in written
    assert sum("moved to the environment" in note for note in parsed.notes) == 2


def test_a_fault_beside_a_token_does_not_print_it() -> None:
    with pytest.raises(ConfigFault) as caught:
        parse([f"--wandb_api_key={KEY}", f"--wandb_api_kye={KEY}", "--huggingface_token="])
    assert KEY not in str(caught.value)
    assert "did you mean --wandb_api_key?" in str(caught.value)
