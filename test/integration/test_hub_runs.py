"""Runs that take everything from a hub and send everything to it, as users run them; the hub is one of this machine."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from doors import Door, losses
from hub_stub import HubStub, serving
from run_dirs import Trainer, only, tensors
from sdxl import config, loaded

EXPORTS = ["NAME-step00000002.safetensors", "NAME-step00000004.safetensors", "NAME.safetensors"]
STATES = ["NAME-state", "NAME-step00000002-state", "NAME-step00000004-state"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a diffusers folder."""
    family, parts = loaded(config())
    return family.export(
        family.stream(parts), parts, "diffusers_safetensors", tmp_path_factory.mktemp("model") / "tiny"
    )


@pytest.fixture
def hub(model: Path, pictures: Path) -> Iterator[HubStub]:
    """A hub with that model and the pictures."""
    with serving() as stub:
        stub.push_folder("acme/tiny", model)
        stub.push_folder("acme/pictures", pictures, "dataset", under="train/")
        yield stub


def flags(door: Door, out: Path, *more: str) -> list[str]:
    """Return a line with ids where there were paths."""
    line = door.flags(out, *more, steps=4)
    line = [word for word in line if not word.startswith(("--init_from_config", "--train_data_dir", "--save_every"))]
    return [*line, "--pretrained_model_name_or_path=acme/tiny", "--tokenizer1_path=acme/tiny/tokenizer",
            "--vae=acme/tiny/vae", "--train_data_dir=acme/pictures/train", "--save_every_n_steps=2"]  # fmt: skip


def sends(*more: str) -> list[str]:
    return ["--huggingface_repo_id=ann/runs", "--save_state_to_huggingface", "--huggingface_path_in_repo=first", *more]


