"""Traces of two runs against one another: which module is the first to part. Reads files only, and no torch.

1. `traces_of` finds the files of a run, a folder or a name; `Trace.read` reads one, or says what is wrong with it.
2. `compare_traces` takes the steps and ranks that both have, in order, and stops at the first that parts.
3. Where the network read other values of other samples, nothing can be compared. Else the calls of a step are walked
   forward and backward (parting.py), each tensor judged by the tolerance of what it was computed in: other values of the
   same samples part where they were made, in a frozen encoder that the step ran, or at what the network reads.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from difftrain.contracts.errors import DifftrainError
from difftrain.report.compare.parting import ROOT, ModuleCall, Parting, first_parting

FORMAT = 1
FOLDER = "trace"
_NAME = re.compile(r"step(\d{8})-rank(\d{5})\.safetensors")
# |a - b| / |a| up to which tensors count as one: a few thousand times fp32's rounding and some dozen times that of halves,
# which is what kernels of two devices differ by behind some dozen layers
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
BACKWARD = 4.0  # gradients have come through twice as many kernels, and sums over all tokens
_PRECISIONS = {"fp16": "float16", "bf16": "bfloat16"}
AGREE, PART, NOT_COMPARABLE = 0, 1, 2
TARGET, TIMESTEP = "target/", "input.timestep"  # names of tensors: what the loss compares with begins with it


class NotComparable(DifftrainError):
    """Say why two traces cannot be compared; exit code 2."""

    exit_code = NOT_COMPARABLE


def file_name(step: int, rank: int) -> str:
    """Return the name of a trace's file."""
    return f"step{step:08d}-rank{rank:05d}.safetensors"


# ---------------------------------------------------------------------- one file


@dataclass(frozen=True)
class TracedTensor:
    """What the header says of a tensor. norm: of all elements; values hold every stride-th."""

    dtype: str
    shape: tuple[int, ...]
    stride: int
    norm: float


@dataclass
class Trace:
    """One step of one rank."""

    path: Path
    facts: dict[str, str]
    calls: list[ModuleCall]
    tensors: dict[str, TracedTensor]
    _values: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read a file. Raises NotComparable where it is torn, no trace, or of another version's format."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as opened:
                facts = dict(opened.metadata() or {})
                if "calls" not in facts or "tensors" not in facts:
                    raise NotComparable(f"{path} is not a trace: its header lists no module calls")
                if facts.get("format") != str(FORMAT):
                    what = f"{path} is a trace of format {facts.get('format')}, this version reads {FORMAT}"
                    raise NotComparable(f"{what}: compare with the version that wrote it, {facts.get('difftrain')}")
                values = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
            calls = [ModuleCall(**call) for call in json.loads(facts["calls"])]
            tensors = {
                name: TracedTensor(tensor["dtype"], tuple(tensor["shape"]), tensor["stride"], float(tensor["norm"]))
                for name, tensor in json.loads(facts["tensors"]).items()
            }
        except OSError as error:
            raise NotComparable(f"{path} cannot be read: {error.strerror or error}") from error
        except (SafetensorError, ValueError, TypeError, KeyError) as error:
            raise NotComparable(f"{path} is incomplete: {error}; trace that step again") from error
        return cls(path, facts, calls, tensors, values)

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the values of a tensor that were kept. Shape: (N,), fp32."""
        return self._values[name]

    @property
    def precision(self) -> str:
        """Return the dtype that it was computed in: under autocast norms are fp32, and carry what bf16 rounded."""
        return next((dtype for word, dtype in _PRECISIONS.items() if word in self.facts["precision"]), "float32")

    def describe(self) -> str:
        """Say what was traced, in a line."""
        facts = self.facts
        names = ("family", "device", "precision", "dtype", "torch")
        return ", ".join(f"{name} {facts.get(name)}" for name in names)


def traces_of(path: Path) -> dict[tuple[int, int], Path]:
    """Return the files by (step, rank) of a run, of a folder of traces, or of a file. Raises NotComparable."""
    if path.is_file():
        match = _NAME.fullmatch(path.name)
        if match is not None:
            return {(int(match[1]), int(match[2])): path}
        facts = Trace.read(path).facts
        return {(int(facts["step"]), int(facts["rank"])): path}
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if not folder.is_dir():
        raise NotComparable(f"{path}: no such file or folder")
    matches = ((path, match) for path in sorted(folder.iterdir()) if (match := _NAME.fullmatch(path.name)))
    files = {(int(match[1]), int(match[2])): path for path, match in matches}
    if not files:
        raise NotComparable(
            f"{path} contains no trace: give a run trained with --trace, its folder {FOLDER}, or a file"
        )
    return files


# ---------------------------------------------------------------------- two of them


@dataclass(frozen=True)
class Difference:
    """How far a tensor of B is from A's. error: |a - b| / |a|, infinite where one of them is no number or not there."""

    tensor: str
    error: float
    tolerance: float
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StepComparison:
    """One step of one rank.

    inputs: what the network read, or its loss compares with, and that differs. parting: the first module that parts;
    none where inputs differ because the samples do.
    """

    step: int
    rank: int
    a: Trace = field(repr=False)
    b: Trace = field(repr=False)
    modules: int
    alone: tuple[str, ...]  # modules that only one of them called
    largest: Difference | None  # the nearest to its tolerance, where they agree
    unequal: Difference | None = None  # the first that is not bit-identical
    inputs: tuple[Difference, ...] = ()
    same_records: bool = True
    parting: Parting | None = None
    difference: Difference | None = None

    @property
    def code(self) -> int:
        """Return 0, 1 or 2: they agree, part, or cannot be compared."""
        if self.inputs and not self.same_records:
            return NOT_COMPARABLE
        return PART if self.parting is not None else AGREE


