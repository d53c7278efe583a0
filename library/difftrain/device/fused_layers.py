"""Patches of diffusers' gated layers, norms and rotary embeddings, and of fused AdamW: they take the kernels of this package.

Only forward functions change: modules keep their classes, parameters and names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from difftrain.device.counters import count
from difftrain.device.patches import PatchHook, Undo

if TYPE_CHECKING:
    from torch import Tensor


def _geglu(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Project and gate; further arguments are deprecated upstream, and ignored there too."""
    return geglu(self.proj(hidden_states))


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    out = rms_norm(hidden_states, self.weight, self.eps)
    return out if self.bias is None or self.weight is None else out + self.bias


def _rotary(
    x: Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1, sequence_dim: int = 2
) -> Tensor:
    """Rotate by real tables; the complex form, and what is refused, stay upstream's."""
    if not use_real and isinstance(freqs_cis, tuple):  # where upstream has complex tables
        return rotate_pairs(x, freqs_cis)
    if not use_real or use_real_unbind_dim not in (-1, -2) or sequence_dim not in (1, 2):
        return _upstream_rotary(x, freqs_cis, use_real, use_real_unbind_dim, sequence_dim)
    where = (None, None) if sequence_dim == 2 else (None, slice(None), None)
    cos, sin = (table[where].to(x.device) for table in freqs_cis)
    return rotary(x, cos, sin, interleaved=use_real_unbind_dim == -1)


def _upstream_rotary(*args: Any) -> Any:
    return _kept["apply_rotary_emb"](*args)


_kept: dict[str, Callable[..., Any]] = {}


def _asks_if_importable(module: str, name: str) -> bool:
    """Tell whether a class's forward, as it came, decides by whether torch_npu can be imported."""
    from importlib import import_module

    forward = getattr(import_module(module), name).forward
    return "is_torch_npu_available" in forward.__code__.co_names


def _put_forward(module: str, name: str, forward: Callable[..., Any]) -> Undo:
    from importlib import import_module

    kind = getattr(import_module(module), name)
    before = kind.forward
    kind.forward = forward

    def undo() -> None:
        kind.forward = before

    return undo


def _rotates_plainly() -> bool:
    from diffusers.models import embeddings

    return "npu_rotary_mul" not in embeddings.apply_rotary_emb.__code__.co_names


def _put_rotary() -> Undo:
    """Replace the function everywhere: model files import it by name."""
    from diffusers.models import embeddings

    upstream = _kept["apply_rotary_emb"] = embeddings.apply_rotary_emb
    _replace("apply_rotary_emb", upstream, _rotary)
    return lambda: _replace("apply_rotary_emb", _rotary, upstream)


