"""A device: precision, scaling, memory, copies, description; here on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from difftrain.contracts import Batch, Bucket, ConfigFault
from difftrain.device import Device, choose, host


@pytest.fixture
def cpu() -> Device:
    return choose("cpu")


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_autocast(cpu: Device, precision: str, dtype: torch.dtype) -> None:
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with cpu.autocast(precision):
        assert layer(x).dtype == dtype
    assert layer(x).dtype == torch.float32


def test_only_fp16_is_scaled(cpu: Device) -> None:
    assert cpu.scaler("no") is None and cpu.scaler("bf16") is None
    scaler = cpu.scaler("fp16")
    assert scaler is not None and scaler.is_enabled() and scaler.get_scale() == 65536.0


def test_an_overflow_skips_the_update_and_halves_the_scale(cpu: Device) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=cpu.fused_optimizer)
    scaler = cpu.scaler("fp16")
    assert scaler is not None
    for factor, moved in ((1.0, True), (float("inf"), False), (1.0, True)):
        before, scale = weight.detach().clone(), scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (not torch.equal(before, weight)) == moved
        assert scaler.get_scale() == (scale if moved else scale / 2)


def test_an_npu_that_saturates_instead_of_overflowing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = Device.__new__(Device)  # no such device here: only what the environment says is looked at
    npu.kind = "npu"
    monkeypatch.setenv("INF_NAN_MODE_ENABLE", "0")
    with pytest.raises(ConfigFault, match="INF_NAN_MODE_ENABLE"):
        npu.scaler("fp16")
    assert npu.scaler("bf16") is None
    assert npu.backend == "hccl" and npu.pin


def test_the_peak_of_memory_rises_and_can_be_reset(cpu: Device) -> None:
    cpu.reset_peak_memory()
    before = cpu.peak_memory_gib()
    block = np.ones(300 << 20, dtype=np.uint8)
    risen = cpu.peak_memory_gib()
    assert risen > before + 0.25
    del block
    assert cpu.peak_memory_gib(exact=False) >= 0 and cpu.peak_memory_gib(exact=False) == cpu.peak_memory_gib(
        exact=False
    )
    assert cpu.peak_memory_gib() > risen - 0.01  # the kernel counts in batches
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # a kernel that lets nobody reset it
    cpu.reset_peak_memory()
    assert cpu.peak_memory_gib() < risen - 0.2


def test_seeded_dropout_repeats(cpu: Device) -> None:
    drop, x = torch.nn.Dropout(0.5), torch.ones(200)
    cpu.seed(2**62 + 1)
    first = drop(x)
    assert not torch.equal(first, drop(x))
    cpu.seed(2**62 + 1)
    assert torch.equal(first, drop(x))


def test_a_batch_for_the_cpu_is_not_copied(cpu: Device) -> None:
    ids = torch.tensor([1])
    batch = Batch(Bucket(8, 8), ids, ids, {"pixels": torch.zeros(1, 3)}, {"noise": torch.zeros(1, 4)})
    moved = cpu.to_device(batch)
    assert moved.features["pixels"] is batch.features["pixels"] and moved.draws["noise"] is batch.draws["noise"]
    assert not cpu.pin
    cpu.synchronise()


def test_the_description_is_whole_and_plain(cpu: Device) -> None:
    about = json.loads(json.dumps(cpu.describe()))
    assert about["kind"] == "cpu" and about["name"] and about["torch"] == torch.__version__
    assert about["threads"] == torch.get_num_threads() and about["host"]["cores"] >= 1
    assert about["host"]["memory_gib"] is None or about["host"]["memory_gib"] > 0
    assert cpu.backend == "gloo"


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        (
            "aarch64-linux/ascend_toolkit_install.info",
            "package_name=Ascend-cann-toolkit\nversion=8.2.RC1\ninnerversion=V1\n",
            "8.2.RC1",
        ),
        ("version.cfg", "# version: 1.0\nruntime_running_version=[7.0.0.5.242:7.0.0]\n", "7.0.0"),
        ("version.cfg", "no version", None),
    ],
)
def test_the_cann_version_is_read_from_its_install_information(
    name: str, text: str, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    host.cann_version.cache_clear()
    try:
        assert host.cann_version() == version
    finally:
        host.cann_version.cache_clear()
