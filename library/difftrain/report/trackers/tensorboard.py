"""TensorBoard: event files with curves, sample grids, prompts and the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from difftrain.report.trackers.registry import TrackerRequest, flat


class TensorBoard:
    """Write event files; for kohya's flags into logging_dir/<prefix><time>/<name>, the folders that kohya's trainers make."""

    def __init__(self, request: TrackerRequest) -> None:
        """Open. Points beyond the step, of a session that was killed, are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(request.folder), purge_step=request.step + 1)
        self._prompts: dict[str, str] = {}
        if request.config is not None:
            self._text("config", "\n".join(f"    {k} = {v!r}" for k, v in flat(request.config).items()), request.step)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Add a point to each curve, all in one event.

        An event for each curve costs a step several times as much: the thread that writes them takes its turns.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer._get_file_writer().add_summary(Summary(value=points), step)

    def image(self, step: int, tag: str, path: Path, prompts: Sequence[str] = ()) -> None:
        """Add a picture, and its prompts as text where they are not those of the picture before."""
        import numpy as np
        from PIL import Image

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
        self._writer.close()
