"""Ten fp32 CPU losses of every tiny family, to 1e-5 of the committed figures; exact resume on one machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from doors import Door, losses
from safetensors.torch import load_file

CASES = {
    "sdxl_epsilon": (),
    "sdxl_v_min_snr_text_encoders": (
        "--v_parameterization",
        "--min_snr_gamma=5",
        "--train_text_encoder",
        "--learning_rate_te1=1e-5",
        "--learning_rate_te2=1e-5",
        "--shuffle_caption",
        "--caption_dropout_rate=0.2",
        "--flip_aug",
        "--gradient_accumulation_steps=2",
        "--epoch_batches=whole",
        "--max_token_length=150",
        "--lr_scheduler=cosine",
        "--lr_warmup_steps=2",
        "--use_ema",
        "--ema_decay=0.9",
        "--gradient_checkpointing",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_exact_resume(case: str, door: Door, tmp_path: Path, golden_dir: Path, update_golden: bool) -> None:
    flags = door.flags(tmp_path / "straight", *CASES[case], "--save_every_n_steps=5", steps=10)
    door.run(flags)
    found = losses(tmp_path / "straight")

    # Resume at 5 equals the straight 10, bit by bit.
    state = tmp_path / "straight" / "NAME-step00000005-state"
    door.run([*door.flags(tmp_path / "resumed", *CASES[case], steps=10), f"--resume={state}"])
    assert losses(tmp_path / "resumed") == found[5:]
    for name in ("NAME", "NAME-ema") if "--use_ema" in CASES[case] else ("NAME",):
        straight, resumed = (load_file(tmp_path / run / f"{name}.safetensors") for run in ("straight", "resumed"))
        assert straight.keys() == resumed.keys()
        assert all(torch.equal(straight[key], resumed[key]) for key in straight), name

    path = golden_dir / f"{case}.json"
    if update_golden:
        path.write_text(json.dumps({"flags": CASES[case], "losses": found}, indent=1) + "\n")
    assert found == pytest.approx(json.loads(path.read_text())["losses"], rel=1e-5)
