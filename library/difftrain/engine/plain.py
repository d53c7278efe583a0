"""State of any optimizer as JSON and named tensors: no pickle, and every value comes back with its type."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import TrainingFault

if TYPE_CHECKING:
    from torch import Tensor


def encode(value: Any, where: str, keep: Callable[[str, Tensor], None]) -> Any:
    """Return JSON for a value; tensors in it go to `keep` under a name that starts with `where`.

    Raises TrainingFault for what cannot be stored so, a function for instance.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        keep(where, value)
        return {"tensor": where}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode(each, f"{where}/{place}", keep) for place, each in enumerate(value)]}
    if isinstance(value, dict):
        pairs = [[encode(key, "", keep), encode(each, f"{where}/{key}", keep)] for key, each in value.items()]
        return {"dict": pairs}
    raise TrainingFault(f"the optimizer keeps {where} as a {type(value).__name__}, which a checkpoint cannot hold")


def decode(value: Any, find: Callable[[str], Tensor]) -> Any:
    """Return what encode was given; `find` returns a tensor by its name."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return find(content)
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "dict":
        return {decode(key, find): decode(each, find) for key, each in content}
    return (list if kind == "list" else tuple)(decode(each, find) for each in content)
