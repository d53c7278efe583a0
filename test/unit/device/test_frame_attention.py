"""Attention over frames so far: what diffusers' block does under its mask, for several clips too."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

from difftrain.device import patches
from difftrain.device.frame_attention import CAUSAL_FRAMES


@pytest.fixture(autouse=True)
def patched() -> None:
    patches.apply("diffusers")


@pytest.mark.parametrize("frames", [1, 3])
def test_one_clip_comes_out_as_it_did_and_several_as_each_alone(frames: int) -> None:
    torch.manual_seed(0)
    block, x = HunyuanVideo15AttnBlock(8).eval(), torch.randn(2, 8, frames, 4, 6)
    with torch.no_grad():
        ours = block(x)
        with patches.without("causal_frames"):
            theirs = torch.cat([block(clip) for clip in x.split(1)])
            with pytest.raises(RuntimeError, match="shape"):
                block(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_no_frame_looks_ahead() -> None:
    torch.manual_seed(0)
    block, x = HunyuanVideo15AttnBlock(8).eval(), torch.randn(1, 8, 3, 4, 6)
    other = x.clone()
    other[:, :, 2] = 0
    with torch.no_grad():
        assert torch.equal(block(x)[:, :, :2], block(other)[:, :, :2])


def test_the_fault_is_still_there() -> None:
    with patches.without("causal_frames"):
        assert CAUSAL_FRAMES.faulty()
