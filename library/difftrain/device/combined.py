"""torch_npu's NpuFusedAdamW, made fit for gradients that are freed after each update.

It lays parameters, gradients and moments of a dtype out as one tensor each and goes over them with a dozen kernels in
all: few launches for many small parameters, and about three times the memory traffic of torch's fused AdamW. It counts
updates on the host, which must look once a step whether to skip, and takes no bf16.

The gradients that it meets first are what it reads for ever: where they are freed and made anew, as here and by torch's
own zero_grad, it trains on the first step's, without a word. So it gets tensors of its own, filled before each update;
DDP's buckets keep theirs.

apex (Ascend's build) has a class of this name too, which refuses to step unless apex.amp has wrapped model and optimizer.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from difftrain.device import patches

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = (torch.float32, torch.float16)


def why_not(parameters: list[Tensor]) -> str:
    """Say why these cannot be updated so; empty where they can."""
    for parameter in parameters:
        if parameter.device.type != "npu":
            return f"it updates on NPUs alone, and this run is on {parameter.device.type}"
        if parameter.dtype not in _DTYPES:
            return f"it takes fp32 and fp16, not {str(parameter.dtype).removeprefix('torch.')}"
    return ""


@functools.cache
def load() -> type[Optimizer]:
    """Return the class. Raises ImportError without torch_npu."""
    from torch_npu.optim import NpuFusedAdamW

    class CombinedAdamW(NpuFusedAdamW):
        """AdamW over combined tensors; its state is that of torch's, so checkpoints go from one to the other."""

        state_kind = f"{torch.optim.AdamW.__module__}.{torch.optim.AdamW.__name__}"

        def __init__(
            self,
            params: Any,
            lr: float = 1e-3,
            betas: tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-8,
            weight_decay: float = 1e-2,
            amsgrad: bool = False,
        ) -> None:
            super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
            self._own: dict[Tensor, Tensor] = {}

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> float | None:
            """Update; every parameter has a gradient at every update, or never one."""
            if patches.on("npu_fused_adamw"):
                # the class keeps views of the first gradients, so new ones must come in the same memory
                self._take_gradients()
            for state in self.state.values():
                state["step"] = int(state["step"])
            # torch_npu flattens by storages of a kind that torch calls old
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
                loss = super().step(closure)
            for state in self.state.values():
                state["step"] = torch.tensor(float(state["step"]))  # on the host, as torch keeps a counter there
            return loss

        def _take_gradients(self) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        assert parameter not in self._own, "a parameter that had a gradient has none now"
                        continue
                    if parameter not in self._own:
                        self._own[parameter] = torch.empty_like(parameter, requires_grad=False)
                    parameter.grad = self._own[parameter].copy_(parameter.grad)

        def zero_grad(self, set_to_none: bool = True) -> None:
            """Free the gradients, or fill those that are there with zeros."""
            Optimizer.zero_grad(self, set_to_none)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Take moments and counters back; they are combined anew at the next update."""
            super().load_state_dict(state_dict)
            # what was combined is of the state before
            self.is_states_combined = False

    return CombinedAdamW