def read_header(path: Path) -> tuple[dict[str, str], bytes]:
    """Return the metadata and the bytes of the weights of a safetensors file."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end])["__metadata__"], content[end:]


def written(out: Path) -> str:
    """Return all text that a run wrote."""
    files = [path for path in out.rglob("*") if path.suffix in (".json", ".jsonl", ".toml", ".html", ".log", ".txt")]
    return "".join(path.read_text(encoding="utf-8") for path in files)


@pytest.mark.flags(
    "huggingface_repo_id", "save_state_to_huggingface", "async_upload", "resume_from_huggingface", "huggingface_token"
)
def test_a_run_from_a_hub_to_a_hub_and_on_from_there(door: Door, hub: HubStub, tmp_path: Path) -> None:
    env = hub.environment(tmp_path / "home")
    del env["HF_TOKEN"]
    out = tmp_path / "out"
    hub.misbehave("GET", "/resolve/.*safetensors", "half")
    hub.misbehave("POST", "/commit/", "slow", seconds="1.5")  # the first upload outlasts the next step
    token = f"--huggingface_token={hub.token}"
    printed = door.run(flags(door, out, *sends("--async_upload", token, "--save_last_n_steps=1")), **env)
    assert re.search("private model ann/runs/first as ann, .*background", printed)
    assert re.search(r"acme/tiny@[0-9a-f]{8}: fetching \d+ files, [\d.]+ [kM]B, from http://127", printed)
    assert "--train_data_dir" not in printed  # no warning about it
    # all of it is there, in turn, and equal
    repo = hub.repo("ann/runs")
    assert sorted({name.split("/")[1] for name in repo.files}) == sorted([*EXPORTS, *STATES])
    assert [message.split(",")[0] for message in repo.messages] == [
        STATES[1], EXPORTS[0], STATES[2], EXPORTS[1], STATES[0], EXPORTS[2],
    ]  # fmt: skip
    assert repo.files[f"first/{EXPORTS[2]}"] == (out / EXPORTS[2]).read_bytes()
    # what is kept of it: ids and commits, no token, no path of the cache
    report = json.loads((out / "report.json").read_text())
    commits = {
        "model acme/tiny": hub.repo("acme/tiny").refs["main"],
        "dataset acme/pictures": hub.repo("acme/pictures", "dataset").refs["main"],
    }
    assert report["notes"]["fetched"] == commits == json.loads((out / "run.json").read_text())["hub"]
    assert report["notes"]["uploads"]["failed"] == [] and len(report["notes"]["uploads"]["sent"]) == 6
    assert report["weights"] == "acme/tiny; vae of acme/tiny/vae" and report["dataset"]["name"] == "acme/pictures/train"
    assert hub.token not in written(out) + printed and str(tmp_path / "home") not in (out / "config.toml").read_text()
    assert max(Counter(hub.asked("GET", "/resolve/.*json")).values()) == 1
    # on from there, on a machine that has nothing; a hub that then says no to every upload stops nobody
    for path in list(hub.repo("acme/tiny").files):
        hub.repo("acme/tiny").push({"README.md": path.encode()})  # what was begun with stays what it was
    hub.misbehave("POST", "/commit/", 403, times=100, message="over quota")
    away, again = hub.environment(tmp_path / "away"), tmp_path / "again"
    resume = f"--resume=ann/runs/first/{STATES[1]}:main:model"
    printed = door.run(flags(door, again, *sends(resume, "--resume_from_huggingface")), **away)
    assert "step00000002-state at step 2" in printed
    assert losses(again) == losses(out)[2:]
    ours, theirs = (read_header(folder / EXPORTS[2]) for folder in (again, out))
    assert ours[1] == theirs[1]  # bit for bit; the header tells the time
    assert (ours[0]["ss_sd_model_name"], ours[0]["ss_vae_name"]) == ("acme/tiny", "acme/tiny/vae")
    assert f"hf upload ann/runs {again / EXPORTS[2]} first/{EXPORTS[2]}" in printed
    assert "over quota" in printed
    report = json.loads((again / "report.json").read_text())
    assert report["notes"]["uploads"] == {"repo": "ann/runs", "sent": [], "failed": [
        STATES[2], EXPORTS[1], STATES[0], EXPORTS[2]]}  # fmt: skip
    assert report["notes"]["fetched"] == commits


def test_what_a_hub_refuses_stops_the_run_before_it_begins(door: Door, hub: HubStub, tmp_path: Path) -> None:
    env = hub.environment(tmp_path / "home") | {"HF_TOKEN": "hf_nobody0123456789abcdef"}
    printed = door.run(flags(door, tmp_path / "out", *sends()), expect=2, **env)
    assert "1 fault in" in printed
    assert "--huggingface_token: " in printed and "token in HF_TOKEN" in printed
    assert "hf_nobody" not in printed and not hub.asked("GET", "/resolve/")
    env = hub.environment(tmp_path / "home") | {"HF_HUB_OFFLINE": "1"}
    printed = door.run(flags(door, tmp_path / "out"), expect=2, **env)
    assert "4 faults in" in printed
    assert re.search("--train_data_dir: acme/pictures/train, .*: HF_HUB_OFFLINE ", printed)
    assert "hf download acme/pictures --repo-type dataset" in printed and str(tmp_path / "home" / "hub") in printed
    assert not (tmp_path / "out" / "run.json").exists()


def test_one_process_of_a_machine_fetches_and_one_of_the_job_sends(door: Door, hub: HubStub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    door.run(flags(door, out, *sends(), "--train_batch_size=1"), ranks=2, **hub.environment(tmp_path / "home"))
    asked = Counter(hub.asked("GET", "/resolve/|/api/models/acme/tiny$|/api/datasets/acme/pictures$"))
    assert len(asked) > 30 and set(asked.values()) == {1}
    messages = [message.split(",")[0] for message in hub.repo("ann/runs").messages]
    assert messages == [STATES[1], EXPORTS[0], STATES[2], EXPORTS[1], STATES[0], EXPORTS[2]]
    sent = {name for name in hub.repo("ann/runs").files if STATES[0] in name}
    assert sent == {f"first/{STATES[0]}/{path.name}" for path in (out / STATES[0]).iterdir()}  # both ranks' parts


@pytest.mark.nightly
def test_run_directories_go_to_folders_of_their_own_and_a_run_goes_on_from_there(hub: HubStub, tmp_path: Path) -> None:
    trainer, env = Trainer(tmp_path, "sdxl", cached=False, steps=4), hub.environment(tmp_path / "home")
    settings = ("--save.save_every_n_steps=2", "--save.state=true", "--save.checkpoint_every_n_minutes=999")
    to_hub = ("--hub.repo_id=ann/runs", "--hub.save_state=true", "--hub.path_in_repo=first", *settings)
    background = ("--hub.async_upload=true", "--save.last_n_steps=1")
    trainer.run_words(trainer.words(tmp_path / "out", *to_hub, *background), **env)
    run, files = only(tmp_path / "out"), hub.repo("ann/runs").files
    saves = ["global_step2", "step2", "step2-ema", "global_step4", "step4", "step4-ema"]
    assert [message.split(",")[0] for message in hub.repo("ann/runs").messages] == saves
    assert {name.split("/", 3)[2] for name in files} == set(saves)
    here = [path for name in saves for path in (run / name).rglob("*") if path.is_file()]
    assert {f"first/{run.name}/{path.relative_to(run)}": path.read_bytes() for path in here} == files
    assert json.loads((run / "report.json").read_text())["notes"]["uploads"]["failed"] == []
    # on from there; a hub that says no stops nobody, and what it has of the first run stays as it is
    hub.misbehave("POST", "/commit/", 403, times=1, message="over quota")
    resume = ("--hub.resume=true", f"--resume_from_checkpoint=ann/runs/first/{run.name}/global_step2")
    printed = trainer.run_words(trainer.words(tmp_path / "again", *to_hub, *resume), **env)
    again = only(tmp_path / "again")
    assert losses(again) == losses(run)[2:] and hub.token not in written(again) + printed
    one, other = tensors(run / "global_step4"), tensors(again / "global_step4")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    place = f"first/{again.name}/global_step4"
    assert f"hf upload ann/runs {again / 'global_step4'} {place}" in printed
    assert {name: data for name, data in hub.repo("ann/runs").files.items() if again.name not in name} == files
