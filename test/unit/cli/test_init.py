"""difftrain init: the folder that SD3-Light begins with, the same from the same seed, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refusals import is_about, names

from difftrain.cli import main


def made(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> Path:
    assert main(["init", "sd3_light", f"--output={folder}", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(folder)
    return folder


def same(one: Path, other: Path) -> bool:
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "tiny"
    assert main(["init", "sd3_light", "--size=tiny", f"--output={folder}", "--seed=1"]) == 0
    return folder


def test_a_seed_makes_the_same_folder(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert same(tiny, made(capsys, tmp_path / "again", "--size=tiny", "--seed=1"))
    assert not same(tiny, made(capsys, tmp_path / "other", "--size=tiny", "--seed=2"))


def test_diffusers_draws_with_it(tiny: Path) -> None:
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny)
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline("a red cat", height=64, width=64, num_inference_steps=2, output_type="np").images
    assert images.shape == (1, 64, 64, 3)


def test_the_real_one_takes_all_but_the_transformer(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The depth is the size's, the widths are the folder's, and no frozen part is written a second time."""
    folder = made(capsys, tmp_path / "light", "--size=light", f"--from={tiny}", "--seed=3", "--save_precision=float")
    sizes = json.loads((folder / "transformer" / "config.json").read_text())
    assert (sizes["num_layers"], sizes["num_attention_heads"]) == (15, 4)
    for name in ("vae/diffusion_pytorch_model", "text_encoder_3/model"):
        assert (folder / f"{name}.safetensors").samefile(tiny / f"{name}.safetensors")
    assert json.loads((folder / "difftrain.json").read_text())["light"]
    half = made(capsys, tmp_path / "half", "--size=light", f"--from={tiny}", "--save_precision=bf16")
    assert (half / "vae/diffusion_pytorch_model.safetensors").stat().st_nlink == 1


def test_every_fault_is_named_at_once(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["init", "sd3_lite", "--size=medum", f"--from={tmp_path / 'none'}", f"--output={tiny}", "--wide=3"]) == 2
    )
    told = capsys.readouterr().err
    assert names(told, "sd3_lite", "sd3_light", "--wide")
    assert main(["init", "sd3_light", "--size=medum", f"--from={tmp_path / 'none'}"]) == 2
    told = capsys.readouterr().err
    assert any(is_about(fault, "--size", "'medum'", "medium") for fault in told.splitlines())
    assert any(is_about(fault, "--from", tmp_path / "none") for fault in told.splitlines())
    assert main(["init", "sd3_light", "--size=light", f"--output={tiny}"]) == 2
    told = capsys.readouterr().err
    assert any(is_about(fault, "--from", "missing") for fault in told.splitlines())
    assert any(is_about(fault, "--output", tiny) for fault in told.splitlines())
    assert main(["init"]) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in ("KIND: is missing", "--size: is missing", "--output: is missing"))


def test_help_is_quick_and_names_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--help"]) == 0
    assert "light, medium, medium35, large35, tiny" in capsys.readouterr().out


def test_export_makes_a_folder_of_it(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", "--family=sd3", f"--pretrained_model_name_or_path={tiny}"]
    assert main([*words, f"--output={tmp_path / 'half'}", "--save_precision=bf16"]) == 0
    assert (tmp_path / "half" / "model_index.json").is_file()
    assert main([*words, f"--output={tmp_path / 'one'}", "--save_model_as=ckpt"]) == 2
    assert any(is_about(fault, "--save_model_as", "ckpt", "sd3") for fault in capsys.readouterr().err.splitlines())
