"""Ranks that keep the others waiting: which, by how much, and whether it is their data or their device.

Ranks run in step, so that a step takes as long on each; what differs is how long a rank waited for its data, and how long it
computed before its first output, where no rank waits for another yet. Each rank counts both, its heartbeats carry the sums
(distributed/heartbeats.py), and the first rank compares them from time to time: no rank waits for that. An engine that
gathers weights during the forward pass makes all ranks wait there, so that only slow data shows.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from difftrain.distributed.ranks import Ranks
    from difftrain.report.clock import Clock, Mark
    from difftrain.train.state import Position

LOOK_S = 30.0  # from one comparison to the next
LOOKS = 3  # comparisons in a row after which a rank is named
LEAST_STEPS = 3  # between two comparisons
FACTOR = 1.3  # times what the others need
SHARE = 0.1  # of a step's time that is lost, at least
PASSES = 3.0  # a forward pass and what follows it: a device that is slow in one is so in the other
log = logging.getLogger("difftrain")


@dataclass(frozen=True)
class RankPace:
    """Sums of a rank since the beginning of its session."""

    steps: int = 0
    wall_s: float = 0.0
    data_s: float = 0.0
    output_s: float = 0.0  # from the beginning of the forward pass to its output, of each step's first micro batch

    @classmethod
    def of(cls, text: str) -> RankPace | None:
        """Read what `str` wrote; None where a rank has said nothing yet."""
        if not text:
            return None
        steps, *seconds = text.split("/")
        return cls(int(steps), *map(float, seconds))

    def __str__(self) -> str:
        return f"{self.steps}/{self.wall_s:.4f}/{self.data_s:.4f}/{self.output_s:.4f}"

    def since(self, before: RankPace) -> RankPace:
        """Return seconds per step since an earlier reading; steps stay a number."""
        steps = self.steps - before.steps
        if steps < 1:
            return RankPace()
        return RankPace(
            steps,
            (self.wall_s - before.wall_s) / steps,
            (self.data_s - before.data_s) / steps,
            (self.output_s - before.output_s) / steps,
        )


class SlowRanks:
    """Compare the paces of all ranks, and name one that is slower time after time. Lives on the first rank."""

    def __init__(self, log: Callable[[str], None] = log.warning) -> None:
        self._log = log
        self._before: list[RankPace] = []
        self._streaks: dict[tuple[int, str], int] = {}
        self.notes: list[str] = []

    def look(self, texts: Sequence[str]) -> None:
        """Take every rank's sums, in rank order."""
        now = [RankPace.of(text) for text in texts]
        if any(pace is None for pace in now):
            return
        paces = [pace for pace in now if pace is not None]
        if not self._before:
            self._before = paces
            return
        spans = [pace.since(before) for pace, before in zip(paces, self._before)]
        if min(span.steps for span in spans) < LEAST_STEPS:
            return
        self._before = paces
        slow = {(rank, cause): text for rank in range(len(spans)) for cause, text in self._judged(rank, spans)}
        self._streaks = {key: self._streaks.get(key, 0) + 1 for key in slow}
        for key, text in slow.items():
            if self._streaks[key] == LOOKS:
                self.notes.append(text)
                self._log(text)

    @staticmethod
    def _judged(rank: int, spans: Sequence[RankPace]) -> list[tuple[str, str]]:
        """Say what of a rank takes longer than what the others need."""
        own, others = spans[rank], [span for number, span in enumerate(spans) if number != rank]
        usual_data = statistics.median(span.data_s for span in others)
        usual_output = statistics.median(span.output_s for span in others)
        lost = {
            "data": (own.data_s, usual_data, own.data_s - usual_data),
            "compute": (own.output_s, usual_output, PASSES * (own.output_s - usual_output)),
        }
        words = {
            "data": "waits {} s a step for data, the others {} s: look at its disk, its loader processes and its processor",
            "compute": "takes {} s to the first output of a step, the others {} s: look at its device's clock and "
            "temperature, and for other processes there",
        }
        return [
            (cause, f"rank {rank} of {len(spans)} is slow ({cause}): it {words[cause].format(f'{mine:.3g}', f'{usual:.3g}')}; "
             f"all ranks wait for it, a step takes {own.wall_s:.3g} s")
            for cause, (mine, usual, excess) in lost.items()
            if mine > FACTOR * usual and excess > SHARE * own.wall_s
        ]  # fmt: skip


class PaceHook:
    """Count this rank's own time, and let its heartbeats carry it. One of the hooks between steps."""

    def __init__(
        self, root: nn.Module, ranks: Ranks, clock: Clock, log_every: int, mark: Callable[[], Mark] | None = None
    ) -> None:
        self._root, self._ranks, self._clock, self._log_every, self._mark = root, ranks, clock, log_every, mark
        self._is_first = False
        self._began: Any = None
        self._marks: list[tuple[Any, Any]] = []
        self._output_s = 0.0
        self._slow = SlowRanks()

    @property
    def notes(self) -> list[str]:
        """Return what was said of slow ranks, on the first rank."""
        return self._slow.notes

    def before_training(self, at: Position) -> None:
        """Look at every first forward pass of a step from here on; a single rank waits for nobody."""
        if self._ranks.heartbeats is None:
            return
        self._is_first = True
        self._root.register_forward_pre_hook(self._begins)
        self._root.register_forward_hook(self._ends)
        if self._ranks.is_logger:
            self._ranks.heartbeats.compare(self._slow.look, LOOK_S)

    def after_step(self, at: Position) -> None:
        """Hand over the sums where the step's numbers were read, so that the device has passed the marks."""
        if self._ranks.heartbeats is None:
            return
        self._is_first = True
        if at.step % self._log_every:
            return
        marks, self._marks = self._marks, []
        for began, ended in marks:
            self._output_s += ended - began if self._mark is None else began.elapsed_time(ended) / 1000
        account = self._clock.session()
        spans = (account.warm, account.steady)
        self._ranks.heartbeats.pace = str(
            RankPace(
                sum(span.steps for span in spans),
                sum(span.wall_s for span in spans),
                sum(span.wait_s for span in spans),
                self._output_s,
            )
        )

    def _begins(self, module: nn.Module, _inputs: Any) -> None:
        self._began = self._now() if self._is_first and module.training else None

    def _ends(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._began is not None:
            self._marks.append((self._began, self._now()))
            self._is_first, self._began = False, None

    def _now(self) -> Any:
        return time.perf_counter() if self._mark is None else self._mark()
