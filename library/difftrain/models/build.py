"""Modules of any class without their weights: parameters have no memory, tables that are computed are real."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from difftrain.device import mends
from difftrain.models.quiet import quiet_imports
from difftrain.models.sizes import possible

if TYPE_CHECKING:
    from torch import nn


class _Hollow(TorchFunctionMode):
    """Put what is allocated to be filled later (torch.empty: parameters) on the meta device, and leave all else.

    Rotary tables, sines and fixed positions lie in no file of weights. They are buffers in some classes and plain
    attributes in others, so torch.device("meta") would lose them without a word.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty and options.get("device") is None:
            options["device"] = "meta"
        return func(*args, **options)


def class_of(kind: str) -> Any:
    """Import "library:Class"."""
    library, _, name = kind.partition(":")
    if library == "diffusers":
        mends.apply("diffusers")
    with quiet_imports():
        return getattr(importlib.import_module(library), name)


def is_transformers(kind: str) -> bool:
    """Tell whether a class is of transformers, whose sizes are an object of their own."""
    return kind.startswith("transformers:")


def build(kind: str, part: str, sizes: Mapping[str, Any]) -> nn.Module:
    """Build a part whose parameters have no memory. Raises ConfigFault for impossible sizes."""
    made_from = class_of(kind)
    with possible(part), _Hollow(), quiet_imports():
        if is_transformers(kind):
            return made_from(made_from.config_class(**sizes))
        return made_from(**sizes)


@cache
def defaults(kind: str) -> Mapping[str, Any]:
    """Return the arguments of a class with what it takes where nothing is said."""
    made_from = class_of(kind)
    if is_transformers(kind):
        return made_from.config_class().to_dict()
    parameters = inspect.signature(inspect.unwrap(made_from.__init__)).parameters
    return {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}


def arguments(kind: str) -> frozenset[str]:
    """Name the arguments of a class."""
    return frozenset(inspect.signature(inspect.unwrap(class_of(kind).__init__)).parameters) - {"self"}
