"""Speed of training steps over families, resolutions, precisions, engines, and full weights against LoRA.

    python benchmarks/suite.py --matrix=benchmarks/matrices/tiny.toml       every trained family's tiny size, anywhere
    python benchmarks/suite.py --matrix=benchmarks/matrices/gpu.toml        a card with 80 GiB

Each [[run]] of a matrix file is a product of its lists:

    [measure]                       # of the whole file, all optional
    warm_up = 5                     # steps that are not counted; what they took is printed apart
    steps = 10                      # of a round
    repeats = 3                     # rounds: their median counts, their spread is printed

    [[run]]
    family = ["sdxl"]               # or "trained": every family that is trained, by the registry
    size = ["tiny"]
    resolution = [64, 128]
    batch_size = [2]
    precision = ["no", "bf16"]
    engine = ["native"]
    trains = ["full", "lora"]       # LoRA is injected by the benchmark with peft: the trainer has no adapters yet
    checkpointing = [false]
    compile = [""]                  # backends of torch.compile
    layout = ["contiguous"]         # or "channels_last"
    adamw = ["fused"]               # or "foreach"
    sizes.transformer.num_layers = 4    # arguments of a part in the place of the size's own

Weights are random, features are synthetic and as a cache serves them: no VAE, no text encoder, no loading. Operations are
counted by torch on the meta device; beside them stands the family's own formula. MFU is of the vendor's peak, "matmul" of
the matmul rate measured on the spot. Writes suite-<name of the matrix>-<date>.json; exit code 1 where a case failed for
another reason than memory, 2 for a matrix that is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "library"))

import torch
from speed import HEAD, Budget, Ceilings, about, left_out, line, measured_row, write
from workload import Case, EngineStep, Model, missing_packages, trained_families

from difftrain.device import choose
from difftrain.engine import ENGINES
from difftrain.models.registry import FAMILIES

MEASURE = {"warm_up": 3, "steps": 5, "repeats": 3}
CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": ("no", "fp16", "bf16"),
    "engine": tuple(ENGINES),
    "trains": ("full", "lora"),
    "checkpointing": (False, True),
    "layout": ("contiguous", "channels_last"),
    "adamw": ("fused", "foreach"),
}
KEYS = ("family", "size", "resolution", "batch_size", "precision", "engine", "trains", "checkpointing", "compile",
        "layout", "adamw")  # fmt: skip


class MatrixFault(Exception):
    """Carry everything that is wrong with a matrix file, a sentence each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


