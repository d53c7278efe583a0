"""Captions held out as a whole, what needs no network, and the data sets of SD3-Light's demos."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from difftrain.demo import datasets, flow_score, splits
from difftrain.demo.judge import Baselines, Nearest, gaussian, point, words
from difftrain.demo.splits import LEAST, DemoSplit, unseen

TONES = ("light", "medium-light", "medium", "medium-dark", "dark")
JOBS = ("cook", "pilot", "judge", "farmer", "singer", "artist")


def people() -> list[str]:
    bases = [f"{who} {job}" for who in ("man", "woman", "person") for job in JOBS]
    return [*bases, *(f"{base}: {tone} skin tone" for base in bases for tone in TONES)]


THINGS = [
    f"{colour} {thing}" for colour in ("red", "blue", "green", "white") for thing in ("heart", "circle", "book", "flag")
]


def test_words_of_a_caption() -> None:
    assert words("Woman cook: medium-dark skin tone") == {"woman", "cook", "medium-dark", "skin", "tone"}


def test_held_out_captions_are_new_and_their_words_are_not() -> None:
    labels = [*people(), *THINGS]
    out = unseen(labels)
    kept = [words(label) for number, label in enumerate(labels) if number not in out]
    assert 20 < len(out) < len(labels) - LEAST and out == unseen(labels)
    seen = Counter(word for each in kept for word in each)
    for number in out:
        mine = words(labels[number])
        assert all(seen[word] >= LEAST for word in mine), labels[number]
        assert not any(mine <= each for each in kept), labels[number]
    kinds = Counter(("tone" in labels[n], " " in labels[n] and labels[n] in THINGS) for n in out)
    assert len(kinds) >= 2  # people and things


def test_a_group_goes_whole_or_not_at_all() -> None:
    split = DemoSplit(["a b", "a c", "b c", "a d", "b d", "c d", "a e", "b f"])
    assert not split.take([6])  # e stands nowhere else
    assert not split.take([0, 1])  # then a would be left in two captions
    assert split.take([0]) and split.out == {0} and not split.take([0])


def test_a_caption_that_another_one_holds_stays() -> None:
    labels = ["red heart", "red heart big", "red sun", "red sea", "heart sun", "heart sea", "big sun", "big sea"]
    assert not DemoSplit(labels).take([0])


def test_nearest_counts_rare_words_more() -> None:
    found = Nearest(["red heart big", "blue star big", "blue sun big", "green tree big"])
    assert found.of(["red sun big", "star", "nothing known"]).tolist()[1:] == [1, 0]
    assert found.of(["red heart"]).item() == 0
    assert (found.of_own() != torch.arange(4)).all()


def test_a_gaussians_velocity_is_the_conditional_mean() -> None:
    rng = torch.Generator().manual_seed(0)
    mean, variance = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 4.0]])
    x_0 = mean + variance.sqrt() * torch.randn(400_000, 2, generator=rng)
    noise, t = torch.randn(x_0.shape, generator=rng), torch.full((len(x_0),), 0.3)
    x_t, v = 0.7 * x_0 + 0.3 * noise, noise - x_0
    found = gaussian(x_t, t, mean, variance)
    # of all functions of x_t it alone leaves an error that has nothing to do with x_t
    assert ((v - found) * x_t).mean(0).abs().max() < 0.02
    assert ((v - found) ** 2).mean() < ((v - found - 0.05 * x_t) ** 2).mean()
    assert torch.allclose(gaussian(x_t[:4], t[:4], mean, torch.zeros_like(mean)), point(x_t[:4], t[:4], mean))


def test_baselines_know_their_training_set() -> None:
    latents = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    captions = [f"{colour} {form}" for colour in ("red", "blue", "green") for form in ("star", "sun")]
    fitted = Baselines(latents, captions)
    x, t = torch.zeros(2, 2, 4, 4), torch.tensor([0.5, 0.9])
    found = {name: predict(x, t) for name, predict in fitted.of(["blue star", "green sun"]).items()}
    assert tuple(found) == fitted.names and all(value.shape == x.shape for value in found.values())
    assert torch.equal(found["nearest_caption"], -latents[[2, 5]])
    assert torch.allclose(found["mean_latent"], -latents.mean(0).expand(2, -1, -1, -1))
    assert torch.allclose(found["nearest_caption_point"][0], -latents[2] / 0.5)


def test_shapes_are_split_by_caption(tmp_path: Path) -> None:
    counts = splits.write_shapes(tmp_path, 120)
    train, news = (set(splits.captions_of(tmp_path / name)) for name in (splits.TRAIN, splits.UNSEEN))
    assert counts == {"train": 120, "unseen": 8 * splits.FEWEST} and news == splits.shapes_held_out()
    assert not train & news and len(news) == len(datasets.COLOURS)
    seen = {word for caption in train for word in caption.split()}
    assert {word for caption in news for word in caption.split()} <= seen


def test_the_tiny_set_is_a_plain_folder(tmp_path: Path) -> None:
    assert splits.write_few(tmp_path) == {"train": splits.FEW}
    files = sorted(path.name for path in (tmp_path / "train").iterdir())
    assert len(files) == 2 * splits.FEW and files[:2] == ["000.png", "000.txt"]
    datasets.parse((tmp_path / "train" / "000.txt").read_text().strip())


@pytest.mark.parametrize("count", [3, 11])
def test_pictures_beside_drawn_ones(tmp_path: Path, count: int) -> None:
    real = [np.full((64, 64, 3), 255 * (n % 2), dtype=np.uint8) for n in range(count)]
    flow_score.write_pairs(tmp_path / "x.png", ["a woman firefighter: medium-dark skin tone"] * count, real, real[::-1])
    image = Image.open(tmp_path / "x.png")
    assert image.width == min(count, flow_score.COLUMNS) * (2 * 64 + flow_score.GAP)
