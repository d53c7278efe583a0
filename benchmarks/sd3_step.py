"""A step of tiny SD3 from the cache: at most 5 % of it waiting for data, and 10 s from the command to the first step.

    python benchmarks/sd3_step.py                  some two minutes on two cores

The door itself is run, train.py with two loader processes: once to build the cache, then to train from it. Printed are
the share of the steps' time that was spent waiting for a batch, the smallest time to the first step of a few starts, and
what of the encoders' classes was imported, which should be nothing. --type sdxl does it with SDXL. Exit code 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

from figures import Report

from difftrain.report.metrics import METRICS, read_lines
from difftrain.testing.imports import imported
from difftrain.testing.pictures import write_folder

ROOT = Path(__file__).resolve().parents[1]
WAIT_LIMIT, START_LIMIT_S, WARM_UP = 0.05, 10.0, 5
_TOML = """
[model]
type = "{family}"
init_from_config = "tiny"
[training]
micro_batch_size_per_gpu = {batch}
seed = 1
[optimizer]
type = "AdamW"
lr = 1e-4
[output]
dataset = "data.toml"
[cache]
latents_to_disk = true
text_to_disk = true
[data]
cache_dir = "cache"
workers = 2
"""


def write(folder: Path, family: str, side: int, batch: int, pictures: int) -> None:
    """Write pictures, and the TOMLs that name them."""
    write_folder(folder / "data", [(side, side)] * pictures)
    (folder / "data.toml").write_text(f'resolutions = [{side}]\n[[directory]]\npath = "data"\n')
    (folder / "run.toml").write_text(_TOML.format(batch=batch, family=family))


def run(folder: Path, out: str, *options: str) -> tuple[float, list[str]]:
    """Run the door; return how long its first step was waited for, and what was imported of encoders before it."""
    words = [str(ROOT / "sd_scripts_xl" / "train.py"), "--config", "run.toml", f"--output.output_dir={out}", *options]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / "home"),
        "PYTHONPATH": str(ROOT / "library"),
    }
    began = time.time()
    process = subprocess.Popen(
        [sys.executable, "-m", "difftrain.testing.imports", *words], cwd=folder, env=env, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    first, said = 0.0, []
    for line in process.stdout or ():
        said.append(line)
        if not first and " step_loss=" in line:
            first = time.time() - began
    if process.wait():
        raise SystemExit(f"train.py ended with {process.returncode}\n{''.join(said)}")
    return first, imported("".join(said).partition(" step_loss=")[0])


def waiting(folder: Path, out: str) -> tuple[float, float]:
    """Return the share of a run's time that was spent waiting for data, and the mean time of a step."""
    (metrics,) = (folder / out).rglob(METRICS)
    lines = list(read_lines(metrics))[WARM_UP:]
    took = sum(each["step_s"] for each in lines)
    return sum(each["data_wait_s"] for each in lines) / took, took / len(lines)


def main() -> int:
    """Build the cache, train from it, start again and again, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--type", choices=("sd3", "sdxl"), default="sd3")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--resolution", type=int, default=128)
    parser.add_argument("--starts", type=int, default=3)
    options = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory(prefix="sd3-step-") as name:
        folder = Path(name)
        write(folder, options.type, options.resolution, options.batch_size, 6 * options.batch_size)
        run(folder, "built", "--cache_only", "--training.max_steps=1")
        _, found = run(folder, "trained", f"--training.max_steps={options.steps}")
        share, step_s = waiting(folder, "trained")
        starts = [run(folder, f"started-{i}", "--training.max_steps=1")[0] for i in range(options.starts)]
    report.log("a step", 1000 * step_s, "ms", f"batch {options.batch_size} at {options.resolution} px")
    report.check("waiting for data, share of a step", share, WAIT_LIMIT, "")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    report.log("processor time of all runs", used.ru_utime + used.ru_stime, "s", f"{2 + len(starts)} of them")
    report.check("from the command to the first step", min(starts), START_LIMIT_S, "s", f"of {len(starts)} starts")
    report.check("encoders' classes imported before it", len(found), 0, "", " ".join(found))
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
