"""The accelerate engine on simulated NPUs: DDP, fairscale and DeepSpeed's ZeRO on three of them, beside plain DDP over HCCL."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import third_patch
import torch

from difftrain.device import choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.engine.base import BaseEngine
from difftrain.testing.family import tiny_step
from difftrain.testing.spawn import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))  # the ranks are no pytest
from ways import COUNTS, GLOBAL_BATCH, built, commit, digest, equal, off, run, spoilt, tensors_of, weights

KIND = "npu"
LR, STEPS = 1e-4, 4
PLAIN = {"lr": LR, "terms": 2}
WAYS = ("ddp", "sharded", "zero2", "zero3")

# ---------------------------------------------------------------- what the ranks run


def cases(folder: str) -> None:
    """Run every case on these ranks."""
    third_patch.apply_for("accelerate", "oss")
    torch.Tensor.__repr__ = lambda self: (
        f"tensor of {tuple(self.shape)}"
    )  # else in fp64: ZeRO 3 prints what it is given
    launch = Launch.from_environment()
    device = choose(KIND, launch.local_rank, launch.local_size)
    with Ranks.open(launch, device, 2.0) as ranks:
        native = built(ranks, "native", PLAIN, KIND)
        losses = run(native, 0, STEPS, 2)
        found = {way: case(ranks, way, Path(folder), native, losses) for way in WAYS}
        found["scaled"], found["consolidated"], found["noise"] = scaled(ranks), consolidated(), noise(folder)
        gathered = ranks.gather(found)
        if ranks.is_logger:
            (Path(folder) / "found.json").write_text(json.dumps(gathered))


def case(ranks: Ranks, way: str, out: Path, native: BaseEngine, losses: list[float]) -> dict:
    """Some steps beside plain DDP, a state that comes back and goes to the native engine, and a bad sample."""
    engine = built(ranks, way, PLAIN, KIND)
    found = {"losses": [run(engine, 0, STEPS, 2), losses], "off": off(weights(engine), weights(native))}
    found["places"] = sorted({str(each.device.type) for each in engine.root.parameters()})
    found["detected"] = str(engine.accelerator.distributed_type)
    path = commit(engine, out, way)
    straight = run(engine, STEPS, STEPS + 2)
    resumed, back = built(ranks, way, PLAIN, KIND), built(ranks, "native", PLAIN, KIND)
    resumed.restore(path)
    back.restore(path)
    found["resumed"] = run(resumed, STEPS, STEPS + 2) == straight and equal(weights(resumed), weights(engine))
    found["format"] = equal(tensors_of(commit(back, out, f"native-{way}")), tensors_of(path))
    before = weights(engine)
    found["skipped"] = float(engine.step(spoilt(STEPS + 2, ranks, float("nan")), COUNTS).skipped)
    found["kept"], found["digest"] = equal(weights(engine), before), digest(engine)
    return found


def scaled(ranks: Ranks) -> dict:
    """fp16: the last rank alone overflows."""
    engine = built(ranks, "sharded", PLAIN, KIND, mixed_precision="fp16")
    native = built(ranks, "native", PLAIN, KIND, mixed_precision="fp16")
    losses = [run(engine, 0, 4), run(native, 0, 4)]
    before, scale = weights(engine), engine._scaler.get_scale()
    skipped = float(engine.step(spoilt(4, ranks, 6e4), COUNTS).skipped)
    kept, after = equal(weights(engine), before), engine._scaler.get_scale()
    engine.step(tiny_step(5, GLOBAL_BATCH, ranks.rank, ranks.size), COUNTS)
    return {"losses": losses, "skipped": skipped, "kept": kept, "scales": [scale, after], "digest": digest(engine)}


def consolidated() -> dict:
    """Gather OSS's state with the patch, and without it, where each rank's tensors come out on the sender's device."""
    from fairscale.optim import OSS
    from third_patch import fairscale_patch

    found = {}
    for name, switch in (("on", fairscale_patch.apply), ("off", fairscale_patch.revert)):
        switch()
        module = torch.nn.Linear(3, 3).to(KIND)
        optimizer = OSS(module.parameters(), optim=torch.optim.AdamW, lr=LR)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with _sent() as places:
            optimizer.consolidate_state_dict(recipient_rank=-1)
        found[name] = sorted(places)
    fairscale_patch.apply()
    return found


@contextmanager
def _sent() -> Iterator[set[str]]:
    """Note where tensors are that go into a message."""
    broadcast, places = torch.distributed.broadcast_object_list, set()

    def noting(box: list, **how: object) -> None:
        places.update(str(tensor.device.type) for tensor in _tensors(box))
        broadcast(box, **how)

    torch.distributed.broadcast_object_list = noting
    try:
        yield places
    finally:
        torch.distributed.broadcast_object_list = broadcast


def noise(folder: str) -> list[bool]:
    """Draw on the device after a resume in mid-epoch, with the patch of accelerate and without it."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from third_patch import accelerate_patch

    found = []
    for switch in (accelerate_patch.apply, accelerate_patch.revert):
        switch()
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator()
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(24.0), batch_size=2))
        torch.npu.manual_seed(1)
        straight = []
        for place, batch in enumerate(loader):
            straight.append(float(torch.randn((), device=batch.device)))
            if place == 1:
                accelerator.save_state(f"{folder}/noise")
                accelerator.wait_for_everyone()
        accelerator.load_state(f"{folder}/noise")
        again = [float(torch.randn((), device=KIND)) for _ in accelerator.skip_first_batches(loader, 2)]
        found.append(again == straight[2:] and len(again) == 2)
    accelerate_patch.apply()
    return found


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [found for each in value for found in _tensors(each)] if isinstance(value, list | tuple) else []


# ---------------------------------------------------------------- what is expected


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("three")
    run_ranks(3, f"{__file__}::cases", folder, timeout_s=300)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("way", WAYS)
def test_every_way_through_accelerate_is_plain_ddp(launched, way):
    detected = "DistributedType.DEEPSPEED" if way.startswith("zero") else "DistributedType.MULTI_NPU"
    for each in (found[way] for found in launched):
        mine, native = each["losses"]
        assert mine == pytest.approx(native, rel=1e-6) and each["off"] <= LR
        assert each["places"] == [KIND] and each["detected"] == detected
        assert each["resumed"] and each["format"]
        assert each["skipped"] == 1.0 and each["kept"] and each["digest"] == launched[0][way]["digest"]


def test_an_overflow_on_one_of_three_is_skipped_by_all(launched):
    told = [found["scaled"] for found in launched]
    assert all(each == told[0] for each in told)
    mine, native = told[0]["losses"]
    assert mine == pytest.approx(native, rel=1e-5)
    assert told[0]["skipped"] == 1.0 and told[0]["kept"]
    assert told[0]["scales"] == [128.0, 64.0]  # where an NPU begins


def test_a_consolidated_state_travels_on_the_host(launched):
    assert all(KIND in found["consolidated"]["off"] for found in launched)
    assert [found["consolidated"]["on"] for found in launched] == [["cpu"], ["cpu"], []]  # two parameters, three ranks


def test_noise_of_the_device_goes_on_after_a_resume(launched):
    assert all(found["noise"] == [True, False] for found in launched)
