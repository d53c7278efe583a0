"""Where a run's words go: files, trackers, and the console on both kinds of stream."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from difftrain.config import LoggingSection, TrainConfig
from difftrain.contracts import ConfigFault, Reject
from difftrain.report.metrics import EVALUATION, VALIDATION
from difftrain.train.outputs import Console, RunOutputs, log, set_up_logging, write_rejects


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
    with pytest.raises(ConfigFault, match=rf"--console_log_file: {tmp_path}/.*: \w+"):
        set_up_logging(LoggingSection(console_file=str(path)), rank)


def opened(cfg: TrainConfig, facts: dict[str, Any] | None = None, step: int = 0, samples_seen: int = 0) -> RunOutputs:
    return RunOutputs(
        cfg,
        is_logger=True,
        step=step,
        samples_seen=samples_seen,
        total_steps=9,
        earlier_s=0.0,
        facts=facts or {},
        recorded={},
    )


class Tracker:
    """Remember what it is given."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.points.append((step, values))

    def image(self, step: int, tag: str, path: Path, prompts: Sequence[str] = ()) -> None:
        self.points.append((step, {tag: 0.0}))

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("examples", [False, True])
def test_trackers_count_steps_or_examples(tmp_path: Path, examples: bool) -> None:
    cfg = TrainConfig.model_validate(
        {
            "save": {"output_dir": str(tmp_path)},
            "logging": {"x_axis_examples": examples},
            "validation": {"split": 0.5},
            "eval": {"sets": [{"name": "held", "config": "held.toml"}]},
        }
    )
    outputs, tracker = opened(cfg), Tracker()
    outputs._trackers.append(tracker)
    outputs.evaluated(EVALUATION, {"step": 0, "epoch": 0, "samples_seen": 0, "held/loss": 2.0})
    for step in (1, 2):
        outputs.advance(step, 16 * step)
    outputs.evaluated(VALIDATION, {"step": 2, "loss": 1.0})
    outputs.evaluated(
        EVALUATION, {"step": 2, "epoch": 1, "samples_seen": 32, "held/loss": 1.0, "held/ema_loss": math.nan}
    )
    outputs.picture("samples", tmp_path / "none.png")
    outputs.close()
    x = 32 if examples else 2
    assert tracker.points == [
        (0, {"held/loss": 2.0}),
        (x, {"loss/validation": 1.0}),
        (x, {"held/loss": 1.0}),
        (x, {"samples": 0.0}),
    ]


def test_evaluations_beyond_the_checkpoint_are_made_again(tmp_path: Path) -> None:
    cfg = TrainConfig.model_validate(
        {
            "save": {"output_dir": str(tmp_path)},
            "eval": {"sets": [{"name": "held", "config": "held.toml"}]},
        }
    )

    def steps(begin: int, *made: int) -> list[int]:
        outputs = opened(cfg, step=begin)
        for step in made:
            outputs.evaluated(EVALUATION, {"step": step, "epoch": 0, "samples_seen": step, "held/loss": float(begin)})
        outputs.close()
        return [json.loads(line)["step"] for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]

    assert steps(0, 0, 2, 4) == [0, 2, 4]
    assert steps(2, 4) == [0, 2, 4]
    assert steps(0, 0, 2) == [0, 2]  # begun anew: the line before the first step stands once


def test_an_item_that_is_bad_is_named_once_whatever_how_often_it_is_met(tmp_path: Path) -> None:
    cfg = TrainConfig.model_validate({"save": {"output_dir": str(tmp_path)}})
    first, second = (Reject(name, "broken") for name in ("a.png", "b.png"))
    write_rejects(tmp_path, [first])
    facts = {"ranks": 1, "configuration": "x"}
    outputs = opened(cfg, facts)
    for _ in range(2):
        outputs.rejected([first, second])
    outputs.close()
    lines = (tmp_path / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["path"] for line in lines] == ["a.png", "b.png"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_plain_lines_only() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(10, out=out, err=err)
    for step in range(3):
        console.advance()
        console.line(f"step={step} FPS: 1.0")
    console.close()
    assert out.getvalue() == "step=0 FPS: 1.0\nstep=1 FPS: 1.0\nstep=2 FPS: 1.0\n" and err.getvalue() == ""


def test_a_terminal_gets_whole_lines_and_a_bar_that_counts_from_the_resumed_step() -> None:
    out, err = io.StringIO(), Terminal()
    console = Console(100, done=40, out=out, err=err)
    console.advance()
    console.line("step=41 FPS: 1.0")
    console.advance()
    console.close()
    assert out.getvalue() == "step=41 FPS: 1.0\n"
    assert "42/100" in err.getvalue()
    console.line("after")
    assert out.getvalue().endswith("after\n")


def test_log_messages_go_above_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("difftrain")
    handler = logging.StreamHandler(sys.stdout)
    log.addHandler(handler)
    log.setLevel("INFO")
    console = Console(10, err=Terminal())
    try:
        assert handler not in log.handlers  # tqdm's own stands in for it
        log.info("a checkpoint was written")
        console.close()
        assert handler in log.handlers
    finally:
        log.removeHandler(handler)
    captured = capsys.readouterr()
    assert " was written\n" in captured.out + captured.err