def read_matrix(path: Path) -> tuple[dict[str, int], list[Case]]:
    """Return how to measure, and every case. Raises MatrixFault with all that is wrong."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise MatrixFault([f"{path}: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MatrixFault([f"{path}: {error}"]) from error
    faults = [
        f"{path}: there is no key {key!r}; known: measure, run" for key in content if key not in ("measure", "run")
    ]
    measure, runs = content.get("measure", {}), content.get("run", [])
    if not isinstance(runs, list) or not runs:
        faults.append(f"{path}: has no [[run]]")
        runs = []

    for key, value in measure.items():
        if key not in MEASURE:
            faults.append(f"{path} [measure]: there is no key {key!r}; known: {', '.join(MEASURE)}")
        elif type(value) is not int or value < 1:
            faults.append(f"{path} [measure] {key}: got {value!r}, must be a whole number of at least 1")
    cases: dict[Case, None] = {}  # two runs may share some
    for number, run in enumerate(runs, 1):
        where = f"{path} [[run]] {number}"
        wrong = list(faults_of(run, where))
        faults += wrong
        if not wrong:
            cases |= dict.fromkeys(cases_of(run))
    if faults:
        raise MatrixFault(faults)
    return MEASURE | measure, list(cases)


def faults_of(run: Mapping[str, Any], where: str) -> Iterator[str]:
    """Name what is wrong with one run."""
    for key in run:
        if key not in (*KEYS, "sizes"):
            yield f"{where}: there is no key {key!r}; known: {', '.join((*KEYS, 'sizes'))}"
    families = families_of(run)
    for name in families:
        if name not in trained_families():
            why = "is not trained yet" if name in FAMILIES else "is no family"
            yield f"{where} family: {name!r} {why}; one of trained, {', '.join(trained_families())}"
    known = [name for name in families if name in trained_families()]
    for size in listed(run, "size", Case.size):
        for name in known:
            if size not in FAMILIES[name].sizes:
                yield f"{where} size: {name} has no size {size!r}; one of {', '.join(FAMILIES[name].sizes)}"
    for key, choices in CHOICES.items():
        for value in listed(run, key, getattr(Case, key)):
            # True == 1 in Python, not in TOML
            if not any(value == choice and type(value) is type(choice) for choice in choices):
                yield f"{where} {key}: got {value!r}, one of {', '.join(map(str, choices))}"
    for key in ("resolution", "batch_size"):
        for value in listed(run, key, getattr(Case, key)):
            if type(value) is not int or value < 1:
                yield f"{where} {key}: got {value!r}, must be a whole number of at least 1"
            elif key == "resolution":
                for name in known:
                    if value % Case(name, resolution=value).bucket.width:
                        yield f"{where} resolution: got {value}, {name} takes multiples of {Case(name).bucket.width // 2}"
    backends = torch.compiler.list_backends(exclude_tags=())
    for value in listed(run, "compile", Case.compile):
        if value and value not in backends:
            yield f"{where} compile: there is no backend {value!r}; known: {', '.join(backends)}"
    sizes = run.get("sizes", {})
    for part in sizes if isinstance(sizes, dict) else ():
        for name in known:
            if part not in FAMILIES[name].parts:
                yield f"{where} sizes: {name} has no part {part!r}; it has {', '.join(FAMILIES[name].parts)}"


def families_of(run: Mapping[str, Any]) -> list[Any]:
    """Return the families of a run; "trained" stands for all that are."""
    names = listed(run, "family", "trained")
    return [each for name in names for each in (trained_families() if name == "trained" else [name])]


def listed(run: Mapping[str, Any], key: str, usual: Any) -> list[Any]:
    """Return a key's values; one that stands alone is a list of one."""
    value = run.get(key, usual)
    return value if isinstance(value, list) else [value]


def cases_of(run: Mapping[str, Any]) -> Iterator[Case]:
    """Yield the product of a run's lists, cases of the same weights one after the other."""
    sizes = json.dumps(run["sizes"], sort_keys=True) if run.get("sizes") else ""
    lists = [families_of(run), *(listed(run, key, getattr(Case, key)) for key in KEYS[1:])]
    for values in itertools.product(*lists):
        yield Case(**dict(zip(KEYS, values)), sizes=sizes)


def main() -> int:
    """Read the matrix, measure every case, print the table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--matrix", type=Path, required=True, help="TOML file of what is measured")
    parser.add_argument("--device", default="auto", help="kind of device")
    parser.add_argument("--budget_s", type=float, help="end before so many seconds have passed, with what there is")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the JSON file")
    options = parser.parse_args()
    try:
        measure, cases = read_matrix(options.matrix)
    except MatrixFault as fault:
        print("\n".join(fault.faults), file=sys.stderr)
        return 2
    device, budget = choose(options.device), Budget(options.budget_s)
    ceilings, model, rows = Ceilings(device), None, []
    found = about(device) | {"matrix": options.matrix.name, "measure": measure, "rows": rows, "left_out": []}
    path = options.out / f"suite-{options.matrix.stem}-{found['date']}.json"
    print(f"{found['device']['name']}, torch {torch.__version__}, {found['threads']} threads; {measure}")
    print(HEAD)

    for case in cases:
        missing, late = missing_packages(case.trains), budget.left_s <= 0
        if missing or late:
            why = f"needs the package {missing}, which is not installed" if missing else "the time was over"
            found["left_out"].append({"case": case.title, "why": why})
            print(left_out(case.title, why), flush=True)
            continue
        if model is None or model.key != case.model:
            if model is not None:
                model.free()
            model = Model(case, device)
        row = measured_row(case, lambda: EngineStep(case, model), ceilings, **measure, budget=budget)  # noqa: B023
        rows.append(row)
        print(line(row), flush=True)
        write(path, found)
    write(path, found)
    print(f"written to {path}")
    return int(any("failed" in row and not row.get("does_not_fit") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
