"""Every tracker of the registry: curves, pictures with prompts, configuration, and a run that goes on.

TensorBoard for real; the others against stand-ins that have the calls of swanlab 0.10 and mlflow 3 that are used.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from difftrain.config import TrainConfig
from difftrain.config.schema.validate import choices_of
from difftrain.report.trackers.registry import TRACKERS, open_trackers, tracker_class

Told = list[tuple[str, Any]]  # what a service was told


class FakeRun:
    """A run of wandb or swanlab."""

    def __init__(self, told: Told) -> None:
        self._told = told

    def log(self, values: dict[str, Any], step: int) -> None:
        self._told += [
            ("picture" if isinstance(value, tuple) else "point", (tag, step)) for tag, value in values.items()
        ]
        self._told += [("prompts", value[1]) for value in values.values() if isinstance(value, tuple)]

    def finish(self) -> None:
        self._told.append(("end", None))


def fake_service(name: str, told: Told) -> types.ModuleType:
    """A stand-in for wandb or swanlab."""
    module = types.ModuleType(name)

    def init(**options: Any) -> FakeRun:
        told.append(("begin", (options.get("id"), options["mode"])))
        told.append(("config", options["config"]))
        return FakeRun(told)

    module.init = init  # type: ignore[attr-defined]
    module.Image = lambda path, caption: (path, caption)  # type: ignore[attr-defined]
    module.api = SimpleNamespace(api_key=None)  # type: ignore[attr-defined]
    return module


def fake_mlflow(told: Told) -> types.ModuleType:
    runs: dict[str, str] = {}  # our id -> its own

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            assert tracking_uri.startswith("sqlite:///")

        def get_experiment_by_name(self, name: str) -> Any:
            return SimpleNamespace(experiment_id="7") if runs else None

        def create_experiment(self, name: str, artifact_location: str) -> str:
            return "7"

        def search_runs(self, experiments: list[str], query: str, max_results: int) -> list[Any]:
            known = [own for ours, own in runs.items() if f"'{ours}'" in query]
            return [SimpleNamespace(info=SimpleNamespace(run_id=own)) for own in known]

        def create_run(self, experiment: str, tags: dict[str, str], run_name: str | None) -> Any:
            (ours,) = tags.values()
            runs[ours] = f"own {ours}"
            told.append(("begin", (ours, "offline")))
            return SimpleNamespace(info=SimpleNamespace(run_id=runs[ours]))

        def update_run(self, run: str, status: str) -> None:
            told.append(("begin", (run.removeprefix("own "), "offline")))

        def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
            told.extend(("point", (metric.key, metric.step)) for metric in metrics)
            if params:
                told.append(("config", {param.key: param.value for param in params}))

        def log_artifact(self, run: str, path: str, folder: str) -> None:
            told.append(("picture", (folder.partition("/")[0], int(folder.rpartition("/")[2]))))

        def log_text(self, run: str, text: str, file: str) -> None:
            told.append(("prompts", text.strip()))

        def set_terminated(self, run: str) -> None:
            told.append(("end", None))

    module = types.ModuleType("mlflow")
    module.MlflowClient = Client  # type: ignore[attr-defined]
    module.entities = SimpleNamespace(  # type: ignore[attr-defined]
        Metric=lambda key, value, timestamp, step: SimpleNamespace(key=key, step=step),
        Param=lambda key, value: SimpleNamespace(key=key, value=value),
    )
    return module


def events(folder: Path) -> Told:
    """What TensorBoard would show, in the same words."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (found,) = (EventAccumulator(str(path)) for path in {file.parent for file in folder.rglob("*tfevents*")})
    found.Reload()
    tags = found.Tags()
    told: Told = [("point", (tag, event.step)) for tag in tags["scalars"] for event in found.Scalars(tag)]
    told += [("picture", (tag, event.step)) for tag in tags["images"] for event in found.Images(tag)]
    for tag in tags["tensors"]:
        text = found.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        told.append(("config" if tag.startswith("config") else "prompts", text))
    return told


