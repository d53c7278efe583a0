"""Whole runs with a whole cache: no encoder is loaded unless pictures are drawn, and what comes out is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from doors import losses, write_pictures
from safetensors.torch import load_file
from sdxl import config, loaded

from difftrain.config.parse_flags import parse
from difftrain.models import family as loading
from difftrain.models import placeholder
from difftrain.models.weights import fingerprints
from difftrain.models.weights.source import WeightSource
from difftrain.train import finalize
from difftrain.train.estimate import dry_run
from difftrain.train.run import run

ON_DISK = ("--cache_latents_to_disk", "--cache_text_encoder_outputs_to_disk")
FROZEN = {"vae", "text_encoder_1", "text_encoder_2"}
UNET = "model.diffusion_model."


class Runs:
    """Train a small model that lies in a folder, in this process; note which parts are filled with weights, and when."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.filled, self.read = folder, list[str](), list[str]()
        self.data = write_pictures(folder / "pictures", 6)
        (folder / "prompts.txt").write_text("a red star --w 64 --h 64 --s 2 --d 1\n")
        family, parts = loaded(config())
        self.model = family.export([], parts, "diffusers_safetensors", folder / "model")
        patch.setenv("XDG_CACHE_HOME", str(folder / "user"))
        patch.setattr(fingerprints, "_SETTLED_NS", 0)
        patch.setattr(finalize, "measure_matmul", lambda *_, **__: 1e12)  # seconds of no interest here
        fill, weights = placeholder.fill, WeightSource.weights

        def filled(module: Any, *rest: Any, **options: Any) -> Any:
            self.filled.append(type(module).__name__)
            return fill(module, *rest, **options)

        def read(source: WeightSource, part: str, module: Any) -> Any:
            self.read.append(part)
            return weights(source, part, module)

        patch.setattr(placeholder, "fill", filled)
        patch.setattr(loading, "fill", filled)
        patch.setattr(WeightSource, "weights", read)

    def line(self, out: Path, *flags: str) -> list[str]:
        return [
            f"--pretrained_model_name_or_path={self.model}", f"--train_data_dir={self.data}", f"--output_dir={out}",
            "--output_name=NAME", "--resolution=64,64", "--enable_bucket", "--min_bucket_reso=32",
            "--max_bucket_reso=128", "--train_batch_size=2", "--max_train_steps=4", "--learning_rate=1e-4", "--seed=1",
            "--log_every=1", "--max_data_loader_n_workers=0", "--device=cpu", "--save_model_as=safetensors",
            "--flip_aug", f"--cache_dir={self.folder / 'cache'}", *flags,
        ]  # fmt: skip

    def __call__(self, name: str, *flags: str) -> Path:
        self.filled.clear()
        self.read.clear()
        out, line = self.folder / name, self.line(self.folder / name, *flags)
        assert run(parse(line).config, line) == 0
        return out

    @property
    def drawing(self) -> tuple[str, ...]:
        return f"--sample_prompts={self.folder / 'prompts.txt'}", "--sample_at_first", "--sample_every_n_steps=2"


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, patch: pytest.MonkeyPatch) -> Runs:
    return Runs(tmp_path_factory.mktemp("sleeping"), patch)


@pytest.fixture(scope="module")
def online(runs: Runs) -> Path:
    return runs("online", *runs.drawing)


def exported(out: Path) -> dict[str, Any]:
    return load_file(out / "NAME.safetensors")


@pytest.mark.flags("cache_latents_to_disk", "cache_text_encoder_outputs_to_disk")
def test_with_a_whole_cache_no_encoder_is_loaded_and_exports_hold_it_all_the_same(runs: Runs, online: Path) -> None:
    built = runs("built", *ON_DISK)
    assert sorted(runs.filled) == [
        "AutoencoderKL",
        "CLIPTextModel",
        "CLIPTextModelWithProjection",
        "UNet2DConditionModel",
    ]
    out = runs("whole", *ON_DISK)
    assert runs.filled == ["UNet2DConditionModel"]
    assert runs.read[0] == "unet" and sorted(runs.read[1:]) == sorted(FROZEN)  # for the export, a tensor at a time
    assert losses(out) == losses(built) == pytest.approx(losses(online), rel=1e-6)
    ours, theirs = exported(out), exported(online)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        same = ours[name].equal(value) if not name.startswith(UNET) else ours[name].sub(value).abs().max() < 4e-4
        assert same and ours[name].dtype == value.dtype, name


def test_pictures_wake_the_encoders_and_are_those_of_online_training(runs: Runs, online: Path) -> None:
    runs("built", *ON_DISK, "--resume=auto")
    out = runs("drawn", *ON_DISK, *runs.drawing)
    assert runs.filled[0] == "UNet2DConditionModel"
    assert sorted(runs.filled[1:]) == 3 * ["AutoencoderKL"] + 3 * ["CLIPTextModel"] + 3 * [
        "CLIPTextModelWithProjection"
    ]
    ours, theirs = (sorted((folder / "sample").glob("*_000000_00_*.png")) for folder in (out, online))
    assert len(ours) == len(theirs) == 1 and ours[0].read_bytes() == theirs[0].read_bytes()
    assert len(list((out / "sample").glob("*_grid.png"))) == 3


def test_a_dry_run_with_a_whole_cache_loads_nothing(runs: Runs, online: Path) -> None:
    runs("built", *ON_DISK, "--resume=auto")
    runs.filled.clear()
    runs.read.clear()
    said: list[str] = []
    line = runs.line(runs.folder / "dry", *ON_DISK, "--fp8_base", "--mixed_precision=bf16")
    assert dry_run.dry_run(parse(line).config, said.append, full=True) == 0
    assert not runs.filled and not runs.read
    text = "\n".join(said)
    assert "parameters of text_encoder_2" in text and "cache of latents" in text
    assert "frozen weights 0 GiB" in text
