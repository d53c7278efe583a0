"""Launchers, run as users run them, in a copy of the checkout."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NEEDED = ("library", "configs", "sd_scripts_xl", "third_patch", "requirements.txt", "pyproject.toml")
# a real job that takes seconds: random tiny weights instead of --model_name
TINY = (
    "--init_from_config=tiny",
    "--resolution=64",
    "--min_bucket_reso=32",
    "--max_bucket_reso=128",
    "--batch_size=2",
    "--max_data_loader_n_workers=0",
    "--log_every=1",
)


def _copied(source: str, to: str) -> str:
    """Copy a file with its times, so that what Python compiled of it counts for the copy."""
    if Path(source).parent.name != "__pycache__":
        return shutil.copy2(source, to)
    with contextlib.suppress(FileNotFoundError):  # another process is writing it
        shutil.copy2(source, to)
    return to


def checkout(root: Path) -> Path:
    """Copy what the launchers need, so that nothing of the user's test/output is touched; with what Python compiled."""
    for name in _NEEDED:
        source = ROOT / name
        (
            shutil.copytree(source, root / name, copy_function=_copied)
            if source.is_dir()
            else shutil.copy(source, root / name)
        )
    (root / "test").mkdir()
    for script in (ROOT / "test").glob("*.sh"):
        shutil.copy(script, root / "test")
    return root


@dataclass
class Launched:
    """What a launcher printed and how it ended."""

    code: int
    text: str
    seconds: float


class Launchers:
    """Run the scripts of a copied checkout."""

    def __init__(self, root: Path, cache: Path, pictures: Path) -> None:
        self.root, self.pictures = root, pictures
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC_"))}
        self.env = {**kept, "PYTHON": sys.executable, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}

    def output(self, index: int = 0) -> Path:
        """Return the folder of a run's files."""
        return self.root / "test" / "output" / str(index)

    def start(self, layout: str, *flags: str, cwd: Path | None = None, **env: str) -> subprocess.Popen[str]:
        """Start a launcher in a process group of its own. layout: of SDXL's launchers, or a script's whole name."""
        script = self.root / "test" / (layout if layout.endswith(".sh") else f"pretrain_full_{layout}_sdxl.sh")
        return subprocess.Popen(
            ["bash", str(script), *flags],
            env={**self.env, **env},
            cwd=cwd or self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, layout: str, *flags: str, cwd: Path | None = None, **env: str) -> Launched:
        """Run a launcher to its end."""
        began = time.monotonic()
        process = self.start(layout, *flags, cwd=cwd, **env)
        text, _ = process.communicate(timeout=400)
        return Launched(process.returncode, text, time.monotonic() - began)

    def real(self, layout: str, *flags: str, **env: str) -> Launched:
        """Run a launcher as the real job, on tiny weights."""
        return self.run(layout, f"--dataset_name={self.pictures}", *TINY, *flags, **env)

    def moved_aside(self, index: int = 0) -> list[Path]:
        """Return the folders that launches have moved aside, the oldest first."""
        return sorted(self.output(index).parent.glob(f"{index}.*"))
