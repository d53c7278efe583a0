"""Train the tiny SDXL compiled by inductor, through the door: the losses of the same run without it, buckets and all.

On a CPU the C++ compiler takes minutes: about 80 kernels for one shape, twice as many once shapes change.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from doors import Door, losses, write_pictures

LIMITS = {"no": 1e-4, "bf16": 2e-2}  # relative, as the project states them


def main() -> int:
    """Compare both precisions, one shape and several; return 1 where a loss is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="bound of one run")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        door = Door(write_pictures(root / "pictures"), root / "cache")
        for precision, buckets in (("no", False), ("bf16", True)):
            name = f"{precision}{'-buckets' if buckets else ''}"
            flags = [f"--mixed_precision={precision}", "--save_every_n_steps=100"]
            runs = {}
            for how in ([], ["--torch_compile"]):
                out = root / f"{name}{len(how)}"
                line = door.flags(out, *flags, *how, steps=6)
                line = [flag for flag in line if buckets or flag != "--enable_bucket"]
                start = time.monotonic()
                door.run(line, timeout=int(60 * options.minutes))
                runs[len(how)] = losses(out), time.monotonic() - start
            error = max(abs(a - b) / abs(b) for a, b in zip(runs[1][0], runs[0][0], strict=True))
            good = error <= LIMITS[precision]
            failed |= not good
            print(
                f"{'PASS' if good else 'FAIL'}  inductor, {name}: losses off by {error:.1e} (limit {LIMITS[precision]:.0e}), "
                f"{runs[1][1]:.0f} s against {runs[0][1]:.0f} s",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
