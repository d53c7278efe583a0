"""Run a door and end it as kill -9 does, the moment that a step stands in its metrics: killed_at.py STEP DOOR FLAGS..."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Any

from difftrain.report.metrics import JsonLines


def main() -> None:
    """Run the door in this process, as if it had been called itself."""
    step, sys.argv = int(sys.argv[1]), sys.argv[2:]
    written = JsonLines.write

    def write(self: JsonLines, record: dict[str, Any]) -> None:
        written(self, record)
        if self.path.name == "metrics.jsonl" and record["step"] >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    JsonLines.write = write  # type: ignore[method-assign]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
