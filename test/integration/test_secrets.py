"""Tokens given in every way, searched for in all that a run leaves, prints, exports and shows of its processes."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from doors import ROOT, Door, family_of, metrics, wait_for, write_pictures
from hooks import Webhook, webhook
from launched import TINY, Launchers, checkout
from safetensors import safe_open
from watched import run_folder

HUB, WANDB = "tok-en-of-a-hub-7731", "0123456789abcdef0123456789abcdef01234567"
PATH = "very-secret-word"  # of the webhook's address


@pytest.fixture(scope="module")
def hook() -> Iterator[Webhook]:
    with webhook() as served:
        yield served


def forms() -> list[bytes]:
    """Return the tokens as files may hold them."""
    found = []
    for text in (HUB, WANDB, PATH):
        whole = [base64.b64encode(b"x" * shift + text.encode())[4 : -4 if shift else None] for shift in range(3)]
        found += [text.encode(), quote(text).encode(), text[::-1].encode(), text.encode().hex().encode(), *whole]
    return found


def leaks(*folders: Path) -> list[str]:
    """Return the files that hold a token in some form, and names that do."""
    found = []
    for folder in folders:
        for path in folder.rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            found += [str(path) for form in forms() if form in content or form in str(path.name).encode()]
    return found


def shown(pids: list[int]) -> str:
    """Return what `ps` shows of processes."""
    return subprocess.run(
        ["ps", "-ww", "-o", "args=", "-p", ",".join(map(str, pids))], capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize("way", ["flag", "file", "environment"])
@pytest.mark.flags("huggingface_token", "wandb_api_key", "webhook_url")
def test_no_token_is_left_behind(way: str, door: Door, hook: Webhook, tmp_path: Path) -> None:
    hook.notices.clear()
    out, env, more = tmp_path / "out", {}, []
    secrets = {"huggingface_token": HUB, "wandb_api_key": WANDB, "webhook_url": hook.url}
    if way == "flag":
        more = [f"--{name}={value}" for name, value in secrets.items()]
    elif way == "file":
        own = tmp_path / "own" / "arguments.toml"
        own.parent.mkdir()
        own.write_text("".join(f'{name} = "{value}"\n' for name, value in secrets.items()))
        more = [f"--config_file={own}"]
    else:
        env = {"HF_TOKEN": HUB, "WANDB_API_KEY": WANDB, "DIFFTRAIN_WEBHOOK_URL": hook.url}
    (tmp_path / "prompts.txt").write_text("a picture\n")
    more += ["--sample_at_first", f"--sample_prompts={tmp_path / 'prompts.txt'}", "--metadata_title=mine"]
    flags = door.flags(
        out, *more, "--max_data_loader_n_workers=1", "--save_every_n_steps=2", steps=12 if way == "flag" else 3
    )
    # where no flag holds one, no command line can show it: a fork will do
    cold = {"popen": subprocess.Popen} if way == "flag" else {}
    process = door._start(door.command(flags), XDG_CACHE_HOME=str(tmp_path / "cache"), **cold, **env)

    # --- while it trains: its own command line, and its loader's
    processes = ""
    if way == "flag":
        wait_for(lambda: process.poll() is not None or ((out / "metrics.jsonl").exists() and len(metrics(out)) > 2))
        processes = shown(family_of(process.pid))
        assert "sdxl_pretrain.py" in processes
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    for text in (HUB, WANDB, PATH):
        assert text not in output and text not in processes

    # --- and what it leaves, the metadata of exports included
    assert hook.events[-1] == "finished", "the tokens were used"
    assert leaks(out, tmp_path / "cache") == []
    with safe_open(out / "NAME.safetensors", "pt") as opened:
        text = json.dumps(opened.metadata())
    assert "mine" in text and not any(each in text for each in (HUB, WANDB, PATH))


def test_a_launcher_hands_tokens_on_unseen(hook: Webhook, tmp_path: Path) -> None:
    hook.notices.clear()
    launchers = Launchers(checkout(tmp_path / "checkout"), tmp_path / "cache", write_pictures(tmp_path / "pictures", 4))
    tokens = (f"--webhook_url={hook.url}", f"--huggingface_token={HUB}", f"--wandb_api_key={WANDB}")
    words = (f"--dataset_name={launchers.pictures}", *TINY, "--device_id=3", "--max_train_steps=12", *tokens)
    process = launchers.start("1m_1p", *words)
    lines = launchers.output(3) / "metrics.jsonl"
    wait_for(lambda: process.poll() is not None or lines.exists())
    processes = shown(family_of(process.pid))
    text, _ = process.communicate(timeout=200)
    assert process.returncode == 0 and hook.events[-1] == "finished" and "torchrun" in processes, text
    for token in (HUB, WANDB, PATH):
        assert token not in text and token not in processes
    assert leaks(launchers.output(3), tmp_path / "cache") == []


def test_the_token_of_the_page_of_runs_is_seen_by_its_owner_alone(tmp_path: Path) -> None:
    run_folder(tmp_path / "one")
    words = [sys.executable, "-m", "difftrain.cli", "watch", str(tmp_path), "--port=0", f"--token={HUB}"]
    env = {"PYTHONPATH": str(ROOT / "library"), "PATH": "/usr/bin:/bin"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        assert f"/?token={HUB}" in process.stdout.readline() + process.stdout.readline()
        assert "watch" in shown([process.pid]) and HUB not in shown([process.pid])
        assert leaks(tmp_path) == []
    finally:
        process.kill()
        process.communicate()
