"""SD3-Light's launchers: what they train when the user leaves something out, and that train.py knows every word of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from difftrain.launch import flags, light, machines, main
from difftrain.launch.machines import Devices

CPU, CUDA = Devices("cpu", 2), Devices("cuda", 8)
CARDS = {"1m_1p": 1, "1m_8p": 8, "nm_np": None, "1m_np": None}
REAL = ("--model_name=m", "--dataset_name=d.toml")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def choose(*argv: str, device: Devices = CUDA, layout: str = "1m_8p", name: str = "sd3_light") -> light.LightRecipe:
    return _chosen(name, layout, device, argv)[0]


def _chosen(
    name: str, layout: str, device: Devices, argv: tuple[str, ...]
) -> tuple[light.LightRecipe, flags.LaunchFlags]:
    given = flags.read(list(argv), {})
    return light.choose(name, given, machines.where(layout, CARDS[layout], given, device, {})), given


def line(*argv: str, device: Devices = CUDA, layout: str = "1m_8p", name: str = "sd3_light") -> list[str]:
    recipe, given = _chosen(name, layout, device, argv)
    return recipe.line(given, Path("out"))


def test_the_launchers_flags_become_keys() -> None:
    words = line(*REAL, "--batch_size=8", "--mixed_precision=bf16", "--vae_model_path=v", "--performance")
    for word in (
        "--training.micro_batch_size_per_gpu=8", "--model.dtype=bfloat16", "--model.vae=v", "--training.performance=true",
        "--model.diffusers_path=m", "--dataset=d.toml", "--training.epochs=13", "--output.output_dir=out",
        "--save.run_dirs=false", "--save.resume=auto",
    ):  # fmt: skip
        assert word in words, word
    assert any(word.startswith("--config=") and word.endswith("base.toml") for word in words)


def test_what_the_user_gives_comes_last() -> None:
    words = line(*REAL, "--training.epochs=3", "--output.output_dir=mine")
    assert words[-2:] == ["--training.epochs=3", "--output.output_dir=mine"]


def test_the_cache_stage_has_its_own_file() -> None:
    words = line(*REAL, layout="1m_np", name="sd3_light_cache")
    assert "--cache_only" in words and any(word.endswith("cache.toml") for word in words)
    assert "--cache_only" in line(layout="1m_np", name="sd3_light_cache", device=CPU)
    assert main.script("sd3_light_cache", "1m_np") == "cache_1m_np_sd3_light.sh"
    assert main.script("sd3_light", "1m_1p") == "pretrain_full_1m_1p_sd3_light.sh"


def test_a_folder_gets_a_data_set_file(tmp_path: Path) -> None:
    words = line("--model_name=m", f"--dataset_name={tmp_path}", "--resolution=512,768")
    file = Path(next(word for word in words if word.startswith("--dataset=")).partition("=")[2])
    assert "resolutions = [[512, 768]]" in file.read_text() and f'path = "{tmp_path}"' in file.read_text()
    assert choose("--model_name=m", "--dataset_name=x.toml", "--resolution=64").faults
    assert (
        "must be WIDTH,HEIGHT" in choose("--model_name=m", f"--dataset_name={tmp_path}", "--resolution=big").faults[0]
    )


def test_the_cpu_computes_in_fp32_unless_told() -> None:
    assert "--model.dtype=float32" in line(*REAL, device=CPU)
    assert line(*REAL, "--mixed_precision=bf16", device=CPU)[-7:].count("--model.dtype=bfloat16") == 1


def test_half_a_job_is_a_fault() -> None:
    assert choose("--model_name=m").faults[0].startswith("--dataset_name: is missing")
    assert choose("--dataset_name=d").faults[0].startswith("--model_name: is missing")
    assert not choose(*REAL).faults


def test_a_configuration_file_says_everything() -> None:
    recipe = choose("--config=run.toml")
    assert recipe.words == [] and not recipe.faults and not recipe.demo


def test_nothing_given_is_the_demo() -> None:
    recipe = choose(layout="1m_1p", device=CPU)
    assert recipe.demo[0] == "--make=shapes" and "--training.max_steps=600" in recipe.words
    eight = choose(device=CPU).words
    assert "--training.max_steps=400" in eight and "--training.micro_batch_size_per_gpu=4" in eight
    assert "--training.max_steps=600" in choose().words  # eight cards share nothing


@pytest.mark.parametrize(
    "argv", [("--model_name=m", "--dataset_name=shapes"), ("--demo_scale=0",), ("--resolution=64",)]
)
def test_faults_of_a_demo(argv: tuple[str, ...]) -> None:
    assert choose(*argv).faults


@pytest.mark.parametrize("argv", [(), ("--dataset_name=emoji",), ("--demo_scale=0.01", "--performance")])
def test_the_training_script_knows_every_word(argv: tuple[str, ...], tmp_path: Path) -> None:
    for device, layout, name in (
        (CPU, "1m_1p", "sd3_light"),
        (CUDA, "1m_8p", "sd3_light"),
        (CPU, "1m_np", "sd3_light_cache"),
    ):
        recipe, given = _chosen(name, layout, device, argv)
        words = recipe.line(given, tmp_path / "o")
        assert recipe.door_faults(recipe.checkable(words)) == []
        found = recipe.door_faults([*recipe.checkable(words), "--training.epoch=3"])
        assert len(found) == 1 and "epochs" in found[0]


@pytest.mark.parametrize("name", ["sd3_light", "sd3_light_cache"])
def test_a_real_jobs_words_are_known(name: str, tmp_path: Path) -> None:
    data = tmp_path / "pictures"
    data.mkdir()
    (data / "a.png").write_bytes(b"")
    argv = (f"--model_name={tmp_path}", f"--dataset_name={data}", "--max_train_epoch=40")
    recipe, given = _chosen(name, "nm_np", CPU, argv)
    assert recipe.door_faults(recipe.line(given, tmp_path / "o")) == []
