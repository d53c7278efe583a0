"""Training end to end, from JPEGs on disk to updated weights, beside what other trainers do: at least 1.3 x diffusers' example.

    python benchmarks/peers.py                      some minutes on two cores; needs the package `datasets`
    python benchmarks/peers.py --warm               forks of one process: quicker, and no cold starts
    python benchmarks/peers.py --rehearse           tiny pictures, a round: the same code, no figure

Tiny SDXL with random weights, the VAE and both text encoders run at every step, batches of the same shape, one thread a
process and the same number of loader processes for all (--workers), AdamW, fp32. Ours is the door
(sd_scripts_xl/sdxl_pretrain.py, all else its defaults), the others are peer_loops.py. In a round everybody is started
anew, one after the other, without an index or a cache, and stopped after a warm-up; then each runs for a few seconds while
the others stand still (SIGSTOP, with their loaders), in turns, so that other work on the machine slows all alike. From outside
are taken: seconds from the command to the first step, steps a second, and the memory of all its processes (proportional set
size: shared pages count once). The example's own default, no loader process, is run beside it. The limit: steps a second over
diffusers' example with as many loader processes as ours. Exit code 1 below.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

from photographs import write_made_up, write_pieces

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1.3
OURS = "difftrain"
ENDLESS = 1_000_000  # steps: nobody comes to an end by itself
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Peer:
    """One way to train. default_workers: of its own, in place of those that all have."""

    name: str
    loop: str
    workers: int | None = None
    needs: str = ""


PEERS = (
    Peer(OURS, ""),
    Peer("diffusers example", "diffusers", needs="datasets"),
    Peer("diffusers example, 0 workers", "diffusers", workers=0, needs="datasets"),
    Peer("kohya's step", "kohya", needs="accelerate"),
    Peer("accelerate's loop", "accelerate", needs="accelerate"),
)


def command(peer: Peer, folder: Path, out: Path, options: argparse.Namespace) -> list[str]:
    """Return what is run."""
    workers = options.workers if peer.workers is None else peer.workers
    shape = (("batch_size", options.batch_size), ("resolution", options.resolution))
    common = [f"--{name}={value}" for name, value in (*shape, ("steps", ENDLESS))]
    if peer.loop:
        script = str(ROOT / "benchmarks" / "peer_loops.py")
        return [sys.executable, script, f"--peer={peer.loop}", f"--model={folder / 'model'}", f"--data={folder / 'data'}",
                f"--cache={out}", f"--workers={workers}", *common]  # fmt: skip
    side = options.resolution
    return [
        sys.executable, str(ROOT / "sd_scripts_xl" / "sdxl_pretrain.py"), f"--train_data_dir={folder / 'data'}",
        f"--pretrained_model_name_or_path={folder / 'model'}", f"--output_dir={out}", "--output_name=ours",
        f"--resolution={side},{side}", f"--train_batch_size={options.batch_size}", f"--max_train_steps={ENDLESS}",
        f"--max_data_loader_n_workers={workers}", f"--cache_dir={out / 'cache'}", "--learning_rate=1e-4", "--seed=1",
        "--log_every=1", "--flip_aug", "--random_crop", "--device=cpu",
    ]  # fmt: skip


class Running:
    """One peer's processes, stopped but for its turns: its steps and the seconds in which it could make them."""

    def __init__(self, peer: Peer, folder: Path, options: argparse.Namespace) -> None:
        self.peer, self._said = peer, []
        self._made = tempfile.mkdtemp(dir=folder, prefix="run-")
        env = {**os.environ, **SETTINGS, "XDG_CACHE_HOME": f"{self._made}/home", "HF_HOME": f"{self._made}/hf"}
        words = command(peer, folder, Path(self._made) / "out", options)
        began = time.monotonic()
        if options.warm:
            self.process: Any = Forked(words, env, self._made)
        else:
            self.process = subprocess.Popen(
                words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self._made,
                start_new_session=True,
            )  # fmt: skip
        self.steps, self.peak_mib, self.rates = 0, 0.0, []
        self._step = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.first_s = self._wait(1) - began
            self._wait(options.warm_up)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.end()
            raise

    def _listen(self) -> None:
        for line in self.process.stdout:
            self._said.append(line)
            if line.startswith("step=") or " step_loss=" in line:  # ours says the time first
                with self._step:
                    self.steps += 1
                    self._step.notify_all()
        with self._step:
            self.steps = -1  # it has ended
            self._step.notify_all()

    def _wait(self, steps: int) -> float:
        """Wait until so many steps are made; return when that was. Raises SystemExit where it ends before."""
        with self._step:
            self._step.wait_for(lambda: self.steps < 0 or self.steps >= steps)
        self._look()
        return time.monotonic()

    def turn(self, seconds: float) -> None:
        """Let it run for a while; a step that is not done then goes on in its next turn."""
        before, began = self.steps, time.monotonic()
        self._signal(signal.SIGCONT)
        time.sleep(seconds)
        self.peak_mib = max(self.peak_mib, sum(map(_pss_kib, _tree(self.process.pid))) / 1024)
        self._signal(signal.SIGSTOP)
        self._look()
        self.rates.append((self.steps - before, time.monotonic() - began))

    @property
    def steps_per_s(self) -> float:
        """Return the rate over all turns."""
        return sum(steps for steps, _ in self.rates) / sum(seconds for _, seconds in self.rates)

    def _look(self) -> None:
        if self.steps < 0:
            raise SystemExit(f"{self.peer.name} has ended\n{''.join(self._said)}")

    def _signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        """End it, stopped or not, with its loaders."""
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self.process.wait()


