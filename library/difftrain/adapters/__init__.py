"""Adapters in a network's layers, through peft: small weights that are trained while the network's own stay as they are.

1. kinds.py: LoRA and its relatives, each as peft's configuration, and what its weights begin as.
2. layers.py: which layers of a network get one, and the names that they have from then on.
3. factors.py: what training does to the two factors of a product: rates of their own, a bound on its norm.

Nothing here knows a family: models/ says which layers, and what an adapter's files are called.
"""

from difftrain.adapters.factors import NormBound, by_factor
from difftrain.adapters.kinds import FACTORED, KINDS, kind_of
from difftrain.adapters.layers import (
    ADAPTER,
    adapted_layers,
    chosen_layers,
    initial_values,
    inside_name,
    is_adapter,
    plain_name,
    put_in,
    ranks_of,
    target_faults,
)

__all__ = [
    "ADAPTER",
    "FACTORED",
    "KINDS",
    "NormBound",
    "adapted_layers",
    "by_factor",
    "chosen_layers",
    "initial_values",
    "inside_name",
    "is_adapter",
    "kind_of",
    "plain_name",
    "put_in",
    "ranks_of",
    "target_faults",
]