def _replace(name: str, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    for key, module in list(sys.modules.items()):
        if key.startswith("diffusers.") and vars(module).get(name) is old:
            setattr(module, name, new)


def _put_adamw() -> Undo:
    torch._fused_adamw_ = adamw  # type: ignore[assignment]

    def undo() -> None:
        torch._fused_adamw_ = upstream  # type: ignore[assignment]

    return undo


def _ignores_flag() -> bool:
    """Try it: an update with the flag set must change nothing."""
    device = torch.device("npu", torch.npu.current_device())  # type: ignore[attr-defined]
    param, grad, first, second = (torch.ones(1, device=device) for _ in range(4))
    step, flag = torch.ones((), device=device), torch.ones((), device=device)
    settings = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
    upstream([param], [grad], [first], [second], [], [step], lr=0.1, found_inf=flag, grad_scale=None, **settings)
    return param.item() != 1.0


_ACTIVATIONS, _NORMS = "diffusers.models.activations", "diffusers.models.normalization"
GEGLU = PatchHook(
    lambda: _asks_if_importable(_ACTIVATIONS, "GEGLU"), lambda: _put_forward(_ACTIVATIONS, "GEGLU", _geglu)
)
RMS_NORM = PatchHook(lambda: _asks_if_importable(_NORMS, "RMSNorm"), lambda: _put_forward(_NORMS, "RMSNorm", _rms_norm))
ROTARY = PatchHook(_rotates_plainly, _put_rotary)
FUSED_ADAMW = PatchHook(_ignores_flag, _put_adamw)


# --- Fused kernels where they pay: one function each, chosen by the tensor it is given
# Where the NPU's documented limits (spec of CANN 8) take the tensors, its fused operator runs; everywhere else the plain
# version, which is bit by bit what diffusers computes. Nothing here looks at what is installed, and nothing waits for the
# host. All are differentiable.


# --- AdamW of many tensors at once, which honours the loss scale and the flag of a skipped update on the device
# torch_npu's `_fused_adamw_` takes both and looks at neither (op-plugin, FusedAdamWKernelNpuOpApi.cpp): gradients that
# are not finite would reach the weights, and scaled ones be taken as they are, without a word. Here each tensor and its
# moments are put back where the flag is set: the host waits for nothing, at the price of passing over them again. Who has
# rather one wait a step gives --optimizer_args fused=False.
#
# npu_apply_adam_w is the same kernel with the powers of beta as numbers of the host, which cannot know how many updates
# were skipped; and `_fused_adam_` (without W) runs on the CPU before Ascend 950. So neither is used.


CHOICE = (
    "optimizer: torch's fused AdamW, skipped updates decided on the device; NpuFusedAdamW, the alternative, makes the "
    "host wait once per step and does not support bf16"
)
upstream: Callable[..., None] = torch._fused_adamw_
Tensors = Sequence["Tensor"]


def npu_adamw(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    state_steps: Tensors,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **settings: Any,
) -> None:
    """Update in place, as torch's function of this name does; with found_inf nothing changes."""
    if grad_scale is not None:
        torch._foreach_div_(list(grads), grad_scale)
    if found_inf is None:
        upstream(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, **settings)
        return

    # tensor by tensor: only one's old values are in memory at a time
    skip = found_inf.reshape(()).bool()
    for index, param in enumerate(params):
        highest = max_exp_avg_sqs[index : index + 1]
        changed = [param, exp_avgs[index], exp_avg_sqs[index], *highest]
        before = [tensor.clone() for tensor in changed]
        own = ([tensor] for tensor in (param, grads[index], exp_avgs[index], exp_avg_sqs[index]))
        upstream(*own, highest, [state_steps[index]], **settings)
        for tensor, kept in zip(changed, before):
            torch.where(skip, kept, tensor, out=tensor)


def why_not(params: Tensors, *remaining: Any, **settings: Any) -> str | None:
    """Say why the operator cannot take these, or None where it can."""
    if isinstance(settings.get("lr"), torch.Tensor):
        return "the rate is a tensor"
    dtypes = {param.dtype for param in params}
    if not dtypes <= {torch.float16, torch.bfloat16, torch.float32}:
        return f"{dtypes}"
    return None


_HALF = (torch.float16, torch.bfloat16)
_TAKEN = (*_HALF, torch.float32)
_EXACT_GELU = 0  # npu_geglu's own default, 1, is the tanh form: 6.6e-4 off
_MOST_ROTARY_DIM = 896
_MOST_ROTARY_SIZE = 1000
_ALIGNED = 8  # fp32 elements in 32 bytes


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """Return x / rms(x) times weight, over the last dimension, computed in fp32.

    Shapes: x (..., D), weight (D) -> (..., D). The result is of the weight's dtype, of x's where there is no weight.
    """
    return _run("rms_norm", x, weight, eps)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate pairs of x, in fp32: neighbours where interleaved, else one of each half.

    Shapes: x (B, N, S, D) or (B, S, N, D); cos and sin of four dimensions, broadcast to x. Returns x's dtype.
    """
    return _run("rotary", x, cos, sin, interleaved)


def real_tables(freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of complex rotary tables, the same for both numbers of a pair.

    Shapes: (..., D / 2) complex -> (..., D) fp32 each.
    """
    return freqs.real.float().repeat_interleave(2, dim=-1), freqs.imag.float().repeat_interleave(2, dim=-1)


def rotate_pairs(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate neighbours by real_tables, as multiplying by the complex ones does.

    Shapes: x (B, S, N, D), tables (S, D), or (B, S, D) where samples have positions of their own. Returns x's dtype; in
    fp32 inside, gradients too.
    """
    (cos, sin), wide = tables, x.float()
    if cos.ndim == 2:
        return rotary(wide, cos[None, :, None], sin[None, :, None], interleaved=True).to(x.dtype)
    # the operator wants one table for all samples: theirs are laid one behind another
    cos, sin = (table.flatten(0, 1)[None, :, None] for table in (cos, sin))
    return rotary(wide.flatten(0, 1)[None], cos, sin, interleaved=True)[0].unflatten(0, x.shape[:2]).to(x.dtype)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(a) b for the halves a, b of the last dimension; diffusers' SwiGLU has them the other way round."""
    return _run("swiglu", x)


def geglu(x: Tensor) -> Tensor:
    """Return a gelu(b) for the halves a, b of the last dimension, with the exact GELU."""
    return _run("geglu", x)


def adamw(params: Sequence[Tensor], *remaining: Sequence[Tensor], **settings: Any) -> None:
    """Update in place, with the arguments of torch._fused_adamw_; found_inf and grad_scale are honoured."""
    return _run("adamw", params, *remaining, **settings)


# ------------------------------------------------------------------ plain versions


def plain_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    out = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return out.to(x.dtype)
    return (out.to(weight.dtype) if weight.dtype in _HALF else out) * weight


def plain_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-imaginary, real], dim=-1).flatten(-2)
    else:
        real, imaginary = x.unflatten(-1, (2, -1)).unbind(-2)
        turned = torch.cat([-imaginary, real], dim=-1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def plain_swiglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b


def plain_geglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return a * F.gelu(b)


# ------------------------------------------------------------------ the NPU's


def _npu_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype = weight.dtype if x.dtype == weight.dtype else torch.float32  # the operator wants one dtype
    return _npu().npu_rms_norm(x.to(dtype), weight.to(dtype), epsilon=eps)[0].to(weight.dtype)


def _npu_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    mode = "interleave" if interleaved else "half"
    return _npu().npu_rotary_mul(x.float(), cos.float(), sin.float(), mode).to(x.dtype)


def _npu_swiglu(x: Tensor) -> Tensor:
    return _npu().npu_swiglu(x, -1)


def _npu_geglu(x: Tensor) -> Tensor:
    return _npu().npu_geglu(x, -1, _EXACT_GELU)[0]


def _npu() -> Any:
    import torch_npu

    return torch_npu


# ------------------------------------------------------------------ when they apply


def _not_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> str | None:
    if weight is None:
        return "the operator needs a weight"
    if weight.dtype not in _TAKEN:
        return f"weight of {weight.dtype}"
    if not 2 <= x.ndim <= 8 or weight.shape != x.shape[-1:]:
        return f"shapes {tuple(x.shape)} and {tuple(weight.shape)}: 2 to 8 dimensions, weight as the last"
    return _not_taken(x)


def _not_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> str | None:
    if x.ndim != 4 or cos.ndim != 4 or cos.shape != sin.shape:
        return "x, cos and sin have four dimensions, cos and sin the same"
    if cos.requires_grad or sin.requires_grad:
        return "cos and sin are trained"
    batch, second, third, dim = x.shape
    if dim % _ALIGNED or dim >= _MOST_ROTARY_DIM or cos.shape[-1] != dim:
        return f"head size {dim}: a multiple of {_ALIGNED} below {_MOST_ROTARY_DIM}"
    sizes = tuple(cos.shape[:3])
    layouts = {"BNSD": [(1, 1, third)], "BSND": [(1, second, 1)]}
    if not interleaved:
        layouts["BNSD"] += [(batch, 1, third), (batch, second, third)]
        layouts["BSND"] += [(batch, second, 1)]
    fitting = [heads for name, heads in (("BNSD", second), ("BSND", third)) if sizes in layouts[name]]
    if not fitting:
        return f"cos of shape {tuple(cos.shape)} for x of {tuple(x.shape)}"
    size = batch * max(fitting) if interleaved else max(batch, *fitting)
    return _not_taken(x) if size < _MOST_ROTARY_SIZE else f"batch {batch} and {max(fitting)} heads"


def _not_halves(x: Tensor) -> str | None:
    if not 1 <= x.ndim <= 8 or x.shape[-1] % 2:
        return f"shape {tuple(x.shape)}: 1 to 8 dimensions, the last even"
    return _not_taken(x)


def _not_taken(x: Tensor) -> str | None:
    if x.dtype not in _TAKEN:
        return f"{x.dtype}"
    return None if x.numel() else "no elements"


class Kernel(NamedTuple):
    """A fused function, the plain version, and why the fused one cannot take some tensors (None where it can)."""

    fused: Callable[..., Any]
    plain: Callable[..., Any]
    why_not: Callable[..., str | None]


REGISTRY: dict[str, Kernel] = {
    "rms_norm": Kernel(_npu_rms_norm, plain_rms_norm, _not_rms_norm),
    "rotary": Kernel(_npu_rotary, plain_rotary, _not_rotary),
    "swiglu": Kernel(_npu_swiglu, plain_swiglu, _not_halves),
    "geglu": Kernel(_npu_geglu, plain_geglu, _not_halves),
    "adamw": Kernel(npu_adamw, upstream, why_not),
}


def _run(name: str, x: Tensor | Sequence[Tensor], *remaining: Any, **settings: Any) -> Any:
    kernel = REGISTRY[name]
    first = x if isinstance(x, torch.Tensor) else x[0]
    if first.device.type == "npu" and kernel.why_not(x, *remaining, **settings) is None:
        count(f"{name} fused")
        return kernel.fused(x, *remaining, **settings)
    count(f"{name} plain")
    return kernel.plain(x, *remaining, **settings)
