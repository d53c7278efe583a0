"""Exports and states are sent whole, one after the other, again where the reason may pass; a hub never stops a run."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_stub import HubStub, point_here, serving
from refusals import is_about, names

from difftrain.checkpoint import retain_exports
from difftrain.config.schema.sections import HubSection, SaveSection
from difftrain.contracts import ConfigFault
from difftrain.hub import uploads as module
from difftrain.hub.uploads import Uploads, UploadTarget, open_target


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStub]:
    patience = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: patience(min(seconds, 0.01)))
    monkeypatch.setattr(module, "WAITS_S", (0.01, 0.01))
    monkeypatch.setattr(logging.getLogger("difftrain"), "propagate", True)
    with serving() as stub:
        point_here(monkeypatch, stub, tmp_path / "home")
        yield stub


def opened(**section: object) -> UploadTarget:
    target = open_target(HubSection(repo_id="ann/models", **section))
    assert target is not None
    return target


def refused(**section: object) -> str:
    with pytest.raises(ConfigFault) as caught:
        opened(**section)
    return str(caught.value)


def at(caplog: pytest.LogCaptureFixture, level: int, *facts: str) -> bool:
    """Return whether one line of this level names all of these."""
    return sum(record.levelno == level and names(record.getMessage(), *facts) for record in caplog.records) == 1


def export(folder: Path, name: str, size: int = 5000) -> Path:
    path = folder / name
    path.write_bytes(name.encode() * (size // len(name)))
    return path


def state(folder: Path, name: str, *files: str) -> Path:
    for file in files:
        (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / file).write_bytes(file.encode() * 700)
    return folder / name


# before training


@pytest.mark.flags("huggingface_repo_id", "huggingface_repo_visibility")
def test_a_new_repository_is_private_unless_it_is_asked_to_be_public(hub: HubStub) -> None:
    assert opened() == UploadTarget("ann/models", "model")
    assert hub.repos["model", "ann/models"].private
    assert open_target(HubSection(repo_id="open", visibility="public")) == UploadTarget("ann/open", "model")
    assert not hub.repos["model", "ann/open"].private
    opened()  # it may be there already, and stays as it is
    said = refused(visibility="public")
    assert is_about(said, "--huggingface_repo_visibility", "ann/models", "private", "public")
    assert open_target(HubSection()) is None


@pytest.mark.flags("huggingface_repo_type")
def test_a_repository_of_data(hub: HubStub, tmp_path: Path) -> None:
    target = opened(repo_type="dataset")
    Uploads(target).add(export(tmp_path, "N.safetensors"), "N")
    assert (
        list(hub.repos["dataset", "ann/models"].files) == ["N.safetensors"] and ("model", "ann/models") not in hub.repos
    )


@pytest.mark.flags("huggingface_token")
def test_tokens_are_tried_before_training(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.tokens["hf_reader0123456789abcdef"] = ("ann", "read")
    hub.tokens["hf_friend0123456789abcdef"] = ("bob", "write")
    monkeypatch.setenv("HF_TOKEN", "hf_reader0123456789abcdef")
    assert is_about(refused(), "--huggingface_token", "read")
    monkeypatch.setenv("HF_TOKEN", "hf_nobody0123456789abcdef")
    said = refused()
    assert is_about(said, "--huggingface_token", "refuses", "HF_TOKEN") and "hf_nobody" not in said
    monkeypatch.delenv("HF_TOKEN")
    assert is_about(refused(), "--huggingface_repo_id", "token", "write", "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_friend0123456789abcdef")
    assert is_about(refused(), "--huggingface_repo_id", "forbids", "HF_TOKEN")
    hub.repo("ann/models").push({})
    assert is_about(refused(), "--huggingface_repo_id", "forbids", "HF_TOKEN")  # it is there, and somebody else's
    assert hub.repo("ann/models").files == {}


def test_a_hub_that_cannot_be_reached_is_found_out_about_before_training(
    hub: HubStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.misbehave("GET", "whoami", "close")
    assert is_about(refused(), "--huggingface_repo_id", hub.endpoint)
    hub.misbehave("GET", "/api/models/ann/models", 503)
    assert "--huggingface_repo_id: " in (said := refused()) and "answers 503" in said
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert is_about(refused(), "--huggingface_repo_id", "HF_HUB_OFFLINE")


def test_a_silent_hub_is_not_waited_for_for_ever(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("difftrain.hub.client.SILENCE_S", 0.3)
    point_here(monkeypatch, hub, Path("nowhere"))
    hub.misbehave("GET", "whoami", "stall")
    began = time.monotonic()
    assert is_about(refused(), "--huggingface_repo_id", hub.endpoint) and time.monotonic() - began < 5


# sending


@pytest.mark.flags("huggingface_path_in_repo")
def test_an_export_is_one_commit(hub: HubStub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "difftrain")
    sending = Uploads(opened(path_in_repo="runs/first/"))
    sending.add(export(tmp_path, "N-step00000004.safetensors"), "N-step00000004.safetensors, step 4")
    sending.add(state(tmp_path, "N", "unet/w.safetensors", "model_index.json"), "N, step 4")
    repo = hub.repo("ann/models")
    assert repo.messages == ["N-step00000004.safetensors, step 4", "N, step 4"]
    assert sorted(repo.files) == [
        "runs/first/N-step00000004.safetensors", "runs/first/N/model_index.json", "runs/first/N/unet/w.safetensors",
    ]  # fmt: skip
    assert repo.files["runs/first/N/unet/w.safetensors"] == b"unet/w.safetensors" * 700
    assert at(caplog, logging.INFO, "exports", "private", "ann/models/runs/first", "ann")
    assert sending.facts() == {"repo": "ann/models", "sent": ["N-step00000004.safetensors", "N"], "failed": []}
    assert hub.token not in caplog.text


def test_a_folder_is_replaced_not_mixed_with_an_older_one(hub: HubStub, tmp_path: Path) -> None:
    target = opened()
    old = {"N-state/rank-1.pt": b"old", "N-state/manifest.json": b"old", "N-state-2/x": b"other", "README.md": b"r"}
    hub.repo("ann/models").push(old)
    Uploads(target).add(state(tmp_path, "N-state", "manifest.json", "rank-0.pt"), "N-state")
    files = hub.repo("ann/models").files
    assert sorted(files) == ["N-state-2/x", "N-state/manifest.json", "N-state/rank-0.pt", "README.md"]
    assert files["N-state/manifest.json"] == b"manifest.json" * 700


@pytest.mark.parametrize(
    ("method", "path", "how"),
    [("POST", "/commit/", 503), ("PUT", "/lfs/", "close"), ("POST", "/preupload/", 500), ("POST", "/commit/", "close")],
)
def test_what_breaks_off_is_sent_again(
    hub: HubStub, tmp_path: Path, method: str, path: str, how: int | str, caplog: pytest.LogCaptureFixture
) -> None:
    sending = Uploads(opened())
    hub.misbehave(method, path, how, times=2)
    sending.add(export(tmp_path, "N.safetensors"), "N")
    assert hub.repo("ann/models").files["N.safetensors"] == (tmp_path / "N.safetensors").read_bytes()
    assert sending.failed == [] and sending.sent == ["N.safetensors"]


def test_what_cannot_be_sent_is_named_with_what_to_do(
    hub: HubStub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sending = Uploads(opened(path_in_repo="runs"))
    hub.misbehave("POST", "/commit/", 503, times=3)  # as often as it is tried
    sending.add(export(tmp_path, "A.safetensors"), "A")
    hub.misbehave("POST", "/commit/", 403, message="over quota")
    sending.add(export(tmp_path, "B.safetensors"), "B")
    sending.add(export(tmp_path, "C.safetensors"), "C")
    sending.add(tmp_path / "gone.safetensors", "gone")
    assert list(hub.repo("ann/models").files) == ["runs/C.safetensors"]
    assert sending.facts() == {
        "repo": "ann/models", "sent": ["C.safetensors"], "failed": ["A.safetensors", "B.safetensors", "gone.safetensors"],
    }  # fmt: skip
    assert any(names(line, "A.safetensors", "answers 503", "hf upload") for line in caplog.messages)
    by_hand = f"hf upload ann/models {tmp_path / 'A.safetensors'} runs/A.safetensors"
    assert by_hand in caplog.text and "over quota" in caplog.text
    assert any(names(line, tmp_path / "gone.safetensors", "empty") for line in caplog.messages)
    assert caplog.text.count("trying again") == 2 and hub.token not in caplog.text


@pytest.mark.parametrize(("request_", "asked"), [("/preupload/", 6), ("/commit/", 3)])
def test_a_hub_that_falls_silent_is_asked_six_times_at_most(
    hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: str, asked: int
) -> None:
    """Some requests huggingface_hub itself repeats, waiting each time: ours would come on top, an hour in all."""
    monkeypatch.setattr("difftrain.hub.client.SILENCE_S", 0.2)
    point_here(monkeypatch, hub, tmp_path / "home")
    sending = Uploads(opened())
    before = len(hub.asked("POST", request_))
    hub.misbehave("POST", request_, "stall", times=100)
    sending.add(export(tmp_path, "A.safetensors"), "A")
    assert sending.failed == ["A.safetensors"] and len(hub.asked("POST", request_)) - before == asked
    hub.awake.set()


def test_a_state_that_breaks_off_is_not_to_be_seen(hub: HubStub, tmp_path: Path) -> None:
    sending = Uploads(opened())
    hub.misbehave("PUT", "/lfs/", 403, times=100)
    sending.add(state(tmp_path, "N-state", "a.pt", "b.pt", "manifest.json"), "N-state")
    assert hub.repo("ann/models").files == {} and sending.failed == ["N-state"]


# in the background


def let_go(hub: HubStub) -> None:
    """Let a hub that stalls go on, and what sends come to its end."""
    hub.awake.set()
    for thread in threading.enumerate():
        if thread.name == "uploads":
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.flags("async_upload")
def test_the_background_sends_while_the_run_goes_on(hub: HubStub, tmp_path: Path) -> None:
    sending = Uploads(opened(), background=True)
    hub.misbehave("POST", "/commit/", "slow", seconds="0.5")
    paths = [export(tmp_path, f"N-step0000000{i}.safetensors") for i in range(3)]
    began = time.monotonic()
    for path in paths:
        sending.add(path, path.name)
    assert time.monotonic() - began < 0.3 and all(map(sending.holds, paths)) and sending.sent == []
    assert not hub.repo("ann/models").files
    sending.wait(20)
    assert sending.sent == [path.name for path in paths] == hub.repo("ann/models").messages  # in their turn
    assert not any(map(sending.holds, paths))


def test_what_is_being_sent_is_not_deleted(hub: HubStub, tmp_path: Path) -> None:
    sending = Uploads(opened(), background=True)
    hub.misbehave("POST", "/commit/", "slow", seconds="0.5")
    out = tmp_path / "out"
    out.mkdir()
    for step in (1, 2, 3, 4):
        header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
        path = out / f"N-step{step:08d}.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + b"1")
        if step == 1:
            sending.add(path, "N")
    window = SaveSection(every_n_steps=1, last_n_steps=1)
    assert retain_exports(out, "N", window, 4, protected=sending.holds) == ["N-step00000002.safetensors"]
    sending.wait(20)
    assert retain_exports(out, "N", window, 4, protected=sending.holds) == ["N-step00000001.safetensors"]


def test_the_end_waits_for_a_while_and_names_what_is_late(
    hub: HubStub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "difftrain")
    sending = Uploads(opened(), background=True)
    hub.misbehave("POST", "/commit/", "stall")
    for name in ("A.safetensors", "B.safetensors"):
        sending.add(export(tmp_path, name), name)
    began = time.monotonic()
    sending.wait(0.3)
    assert time.monotonic() - began < 3
    assert at(caplog, logging.INFO, "0 s", "A.safetensors, B.safetensors")
    assert at(caplog, logging.WARNING, "A.safetensors", f"hf upload ann/models {tmp_path / 'A.safetensors'}")
    assert sending.facts() == {"repo": "ann/models", "sent": [], "failed": ["A.safetensors", "B.safetensors"]}
    let_go(hub)
    assert sending.failed == ["A.safetensors", "B.safetensors"]  # each is named once


@pytest.mark.parametrize(("error", "waits"), [(RuntimeError("no more memory"), True), (SystemExit(143), False)])
def test_a_run_that_ends_early_names_what_waits(
    hub: HubStub,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    waits: bool,
) -> None:
    """An error waits a moment for the hub, a signal does not."""
    caplog.set_level(logging.INFO, "difftrain")
    monkeypatch.setattr(module, "AT_STOP_S", 0.3)
    hub.misbehave("POST", "/commit/", "stall")
    with pytest.raises(type(error)), Uploads(opened(), background=True) as sending:
        sending.add(export(tmp_path, "A.safetensors"), "A")
        raise error
    assert at(caplog, logging.INFO, "waiting", "A.safetensors") == waits
    assert at(caplog, logging.WARNING, "A.safetensors", f"hf upload ann/models {tmp_path / 'A.safetensors'}")
    let_go(hub)


def test_a_signal_during_the_wait_names_what_waits(
    hub: HubStub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sending = Uploads(opened(), background=True)
    hub.misbehave("POST", "/commit/", "stall")
    sending.add(export(tmp_path, "A.safetensors"), "A")
    before = signal.signal(signal.SIGALRM, lambda *_: sys.exit(143))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(SystemExit):
            sending.wait(60)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert at(caplog, logging.WARNING, "A.safetensors", f"hf upload ann/models {tmp_path / 'A.safetensors'}")
    let_go(hub)


def test_without_a_target_nothing_happens(tmp_path: Path) -> None:
    sending = Uploads()
    sending.add(tmp_path, "x")
    sending.wait(1)
    assert sending.facts() is None and not sending.holds(tmp_path)
