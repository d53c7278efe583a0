"""Deferred frozen parts: a placeholder counts for each until somebody needs it, and nothing of it is imported.

With a whole cache no text encoder and no VAE is needed, and importing and building them is most of what a start can save.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from difftrain.contracts import ConfigFault, Parts
from difftrain.device import quantised
from difftrain.device.quantised import QuantisedLayer, Stored, widened

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.models.weights.source import WeightSource


DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_OVERFLOWING = ("T5EncoderModel", "UMT5EncoderModel")


class MetaPlaceholder(nn.Module):
    """Count as a deferred frozen part: as many parameters, on the meta device. make: builds the part itself, there."""

    def __init__(self, count: int, dtype: torch.dtype, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.make = make
        self.weights = nn.Parameter(torch.empty(count, dtype=dtype, device="meta"), requires_grad=False)


def make_placeholder(source: WeightSource, part: str, dtype: torch.dtype) -> MetaPlaceholder:
    """Make the placeholder of a part."""
    return MetaPlaceholder(source.count(part), dtype, lambda: untrained(source.build(part)))


def meta_module(module: nn.Module) -> nn.Module:
    """Return a part as it is, or, of a placeholder, one that is built without weights."""
    return module.make() if isinstance(module, MetaPlaceholder) else module


def untrained(module: nn.Module) -> nn.Module:
    """Make a module one that is not trained."""
    return module.requires_grad_(False).eval()


def fill_part(source: WeightSource, part: str, module: nn.Module, dtype: torch.dtype, *, meta: bool = False) -> None:
    """Fill a part from its source, in a dtype; of one that stays on the meta device only the dtype is set."""
    if meta:
        torch.nn.Module.to(module, dtype)  # diffusers' own warns about dtypes that nothing here depends on
    else:
        fill(module, source.weights(part, module), dtype)
    if type(module).__name__ in _OVERFLOWING and dtype == torch.float16:
        _keep_wide(module)


def _keep_wide(module: nn.Module) -> None:
    """Keep in fp32 what overflows in fp16: the last layer of each feed-forward of T5, as transformers does."""
    for name, layer in module.named_modules():
        if name.endswith(".wo"):
            layer.float()


def load_part(source: WeightSource, part: str, parts: Parts, dtype: torch.dtype, *, eight_bits: bool = False) -> None:
    """Build a part and fill it as it would have been filled at the start: anew each time, since moving to meta unties what was tied.

    Raises ConfigFault where weights do not fit.
    """
    module = source.build(part)
    if faults := source.faults({part: module}):
        raise ConfigFault(faults)
    fill_part(source, part, module, dtype)
    if eight_bits:
        quantised.store(untrained(module))
    parts.frozen[part] = untrained(module)


def in_8_bits(cfg: TrainConfig, part: str) -> bool:
    """Tell whether a frozen encoder is kept in 8 bits."""
    return cfg.model.fp8_frozen == "all" and part != "vae"


def to_8_bits(chosen: Mapping[str, nn.Module]) -> str:
    """Put the frozen layers of modules into 8 bits, those of deferred ones when they are loaded; name them, or nothing."""
    counts = {
        name: len(quantised.store(module)) for name, module in chosen.items() if not isinstance(module, MetaPlaceholder)
    }
    layers = [f"{number} layers of {name}" for name, number in counts.items() if number]
    layers += [f"{name} where it is needed" for name, module in chosen.items() if isinstance(module, MetaPlaceholder)]
    return ", ".join(layers)


def source_weights(source: WeightSource, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Give the weights of parts straight from their source; they may be without any."""
    for part, module in modules.items():
        yield from ((f"{part}.{name}", value) for name, value in widened(source.weights(part, meta_module(module))))


def deferred_weights(
    source: WeightSource, parts: Parts, dtype: Callable[[str], torch.dtype], without: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of deferred parts as they would be if they were loaded. dtype: that a part is kept in."""
    for part in parts.deferred:
        if part not in without and not parts.is_loaded(part):
            for name, value in source_weights(source, {part: parts.frozen[part]}):
                yield name, value.to(dtype(part))


# --- Fill modules that were built on the meta device


Dtype = torch.dtype | Callable[[str], torch.dtype]


def fill(
    module: nn.Module,
    weights: Iterable[tuple[str, Tensor | Stored]],
    dtype: Dtype,
    *,
    mapped: Callable[[str], bool] = lambda name: False,
) -> nn.Module:
    """Put weights in place of meta parameters, one at a time, in memory of their own.

    Layers of few bits take theirs by themselves: it is wide as long as it is looked at.

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
    owners = dict(module.named_modules(remove_duplicate=False))
    few_bits = {f"{name}.weight": layer for name, layer in module.named_modules() if isinstance(layer, QuantisedLayer)}
    for name, value in weights:
        shape = waiting[name]
        if name in few_bits:
            few_bits[name].take(value, mapped=mapped(name))
            waiting.pop(name)
            del value  # before the next one is made
            continue
        if isinstance(value, Stored):
            value = value.wide()
        if value.shape != shape:
            raise ValueError(f"{name} has the shape {tuple(value.shape)}, not {tuple(shape)}")
        alike, value = names[id(tensors[name])], value.detach()
        kind = value.dtype
        if value.is_floating_point():
            kind = dtype if isinstance(dtype, torch.dtype) else dtype(name)
        # a view of the file's map costs no memory that something else needs
        stays = mapped(name) and value.dtype == kind and value.is_contiguous()
        _assign(owners, alike, value if stays else value.to(kind, copy=True).contiguous())
        for layer in alike:
            waiting.pop(layer, None)

    if waiting:
        raise ValueError(f"{len(waiting)} weights are missing: {', '.join(list(waiting)[:5])}")
    _fill_buffers(module, owners)
    return module


def hollow_dtype(module: nn.Module, dtype: Callable[[str], torch.dtype]) -> None:
    """Give parameters without memory the dtype that they will have; buffers and tables stay as they are."""
    owners = dict(module.named_modules(remove_duplicate=False))
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if parameter.is_floating_point() and parameter.dtype != dtype(name):
            owner = owners[name.rpartition(".")[0]]
            replaced = torch.nn.Parameter(parameter.detach().to(dtype(name)), requires_grad=parameter.requires_grad)
            owner._parameters[name.rpartition(".")[2]] = replaced


def _assign(owners: Mapping[str, nn.Module], names: Iterable[str], value: Tensor) -> None:
    """Put a value in place of one parameter or buffer, under all its names. owners: modules by their names."""
    param: torch.nn.Parameter | None = None
    for name in names:
        owner_name, _, leaf = name.rpartition(".")
        owner = owners[owner_name]
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


def _fill_buffers(module: nn.Module, owners: Mapping[str, nn.Module]) -> None:
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta:
            leaf = name.rpartition(".")[2]
            if leaf not in _BUFFERS:
                raise NotImplementedError(f"no rule makes the buffer {name} of {type(module).__name__}")
            _assign(owners, [name], _BUFFERS[leaf](buffer))
