"""Fill modules that were built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


def fill(module: nn.Module, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> nn.Module:
    """Put weights in place of meta parameters, one at a time, in memory of their own.

    A parameter of several names is given by any of them, and stays one.
    Raises KeyError for a name that the module has not, ValueError where one stays unfilled or has another shape.
    """
    tensors = module.state_dict(keep_vars=True)
    waiting = {name: param.shape for name, param in tensors.items()}
    names: dict[int, list[str]] = {}
    for name, param in tensors.items():
        names.setdefault(id(param), []).append(name)
    for name, value in weights:
        shape = waiting[name]
        if value.shape != shape:
            raise ValueError(f"{name} has the shape {tuple(value.shape)}, not {tuple(shape)}")
        alike = names[id(tensors[name])]
        _assign(module, alike, value.detach().to(dtype, copy=True).contiguous())
        for each in alike:
            waiting.pop(each, None)
    if waiting:
        raise ValueError(f"{len(waiting)} weights are missing: {', '.join(list(waiting)[:5])}")
    _fill_buffers(module)
    return module


def _assign(module: nn.Module, names: Iterable[str], value: Tensor) -> None:
    """Put a value in place of one parameter or buffer, under all its names."""
    param: torch.nn.Parameter | None = None
    for name in names:
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        if leaf in owner._parameters:
            param = torch.nn.Parameter(value) if param is None else param
            owner._parameters[leaf] = param
        else:
            owner._buffers[leaf] = value


# buffers that are no part of a state dict, as their modules make them
_BUFFERS: dict[str, Callable[[Tensor], Tensor]] = {
    "position_ids": lambda old: torch.arange(old.shape[-1]).expand(old.shape).clone(),
}


def _fill_buffers(module: nn.Module) -> None:
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta:
            leaf = name.rpartition(".")[2]
            if leaf not in _BUFFERS:
                raise NotImplementedError(f"no rule makes the buffer {name} of {type(module).__name__}")
            _assign(module, [name], _BUFFERS[leaf](buffer))
