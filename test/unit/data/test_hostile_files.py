"""Files that wait, never end, or are called strangely: each is named with its reason, within seconds, and good ones stay."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from refusals import names
from rejects import kind

from difftrain.config import CaptionSection, DataSection
from difftrain.contracts import DataFault, Reject
from difftrain.data.captions import caption_of
from difftrain.data.index.build import build_index
from difftrain.data.index.index import Index
from difftrain.diffusion.draws import Stream
from difftrain.sampling.prompts import read_prompts
from difftrain.testing.pictures import picture, write_folder, write_tar
from difftrain.train.outputs import write_rejects

ODD = "\u2028\u2029\x85\x0b\x0c\x1c"  # str.splitlines() ends a line at each of them


def build(folder: Path, *, said: list[str] | None = None, captions: Any = None, **data: Any) -> Index:
    section = DataSection(dirs=(str(folder / "data"),), max_rejected_share=0.99, **data)
    lines = said if said is not None else []
    summary = build_index(
        section, CaptionSection(**(captions or {})), folder / "index", log=lines.append, decode_limit_s=20, workers=1
    )
    return Index(Path(summary.folder))


def reasons(index: Index) -> dict[str, str]:
    return {re.split(r"[/!]", reject.path)[-1]: kind(reject.reason) for reject in index.rejects()}


def fill(folder: Path) -> None:
    """What a folder may hold in place of images: some may be opened by root alone, none is read."""
    os.mkfifo(folder / "pipe.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "kernel.png").symlink_to("/proc/kmsg")
    (folder / "nowhere.png").symlink_to("gone")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(folder / "socket.png"))
    with (folder / "sparse.jpg").open("wb") as file:
        file.write(picture(1, (64, 48)))
        file.truncate(1 << 40)
    os.mkfifo(folder / "0001.txt~")


UNREAD = {name: "cannot read" for name in ("pipe.png", "zero.png", "nowhere.png", "socket.png")}
REFUSED = {**UNREAD, "kernel.png": "empty", "sparse.jpg": "too large"}


@pytest.mark.workers
@pytest.mark.parametrize("verify", ["full", "quick"])
def test_what_waits_or_never_ends_is_named(tmp_path: Path, verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_folder(tmp_path / "data", [(64, 48)] * 3)
    fill(folder)
    began = time.monotonic()
    index = build(tmp_path, verify=verify, captions={"allow_empty": True})
    assert time.monotonic() - began < 20
    assert index.count == 3 and reasons(index) == REFUSED


def test_captions_that_wait_or_never_end(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", [(64, 48)] * 4)
    for name, put in (
        ("0000.txt", os.mkfifo),
        ("0001.txt", lambda path: path.symlink_to("/proc/kmsg")),
        ("0002.txt", lambda path: (path.touch(), os.truncate(path, 1 << 40))),
    ):
        (folder / name).unlink()
        put(folder / name)
    index = build(tmp_path)
    assert index.count == 1
    assert reasons(index) == {"0000.png": "cannot read", "0001.png": "empty caption", "0002.png": "caption long"}


@pytest.mark.parametrize("name", ["a.tar", "a.parquet"])
def test_shards_that_wait(tmp_path: Path, name: str) -> None:
    good = tmp_path / "data" / f"b{Path(name).suffix}"
    write_tar(good, [(64, 48)] * 2)
    if name == "a.parquet":
        table = pyarrow.table({"image": [picture(1, (64, 48))], "caption": ["x"]})
        parquet.write_table(table, good)
    os.mkfifo(tmp_path / "data" / name)
    (tmp_path / "data" / f"c{Path(name).suffix}").symlink_to("/proc/kmsg")
    index = build(tmp_path)
    assert index.count and reasons(index)[name] == "cannot read" and len(reasons(index)) == 2


def test_tables_and_lists_that_name_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = ["0000.png", *REFUSED, "a\0b.png"]
    folder = write_folder(tmp_path / "data", [(64, 48)] * 1)
    fill(folder)
    parquet.write_table(pyarrow.table({"path": listed, "caption": ["x"] * len(listed)}), folder / "a.parquet")
    lines = [{"file_name": name, "text": "x"} for name in (*listed, "\ud800.png")]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    index = build(tmp_path, caption_column="text")
    assert index.count == 1 and REFUSED.items() - {("nowhere.png", "cannot read")} <= reasons(index).items()
    assert set(reasons(index).values()) == {"cannot read", "empty", "too large", "no image"}

    (tmp_path / "data" / "metadata.jsonl").unlink()
    only = DataSection(dirs=(str(folder / "a.parquet"),), max_rejected_share=0.99)
    index = Index(
        Path(build_index(only, CaptionSection(), tmp_path / "other", log=lambda line: None, workers=1).folder)
    )
    assert index.count == 1
    assert sorted(reasons(index).values()) == sorted([*(REFUSED | {"nowhere.png": "no image"}).values(), "no image"])


def test_a_list_that_is_a_pipe(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", [(64, 48)])
    (folder / "metadata.jsonl").write_text('{"file_name": "0000.png", "text": "x"}\n')
    (folder / "sub").mkdir()
    os.mkfifo(folder / "sub" / "metadata.jsonl")
    with pytest.raises(DataFault) as caught:
        build(tmp_path, caption_column="text")
    assert names(caught.value, folder / "sub" / "metadata.jsonl")


def test_hidden_images_are_counted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", [(64, 48)] * 2)
    (folder / ".hidden.png").write_bytes(picture(1, (64, 48)))
    (folder / "._0001.png").write_bytes(b"of a Mac")
    (folder / ".hidden").mkdir()
    said: list[str] = []
    assert build(tmp_path, said=said).count == 2
    assert any("dot" in line and " 2 " in f" {line} " for line in said)


def test_captions_end_at_line_ends_only(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", [(64, 48)] * 3)
    odd = f"one{ODD}two\u2028three"
    (folder / "0000.txt").write_text(f"{odd}\r\nsecond")
    (folder / "0001.txt").write_text(f"\n{odd}\rsecond")
    (folder / "0002.txt").write_text(f"{odd}\nsecond")
    index = build(tmp_path, verify="quick")
    assert {caption for record in index.records(range(3)) for caption in record.captions} == {odd}
    lines = Index(
        Path(
            build_index(
                DataSection(dirs=(str(folder),)), CaptionSection(enable_wildcard=True), tmp_path / "i2",
                log=lambda line: None, workers=1,
            ).folder
        )
    )  # fmt: skip
    record = lines.record(0)
    drawn = {
        caption_of(record, Stream(1, record.key, number, "caption"), CaptionSection(enable_wildcard=True), 0)
        for number in range(20)
    }
    assert drawn == {odd, "second"}
    (tmp_path / "prompts.txt").write_text(f"{odd}\n{odd} two\n")
    assert len(read_prompts(tmp_path / "prompts.txt").prompts) == 2


def test_rejected_jsonl_keeps_every_name(tmp_path: Path) -> None:
    first = [Reject(f"/data/{mark}{i}.png", f"broken: {mark}") for i, mark in enumerate([*ODD, "\n", "\r", '"'])]
    write_rejects(tmp_path, first)
    assert write_rejects(tmp_path, [Reject("/data/last.png", "broken")]) == len(first) + 1
    with (tmp_path / "rejected.jsonl").open("a") as file:
        file.write('null\n[1]\n"x"\n5\n{"path": [], "reason": 1}\n{"path')  # torn, or another's
    assert write_rejects(tmp_path, []) == len(first) + 1


HALF = json.dumps({"caption": "half \ud83d"})


def test_half_a_surrogate_pair_rejects_its_image_alone(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "data" / "a.tar", [(64, 48)] * 2)
    with tarfile.open(path, "a") as tar:
        for name, data in (("half.png", picture(7, (64, 48))), ("half.json", HALF.encode())):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    index = build(tmp_path)
    assert index.count == 2 and reasons(index) == {"half.png": "caption text"}


def test_a_worker_stuck_in_a_file_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(
        "import os, signal\n"
        "def handler(job, beat):\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        f"    open({str(tmp_path / 'pipe')!r}).read()\n"
        "    yield 0, 0\n"
    )
    os.mkfifo(tmp_path / "pipe")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from difftrain.data.index.worker_pool import PoolJob, run_jobs\n"
        "list(run_jobs([PoolJob(None)], 'stuck:handler', workers=1, limit_s=60))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert parent.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        worker = int((tmp_path / "pid").read_text())
        parent.kill()
        parent.wait()
        while Path(f"/proc/{worker}").exists() and "Z (" not in Path(f"/proc/{worker}/stat").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def _odd_tables() -> dict[str, pyarrow.Table]:
    png = picture(1, (64, 48))
    not_text = pyarrow.array([b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
    captions = {
        "dictionary": pyarrow.array(["x"]).dictionary_encode(), "lists of lists": pyarrow.array([[["x"]]]),
        "map": pyarrow.array([[("a", "b")]], pyarrow.map_(pyarrow.string(), pyarrow.string())),
        "numbers": pyarrow.array([5]), "not UTF-8": not_text, "empty list": pyarrow.array([[]], pyarrow.list_(pyarrow.string())),
        "null": pyarrow.array([None], pyarrow.string()), "null type": pyarrow.nulls(1),
    }  # fmt: skip
    pictures = {
        "struct of numbers": pyarrow.array([{"bytes": 5, "path": None}]), "struct of lists": pyarrow.array([{"bytes": [1, 2]}]),
        "path is a number": pyarrow.array([{"bytes": None, "path": 7}]), "struct of text": pyarrow.array([{"bytes": "x"}]),
        "path not UTF-8": not_text, "fixed size": pyarrow.array([png[:8]], pyarrow.binary(8)), "list of bytes": pyarrow.array([[1, 2]]),
        "dictionary": pyarrow.array([png]).dictionary_encode(), "null": pyarrow.array([None], pyarrow.binary()),
        "timestamp": pyarrow.array([5], pyarrow.timestamp("ns")),
    }  # fmt: skip
    made = {f"caption {name}": pyarrow.table({"image": [png], "caption": column}) for name, column in captions.items()}
    return made | {
        f"image {name}": pyarrow.table({"image": column, "caption": ["x"]}) for name, column in pictures.items()
    }


@pytest.mark.parametrize("table", _odd_tables().values(), ids=_odd_tables())
def test_odd_types_of_a_table_are_named(tmp_path: Path, table: pyarrow.Table) -> None:
    """Either the file is refused with its columns, or each row is named or used; good files beside it stay."""
    (tmp_path / "data").mkdir()
    good = pyarrow.table({"image": [picture(2, (64, 48))], "caption": ["y"]})
    parquet.write_table(good, tmp_path / "data" / "good.parquet")
    parquet.write_table(table, tmp_path / "data" / "odd.parquet")
    try:
        index = build(tmp_path, verify="full")
    except DataFault as fault:
        assert names(fault, tmp_path / "data" / "odd.parquet")
    else:
        assert index.count >= 1 and index.count + index.summary.rejected == 2
        for record in index.records(range(index.count)):
            assert index.read(record.media)
