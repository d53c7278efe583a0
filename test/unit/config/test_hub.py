"""What is an id of a hub and what a path; flags of a hub that are wrong or lack a companion; what a run is known by."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import is_about, names

from difftrain.config import hub_ids
from difftrain.config.digest import digest, identity
from difftrain.config.hub_ids import HubId
from difftrain.config.parse_flags import parse
from difftrain.config.schema.sections import TrainConfig
from difftrain.contracts import ConfigFault

READ = [
    ("stabilityai/stable-diffusion-xl-base-1.0", HubId("stabilityai/stable-diffusion-xl-base-1.0")),
    ("acme/model@v1.2", HubId("acme/model", "v1.2")),
    ("acme/model@refs/pr/3", HubId("acme/model", "refs/pr/3")),
    ("acme/model@refs/pr/3/vae", HubId("acme/model", "refs/pr/3", "vae")),
    ("acme/model/vae", HubId("acme/model", path="vae")),
    ("acme/model/deep/one.safetensors", HubId("acme/model", path="deep/one.safetensors")),
    ("acme/model@v1/one.ckpt", HubId("acme/model", "v1", "one.ckpt")),
    ("hf://acme/model", HubId("acme/model", explicit=True)),
    ("hf://models/acme/model@x", HubId("acme/model", "x", kind="model", explicit=True)),
    ("hf://datasets/acme/pictures/train", HubId("acme/pictures", path="train", kind="dataset", explicit=True)),
]
PATHS = [
    "", "model", "model.safetensors", "./acme/model", "../acme/model", "~/acme/model", "/acme/model", "acme/model/",
    "acme//model", "models/one.safetensors", "data/train.parquet", "C:\\models\\one", "acme/mo del", "acme/model@",
    "acme/../model", "acme/model/../x", "acme/.model", "ac--me/model", "hf://model", "acme/model.git", "@x/y",
]  # fmt: skip


@pytest.mark.parametrize(("text", "id"), READ, ids=[text for text, _ in READ])
def test_what_is_read_as_an_id(text: str, id: HubId) -> None:
    assert hub_ids.read(text) == id


@pytest.mark.parametrize("text", PATHS)
def test_what_can_only_be_a_path(text: str) -> None:
    assert hub_ids.read(text) is None


def test_a_slip_in_a_path_is_named_and_not_looked_for_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "sdxl").mkdir(parents=True)
    assert hub_ids.missing("models/sdxl") == "" == hub_ids.missing("acme/sdxl") == hub_ids.missing("hf://models/x/y")
    said = hub_ids.missing("models/sdlx")
    assert names(said, "'models/sdlx'", "'models'", tmp_path)
    assert hub_ids.missing("./acme/sdxl").endswith(": './acme/sdxl'")
    assert hub_ids.lies_here("models/sdxl") and not hub_ids.lies_here("hf://models/sdxl")


STATES = [
    ("acme/states/N-state", HubId("acme/states", "", "N-state")),
    ("acme/states/runs/N-state:v2", HubId("acme/states", "v2", "runs/N-state")),
    ("acme/states/N-state:main:dataset", HubId("acme/states", "main", "N-state", "dataset")),
]


@pytest.mark.parametrize(("text", "id"), STATES)
def test_a_state_is_named_as_kohya_names_it(text: str, id: HubId) -> None:
    assert hub_ids.read_state(text) == id


@pytest.mark.parametrize("text", ["acme/states", "N-state", "acme/states/x:main:space", "acme/states/../x", "a b/c/d"])
def test_what_names_no_state(text: str) -> None:
    assert hub_ids.read_state(text) is None


def test_what_lies_in_the_cache_of_a_hub_is_called_by_its_id() -> None:
    snapshot = f"/c/hub/models--acme--sdxl-1.0/snapshots/{'0a' * 20}"
    assert hub_ids.name_of(snapshot) == "acme/sdxl-1.0"
    assert hub_ids.name_of(f"{snapshot}/deep/one.safetensors") == "acme/sdxl-1.0/deep/one.safetensors"
    assert hub_ids.name_of(f"/c/datasets--acme--pictures/snapshots/{'0a' * 20}/") == "acme/pictures"
    assert hub_ids.name_of("/models/sdxl.safetensors") == "sdxl.safetensors"


def test_a_run_is_known_by_the_ids_it_was_given() -> None:
    def known(text: str) -> object:
        return identity(TrainConfig(model={"pretrained": text}))["model.pretrained"]

    assert known("/mnt/a/sdxl") == known("acme/sdxl") == "sdxl"  # either may be the same folder elsewhere
    assert known("acme/sdxl@v1/one.safetensors") == "acme/sdxl@v1/one.safetensors"
    assert known("hf://acme/sdxl") == "acme/sdxl"
    plain, moved = TrainConfig(), TrainConfig(hub={"repo_id": "me/x", "save_state": True})
    kept = TrainConfig(model={"tokenizer_cache_dir": "/x"})
    assert digest(plain) == digest(moved) == digest(kept)


# flags


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    (tmp_path / "data").mkdir()
    return ["--init_from_config=tiny", f"--train_data_dir={tmp_path / 'data'}", f"--output_dir={tmp_path / 'out'}",
            "--resolution=64,64", "--max_train_steps=2"]  # fmt: skip


def faults(words: list[str]) -> list[str]:
    with pytest.raises(ConfigFault) as caught:
        parse(words)
    return [str(fault) for fault in caught.value.faults]


SENDS = "--huggingface_repo_id=me/models"
WRONG = [
    ("--huggingface_repo_id=me/my/models", "--huggingface_repo_id 'me/my/models'"),
    (f"{SENDS} --huggingface_path_in_repo=/abs", "--huggingface_path_in_repo '/abs'"),
    (f"{SENDS} --huggingface_path_in_repo=a/../b", "--huggingface_path_in_repo 'a/../b'"),
    (f"{SENDS} --huggingface_repo_type=space", "--huggingface_repo_type model dataset 'space'"),
    (f"{SENDS} --huggingface_repo_visibility=secret", "--huggingface_repo_visibility private public 'secret'"),
    ("--save_state_to_huggingface --save_state", "--save_state_to_huggingface --huggingface_repo_id"),
    (f"{SENDS} --save_state_to_huggingface", "--save_state_to_huggingface --save_state --save_state_on_train_end"),
    ("--resume_from_huggingface", "--resume_from_huggingface --resume"),
    ("--resume_from_huggingface --resume=auto", "--resume_from_huggingface --resume=auto"),
    ("--resume_from_huggingface --resume=acme/x", "--resume hub 'acme/x'"),
    ("--resume=acme/states/x", "--resume folder 'acme/states/x'"),
]


@pytest.mark.parametrize(("more", "facts"), WRONG, ids=[more for more, _ in WRONG])
def test_what_is_wrong_with_flags_of_a_hub(line: list[str], more: str, facts: str) -> None:
    (found,) = faults([*line, *more.split()])
    assert is_about(found, *facts.split())


def test_flags_of_a_hub_that_are_sound(line: list[str]) -> None:
    more = [SENDS, "--save_state", "--save_state_to_huggingface", "--huggingface_path_in_repo=a/b", "--async_upload"]
    more += ["--resume_from_huggingface", "--resume=acme/states/x:main:dataset", "--vae=acme/vae"]
    parsed = parse([*line, *more, "--tokenizer1_path=acme/clip", "--huggingface_repo_visibility=public"])
    assert parsed.notes == () and parsed.config.hub.repo_id == "me/models" and parsed.config.hub.resume
    (note,) = parse([*line, "--async_upload"]).notes
    assert is_about(note, "--async_upload", "--huggingface_repo_id")
