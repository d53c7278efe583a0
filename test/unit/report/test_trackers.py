"""TensorBoard for real, Weights & Biases against a stand-in that records its calls."""

from __future__ import annotations

import errno
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from refusals import names

from difftrain.config import TrainConfig
from difftrain.contracts import ConfigFault
from difftrain.report.trackers.registry import Guarded, open_trackers


def open_for(tmp_path: Path, step: int = 0, **logging_section: Any) -> list[Any]:
    cfg = TrainConfig.model_validate({"logging": logging_section})
    config = {"training": {"seed": 1}}
    return open_trackers(cfg, step=step, run_id="run1", started="20260102030405", config=config, out=tmp_path / "out")


def test_a_run_directory_has_its_events_in_one_place(tmp_path: Path) -> None:
    out = tmp_path / "20260102_03-04-05"
    for given, folder in (
        ("", out / "tensorboard_logs"),
        (str(tmp_path / "all"), tmp_path / "all" / "now" / "finetuning"),
    ):
        save = {"output_dir": str(out), "run_dirs": True, "naming": "steps"}
        cfg = TrainConfig.model_validate({"save": save, "logging": {"logging_dir": given or None}})
        (board,) = open_trackers(cfg, step=0, run_id="run1", started="now", config={}, out=out)
        board.scalars(1, {"loss/current": 1.0})
        board.close()
        assert [event.step for event in events(folder).Scalars("loss/current")] == [1]


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_nothing_is_opened_unasked(tmp_path: Path) -> None:
    assert open_for(tmp_path) == [] and not (tmp_path / "out").exists()


def test_tensorboard_writes_where_kohya_does_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    section = {"logging_dir": str(tmp_path / "logs"), "log_prefix": "sdxl_", "tracker_name": "mine", "log_config": True}
    picture = tmp_path / "grid.png"
    Image.new("RGBA", (12, 8), (255, 0, 0, 128)).save(picture)
    (board,) = open_for(tmp_path, **section)
    for step in range(1, 9):
        board.scalars(step, {"loss/current": 1.0 / step})
    board.close()
    (board,) = open_for(tmp_path, step=5, **section)  # killed at 8, the checkpoint is of 5
    for step in range(6, 11):
        board.scalars(step, {"loss/current": 2.0 / step})
    board.image(9, "samples", picture, ["a red cat", "# <b>two\nlines</b>"])
    board.image(10, "samples", picture, ["a red cat", "# <b>two\nlines</b>"])
    board.close()
    found = events(tmp_path / "logs" / "sdxl_20260102030405" / "mine")
    curve = [(event.step, event.value) for event in found.Scalars("loss/current")]
    assert [step for step, _ in curve] == list(range(1, 11))
    assert curve[4][1] == pytest.approx(1 / 5) and curve[5][1] == pytest.approx(2 / 6)
    assert [image.width for image in found.Images("samples")] == [12, 12]
    (prompts,) = found.Tensors("samples/prompts/text_summary")  # once, as long as they are the same
    assert prompts.tensor_proto.string_val[0].decode().splitlines() == ["    1. a red cat", "    2. # <b>two lines</b>"]
    text = found.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "training.seed = 1" in text


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_folder_that_cannot_be_made_is_a_fault_of_its_flag(
    tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setitem(sys.modules, "wandb", FakeWandB(key=None))
    with pytest.raises(ConfigFault, match=r"--logging_dir: .*file/logs.*: \w+"):
        open_for(tmp_path, logging_dir=str(tmp_path / "file" / "logs"), log_with=tracker)


class FakeWandB(types.ModuleType):
    """Record what is asked of it; refuse to go online where told so."""

    def __init__(self, *, key: str | None, reachable: bool = True) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.finished = False
        self.api = types.SimpleNamespace(api_key=key)
        self.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))
        self.Settings = lambda **settings: settings
        self.Image = lambda path, caption: f"image of {path}, {caption}"
        self._reachable = reachable
        self._held: set[str] = set()

    def teardown(self) -> None:
        self._held.clear()

    def init(self, **options: Any) -> Any:
        if options["id"] in self._held:  # as the real service answers
            raise RuntimeError(f"run ID {options['id']} is taken")
        self._held.add(options["id"])
        if options.get("mode") is None and not self._reachable:
            raise self.errors.Error("Run initialization has timed out")
        self.inits.append(options)
        return types.SimpleNamespace(
            log=lambda values, step: self.logged.append((step, values)), finish=lambda: setattr(self, "finished", True)
        )


@pytest.mark.flags("wandb_run_name", "log_tracker_config")
@pytest.mark.parametrize(
    ("key", "reachable", "mode"), [("k", True, None), ("k", False, "offline"), (None, True, "offline")]
)
def test_wandb_goes_offline_where_it_must(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    key: str | None,
    reachable: bool,
    mode: str | None,
) -> None:
    fake = FakeWandB(key=key, reachable=reachable)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(logging.getLogger("difftrain"), "propagate", True)
    toml = tmp_path / "trackers.toml"
    toml.write_text('[wandb]\nentity = "team"\n')
    (tracker,) = open_for(tmp_path, log_with="wandb", wandb_run_name="night run", tracker_config=str(toml))
    tracker.scalars(3, {"loss/current": 0.5})
    tracker.image(3, "samples", tmp_path / "grid.png", ["a red cat", "a dog"])
    tracker.close()
    (options,) = fake.inits
    assert options.get("mode") == mode
    assert (options["id"], options["resume"], options["name"]) == ("run1", "allow", "night run")
    assert (options["entity"], options["project"]) == ("team", "finetuning")
    assert Path(options["dir"]).is_dir() and options["config"] is None  # recorded only with --log_config
    assert fake.logged == [
        (3, {"loss/current": 0.5}),
        (3, {"samples": f"image of {tmp_path / 'grid.png'}, a red cat\na dog"}),
    ]
    assert fake.finished and ("offline" in caplog.text) == (mode == "offline")


def test_both_trackers_and_an_environment_that_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandB(key=None, reachable=False)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    fake._reachable = True
    trackers = open_for(tmp_path, log_with="all")
    assert len(trackers) == 2 and "mode" not in fake.inits[0]
    for tracker in trackers:
        tracker.close()


def test_a_bad_tracker_file_is_a_configuration_fault(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[wandb\n")
    with pytest.raises(ConfigFault, match=r"bad\.toml"):
        open_for(tmp_path, log_with="all", tracker_config=str(bad))


class Failing:
    """A tracker whose service is away."""

    def __init__(self, error: Exception) -> None:
        self.error, self.calls = error, 0

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self.calls += 1
        raise self.error

    def image(self, *_: Any) -> None:
        self.calls += 1

    def close(self) -> None:
        self.calls += 1


def test_a_tracker_that_fails_is_named_once_and_training_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("difftrain"), "propagate", True)
    failing = Failing(RuntimeError("the service is away\nand more"))
    tracker = Guarded("mlflow", failing)
    for step in range(3):
        tracker.scalars(step, {})
    tracker.close()
    (record,) = caplog.records
    assert failing.calls == 1 and names(record.getMessage(), "mlflow", "the service is away")


def test_a_full_disk_is_the_runs_business_too() -> None:
    with pytest.raises(OSError, match="full"):
        Guarded("tensorboard", Failing(OSError(errno.ENOSPC, "full"))).scalars(1, {})
