"""A model that edits, at the doors: pairs are cached and shown, dropped for guidance, drawn from, and refused by name."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from doors import Door
from edit_batches import batches, flipped
from PIL import Image
from refusals import names

from difftrain.cli import main
from difftrain.config import TrainConfig
from difftrain.config.datasets.kohya import resolve
from difftrain.config.parse_keys import parse
from difftrain.contracts import Bucket, ConfigFault, ReferenceArea
from difftrain.demo.prepare import make
from difftrain.models.registry import FAMILIES, make_family
from difftrain.train.inspect import inspect

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "flux_kontext" / "tiny.toml"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe's model and pairs."""
    folder = tmp_path_factory.mktemp("edit")
    make("tiny", folder / "demo", 1.0, lambda line: None, family="flux_kontext")
    return folder


def words(place: Path, *more: str) -> list[str]:
    demo = place / "demo"
    return [
        f"--config={RECIPE}", f"--demo.folder={demo}", f"--model.diffusers_path={demo / 'model'}",
        f"--output.dataset={demo / 'train.toml'}", f"--output.output_dir={place / 'out'}",
        f"--data.cache_dir={place / 'cache'}", "--training.max_steps=2", *more,
    ]  # fmt: skip


def configured(place: Path, *more: str) -> TrainConfig:
    return parse(words(place, *more)).config


def refused(place: Path, *more: str) -> list[str]:
    with pytest.raises(ConfigFault) as caught:
        parse(words(place, *more))
    return [str(fault) for fault in caught.value.faults]


# ------------------------------------------------------------------ what is read, cached and dropped


def test_cached_references_are_those_of_online_training(place: Path) -> None:
    online = configured(place, "--cache.latents_to_disk=false", "--cache.text_to_disk=false")
    family, parts, _, plain = batches(online, flipped)
    cached = batches(configured(place), flipped)[3]
    assert len(plain) == len(cached) == 12 and "control_pixels" in plain[0].features
    for ours, theirs in zip(cached, plain, strict=True):
        assert "control_pixels" not in ours.features and "control_latents" in ours.features
        a, b = (family.references(batch, parts)["control"] for batch in (ours, theirs))
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    shown = torch.cat([batch.features["control_pixels"] for batch in plain])
    made = torch.cat([batch.features["pixels"] for batch in plain])
    white = (made.amin(1) > 250).float() - (shown.amin(1) > 250).float()
    assert float(white.abs().mean()) < 0.01, "black shapes lie where the coloured ones do"


