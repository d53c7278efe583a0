"""The kinds of adapters: each as peft's configuration, and what its weights begin as.

What a kind adds to a layer is nothing at the beginning: one factor of a product is zeros, a scale is one, a rotation is
the identity.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from difftrain.config.hidden_imports import let_in
from difftrain.config.schema.adapter import ADAPTERS
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault

if TYPE_CHECKING:
    from difftrain.config.schema.adapter import AdapterSection

NO_WEIGHTS = "^$"  # a pattern of nothing


@dataclass(frozen=True)
class LayerRanks:
    """Ranks and alphas of the layers that get an adapter, by their names."""

    rank: Mapping[str, int]
    alpha: Mapping[str, float]


@dataclass(frozen=True)
class AdapterKind:
    """One kind. config: peft's, for layers with their ranks; zeros, ones, lengths: patterns of its weights' names that
    begin as that; lengths are those of the rows of the layer's own weight. Others are drawn.

    convolutions: whether it goes into a layer of them. bounded: whether its rank is, by a layer's sides; divides: whether
    its rank divides the inputs of a layer.
    """

    title: str
    config: Callable[[AdapterSection, LayerRanks], Any]
    zeros: str = NO_WEIGHTS
    ones: str = NO_WEIGHTS
    lengths: str = NO_WEIGHTS
    convolutions: bool = True
    bounded: bool = False
    divides: bool = False


def library() -> Any:
    """Import peft, which is held back until somebody trains an adapter. Raises ConfigFault where it is missing."""
    let_in("peft")
    try:
        import peft
    except ImportError as error:
        what = f"needs the package peft, which does not load: {error}"
        raise ConfigFault([Fault(option("adapter.type"), what, "pip install peft")]) from None
    return peft


def _names(ranks: LayerRanks) -> str:
    """Return one regular expression of exactly these layers: peft takes a list's entries for ends of names, too."""
    return "|".join(map(re.escape, ranks.rank))


def _by_layer(section: AdapterSection, ranks: LayerRanks) -> dict[str, Any]:
    """Return ranks and alphas as peft takes them: one of all, and others by the names of layers."""
    alpha = float(section.rank if section.alpha is None else section.alpha)
    return {
        "r": section.rank,
        "rank_pattern": {re.escape(name): rank for name, rank in ranks.rank.items() if rank != section.rank},
        "alpha_pattern": {re.escape(name): own for name, own in ranks.alpha.items() if own != alpha},
    }


def _lora(section: AdapterSection, ranks: LayerRanks, *, dora: bool = False) -> Any:
    """LoRA: Hu et al. 2022, section 4.1. DoRA: Liu et al. 2024, equation 5."""
    return library().LoraConfig(
        target_modules=_names(ranks),
        lora_alpha=section.rank if section.alpha is None else section.alpha,
        lora_dropout=section.dropout,
        use_rslora=section.use_rslora,
        use_dora=dora,
        init_lora_weights=False,
        **_by_layer(section, ranks),
    )


def _lokr(section: AdapterSection, ranks: LayerRanks) -> Any:
    """LoKr: Yeh et al. 2024 (LyCORIS), section 3.2."""
    return library().LoKrConfig(
        target_modules=_names(ranks),
        alpha=section.rank if section.alpha is None else section.alpha,
        module_dropout=section.dropout,
        decompose_factor=section.decompose_factor,
        init_weights=False,
        **_by_layer(section, ranks),
    )


def _oft(section: AdapterSection, ranks: LayerRanks) -> Any:
    """OFT: Qiu et al. 2023, section 3; rank is the number of blocks of a layer's rotation."""
    return library().OFTConfig(
        target_modules=_names(ranks),
        r=section.rank,
        oft_block_size=0,
        module_dropout=section.dropout,
        init_weights=False,
    )


def _ia3(section: AdapterSection, ranks: LayerRanks) -> Any:
    """(IA)3: Liu et al. 2022, section 3.3, on what leaves each layer."""
    return library().IA3Config(target_modules=_names(ranks), feedforward_modules=[], init_ia3_weights=False)


KINDS: Mapping[str, AdapterKind] = {
    "lora": AdapterKind("LoRA", _lora, zeros=r"\.lora_B\.", bounded=True),
    "dora": AdapterKind(
        "DoRA",
        lambda section, ranks: _lora(section, ranks, dora=True),
        zeros=r"\.lora_B\.",
        lengths=r"\.lora_magnitude_vector\.",
        bounded=True,
    ),
    "lokr": AdapterKind("LoKr", _lokr, zeros=r"\.lokr_w1(_a)?\."),
    "oft": AdapterKind("OFT", _oft, zeros=r"\.oft_R\.", divides=True),
    "ia3": AdapterKind("(IA)3", _ia3, ones=r"\.ia3_l\."),
}
assert tuple(KINDS) == ADAPTERS


def kind_of(section: AdapterSection) -> AdapterKind:
    """Return the kind that a section trains; LoRA where it trains none, for what only looks at layers."""
    return KINDS[section.type or "lora"]


FACTORED = ("lora", "dora")  # products of two factors: what every other program reads
