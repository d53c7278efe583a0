"""HCCL as c10d sees it: every collective, over four devices, and what it refuses."""

import json
import os

import pytest
import torch
import torch.distributed as dist

from difftrain.testing.spawn import run_ranks

SIZE = 4


def _log(rank, number):
    return torch.full((2,), float(rank + number), device=f"npu:{rank}")


def work():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl")
    found = {}
    x = _log(rank, 1)
    dist.all_reduce(x)
    found["all_reduce"] = x.tolist()
    handle = dist.all_reduce(x := _log(rank, 0), op=dist.ReduceOp.MAX, async_op=True)
    found["future"] = handle.get_future().wait()[0].device.type
    found["max"] = x.tolist()
    box = [torch.empty(2, device=x.device) for _ in range(size)]
    dist.all_gather(box, _log(rank, 0))
    found["all_gather"] = [each[0].item() for each in box]
    whole = torch.empty(2 * size, device=x.device)
    dist.all_gather_into_tensor(whole, _log(rank, 0))
    found["into_tensor"] = whole[::2].tolist()
    part = torch.empty(2, device=x.device)
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * size, device=x.device))
    found["reduce_scatter"] = part.tolist()
    swapped = torch.empty(size, dtype=torch.int64, device=x.device)
    dist.all_to_all_single(swapped, torch.arange(size, device=x.device) + 10 * rank)
    found["all_to_all"] = swapped.tolist()
    sent = _log(rank, 5).bfloat16()
    dist.broadcast(sent, 1)
    found["broadcast"] = sent.tolist()
    got = torch.empty(2, device=x.device)
    mine = _log(rank, 0)
    for each in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, (rank + 1) % size), dist.P2POp(dist.irecv, got, (rank - 1) % size)]
    ):
        each.wait()
    found["ring"] = got.tolist()
    total = _log(rank, 0)
    dist.reduce(total, 0)
    found["reduce"] = total.tolist()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = [each["rank"] for each in objects]
    dist.barrier()
    found["host"] = _over_gloo(rank)
    found["refused"] = _refusals(rank)
    dist.destroy_process_group()
    print(json.dumps(found))


def _over_gloo(rank):
    group = dist.new_group(backend="gloo")
    x = torch.tensor([rank])
    dist.all_reduce(x, group=group)
    return x.item()


def _refusals(rank):
    said = []
    for call in (
        lambda: dist.all_reduce(_log(rank, 0), op=dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.empty(2, dtype=torch.float8_e4m3fn, device=f"npu:{rank}")),
        lambda: dist.all_reduce(torch.ones(2)),
    ):
        try:
            call()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def found():
    return [json.loads(ended.out.splitlines()[-1]) for ended in run_ranks(SIZE, f"{__file__}::work")]


EVERYWHERE = {
    "all_reduce": [10, 10],
    "future": "npu",
    "max": [3, 3],
    "all_gather": [0, 1, 2, 3],
    "into_tensor": [0, 1, 2, 3],
    "broadcast": [6, 6],
    "objects": [0, 1, 2, 3],
    "host": 6,
}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_collectives_give_every_rank_the_same(found, name):
    assert [each[name] for each in found] == [EVERYWHERE[name]] * SIZE


def test_collectives_give_every_rank_its_own(found):
    for rank, each in enumerate(found):
        assert each["reduce_scatter"] == [SIZE * 2 * rank, SIZE * (2 * rank + 1)]
        assert each["all_to_all"] == [10 * other + rank for other in range(SIZE)]
        assert each["ring"] == [(rank - 1) % SIZE] * 2
    assert found[0]["reduce"] == [6, 6]


def test_what_hccl_lacks_is_refused(found):
    average, eight_bits, host = found[2]["refused"]
    assert "AVG" in average and "hccl_types.h" in average
    assert "no data type for Float8" in eight_bits
    assert host  # gloo serves host tensors, in a group of its own


def share_a_device():
    torch.npu.set_device(0)
    dist.init_process_group("hccl")
    try:
        dist.all_reduce(torch.ones(2, device="npu"))
    except RuntimeError as error:
        print(str(error).splitlines()[0])


def test_two_ranks_on_one_device_are_refused():
    said = [ended.out for ended in run_ranks(2, f"{__file__}::share_a_device", check=False)]
    assert "ranks 0 and 1 are on one device (npu:0)" in said[1]