def test_a_reference_that_changes_is_encoded_again_and_nothing_else(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    demo = tmp_path / "demo"
    make("tiny", demo, 1.0, lambda line: None, family="flux_kontext")
    cfg = configured(place, f"--output.dataset={demo / 'train.toml'}", f"--data.cache_dir={tmp_path / 'cache'}")
    batches(cfg)
    Image.new("RGB", (64, 64), "blue").save(demo / "pictures" / "reference" / "003.png")
    with caplog.at_level("INFO", logger="difftrain"):
        batches(cfg)
    encoded = [line for line in caplog.messages if "to be encoded" in line]
    assert len(encoded) == 1 and "control_latents" in encoded[0] and "1 to be encoded" in encoded[0]


def test_references_may_have_the_area_of_the_pipeline(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 96 px beside images of 64 px here: cached as online, mirrored with their images, encoded again, and drawn from."""
    monkeypatch.setitem(
        FAMILIES, "flux_kontext", replace(FAMILIES["flux_kontext"], control_area=ReferenceArea(96 * 96))
    )
    area = ("--data.control_size=area", f"--data.cache_dir={tmp_path / 'cache'}")
    batches(configured(place, f"--data.cache_dir={tmp_path / 'cache'}"), flipped)
    with caplog.at_level("INFO", logger="difftrain"):
        family, parts, _, cached = batches(configured(place, *area), flipped)
    (encoded,) = [line for line in caplog.messages if "to be encoded" in line]
    assert "control_latents" in encoded
    plain = batches(configured(place, *area, "--cache.latents_to_disk=false", "--cache.text_to_disk=false"), flipped)[3]
    for ours, theirs in zip(cached, plain, strict=True):
        a, b = (family.references(batch, parts)["control"] for batch in (ours, theirs))
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        assert theirs.features["control_pixels"].shape[-2:] == (96, 96)
        assert [2 * side for side in a.shape[-2:]] == [3 * side for side in family.latents(ours, parts).shape[-2:]]
    shown = torch.nn.functional.avg_pool2d(torch.cat([b.features["control_pixels"] for b in plain]).float(), 3)
    made = torch.nn.functional.avg_pool2d(torch.cat([b.features["pixels"] for b in plain]).float(), 2)
    assert float(((made.amin(1) > 250).float() - (shown.amin(1) > 250).float()).abs().mean()) < 0.02

    # a step, what it costs, and samples
    inputs = family.inputs(cached[0], parts)
    assert family.loss_sums(family.forward(parts.root, inputs), inputs)["loss"].isfinite()
    usual = make_family(configured(place))
    assert family.flops_per_sample(parts, Bucket(64, 64)) > usual.flops_per_sample(parts, Bucket(64, 64))
    drawn = [
        "generate", "--device=cpu", f"--weights={place / 'demo' / 'model'}", "--prompt=a star --w 64 --h 64 --s 1 --d 1",
        f"--control={place / 'demo' / 'pictures' / 'reference' / '000.png'}",
    ]  # fmt: skip
    for size in ("target", "area"):
        assert main([*drawn, f"--control_size={size}", f"--output={tmp_path / f'{size}.png'}"]) == 0
    first, second = (np.asarray(Image.open(tmp_path / f"{size}.png")) for size in ("target", "area"))
    assert first.shape == second.shape and not np.array_equal(first, second)


def test_dropped_references_are_zeros_by_a_draw_of_the_use(place: Path) -> None:
    family, parts, _, made = batches(configured(place, "--data.control_dropout=0.3"))
    zeros = torch.cat([(family.references(batch, parts)["control"].flatten(1) == 0).all(1) for batch in made])
    again = torch.cat([(batch.draws["control_dropout"] < 0.3) for batch in batches(family.cfg)[3]])
    assert zeros.equal(again) and 5 <= int(zeros.sum()) <= 24
    plain = batches(configured(place))[3]
    assert "control_dropout" not in plain[0].draws


# ------------------------------------------------------------------ what is refused


def about(said: list[str], *facts: str) -> bool:
    """Return whether one of several faults names all facts."""
    return any(all(fact in fault for fact in facts) for fault in said)


def test_what_does_not_fit_is_named(place: Path, tmp_path: Path) -> None:
    flux = words(place, "--model.type=flux", "--data.num_control=1", f"--data.control_dirs=['{tmp_path}']")
    with pytest.raises(ConfigFault) as caught:
        parse(flux)
    said = [str(fault) for fault in caught.value.faults]
    assert about(said, "num_control", "flux")
    assert about(said, "control_dirs", "flux") and any(names(one, "control_path") for one in said)
    assert about(refused(place, "--data.num_control=0"), "num_control", "0", "Kontext")
    assert about(refused(place, "--data.num_control=4"), "num_control", "4")
    assert about(refused(place, "--model.type=omnigen2", "--data.control_size=area"), "control_size", "omnigen2")
    assert about(refused(place, "--model.type=flux", "--data.control_size=area"), "control_size", "flux")
    (tmp_path / "d.toml").write_text(
        f"resolutions = [64]\n[[directory]]\npath = '{place / 'demo' / 'pictures' / 'train'}'\n"
        f"control_path = ['{place}', '{tmp_path}']\n"
    )
    said = refused(place, f"--output.dataset={tmp_path / 'd.toml'}")
    assert about(said, "control_dirs", "2", "num_control", "1")
    (tmp_path / "d.toml").write_text((tmp_path / "d.toml").read_text().replace(str(tmp_path), "nowhere"))
    assert any(
        names(one, "control_path", "nowhere") for one in refused(place, f"--output.dataset={tmp_path / 'd.toml'}")
    )


def test_kohya_s_conditioning_data_are_references_where_no_masks_are_asked_for(place: Path, tmp_path: Path) -> None:
    pairs = place / "demo" / "pictures"
    (tmp_path / "d.toml").write_text(
        f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{pairs / 'train'}'\n"
        f"conditioning_data_dir = '{pairs / 'reference'}'\n"
    )
    for family, masked, shown in (("flux_kontext", False, 1), ("flux_kontext", True, 0), ("flux", False, 0)):
        cfg = TrainConfig.model_validate({"model": {"family": family}, "loss": {"masked": masked}})
        (dataset,) = resolve(tmp_path / "d.toml", cfg).datasets
        (subset,) = dataset.subsets
        assert len(subset.control_dirs) == shown and bool(subset.conditioning_dir) == (not shown)


# ------------------------------------------------------------------ what is drawn and shown


def test_a_run_draws_from_references_and_generate_draws_the_same(place: Path, tmp_path: Path) -> None:
    reference = place / "demo" / "pictures" / "reference" / "000.png"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"a red star --w 64 --h 48 --d 7 --s 2 --l 3 --ci {reference}\n")
    out = place / "drawn"
    more = (
        f"--sample.prompts={prompts}",
        "--sample.every_n_steps=2",
        f"--output.output_dir={out}",
        "--engine.threads=1",
    )
    train = str(ROOT / "sd_scripts_xl" / "train.py")
    Door(place, place / "user_cache").run_words([sys.executable, train, *words(place, *more)], timeout=400)
    (run,) = out.iterdir()
    (sample,) = (run / "sample").glob("*_00_*.png")
    weights = next(run.glob("global_step2"))
    drawn = ("generate", "--device=cpu", "--threads=1", f"--weights={weights}")
    assert main([*drawn, f"--prompts={prompts}", f"--output={tmp_path / 'one.png'}"]) == 0
    assert np.array_equal(np.asarray(Image.open(sample)), np.asarray(Image.open(tmp_path / "one.png")))

    # the same by flags, from another image, and without one
    line = "a red star --w 64 --h 48 --d 7 --s 2 --l 3"
    other = reference.with_name("001.png")
    for number, file in enumerate((reference, other)):
        words_of_it = [*drawn, f"--prompt={line}", f"--control={file}", f"--output={tmp_path / f'{number}.png'}"]
        assert main(words_of_it) == 0
    first, second = (np.asarray(Image.open(tmp_path / f"{number}.png")) for number in (0, 1))
    assert np.array_equal(first, np.asarray(Image.open(sample))) and not np.array_equal(first, second)


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ((), ("--ci", "0", "1")),
        (("--control=nowhere.png",), ("--ci", "nowhere.png")),
        (("--control={text}",), ("--ci", "text.png")),
        (("--control={good}", "--control={good}"), ("--ci", "2", "1")),
    ],
)
def test_prompts_without_their_references_are_refused(
    more: tuple[str, ...], facts: tuple[str, ...], place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, text = place / "demo" / "pictures" / "reference" / "000.png", tmp_path / "text.png"
    text.write_text("no image")
    filled = [word.format(good=good, text=text) for word in more]
    weights = f"--weights={place / 'demo' / 'model'}"
    assert (
        main(["generate", "--device=cpu", weights, "--prompt=a star", f"--output={tmp_path / 'o.png'}", *filled]) == 2
    )
    assert names(capsys.readouterr().err, *facts)


def test_the_page_of_a_data_set_shows_pairs(place: Path, tmp_path: Path) -> None:
    inspect(configured(place), tmp_path / "page.html", log=lambda line: None, pictures=3)
    assert (tmp_path / "page.html").read_text().count('alt="reference 1 of ') == 3
