"""AdamW of many tensors at once, which honours the loss scale and the flag of a skipped update on the device.

torch_npu's `_fused_adamw_` takes both and looks at neither (op-plugin, FusedAdamWKernelNpuOpApi.cpp): gradients that
are not finite would reach the weights, and scaled ones be taken as they are, without a word. Here each tensor and its
moments are put back where the flag is set: the host waits for nothing, at the price of passing over them again. Who has
rather one wait a step gives --optimizer_args fused=False.

npu_apply_adam_w is the same kernel with the powers of beta as numbers of the host, which cannot know how many updates
were skipped; and `_fused_adam_` (without W) runs on the CPU before Ascend 950. So neither is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

CHOICE = (
    "optimizer: torch's fused AdamW, skipped updates decided on the device; NpuFusedAdamW, the other one here, makes the "
    "host wait once a step and takes no bf16"
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
    for place, param in enumerate(params):
        highest = max_exp_avg_sqs[place : place + 1]
        changed = [param, exp_avgs[place], exp_avg_sqs[place], *highest]
        before = [each.clone() for each in changed]
        own = ([each] for each in (param, grads[place], exp_avgs[place], exp_avg_sqs[place]))
        upstream(*own, highest, [state_steps[place]], **settings)
        for each, kept in zip(changed, before):
            torch.where(skip, kept, each, out=each)


def why_not(params: Tensors, *others: Any, **settings: Any) -> str | None:
    """Say why the operator cannot take these, or None where it can."""
    if isinstance(settings.get("lr"), torch.Tensor):
        return "the rate is a tensor"
    dtypes = {each.dtype for each in params}
    if not dtypes <= {torch.float16, torch.bfloat16, torch.float32}:
        return f"{dtypes}"
    return None
