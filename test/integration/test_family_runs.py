"""Every family at the doors: init writes a folder, its tiny recipe trains it from nothing else, alone and on two ranks."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from doors import Door
from safetensors.torch import load_file
from sd3_speedups import vision_folder

from difftrain.models.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "sd_scripts_xl" / "train.py"
WHOLE = ("sdxl", "sd3", "flux")  # of others base.toml runs on a tiny model: test_configs.py


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    vision_folder(folder / "vision", "dinov2")
    return folder


@cache
def begun(home: Path, name: str) -> Path:
    """Write a family's random folder by the command."""
    folder = home / name / "DIR"
    words = [sys.executable, "-m", "difftrain.cli", "init", name, "--size=tiny", f"--output={folder}", "--seed=1"]
    Door(home, home / "user_cache").run_words(words, PYTHONPATH=str(ROOT / "library"))
    return folder


def trained(home: Path, name: str, out: str, *words: str, launch: tuple[str, ...] = (), expect: int = 0) -> str:
    """Run a family's tiny recipe over its folder, in a working directory of the family's own."""
    recipe = ROOT / "configs" / name / "tiny.toml"
    place = home / name
    given = [
        f"--config={recipe}", f"--model.diffusers_path={begun(home, name)}", f"--output.output_dir={home / name / out}",
        f"--demo.folder={place / 'demo'}", f"--output.dataset={place / 'demo' / 'train.toml'}",
        f"--data.cache_dir={place / 'cache'}", "--training.max_steps=4",
    ]  # fmt: skip
    door = Door(home, home / "user_cache")
    return door.run_words([*(launch or (sys.executable,)), str(TRAIN), *given, *words], expect=expect, timeout=400)


def run_of(home: Path, name: str, out: str) -> Path:
    (run,) = (home / name / out).iterdir()
    return run


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["step_loss"] for line in lines]


@pytest.mark.parametrize(
    "name", [name if name in WHOLE else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES]
)
def test_the_tiny_recipe_trains_what_init_wrote(home: Path, name: str) -> None:
    trained(home, name, "OUT", "--save.model_as=diffusers_safetensors")
    run = run_of(home, name, "OUT")
    assert len(losses(run)) == 4 and json.loads((run / "report.json").read_text())
    (index,) = run.glob("step4/model_index.json")
    assert json.loads(index.read_text())["_class_name"] == FAMILIES[name].pipeline


TWO = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d",
       "--rdzv-endpoint=localhost:0")  # fmt: skip
ONLY = "--model.train_only=['attn\\.to_[qk]\\.']"
ALIGNED = ("--repa.encoder=VISION", "--repa.layer=2", "--repa.hidden=24")
# name of the run of one process with the native engine, what it trains, and how two processes do
WAYS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "native": ("alone", (), ()),
    "accelerate": ("alone", (), ("--training.engine=accelerate",)),
    "zero2": ("alone", (), ("--deepspeed.enable=true", "--deepspeed.zero_stage=2")),
    "held in part": ("alone, held in part", (ONLY,), ()),
    "aligned": ("alone, aligned", ALIGNED, ()),
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.nightly) if way in ("native", "zero2") else way for way in WAYS]
)
def test_two_ranks_with_half_the_micro_batch_have_the_same_losses(home: Path, way: str) -> None:
    alone, what, how = WAYS[way]
    what = tuple(word.replace("VISION", str(home / "vision")) for word in what)
    if not (home / "flux" / alone).is_dir():
        trained(home, "flux", alone, *what)
    trained(home, "flux", way, "--training.micro_batch_size_per_gpu=2", *what, *how, launch=TWO)
    assert losses(run_of(home, "flux", way)) == pytest.approx(losses(run_of(home, "flux", alone)), rel=1e-6)


def test_a_unet_and_its_text_encoder_trained_online_have_the_same_losses_on_two_ranks(home: Path) -> None:
    online = ("--cache.latents_to_disk=false", "--cache.text_to_disk=false", "--model.text_encoder_1_lr=1e-3")
    trained(home, "sd1", "online", *online)
    trained(home, "sd1", "on two", "--training.micro_batch_size_per_gpu=2", *online, launch=TWO)
    assert losses(run_of(home, "sd1", "on two")) == pytest.approx(losses(run_of(home, "sd1", "online")), rel=1e-6)


def test_what_is_only_held_is_in_no_checkpoint_and_a_resume_is_exact(home: Path) -> None:
    often = ("--save.checkpoint_every_n_minutes=0.000001", ONLY)
    trained(home, "flux", "WHOLE", *often)
    whole = run_of(home, "flux", "WHOLE")
    kept = load_file(whole / "global_step4" / "weights-00000.safetensors")
    assert kept and all(".attn.to_q." in key or ".attn.to_k." in key for key in kept)
    record = json.loads((whole / "global_step4" / "progress.json").read_text()) | _meta(whole / "global_step4")
    assert record["held"]["transformer"]

    trained(home, "flux", "HALF", *often, "--training.max_steps=2")
    trained(home, "flux", "HALF", *often, "--save.resume=latest")
    (half,) = (each for each in (home / "flux" / "HALF").iterdir() if (each / "global_step4").is_dir())
    again = load_file(half / "global_step4" / "weights-00000.safetensors")
    assert again.keys() == kept.keys() and all(again[key].equal(kept[key]) for key in kept)
    exported = load_file(half / "step4" / "transformer" / "diffusion_pytorch_model.safetensors")
    source = load_file(begun(home, "flux") / "transformer" / "diffusion_pytorch_model.safetensors")
    held = [key for key in source if ".attn.to_q." not in key and ".attn.to_k." not in key]
    assert exported.keys() == source.keys() and all(exported[key].equal(source[key]) for key in held)

    # --- weights of another source cannot be told from the checkpoint: they are refused by name
    other = home / "flux" / "OTHER"
    words = [sys.executable, "-m", "difftrain.cli", "init", "flux", "--size=tiny", f"--output={other}", "--seed=2"]
    Door(home, home / "user_cache").run_words(words, PYTHONPATH=str(ROOT / "library"))
    said = trained(home, "flux", "HALF", *often, f"--model.diffusers_path={other}", "--save.resume=latest",
                   "--training.max_steps=6", expect=2)  # fmt: skip
    assert "(train_only)" in said


def _meta(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("manifest.json", "progress.json"):
        content = json.loads((checkpoint / name).read_text())
        found |= content | content.get("identity", {}) | content.get("meta", {})
    return found