@dataclass(frozen=True)
class TraceComparison:
    """All steps up to the first that does not agree."""

    steps: tuple[StepComparison, ...]
    left: int  # steps and ranks that were not looked at any more

    @property
    def code(self) -> int:
        """Return the exit code: 0 they agree, 1 they part, 2 they cannot be compared."""
        return max(step.code for step in self.steps)


def compare_traces(a: Path, b: Path, *, tolerance: float | None = None, step: int | None = None) -> TraceComparison:
    """Compare the traces of B with those of A, the reference. tolerance: in place of those by dtype. step: this one alone.

    Raises NotComparable where there is nothing to be compared: no common step, another model, a torn file.
    """
    files_a, files_b = traces_of(Path(a)), traces_of(Path(b))
    common = [key for key in sorted(files_a.keys() & files_b.keys()) if step in (None, key[0])]
    if not common:
        has = [_steps(files) for files in (files_a, files_b)]
        which = "" if step is None else f" that is step {step}"
        raise NotComparable(f"no step of one rank is traced in both{which}: {a} has {has[0]}, {b} has {has[1]}")
    done: list[StepComparison] = []
    for key in common:
        traces = Trace.read(files_a[key]), Trace.read(files_b[key])
        done.append(_Pair(*traces, tolerance).compare(*key))
        if done[-1].code != AGREE:
            break
    return TraceComparison(tuple(done), len(common) - len(done))


def _steps(files: Iterable[tuple[int, int]]) -> str:
    keys = sorted(files)
    shown = ", ".join(f"step {step} of rank {rank}" for step, rank in keys[:4])
    return shown + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


