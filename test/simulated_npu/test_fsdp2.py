"""FSDP2 on the device: what goes wrong there, the order that works, and the engine that uses it."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from difftrain.config.schema.sections import FsdpSection, OptimizerSection, TrainConfig, TrainingSection
from difftrain.device import choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.optim import make_optimizer, make_schedule
from difftrain.testing.family import TinyFamily, tiny_batch, tiny_step
from difftrain.testing.spawn import run_ranks

GLOBAL_BATCH, STEPS = 8, 3
DEEP = {"width": 128, "blocks": 48, "lr": 1e-4}  # weights count, activations do not


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


# ---------------------------------------------------------------- the engine


def train(folder: str, engine: str, precision: str, offload: str = ""):
    """Train a deep model of many small blocks; print losses, what stands after a step, and the peak of one."""
    launch = Launch.from_environment()
    device = choose("npu", launch.local_rank, launch.local_size)
    with Ranks.open(launch, device, 2.0) as ranks:
        cfg = TrainConfig(
            training=TrainingSection(seed=3, engine=engine, mixed_precision=precision),
            fsdp=FsdpSection(cpu_offload=bool(offload)),
            optimizer=OptimizerSection(),
        )
        family = TinyFamily(**DEEP)
        made = make_engine(cfg, device, ranks)
        assert not made.faults()
        made.build(
            family,
            family.load(),
            lambda groups: make_optimizer(cfg.optimizer, groups, fused_ok=device.fused_optimizer),
            lambda optimizer: make_schedule(cfg.optimizer, optimizer, 20),
            [tiny_batch(range(2))],
        )
        losses, peak = [], 0
        for step in range(STEPS):
            torch.npu.synchronize()
            torch.npu.reset_peak_memory_stats()
            stats = made.step(tiny_step(step, GLOBAL_BATCH, ranks.rank, ranks.size), {"samples": float(GLOBAL_BATCH)})
            losses.append(float(stats.sums["loss"]))
            peak = torch.npu.max_memory_allocated()
        Path(folder).mkdir(exist_ok=True)
        made.snapshot().write(Path(folder))
        state = [each for state in made.optimizer.state.values() for each in state.values()]
        where = {each.device.type for each in state if isinstance(each, torch.Tensor) and each.ndim}
        print(
            json.dumps(
                {
                    "losses": losses,
                    "peak": peak,
                    "rows": sum(t.numel() for _, t, _ in made.shards()),
                    "state": sorted(where),
                }
            )
        )


def trained(ranks: int, *how: object) -> list[dict]:
    return [json.loads(each.out.splitlines()[-1]) for each in run_ranks(ranks, f"{__file__}::train", *how)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict:
    """One device with the native engine."""
    return trained(1, tmp_path_factory.mktemp("alone"), "native", "no")[0]


def test_two_devices_learn_what_one_does_with_half_the_memory(alone: dict, tmp_path: Path):
    two = trained(2, tmp_path / "two", "fsdp", "no")
    weights = 4 * alone["rows"]
    for each in two:
        assert each["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert each["peak"] <= 0.55 * 4 * weights  # of weights, gradients and AdamW's two moments
    assert sum(each["rows"] for each in two) == alone["rows"]


@pytest.mark.flags("fsdp_cpu_offload")
def test_weights_that_wait_on_the_host_give_the_same(alone: dict, tmp_path: Path):
    two = trained(2, tmp_path / "two", "fsdp", "no", "offload")
    for each in two:
        assert each["losses"] == pytest.approx(alone["losses"], rel=1e-6) and each["state"] == ["cpu"]
        assert each["peak"] < 0.2 * 16 * alone["rows"]
