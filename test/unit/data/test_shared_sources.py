"""A folder that is used several times is looked at once: the records, tables and contents are what they would be else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from looking import looked_at  # noqa: F401

from difftrain.cache.manifest import content_hash
from difftrain.cache.manifest.companions import mask_contents
from difftrain.config import TrainConfig
from difftrain.config.datasets.datasets import applied
from difftrain.config.datasets.diffusion_pipe import resolve
from difftrain.config.schema.sections import EvalSetSection
from difftrain.data.evaluation_sets import open_set
from difftrain.data.index import shared_sources
from difftrain.data.prepare import Data, open_data, prepare
from difftrain.testing.pictures import write_folder, write_tar

SIZES = [(64, 64)] * 3 + [(96, 48)] * 2
TWICE = "[[directory]]\npath = 'a'\n[[directory]]\npath = 't'\n[[directory]]\npath = 'a'\nnum_repeats = 2\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_folder(tmp_path / "a", SIZES)
    write_tar(tmp_path / "t" / "0.tar", SIZES)
    (tmp_path / "a" / "broken.jpg").write_bytes(b"no picture")
    (tmp_path / "a" / "broken.txt").write_text("a caption")
    return tmp_path


def resolved(place: Path, text: str, cache: str = "cache", **data: Any) -> TrainConfig:
    (place / "data.toml").write_text(text)
    told = {"cache_dir": str(place / cache), "workers": 0, **data}
    cfg = TrainConfig.model_validate({"data": told, "training": {"seed": 1}})
    found = resolve(place / "data.toml", cfg, multiple=16)
    assert not found.faults, "\n".join(map(str, found.faults))
    cfg = applied(cfg, found)
    return cfg.model_copy(update={"loss": cfg.loss.model_copy(update={"masked": found.masked})})


def opened(cfg: TrainConfig) -> Data:
    return open_data(cfg, prepare(cfg, log=lambda line: None))


def facts(data: Data) -> list[Any]:
    """Return all that training takes from an index and its tables."""
    columns, tables = data.index.columns(), data.tables.folder
    by_id = [getattr(columns, name).tolist() for name in ("keys", "width", "height", "source", "shard")]
    files = [(tables / name).read_bytes() for name in ("ids.npy", "segments.npy", "header.json")]
    summary = data.index.summary
    counted = [summary.count, summary.fingerprint, summary.duplicates, summary.rejected, summary.reasons]
    return [data.index.records(range(data.index.count)), list(data.index.rejects()), by_id, files, counted, tables.name]


def apart(cfg: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the facts where every source is read for itself, and nothing is known."""
    with monkeypatch.context() as changed:
        changed.setattr(shared_sources, "KINDS", ())
        elsewhere = cfg.data.model_copy(update={"cache_dir": f"{cfg.data.cache_dir}-apart"})
        return facts(opened(cfg.model_copy(update={"data": elsewhere})))


@pytest.mark.parametrize("verify", ["full", "quick"])
def test_each_file_is_opened_once_for_all_its_uses(
    place: Path, looked: list[str], monkeypatch: pytest.MonkeyPatch, verify: str
) -> None:
    cfg = resolved(place, f"resolutions = [32, 64, 128]\n{TWICE}", verify=verify)
    found = facts(opened(cfg))
    assert sorted(looked) == sorted({*looked}) and len(looked) == len(SIZES) + 1 + 1
    del looked[:]
    assert found == apart(cfg, monkeypatch)
    assert len(looked) == 3 * (2 * (len(SIZES) + 1) + 1)
    assert found[4][0] == 3 * 3 * len(SIZES) and found[4][3] == 6


def test_what_changes_later_is_looked_at_once_too(
    place: Path, looked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = resolved(place, f"resolutions = [32, 64]\n{TWICE}")
    opened(cfg)
    del looked[:]
    opened(cfg)
    assert not looked
    write_folder(place / "a", [(80, 64)], start=70)
    changed = next((place / "a").glob("0*.txt"))
    changed.write_text("another caption")
    os.utime(changed, ns=(1, 1))
    found = facts(opened(cfg))
    assert len(looked) == 2
    assert found == apart(cfg, monkeypatch)


def test_another_set_of_data_takes_over_what_is_known_of_a_folder(
    place: Path, looked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(place / "b", [(64, 64)], start=90)
    opened(resolved(place, f"resolutions = [32, 64]\n{TWICE}"))
    del looked[:]
    more = resolved(place, f"resolutions = [48]\n[[directory]]\npath = 'b'\n{TWICE}caption_prefix = 'of '\n")
    found = facts(opened(more))
    assert looked == [str(path) for path in (place / "b").glob("*.[jp]*g")]
    assert found == apart(more, monkeypatch)
    del looked[:]
    section = EvalSetSection(name="seen", config="data.toml", datasets=more.data.datasets)
    assert open_set(more, section, lambda line: None).data.index.count == found[4][0] and not looked


def test_sources_that_are_read_otherwise_are_not_shared(place: Path, looked: list[str]) -> None:
    text = "resolutions = [32]\n[[directory]]\npath = 'a'\n[[directory]]\npath = 'a'\n"
    data = opened(resolved(place, f"{text}caption_extension = '.caption'\nskip_empty_caption = false\n"))
    assert len(looked) == 2 * (len(SIZES) + 1)
    assert {record.captions == ("",) for record in data.index.records(range(data.index.count))} == {True, False}


def test_bytes_are_hashed_once_and_so_is_a_mask_of_many(
    place: Path, looked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    real = content_hash.content_of
    monkeypatch.setattr(content_hash, "content_of", lambda data: (hashed.append(len(data)), real(data))[1])
    mask = next((place / "a").glob("0*.[jp]*g"))
    text = f"resolutions = [32, 64]\ndefault_mask_file = '{mask}'\n{TWICE}"
    data = opened(resolved(place, text, verify="quick"))
    every = np.arange(data.index.count)
    found, rejects = content_hash.picture_contents(data.index, every, look=True, log=lambda line: None)
    assert len(hashed) == 2 * len(SIZES) and not rejects
    assert [row.tobytes() for row in found] == [real(data.index.read(data.index.record(i).media)) for i in every]
    del hashed[:]
    write_folder(place / "m", [(64, 64)])
    mask = next((place / "m").glob("*.[jp]*g"))
    data = opened(resolved(place, f"resolutions = [32, 64]\ndefault_mask_file = '{mask}'\n{TWICE}", verify="quick"))
    found, rejects = mask_contents(data.index, data.recipes, every, look=True, log=lambda line: None)
    assert hashed == [mask.stat().st_size] and not rejects
    assert {row.tobytes() for row in found} == {real(mask.read_bytes())}
