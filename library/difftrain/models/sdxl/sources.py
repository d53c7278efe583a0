"""Where the weights of an SDXL model come from: a random draw, a diffusers folder, or one file of the original layout.

Every source hands out (name, tensor) of a part one at a time, so that a model is never in memory twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from difftrain.models.parts.initial import by_fan_in, clip_scale, initial_weights
from difftrain.models.sdxl.architecture import Architecture, read_architecture
from difftrain.models.sdxl.tokens import built_in

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.config import TrainConfig
    from difftrain.models.parts.clip_vocabulary import ClipVocabulary


class Source(Protocol):
    """Give the architecture, and the weights of one part by the names of its module."""

    architecture: Architecture

    def weights(self, part: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]: ...
    def vocabularies(self, *, required: bool) -> tuple[ClipVocabulary, ClipVocabulary] | None: ...


def source_of(cfg: TrainConfig) -> Source:
    """Choose the source that the configuration names. Raises ConfigFault."""
    return RandomSource(read_architecture(cfg.model.init_from_config or ""), cfg.training.seed or 0)


@dataclass(frozen=True)
class RandomSource:
    """Draw every weight from (seed, part, name): the same model on every machine."""

    architecture: Architecture
    seed: int

    def weights(self, part: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        scale = by_fan_in
        if part.startswith("text_encoder"):
            scale = clip_scale(module.config.num_hidden_layers, module.config.hidden_size)
        yield from initial_weights(module, part, self.seed, scale)

    def vocabularies(self, *, required: bool) -> tuple[ClipVocabulary, ClipVocabulary] | None:
        return built_in(
            (self.architecture.text_encoder_1["vocab_size"], self.architecture.text_encoder_2["vocab_size"])
        )
