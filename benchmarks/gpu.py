"""Training on an accelerator: first whether it is right, then how fast it is beside what others write.

    python benchmarks/gpu.py                       what fits 570 seconds, the most worth first; 80 GiB of card memory
    python benchmarks/gpu.py --budget_s=3600       all of it
    python benchmarks/gpu.py --families=sd3,flux   some of it
    python benchmarks/gpu.py --rehearse            the same code on any machine, on tiny sizes: no figure of a GPU

Right (gpu_checks.py): attention against fp32 mathematics, forward and backward; bf16 and fp16 steps against fp32 ones; the
engine's losses against a hand-written loop's, and the device's against the CPU's. Fast (gpu_cases.py): images a second, the
share of the vendor's peak (MFU) and of the matmul rate measured here, peak memory; SDXL at 1024 px, SD3-Light at 256, Stable
Diffusion at 512, blocks of Flux.1's shapes at 256 and 1024; with and without checkpointing, compile, channels last, LoRA
(peft's, injected by the benchmark); in the same process a plain loop of diffusers and torch, what kohya's script does, and a
loop recorded as a CUDA graph (plain_loops.py). Random fp32 weights; latents and text states as a cache serves them.
Ends before the budget does, and writes gpu-<date>.json after every row. Exit code 1 where a check or a row fails for
another reason than memory. Without an accelerator it says so, 0.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import torch
from gpu_cases import OURS, Entry, chosen, missing
from gpu_checks import check_attention, check_steps
from plain_loops import STYLES, PlainLoop
from speed import HEAD, Budget, Ceilings, about, left_out, line, measured_row, write
from speed import OURS as DIFFTRAIN
from workload import EngineStep, Model

from difftrain.device import Device, choose
from difftrain.report.environment import process_age_s


def check(device: Device, families: list[str], rehearse: bool) -> list[dict[str, Any]]:
    """Check, and print what came out."""
    torch.backends.cudnn.allow_tf32 = False  # the fp32 checks are of fp32
    rows = check_attention(device, rehearse)
    for name in families:
        rows += check_steps(name, device)
    torch.backends.cudnn.allow_tf32 = True
    for row in rows:
        told = f"{row['error']:.1e} (limit {row['limit']:.0e})" if "error" in row else f"{row['skipped']} skipped"
        print(f"  {'PASS' if row['passed'] else 'FAIL'}  {row['check']}: {told}", flush=True)
    return rows


class Bench:
    """Measure entries one after the other, keeping the weights of the last model."""

    def __init__(self, device: Device, budget: Budget, measure: dict[str, int]) -> None:
        self.device, self.budget, self.measure = device, budget, measure
        self.ceilings = Ceilings(device)
        self._model: Model | None = None

    def row(self, entry: Entry) -> dict[str, Any]:
        """Measure one."""
        case, loop = entry.case, STYLES.get(entry.loop, DIFFTRAIN)

        def make() -> Any:
            if entry.loop == OURS:
                return EngineStep(case, self._of(entry))
            self.free()  # a plain loop's model has diffusers' own attention, so it is another one
            return PlainLoop(case, Model(case, self.device), entry.loop)

        return measured_row(case, make, self.ceilings, loop, **self.measure, budget=self.budget)

    def _of(self, entry: Entry) -> Model:
        if self._model is None or self._model.key != entry.case.model:
            self.free()
            self._model = Model(entry.case, self.device)
        return self._model

    def free(self) -> None:
        """Give the memory of the kept model back."""
        if self._model is not None:
            self._model.free()
        self._model = None


def main() -> int:
    """Check, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default="", help="those of gpu_cases.py that are wanted, with commas; all")
    parser.add_argument("--budget_s", type=float, default=570.0, help="end before so many seconds have passed")
    parser.add_argument("--warm_up", type=int, default=4, help="steps of each row that do not count")
    parser.add_argument("--steps", type=int, default=8, help="steps of a round")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each row")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of gpu-<date>.json")
    parser.add_argument("--rehearse", action="store_true", help="run the code on tiny sizes, on whatever is here")
    options = parser.parse_args()
    wanted = [name for name in options.families.split(",") if name]
    try:
        entries = chosen(wanted, options.rehearse)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    device, budget = choose("auto"), Budget(options.budget_s - process_age_s())
    if device.module is None and not options.rehearse:
        print(f"not measured on a GPU: {device.reason}")
        return 0
    rehearsal = " (rehearsal: no figure of a GPU)" * options.rehearse
    print(f"{device.describe()['name']}, torch {torch.__version__}{rehearsal}")

    found: dict[str, Any] = about(device) | {"rehearsal": options.rehearse, "checks": [], "speed": [], "left_out": []}
    path = options.out / f"gpu{'-rehearsal' * options.rehearse}-{found['date']}.json"
    found["checks"] = check(device, list(dict.fromkeys(entry.case.family for entry in entries)), options.rehearse)
    write(path, found)

    # --- speed, while there is time
    print(HEAD)
    bench = Bench(device, budget, {name: getattr(options, name) for name in ("warm_up", "steps", "repeats")})
    for entry in entries:
        lacks = missing(entry)
        if lacks or budget.left_s < entry.least_s:
            why = f"needs the package {lacks}, which is not installed" if lacks else "no time is left"
            found["left_out"].append({"case": entry.case.title, "loop": entry.loop or DIFFTRAIN, "why": why})
            print(left_out(entry.case.title, why), flush=True)
            continue
        found["speed"].append(bench.row(entry))
        print(line(found["speed"][-1]), flush=True)
        write(path, found)
    write(path, found)
    print(f"written to {path}")
    ok = all(row["passed"] for row in found["checks"])
    faults = [
        row for row in found["speed"] if "failed" in row and not row.get("does_not_fit") and not row.get("impossible")
    ]
    return 0 if ok and not faults else 1


if __name__ == "__main__":
    sys.exit(main())
