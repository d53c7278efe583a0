"""Tokens through the experts that a gate chose for them, in modules of diffusers whose host waits for each of them.

Tokens are put in the order of their experts, and all experts are one grouped product: the host never knows how many
tokens an expert has. In fp32 these are the bits of diffusers' own loop, in training and in evaluation; in half
precision those of its evaluation.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from difftrain.device.patches import PatchHook, Undo
from difftrain.device.quantised import QuantisedLayer

if TYPE_CHECKING:
    from torch import Tensor, nn


def routed(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """Sum what the chosen experts make of each token. Shapes: x (T, D), weights and chosen (T, K) -> (T, D)."""
    dtype = _computed_in(x)
    if not _is_grouped(x, dtype) or _are_adapted(experts):
        return _all_of_all(x, weights, chosen, experts)
    top_k = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)  # by expert, tokens of one as they come
    counts = (chosen.flatten()[:, None] == torch.arange(len(experts), device=x.device)).sum(0)
    out = _of_groups(x.index_select(0, order // top_k).to(dtype), counts.cumsum(0).to(torch.int32), experts)
    out = (out * weights.flatten().index_select(0, order)[:, None]).to(out.dtype)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return out.index_select(0, back).unflatten(0, (-1, top_k)).sum(1)


def _computed_in(x: Tensor) -> torch.dtype:
    """Return what layers compute in; nothing is computed on the meta device."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if not x.is_meta and torch.is_autocast_enabled(kind) else x.dtype


def _is_grouped(x: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether there is a grouped product: not on an NPU, and to compilers torch 2.13 gives that of bf16 alone."""
    return x.device.type != "npu" and (dtype == torch.bfloat16 or not torch.compiler.is_compiling())


def _are_adapted(experts: nn.ModuleList) -> bool:
    """Tell whether layers of experts are wrapped, as PEFT does: a product of their weights alone would leave adapters out."""
    return any(hasattr(layer, "base_layer") for expert in experts for layer in expert.children())


def _of_groups(x: Tensor, ends: Tensor, experts: nn.ModuleList) -> Tensor:
    """Run tokens that lie in the order of their experts. ends: of each expert's rows, int32 on the device."""

    def project(y: Tensor, name: str) -> Tensor:
        own: list[Any] = [expert.get_submodule(name) for expert in experts]
        few_bits = [isinstance(layer, QuantisedLayer) for layer in own]
        if all(few_bits):
            return _FewBits.apply(y, ends, own)  # type: ignore[no-any-return]
        layers = [layer.wide(x.dtype) if few else layer.weight.to(x.dtype) for layer, few in zip(own, few_bits)]
        if x.is_meta:  # what counts operations: any expert has as many to do with these rows
            return F.linear(y, layers[0]) + 0 * sum(layer.sum() for layer in layers)
        return F.grouped_mm(y, torch.stack(layers).transpose(1, 2), offs=ends)

    return project(F.silu(project(x, "w1")) * project(x, "w3"), "w2")


class _FewBits(torch.autograd.Function):
    """The grouped product of frozen weights in few bits, which are made wide again for the backward pass, too."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, ends: Tensor, layers: Sequence[QuantisedLayer]) -> Tensor:
        ctx.save_for_backward(ends)
        ctx.layers = layers
        wide = torch.stack([layer.wide(y.dtype) for layer in layers])
        if y.is_meta:
            return F.linear(y, wide[0])
        return F.grouped_mm(y, wide.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        wide = torch.stack([layer.wide(grad.dtype) for layer in ctx.layers])
        if grad.is_meta:
            return grad @ wide[0], None, None
        return F.grouped_mm(grad, wide, offs=ctx.saved_tensors[0]), None, None


def _all_of_all(x: Tensor, weights: Tensor, chosen: Tensor, experts: nn.ModuleList) -> Tensor:
    """Run all tokens through all experts, where there is no grouped product: more work, and no wait either."""
    total: Tensor | None = None
    for number, expert in enumerate(experts):
        out = expert(x)
        out = (out * torch.where(chosen == number, weights, 0.0).sum(1, keepdim=True)).to(out.dtype)
        total = out if total is None else total + out
    assert total is not None
    return total


def _waits() -> bool:
    """Tell whether the module, as it came, counts the tokens of its experts on the host."""
    from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

    loop = getattr(MOEFeedForwardSwiGLU, "moe_infer", None)
    return loop is not None and "cpu" in inspect.unwrap(loop).__code__.co_names


def _put() -> Undo:
    from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

    kind: Any = MOEFeedForwardSwiGLU
    upstream = kind.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        """Shapes: (B, N, D) -> (B, N, D). The loss that would balance experts is left out, as diffusers leaves it out."""
        # flattened once for each reader, as there: gradients are summed in that order
        scores = F.linear(x.flatten(0, 1), self.gate.weight).softmax(dim=-1)
        weights, chosen = torch.topk(scores, self.num_activated_experts, dim=-1, sorted=False)
        return routed(x.flatten(0, 1), weights, chosen, self.experts).view(x.shape) + self.shared_experts(x)

    kind.forward = forward

    def undo() -> None:
        kind.forward = upstream

    return undo


ROUTED = PatchHook(_waits, _put)
