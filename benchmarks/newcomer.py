"""The newcomer's path, timed: from a fresh clone with empty caches to the demo's report, and from 50 photos to samples.

    python benchmarks/newcomer.py                          both paths, some twenty minutes on two cores
    python benchmarks/newcomer.py --only=photos --environment=.venv

Each command runs on a terminal of its own, as a newcomer sees it; what it prints is kept beside its times. Limits: a first line
within 5 s of any command, never more than 15 s without one after it, the demo within 10 minutes with its environment. Exit
code 1 where a limit is missed or a command fails. The script itself needs the standard library alone.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST_S, SILENT_S, DEMO_S = 5.0, 15.0, 600.0
GIVE_UP_S = 3600.0
PHOTOS = 50
SIZES = ((640, 480), (480, 640), (800, 450), (512, 512), (300, 900))
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Run:
    """What a terminal showed of one command.

    seconds: from its start to its end. first_s: until the first printed character. silent_s: the longest time without one
    after that; silent_after: the line that stood before it.
    """

    name: str
    code: int
    seconds: float
    first_s: float
    silent_s: float
    silent_after: str
    missing: str = ""  # a file that it should have left
    is_ours: bool = True  # else its silence is not judged: pip says nothing while it unpacks

    def misses(self) -> list[str]:
        """Return the limits that it missed."""
        missed = [f"exit code {self.code}"] if self.code else []
        missed += [f"no {self.missing}"] if self.missing else []
        missed += [f"first line after {self.first_s:.1f} s"] if self.first_s > FIRST_S else []
        return missed + ([f"{self.silent_s:.1f} s of silence"] if self.is_ours and self.silent_s > SILENT_S else [])


def watch(name: str, command: list[str], folder: Path, env: dict[str, str], log: Path) -> Run:
    """Run a command on a terminal and note when it prints. Its output goes to `log`."""
    ours, its = pty.openpty()
    began = last = time.monotonic()
    child = subprocess.Popen(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=its, stderr=its, start_new_session=True
    )
    os.close(its)
    first_s, silent_s, silent_after, text = 0.0, 0.0, "", ""
    try:
        with log.open("wb") as file:
            while data := _read(ours, began + GIVE_UP_S - time.monotonic()):
                now = time.monotonic()
                if first_s == 0.0:
                    first_s = now - began
                elif now - last > silent_s:
                    silent_s, silent_after = now - last, _last_line(text)
                last = now
                file.write(data)
                text = (text + data.decode(errors="replace"))[-4096:]
        with suppress(subprocess.TimeoutExpired):  # it closed its terminal, or the time is over
            child.wait(10 if time.monotonic() - began < GIVE_UP_S else 0)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        os.close(ours)
    code = child.wait()
    end = time.monotonic()
    if end - last > silent_s:
        silent_s, silent_after = end - last, _last_line(text)
    return Run(name, code, end - began, first_s or end - began, silent_s, silent_after)


def _read(terminal: int, wait_s: float) -> bytes:
    ready, _, _ = select.select([terminal], [], [], max(wait_s, 0.0))
    if not ready:
        return b""
    with suppress(OSError):  # the last process at the other end is gone
        return os.read(terminal, 65536)
    return b""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in re.split(r"[\r\n]+", _ESCAPES.sub("", text)) if line.strip()]
    return lines[-1] if lines else "(nothing)"


def draw_photos(folder: Path) -> Path:
    """Write images of several shapes with caption files; return the folder."""
    folder.mkdir(parents=True)
    for number in range(PHOTOS):
        width, height = SIZES[number % len(SIZES)]
        ramp = bytes(channel * (number + 3) * x // width % 256 for x in range(width) for channel in (1, 2, 3))
        pixels = zlib.compress(b"".join(b"\0" + ramp for _ in range(height)), 1)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
        body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
        (folder / f"{number:02d}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + body)
        (folder / f"{number:02d}.txt").write_text(f"a ramp of colours, number {number}\n")
    return folder


def clone(folder: Path) -> Path:
    """Clone what is committed here, and return where."""
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)], check=True)
    return folder


def environment(caches: Path) -> dict[str, str]:
    """Return the variables of a user whose caches are empty."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    places = {"XDG_CACHE_HOME": "cache", "PIP_CACHE_DIR": "pip", "HF_HOME": "hub", "npm_config_cache": "npm"}
    return {**kept, "TERM": "xterm", **{name: str(caches / place) for name, place in places.items()}}


