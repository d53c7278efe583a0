"""Whether a device computes what it should, before anybody asks how fast: attention, precisions, losses of steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from plain_loops import PlainLoop
from torch import Tensor
from workload import Case, EngineStep, Model

from difftrain.contracts import Batch
from difftrain.device import Device, attention, choose

STEPS = 6  # of each correctness check
# relative error of attention: what rounding of the inputs and of the output to this dtype costs, and some
ATTENTION_LIMIT = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# relative difference of step losses, as the project states them
LOSS_LIMIT = {"no": 1e-4, "fp16": 2e-2, "bf16": 2e-2}


def check_attention(device: Device, rehearse: bool) -> list[dict[str, Any]]:
    """Compare outputs and gradients with softmax(q k^T / sqrt(d)) v in fp32, for SDXL's shapes."""
    small = (1, 2, 64, 64, 16) if rehearse else None
    shapes = {
        "self, 64 x 64": small or (2, 10, 4096, 4096, 64),
        "self, 32 x 32": small or (2, 20, 1024, 1024, 64),
        "text, 64 x 64": (1, 2, 64, 77, 16) if rehearse else (2, 10, 4096, 77, 64),
    }
    rows = []
    for dtype, limit in ATTENTION_LIMIT.items():
        for name, (batch, heads, queries, keys, width) in shapes.items():
            for masked in (False, True):
                draw = torch.Generator().manual_seed(queries + keys + masked)
                q, k, v, grad = (
                    torch.randn(batch, heads, n, width, generator=draw).to(device.torch_device)
                    for n in (queries, keys, keys, queries)
                )
                keep = (torch.rand(queries, keys, generator=draw) < 0.8).to(device.torch_device) if masked else None
                error = _attention_error(q, k, v, grad, keep, dtype)
                label = f"attention {name}{', masked' if masked else ''}, {str(dtype).removeprefix('torch.')}"
                rows.append({"check": label, "error": error, "limit": limit, "passed": error <= limit})
    return rows


def _attention_error(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, keep: Tensor | None, dtype: torch.dtype) -> float:
    """Return the largest relative error of the output and of the three gradients."""

    def run(function: Any, dtype: torch.dtype) -> list[Tensor]:
        # the reference sees the rounded inputs: their rounding is not the kernel's fault
        leaves = [each.to(rounded).to(dtype).requires_grad_() for each in (q, k, v)]
        out = function(*leaves)
        out.backward(grad.to(rounded).to(dtype))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    def mathematics(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if keep is not None:
            scores = scores.masked_fill(~keep, float("-inf"))
        return scores.softmax(-1) @ v

    rounded = dtype
    found = run(lambda q, k, v: attention(q, k, v, keep), dtype)
    expected = run(mathematics, torch.float32)
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, expected))


def check_steps(family: str, device: Device) -> list[dict[str, Any]]:
    """Train a family's tiny size on the CPU, here, in every precision and by a hand-written loop; compare the losses."""
    case = Case(family)
    reference = Model(case, choose("cpu"))
    weights = {name: value.clone() for name, value in reference.root.state_dict().items()}
    run = EngineStep(case, reference)
    batches = [run.batch(seed) for seed in range(STEPS)]
    on_cpu = [run.loss(batch) for batch in batches]
    run.close()

    def losses(precision: str) -> tuple[list[float], int, bool]:
        model = started(replace(case, precision=precision), device, weights)
        run = EngineStep(replace(case, precision=precision), model)
        stats = [run.step(batch) for batch in batches]
        moved = _moved(model.root, weights)
        run.close()
        return [float(each.sums["loss"]) for each in stats], sum(int(each.skipped) for each in stats), moved

    in_fp32, _, _ = losses("no")
    by_hand = PlainLoop(case, started(case, device, weights))
    rows = [
        same(f"{family}: engine against the hand-written loop, fp32", in_fp32, _of(by_hand, batches), LOSS_LIMIT["no"]),
        same(f"{family}: this device against the CPU, fp32", in_fp32, on_cpu, LOSS_LIMIT["no"]),
    ]
    for precision in ("bf16", "fp16"):
        made, skipped, moved = losses(precision)
        rows.append(same(f"{family}: {precision} against fp32", made, in_fp32, LOSS_LIMIT[precision]))
        fine = all(map(math.isfinite, made)) and moved and skipped <= STEPS // 2
        rows.append({"check": f"{family}: {precision}: finite, every weight moved", "skipped": skipped, "passed": fine})
    return rows


def started(case: Case, device: Device, weights: dict[str, Tensor]) -> Model:
    """Return a model that begins with given weights."""
    model = Model(case, device)
    model.root.load_state_dict(weights)
    return model


def same(name: str, losses: list[float], expected: list[float], limit: float) -> dict[str, Any]:
    """Compare the losses of two runs."""
    error = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    return {"check": name, "error": error, "limit": limit, "passed": error <= limit}


def _of(loop: PlainLoop, batches: list[Batch]) -> list[float]:
    made = [loop.loss(batch) for batch in batches]
    loop.close()
    return made


def _moved(root: Any, before: dict[str, Tensor]) -> bool:
    """Tell whether every trained weight that a loss reaches has changed, and all are finite."""
    trained = [(name, each.detach().cpu()) for name, each in root.named_parameters() if each.requires_grad]
    return all(bool(each.isfinite().all()) and not torch.equal(each, before[name]) for name, each in trained)
