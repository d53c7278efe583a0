"""Frozen parts that sleep: something stands in their place until somebody needs them, and nothing of them is imported.

With a whole cache no text encoder and no VAE is needed, and importing and building them is most of what a start can save.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from difftrain.contracts import ConfigFault, Fault, Parts
from difftrain.device import fp8
from difftrain.models.materialise import fill

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig

DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


_OVERFLOWING = ("T5EncoderModel", "UMT5EncoderModel")


class Source(Protocol):
    """Of a family's source of weights what its frozen parts need."""

    @property
    def architecture(self) -> Any: ...  # builds a part on the meta device, and counts an encoder
    def faults(self, modules: Mapping[str, Any]) -> list[Fault]: ...
    def weights(self, part: str, module: Any) -> Iterator[tuple[str, Tensor]]: ...


class StandIn(nn.Module):
    """Count as a frozen part that sleeps: as many parameters, on the meta device. make: builds the part itself, there."""

    def __init__(self, count: int, dtype: torch.dtype, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.make = make
        self.weights = nn.Parameter(torch.empty(count, dtype=dtype, device="meta"), requires_grad=False)


def stand_in(source: Source, part: str, dtype: torch.dtype) -> StandIn:
    """Make what stands in for an encoder."""
    return StandIn(source.architecture.count(part), dtype, lambda: still(source.architecture.build(part)))


def built(module: nn.Module) -> nn.Module:
    """Return a part as it is, or, where something stands in for it, one that is built without weights."""
    return module.make() if isinstance(module, StandIn) else module


def still(module: nn.Module) -> nn.Module:
    """Make a module one that is not trained."""
    return module.requires_grad_(False).eval()


def give_weights(source: Source, part: str, module: nn.Module, dtype: torch.dtype, *, meta: bool = False) -> None:
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


def wake(source: Source, part: str, parts: Parts, dtype: torch.dtype, *, eight_bits: bool = False) -> None:
    """Build a part and fill it as it would have been filled at the start: anew each time, resting untied what was tied.

    Raises ConfigFault where weights do not fit.
    """
    module = source.architecture.build(part)
    if faults := source.faults({part: module}):
        raise ConfigFault(faults)
    give_weights(source, part, module, dtype)
    if eight_bits:
        fp8.store(still(module))
    parts.frozen[part] = still(module)


def in_8_bits(cfg: TrainConfig, part: str) -> bool:
    """Tell whether a frozen encoder is kept in 8 bits."""
    return cfg.model.fp8_frozen == "all" and part != "vae"


def to_8_bits(chosen: Mapping[str, nn.Module]) -> str:
    """Put the frozen layers of modules into 8 bits, those of sleeping ones when they wake; name them, or nothing."""
    counts = {name: len(fp8.store(module)) for name, module in chosen.items() if not isinstance(module, StandIn)}
    told = [f"{number} layers of {name}" for name, number in counts.items() if number]
    told += [f"{name} where it is needed" for name, module in chosen.items() if isinstance(module, StandIn)]
    return ", ".join(told)


def stored(source: Source, held: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Give the weights of parts straight from their source; they may be without any."""
    for part, module in held.items():
        yield from ((f"{part}.{name}", value) for name, value in source.weights(part, built(module)))


def deferred_weights(
    source: Source, parts: Parts, dtype: Callable[[str], torch.dtype], without: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Give the weights of lazy parts as they would be if they were awake. dtype: that a part is kept in."""
    for part in parts.lazy:
        if part not in without and parts.sleeps(part):
            for name, value in stored(source, {part: parts.frozen[part]}):
                yield name, value.to(dtype(part))
