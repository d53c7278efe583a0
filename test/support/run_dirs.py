"""train.py run as users run it, on a tiny model and small pictures, and what its run directories hold."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from doors import ROOT, Door, family_of, losses, wait_for, write_pictures
from safetensors.torch import load_file

TRAIN = ROOT / "sd_scripts_xl" / "train.py"
PICTURES, REPEATS, GLOBAL_BATCH = 24, 3, 3
EPOCH = PICTURES * REPEATS // GLOBAL_BATCH
FILE = """
[output]
output_dir = "{out}"

[training]
seed = 1
max_steps = {steps}
gradient_accumulation_steps = 1

[model]
type = "{family}"
init_from_config = "tiny"
dtype = "float32"

[optimizer]
type = "adamw"
lr = 1e-4

[data]
dirs = ["{pictures}"]
repeats = [{repeats}]
resolution = [64, 64]
workers = 0

[cache]
latents_to_disk = {cached}
text_to_disk = {cached}

[ema]
enable = true
decay = 0.9
update_every = 3

[save]
save_every_n_epochs = 1
checkpoint_every_n_minutes = 1e-6
"""


class Trainer(Door):
    """Run sd_scripts_xl/train.py; every step leaves a checkpoint."""

    path = TRAIN

    def __init__(self, root: Path, family: str = "sd3", *, cached: bool = True, steps: int = EPOCH) -> None:
        super().__init__(write_pictures(root / "pictures", PICTURES), root / "cache")
        self.root, self.family, self.cached, self.steps = root, family, cached, steps

    def file(self, out: Path) -> Path:
        """Write the configuration of runs below a folder."""
        path = out.with_suffix(".toml")
        cached = str(self.cached).lower()
        told = {"out": out, "family": self.family, "pictures": self.data, "cached": cached}
        path.write_text(FILE.format(steps=self.steps, repeats=REPEATS, **told), encoding="utf-8")
        return path

    def words(self, out: Path, *options: str, ranks: int = 1) -> list[str]:
        """Return the command line, with torchrun in front for several ranks; the global batch is always the same."""
        batch = f"--training.micro_batch_size_per_gpu={GLOBAL_BATCH // ranks}"
        flags = [f"--config={self.file(out)}", batch, *options]
        if ranks == 1:
            return [sys.executable, str(TRAIN), *flags]
        run = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
        return [*run, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(TRAIN), *flags]

    def train(self, out: Path, *options: str, ranks: int = 1, expect: int | None = 0) -> str:
        """Run to the end and return what it printed."""
        return self.run_words(self.words(out, *options, ranks=ranks), expect)

    def begin(self, out: Path, *options: str, ranks: int = 1) -> subprocess.Popen[str]:
        """Start a run."""
        return self._start(self.words(out, *options, ranks=ranks))

    def broken_off(self, out: Path, *options: str, ranks: int, step: int, way: signal.Signals) -> str:
        """Start a run, end it once it has done a step, and return what it printed."""
        process = self.begin(out, *options, ranks=ranks)
        wait_for(lambda: process.poll() is not None or step in steps_done(out), message=f"no step {step}")
        if way == signal.SIGKILL:
            for each in family_of(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
        else:
            os.kill(process.pid if ranks == 1 else family_of(process.pid)[-1], way)
        printed, _ = process.communicate(timeout=120)
        assert process.returncode != 0, printed
        return printed


def runs(out: Path) -> list[Path]:
    """Return the run directories below a folder, the oldest first."""
    return sorted(path for path in out.iterdir() if path.is_dir()) if out.is_dir() else []


def only(out: Path) -> Path:
    """Return the one run directory."""
    (found,) = runs(out)
    return found


def steps_done(out: Path) -> set[int]:
    """Return the steps of which the newest run has a checkpoint."""
    return {int(path.name[11:]) for run in runs(out)[-1:] for path in run.glob("global_step*")}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the safetensors files in a folder, by file and name."""
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{path.relative_to(folder)}:{name}": t for path in files for name, t in load_file(path).items()}


def same_end(left: Path, right: Path, step: int = EPOCH) -> None:
    """Compare the ends of two runs bit by bit: losses, checkpoint, exports with their averages."""
    assert losses(left) == losses(right)
    names = (f"global_step{step}", "epoch1", "epoch1-ema")
    for name in names:
        one, other = tensors(left / name), tensors(right / name)
        assert one and one.keys() == other.keys(), name
        assert not [key for key in one if not torch.equal(one[key], other[key])], name
