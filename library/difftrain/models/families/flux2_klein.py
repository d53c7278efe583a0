"""Flux.2 Klein (Black Forest Labs 2026): the architecture of dev at 4 and 9 B, without a guidance input, over three states of a Qwen3.

The releases named base are trained with plain guidance; the others are distilled to four steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from difftrain.models.facts import FamilyOption, Text
from difftrain.models.families.flux2 import Flux2, agreement
from difftrain.models.weights.files import read_json

# Qwen3's chat, told not to think
TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Flux2Klein(Flux2):
    """The facts of a Flux.2 Klein model: those of Flux.2 with another encoder."""

    name = "flux2_klein"
    modelspec = "flux-2-klein"
    texts = (
        Text(
            "text_encoder", "tokenizer", "llm", 512, layers=(9, 18, 27), template=TEMPLATE, masked=True, zeros=False,
            marked=True,
        ),
    )  # fmt: skip
    options: tuple[FamilyOption, ...] = ()
    agree = agreement(texts[0], "num_hidden_layers")
    guided_file = False

    def model_index(self, classes: Mapping[str, Any]) -> dict[str, Any]:
        """Say whether the weights are distilled to few steps, as the folder says that they come from."""
        pretrained = self.cfg.model.pretrained
        source = read_json(Path(pretrained).expanduser() / "model_index.json") if pretrained else {}
        return {**super().model_index(classes), "is_distilled": bool(source.get("is_distilled", False))}

    def remarks(self) -> list[str]:
        return []
