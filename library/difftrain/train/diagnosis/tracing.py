"""--trace: what every module read, made and handed back in chosen steps, a file a step and rank.

That is the trained network, and of the VAE and frozen text encoders what a step runs: cached ones are not called.

A step is traced on one device and on another, and `difftrain compare --trace A B` names the first module at which they
part (report/trace.py reads the files; docs/trace.md describes them).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch

import difftrain
from difftrain.config.digest import digest
from difftrain.config.schema.outputs import step_ranges
from difftrain.config.spellings.spelling import option
from difftrain.engine.half_precision import precision_of
from difftrain.io.files import write_bytes
from difftrain.report.trace import FOLDER, FORMAT, file_name
from difftrain.train.diagnosis.module_calls import ModuleCalls

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.config import TrainConfig
    from difftrain.contracts import Batch
    from difftrain.device import Device
    from difftrain.distributed.ranks import Ranks
    from difftrain.report.clock import Clock
    from difftrain.train.state import Position, TrainedModel

log = logging.getLogger("difftrain")
LARGEST = 16384  # elements of a tensor that are written; of a larger one every so many


class Tracing:
    """Observe the steps that [logging] trace names, and write what was seen behind each of them."""

    def __init__(self, cfg: TrainConfig, model: TrainedModel, device: Device, ranks: Ranks, clock: Clock) -> None:
        self._cfg, self._model, self._device, self._ranks, self._clock = cfg, model, device, ranks, clock
        self._steps = step_ranges(cfg.logging.trace or "")
        self._seen: ModuleCalls[TensorSample] | None = None

    def before_training(self, at: Position) -> None:
        """Look at the first step of the session, where it is to be traced; say which steps it will not reach."""
        left = range(at.step + 1, at.step + at.steps_left + 1)
        if self._steps and not any(max(trace.start, left.start) < min(trace.stop, left.stop) for trace in self._steps):
            steps = f"{left.start} to {left.stop - 1}" if left else "no step"
            log.warning(
                f"{option('logging.trace', self._cfg.logging.trace)}: this session runs {steps}: nothing is traced"
            )
        self._arm(at.step + 1)

    def after_step(self, at: Position) -> None:
        """Write the step that was traced, and look at the next one, where it is to be."""
        if self._seen is not None:
            with self._clock.paused("tracing"):
                self._write(at.step, self._seen)
        self._arm(at.step + 1)

    def _arm(self, step: int) -> None:
        traced = any(step in steps for steps in self._steps)
        if traced or self._seen is not None:
            parts = self._model.parts
            self._seen = ModuleCalls(parts.root, sample, parts.frozen) if traced else None
            self._model.engine.observe(self._seen)

    def _write(self, step: int, seen: ModuleCalls[TensorSample]) -> None:
        """Write this rank's file; where the disk will not have it, say so and go on."""
        folder = self._cfg.output_dir / FOLDER
        path = folder / file_name(step, self._ranks.rank)
        tensors = named(seen, parameters=self._ranks.rank == 0)

        # --- what it is a trace of
        metadata = {
            "format": str(FORMAT),
            "step": str(step),
            "rank": str(self._ranks.rank),
            "ranks": str(self._ranks.size),
            "micro_batches": str(len(seen.batches)),
            "family": self._model.family.name,
            "model": outline(self._model.parts.root),
            "dtype": str(next(self._model.parts.root.parameters()).dtype).removeprefix("torch."),
            "precision": precision_of(self._cfg.training),
            "loss_scale": repr(seen.scale),
            "config": digest(self._cfg, self._model.engine.dp_size),
            "device": self._device.kind,
            "torch": torch.__version__,
            "difftrain": difftrain.__version__,
            "records": json.dumps([_records(batch) for batch in seen.batches]),
            "blocks": json.dumps([name for name, _ in self._model.family.units(self._model.parts)]),
            "calls": json.dumps([asdict(call) for call in seen.calls]),
            "tensors": json.dumps({name: traced.entry() for name, traced in tensors.items()}),
        }

        # --- the file
        try:
            folder.mkdir(parents=True, exist_ok=True)
            content = {name: traced.values for name, traced in tensors.items()}
            write_bytes(path, safetensors.torch.save(content, metadata))
        except OSError as error:  # a full disk: training goes on, as behind an export
            log.error("the trace of step %d was not written: %s: %s; the run continues", step, path, error.strerror)
            return
        if self._ranks.is_logger:
            log.info("trace of step %d: %s", step, Path(FOLDER) / path.name)


# --- What is kept of a tensor


@dataclass(frozen=True)
class TensorSample:
    """Elements of a tensor, fp32 on the host, and what the whole of it is. values: every stride-th, rows first."""

    dtype: str
    shape: tuple[int, ...]
    stride: int
    norm: float  # of all elements, fp32
    values: Tensor

    def over(self, scale: float) -> TensorSample:
        """Return a gradient without the loss scale, which is a power of two."""
        if scale == 1.0:
            return self
        return TensorSample(self.dtype, self.shape, self.stride, self.norm / scale, self.values / scale)

    def entry(self) -> dict[str, object]:
        """Return what the header says of it; a norm that is no number as text, for JSON has none."""
        norm = self.norm if math.isfinite(self.norm) else str(self.norm)
        return {"dtype": self.dtype, "shape": self.shape, "stride": self.stride, "norm": norm}


def sample(tensor: Tensor) -> TensorSample:
    """Keep all of a small tensor, and the same elements of a large one wherever it is computed."""
    shape = tuple(tensor.shape)
    stride = stride_of(shape)
    flat = tensor.reshape(-1)
    real = flat if flat.is_floating_point() else flat.float()
    norm = torch.linalg.vector_norm(real, dtype=torch.float32)
    values = real[::stride].to("cpu", torch.float32).clone()  # of a tensor on the host nothing else is a copy
    return TensorSample(str(tensor.dtype).removeprefix("torch."), shape, stride, float(norm), values)


def stride_of(shape: tuple[int, ...], largest: int = LARGEST) -> int:
    """Return the distance between elements that are kept, prime to every side: no channel is always passed over."""
    stride = max(1, math.ceil(math.prod(shape) / largest))
    while any(math.gcd(stride, side) > 1 for side in shape if side > 1) and stride > 1:
        stride += 1
    return stride


def named(seen: ModuleCalls[TensorSample], *, parameters: bool) -> dict[str, TensorSample]:
    """Return everything under its name in the file. parameters: their gradients too, which all ranks have alike."""

    def under(prefix: str, samples: Mapping[str, TensorSample]) -> Iterator[tuple[str, TensorSample]]:
        return ((f"{prefix}/{name}", traced) for name, traced in samples.items())

    tensors = dict(under("forward", seen.values))
    tensors |= {name: traced.over(seen.scale) for name, traced in under("backward", seen.gradients)}
    if parameters:
        tensors |= {name: traced.over(seen.scale) for name, traced in under("gradient", seen.parameters)}
    for micro, (targets, terms) in enumerate(zip(seen.targets, seen.terms)):
        tensors |= dict(under(f"target/{micro}", targets)) | dict(under(f"loss/{micro}", terms))
    return tensors


# --- What two traces must have in common


def outline(root: nn.Module) -> str:
    """Return a hash of the names and shapes of a network's parameters."""
    text = json.dumps(sorted((name, list(parameter.shape)) for name, parameter in root.named_parameters()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _records(batch: Batch) -> str:
    """Return a hash of which samples a micro batch holds, in which order."""
    keys = b"".join(batch.keys) + batch.occurrence.numpy().tobytes()
    return hashlib.blake2b(keys, digest_size=16).hexdigest()
