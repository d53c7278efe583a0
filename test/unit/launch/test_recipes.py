"""What is trained when the user leaves something out: the recipe, a speed run, the demo."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import is_about

from difftrain.launch import flags, machines, recipes
from difftrain.launch.machines import Devices

CPU, CUDA = Devices("cpu", 2), Devices("cuda", 8)
CARDS = {"1m_1p": 1, "1m_8p": 8, "nm_np": None}


def choose(*argv: str, device: Devices = CUDA, layout: str = "1m_8p") -> recipes.LaunchRecipe:
    given = flags.read(list(argv), {})
    recipe = recipes.choose("sdxl", given, machines.where(layout, CARDS[layout], given, device, {}))
    return recipes.LaunchRecipe(
        recipe.door, [*recipe.words, *flags.to_door(given), *given.remaining], recipe.notes, recipe.faults, recipe.demo
    )


REAL = ("--model_name=m", "--dataset_name=d")


def test_the_recipe_as_users_know_it() -> None:
    words = choose(*REAL).words
    known = (
        "--train_batch_size=4 --mixed_precision=fp16 --resolution=1024,1024 --enable_bucket --min_bucket_reso=512 "
        "--max_bucket_reso=2048 --gradient_checkpointing --lr_scheduler=cosine_with_restarts --learning_rate=1e-6 "
        "--train_text_encoder --learning_rate_te1=1e-7 --learning_rate_te2=1e-7 --max_grad_norm=1 --seed=1 "
        "--shuffle_caption --optimizer_type=oss --enable_npu_flash_attention --max_train_epochs=120 --resume=auto"
    )
    assert set(known.split()) <= set(words)


def test_what_the_user_gives_replaces_the_recipes_own() -> None:
    words = choose(*REAL, "--batch_size=2", "--learning_rate=3e-5", "--resume", "/old").words
    for name, value in (("train_batch_size", "2"), ("learning_rate", "3e-5")):
        assert [w for w in words if w.startswith(f"--{name}=")] == [f"--{name}={value}"]
    assert "--resume=auto" not in words and words[-2:] == ["--resume", "/old"]


@pytest.mark.parametrize(
    ("flag", "epochs"), [("--performance", "13"), ("--max_train_epoch=13", "13"), ("--max_train_epoch=40", "40")]
)
def test_a_speed_run_saves_nothing_on_the_way(flag: str, epochs: str) -> None:
    words = choose(*REAL, flag).words
    assert f"--max_train_epochs={epochs}" in words
    assert "--save_state" not in words and not any(w.startswith("--save_every") for w in words)


def test_steps_take_the_place_of_epochs() -> None:
    words = choose(*REAL, "--max_train_steps=50").words
    assert not any(w.startswith("--max_train_epochs") for w in words)


def test_the_cpu_computes_in_fp32_unless_told() -> None:
    assert "--mixed_precision=no" in choose(*REAL, device=CPU).words
    assert "--mixed_precision=fp16" in choose(*REAL, "--mixed_precision=fp16", device=CPU).words


def test_a_configuration_file_says_everything() -> None:
    recipe = choose("--config=run.toml")
    assert recipe.words == ["--resume=auto", "--config=run.toml"] and not recipe.faults and not recipe.demo


def test_half_a_job_is_a_fault() -> None:
    assert choose("--model_name=m").faults[0].startswith("--dataset_name: is missing")
    assert choose("--dataset_name=d").faults[0].startswith("--model_name: is missing")
    assert not choose("--dataset_name=d", "--init_from_config=tiny").faults


def test_nothing_given_is_the_demo() -> None:
    recipe = choose(layout="1m_1p", device=CPU)
    assert {"--demo=shapes", "--demo_score", "--train_batch_size=32", "--v_parameterization"} <= set(recipe.words)
    assert recipe.demo == ["--dataset=shapes", "--scale=1"]
    assert not any(w.startswith("--train_data_dir=shapes") for w in recipe.words)


def test_the_demo_keeps_its_global_batch() -> None:
    eight = choose(device=CPU).words
    one = choose(layout="1m_1p", device=CPU).words
    assert "--train_batch_size=4" in eight

    def steps(words: list[str]) -> int:
        return next(int(w.split("=")[1]) for w in words if w.startswith("--max_train_steps="))

    assert steps(eight) < steps(one)  # eight processes share the cores
    assert steps(choose().words) == steps(one)  # eight cards do not


def test_demo_flags_can_be_replaced() -> None:
    words = choose("--dataset_name=emoji", "--max_train_epoch=2", "--batch_size=8", "--learning_rate=1e-4").words
    assert "--demo=emoji" in words and "--train_batch_size=8" in words and "--learning_rate=1e-4" in words
    assert not any(w.startswith("--max_train_steps") for w in words)


@pytest.mark.parametrize("scale", ["0", "1.5", "much"])
def test_a_scale_out_of_range(scale: str) -> None:
    assert is_about(choose(f"--demo_scale={scale}").faults[0], "--demo_scale", "0", "1", f"got {scale}")
    assert is_about(choose(*REAL, f"--demo_scale={scale}").faults[0], "--demo_scale", "demo")


@pytest.mark.parametrize("argv", [(), ("--dataset_name=emoji",), ("--demo_scale=0.01",)])
def test_the_training_script_knows_every_flag(argv: tuple[str, ...], tmp_path: Path) -> None:
    for device, layout in ((CPU, "1m_1p"), (CPU, "1m_8p"), (CUDA, "1m_8p")):
        recipe = choose(*argv, device=device, layout=layout)
        assert recipe.door_faults(recipe.checkable([*recipe.words, f"--output_dir={tmp_path / 'o'}"])) == []
    real = choose(f"--model_name={tmp_path}", f"--dataset_name={tmp_path}")
    assert real.door_faults([*real.words, f"--output_dir={tmp_path / 'o'}"]) == []
