"""What a device computes, against references in fp64 on the host: attention, fused kernels, overflow, mixed precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from difftrain.contracts import ConfigFault
from difftrain.device.health import Context, HealthFinding, Verdict

if TYPE_CHECKING:
    from torch import Tensor

# The largest error of an output and of a gradient, for operands of size one.
BOUNDS = {"fp32": 2e-3, "fp16": 8e-3, "bf16": 6e-2}
_REAL_FP32 = 1e-4  # above it, matrix units round fp32 to TF32 or HF32
_REPORT = "report it with the output of difftrain doctor --json; until then train without --enable_npu_flash_attention"


class _Case(NamedTuple):
    """One call of attention. heads, kv_heads, queries, keys: sizes that are multiples of nothing."""

    name: str
    queries: int = 130
    keys: int = 130
    kv_heads: int = 4
    masked: bool = False
    causal: bool = False


_CASES = (
    _Case("no mask"),
    _Case("bool mask", masked=True),
    _Case("causal", causal=True),
    _Case("77 keys", keys=77),
    _Case("grouped heads", kv_heads=2),
)


def attention(context: Context) -> Iterator[HealthFinding]:
    """Compare the attention that training uses, forwards and backwards, in each precision."""
    for name, dtype in _dtypes().items():
        errors, ways = {}, set()
        for number, case in enumerate(_CASES):
            try:
                errors[case.name], way = _attention_error(context, case, dtype, seed=number)
            except (RuntimeError, NotImplementedError) as error:
                text = next(iter(str(error).splitlines()), type(error).__name__)
                yield HealthFinding("wrong", f"attention in {name}, {case.name}: {text}", _REPORT, name)
                break
            ways.add(way)
        else:
            yield _attention_finding(context, name, dtype, errors, ways)


def _attention_finding(
    context: Context, name: str, dtype: Any, errors: dict[str, float], ways: set[str]
) -> HealthFinding:
    text = ", ".join(f"{error:.1e} ({case})" for case, error in errors.items())
    text = f"attention in {name}, {' and '.join(sorted(ways))}: max error vs fp64: {text}"
    if not all(error < BOUNDS[name] for error in errors.values()):  # a NaN is off too
        return HealthFinding("wrong", f"{text}; {BOUNDS[name]:.0e} is its rounding", _REPORT, name)
    if name == "fp32" and max(errors.values()) > _REAL_FP32:
        return HealthFinding(
            "note", f"{text}: TF32 or HF32, not fp32", "torch.set_float32_matmul_precision, if that matters", name
        )
    if context.device.kind == "npu" and ways != {"fused"}:
        return HealthFinding(
            "note", f"{text}; not fused, because {_why_not_fused(context, dtype)}", "train in bf16 or fp16", name
        )
    return HealthFinding("ok", text, about=name)


def _dtypes() -> dict[str, Any]:
    import torch

    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _attention_error(context: Context, case: _Case, dtype: Any, seed: int) -> tuple[float, str]:
    """Return the largest error of outputs and gradients of one case, and the way it took: fused or sdpa."""
    import torch

    from difftrain.device import attention as attend
    from difftrain.device import counting

    generator = torch.Generator().manual_seed(seed)

    def rounded(heads: int, length: int) -> Tensor:
        return torch.randn(2, heads, length, 64, generator=generator).to(dtype).double()

    operands = rounded(4, case.queries), rounded(case.kv_heads, case.keys), rounded(case.kv_heads, case.keys)
    upstream = rounded(4, case.queries)
    mask = None
    if case.masked:
        mask = torch.rand(2, 1, case.queries, case.keys, generator=generator) > 0.3
        # a row without any key has no softmax
        mask[..., 0] = True
    # fp64 on the host, from operands that the tested dtype holds exactly
    exact = _with_gradients(lambda q, k, v: reference(q, k, v, mask, case.causal), operands, upstream)
    device = context.device.torch_device
    operands_there = tuple(tensor.to(device, dtype) for tensor in (*operands, upstream))
    mask_there = None if mask is None else mask.to(device)
    with counting() as tally:
        result = _with_gradients(
            lambda q, k, v: attend(q, k, v, mask_there, case.causal), operands_there[:3], operands_there[3]
        )
    apart = [float((a.cpu().double() - b).abs().max()) for a, b in zip(result, exact)]
    return max(apart), "fused" if tally["fused"] else "sdpa"


def _with_gradients(call: Any, operands: tuple[Tensor, ...], upstream: Tensor) -> list[Tensor]:
    leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    out = call(*leaves)
    out.backward(upstream)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Attend by the formula, in the operands' precision. mask: True = keep."""
    import torch

    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool)
    keep = keep.tril() if causal else keep
    keep = keep & mask if mask is not None else keep
    return scores.masked_fill(~keep, float("-inf")).softmax(-1) @ v


def _why_not_fused(context: Context, dtype: Any) -> str:
    import torch

    from difftrain.device import why_not_fused

    query = torch.empty(2, 4, 130, 64, dtype=dtype, device=context.device.torch_device)
    return why_not_fused(query, query, query) or "some of its cases are outside the operator's limits"


