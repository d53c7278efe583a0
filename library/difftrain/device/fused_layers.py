"""Patches of diffusers' gated layers, norms and rotary embeddings, and of fused AdamW: they take the kernels of this package.

Only forward functions change: modules keep their classes, parameters and names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from difftrain.device import adamw, kernels
from difftrain.device.patches import PatchHook, Undo

if TYPE_CHECKING:
    from torch import Tensor


def _geglu(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Project and gate; further arguments are deprecated upstream, and ignored there too."""
    return kernels.geglu(self.proj(hidden_states))


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    out = kernels.rms_norm(hidden_states, self.weight, self.eps)
    return out if self.bias is None or self.weight is None else out + self.bias


def _rotary(
    x: Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1, sequence_dim: int = 2
) -> Tensor:
    """Rotate by real tables; the complex form, and what is refused, stay upstream's."""
    if not use_real or use_real_unbind_dim not in (-1, -2) or sequence_dim not in (1, 2):
        return _upstream_rotary(x, freqs_cis, use_real, use_real_unbind_dim, sequence_dim)
    where = (None, None) if sequence_dim == 2 else (None, slice(None), None)
    cos, sin = (table[where].to(x.device) for table in freqs_cis)
    return kernels.rotary(x, cos, sin, interleaved=use_real_unbind_dim == -1)


def _upstream_rotary(*args: Any) -> Any:
    return _kept["apply_rotary_emb"](*args)


_kept: dict[str, Callable[..., Any]] = {}


def _asks_if_importable(module: str, name: str) -> bool:
    """Tell whether a class's forward, as it came, decides by whether torch_npu can be imported."""
    from importlib import import_module

    found = getattr(import_module(module), name).forward
    return "is_torch_npu_available" in found.__code__.co_names


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
    torch._fused_adamw_ = kernels.adamw  # type: ignore[assignment]

    def undo() -> None:
        torch._fused_adamw_ = adamw.upstream  # type: ignore[assignment]

    return undo


def _ignores_flag() -> bool:
    """Try it: an update with the flag set must change nothing."""
    device = torch.device("npu", torch.npu.current_device())  # type: ignore[attr-defined]
    param, grad, first, second = (torch.ones(1, device=device) for _ in range(4))
    step, flag = torch.ones((), device=device), torch.ones((), device=device)
    settings = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
    adamw.upstream([param], [grad], [first], [second], [], [step], lr=0.1, found_inf=flag, grad_scale=None, **settings)
    return param.item() != 1.0


_ACTIVATIONS, _NORMS = "diffusers.models.activations", "diffusers.models.normalization"
GEGLU = PatchHook(
    lambda: _asks_if_importable(_ACTIVATIONS, "GEGLU"), lambda: _put_forward(_ACTIVATIONS, "GEGLU", _geglu)
)
RMS_NORM = PatchHook(lambda: _asks_if_importable(_NORMS, "RMSNorm"), lambda: _put_forward(_NORMS, "RMSNorm", _rms_norm))
ROTARY = PatchHook(_rotates_plainly, _put_rotary)
FUSED_ADAMW = PatchHook(_ignores_flag, _put_adamw)