class Forked:
    """A script in a fork of this process, which has imported what they all do: its start is not a cold one."""

    def __init__(self, words: list[str], env: dict[str, str], cwd: str) -> None:
        entering, leaving = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                os.setsid()
                os.dup2(leaving, 1)
                os.dup2(leaving, 2)
                os.chdir(cwd)
                os.environ.update(env)
                sys.argv = words[1:]
                sys.path.insert(0, str(Path(words[1]).parent))
                runpy.run_path(words[1], run_name="__main__")
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(OSError):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        os.close(leaving)
        self.stdout = os.fdopen(entering)

    def wait(self) -> int:
        """Return the exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def preload() -> None:
    """Import what every one of them imports."""
    os.environ.update(SETTINGS)
    import accelerate
    import diffusers
    import torch
    import transformers

    torch.set_num_threads(1)
    assert accelerate and diffusers.UNet2DConditionModel and diffusers.AutoencoderKL and transformers.CLIPTextModel


def _tree(pid: int) -> list[int]:
    try:
        children = [
            int(each) for path in Path(f"/proc/{pid}/task").glob("*/children") for each in path.read_text().split()
        ]
    except OSError:
        children = []
    return [pid, *(below for child in children for below in _tree(child))]


def _pss_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def write_model(folder: Path) -> None:
    """Export the tiny model as a folder of diffusers, which all of them load."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from difftrain.config import TrainConfig\n"
        "from difftrain.models.registry import make_family\n"
        "cfg = TrainConfig.model_validate({'model': {'init_from_config': 'tiny'}, 'training': {'seed': 1}})\n"
        "family = make_family(cfg)\n"
        "parts = family.load()\n"
        "family.export(iter(parts.root.state_dict().items()), parts, 'diffusers_safetensors', Path(sys.argv[2]),"
        " metadata={'title': 'tiny'})\n"
    )
    subprocess.run([sys.executable, "-c", code, str(ROOT / "library"), str(folder)], check=True)


def write_data(folder: Path, options: argparse.Namespace) -> str:
    """Write JPEGs, captions beside them, and the table that `datasets` reads; return what they are."""
    what = "pieces of photographs"
    if options.rehearse or not write_pieces(folder, options.pictures, options.side):
        if folder.is_dir():
            folder.rmdir()
        write_made_up(folder, options.pictures, options.side)
        what = "made-up pictures with the spectrum of photographs"
    files = sorted(folder.glob("*.jpg"))
    rows = [{"file_name": path.name, "text": path.with_suffix(".txt").read_text()} for path in files]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mean = sum(path.stat().st_size for path in files) / len(files) / 1024
    return f"{len(files)} {what}, JPEGs of {options.side} x {options.side}, {mean:.0f} KiB each"


