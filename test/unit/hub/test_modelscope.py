"""ModelScope's own client against a hub on this machine: files of one state, whatever a branch holds later."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from refusals import is_about, names

from difftrain.config import TrainConfig, hub_ids
from difftrain.contracts import ConfigFault
from difftrain.distributed.ranks import Ranks
from difftrain.hub.fetch import fetch, looked_up

CLIP = {"vocab.json": b'{"a": 0}', "merges.txt": b"#version\n"}


class Stub(BaseHTTPRequestHandler):
    """The part of the HTTP interface that the client uses: a listing, and files with ranges left out."""

    repos: dict[str, dict[str, bytes]]
    asked: list[str]

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: value[0] for key, value in parse_qs(url.query).items()}
        self.asked.append(url.path)
        parts = url.path.strip("/").split("/")  # api v1 models ORG NAME repo [files]
        files = self.repos.get("/".join(parts[3:5]))
        if files is None:
            self.answer(404, json.dumps({"Code": 404, "Message": "no such model", "Success": False}).encode())
        elif parts[5:] == ["repo"] and query.get("FilePath") in files:
            self.answer(200, files[query["FilePath"]])
        elif parts[5:] in (["repo", "files"], ["repo", "tree"]):
            entries = [
                {
                    "Path": path,
                    "Name": path,
                    "Type": "blob",
                    "Size": len(data),
                    "Sha256": hashlib.sha256(data).hexdigest(),
                }
                for path, data in files.items()
            ]
            self.answer(200, json.dumps({"Code": 200, "Success": True, "Data": {"Files": entries}}).encode())
        else:
            self.answer(200, json.dumps({"Code": 200, "Success": True, "Data": {}}).encode())

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Stub]]:
    stub = type("Stub", (Stub,), {"repos": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), stub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
    from modelscope_hub import HubConfig, set_default_config

    set_default_config(HubConfig(endpoint=f"http://127.0.0.1:{server.server_address[1]}"))
    yield stub
    set_default_config(HubConfig())
    server.shutdown()
    server.server_close()
    thread.join()


def config(**model: object) -> TrainConfig:
    return TrainConfig.model_validate({"model": {"init_from_config": "tiny", **model}})


def test_how_an_id_is_written() -> None:
    found = hub_ids.read("modelscope://org/name@v1/unet")
    assert found is not None and (found.repo, found.revision, found.path, found.hub) == (
        "org/name",
        "v1",
        "unet",
        "modelscope",
    )
    assert str(found) == "modelscope://org/name@v1/unet" and not hub_ids.lies_here("modelscope://org/name")
    data = hub_ids.read("modelscope://datasets/org/name")
    assert data is not None and data.kind == "dataset"
    assert str(hub_ids.read("hf://org/name")) == "org/name"


def test_a_part_is_fetched_once_and_stays_as_it_was(hub: type[Stub], tmp_path: Path) -> None:
    hub.repos["acme/clip"] = {"tokenizer/" + name: data for name, data in CLIP.items()} | {"large.bin": b"x" * 4000}
    cfg = config(tokenizer1="modelscope://acme/clip/tokenizer")
    _, missing = looked_up(cfg)
    assert [str(request.id) for request in missing] == ["modelscope://acme/clip/tokenizer"] and not hub.asked
    here, pins = fetch(cfg, Ranks(), {})
    folder = Path(str(here.model.tokenizer1))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CLIP
    assert not list((tmp_path / "cache").rglob("large.bin")) and list(pins) == ["model modelscope://acme/clip"]
    assert looked_up(cfg)[1] == []

    # --- the branch moves: a run that began keeps its files, a new one gets the new ones
    hub.repos["acme/clip"]["tokenizer/merges.txt"] = b"#other\n"
    again, _ = fetch(cfg, Ranks(), pins)
    assert again.model.tokenizer1 == here.model.tokenizer1
    new, later = fetch(cfg, Ranks(), {})
    assert (Path(str(new.model.tokenizer1)) / "merges.txt").read_bytes() == b"#other\n" and later != pins

    # --- and one whose files are gone is told so, not given others
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(ConfigFault) as caught:
        fetch(cfg, Ranks(), pins)
    [fault] = caught.value.faults
    assert is_about(fault, "--tokenizer1_path", "acme/clip", pins["model modelscope://acme/clip"][:8])


def test_what_is_not_there_is_named(hub: type[Stub], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigFault) as caught:
        fetch(config(tokenizer1="modelscope://acme/none"), Ranks(), {})
    assert is_about(caught.value.faults[0], "--tokenizer1_path", "modelscope://acme/none", "acme/none")
    monkeypatch.setitem(__import__("sys").modules, "modelscope_hub", None)
    with pytest.raises(ConfigFault) as caught:
        fetch(config(tokenizer1="modelscope://acme/none"), Ranks(), {})
    assert names(caught.value, "modelscope-hub")
