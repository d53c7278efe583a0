"""Where a run's words go."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from difftrain.config import LoggingSection, TrainConfig
from difftrain.contracts import ConfigFault, Reject
from difftrain.train.outputs import Outputs, log, set_up_logging, write_rejects


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    handlers, level, propagate = log.handlers[:], log.level, log.propagate
    yield
    for handler in log.handlers:
        handler.close()
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)


def test_every_rank_has_a_log_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.txt"
    for rank in (0, 1):
        set_up_logging(LoggingSection(console_file=str(path), console_simple=True), rank)
        log.warning("hello")
        logging.getLogger("difftrain").handlers[0].close()
    assert path.read_text() == "hello\n"
    assert (tmp_path / "new" / "log.txt.rank1").read_text() == "[rank 1] hello\n"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["a folder", "below a file"])
def test_a_log_file_that_cannot_be_opened_is_a_fault_of_its_flag(tmp_path: Path, kind: str, rank: int) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "log.txt.rank1").mkdir()
    (tmp_path / "log.txt").mkdir()
    path = tmp_path / ("log.txt" if kind == "a folder" else "file/log.txt")
    with pytest.raises(ConfigFault, match=r"--console_log_file: .* cannot be written to: \w+"):
        set_up_logging(LoggingSection(console_file=str(path)), rank)


def test_an_item_that_is_bad_is_named_once_whatever_how_often_it_is_met(tmp_path: Path) -> None:
    cfg = TrainConfig.model_validate({"save": {"output_dir": str(tmp_path)}})
    first, second = (Reject(name, "broken") for name in ("a.png", "b.png"))
    write_rejects(tmp_path, [first])
    facts = {"ranks": 1, "configuration": "x"}
    outputs = Outputs(cfg, is_logger=True, step=0, total_steps=1, earlier_s=0.0, facts=facts, recorded={})
    for _ in range(2):
        outputs.rejected([first, second])
    outputs.close()
    lines = (tmp_path / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["path"] for line in lines] == ["a.png", "b.png"]
