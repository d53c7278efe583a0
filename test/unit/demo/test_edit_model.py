"""The demo's model of a family whose text encoder sees: its vocabulary, its VAE, and that it loads as any folder does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from difftrain.config import ModelSection, TrainConfig
from difftrain.demo import datasets, model, pairs
from difftrain.models.families.qwen_image import QwenImage
from difftrain.models.families.qwen_image_edit import QwenImageEdit
from difftrain.models.registry import make_family
from difftrain.models.text.llm_vocabulary import LlmVocabulary
from difftrain.models.vae.fit import psnr, psnr_of
from difftrain.models.vae.latents import pixels_to_unit

FAMILY = "qwen_image_edit"


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, vae_steps: int) -> tuple[Any, Any, torch.Tensor]:
    """Fit the demo's model to a few shapes, captioned as pairs are; return the family, its parts, and the pictures."""
    monkeypatch.setitem(model.FITS, "pairs", model.DemoFit(0, vae_steps, 0))
    captions = (pairs.SOLID, pairs.DRAWN)
    shapes = datasets.shape_pictures(96, 64, 1)
    datasets.write(folder / "data", (shape._replace(caption=captions[n % 2]) for n, shape in enumerate(shapes)))
    said: list[str] = []
    model.write_flow_model("pairs", 1.0, folder / "data", folder / "model", said.append, FAMILY)
    family = make_family(TrainConfig(model=ModelSection(family=FAMILY, pretrained=str(folder / "model"))))
    return family, family.load(), model.load_pictures(folder / "data")


@pytest.mark.nightly  # a fit of some ten seconds
def test_it_is_made_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, parts, pictures = made(tmp_path, monkeypatch, 2)
    ids = family.tokenizer(parts)([pairs.SOLID, pairs.DRAWN])["input_ids_1"]
    assert not torch.equal(ids[0], ids[1])
    # the mark of the reference is the first that is kept behind the template's head
    sight = family.sights[0]
    assert ids[0, QwenImageEdit.texts[0].drop + 1] == sight.mark == parts.frozen["text_encoder"].config.image_token_id
    with torch.no_grad():
        latents = family.vae.scaled(parts.frozen["vae"].encode(pixels_to_unit(pictures).unsqueeze(2)).latent_dist.mean)
    assert latents.shape == (96, 8, 1, 16, 16) and abs(latents.std() - 1) < 0.05


@pytest.mark.parametrize("family", [QwenImage, QwenImageEdit])
def test_a_vocabulary_of_every_word_counts_what_is_cut_off(family: type[QwenImage]) -> None:
    """The heads of both templates are counts of real tokens; a vocabulary that has every word counts the same."""
    text = family.texts[0].showing(1)
    backend = LlmVocabulary.learn(text, [pairs.SOLID, pairs.DRAWN]).backend()
    ahead = text.template.partition("{}")[0].removesuffix(text.picture)
    assert len(backend.encode(ahead).ids) == text.drop
    assert len(backend.encode(pairs.SOLID).ids) == len(pairs.SOLID.split())


def test_a_learned_vocabulary_is_read_back_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = QwenImageEdit.texts[0].showing(1)
    learned = LlmVocabulary.learn(text, [pairs.DRAWN])
    learned.save(tmp_path)
    prompt = text.template.replace("{}", "a word that was not there")
    ids = learned.backend().encode(prompt).ids
    assert AutoTokenizer.from_pretrained(tmp_path)(prompt)["input_ids"] == ids
    assert LlmVocabulary.read(tmp_path, text).backend().encode(prompt).ids == ids


@pytest.mark.nightly
def test_its_vae_reproduces_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, parts, pictures = made(tmp_path, monkeypatch, 120)
    x = pixels_to_unit(pictures)
    plain = psnr_of(x.mean((2, 3), keepdim=True).expand_as(x), x)
    assert psnr(parts.frozen["vae"], pictures[:32]) > plain + 8
