"""A model whose text encoder sees the references: captions and references are cached together, by the address of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edit_batches import batches, flipped
from PIL import Image
from refusals import names

from difftrain.cli import main
from difftrain.config import TrainConfig
from difftrain.config.parse_keys import parse
from difftrain.contracts import ConfigFault, ReferenceArea
from difftrain.demo.prepare import make
from difftrain.models.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
NAME = "qwen_image_edit_plus"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe's model and a dozen of its pairs, each with a second reference, which is turned round."""
    folder = tmp_path_factory.mktemp("seen")
    make("tiny", folder / "demo", 1.0, lambda line: None, family=NAME)
    pictures = folder / "demo" / "pictures"
    (pictures / "second").mkdir()
    for file in sorted((pictures / "train").glob("*.png")):
        if int(file.stem) >= 12:
            file.unlink()
            file.with_suffix(".txt").unlink()
            continue
        Image.fromarray(np.asarray(Image.open(pictures / "reference" / file.name))[::-1]).save(
            pictures / "second" / file.name
        )
    listed(folder, folder / "pairs.toml", "reference", "second")
    return folder


def listed(place: Path, file: Path, *references: str) -> None:
    pictures = place / "demo" / "pictures"
    shown = [str(pictures / each) for each in references]
    file.write_text(f"resolutions = [64]\n[[directory]]\npath = '{pictures / 'train'}'\ncontrol_path = {shown}\n")


def words(place: Path, *more: str) -> list[str]:
    demo = place / "demo"
    return [
        f"--config={ROOT / 'configs' / NAME / 'tiny.toml'}", f"--demo.folder={demo}",
        f"--model.diffusers_path={demo / 'model'}", f"--output.dataset={place / 'pairs.toml'}",
        f"--output.output_dir={place / 'out'}", f"--data.cache_dir={place / 'cache'}", "--data.num_control=2",
        "--training.max_steps=2", *more,
    ]  # fmt: skip


def configured(place: Path, *more: str) -> TrainConfig:
    return parse(words(place, *more)).config


@pytest.mark.parametrize("size", ["target", "area"])
def test_cached_texts_are_those_of_online_training(place: Path, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where references have a size of their own, which is what the encoder sees."""
    monkeypatch.setitem(FAMILIES, NAME, replace(FAMILIES[NAME], control_area=ReferenceArea(96 * 160)))
    shown = f"--data.control_size={size}"
    online = configured(place, shown, "--cache.latents_to_disk=false", "--cache.text_to_disk=false")
    family, parts, _, plain = batches(online, flipped)
    assert plain[0].features["control_2_pixels"].shape[-2:] == ((128, 128) if size == "area" else (64, 64))
    cached = batches(configured(place, shown), flipped)[3]
    assert len(plain) == len(cached) == 3 and family.sights[0].count == 2
    for ours, theirs in zip(cached, plain, strict=True):
        assert not any("pixels" in name for name in ours.features)
        assert {"hidden_1", "mask_1", "control_latents", "control_2_latents"} <= ours.features.keys()
        a, b = (family.text(batch, parts) for batch in (ours, theirs))
        assert torch.equal(a["mask"], b["mask"])
        torch.testing.assert_close(a["tokens"], b["tokens"], atol=1e-4, rtol=1e-4)


def test_what_is_seen_changes_a_text_and_a_caption_changes_no_latents(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = place / "demo" / "pictures" / "second" / "003.png"
    caption = place / "demo" / "pictures" / "train" / "004.txt"
    kept = reference.read_bytes(), caption.read_text()
    cfg = configured(place, f"--data.cache_dir={tmp_path / 'cache'}")

    def encoded() -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO", logger="difftrain"):
            batches(cfg)
        return [line for line in caplog.messages if "to be encoded" in line]

    assert sum("12 to be encoded" in line for line in encoded()) == 4
    try:
        Image.new("RGB", (64, 64), "blue").save(reference)
        again = encoded()
        assert len(again) == 2 and all("1 to be encoded" in line for line in again)
        assert any("control_2_latents" in line for line in again) and any("text_encoder" in line for line in again)
        caption.write_text("another caption")
        (again_text,) = encoded()
        assert "text_encoder" in again_text and "1 to be encoded" in again_text
        assert encoded() == []
    finally:
        reference.write_bytes(kept[0])
        caption.write_text(kept[1])


def test_references_in_another_order_are_other_texts(place: Path, tmp_path: Path) -> None:
    listed(place, tmp_path / "turned.toml", "second", "reference")
    made = batches(configured(place))[3]
    turned = batches(configured(place, f"--output.dataset={tmp_path / 'turned.toml'}"))[3]
    for ours, theirs in zip(made, turned, strict=True):
        assert torch.equal(ours.features["control_latents"], theirs.features["control_2_latents"])
        assert not torch.equal(ours.features["hidden_1"], theirs.features["hidden_1"])


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        (("--data.num_control=4",), ("num_control", "4")),
        (("--data.num_control=0",), ("num_control", "0")),
        (("--model.type=qwen_image_edit",), ("num_control", "2")),
    ],
)
def test_other_numbers_of_references_are_refused(place: Path, more: tuple[str, ...], facts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigFault) as caught:
        parse(words(place, *more))
    assert any(all(fact in str(fault) for fact in facts) for fault in caught.value.faults)


def test_dropped_references_are_seen_by_nobody(place: Path) -> None:
    """Where texts are made in the step: of a sample whose latents are zeros the encoder is given none either."""
    online = ("--cache.text_to_disk=false", "--data.control_dropout=0.5")
    family, parts, _, made = batches(configured(place, *online))
    batch = made[0]
    dropped = batch.draws["control_dropout"] < 0.5
    assert dropped.any() and not dropped.all()
    ours = family.text(batch, parts)["tokens"]
    batch.draws.pop("control_dropout")
    shown = family.text(batch, parts)["tokens"]
    same = torch.tensor([torch.equal(a, b) for a, b in zip(ours, shown, strict=True)])
    assert torch.equal(same, ~dropped)


def test_generate_shows_the_encoder_what_it_is_given(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    one = f"--control={place / 'demo' / 'pictures' / 'reference' / '000.png'}"
    other = f"--control={tmp_path / 'noise.png'}"
    weights = ("generate", "--device=cpu", "--threads=1", f"--weights={place / 'demo' / 'model'}")
    line = "--prompt=a red star --w 64 --h 48 --d 7 --s 4 --l 6"

    def drawn(name: str, *more: str) -> Any:
        assert main([*weights, line, f"--output={tmp_path / name}", *more]) == 0
        return np.asarray(Image.open(tmp_path / name))

    first, second = drawn("1.png", one), drawn("2.png", other)
    assert np.array_equal(first, drawn("3.png", one)) and not np.array_equal(first, second)
    capsys.readouterr()
    assert main([*weights, line, f"--output={tmp_path / '4.png'}"]) == 2
    assert names(capsys.readouterr().err, "--ci", "0", "1")
