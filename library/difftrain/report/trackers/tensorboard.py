"""TensorBoard: event files with curves, sample grids, prompts and the configuration."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from difftrain.report.trackers.registry import TrackerRequest, flat

HAND_OVER_S = 1.0  # at least between two wake-ups of the thread that writes


class TensorBoard:
    """Write event files; for kohya's flags into logging_dir/<prefix><time>/<name>, the folders that kohya's trainers make."""

    def __init__(self, request: TrackerRequest) -> None:
        """Open. Points beyond the step, of a session that was killed, are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(request.folder), purge_step=request.step + 1)
        self._prompts: dict[str, str] = {}
        self._waiting: list[Any] = []  # events of curves
        self._handed_over = 0.0
        if request.config is not None:
            self._text("config", "\n".join(f"    {k} = {v!r}" for k, v in flat(request.config).items()), request.step)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add a point to each curve, all in one event, which is handed over within a second of the next call.

        An event for each curve, and a wake-up of the thread that writes for each step, cost a step several times as
        much: that thread takes its turns. A killed process loses what waits, a second's points at most.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._waiting.append(Event(wall_time=time.time(), step=step, summary=Summary(value=points)))
        if time.monotonic() - self._handed_over >= HAND_OVER_S:
            self.flush()

    def flush(self) -> None:
        """Hand over what waits: at a save, before a picture, and at the end."""
        writer, events, self._waiting = self._writer._get_file_writer(), self._waiting, []
        self._handed_over = time.monotonic()
        for event in events:
            writer.add_event(event)

    def image(self, step: int, tag: str, path: Path, prompts: Sequence[str] = ()) -> None:
        """Add a picture, and its prompts as text where they are not those of the picture before."""
        import numpy as np
        from PIL import Image

        self.flush()
        with Image.open(path, formats=("PNG",)) as picture:
            self._writer.add_image(tag, np.asarray(picture.convert("RGB")), step, dataformats="HWC")

        # four spaces: the page takes text for Markdown, and a prompt is none
        text = "\n".join(f"    {number}. {' '.join(prompt.split())}" for number, prompt in enumerate(prompts, 1))
        if text and self._prompts.get(tag) != text:
            self._prompts[tag] = text
            self._text(f"{tag}/prompts", text, step)

    def _text(self, tag: str, text: str, step: int) -> None:
        self._writer.add_text(tag, text, step)

    def close(self) -> None:
        """Write what is buffered and close."""
        self.flush()
        self._writer.close()
