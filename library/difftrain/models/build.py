"""Modules of any class without their weights: parameters have no memory, tables that are computed are real."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from difftrain.contracts import ConfigFault, Fault
from difftrain.device import patches

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Hold back transformers' warnings: its picture processors miss torchvision, and no training needs them."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def possible(part: str) -> Iterator[None]:
    """Turn what goes wrong with a part's sizes into a ConfigFault."""
    try:
        yield
    except (TypeError, ValueError, IndexError, KeyError, ZeroDivisionError, RuntimeError, AttributeError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigFault([Fault(f"the sizes of {part}", f"make no model: {reason}")]) from error


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
        patches.apply("diffusers")
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
