"""MLflow: at MLFLOW_TRACKING_URI, else in a database beside the logs, which `mlflow ui` shows."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from difftrain.report.trackers.registry import TrackerRequest, flat

log = logging.getLogger("difftrain")
URI, RETRIES = "MLFLOW_TRACKING_URI", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
RUN_TAG = "difftrain.run_id"  # MLflow gives runs ids of its own
MOST_PARAMS, LONGEST_PARAM = 100, 500  # in one request; characters
MOST_POINTS, FLUSH_S = 900, 5.0  # points in one request, which takes 30 ms and more; time between two
_NOT_IN_KEYS = re.compile(r"[^\w\-. /]")  # that every version takes


class MLflow:
    """Log to MLflow, under the same run after a resume; points beyond its step stay and are added to."""

    def __init__(self, request: TrackerRequest) -> None:
        """Open. options: tracking_uri, experiment_name, run_name. Raises OSError where the folder cannot be made."""
        os.environ.setdefault(RETRIES, "2")  # its own default waits for minutes
        import mlflow

        options = dict(request.options)
        uri = options.get("tracking_uri") or os.environ.get(URI)
        if not uri:
            request.folder.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{request.folder.absolute() / 'mlflow.db'}"
            log.info("mlflow: no %s; logging to %s", URI, uri)
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._entities = mlflow.entities
        self._points: list[object] = []
        self._sent_at = time.monotonic()

        # the run of this id, or a new one
        name = str(options.get("experiment_name") or request.project)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._experiment(name, request.folder, uri)
        known = self._client.search_runs([number], f"tags.`{RUN_TAG}` = '{request.run_id}'", max_results=1)
        if known:
            self._id = known[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        title = request.run_name or options.get("run_name")
        self._id = self._client.create_run(number, tags={RUN_TAG: request.run_id}, run_name=title).info.run_id
        params = [
            self._entities.Param(_key(key), str(value)[:LONGEST_PARAM])
            for key, value in flat(request.config or {}).items()
        ]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MOST_PARAMS])

    def _experiment(self, name: str, folder: Path, uri: str) -> str:
        """Make an experiment; of a database of our own the pictures lie beside it, else where the server keeps them."""
        beside = (folder / "mlflow_artifacts").absolute().as_uri() if uri.startswith("sqlite:") else None
        return str(self._client.create_experiment(name, artifact_location=beside))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add a point to each curve; they are sent some at a time."""
        now = int(1000 * time.time())
        self._points += [self._entities.Metric(_key(tag), value, now, step) for tag, value in values.items()]
        if len(self._points) >= MOST_POINTS or time.monotonic() - self._sent_at >= FLUSH_S:
            self._send()

    def _send(self) -> None:
        points, self._points = self._points, []
        for first in range(0, len(points), MOST_POINTS):
            self._client.log_batch(self._id, metrics=points[first : first + MOST_POINTS])
        self._sent_at = time.monotonic()

    def image(self, step: int, tag: str, path: Path, prompts: Sequence[str] = ()) -> None:
        """Add a picture as a file of the run, and its prompts beside it."""
        folder = f"{_key(tag)}/{step:08d}"
        self._client.log_artifact(self._id, str(path), folder)
        if prompts:
            self._client.log_text(self._id, "\n".join(prompts) + "\n", f"{folder}/prompts.txt")

    def close(self) -> None:
        """Send what is left, and mark the run as ended."""
        self._send()
        self._client.set_terminated(self._id)


def _key(tag: str) -> str:
    """Write a tag as MLflow takes it: lr/d*lr/unet becomes lr/d_lr/unet."""
    return _NOT_IN_KEYS.sub("_", tag)
