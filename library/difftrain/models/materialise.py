"""Fill modules that were built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


Dtype = torch.dtype | Callable[[str], torch.dtype]


def fill(
    module: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    dtype: Dtype,
    *,
    mapped: Callable[[str], bool] = lambda name: False,
) -> nn.Module:
    """Put weights in place of meta parameters, one at a time, in memory of their own.

    A parameter of several names is given by any of them, and stays one. dtype: of all floating ones, or of each by its
    name. mapped: names whose value may stay in the map of its file, where it lies there as it is kept: pages of a file
    cost no memory that something else needs.
    Raises KeyError for a name that the module has not, ValueError where one stays unfilled or has another shape.
    """
    tensors = module.state_dict(keep_vars=True)
    waiting = {name: param.shape for name, param in tensors.items()}
    names: dict[int, list[str]] = {}
    for name, param in tensors.items():
        names.setdefault(id(param), []).append(name)

    # each value goes under all names of its parameter
    for name, value in weights:
        shape = waiting[name]
        if value.shape != shape:
            raise ValueError(f"{name} has the shape {tuple(value.shape)}, not {tuple(shape)}")
        alike, value = names[id(tensors[name])], value.detach()
        kind = value.dtype
        if value.is_floating_point():
            kind = dtype if isinstance(dtype, torch.dtype) else dtype(name)
        stays = mapped(name) and value.dtype == kind and value.is_contiguous()
        _assign(module, alike, value if stays else value.to(kind, copy=True).contiguous())
        for each in alike:
            waiting.pop(each, None)

    if waiting:
        raise ValueError(f"{len(waiting)} weights are missing: {', '.join(list(waiting)[:5])}")
    _fill_buffers(module)
    return module


def hollow_dtype(module: nn.Module, dtype: Callable[[str], torch.dtype]) -> None:
    """Give parameters without memory the dtype that they will have; buffers and tables stay as they are."""
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if parameter.is_floating_point() and parameter.dtype != dtype(name):
            owner = module.get_submodule(name.rpartition(".")[0])
            replaced = torch.nn.Parameter(parameter.detach().to(dtype(name)), requires_grad=parameter.requires_grad)
            owner._parameters[name.rpartition(".")[2]] = replaced


def _assign(module: nn.Module, names: Iterable[str], value: Tensor) -> None:
    """Put a value in place of one parameter or buffer, under all its names."""
    param: torch.nn.Parameter | None = None
    for name in names:
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        if leaf in owner._parameters:
            old = owner._parameters[leaf]
            trained = old is None or old.requires_grad
            param = (
                torch.nn.Parameter(value, requires_grad=trained and value.is_floating_point())
                if param is None
                else param
            )
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
