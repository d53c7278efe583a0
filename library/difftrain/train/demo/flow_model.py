"""The models of train.py's demos: every part of the real one, small and from a seed, in a diffusers folder.

What a demo's pictures and captions decide is fitted to its training set: the VAE (models/vae/fit.py), the vocabularies,
so that most words are one token, and CLIP's encoders (text_fit.py). T5's is random: it carries which word stands where,
and no knowledge of what it means. All are frozen from then on.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from difftrain.config import LossSection, ModelSection, TrainConfig, TrainingSection
from difftrain.models.facts import Text
from difftrain.models.registry import make_family
from difftrain.models.text.clip_tokens import PAD_1, PAD_2
from difftrain.models.text.clip_vocabulary import ClipVocabulary, learn_merges
from difftrain.models.text.t5_vocabulary import T5Vocabulary
from difftrain.train.demo import recipe, sets

Say = Callable[[str], None]
Vocabulary = ClipVocabulary | T5Vocabulary
MERGES = {"shapes": 52, "emoji": 1000}  # words are one piece to three then
VAE_STEPS = {"shapes": 250, "emoji": 800}
TEXT_STEPS = {"shapes": 100, "emoji": 300}
_WORD = re.compile(r"[^\W\d_]+|\d|[^\w\s]+")


def write_tiny(folder: Path, family: str) -> None:
    """Write the tiny random model, the one of `difftrain init FAMILY --size=tiny --seed=1`."""
    _export(_config(family, "tiny"), folder)


def write_model(dataset: str, scale: float, data: Path, folder: Path, say: Say, family: str) -> None:
    """Build a demo's model, fit VAE, vocabularies and CLIP to a folder of tars, and save all as a diffusers folder."""
    from difftrain.models.vae.posterior import posterior
    from difftrain.models.weights.source import shipped_sizes
    from difftrain.train.demo.model import fit_vae, load_pictures
    from difftrain.train.demo.text_fit import fit_text

    captions = list(sets.captions_of(data))
    described: Any = make_family(_config(family, "demo"))
    vocabularies = _vocabularies(captions, MERGES[dataset], described.texts)
    with tempfile.TemporaryDirectory() as aside:
        sizes, given = Path(aside) / "sizes.json", {}
        content = _sizes(shipped_sizes(described, "demo"), described, vocabularies)
        sizes.write_text(json.dumps(content), encoding="utf-8")
        for number, each in enumerate(vocabularies, 1):
            each.save(Path(aside) / f"tokenizer_{number}")
            given[f"tokenizer{number}"] = str(Path(aside) / f"tokenizer_{number}")
        vae_steps, text_steps = (max(2, round(steps[dataset] * scale**0.5)) for steps in (VAE_STEPS, TEXT_STEPS))

        def fit(model: Any, parts: Any) -> None:
            pictures, vae = load_pictures(data), parts.frozen["vae"]
            fit_vae(vae, pictures, vae_steps, say)
            ids = model.tokenizer(parts)(captions)
            clips = [(place, text) for place, text in enumerate(model.texts, start=1) if text.kind == "clip"]
            encoders = [parts.frozen[text.part] for _, text in clips]
            inputs = [ids[f"input_ids_{place}"] for place, _ in clips]
            latents, _ = posterior(vae, pictures, fp32=True, batch_size=64)
            fit_text(encoders, inputs, latents, text_steps, say)

        _export(_config(family, str(sizes), **given), folder, fit)


def _config(family: str, sizes: str, **given: str) -> TrainConfig:
    return TrainConfig(
        model=ModelSection(family=family, init_from_config=sizes, **given),  # type: ignore[arg-type]
        training=TrainingSection(seed=recipe.SEED),
        loss=LossSection(),
    )


def _export(cfg: TrainConfig, folder: Path, fit: Callable[[Any, Any], None] = lambda *_: None) -> None:
    family = make_family(cfg)
    parts = family.load()
    fit(family, parts)
    weights = ((name, value.detach()) for name, value in parts.root.named_parameters())
    family.export(weights, parts, "diffusers_safetensors", folder)


def _vocabularies(captions: Sequence[str], num_merges: int, texts: Sequence[Text]) -> tuple[Vocabulary, ...]:
    """Learn one for each text encoder from captions: for CLIP so many pairs of pieces, for T5 every word."""
    counts = Counter(word for caption in captions for word in _WORD.findall(caption.lower()))
    text = " ".join(word for word in sorted(counts) for _ in range(counts[word]))
    merges = learn_merges(text, num_merges)
    spaced = re.sub(r"([^\w\s-])", r" \1 ", " ".join(captions))
    t5 = T5Vocabulary.learn(spaced, 3 + 95 + len(set(spaced.split())))
    return tuple(
        t5 if each.kind == "t5" else ClipVocabulary.from_merges(merges, PAD_2 if each.pads_zero else PAD_1)
        for each in texts
    )


def _sizes(sizes: dict[str, Any], family: Any, vocabularies: Sequence[Vocabulary]) -> dict[str, Any]:
    """Return the demo's sizes for these vocabularies."""
    for text, vocabulary in zip(family.texts, vocabularies, strict=True):
        ids = {"vocab_size": len(vocabulary)}
        if isinstance(vocabulary, ClipVocabulary):
            ids |= {
                "bos_token_id": vocabulary.bos_id,
                "eos_token_id": vocabulary.eos_id,
                "pad_token_id": vocabulary.pad_id,
            }
        section = family.folder(text.part)
        sizes[section] = sizes[section] | ids
    return sizes
