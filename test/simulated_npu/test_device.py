"""device.Device on the simulated NPU: choice, precision, scaling, copies, memory, generator, compile."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import simulator
import torch
import warm
from torch import nn

from difftrain.config.parse_flags import parse
from difftrain.config.schema.sections import TrainConfig, TrainingSection
from difftrain.contracts import Batch, Bucket, ConfigFault, TrainingFault
from difftrain.device import Device, choose, compiling, quantised
from difftrain.device.memory import during
from difftrain.device.offload import HostMemory
from difftrain.distributed.launch import Launch
from difftrain.train.check import check_device
from difftrain.train.diagnosis.out_of_memory import explained


@pytest.fixture
def npu() -> Device:
    return choose("npu")


def probed(code: str, expect: int = 0, **environ: str) -> str:
    """Run code in a process of its own: one process is for one device, as everywhere in training."""
    path = f"{Path(__file__).parents[2] / 'library'}{os.pathsep}{os.environ['PYTHONPATH']}"
    environ = os.environ | {"PYTHONPATH": path} | environ
    done = warm.completed([sys.executable, "-c", code], env=environ)
    assert done.returncode == expect, done.stderr
    return done.stdout + done.stderr


def test_a_rank_takes_the_device_of_its_number_and_a_single_process_the_one_that_ascend_names() -> None:
    told = probed(
        "import os; from difftrain.device import choose; import torch\n"
        "rank = choose('auto', local_rank=2, local_size=4)\n"
        "print('rank', rank.kind, rank.torch_device, rank.backend, torch.ones(1, device='npu').device)\n"
        "print('alone', choose('npu').torch_device, torch.npu.current_device())\n"
        "os.environ['ASCEND_RT_VISIBLE_DEVICES'] = '1,3,0'\n"
        "print('seen', choose('npu').torch_device)\n",
        ASCEND_DEVICE_ID="3",
    )
    assert "rank npu npu:2 hccl npu:2" in told and "alone npu:3 3" in told and "seen npu:1" in told


def test_fewer_devices_than_ranks() -> None:
    with pytest.raises(ConfigFault, match=r"65 npu devices .*on this machine, \d+ found .*--nproc_per_node="):
        choose("npu", local_rank=0, local_size=65)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("no", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_autocast(npu: Device, precision: str, dtype: torch.dtype) -> None:
    layer, x = nn.Linear(4, 4).to(npu.torch_device), torch.ones(2, 4, device=npu.torch_device)
    with npu.autocast(precision):
        assert layer(x).dtype == dtype
    assert layer(x).dtype == torch.float32


def test_an_overflow_skips_the_update_and_halves_the_scale(npu: Device) -> None:
    weight = nn.Parameter(torch.ones(3, device=npu.torch_device))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=npu.fused_optimizer)
    scaler = npu.scaler("fp16")
    assert scaler is not None and scaler.get_scale() == 128.0
    for factor, moved in ((1.0, True), (float("inf"), False), (1.0, True)):
        before, scale = weight.detach().clone(), scaler.get_scale()
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (not torch.equal(before, weight)) == moved
        assert scaler.get_scale() == (scale if moved else scale / 2)


def test_fp16_is_refused_where_it_saturates(npu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INF_NAN_MODE_FORCE_DISABLE", "1")
    with pytest.raises(ConfigFault, match="INF_NAN_MODE_FORCE_DISABLE: 1 makes the NPU saturate"):
        npu.scaler("fp16")
    code = "from difftrain.device import choose; choose('npu').scaler('fp16')"
    told = probed(code, expect=1, SIMULATED_NPU_SATURATE="1", INF_NAN_MODE_FORCE_DISABLE="")
    assert "60000 + 60000 is 65504 in fp16 on npu:0: " in told
    assert "unset INF_NAN_MODE_ENABLE and INF_NAN_MODE_FORCE_DISABLE" in told


def test_a_variable_that_stops_every_operator_is_named_before_the_first(npu: Device) -> None:
    code = "import torch, torch_npu; torch.ones(1, device='npu')"
    assert "INF_NAN_MODE_ENABLE shouldn't be set to 0" in probed(code, expect=1, INF_NAN_MODE_ENABLE="0")
    told = probed("from difftrain.device import choose; choose('npu')", expect=1, INF_NAN_MODE_ENABLE="0")
    assert "environment INF_NAN_MODE_ENABLE: 0 is not " in told
    assert "INF_NAN_MODE_FORCE_DISABLE=1" in told


def test_batches_come_through_pinned_memory_without_a_wait(npu: Device) -> None:
    ids = torch.arange(2)
    pinned = torch.randn(2, 3).pin_memory()
    features = {"pixels": torch.randn(2, 3, 8, 8), "strided": torch.randn(4, 6)[:, ::2], "pinned": pinned}
    batch = Batch(Bucket(8, 8), ids, ids, features, {"noise": torch.randn(2, 4)}, loss_mask=torch.ones(2, 1))
    with simulator.counting() as counted:
        moved = npu.to_device(batch)
    assert not simulator.host_syncs(counted) and counted["copy to the device"] >= 5
    for name, tensor in features.items():
        assert moved.features[name].device == npu.torch_device and torch.equal(moved.features[name].cpu(), tensor)
    assert torch.equal(moved.draws["noise"].cpu(), batch.draws["noise"]) and moved.loss_mask is not None
    assert moved.record_id is ids


def test_activations_wait_on_the_host_and_nobody_waits_for_them(npu: Device) -> None:
    memory = HostMemory(npu)
    x = torch.randn(4, 6, device=npu.torch_device).t()
    with simulator.counting() as counted:
        kept = memory.away(x)
        back = memory.back(kept)
    assert not simulator.host_syncs(counted) and kept[1].is_pinned() and back.stride() == x.stride()
    assert torch.equal(back, x) and memory.moved_bytes == 96


@pytest.mark.usefixtures("clean_memory")
def test_memory_is_told(npu: Device) -> None:
    npu.reset_peak_memory()
    before = npu.memory()
    assert before is not None and before.total == 64.0
    block = torch.empty(1 << 30, dtype=torch.uint8, device=npu.torch_device)
    now = npu.memory()
    assert now is not None and now.allocated - before.allocated == pytest.approx(1.0, abs=0.01)
    assert now.free <= before.free - 0.99 and now.reserved >= 1.0
    del block
    assert npu.peak_memory_gib() >= 1.0
    npu.reset_peak_memory()
    assert npu.peak_memory_gib() < 1.0


def test_a_full_device_says_what_needs_less(npu: Device) -> None:
    words = ["--init_from_config=tiny", "--train_data_dir=.", "--output_dir=out", "--resolution=64"]
    cfg = parse([*words, "--train_batch_size=4"]).config
    with pytest.raises(TrainingFault) as caught, explained(cfg, npu, Launch(1, 2, 1, 2)), during("training (step 3)"):
        torch.empty(100 << 30, dtype=torch.uint8, device=npu.torch_device)
    text = str(caught.value)
    assert text.startswith("rank 1: npu:0 ") and "training (step 3), 100.00 GiB more " in text and "(64.00 " in text
    for way in ("--gradient_checkpointing", "--cache_latents", "--train_batch_size=2", "--optimizer_type=oss"):
        assert way in text


def test_dropout_is_seeded_without_a_wait(npu: Device) -> None:
    drop, x = nn.Dropout(0.5), torch.ones(200, device=npu.torch_device)
    with simulator.counting() as counted:
        npu.seed(2**62 + 1)
        first = drop(x)
        other = drop(x)
        npu.seed(2**62 + 1)
        again = drop(x)
    assert not simulator.host_syncs(counted)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_steps_are_timed_by_events(npu: Device) -> None:
    mark = npu.marker()
    assert mark is not None
    with simulator.counting() as counted:
        first, last = mark(), mark()
    assert not simulator.host_syncs(counted)
    npu.synchronise()
    assert first.elapsed_time(last) >= 0.0


def test_compile_is_off_and_says_why(npu: Device) -> None:
    section = TrainingSection(compile=True)
    block = nn.Linear(2, 2)
    assert compiling.compile_faults(section, npu) == []
    said = compiling.compile_blocks([block], section, npu, buckets=False)
    assert said.startswith("compile: off on npu: what inductor ")
    assert block._compiled_call_impl is None
    (fault,) = compiling.compile_faults(TrainingSection(compile=True, compile_backend="cudagraphs"), npu)
    assert "it records CUDA graphs, and this run is on npu" in fault


def test_8_bits_are_refused(npu: Device) -> None:
    words = [
        "--init_from_config=tiny",
        "--train_data_dir=.",
        "--output_dir=out",
        "--resolution=64",
        "--mixed_precision=bf16",
    ]
    check_device(parse(words).config, npu)
    with pytest.raises(ConfigFault, match=r"--fp8_base: .*NPU.*A2 and A3 .*8-bit floats"):
        check_device(parse([*words, "--fp8_base"]).config, npu)
    held = TrainConfig.model_validate({"model": {"family": "flux", "train_only": ["attn"], "base_dtype": "fp8"}})
    with pytest.raises(ConfigFault, match=r"base_dtype.*8-bit floats"):
        check_device(held, npu)
    layer = layer_of("fp8").to(npu.torch_device)
    with pytest.raises(RuntimeError, match="have no fp8"):  # as the device itself says
        layer.wide(torch.bfloat16)


def layer_of(kind: quantised.Kind) -> quantised.QuantisedLinear:
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 40).requires_grad_(False)
    weight = layer.weight.detach().clone()
    quantised.hollow([layer], kind, torch.float32)
    assert isinstance(layer, quantised.QuantisedLinear)
    layer.take(weight)
    return layer


@pytest.mark.parametrize("kind", ["bf16", "int8", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_few_bits_are_made_wide_with_the_bits_of_the_host(
    npu: Device, kind: quantised.Kind, dtype: torch.dtype
) -> None:
    layer = layer_of(kind)
    wide = layer.wide(dtype)
    assert torch.equal(layer.to(npu.torch_device).wide(dtype).cpu(), wide)
    x = torch.randn(3, 96, dtype=dtype, device=npu.torch_device, requires_grad=True)
    layer(x).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_the_description_names_the_stack(npu: Device) -> None:
    about = npu.describe()
    assert about["kind"] == "npu" and about["torch_npu"].startswith("2.13.0") and about["cann"] == "8.5.0"
    assert about["memory_gib"] == 64.0 and about["name"].startswith("Ascend910")
