"""Wan 2.1, first and last frame to video (Alibaba 2025): image to video that is shown how a clip ends, too."""

from __future__ import annotations

from difftrain.models.facts import Agree
from difftrain.models.families.wan_i2v import WanI2V


class WanFLF2V(WanI2V):
    """What differs from image to video: the states of two images have positions."""

    name = "wan_flf2v"
    modelspec = "wan-2.1-flf2v"
    agree = (
        *(row for row in WanI2V.agree if row.where != "transformer.pos_embed_seq_len"),
        Agree(
            "transformer.pos_embed_seq_len",
            lambda s: 2 * ((s["image_encoder"]["image_size"] // s["image_encoder"]["patch_size"]) ** 2 + 1),
            "the rows of two images",
        ),
    )

    @property
    def call(self) -> str:
        """Return the arguments of the pipeline in the page beside an export."""
        return 'image=reference, last_image=reference, prompt="a red cat", num_frames=5, output_type="pil"'
