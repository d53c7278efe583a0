"""difftrain generate: what it draws is what training's samples are, from any weights; what it refuses, and by which name."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doors import Door
from families import config, exported, loaded, nightly_siblings
from PIL import Image
from refusals import names
from safetensors.torch import load_file, save_file

from difftrain.cli import main
from difftrain.data.media.clips import probe_clip
from difftrain.models.registry import FAMILIES
from difftrain.sampling import draw_pictures
from difftrain.sampling.prompts import Prompt
from difftrain.train.drawing import references_of

PROMPTS = "a red star --w 64 --h 48 --d 7 --s 2 --l 3\na blue box --s 2 --n bad --w 32 --h 32\n"


def pixels(path: Path) -> Any:
    return np.asarray(Image.open(path))


def drawn(*words: str) -> int:
    """Draw on a CPU, with one thread as the runs have it."""
    return main(["generate", "--device=cpu", "--threads=1", *words])


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    assert drawn(*words) == code
    return capsys.readouterr().err


def run(door: Door, out: Path, *flags: str) -> Path:
    prompts = out.with_suffix(".txt")
    prompts.write_text(PROMPTS)
    sampling = (f"--sample_prompts={prompts}", "--sample_every_n_steps=2", "--save_every_n_steps=2", "--device=cpu")
    door.run(door.flags(out, *sampling, *flags, steps=4))
    return out


@pytest.fixture(scope="module")
def plain(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without averages."""
    return run(door, tmp_path_factory.mktemp("generate") / "plain")


