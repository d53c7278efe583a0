"""Tokens move to the environment, and nothing that is written holds one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import is_about

from difftrain.config.parse_flags import parse
from difftrain.config.parse_keys import parse as parse_keys
from difftrain.config.secrets import WEBHOOK, looks_secret, redact, redact_text, unfit_webhook
from difftrain.config.toml import dump
from difftrain.contracts import ConfigFault

KEY, TOKEN = "0123456789abcdef0123", "tok-en-of-a-hub-77"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", WEBHOOK):
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
    for option, variable in (("--wandb_api_key", "WANDB_API_KEY"), ("--huggingface_token", "HF_TOKEN")):
        assert sum(is_about(note, option, variable) for note in parsed.notes) == 1


def test_a_fault_beside_a_token_does_not_print_it() -> None:
    with pytest.raises(ConfigFault) as caught:
        parse([f"--wandb_api_key={KEY}", f"--wandb_api_kye={KEY}", "--huggingface_token="])
    assert KEY not in str(caught.value)
    assert any(is_about(fault, "--wandb_api_kye", "--wandb_api_key") for fault in caught.value.faults)


URL = "https" + "://hooks.example/services/T0/B0/abcdefgh"


@pytest.mark.flags("webhook_url")
@pytest.mark.parametrize("door", [parse, parse_keys])
def test_the_address_of_a_webhook_is_a_secret(door: Callable[[list[str]], Any], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "run.toml").write_text(
        f"[monitoring]\nwebhook_url = '{URL}'\n[training]\nepochs = 1\n[output]\noutput_dir = 'out'\n"
        "[model]\ntype = 'sdxl'\ninit_from_config = 'tiny'\n"
    )
    (tmp_path / "data.toml").write_text("resolutions = [64]\n[[directory]]\npath = 'data'\n")
    line = ["--init_from_config=tiny", f"--train_data_dir={tmp_path / 'data'}", f"--output_dir={tmp_path}"]
    line = (
        [*line, "--resolution=64", f"--webhook_url={URL}"]
        if door is parse
        else [f"--config={tmp_path / 'run.toml'}", f"--dataset={tmp_path / 'data.toml'}"]
    )
    parsed = door(line)
    assert os.environ[WEBHOOK] == URL
    assert URL not in dump(parsed.config) and not any(URL in note for note in parsed.notes)
    assert redact_text(f"to {URL}") == "to ***"
    own = ["--webhook_url", URL, f"--monitoring.webhook_url={URL}"]
    assert redact(own) == ["--webhook_url", "***", "--monitoring.webhook_url=***"]


@pytest.mark.parametrize(
    "url",
    [
        "hooks.example/x",
        "ftp://hooks.example/x",
        "https:/x",
        "https://[/x",
        "https://a b/",
        "http://h:x/",
        "http://h/\n",
    ],
)
def test_what_is_no_address_of_a_webhook_is_refused_and_not_shown(url: str, tmp_path: Path) -> None:
    assert unfit_webhook(url) and url not in unfit_webhook(url)
    with pytest.raises(ConfigFault) as caught:
        parse([f"--webhook_url={url}", "--init_from_config=tiny"])
    assert any(is_about(fault, "--webhook_url") and url not in str(fault) for fault in caught.value.faults)
    (tmp_path / "run.toml").write_text(f"[monitoring]\nwebhook_url = {json.dumps(url)}\n")
    with pytest.raises(ConfigFault) as caught:
        parse_keys([f"--config={tmp_path / 'run.toml'}"])
    assert any(is_about(fault, "[monitoring] webhook_url") for fault in caught.value.faults)


@pytest.mark.parametrize(
    "url",
    ["https://me:secret-word@host/x", "s3://secret-word@bucket/x", "http://me:@host", "a\nhttps://u:secret-word@h b"],
)
def test_a_login_in_an_address_is_redacted(url: str) -> None:
    shown = redact_text(f"--x={url} and a@b stays")
    assert "secret-word" not in shown and "://***@" in shown and "a@b stays" in shown
    assert redact([f"--train_data_dir={url}"]) == [redact_text(f"--train_data_dir={url}")]
