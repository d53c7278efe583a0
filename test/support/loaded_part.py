"""Whether a frozen part that was loaded later is what it would have been from the start."""

from __future__ import annotations

import torch

from difftrain.contracts import Parts


def tensors(parts: Parts, name: str) -> dict[str, torch.Tensor]:
    """Return all that a part computes with, and what its exports hold."""
    module = parts.frozen[name]
    told = {f"state {key}": value for key, value in module.state_dict().items()}
    return told | dict(module.named_parameters()) | dict(module.named_buffers())


def same(ours: Parts, theirs: Parts, name: str) -> bool:
    """Say whether a part is the same, bit by bit, in both; which tensors it has is asserted."""
    a, b = tensors(ours, name), tensors(theirs, name)
    assert a.keys() == b.keys()
    return all(a[key].dtype == b[key].dtype and a[key].equal(b[key]) for key in a)
