"""Every patch of third_patch: it applies, comes off, and is still needed; two gloo ranks run each case off and on."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from third_patch import accelerate_patch, apply_for, fairscale_patch
from third_patch.patching import Patch
from torch import nn

from difftrain.contracts import ConfigFault
from difftrain.device import choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.testing.spawn import run_ranks

STEPS, RATE = 6, 0.05

# ---------------------------------------------------------------- what the ranks run


def cases(folder: str) -> None:
    """Run every case without the patches and with them."""
    warnings.simplefilter("ignore")
    with Ranks.open(Launch.from_environment(), choose("cpu"), 2.0) as ranks:
        found: dict[str, dict] = {"off": {}, "on": {}}
        for case in (gradients, rates, host_waits, consolidated, reduced_in_half, scaler, prepared, resumed, saved):
            found["off"][case.__name__] = case(Path(folder) / "off")
            fairscale_patch.apply()
            accelerate_patch.apply()
            found["on"][case.__name__] = case(Path(folder) / "on")
            accelerate_patch.revert()
            fairscale_patch.revert()
        everything = ranks.gather(found)
        if ranks.is_logger:
            (Path(folder) / "found.json").write_text(json.dumps(everything))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def sharded(**options):
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS

    inner = model()
    optimizer = OSS(inner.parameters(), optim=torch.optim.AdamW, lr=RATE)
    return ShardedDataParallel(inner, optimizer, **options), optimizer


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(folder: Path) -> float:
    """Train as torch's optimizers want it, zero_grad() and all, beside one process with both shares."""
    import torch.distributed as dist

    wrapped, optimizer = sharded()
    alone = model()
    plain = torch.optim.AdamW(alone.parameters(), lr=RATE)
    for step in range(STEPS):
        wrapped(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.stack([alone(batch(step, rank)).square().mean() for rank in range(2)]).mean().backward()
        plain.step()
        plain.zero_grad()
    return max(float((a - b).abs().max()) for a, b in zip(wrapped.module.parameters(), alone.parameters()))


def rates(folder: Path) -> list[float]:
    """Step a schedule; look at the inner optimizer, also after a state was loaded."""
    _, optimizer = sharded()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    schedule.step()
    found = [optimizer.param_groups[0]["lr"], optimizer.optim.param_groups[0]["lr"]]
    optimizer.load_state_dict(optimizer.state_dict(all_ranks=True))
    schedule.step()
    return [*found, optimizer.param_groups[0]["lr"], optimizer.optim.param_groups[0]["lr"]]


def host_waits(folder: Path) -> bool:
    """Tell whether parameters are sent only after the host has waited for CUDA."""
    waits = []
    before, torch.cuda.synchronize = torch.cuda.synchronize, lambda device=None: waits.append(device)
    try:
        _, optimizer = sharded()
        optimizer._default_device = torch.device("cuda")
        optimizer._broadcast_params()
    finally:
        torch.cuda.synchronize = before
    return bool(waits)


def consolidated(folder: Path) -> bool:
    """Tell whether a state that was gathered stays as it was while training goes on."""
    import torch.distributed as dist

    wrapped, optimizer = sharded()
    for step in range(2):
        wrapped(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        if step == 0:
            optimizer.consolidate_state_dict(recipient_rank=-1)
            kept = optimizer.state_dict()["state"]
            before = {key: state["exp_avg"].clone() for key, state in kept.items()}
        wrapped.zero_grad()
    return len(before) == 4 and all(torch.equal(kept[key]["exp_avg"], before[key]) for key in before)


def reduced_in_half(folder: Path) -> list[bool]:
    """Ask for a reduction in fp16: of buckets, and of gradients outside of them."""
    import torch.distributed as dist

    found = []
    for size in (1024, 0):
        wrapped, optimizer = sharded(reduce_fp16=True, reduce_buffer_size=size)
        wrapped(batch(0, dist.get_rank())).square().mean().backward()
        mine = [each.grad for each in optimizer.optim.param_groups[0]["params"]]
        found.append(all(torch.equal(grad, grad.half().float()) for grad in mine) and any(grad.any() for grad in mine))
    return found


def scaler(folder: Path) -> dict:
    """Scale on the host; rank 1 alone meets an overflow."""
    import torch.distributed as dist
    from fairscale.optim.grad_scaler import ShardedGradScaler

    made = ShardedGradScaler(init_scale=128.0)
    found: dict[str, object] = {"enabled": made._enabled}
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    loss = (parameter * (float("inf") if dist.get_rank() == 1 else 1.0)).sum()
    made.scale(loss).backward()
    made.step(optimizer)
    made.update()
    found["kept"] = bool((parameter == 1.0).all())
    if made._enabled:
        found |= {"scale": made.get_scale(), "saved": made.state_dict()["scale"]}
    return found


def prepared(folder: Path) -> dict:
    """Hand model and OSS to accelerate, with a loss scale that begins low, and save and load what it made."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from fairscale.optim import OSS

    def made():
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
        inner = model()
        schedule = None
        optimizer = OSS(inner.parameters(), optim=torch.optim.AdamW, lr=RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return accelerator, accelerator.prepare(inner, optimizer, schedule)

    def train(accelerator, parts, first, last):
        wrapped, optimizer, schedule = parts
        for step in range(first, last):
            accelerator.backward(wrapped(batch(step, dist.get_rank())).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return [each.detach().clone() for each in wrapped.module.parameters()]

    try:
        accelerator, parts = made()
    except RuntimeError as error:
        return {"refused": str(error)[:60]}
    first = type(accelerator.scaler).__name__, accelerator.scaler.get_scale(), type(parts[0]).__name__
    train(accelerator, parts, 0, 3)
    accelerator.save_state(str(folder / "oss"))
    straight = train(accelerator, parts, 3, 6)
    other, again = made()
    other.load_state(str(folder / "oss"))
    same = all(torch.equal(a, b) for a, b in zip(straight, train(other, again, 3, 6)))
    return {"made": first, "same": same}


def resumed(folder: Path) -> bool:
    """Tell whether noise drawn after a resume in mid-epoch is the noise of the unbroken run."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(16.0), batch_size=2))
    torch.manual_seed(1)
    straight = []
    for place, _ in enumerate(loader):
        straight.append(float(torch.randn(())))
        if place == 1:
            accelerator.save_state(str(folder / "loader"))
    accelerator.load_state(str(folder / "loader"))
    again = [float(torch.randn(())) for _ in accelerator.skip_first_batches(loader, 2)]
    return again == straight[2:] and len(again) == 2


class Slow:
    """Something whose state takes the main process a while."""

    def state_dict(self) -> dict:
        import torch.distributed as dist

        if dist.get_rank() == 0:
            time.sleep(0.5)
        return {"value": 1}

    def load_state_dict(self, state: dict) -> None:
        """Take nothing."""


def saved(folder: Path) -> bool:
    """Tell whether the state is whole on disk when save_state returns."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Slow())
    accelerator.save_state(str(folder / "slow"))
    whole = (folder / "slow" / "custom_checkpoint_0.pkl").exists()
    accelerator.wait_for_everyone()
    return whole


# ---------------------------------------------------------------- what is expected


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("patches")
    run_ranks(2, f"{__file__}::cases", folder, timeout_s=120)
    return json.loads((folder / "found.json").read_text())


def test_gradients_stay_in_their_buckets(launched):
    assert all(each["off"]["gradients"] > 1e-3 for each in launched)
    assert all(each["on"]["gradients"] < 1e-6 for each in launched)


def test_the_inner_optimizer_has_the_rate_at_once(launched):
    for each in launched:
        outer, inner, later, inner_later = each["off"]["rates"]
        assert inner != outer and inner_later != later
        assert each["on"]["rates"] == [RATE / 2, RATE / 2, RATE / 4, RATE / 4]


def test_no_host_waits_before_parameters_are_sent(launched):
    assert all(each["off"]["host_waits"] and not each["on"]["host_waits"] for each in launched)


def test_a_consolidated_state_is_a_copy(launched):
    assert not any(each["off"]["consolidated"] for each in launched)  # of what training goes on changing
    assert all(each["on"]["consolidated"] for each in launched)


def test_buckets_are_reduced_in_half_where_asked_for(launched):
    assert all(each["off"]["reduced_in_half"][0] is False for each in launched)
    assert all(each["on"]["reduced_in_half"] == [True, True] for each in launched)


def test_the_scaler_scales_and_all_ranks_skip_an_overflow_of_one(launched):
    assert [each["off"]["scaler"] for each in launched] == [
        {"enabled": False, "kept": False},
        {"enabled": False, "kept": False},  # inf is in the weights
    ]
    on = {"enabled": True, "kept": True, "scale": 64.0, "saved": 64.0}
    assert [each["on"]["scaler"] for each in launched] == [on, on]


def test_accelerate_prepares_oss_and_its_state_comes_back(launched):
    assert all("consolidated" in each["off"]["prepared"]["refused"] for each in launched)
    on = {"made": ["ShardedGradScaler", 32.0, "ShardedDataParallel"], "same": True}
    assert all(each["on"]["prepared"] == on for each in launched)


def test_a_resume_in_mid_epoch_draws_the_same_noise(launched):
    assert not any(each["off"]["resumed"] for each in launched)
    assert all(each["on"]["resumed"] for each in launched)


def test_a_state_is_whole_when_save_state_returns(launched):
    assert not launched[1]["off"]["saved"]
    assert all(each["on"]["saved"] for each in launched)


class Thing:
    """Something to patch."""

    def own(self) -> str:
        return "old"


class Child(Thing):
    """Something that inherits what is patched."""


@contextmanager
def installed(monkeypatch, version: str | None):
    def told(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", told)
    yield


def patch() -> Patch:
    return Patch("thing", "1.15", "1.16", "it says new", lambda: [(Child, "own", lambda self: "new")])


def test_a_patch_is_applied_once_logged_once_and_comes_off(monkeypatch, caplog):
    made = patch()
    with installed(monkeypatch, "1.15.3"), caplog.at_level("INFO", "difftrain"):
        sentence = made.apply()
        assert "thing 1.15.3" in sentence and "it says new" in sentence and made.apply() == ""
    assert caplog.messages == [sentence] and Child().own() == "new" and made.applied
    made.revert()
    assert Child().own() == "old" and "own" not in vars(Child) and not made.applied
    made.revert()


@pytest.mark.parametrize("version", ["1.14.9", "1.16.0", "2.0.dev1", "unknown"])
def test_another_version_is_refused_by_name(monkeypatch, version):
    with installed(monkeypatch, version), pytest.raises(ConfigFault) as caught:
        patch().apply()
    assert f"thing {version}" in str(caught.value) and "1.15" in str(caught.value) and caught.value.exit_code == 2
    assert Child().own() == "old"


def test_a_package_that_is_missing_needs_no_patch(monkeypatch):
    with installed(monkeypatch, None):
        assert patch().apply() == ""


def test_real_patches_come_off_and_are_asked_for_by_engine():
    from accelerate import Accelerator
    from fairscale.optim import OSS

    before = dict(vars(OSS)), dict(vars(Accelerator))
    try:
        assert [each.split()[0] for each in apply_for("accelerate", "OSS")] == ["fairscale", "accelerate"]
        assert apply_for("accelerate", "oss") == [] and dict(vars(OSS)) != before[0]
    finally:
        accelerate_patch.revert()
        fairscale_patch.revert()
    assert (dict(vars(OSS)), dict(vars(Accelerator))) == before
    try:
        assert [each.split()[0] for each in apply_for("accelerate", "AdamW")] == ["accelerate"]
    finally:
        accelerate_patch.revert()
    assert "third_patch.fairscale_patch" in sys.modules and not fairscale_patch.PATCH.applied
