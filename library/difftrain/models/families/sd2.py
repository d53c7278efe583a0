"""Stable Diffusion 2 (Stability AI 2022): the UNet of version 1 with linear projections, over OpenCLIP's ViT-H.

It learns velocity at 768 px; the model that 2.0 and 2.1 call base learns noise at 512 px, and is of the same sizes. The
encoder has 23 of OpenCLIP's 24 layers, which is how its last but one is read; files in the original layout have all 24.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Parts
from difftrain.models.export import key_map
from difftrain.models.facts import OneFile, Text
from difftrain.models.unet import IGNORED, UNET_PREFIX, VAE_PREFIX, OneEncoderFamily
from difftrain.models.weights import keys
from difftrain.models.weights.folder_export import file_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.models.weights.keys import KeyPiece, Rule


PREFIXES = {"unet": UNET_PREFIX, "vae": VAE_PREFIX, "text_encoder": "cond_stage_model.model."}
# what the encoder has in such files and the model does not read, beside its last layer
PROJECTION, LOGIT_SCALE = (PREFIXES["text_encoder"] + name for name in ("text_projection", "logit_scale"))
LAYERS = PREFIXES["text_encoder"] + "transformer.resblocks."


class SD2(OneEncoderFamily):
    """The facts of a Stable Diffusion 2 model."""

    name = "sd2"
    kohya_name = "sd_v2"
    native = 96
    texts = (
        Text(
            "text_encoder", "tokenizer", "clip", 77, normed=True, pads_zero=True,
            hub="laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        ),
    )  # fmt: skip
    one_file = OneFile(
        prefixes=PREFIXES,
        released="base",
        layout="Stable Diffusion 2's original layout has model.diffusion_model., first_stage_model. and "
        "cond_stage_model.model.",
        beside=(PROJECTION, LOGIT_SCALE),
        ignored=rf"{IGNORED}|^cond_stage_model\.model\.attn_mask$",
        spare=LAYERS.replace(".", r"\.") + r"(\d+)\.",
    )

    def __init__(self, cfg: TrainConfig) -> None:
        super().__init__(cfg)
        # ModelSpec's names: of the two kinds of one architecture
        velocity = cfg.model.prediction_type == "v_prediction"
        self.modelspec = f"stable-diffusion-v2-{'768-v' if velocity else '512'}"

    def rule(self, part: str) -> Callable[[Any], Rule] | None:
        """Return what says, of a part's module, where its tensors lie in the original layout."""
        return self._open_clip if part == "text_encoder" else super().rule(part)

    def _open_clip(self, encoder: Any) -> Rule:
        rule, kind = keys.clip_rule(encoder), self.parts["text_encoder"]

        def named(name: str) -> KeyPiece:
            return rule(file_name(kind, name))

        return named

    def beside(self, parts: Parts) -> dict[str, Tensor]:
        """Return what the released file has and nothing reads: the loaded file's, else what kohya's tools write."""
        sizes = self.source.complete("text_encoder")
        width, first = sizes["hidden_size"], f"{LAYERS}{sizes['num_hidden_layers']}."
        made = {PROJECTION: torch.ones(width, width), LOGIT_SCALE: torch.tensor(1.0)}
        file = self.source.single_file
        if file is None:
            return made
        stored = [key for key in sorted(file.marks) if key in made or key.startswith(first)]
        return made | {key: file.get(key) for key in stored}

    def copies(self) -> Mapping[str, str]:
        """Map the keys of the layer that nothing reads to those of the last one: kohya's, where the file has none."""
        last = int(self.source.complete("text_encoder")["num_hidden_layers"])
        first, file = f"{LAYERS}{last}.", self.source.single_file
        if file is not None and any(key.startswith(first) for key in file.marks):
            return {}
        before = f"{LAYERS}{last - 1}."
        stored = [PREFIXES["text_encoder"] + key for key in key_map(self, "text_encoder").stored]
        return {first + key.removeprefix(before): key for key in stored if key.startswith(before)}

    def objective_facts(self) -> dict[str, Any]:
        """Return what a header says of the loss and the noise, under kohya's names, which has a key for this family."""
        return {**super().objective_facts(), "v2": True}
