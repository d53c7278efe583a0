"""Ten fp32 CPU losses of tiny SD3, to 1e-5 of the committed figures; exact resume on one machine."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from doors import ROOT, Door, losses, metrics, write_pictures
from PIL import Image
from safetensors.torch import load_file

TRAIN = ROOT / "sd_scripts_xl" / "train.py"
PLAIN = {
    "output.output_dir": "{out}",
    "model.type": "sd3",
    "model.init_from_config": "tiny",
    "model.dtype": "float32",
    "model.t5_max_length": 16,
    "training.micro_batch_size_per_gpu": 2,
    "training.max_steps": 10,
    "training.seed": 1,
    "training.device": "cpu",
    "optimizer.type": "adamw",
    "optimizer.lr": 1e-4,
    "data.dirs": ["{pictures}"],
    "data.resolution": [64, 64],
    "data.enable_bucket": True,
    "data.min_bucket_reso": 32,
    "data.max_bucket_reso": 128,
    "data.workers": 0,
    "data.cache_dir": "{cache}",
    "save.checkpoint_every_n_minutes": 1e-6,
    "logging.log_every": 1,
}
CASES = {
    "sd3_plain": {"cache.latents_to_disk": False, "cache.text_to_disk": False},
    "sd3_reconstructing_masked_cached": {
        "loss.text_recon_gamma": 0.25,
        "loss.text_recon_target_layer": 1,
        "loss.type": "pseudo_huber",
        "loss.pseudo_huber_c": 0.1,
        "loss.masked": True,
        "data.conditioning_dir": "{masks}",
        "data.flip": True,
        "model.enable_uncond_text_dropout": True,
        "model.t5_attention_mask": True,
        "flow.timestep_sample_method": "mode",
        "flow.flux_shift": True,
        "flow.min_t": 0.05,
        "training.gradient_accumulation_steps": 2,
        "training.gradient_checkpointing": True,
        "optimizer.scheduler": "cosine",
        "optimizer.warmup_steps": 2,
        "ema.enable": True,
        "ema.decay": 0.9,
    },
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Ten captioned pictures, and masks whose left half is trained more than the right."""
    root = tmp_path_factory.mktemp("flow")
    pictures, masks = write_pictures(root / "pictures"), root / "masks"
    masks.mkdir()
    for path in pictures.glob("*.png"):
        with Image.open(path) as picture:
            mask = Image.new("L", picture.size, 64)
            mask.paste(255, (0, 0, picture.width // 2, picture.height))
        mask.save(masks / path.name)
    return {"pictures": pictures, "masks": masks, "cache": root / "cache"}


def train(root: Path, case: str, places: dict[str, Path], *options: str) -> Path:
    """Run the door over a file of the case; return the one run directory."""
    out, tables = root / "out", dict[str, list[str]]()
    for key, value in {**PLAIN, **CASES[case]}.items():
        table, _, name = key.partition(".")
        text = json.dumps(value).format(out=out, **places)
        tables.setdefault(table, []).append(f"{name} = {text}")
    file = root / "run.toml"
    file.write_text("\n".join(f"[{table}]\n" + "\n".join(lines) for table, lines in tables.items()))
    door = Door(places["pictures"], root / "user")
    door.run_words([sys.executable, str(TRAIN), f"--config={file}", *options])
    (run,) = (path for path in out.iterdir() if path.is_dir())
    return run


@pytest.mark.parametrize("case", CASES)
def test_losses_and_exact_resume(
    case: str, places: dict[str, Path], tmp_path: Path, golden_dir: Path, update_golden: bool
) -> None:
    (tmp_path / "straight").mkdir()
    straight = train(tmp_path / "straight", case, places)
    found = losses(straight)

    # Resume at 5 equals the straight 10, bit by bit.
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed", symlinks=True)
    resumed = train(tmp_path / "resumed", case, places, "--resume_from_checkpoint=5")
    assert [line["step"] for line in metrics(resumed)] == list(range(1, 11))
    assert losses(resumed) == found
    exports = sorted(path.parent.name for path in straight.glob("*/model_index.json"))
    assert len(exports) == 1 + ("ema.enable" in CASES[case])
    for name in exports:
        files = sorted(path.relative_to(straight) for path in (straight / name).rglob("*.safetensors"))
        assert len(files) == 5 + ("loss.text_recon_gamma" in CASES[case])
        for file in files:
            one, other = load_file(straight / file), load_file(resumed / file)
            assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one), file

    path = golden_dir / f"{case}.json"
    if update_golden:
        path.write_text(json.dumps({"settings": CASES[case], "losses": found}, indent=1) + "\n")
    assert found == pytest.approx(json.loads(path.read_text())["losses"], rel=1e-5)
