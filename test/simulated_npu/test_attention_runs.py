"""Runs on the simulated device: every attention that the architecture has is fused, and the report says so."""

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest
from doors import ROOT, Door, write_pictures

RUN = str(ROOT / "test/simulated_npu/run")
SIZES = json.loads((ROOT / "library/difftrain/models/sizes_shipped/sdxl.tiny.json").read_text())
BUILT = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # the device is built there already
STEPS = 2


@pytest.fixture(scope="module")
def door(tmp_path_factory) -> Door:
    base = tmp_path_factory.mktemp("attention")
    return Door(write_pictures(base / "pictures", 6), base / "cache")


def attentions_of_a_unet(size: dict) -> int:
    """Count two in each transformer block: of itself, and of the text."""
    depths = size["transformer_layers_per_block"]
    layers = size["layers_per_block"]
    crossed = [kind.startswith("CrossAttn") for kind in size["down_block_types"]]
    down = sum(depth * layers for depth, cross in zip(depths, crossed) if cross)
    up = sum(depth * (layers + 1) for depth, cross in zip(depths, crossed) if cross)
    return 2 * (down + depths[-1] + up)


UNET = attentions_of_a_unet(SIZES["unet"])
TEXT = sum(SIZES[part]["num_hidden_layers"] for part in ("text_encoder", "text_encoder_2"))
VAE = 1


def trained(
    door: Door, out: Path, *extra: str, cann: str | None = None, counts: Path | None = None
) -> tuple[dict, str]:
    flags = door.flags(out, "--save_every_n_steps=100", "--max_data_loader_n_workers=0", *extra, steps=STEPS)
    command = [RUN, f"--cann={cann}", *door.command(flags)] if cann else door.command(flags)
    counted = {"SIMULATED_NPU_COUNTS": str(counts)} if counts else {}
    printed = door.run_words(command, XDG_CACHE_HOME=BUILT, **counted)
    return json.loads((out / "report.json").read_text()), printed


def on_the_device(counts: Path) -> Counter:
    return sum(
        (Counter(json.loads(path.read_text())) for path in counts.parent.glob(f"{counts.name}.*.json")), Counter()
    )


def test_every_attention_of_a_step_is_fused_and_counted(door: Door, tmp_path: Path) -> None:
    trains_both = ("--train_text_encoder", "--gradient_checkpointing", "--mixed_precision=bf16")
    report, printed = trained(door, tmp_path / "out", *trains_both, counts=tmp_path / "counts")
    calls = report["kernels"]["attention"]
    # the first text encoder's last layer is computed, but not read: it gets no gradient, and is not computed again
    again = UNET + TEXT - 1
    assert calls == {"fused": UNET + TEXT + VAE, "sdpa": 0, "recomputed": again, "why": {}}
    assert f"step 1: {UNET + TEXT + VAE} calls, all fused; {again} more " in printed
    assert report["attention"].startswith("attention: npu_fusion_attention where ")
    ran = on_the_device(tmp_path / "counts")
    looked_at = VAE  # what the frozen encoder makes of the first batch, before the first step
    assert ran["npu::npu_fusion_attention"] == looked_at + STEPS * (UNET + TEXT + VAE + again)
    assert ran["npu::npu_fusion_attention_grad"] == STEPS * again
    assert not ran["aten::_softmax"]


@pytest.mark.nightly  # the doctor finds it: test_doctor.py; which attention runs then: test/unit/device/test_attention.py
@pytest.mark.flags("enable_npu_flash_attention")
def test_an_older_cann_in_fp32_says_once_what_is_used_instead(door: Door, tmp_path: Path) -> None:
    report, printed = trained(door, tmp_path / "out", "--enable_npu_flash_attention", cann="7.0.0")
    told = r"scaled_dot_product_attention .* fp32, "
    assert len(re.findall(told, printed)) == 1 and re.search(told, report["attention"])
    [why] = report["kernels"]["attention"]["why"]
    assert why.startswith("float32 ") and why.endswith(" CANN 7.0.0")
    number = UNET + TEXT + VAE
    assert report["kernels"]["attention"] == {"fused": 0, "sdpa": number, "recomputed": 0, "why": {why: number}}
    assert printed.count(f"step 1: {number} calls, none fused") == 1
