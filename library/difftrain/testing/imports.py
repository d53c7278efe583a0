"""Run a script and say, as they come, which classes of encoders it imports: python -m difftrain.testing.imports SCRIPT ARGS.

Neither -X importtime nor an audit hook sees what importlib.import_module loads, as diffusers and transformers do it.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

ENCODERS = ("modeling_clip", "modeling_t5", "autoencoder_kl")
IMPORTED = "IMPORTED"  # a line begins so, and the module's name follows


class Watch:
    """Stand before all finders of modules, and find none."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Say a name that is watched."""
        if name.rpartition(".")[2] in ENCODERS:
            print(IMPORTED, name, flush=True)


def imported(output: str) -> list[str]:
    """Return the names in what was printed."""
    return [line.removeprefix(IMPORTED).strip() for line in output.splitlines() if line.startswith(IMPORTED)]


if __name__ == "__main__":
    sys.meta_path.insert(0, Watch())  # type: ignore[arg-type]
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
