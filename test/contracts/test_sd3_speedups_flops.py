"""Work of SD3-Light with each speed-up: what torch counts, and the figures of docs/speedups.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sd3_speedups import batch_of, config, vision_folder
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from difftrain.config.schema.sections import (
    LossSection,
    ModelSection,
    PatchMaskingSection,
    RepaSection,
    TreadSection,
)
from difftrain.contracts import METRIC, Bucket
from difftrain.models.families.sd3.family import SD3Family
from difftrain.models.flops import flops_per_sample

SIZED = {
    "plain": {},
    "tread": {"tread": TreadSection(share=0.5)},
    "masking": {"patch_masking": PatchMaskingSection(share=0.75, mixer_layers=1)},
    "repa": {"repa": RepaSection(layer=2, hidden=24)},
    "repa within a route": {"repa": RepaSection(layer=2, hidden=24), "tread": TreadSection(share=0.5, start=2, end=3)},
}


@pytest.mark.parametrize("gamma", [0.0, 0.1])
@pytest.mark.parametrize("sections", SIZED.values(), ids=SIZED)
def test_work_is_what_torch_counts(sections: dict[str, Any], gamma: float, tmp_path: Path) -> None:
    """Forward and backward of the tiny model at 64 x 128 px, by torch's own counter."""
    if "repa" in sections:
        folder = vision_folder(tmp_path / "vision", "dinov2")
        sections = {**sections, "repa": sections["repa"].model_copy(update={"encoder": str(folder)})}
    cfg = config(loss=LossSection(text_recon_gamma=gamma), **sections)
    family = SD3Family(cfg)
    parts, bucket = family.load(), Bucket(64, 128)
    inputs = family.inputs(batch_of(family, parts, bucket), parts)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # it knows no other attention on a CPU
        outputs = family.forward(parts.root, inputs)
        terms = family.loss_sums(outputs, inputs)
        sum(value for name, value in terms.items() if not name.startswith(METRIC)).backward()
    assert counter.get_total_flops() == family.flops_per_sample(parts, bucket)


@pytest.mark.nightly
def test_the_page_has_the_figures_that_the_code_computes() -> None:
    page = " ".join((Path(__file__).resolve().parents[2] / "docs" / "speedups.md").read_text("utf-8").split())
    light = ModelSection(family="sd3", init_from_config="light")

    def left(side: int, **sections: Any) -> str:
        whole, less = (
            flops_per_sample(SD3Family(config(model=light, **each)), Bucket(side, side)) for each in ({}, sections)
        )
        return f"{less / whole:.2f}"

    routed = [left(side, tread=TreadSection(share=0.5)) for side in (256, 512, 1024)]
    masked = [left(side, patch_masking=PatchMaskingSection(share=0.75)) for side in (256, 512, 1024)]
    assert "{} of its operations at 256 px, {} at 512 px and {} at 1024 px".format(*routed) in page
    assert "{}, {} and {} of its operations at 256, 512 and 1024 px".format(*masked) in page