def kernels(context: Context) -> Iterator[HealthFinding]:
    """Compare every fused kernel with its plain version in fp64 on the host."""
    from difftrain.device import counters
    from difftrain.device import fused_layers as table

    for name in table.REGISTRY:
        for precision, dtype in _dtypes().items():
            with counters.counting() as ways:
                error = _adamw_error(context, dtype) if name == "adamw" else _kernel_error(context, name, dtype)
            way = "fused" if ways[f"{name} fused"] else "plain"
            text, about = f"{name} in {precision}, {way}: max error vs fp64 {error:.1e}", f"{name}_{precision}"
            if error < BOUNDS[precision]:
                yield HealthFinding("ok", text, about=about)
            else:
                yield HealthFinding("wrong", f"{text}; {BOUNDS[precision]:.0e} is its rounding", _REPORT, about)


def _kernel_error(context: Context, name: str, dtype: Any) -> float:
    import torch

    from difftrain.device import fused_layers as table

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 4, 33, 64, generator=generator).to(dtype).double()
    angle = torch.rand(1, 1, 33, 32, generator=generator).mul(6.0).repeat_interleave(2, dim=-1)
    operands: dict[str, tuple[Any, ...]] = {
        "rms_norm": (x, torch.rand(64, generator=generator).to(dtype).double(), 1e-6),
        "rotary": (x, angle.cos().double(), angle.sin().double()),
        "swiglu": (x,),
        "geglu": (x,),
    }
    settings = {"interleaved": True} if name == "rotary" else {}
    # the plain formula in fp64 on the host
    exact = table.REGISTRY[name].plain(*operands[name], **settings)
    operands_there = [
        tensor.to(context.device.torch_device, dtype) if isinstance(tensor, torch.Tensor) else tensor
        for tensor in operands[name]
    ]
    result = getattr(table, name)(*operands_there, **settings)
    return float((result.cpu().double() - exact).abs().max())


def _adamw_error(context: Context, dtype: Any) -> float:
    """Return the error of one update, or infinity where an update that is to be skipped changes a weight."""
    import torch

    from difftrain.device import fused_layers as table

    generator = torch.Generator().manual_seed(2)
    weight, grad = (torch.randn(65, generator=generator).to(dtype) for _ in range(2))
    rate, decay, beta1, beta2, eps = 0.01, 0.1, 0.9, 0.99, 1e-8
    # one update from zero moments: the means, corrected for their start, are the gradient and its square
    exact = weight.double() * (1 - rate * decay) - rate * grad.double() / (grad.double().abs() + eps)

    def update(skipped: bool) -> Tensor:
        at = context.device.torch_device
        here = weight.to(at, copy=True)
        moments = [[torch.zeros_like(here)] for _ in range(2)]
        step = [torch.ones((), device=at)]
        flag = torch.full((), float(skipped), device=at)
        table.adamw(
            [here], [grad.to(at, copy=True)], *moments, [], step, lr=rate, beta1=beta1, beta2=beta2, weight_decay=decay,
            eps=eps, amsgrad=False, maximize=False, grad_scale=None, found_inf=flag,
        )  # fmt: skip
        return here.cpu()

    if not torch.equal(update(skipped=True), weight):
        return float("inf")
    return float((update(skipped=False).double() - exact).abs().max())


def overflow(context: Context) -> Iterator[HealthFinding]:
    """Look whether fp16 overflows to INF and an impossible result is NaN, which loss scaling depends on."""
    import torch

    from difftrain.device.npu_settings import check_device

    at = context.device.torch_device
    try:
        check_device(at)
    except ConfigFault as error:
        for fault in error.faults:
            yield HealthFinding("wrong", f"{fault.where}: {fault.what}", fault.remedy)
        return
    seen = torch.tensor([12.0, -1.0], dtype=torch.float16, device=at)
    large, impossible = float(seen.exp()[0]), float(seen.sqrt()[1])
    if large != float("inf") or impossible == impossible:
        what = f"in fp16, exp(12) is {large:g} and sqrt(-1) is {impossible:g}, not inf and nan"
        yield HealthFinding("wrong", what, "unset INF_NAN_MODE_ENABLE and INF_NAN_MODE_FORCE_DISABLE, or train in bf16")
    else:
        yield HealthFinding("ok", "fp16 overflows to inf, and what cannot be computed is nan: loss scaling sees it")


def precision(context: Context) -> Iterator[HealthFinding]:
    """Take a gradient in each mixed precision, with the loss scaling that training uses."""
    import torch

    for name in ("no", "bf16", "fp16"):
        verdict: Verdict = "wrong" if name == "no" else "note"
        remedy = "this device cannot train" if name == "no" else "train with another --mixed_precision"
        try:
            weight = torch.full((64, 64), 0.1, device=context.device.torch_device, requires_grad=True)
            with context.device.autocast(name):
                loss = (weight @ weight).float().mean()
            loss.backward()
            fine = weight.grad is not None and bool(torch.isfinite(weight.grad).all())
        except (RuntimeError, NotImplementedError) as error:
            text = next(iter(str(error).splitlines()), type(error).__name__)
            yield HealthFinding(verdict, f"--mixed_precision={name}: {text}", remedy, name)
            continue
        if fine:
            yield HealthFinding("ok", f"--mixed_precision={name} gives finite gradients", about=name)
        else:
            yield HealthFinding(verdict, f"--mixed_precision={name} gives non-finite gradients", remedy, name)