def demo_path(folder: Path, scale: str) -> Iterator[Run]:
    """The first command of the README."""
    home = clone(folder / "demo")
    command = ["bash", "test/pretrain_full_1m_1p_sdxl.sh", *([f"--demo_scale={scale}"] if scale != "1" else [])]
    run = watch("README demo", command, home, environment(folder / "caches-demo"), folder / "demo.log")
    report = home / "test" / "output" / "0" / "report.html"
    run.missing = "" if report.is_file() else report.name
    yield run


def photos_path(folder: Path, ready: Path | None) -> Iterator[Run]:
    """Three commands of somebody with a folder of photos; the first one is left out with an environment that is ready."""
    env, photos, out = environment(folder / "caches-photos"), draw_photos(folder / "photos"), folder / "out"
    programs = (ready or folder / "venv") / "bin"
    if ready is None:
        home = clone(folder / "clone")
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        install = [str(programs / "pip"), "install", "-r", str(home / "requirements.txt"), str(home)]
        run = watch("pip install", install, folder, env, folder / "install.log")
        run.is_ours = False
        yield run
    data = [f"--train_data_dir={photos}", "--resolution=64", "--enable_bucket", "--min_bucket_reso=32"]
    look = [str(programs / "difftrain"), "dataset", "inspect", *data, "--max_bucket_reso=128", "--output=dataset.html"]
    run = watch("difftrain dataset inspect", look, folder, env, folder / "inspect.log")
    run.missing = "" if (folder / "dataset.html").is_file() else "dataset.html"
    yield run
    (folder / "prompts.txt").write_text("a ramp of colours --w 64 --h 64 --s 4\n")
    train = [str(programs / "difftrain"), "sdxl", "--init_from_config=tiny", *data, "--max_bucket_reso=128"]
    train += [f"--output_dir={out}", "--output_name=photos", "--train_batch_size=4", "--max_train_steps=20", "--seed=1"]
    train += ["--learning_rate=1e-4", "--sample_prompts=prompts.txt", "--sample_every_n_steps=10"]
    run = watch("difftrain sdxl", train, folder, env, folder / "train.log")
    run.missing = "" if list(out.glob("sample/*.png")) else "sample"
    yield run


def main() -> int:
    """Walk the paths and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("demo", "photos"), help="walk this path alone")
    parser.add_argument(
        "--demo_scale", default="1", help="share of the demo, for a quick try; the limit is of all of it"
    )
    parser.add_argument(
        "--environment", type=Path, help="virtual environment with difftrain, in place of installing it"
    )
    parser.add_argument("--keep", action="store_true", help="leave the folder with clones and logs, and name it")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="newcomer-"))
    ready = given.environment.resolve() if given.environment else None
    missed: list[str] = []
    print(f"{'command':26} {'seconds':>8} {'first':>7} {'silent':>7}   before the silence")
    try:
        paths = {"demo": demo_path(folder, given.demo_scale), "photos": photos_path(folder, ready)}
        for name, path in paths.items():
            runs = []
            for run in path if given.only in (None, name) else ():
                runs.append(run)
                times = f"{run.seconds:8.1f} {run.first_s:7.1f} {run.silent_s:7.1f}"
                print(run.name.ljust(26), times, "", run.silent_after[:90], flush=True)
                missed += [f"{run.name}: {miss}" for miss in run.misses()]
            total = sum(run.seconds for run in runs)
            if name == "demo" and given.demo_scale == "1" and total > DEMO_S:
                missed.append(f"the demo took {total / 60:.1f} minutes")
    finally:
        print(f"logs: {folder}") if given.keep or missed else shutil.rmtree(folder, ignore_errors=True)
    print(*(missed or ["PASS"]), sep="\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
