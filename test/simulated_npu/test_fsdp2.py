"""FSDP2 on the device: what goes wrong there, and the order that works, for the engine that will use it."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn

from difftrain.testing.spawn import run_ranks


def shard():
    """Train a sharded layer in both orders of casting, and with both ways to average."""
    from torch.distributed.fsdp import fully_shard

    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl")
    found = {}

    def layer():
        torch.manual_seed(0)
        return nn.Linear(4, 4, bias=False).to(torch.bfloat16).to(f"npu:{rank}")

    def said(function):
        try:
            return function()
        except Exception as error:  # whatever it is, its words are what is compared
            return str(error).splitlines()[0]

    def gradient(sharded):
        sharded(torch.full((2, 4), rank + 1.0, device=f"npu:{rank}")).sum().backward()
        return sharded.weight.grad.full_tensor().cpu().tolist()

    found["cast late"] = said(lambda: str(fully_shard(layer()).float().weight.dtype))
    found["cast by torch_npu"] = said(
        lambda: str(torch.ops.npu.npu_dtype_cast(fully_shard(layer()).weight, torch.float32).dtype)
    )
    first = fully_shard(layer().float())
    found["cast first"] = str(first.weight.dtype)
    found["average"] = said(lambda: gradient(first))
    dist.barrier()
    summed = fully_shard(layer().float())
    summed.set_force_sum_reduction_for_comms(True)
    found["sum, then divide"] = gradient(summed)
    dist.destroy_process_group()
    print(json.dumps(found))


def test_fsdp2_casts_in_any_order_and_sums_before_it_divides():
    """torch_npu 2.13 has DTensor rules for its casts (ms-swift issue 7871 is of earlier ones): cast first before it.

    Its averages are refused, so `set_force_sum_reduction_for_comms(True)`: FSDP2 then sums, and divides by itself.
    """
    found = json.loads(run_ranks(2, f"{__file__}::shard")[0].out.splitlines()[-1])
    assert found["cast late"] == found["cast by torch_npu"] == found["cast first"] == "torch.float32", found
    assert "AVG" in found["average"], found
    assert found["sum, then divide"] == [[3.0] * 4] * 4  # the mean over two ranks of 2 samples of 1 and of 2
