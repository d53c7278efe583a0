"""An index that somebody else wrote or that a disk damaged: it names no code, and a flipped bit is found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from refusals import names

from difftrain.config import TrainConfig
from difftrain.contracts import ConfigFault, DataFault
from difftrain.data.index.index import Index, newest
from difftrain.data.prepare import index_folder, open_data, prepare
from difftrain.testing.pictures import write_folder

CALLED = (
    "def call(*words):\n    from pathlib import Path\n    Path(__file__).with_name('called').touch()\n    return [1]\n"
)


def config(folder: Path, **cache: Any) -> TrainConfig:
    data = {
        "dirs": (str(folder / "pictures"),),
        "resolution": (64, 64),
        "cache_dir": str(folder / "cache"),
        "workers": 0,
    }
    return TrainConfig.model_validate({"data": data, "training": {"seed": 1}, "cache": cache})


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A folder with pictures and their index; a module beside them that must not be called."""
    write_folder(tmp_path / "pictures", [(64, 48)] * 6)
    prepare(config(tmp_path), log=lambda line: None)
    (tmp_path / "stranger.py").write_text(CALLED)
    return tmp_path


def meta_of(folder: Path) -> Path:
    latest = newest(index_folder(config(folder)))
    assert latest is not None
    return latest / "index.json"


def forge(meta: Path, **changes: Any) -> None:
    content = json.loads(meta.read_text())
    content["sources"][0] |= changes
    meta.write_text(json.dumps(content))


def test_an_index_names_no_class(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(built))
    monkeypatch.chdir(built)
    meta = meta_of(built)
    forge(meta, kind="class", root="stranger.call", only="true")
    with pytest.raises(ConfigFault) as caught:
        prepare(config(built, trust=True), log=lambda line: None)
    assert names(caught.value, "--trust_cache", "stranger.call")
    # whoever opens the folder later is not led there either
    for index in (open_data(config(built), meta.parent).index, Index(meta.parent)):
        with pytest.raises(DataFault) as refused:
            index.read(index.record(0).media)
        assert names(refused.value, "stranger.call")
    assert not (built / "called").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "os"}, {"root": 5}, {"root": None}, {"repeats": "2"}, {"only": ["x"]}, {"suffixes": 4}, {"prefix": {}},
        {"ordinal": 7}, {"ordinal": "0"},
    ],
    ids=str,
)  # fmt: skip
def test_a_source_of_other_types(built: Path, change: dict[str, Any]) -> None:
    forge(meta_of(built), **change)
    with pytest.raises(DataFault) as caught:
        prepare(config(built, trust=True), log=lambda line: None)
    assert names(caught.value, meta_of(built).parent)


@pytest.mark.parametrize("content", ["null", "[1]", "5", '"x"', "[" * 100_000, "{}", "{", ""])
def test_a_summary_that_is_none(built: Path, content: str) -> None:
    meta = meta_of(built)
    meta.write_text(content)
    with pytest.raises(DataFault) as caught:
        prepare(config(built, trust=True), log=lambda line: None)
    assert names(caught.value, meta.parent)
    prepare(config(built), log=lambda line: None)  # and without trust it is built again


def test_a_summary_that_is_a_pipe(built: Path) -> None:
    meta = meta_of(built)
    meta.unlink()
    os.mkfifo(meta)
    with pytest.raises(ConfigFault):  # none is there
        prepare(config(built, trust=True), log=lambda line: None)
    current = meta.parent.parent / "current"
    current.unlink()
    os.mkfifo(current)
    assert prepare(config(built), log=lambda line: None) != meta.parent


@pytest.mark.parametrize("name", ["keys", "width", "height", "source", "shard", "row"])
@pytest.mark.parametrize("is_old", [False, True], ids=["checksums", "as 0.5 wrote it"])
def test_a_flipped_bit_of_a_column(built: Path, name: str, is_old: bool) -> None:
    meta = meta_of(built)
    if is_old:
        content = json.loads(meta.read_text())
        del content["checksums"]
        meta.write_text(json.dumps(content))
        if name in ("source", "shard", "row"):
            pytest.skip("nothing says what they were")
        prepare(config(built, trust=True), log=lambda line: None)  # whole, it is taken
    column = meta.parent / f"{name}.npy"
    data = bytearray(column.read_bytes())
    data[-1] ^= 1
    column.write_bytes(data)
    with pytest.raises(DataFault) as caught:
        prepare(config(built, trust=True), log=lambda line: None)
    assert names(caught.value, meta.parent)
    said: list[str] = []
    assert prepare(config(built), log=said.append) != meta.parent, "it is built again"
    assert any(names(line, meta.parent) for line in said)


def test_the_current_index_lies_beside_its_name(built: Path) -> None:
    meta = meta_of(built)
    elsewhere = built / "elsewhere"
    meta.parent.rename(elsewhere)
    current = index_folder(config(built)) / "current"
    for name in ("../../../elsewhere", str(elsewhere), "..", "a\0b"):
        current.write_bytes(name.encode())
        assert newest(current.parent) is None
