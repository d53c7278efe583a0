"""Precision and memory through the door: exact resume, exports, pictures, and what is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from doors import Door, losses
from safetensors.torch import load_file

HALF = ("--mixed_precision=bf16", "--full_bf16", "--use_ema", "--ema_decay=0.9", "--save_every_n_steps=3")
# blocks of the tiny UNet, as --block_lr counts them: the first half rests
BLOCKS = ",".join(["0"] * 8 + ["1e-4"] * 9)
SAVING = ("--fp8_base", f"--block_lr={BLOCKS}", "--gradient_checkpointing", "--cpu_offload_checkpointing")


@pytest.mark.flags("full_bf16", "fp8_base", "cpu_offload_checkpointing")
def test_half_weights_and_frozen_layers_in_8_bits_resume_exactly(door: Door, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red star --w 64 --h 64 --s 2 --d 1\n")
    flags = (*HALF, *SAVING, f"--sample_prompts={prompts}", "--sample_sampler=euler")
    straight = tmp_path / "straight"
    said = door.run(door.flags(straight, *flags, steps=6))
    assert "in 8 bits, " in said and " layers of unet" in said
    state = straight / "NAME-step00000003-state"
    door.run(door.flags(tmp_path / "resumed", *flags, f"--resume={state}", steps=6))
    assert losses(tmp_path / "resumed") == losses(straight)[3:]
    for name in ("NAME", "NAME-ema"):
        a, b = (load_file(out / f"{name}.safetensors") for out in (straight, tmp_path / "resumed"))
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    exported = load_file(straight / "NAME.safetensors")
    assert {value.dtype for key, value in exported.items() if key.startswith("model.")} == {torch.bfloat16}
    assert torch.float8_e4m3fn not in {value.dtype for value in exported.values()}
    kept = load_file(next(state.glob("weights-*.safetensors")))
    trained = {name for name, value in kept.items() if name.startswith("unet.") and value.dtype == torch.float32}
    assert 0 < len(trained) < len(kept)  # fp32 values of what is trained: weight and compensation
    assert any((kept[name].to(torch.bfloat16).float() != kept[name]).any() for name in trained)
    assert list(straight.glob("sample/*.png"))
