"""Checkpoints of activations in host memory: what moves, and that nothing changes."""

from __future__ import annotations

import pytest
import torch
from sdxl import batch_of, config, loaded
from torch import nn
from torch.utils.checkpoint import checkpoint

from difftrain.device import Device
from difftrain.device.offload import HostMemory, offload_checkpoints


class Block(nn.Module):
    """A block that widens inside: what is recomputed is larger than what is kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
        self.gradient_checkpointing = True
        self._gradient_checkpointing_func = lambda function, *args: checkpoint(function, *args, use_reentrant=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._gradient_checkpointing_func(self.layers, x)


@pytest.mark.flags("cpu_offload_checkpointing")
def test_the_inputs_of_checkpoints_move_and_what_is_recomputed_does_not():
    plain, moved = Block(), Block()
    memory = offload_checkpoints(moved, Device("cpu"))
    grads = []
    for block in (plain, moved):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        block(x).square().sum().backward()
        grads.append([x.grad, *(p.grad for p in block.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    assert memory.moved_bytes == 16 * 8 * 4  # x, and nothing of the width of 64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_they_wait_in_pinned_host_memory():
    memory = HostMemory(Device("cuda"))
    tensor = torch.randn(4, 8, 3, 3, device="cuda").to(memory_format=torch.channels_last)
    kept = memory.away(tensor)
    assert kept[1].is_pinned() and kept[1].stride() == tensor.stride()
    assert torch.equal(memory.back(kept), tensor)


@pytest.mark.flags("cpu_offload_checkpointing", "gradient_checkpointing")
def test_every_checkpointed_block_of_sdxl_takes_part():
    def run(offload: bool, checkpointing: bool = True):
        family, parts = loaded(
            config({"training": {"seed": 1, "gradient_checkpointing": checkpointing}}, train_text_encoder=True)
        )
        memory = offload_checkpoints(parts.root.train(), Device("cpu")) if offload else None
        calls = []
        for module in parts.root.modules():
            if type(module).__name__ == "ResnetBlock2D":
                module.conv1.register_forward_hook(lambda *_: calls.append(1))
        batch = batch_of(family, parts, ["a star", "a circle"])
        inputs = family.inputs(batch, parts)
        sum(family.loss_sums(family.forward(parts.root, inputs), inputs).values()).backward()
        return memory, [p.grad for p in parts.root.parameters() if p.grad is not None], len(calls)

    _, kept, twice = run(False)
    memory, moved, _ = run(True)
    assert all(torch.equal(a, b) for a, b in zip(kept, moved)) and len(kept) == len(moved) > 100
    assert memory.moved_bytes > 100_000
    _, plain, once = run(False, checkpointing=False)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(kept, plain))
    assert twice > 1.8 * once > 0  # all but the first of the middle
    nothing, _, _ = run(True, checkpointing=False)
    assert nothing.moved_bytes == 0
