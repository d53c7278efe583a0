"""The VAE of the tiny sizes: trained by us (models/sdxl/make_tiny_vae.py), shipped beside SDXL's tiny."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def shipped_vae(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Give the weights of the tiny VAE. Absent tensors are zeros."""
    import torch
    from safetensors.torch import load

    stored = load(_content())
    for name, param in module.state_dict().items():
        yield name, stored[name].float() if name in stored else torch.zeros(param.shape)


def shipped_digest() -> str:
    """Hash the file: what the weights are, without a module that they are for."""
    return hashlib.blake2b(_content(), digest_size=16).hexdigest()


def _content() -> bytes:
    return resources.files("difftrain.models.sdxl").joinpath("tiny_vae.safetensors").read_bytes()
