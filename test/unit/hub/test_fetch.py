"""Ids of a hub become paths: huggingface_hub itself against a hub on this machine, and what each refusal says."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_stub import HubStub, point_here, serving
from refusals import is_about, names

from difftrain.cli import main
from difftrain.config import TrainConfig
from difftrain.contracts import ConfigFault
from difftrain.distributed.ranks import Ranks
from difftrain.hub import client
from difftrain.hub.fetch import fetch, fetch_state, looked_up
from difftrain.hub.ids import remote_refs

SDXL = {
    "model_index.json": json.dumps(
        {
            "_class_name": "StableDiffusionXLPipeline",
            "unet": ["diffusers", "UNet2DConditionModel"],
            "vae": ["diffusers", "AutoencoderKL"],
            "tokenizer": ["transformers", "CLIPTokenizer"],
            "image_encoder": [None, None],
        }
    ).encode(),
    "unet/config.json": b'{"of": "unet/config.json"}',
    "unet/diffusion_pytorch_model.safetensors": b"u" * 5000,
    "unet/diffusion_pytorch_model.fp16.safetensors": b"h" * 2500,
    "unet/diffusion_pytorch_model.bin": b"p" * 5000,
    "vae/config.json": b'{"of": "vae/config.json"}',
    "vae/diffusion_pytorch_model.fp16.safetensors": b"v" * 3000,
    "vae_1_0/diffusion_pytorch_model.safetensors": b"w" * 3000,
    "tokenizer/vocab.json": b'{"of": "tokenizer/vocab.json"}',
    "tokenizer/merges.txt": b"#",
    "sd_xl_base_1.0.safetensors": b"s" * 4000,
    "README.md": b"# model",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStub]:
    patience = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: patience(min(seconds, 0.01)))
    monkeypatch.chdir(tmp_path)
    with serving() as stub:
        point_here(monkeypatch, stub, tmp_path / "home")
        yield stub


def config(**sections: dict) -> TrainConfig:
    return TrainConfig(**{"model": {"init_from_config": "tiny"}, **sections})


def pretrained(text: str, **more: object) -> TrainConfig:
    return config(model={"pretrained": text, **more})


def fetched(cfg: TrainConfig, pins: dict[str, str] | None = None) -> tuple[TrainConfig, dict[str, str]]:
    return fetch(cfg, Ranks(), pins or {})


def downloads(hub: HubStub) -> list[str]:
    return sorted({path.partition("/resolve/")[2].partition("/")[2] for path in hub.asked("GET", "/resolve/")})


def fault_of(cfg: TrainConfig, pins: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigFault) as caught:
        fetched(cfg, pins)
    return str(caught.value)


@pytest.mark.flags("pretrained_model_name_or_path")
def test_a_diffusers_model_comes_with_its_parts_and_nothing_else(hub: HubStub) -> None:
    commit = hub.repo("acme/sdxl").push(SDXL)
    assert remote_refs(pretrained("acme/sdxl"))
    here, pins = fetched(pretrained("acme/sdxl"))
    assert here.model.pretrained is not None
    assert downloads(hub) == [
        "model_index.json", "tokenizer/merges.txt", "tokenizer/vocab.json", "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors", "vae/config.json", "vae/diffusion_pytorch_model.fp16.safetensors",
    ]  # fmt: skip
    assert pins == {"model acme/sdxl": commit}
    folder = Path(here.model.pretrained)
    assert folder.name == commit and (folder / "unet/diffusion_pytorch_model.safetensors").read_bytes() == b"u" * 5000


def test_one_file_is_a_model_too(hub: HubStub) -> None:
    hub.repo("acme/one").push({"one.safetensors": b"1", "README.md": b"r", "one.ckpt": b"c"})
    here, _ = fetched(pretrained("acme/one"))
    assert Path(str(here.model.pretrained)).name == "one.safetensors" and downloads(hub) == ["one.safetensors"]
    here, _ = fetched(pretrained("acme/one/one.ckpt"))
    assert Path(str(here.model.pretrained)).read_bytes() == b"c"


def test_what_is_no_model_says_what_it_is(hub: HubStub) -> None:
    hub.repo("acme/two").push({"a.safetensors": b"1", "b.safetensors": b"2"})
    hub.repo("acme/old").push({"a.ckpt": b"1"})
    hub.repo("acme/pickled").push({"model_index.json": b'{"unet": ["d", "U"]}', "unet/model.bin": b"1"})
    hub.repo("acme/words").push({"words.txt": b"1"})
    for repository, *facts in (
        ("acme/two", "2", "a.safetensors"),
        ("acme/old", "pickles", "a.ckpt"),
        ("acme/pickled", ".safetensors", "unet", "model.bin"),
        ("acme/words", "model_index.json", ".safetensors", "words.txt"),
    ):
        assert is_about(fault_of(pretrained(repository)), "--pretrained_model_name_or_path", repository, *facts)
    assert not [name for name in downloads(hub) if not name.endswith("index.json")]


@pytest.mark.flags("vae")
def test_a_vae_comes_alone(hub: HubStub) -> None:
    hub.repo("acme/sdxl").push(SDXL)
    hub.repo("acme/vae").push({"config.json": b"{}", "diffusion_pytorch_model.safetensors": b"x", "x.md": b"-"})
    here, _ = fetched(config(model={"init_from_config": "tiny", "vae": "acme/sdxl"}))
    assert downloads(hub) == ["model_index.json", "vae/config.json", "vae/diffusion_pytorch_model.fp16.safetensors"][1:]
    within, _ = fetched(config(model={"init_from_config": "tiny", "vae": "acme/sdxl/vae"}))
    assert Path(str(within.model.vae)) == Path(str(here.model.vae)) / "vae"
    alone, _ = fetched(config(model={"init_from_config": "tiny", "vae": "acme/vae"}))
    assert sorted(path.name for path in Path(str(alone.model.vae)).iterdir()) == [
        "config.json", "diffusion_pytorch_model.safetensors",
    ]  # fmt: skip


def test_a_run_keeps_the_commit_that_it_began_with(hub: HubStub) -> None:
    first = hub.repo("acme/one").push({"one.safetensors": b"1"})
    _, pins = fetched(pretrained("acme/one"))
    second = hub.repo("acme/one").push({"one.safetensors": b"2"})
    again, kept = fetched(pretrained("acme/one"), pins)
    assert kept == pins == {"model acme/one": first} and Path(str(again.model.pretrained)).read_bytes() == b"1"
    anew, moved = fetched(pretrained("acme/one"))
    assert moved == {"model acme/one": second} and Path(str(anew.model.pretrained)).read_bytes() == b"2"
    named, _ = fetched(pretrained(f"acme/one@{first}"))
    assert Path(str(named.model.pretrained)).read_bytes() == b"1"
    hub.repo("acme/one").push({"one.safetensors": b"3"}, branch="refs/pr/7")
    proposed, _ = fetched(pretrained("acme/one@refs/pr/7"))
    assert Path(str(proposed.model.pretrained)).read_bytes() == b"3"


def test_a_path_wins(hub: HubStub, tmp_path: Path) -> None:
    hub.repo("acme/one").push({"one.safetensors": b"1"})
    (tmp_path / "acme" / "one").mkdir(parents=True)
    assert not remote_refs(pretrained("acme/one"))
    here, pins = fetched(pretrained("acme/one"))
    assert here.model.pretrained == "acme/one" and pins == {} and not hub.requests
    here, _ = fetched(pretrained("hf://acme/one"))
    assert Path(str(here.model.pretrained)).read_bytes() == b"1"


def data(*dirs: str, **more: object) -> TrainConfig:
    return config(data={"dirs": dirs, **more})


@pytest.mark.flags("train_data_dir")
@pytest.mark.parametrize(
    ("files", "taken"),
    [
        (("a/0.tar", "a/1.tar", "a/0.parquet", "stats.json"), ["a/0.tar", "a/1.tar"]),
        (
            ("1.JPG", "1.txt", "b/2.png", "b/2.caption", "b/2.json", "c.parquet"),
            ["1.JPG", "1.txt", "b/2.caption", "b/2.png"],
        ),
        (("data/train-0.parquet", "data/test-0.parquet", "README.md"), ["data/test-0.parquet", "data/train-0.parquet"]),
        (("top.png", "deep/0.tar"), ["top.png"]),
    ],
)
def test_data_are_what_a_folder_of_the_same_content_is_read_as(
    hub: HubStub, files: tuple[str, ...], taken: list[str]
) -> None:
    commit = hub.repo("acme/pictures", "dataset").push({name: name.encode() for name in files})
    here, pins = fetched(data("acme/pictures"))
    (folder,) = map(Path, here.data.dirs)
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()) == taken
    assert pins == {"dataset acme/pictures": commit}


def test_data_of_a_folder_or_a_file_of_a_repository_and_very_many(hub: HubStub) -> None:
    many = {f"train/{i}.{end}": f"{i}{end}".encode() for i in range(80) for end in ("png", "txt")}
    hub.repo("acme/pictures", "dataset").push(many | {"test/x.png": b"x", "one.tar": b"t"})
    here, _ = fetched(data("acme/pictures/train", "acme/pictures/one.tar", "hf://datasets/acme/pictures/test"))
    train, tar, test = map(Path, here.data.dirs)
    assert len(list(train.iterdir())) == 160 and tar.name == "one.tar" and [p.name for p in test.iterdir()] == ["x.png"]
    assert is_about(fault_of(data("acme/pictures/nowhere")), "--train_data_dir", "acme/pictures", "parquet", "nowhere")


def test_other_caption_files_are_fetched_where_they_are_asked_for(hub: HubStub) -> None:
    hub.repo("acme/pictures", "dataset").push({"1.png": b"1", "1.tags": b"a", "1.txt": b"b"})
    fetched(config(data={"dirs": ("acme/pictures",)}, captions={"extension": "tags"}))
    assert downloads(hub) == ["1.png", "1.tags"]


def test_ids_stand_in_data_set_tables_and_among_regularisation_pictures_too(hub: HubStub) -> None:
    hub.repo("acme/pictures", "dataset").push({"1.png": b"1", "1.txt": b"t", "deep/2.png": b"2"})
    tables = [{"subsets": [{"image_dir": "acme/pictures", "flat": True}]}]
    here, pins = fetched(config(data={"datasets": tables}))
    (subset,) = here.data.datasets[0].subsets
    assert sorted(path.name for path in Path(str(subset.image_dir)).rglob("*")) == ["1.png", "1.txt"] and pins
    here, _ = fetched(config(data={"dirs": ("acme/pictures/deep",), "reg_dirs": ("acme/pictures",)}))
    assert [Path(folder).is_dir() for folder in (*here.data.dirs, *here.data.reg_dirs)] == [True, True]
    said = fault_of(config(data={"datasets": [{"subsets": [{"image_dir": "acme/none"}]}]}))
    assert is_about(said, "--dataset_config", "acme/none", hub.endpoint)


CLIP = {
    "vocab.json": b"{}",
    "merges.txt": b"#",
    "pytorch_model.bin": b"p",
    "model.safetensors": b"m",
    "README.md": b"r",
}


@pytest.mark.flags("tokenizer1_path", "tokenizer2_path", "tokenizer_cache_dir")
def test_tokenizers_are_kept_where_kohya_keeps_them(hub: HubStub, tmp_path: Path) -> None:
    hub.repo("acme/clip").push(CLIP)
    model = {"init_from_config": "tiny", "tokenizer1": "acme/clip", "tokenizer_cache_dir": str(tmp_path / "kept")}
    here, _ = fetched(config(model=model))
    assert here.model.tokenizer1 == str(tmp_path / "kept" / "acme_clip") and here.model.tokenizer2 is None
    assert sorted(path.name for path in (tmp_path / "kept").rglob("*")) == ["acme_clip", "merges.txt", "vocab.json"]
    asked = len(hub.requests)
    again, pins = fetched(config(model=model))
    assert again == here and pins == {} and len(hub.requests) == asked
    without = {key: value for key, value in model.items() if key != "tokenizer_cache_dir"}
    bare, _ = fetched(config(model=without))
    assert "snapshots" in str(bare.model.tokenizer1)
    hub.repo("acme/deep").push({"tokenizer/vocab.json": b"{}", "tokenizer/merges.txt": b"#"})
    said = fault_of(config(model=model | {"tokenizer1": "acme/deep"}))
    assert is_about(
        said, "--tokenizer1_path", "vocab.json", "merges.txt", "tokenizer.json; tokenizers there: tokenizer"
    )


def test_weights_without_tokenizers_take_kohyas(hub: HubStub, tmp_path: Path) -> None:
    hub.repo("openai/clip-vit-large-patch14").push(CLIP)
    cfg = config(model={"init_from_config": "base", "tokenizer2": str(tmp_path), "tokenizer_cache_dir": str(tmp_path)})
    assert remote_refs(cfg) and not remote_refs(config())
    here, pins = fetched(cfg)
    assert here.model.tokenizer1 == str(tmp_path / "openai_clip-vit-large-patch14")
    assert here.model.tokenizer2 == str(tmp_path) and list(pins) == ["model openai/clip-vit-large-patch14"]
    hub.misbehave("GET", "/api/", 404, times=9)
    said = fault_of(config(model={"init_from_config": "base"}))
    first, second = said.splitlines()
    assert is_about(first, "--tokenizer1_path", "openai/clip-vit-large-patch14")
    assert is_about(second, "--tokenizer2_path", "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k")


def test_an_export_converts_what_is_on_a_hub(hub: HubStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--init_from_config=tiny", f"--output={tmp_path / 'one'}"]) == 0
    hub.repo("acme/one").push({"one.safetensors": (tmp_path / "one.safetensors").read_bytes()})
    line = ["export", "--pretrained_model_name_or_path=acme/one", f"--output={tmp_path / 'two'}"]
    assert main([*line, "--save_model_as=diffusers_safetensors"]) == 0
    assert (tmp_path / "two" / "unet" / "diffusion_pytorch_model.safetensors").is_file()
    assert main(["export", "--pretrained_model_name_or_path=acme/none", f"--output={tmp_path / 'three'}"]) == 2
    assert is_about(capsys.readouterr().err.splitlines()[-1], "--pretrained_model_name_or_path", "acme/none")


# what goes wrong


def test_without_a_network_the_cache_serves(
    hub: HubStub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.repo("acme/sdxl").push(SDXL)
    cfg = pretrained("acme/sdxl")
    here, _ = fetched(cfg)
    assert looked_up(cfg) == (here, [])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    asked = len(hub.requests)
    assert fetched(cfg)[0] == here and len(hub.requests) == asked
    said = fault_of(pretrained("acme/other"))
    where = "--pretrained_model_name_or_path"
    assert is_about(said, where, "acme/other", "HF_HUB_OFFLINE", ".safetensors", "hf download acme/other")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    client.api.cache_clear()
    with caplog.at_level(logging.WARNING, "difftrain"):
        logging.getLogger("difftrain").propagate = True
        assert fetched(cfg)[0] == here
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(names(line, "acme/sdxl", "http://127.0.0.1:9", "commit") for line in warned), warned
    said = fault_of(data("acme/other"))
    assert is_about(said, "--train_data_dir", "http://127.0.0.1:9", "hf download acme/other --repo-type dataset")


def test_a_half_filled_cache_does_not_pass_for_whole(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo("acme/pictures", "dataset").push({"a/1.png": b"1", "b/2.png": b"2"})
    fetched(data("acme/pictures/a"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert len(looked_up(data("acme/pictures"))[1]) == 1
    assert "HF_HUB_OFFLINE" in fault_of(data("acme/pictures"))


@pytest.mark.parametrize(
    ("status", "headers", "facts"),
    [
        (401, {"message": "Invalid credentials in Authorization header"}, ["refuses", "HF_TOKEN"]),
        (403, {"code": "GatedRepo"}, ["acme/one", "gated", "HF_TOKEN"]),
        (404, {"code": "RepoNotFound"}, ["acme/one", "hides", "HF_TOKEN"]),
        (403, {"message": "no such scope"}, ["forbids", "HF_TOKEN"]),
        (500, {"message": "on fire"}, ["answers 500", "on fire"]),
    ],
)
def test_refusals_are_told_apart(hub: HubStub, status: int, headers: dict[str, str], facts: list[str]) -> None:
    hub.repo("acme/one").push({"one.safetensors": b"1"})
    hub.misbehave("GET", "/api/models/acme/one$", status, **headers)
    said = fault_of(pretrained("acme/one"))
    assert names(said, *facts) and hub.token not in said


def test_without_a_token_the_hub_hides_what_is_private(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo("acme/one").push({"one.safetensors": b"1"})
    hub.repo("acme/one").private = True
    monkeypatch.delenv("HF_TOKEN")
    assert names(fault_of(pretrained("acme/one")), "acme/one", "hides", "no token", "HF_TOKEN")


def test_revisions_and_files_that_are_not_there(hub: HubStub) -> None:
    hub.repo("acme/one").push({"one.safetensors": b"1"})
    assert names(fault_of(pretrained("acme/one@v9")), "acme/one", "revision")
    assert names(fault_of(pretrained("acme/one/two.safetensors")), "acme/one", "two.safetensors")


def test_all_ids_are_judged_at_once(hub: HubStub) -> None:
    said = fault_of(config(model={"pretrained": "acme/a", "vae": "acme/b"}, data={"dirs": ("acme/c",)}))
    assert all(
        flag in said for flag in ("--pretrained_model_name_or_path: acme/a", "--vae: acme/b", "--train_data_dir")
    )


@pytest.mark.parametrize("how", ["half", "close", pytest.param("stall", marks=pytest.mark.nightly), 503])
def test_broken_transfers_go_on(hub: HubStub, how: int | str) -> None:
    content = bytes(range(256)) * 1000
    hub.repo("acme/one").push({"one.safetensors": content})
    hub.misbehave("GET", "/resolve/", how, times=2)
    here, _ = fetched(pretrained("acme/one"))
    assert Path(str(here.model.pretrained)).read_bytes() == content


def test_a_hub_that_keeps_breaking_off_is_a_fault_and_what_came_is_kept(hub: HubStub) -> None:
    hub.repo("acme/one").push({"one.safetensors": bytes(4000)})
    hub.misbehave("GET", "/resolve/", 503, times=100)
    said = fault_of(pretrained("acme/one"))
    assert "--pretrained_model_name_or_path: acme/one" in said and "503" in said


def test_something_else_than_a_hub_is_named(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"{hub.endpoint}/elsewhere")
    assert "/elsewhere answers 404" in fault_of(pretrained("acme/one"))


def test_a_cache_that_cannot_be_written_to_is_a_fault(hub: HubStub, tmp_path: Path) -> None:
    hub.repo("acme/one").push({"one.safetensors": b"1"})
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "hub").write_text("a file, no folder")
    said = fault_of(pretrained("acme/one"))
    assert "--pretrained_model_name_or_path: acme/one" in said and str(tmp_path / "home" / "hub") in said


# states


def state(resume: str) -> TrainConfig:
    return config(save={"resume": resume}, hub={"resume": True})


@pytest.mark.flags("resume_from_huggingface")
def test_a_state_is_fetched_to_be_resumed_from(hub: HubStub) -> None:
    files = {"runs/N-state/manifest.json": b"{}", "runs/N-state/a/b.safetensors": b"1", "runs/other/c": b"2"}
    hub.repo("acme/states", "dataset").push(files, branch="old")
    folder = fetch_state(state("acme/states/runs/N-state:old:dataset"), Ranks())
    assert folder is not None and folder.endswith("/runs/N-state")
    assert (Path(folder) / "a" / "b.safetensors").read_bytes() == b"1"
    assert downloads(hub) == ["runs/N-state/a/b.safetensors", "runs/N-state/manifest.json"]
    assert fetch_state(config(save={"resume": "auto"}), Ranks()) == "auto"
    for wrong, says in (
        ("acme/states/none:old:dataset", "none"),
        ("acme/states/x", "no acme/states"),
    ):
        with pytest.raises(ConfigFault, match=says) as caught:
            fetch_state(state(wrong), Ranks())
        assert f"--resume: {wrong}: " in str(caught.value)
