"""The VAE of the tiny sizes: trained by us (models/vae/make_tiny.py), shipped beside SDXL's tiny."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

from difftrain.models.weights.fingerprints import of_files, of_tensors

if TYPE_CHECKING:
    from torch import Tensor


def shipped_sizes() -> dict[str, Any]:
    """Return the sizes that the weights are for."""
    return dict(json.loads(resources.files("difftrain.models.vae").joinpath("tiny_vae.json").read_text("utf-8")))


def shipped_vae(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Give the weights of the tiny VAE. Absent tensors are zeros."""
    import torch
    from safetensors.torch import load

    stored = load(_file().read_bytes())
    for name, param in module.state_dict().items():
        yield name, stored[name].float() if name in stored else torch.zeros(param.shape)


def shipped_digest() -> str:
    """Hash the file: what the weights are, without a module that they are for."""
    return hashlib.blake2b(_file().read_bytes(), digest_size=16).hexdigest()


def shipped_fingerprint(make: Callable[[], Any]) -> str:
    """Hash the weights one by one, zeros too. make: builds the module, where the user's cache folder has no such hash."""
    with resources.as_file(_file()) as path:
        return of_files([path], "the tiny VAE", lambda: of_tensors(shipped_vae(make())))


def _file() -> Traversable:
    return resources.files("difftrain.models.vae").joinpath("tiny_vae.safetensors")