class _Pair:
    """Two traces of one step and rank."""

    def __init__(self, a: Trace, b: Trace, tolerance: float | None) -> None:
        self.a, self.b = a, b
        for what, name in (("family", "family"), ("network", "model")):
            if a.facts[name] != b.facts[name]:
                values = f"{a.facts[name]} in {a.path}, {b.facts[name]} in {b.path}"
                raise NotComparable(f"these are traces of another {what}: {values}")
        coarse = max((a.precision, b.precision), key=lambda dtype: TOLERANCES[dtype])
        self._tolerance, self._coarse = tolerance, coarse
        self.difference = functools.cache(self._difference)

        # --- calls that both made, by A's order; tensors by the names that each of them has for it
        mine = {(call.module, call.call): call for call in b.calls}
        self.calls = [call for call in a.calls if (call.module, call.call) in mine]
        self._twins: dict[str, str] = {}
        for call in self.calls:
            twin = mine[call.module, call.call]
            for ours, theirs in ((call.inputs, twin.inputs), (call.outputs, twin.outputs)):
                for role in ours.keys() & theirs.keys():
                    self._twins.setdefault(ours[role], theirs[role])
        modules = [{call.module for call in trace_calls} for trace_calls in (a.calls, b.calls)]
        self.modules, self.alone = len(modules[0] & modules[1]), tuple(sorted(modules[0] ^ modules[1]))
        if not self.calls:
            raise NotComparable(f"{a.path} and {b.path} have no module call in common")

    def compare(self, step: int, rank: int) -> StepComparison:
        """Look at what the network read, then at what it made of it."""
        same = self.a.facts["records"] == self.b.facts["records"]
        made = functools.partial(StepComparison, step, rank, self.a, self.b, self.modules, self.alone)
        inputs = tuple(difference for difference in self._inputs() if not difference.error <= difference.tolerance)
        if inputs and not same:
            return made(None, inputs=inputs, same_records=same)
        parameters = [name.removeprefix("gradient/") for name in self.a.tensors if name.startswith("gradient/")]
        arrived = [name.removeprefix("backward/") for name in self.a.tensors if name.startswith("backward/")]
        parting = first_parting(
            self.calls, self._good("forward"), self._good("backward"), arrived, self._good("gradient"), parameters
        )
        parting = self._at_the_network(parting, inputs)
        unequal = next(
            (difference for name in self.a.tensors if (difference := self.difference(name)) and difference.error), None
        )
        if parting is None:
            return made(self._largest(), unequal)
        kind = {"parameter": "gradient"}.get(parting.direction, parting.direction)
        name = parting.tensor if parting.role.startswith(TARGET) else f"{kind}/{parting.tensor}"
        return made(None, unequal, inputs=inputs, same_records=same, parting=parting, difference=self.difference(name))

    def _at_the_network(self, parting: Parting | None, inputs: Sequence[Difference]) -> Parting | None:
        """Return where it begins, where the network reads what parts, or its loss compares with it.

        Of several inputs the timestep is named: the noised sample is made by it.
        """
        forward = parting if parting is not None and parting.direction == "forward" else None
        if not inputs or (forward is not None and not (forward.module == ROOT and forward.role.startswith("input."))):
            return parting
        root = next(call for call in self.calls if call.module == ROOT)
        tensor = min(inputs, key=lambda difference: not difference.tensor.endswith(f"/{TIMESTEP}")).tensor
        role = tensor if tensor.startswith(TARGET) else tensor.rpartition("/")[2]
        name = tensor if tensor.startswith(TARGET) else tensor.partition("/")[2]
        micro = tensor.split("/")[1 if tensor.startswith(TARGET) else 2].partition(".")[0]
        good = tuple(dict.fromkeys(call.module for call in sorted(self.calls, key=lambda call: call.exited)))
        before = forward.good if forward is not None else tuple(module for module in good if module != ROOT)
        return Parting("forward", ROOT, root.kind, f"{micro}.0", role, name, good=before)

    def _good(self, kind: str) -> Any:
        def good(name: str) -> bool | None:
            difference = self.difference(f"{kind}/{name}")
            return None if difference is None else difference.error <= difference.tolerance

        return good

    def _inputs(self) -> Iterator[Difference]:
        """Yield how what the network read, and what the loss compares with, differs."""
        roots = [call for call in self.calls if call.module == ROOT]
        names = [f"forward/{name}" for call in roots for name in call.inputs.values()]
        names += [name for name in self.a.tensors if name.startswith("target/")]
        yield from (difference for name in names if (difference := self.difference(name)) is not None)

    def _largest(self) -> Difference | None:
        """Return the tensor that is nearest to its tolerance."""
        differences = [difference for name in self.a.tensors if (difference := self.difference(name)) is not None]
        return max(differences, key=lambda difference: difference.error / difference.tolerance, default=None)

    # ------------------------------------------------------------------ one tensor

    def _difference(self, name: str) -> Difference | None:
        """Compare a tensor, by A's name; None where only one of the runs has a place for it."""
        kind, _, remaining = name.partition("/")
        other = f"{kind}/{self._twins.get(remaining, remaining)}" if kind in ("forward", "backward") else name
        ours, theirs = self.a.tensors.get(name), self.b.tensors.get(other)
        if ours is None or (theirs is None and (kind in ("forward", "target", "loss") or not self._traced(kind))):
            return None
        tolerance = self._tolerance_of(kind, ours.dtype)
        if theirs is None:  # a gradient that never came, in a backward pass that was traced
            return Difference(name, 0.0 if ours.norm == 0 else math.inf, tolerance, ours.dtype, ours.shape)
        if ours.shape != theirs.shape:
            return Difference(name, math.inf, tolerance, ours.dtype, ours.shape)
        error = _relative_error(self.a[name], self.b[other], ours.norm, theirs.norm, self._floor(name, ours))
        return Difference(name, error, tolerance, ours.dtype, ours.shape)

    def _traced(self, kind: str) -> bool:
        return any(name.startswith(f"{kind}/") for name in self.b.tensors)

    def _tolerance_of(self, kind: str, dtype: str) -> float:
        if self._tolerance is not None:
            return self._tolerance
        coarse = max((TOLERANCES.get(dtype, 0.0), TOLERANCES[self._coarse]))
        return coarse * (BACKWARD if kind in ("backward", "gradient") else 1.0)

    def _floor(self, name: str, tensor: TracedTensor) -> float:
        """Return the norm below which a parameter's gradient is rounding: what its module's others have for its size.

        A bias of keys has none at all (a softmax does not see it); what is computed there is what rounding leaves.
        """
        if not name.startswith("gradient/"):
            return 0.0
        return self._sizes[name.rpartition(".")[0]] * math.sqrt(math.prod(tensor.shape) or 1)

    @functools.cached_property
    def _sizes(self) -> dict[str, float]:
        """Return by module how large an element of its parameters' gradients is, of the parameter with the largest."""
        sizes: dict[str, float] = {}
        for name, tensor in self.a.tensors.items():
            if name.startswith("gradient/"):
                size = tensor.norm / math.sqrt(math.prod(tensor.shape) or 1)
                module = name.rpartition(".")[0]
                sizes[module] = max(sizes.get(module, 0.0), size if math.isfinite(size) else 0.0)
        return sizes


def _relative_error(a: np.ndarray, b: np.ndarray, norm_a: float, norm_b: float, floor: float = 0.0) -> float:
    """Return |a - b| / |a| of the elements that were kept, or the norms' of all elements, whichever is larger."""
    if not (np.array_equal(np.isfinite(a), np.isfinite(b)) and math.isfinite(norm_a) == math.isfinite(norm_b)):
        return math.inf
    finite = np.isfinite(a)
    kept, others = a[finite].astype(np.float64), b[finite].astype(np.float64)
    share = math.sqrt(kept.size / max(a.size, 1))
    error = _share(float(np.linalg.norm(kept - others)), max(float(np.linalg.norm(kept)), floor * share))
    norm_error = _share(abs(norm_a - norm_b), max(norm_a, floor)) if math.isfinite(norm_a) else 0.0
    return max(error, norm_error)


def _share(difference: float, of: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / of if of else math.inf
