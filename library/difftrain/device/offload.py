"""What checkpoints of activations keep for the backward pass, in host memory meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.device.torch_device import Device

_FUNCTION = "_gradient_checkpointing_func"  # diffusers' and transformers' name for what runs a checkpointed block


class HostMemory:
    """Move tensors to the host and back in the order of the device's stream: nobody waits for a copy.

    moved_bytes: of the last step's forward pass and all before it. On a CPU tensors stay where they are.
    """

    def __init__(self, device: Device) -> None:
        self._pin = device.pin
        self.moved_bytes = 0

    def away(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        """Copy to pinned memory; strides stay, so that kernels are chosen as without the move."""
        self.moved_bytes += tensor.numel() * tensor.element_size()
        if not self._pin:
            return tensor.device, tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def back(self, kept: tuple[torch.device, Tensor]) -> Tensor:
        """Copy back."""
        device, tensor = kept
        return tensor.to(device, non_blocking=True)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a checkpointing function whose kept inputs wait on the host; what it recomputes is no matter of this."""

        def offloaded(*args: Any, **options: Any) -> Any:
            with saved_tensors_hooks(self.away, self.back):
                return function(*args, **options)

        return offloaded


def offload_checkpoints(root: nn.Module, device: Device) -> HostMemory:
    """Let the checkpointed blocks inside a module keep their inputs on the host."""
    memory = HostMemory(device)
    wrapped: dict[int, Any] = {}
    for module in root.modules():
        function = getattr(module, _FUNCTION, None)
        if function is not None and getattr(module, "gradient_checkpointing", False):
            setattr(module, _FUNCTION, wrapped.setdefault(id(function), memory.around(function)))
    return memory