@pytest.fixture
def opener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Callable[..., Any], Told]]:
    """Open the tracker of a name, and what it tells its service."""
    for variable in ("WANDB_MODE", "SWANLAB_MODE", "SWANLAB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)

    def prepare(name: str) -> tuple[Callable[..., Any], Told]:
        told: Told = []
        if name != "tensorboard":
            module = fake_mlflow(told) if name == "mlflow" else fake_service(name, told)
            monkeypatch.setitem(sys.modules, name, module)

        def begin(step: int = 0) -> Any:
            section = {"log_with": name, "logging_dir": str(tmp_path / "logs"), "log_config": True}
            cfg = TrainConfig.model_validate({"logging": section})
            config = {"training": {"seed": 1}}
            (tracker,) = open_trackers(cfg, step=step, run_id="run1", started="1", config=config, out=tmp_path)
            return tracker

        return begin, told

    monkeypatch.setattr("difftrain.report.trackers.swanlab._LOGINS", ())
    return prepare


@pytest.mark.parametrize("name", sorted(TRACKERS))
@pytest.mark.flags("log_with")
def test_a_tracker_is_told_everything(name: str, opener: Any, tmp_path: Path) -> None:
    begin, told = opener(name)
    picture = tmp_path / "grid.png"
    Image.new("RGB", (12, 8)).save(picture)
    tracker = begin()
    for step in (1, 2):
        tracker.scalars(step, {"loss/current": 0.5, "lr/d*lr/unet": 1e-4})
    tracker.image(2, "samples", picture, ["a red cat", "a dog"])
    tracker.close()
    shown = events(tmp_path / "logs") if name == "tensorboard" else told

    points = [value for kind, value in shown if kind == "point"]
    assert {("loss/current", 1), ("loss/current", 2)} <= set(points) and len(points) == 4
    assert [value for kind, value in shown if kind == "picture"] == [("samples", 2)]
    assert all("a red cat" in value and "a dog" in value for kind, value in shown if kind == "prompts")
    for kind, needed in (("prompts", 1), ("config", 1)):
        assert sum(known == kind for known, _ in shown) == needed, kind
    assert "seed" in str([value for kind, value in shown if kind == "config"])
    if name != "tensorboard":
        assert shown[-1] == ("end", None)


@pytest.mark.parametrize("name", sorted(set(TRACKERS) - {"tensorboard"}))
def test_without_a_key_it_is_offline_and_a_run_goes_on(name: str, opener: Any) -> None:
    begin, told = opener(name)
    begin().close()
    begin(step=5).close()
    begins = [value for kind, value in told if kind == "begin"]
    assert [mode for _, mode in begins] == ["offline", "offline"]
    if name != "swanlab":  # which knows ids online only
        assert {run for run, _ in begins} == {"run1"}


def test_swanlab_goes_online_with_a_key_under_the_runs_id_and_offline_where_it_is_away(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, told = opener("swanlab")
    monkeypatch.setenv("SWANLAB_API_KEY", "k")
    begin()
    init = sys.modules["swanlab"].init

    def away(**options: Any) -> Any:
        if options["mode"] == "online":
            raise ConnectionError("no route")
        return init(**{key: value for key, value in options.items() if key != "reinit"})

    monkeypatch.setattr(sys.modules["swanlab"], "init", away)
    begin()
    assert [value for kind, value in told if kind == "begin"] == [("run1", "online"), (None, "offline")]


def test_the_registry_is_what_the_setting_offers() -> None:
    assert {*TRACKERS, "all"} == set(choices_of("logging.log_with"))
    assert all(callable(tracker_class(name)) for name in TRACKERS)


def test_curves_are_handed_over_once_a_second_and_where_a_save_asks(
    opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes event files is not woken by each line; points keep their step and time."""
    begin, _ = opener("tensorboard")
    tracker = begin()
    written: list[int] = []
    writer = tracker.tracker._writer._get_file_writer()
    monkeypatch.setattr(writer, "add_event", lambda event: written.append(event.step))
    clock = iter([10.0, 10.0, 10.3, 10.6, 11.1, 11.1, 11.2, 11.3])
    monkeypatch.setattr("difftrain.report.trackers.tensorboard.time.monotonic", lambda: next(clock))
    counts = []
    for step in range(1, 6):
        tracker.scalars(step, {"loss/current": 0.5})
        counts.append(len(written))
    assert counts == [1, 1, 1, 4, 4]
    tracker.flush()
    assert written == [1, 2, 3, 4, 5]