@pytest.fixture(scope="module")
def averaged(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a moving average, and one by width."""
    flags = ("--use_ema", "--ema_decay=0.5", "--ema_profiles=0.1", "--mixed_precision=bf16")
    return run(door, tmp_path_factory.mktemp("generate") / "averaged", *flags)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers folder of the tiny default family."""
    return exported(loaded(config("sdxl")), tmp_path_factory.mktemp("generate") / "folder")


def same_as_samples(out: Path, checkpoint: str, step: int, target: Path, *words: str) -> list[bool]:
    assert drawn(f"--weights={out / checkpoint}", f"--prompts={out}.txt", f"--output={target}", *words) == 0
    ours = sorted(target.glob("*_*.png"))
    theirs = [next((out / "sample").glob(f"NAME_{step:06d}_{number:02d}_*.png")) for number in range(2)]
    assert len(ours) == len(theirs) == 2 and (target / "grid.png").is_file()
    return [np.array_equal(pixels(one), pixels(other)) for one, other in zip(ours, theirs, strict=True)]


def test_a_checkpoint_draws_its_training_s_samples_to_the_bit(plain: Path, tmp_path: Path) -> None:
    assert same_as_samples(plain, "NAME-step00000002-state", 2, tmp_path / "two") == [True, True]
    assert same_as_samples(plain, ".", 4, tmp_path / "newest") == [True, True]  # a run: its newest checkpoint
    assert same_as_samples(plain, "NAME-step00000002-state", 4, tmp_path / "other") == [False, False]


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_a_flow_s_checkpoint_draws_its_training_s_samples_to_the_bit(family: str, door: Door, tmp_path: Path) -> None:
    out = run(door, tmp_path / family, f"--family={family}")
    assert same_as_samples(out, "NAME-step00000002-state", 2, tmp_path / "two") == [True, True]


def test_the_averages_of_train_text_to_image_are_drawn_as_its_samples(door: Door, tmp_path: Path) -> None:
    """They ramp up: after the first update nothing of the start is left."""
    out = tmp_path / "run"
    script = Path(door.path).with_name("train_text_to_image.py")
    words = [
        sys.executable, str(script), "--init_from_config=tiny", f"--train_data_dir={door.data}", f"--output_dir={out}",
        "--resolution=64", "--train_batch_size=2", "--max_train_steps=2", "--seed=1", "--use_ema", "--validation_epochs=1",
        "--checkpointing_steps=2", "--device=cpu", "--validation_prompts", "a red star",
    ]  # fmt: skip
    door.run_words(words, 0)
    (theirs,) = (out / "sample").glob("*000002_00_*.png")
    line = f"--weights={out / 'checkpoint-2'}", "--prompt=a red star", "--steps=20", "--width=64", "--height=64"
    for name, words in {"chosen": (), "trained": ("--ema=no",)}.items():
        assert drawn(*line, f"--output={tmp_path / name}.png", *words) == 0
    assert np.array_equal(pixels(tmp_path / "chosen.png"), pixels(theirs))
    assert not np.array_equal(pixels(tmp_path / "trained.png"), pixels(theirs))


def test_averages_are_drawn_as_samples_choose_them(
    averaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = "NAME-step00000004-state"
    assert same_as_samples(averaged, state, 4, tmp_path / "chosen") == [True, True]
    assert same_as_samples(averaged, state, 4, tmp_path / "moving", "--ema") == [True, True]
    assert same_as_samples(averaged, state, 4, tmp_path / "trained", "--ema=no") == [False, False]
    assert same_as_samples(averaged, state, 4, tmp_path / "width", "--ema=0.1") == [False, False]
    assert not np.array_equal(pixels(tmp_path / "trained" / "grid.png"), pixels(tmp_path / "width" / "grid.png"))
    line = f"--weights={averaged / state}", "--prompt=a", f"--output={tmp_path / 'x'}"
    assert "--ema=0.1" in refused(capsys, *line, "--ema=0.2")  # the widths that there are
    assert "'wide'" in refused(capsys, *line, "--ema=wide")


@pytest.mark.parametrize("name", nightly_siblings(FAMILIES))
def test_every_family_draws_from_its_folder(name: str, tmp_path: Path) -> None:
    tiny = loaded(config(name))
    line = (
        f"--weights={exported(tiny, tmp_path / 'folder')}",
        "--prompt=a red cat",
        "--steps=2",
        "--width=64",
        "--height=32",
    )
    row, model = tiny.family.row, tiny.family.cfg.model
    extra = [f"--t5_max_length={model.t5_max_length}"] if row.objective == "flow" else []
    extra += [f"--llm_max_length={model.llm_max_length}"] if model.llm_max_length else []
    shown: tuple[str, ...] = ()
    if number := references_of(tiny.family.cfg):
        shown = (str(tmp_path / "reference.png"),) * number
        Image.new("RGB", (64, 32), (200, 90, 20)).save(shown[0])
        extra += [f"--control={file}" for file in shown]
    assert drawn(*line, "--cfg=2", "--seed=5", f"--output={tmp_path / 'one.png'}", *extra) == 0
    prompt = Prompt("a red cat", width=64, height=32, sample_steps=2, scale=2.0, seed=5, control_image=shown)
    sampler = tiny.family.row.defaults.get("sample.sampler", "ddim")
    ours = draw_pictures(tiny.family.drawer(tiny.parts), [prompt], sampler=sampler, seed=None)[0].image
    assert np.abs(np.asarray(ours).astype(int) - pixels(tmp_path / "one.png")).max() <= 1


def test_more_references_than_a_model_takes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = exported(loaded(config("omnigen2")), tmp_path / "folder")
    shown = [f"--control={tmp_path / f'{number}.png'}" for number in range(4)]
    line = f"--weights={folder}", "--prompt=a", f"--output={tmp_path / 'x.png'}"
    assert names(refused(capsys, *line, *shown), "--control", 4, 3)


def test_a_single_file_says_its_family_and_what_it_predicts(tmp_path: Path) -> None:
    sections = {"noise": {"zero_terminal_snr": True}}
    tiny = loaded(config("sdxl", sections, prediction_type="v_prediction"))
    weights = iter(tiny.weights().items())
    about = tiny.family.metadata("tiny", 0.0)
    file = tiny.family.export(weights, tiny.parts, "safetensors", tmp_path / "file", metadata=about)
    line = "--prompt=a cat", "--steps=2", "--width=32", "--height=32", "--seed=1"
    assert drawn(f"--weights={file}", *line, f"--output={tmp_path / 'file.png'}", "--zero_terminal_snr") == 0
    prompt = Prompt("a cat", width=32, height=32, sample_steps=2, seed=1)
    ours = draw_pictures(tiny.family.drawer(tiny.parts), [prompt], sampler="ddim", seed=None)[0].image
    assert np.array_equal(np.asarray(ours), pixels(tmp_path / "file.png"))


def test_grid_singles_seeds_and_what_they_say_of_themselves(folder: Path, tmp_path: Path) -> None:
    line = f"--weights={folder}", "--prompt=a кот, --d 3", "--prompt=two", "--negative=bad", "--steps=1", "--width=32"
    size = "--height=40", "--count=2", "--seed=8", "--cfg=1.5", "--sampler=euler_a"
    assert drawn(*line, *size, f"--output={tmp_path / 'out'}") == 0
    names = ["000_3.png", "001_4.png", "002_8.png", "003_9.png", "grid.png"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert Image.open(tmp_path / "out" / "grid.png").size == (64, 80)
    texts: Any = Image.open(tmp_path / "out" / "001_4.png").text  # type: ignore[attr-defined]
    first, negative, settings = texts["parameters"].splitlines()
    assert (first, negative) == ("a кот,", "Negative prompt: bad")
    assert "Steps: 1, Sampler: Euler a, CFG scale: 1.5, Seed: 4, Size: 32x40" in settings
    ours = json.loads(texts["difftrain"])
    assert (ours["seed"], ours["sampler"], ours["width"], ours["weights"]) == (4, "euler_a", 32, "folder")
    assert drawn(*line, *size, f"--output={tmp_path / 'grid.png'}") == 0  # of several pictures a grid
    assert np.array_equal(pixels(tmp_path / "grid.png"), pixels(tmp_path / "out" / "grid.png"))
    assert len(json.loads(Image.open(tmp_path / "grid.png").text["difftrain"])) == 4  # type: ignore[attr-defined]


def test_clips(tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    weights = exported(loaded(config("wan")), tmp_path / "weights")
    line = f"--weights={weights}", "--prompt=a cat", "--steps=1", "--width=48", "--height=32", "--cfg=1"
    assert drawn(*line, "--frames=7", "--count=2", f"--output={tmp_path / 'out'}") == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["000_0.mp4", "001_1.mp4", "grid.png"]
    assert any(names(message, 7, 5) for message in caplog.messages)
    for suffix in (".mp4", ".webp"):
        assert drawn(*line, "--frames=5", f"--output={tmp_path / f'one{suffix}'}") == 0
        header = probe_clip(tmp_path / f"one{suffix}")
        assert (header.size_wh, header.frames, round(header.fps)) == ((48, 32), 5, 16)
    assert (tmp_path / "one.mp4").read_bytes() == (tmp_path / "out" / "000_0.mp4").read_bytes()
    assert drawn(*line, "--frames=5", f"--output={tmp_path / 'sheet.png'}") == 0
    assert Image.open(tmp_path / "sheet.png").size == (5 * 48 + 4 * 2, 32)

    # without frames it is an image, which a video's file does not hold, nor several clips
    assert drawn(*line, f"--output={tmp_path / 'image.png'}") == 0
    assert Image.open(tmp_path / "image.png").size == (48, 32)
    assert "--frames" in refused(capsys, *line, f"--output={tmp_path / 'image.mp4'}")
    assert "a folder" in refused(capsys, *line, "--frames=5", "--count=2", f"--output={tmp_path / 'two.mp4'}")
    assert "--overwrite" in refused(capsys, *line, "--frames=5", f"--output={tmp_path / 'one.mp4'}")
    image = f"--image={tmp_path / 'image.png'}"
    assert "--frames" in refused(capsys, *line, image, "--frames=5", f"--output={tmp_path / 'i.png'}")


def test_a_picture_and_a_mask(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(1)
    Image.fromarray(rng.integers(0, 255, (40, 64, 3), dtype=np.uint8)).save(tmp_path / "image.png")
    mask = np.zeros((40, 64), np.uint8)
    mask[:, 32:] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    line = f"--weights={folder}", "--prompt=a", "--steps=4", "--seed=1", f"--image={tmp_path / 'image.png'}"
    shots = {}
    for name, words in {
        "weak": ["--strength=0.25"], "strong": ["--strength=1"],
        "masked": ["--strength=1", f"--mask={tmp_path / 'mask.png'}"], "noise": [],
    }.items():  # fmt: skip
        given = line if name != "noise" else (*line[:-1], "--width=64", "--height=40")
        assert drawn(*given, *words, f"--output={tmp_path / f'{name}.png'}") == 0
        shots[name] = pixels(tmp_path / f"{name}.png").astype(float)
    assert {shot.shape for shot in shots.values()} == {(40, 64, 3)}  # the picture's size
    assert len({shot.tobytes() for shot in shots.values()}) == 4
    assert "Denoising strength: 0.25" in Image.open(tmp_path / "weak.png").text["parameters"]  # type: ignore[attr-defined]
    said = refused(capsys, *line, "--strength=0.1", f"--output={tmp_path / 'none.png'}")
    assert "0.25" in said  # the least of four steps
    mask_of_another_size = tmp_path / "small.png"
    Image.new("L", (8, 8)).save(mask_of_another_size)
    assert "8 x 8" in refused(capsys, *line, f"--mask={mask_of_another_size}", f"--output={tmp_path / 'none.png'}")


def test_a_file_of_the_denoiser_alone_wants_a_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = loaded(config("flux"))
    base = exported(tiny, tmp_path / "base")
    file = exported(tiny, tmp_path / "file", "safetensors")
    line = "--prompt=a", "--steps=1", "--width=32", "--height=32", "--t5_max_length=16"
    assert "--base" in refused(capsys, f"--weights={file}", *line, f"--output={tmp_path / 'a.png'}")
    assert drawn(f"--weights={file}", f"--base={base}", *line, f"--output={tmp_path / 'a.png'}") == 0
    assert drawn(f"--weights={base}", *line, f"--output={tmp_path / 'b.png'}") == 0
    assert np.array_equal(pixels(tmp_path / "a.png"), pixels(tmp_path / "b.png"))
    # in the folder of a run the other parts are the run's; not of one of another family, or of random weights
    for said, is_drawn in ((f"family = 'flux'\npretrained = '{base}'", True), ("family = 'flux'", False),
                           (f"family = 'sdxl'\npretrained = '{base}'", False)):  # fmt: skip
        (tmp_path / "config.toml").write_text(f"[model]\n{said}\n")
        words = f"--weights={file}", *line, f"--output={tmp_path / 'r.png'}"
        if is_drawn:
            assert drawn(*words, "--overwrite") == 0
            assert np.array_equal(pixels(tmp_path / "r.png"), pixels(tmp_path / "b.png"))
        else:
            assert "--base" in refused(capsys, *words, "--overwrite")
    for sampler in ("ddim", "euler"):  # a default of others as well: it is drawn with or refused
        said = refused(capsys, f"--weights={base}", f"--sampler={sampler}", *line, f"--output={tmp_path / 'c.png'}")
        assert "--sampler" in said and "flow_heun" in said
    assert "--base" in refused(capsys, f"--weights={base}", f"--base={base}", *line, f"--output={tmp_path / 'c.png'}")


def test_bad_input_is_named_before_anything_is_drawn(
    folder: Path, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--steps=1", "--width=32", "--height=32", f"--output={tmp_path / 'x.png'}"
    ours = (f"--weights={folder}", "--prompt=a")

    # everything that the command line alone shows, at once
    assert "--output" in refused(capsys, *ours)
    said = refused(capsys, "--weights=nowhere", "--strength=2", "--count=0", "--mask=no.png", "--output=x.jpg")
    assert all(name in said for name in ("--strength", "--count", "no.png", "x.jpg", "--prompt"))
    assert "nowhere" in refused(capsys, "--weights=nowhere", "--prompt=a", *line)
    assert "flow_euler" in refused(capsys, *ours, "--sampler=flow_euler", *line)
    assert "--width" in refused(capsys, *ours, "--steps=1", "--width=0", f"--output={tmp_path / 'x.png'}")
    assert "--d" in refused(capsys, f"--weights={folder}", "--prompt=a --d x", *line)
    assert "--ema" in refused(capsys, *ours, "--ema", *line)

    # a checkpoint that is torn, and one without its run
    torn = tmp_path / "run"
    shutil.copytree(plain, torn)
    state = torn / "NAME-step00000004-state"
    with next(state.glob("weights-*")).open("r+b") as file:
        file.truncate(1000)
    assert "NAME-step00000002-state" in refused(capsys, f"--weights={state}", "--prompt=a", *line)  # another one
    shutil.move(torn / "NAME-step00000002-state", tmp_path / "moved")
    assert "--config" in refused(capsys, f"--weights={tmp_path / 'moved'}", "--prompt=a", *line)
    assert drawn(f"--weights={tmp_path / 'moved'}", f"--config={torn / 'config.toml'}", "--prompt=a", *line) == 0

    # an output that is there; of weights that are no numbers nothing is drawn
    assert "--overwrite" in refused(capsys, *ours, *line)
    assert drawn(*ours, *line, "--overwrite") == 0
    (tmp_path / "file").write_text("")
    assert refused(capsys, *ours, "--steps=1", f"--output={tmp_path / 'file' / 'x.png'}", code=1)
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    path = broken / "unet" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["conv_in.bias"][0] = torch.nan
    save_file(weights, path, {"format": "pt"})
    assert "conv_in.bias" in refused(capsys, f"--weights={broken}", "--prompt=a", *line, "--overwrite")


def test_sizes_are_rounded_and_said(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="difftrain"):
        assert drawn(f"--weights={folder}", "--prompt=a", "--steps=1", "--width=37", "--height=32",
                     f"--output={tmp_path / 'x.png'}") == 0  # fmt: skip
    assert Image.open(tmp_path / "x.png").size == (32, 32)
    assert any("37" in record.getMessage() and "32" in record.getMessage() for record in caplog.records)
