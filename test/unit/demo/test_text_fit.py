"""A demo's text encoders, fitted: what they tell of pictures whose captions they have not seen."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import Tensor

from difftrain.demo import model
from difftrain.demo.model import _config
from difftrain.models.registry import make_family

COLOURS, SHAPES = ("red", "green", "blue", "white"), ("circle", "square", "star", "heart")


def told(seed: int = 0) -> tuple[int, Tensor]:
    """Fit the tiny size's to latents that a colour and a shape make up; return the per cent that it says, and pooled."""
    family = make_family(_config("sd3", "tiny"))
    parts = family.load()
    captions = [f"a {colour} {shape}" for colour, shape in itertools.product(COLOURS, SHAPES)] * 8
    torch.manual_seed(seed)
    vectors = {word: torch.randn(4, 2, 2) for word in (*COLOURS, *SHAPES)}
    latents = torch.stack([sum(vectors[word] for word in caption.split()[1:]) for caption in captions])  # type: ignore[misc]
    ids = family.tokenizer(parts)(captions)
    encoders = [parts.frozen[f"text_encoder_{i}"] for i in (1, 2)]
    said: list[str] = []
    model.fit_text(encoders, [ids[f"input_ids_{i}"][:, :8] for i in (1, 2)], latents, 60, said.append)
    assert not any(weight.requires_grad for encoder in encoders for weight in encoder.parameters())
    found = re.search(r"(-?\d+) %", said[0])
    assert found is not None
    with torch.no_grad():
        return int(found[1]), encoders[0](ids["input_ids_1"][:16, :8]).text_embeds


def test_words_come_to_tell_what_pictures_are_like_and_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "BATCH", 16)
    share, pooled = told()
    assert share > 80
    again, same = told()
    assert again == share and same.equal(pooled)
