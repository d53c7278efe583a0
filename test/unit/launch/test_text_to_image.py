"""The Stable Diffusion 1.4 baseline as its launchers put it together: flags, gate, and the demo."""

from __future__ import annotations

from pathlib import Path

import pytest

from difftrain.launch import machines, main, text_to_image
from difftrain.launch.flags import read
from difftrain.launch.machines import Devices
from difftrain.launch.text_to_image import TextToImageRecipe, choose

TEST = Path(__file__).resolve().parents[2]
REAL = ("--model_name=CompVis/stable-diffusion-v1-4", "--dataset_name=org/pictures")


def chosen(*words: str, kind: str = "cuda", processes: int = 8) -> TextToImageRecipe:
    given = read(list(words), {})
    return choose(given, machines.where("1m_8p", processes, given, Devices(kind, processes), {}))


def flags(recipe: TextToImageRecipe, *words: str) -> dict[str, str]:
    line = recipe.line(read(list(words), {}), Path("OUT"))
    return {word[2:].partition("=")[0]: word.partition("=")[2] for word in line if word.startswith("--")}


def test_the_baseline_has_the_published_flags_and_its_gate() -> None:
    found = flags(chosen(*REAL), *REAL)
    assert {name: found[name] for name in (
        "resolution", "train_batch_size", "gradient_accumulation_steps", "max_train_steps", "learning_rate", "max_grad_norm",
        "lr_scheduler", "lr_warmup_steps", "mixed_precision",
    )} == {
        "resolution": "512", "train_batch_size": "8", "gradient_accumulation_steps": "4", "max_train_steps": "101",
        "learning_rate": "1e-05", "max_grad_norm": "1", "lr_scheduler": "constant", "lr_warmup_steps": "0",
        "mixed_precision": "fp16",
    }  # fmt: skip
    assert {"use_ema", "center_crop", "random_flip"} <= found.keys() and "gradient_checkpointing" not in found
    assert (found["timed_step"], found["loss_target"]) == ("100", "0.0456")
    assert found["resume_from_checkpoint"] == "latest" and found["output_dir"] == "OUT"


@pytest.mark.parametrize(
    "own", ["--max_train_steps=7", "--max_train_epoch=2", "--learning_rate=1e-3", "--batch_size=4", "--resolution=256"]
)
def test_other_flags_have_no_gate(own: str) -> None:
    found = flags(chosen(*REAL, own), *REAL, own)
    assert "loss_target" not in found and found["timed_step"] == "100"
    assert ("max_train_steps" in found) == (own != "--max_train_epoch=2")


def test_on_a_cpu_it_computes_in_fp32() -> None:
    assert flags(chosen(*REAL, kind="cpu", processes=2), *REAL)["mixed_precision"] == "no"


def test_with_neither_model_nor_data_it_is_the_demo_which_the_door_takes() -> None:
    recipe = chosen("--demo_scale=0.1", kind="cpu", processes=2)
    found = flags(recipe, "--demo_scale=0.1")
    assert (found["init_from_config"], found["train_batch_size"], found["max_train_steps"]) == ("tiny", "4", "10")
    assert "loss_target" not in found and "--data_only" in recipe.demo
    line = recipe.line(read([], {}), Path("OUT"))
    assert recipe.door_faults(recipe.checkable(line)) == []


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("--model_name=x",), "--dataset_name"),
        (("--dataset_name=x",), "--model_name"),
        ((*REAL, "--tokenizer2_path=x"), "--tokenizer2_path"),
        ((*REAL, "--demo_scale=0.5"), "--demo_scale"),
        (("--dataset_name=shapes", "--model_name=x"), "--model_name"),
        (("--demo_scale=2",), "--demo_scale"),
    ],
)
def test_what_does_not_go_together_is_named(words: tuple[str, ...], name: str) -> None:
    assert [fault.partition(":")[0] for fault in chosen(*words).faults] == [name]


@pytest.mark.parametrize("layout", ["1m_1p", "1m_8p"])
def test_a_script_hands_over_the_recipe_by_its_name(layout: str) -> None:
    script = TEST / main.script(text_to_image.NAME, layout)
    assert script.stat().st_mode & 0o111 and f"{text_to_image.NAME} {layout}" in script.read_text()
