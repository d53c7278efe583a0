"""Many pictures in one call are the ones that are drawn one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cached import loaded as sdxl_parts

from difftrain.config import TrainConfig
from difftrain.models.registry import make_family
from difftrain.sampling.batch import draw_batch

CAPTIONS = ["a picture", "two, three", ""]


@pytest.mark.parametrize(("family", "sampler"), [("sdxl", "ddim"), ("sdxl", "euler_a"), ("sd3", "flow_euler")])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_lot_is_its_pictures(family: str, sampler: str, guidance: float) -> None:
    cfg = TrainConfig.model_validate({"model": {"family": family, "init_from_config": "tiny"}, "training": {"seed": 1}})
    made = make_family(cfg)
    pipeline = made.pipeline(sdxl_parts() if family == "sdxl" else made.load())
    scheduler = pipeline.scheduler
    shape = made.features.draws["noise"].channels, 64 // made.features.draws["noise"].factor, 8
    noise = torch.randn(len(CAPTIONS), *shape, generator=torch.Generator().manual_seed(2))

    def drawn(which: slice) -> torch.Tensor:
        return draw_batch(
            pipeline, CAPTIONS[which], noise[which], size_hw=(64, 64), steps=2, guidance=guidance, sampler=sampler,
            seeds=[5, 6, 7][which],
        )  # fmt: skip

    together = drawn(slice(None))
    assert together.shape == (3, 3, 64, 64) and together.dtype == torch.float32
    assert 0 <= float(together.min()) < float(together.max()) <= 1
    for n in range(len(CAPTIONS)):
        np.testing.assert_allclose(drawn(slice(n, n + 1))[0], together[n], atol=2e-3)
    assert not torch.allclose(together[0], together[1], atol=0.05)
    assert pipeline.scheduler is scheduler