def told(values: list[float]) -> str:
    """Return a median between the smallest and the largest."""
    return f"{statistics.median(values):5.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    """Start everybody, let them take turns, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="times that everything is started anew")
    parser.add_argument("--turns", type=int, default=10, help="of each, in a round")
    parser.add_argument("--turn_s", type=float, default=4.0, help="seconds of a turn")
    parser.add_argument("--warm_up", type=int, default=5, help="steps before the first turn")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--resolution", type=int, default=128)
    parser.add_argument("--workers", type=int, default=1, help="loader processes of everyone")
    parser.add_argument("--pictures", type=int, default=96)
    parser.add_argument("--side", type=int, default=1024, help="of the JPEGs")
    parser.add_argument(
        "--warm", action="store_true", help="fork all from one process that has imported torch and diffusers"
    )
    parser.add_argument("--rehearse", action="store_true", help="small made-up pictures, one round, no verdict")
    options = parser.parse_args()
    if options.rehearse:
        options.rounds, options.turns, options.turn_s, options.warm_up, options.pictures, options.side = (
            1,
            1,
            0.5,
            1,
            8,
            256,
        )
        options.batch_size, options.resolution, options.warm = 2, 64, True
    if options.warm:
        preload()
    peers = [peer for peer in PEERS if not peer.needs or importlib.util.find_spec(peer.needs)]
    for peer in PEERS:
        if peer not in peers:
            print(f"{peer.name}: left out, the package {peer.needs} is not installed")

    rounds: list[dict[str, Running]] = []
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_model(folder / "model")
        print(write_data(folder / "data", options))
        loads = [os.getloadavg()[0]]
        for number in range(options.rounds):
            rounds.append(one_round(peers if number % 2 == 0 else peers[::-1], folder, options))
            loads.append(os.getloadavg()[0])
            for peer, one in rounds[-1].items():
                said = f"{one.steps_per_s:.2f} steps/s, first step after {one.first_s:.1f} s, {one.peak_mib:.0f} MiB"
                print(f"  round {number + 1}, {peer}: {said}", flush=True)
    print(
        f"tiny SDXL, batch {options.batch_size} at {options.resolution} px, {options.workers} loader processes, "
        f"{options.rounds} rounds of {options.turns} turns of {options.turn_s} s, {os.cpu_count()} cores, load "
        f"{min(loads):.1f} to {max(loads):.1f}{', starts not cold' * options.warm}"
    )
    return verdict(rounds, [peer.name for peer in peers], options)


def one_round(peers: list[Peer], folder: Path, options: argparse.Namespace) -> dict[str, Running]:
    """Start everybody, one after the other, then let one after the other run for a few seconds, again and again."""
    running: dict[str, Running] = {}
    try:
        for peer in peers:
            running[peer.name] = Running(peer, folder, options)
        for _ in range(options.turns):
            for each in running.values():
                each.turn(options.turn_s)
    finally:
        for each in running.values():
            each.end()
    return running


def verdict(rounds: list[dict[str, Running]], names: list[str], options: argparse.Namespace) -> int:
    """Print everybody's medians and ratios (ours over theirs in speed, theirs over ours else); return the exit code."""
    print(
        f"  {'':30} {'steps/s':>8} {'first step':>11} {'peak':>10}   ratio of: {'steps/s':20} {'first step':20} memory"
    )
    ratios: dict[str, list[float]] = {}
    for name in names:
        ours, theirs = [each[OURS] for each in rounds], [each[name] for each in rounds]
        speed, first, memory = (
            statistics.median(getattr(each, key) for each in theirs) for key in ("steps_per_s", "first_s", "peak_mib")
        )
        line = f"  {name:30} {speed:8.2f} {first:9.1f} s {memory:6.0f} MiB"
        if name != OURS:
            ratios[name] = [
                a.steps_per_s / b.steps_per_s if b.steps_per_s else float("inf") for a, b in zip(ours, theirs)
            ]
            starts, peaks = (
                [getattr(b, key) / getattr(a, key) for a, b in zip(ours, theirs)] for key in ("first_s", "peak_mib")
            )
            line += f"             {told(ratios[name]):20} {told(starts):20} {told(peaks)}"
        print(line)
    if options.rehearse or PEERS[1].name not in names:
        return 0
    ratio = statistics.median(ratios[PEERS[1].name])
    good = ratio >= LIMIT
    print(f"{'PASS' if good else 'FAIL'}  steps a second over diffusers' example: {ratio:.2f} (limit {LIMIT})")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
