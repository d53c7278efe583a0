"""The models of SD3-Light's demos: every part of the real one, small and from a seed, in a diffusers folder.

What a demo's pictures and captions decide is fitted to its training set: the VAE (vae_fit.py), the three vocabularies,
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
from difftrain.models.parts.clip_tokens import PAD_1, PAD_2
from difftrain.models.parts.clip_vocabulary import ClipVocabulary, learn_merges
from difftrain.models.parts.t5_vocabulary import T5Vocabulary
from difftrain.models.registry import make_family
from difftrain.models.sd3.architecture import named
from difftrain.train.demo import recipe, sets

Say = Callable[[str], None]
MERGES = {"shapes": 52, "emoji": 1000}  # words are one piece to three then
VAE_STEPS = {"shapes": 250, "emoji": 800}
TEXT_STEPS = {"shapes": 100, "emoji": 300}
_WORD = re.compile(r"[^\W\d_]+|\d|[^\w\s]+")


def write_tiny(folder: Path) -> None:
    """Write the tiny random model, the one of `difftrain init sd3_light --size=tiny --seed=1`."""
    _export(_config("tiny"), folder)


def write_model(dataset: str, scale: float, data: Path, folder: Path, say: Say) -> None:
    """Build a demo's model, fit VAE, vocabularies and CLIP to a folder of tars, and save all as a diffusers folder."""
    from difftrain.models.parts.vae import posterior
    from difftrain.train.demo.model import fit_vae, load_pictures
    from difftrain.train.demo.text_fit import fit_text

    captions = list(sets.captions_of(data))
    vocabularies = _vocabularies(captions, MERGES[dataset])
    with tempfile.TemporaryDirectory() as aside:
        sizes, given = Path(aside) / "sizes.json", {}
        sizes.write_text(json.dumps(_sizes(*vocabularies)), encoding="utf-8")
        for number, each in enumerate[ClipVocabulary | T5Vocabulary](vocabularies, 1):
            each.save(Path(aside) / f"tokenizer_{number}")
            given[f"tokenizer{number}"] = str(Path(aside) / f"tokenizer_{number}")
        vae_steps, text_steps = (max(2, round(steps[dataset] * scale**0.5)) for steps in (VAE_STEPS, TEXT_STEPS))

        def fit(family: Any, parts: Any) -> None:
            pictures, vae = load_pictures(data), parts.frozen["vae"]
            fit_vae(vae, pictures, vae_steps, say)
            ids = family.tokenizer(parts)(captions)
            encoders = [parts.frozen[f"text_encoder_{i}"] for i in (1, 2)]
            inputs = [ids[f"input_ids_{i}"] for i in (1, 2)]
            latents, _ = posterior(vae, pictures, fp32=True, batch_size=64)
            fit_text(encoders, inputs, latents, text_steps, say)

        _export(_config(str(sizes), **given), folder, fit)


def _config(sizes: str, **given: str) -> TrainConfig:
    return TrainConfig(
        model=ModelSection(family="sd3", init_from_config=sizes, **given),  # type: ignore[arg-type]
        training=TrainingSection(seed=recipe.SEED),
        loss=LossSection(),
    )


def _export(cfg: TrainConfig, folder: Path, fit: Callable[[Any, Any], None] = lambda *_: None) -> None:
    family = make_family(cfg)
    parts = family.load()
    fit(family, parts)
    weights = ((name, value.detach()) for name, value in parts.root.named_parameters())
    family.export(weights, parts, "diffusers_safetensors", folder)


def _vocabularies(captions: Sequence[str], num_merges: int) -> tuple[ClipVocabulary, ClipVocabulary, T5Vocabulary]:
    """Learn them from captions: for CLIP so many pairs of pieces, for T5 every word."""
    counts = Counter(word for caption in captions for word in _WORD.findall(caption.lower()))
    text = " ".join(word for word in sorted(counts) for _ in range(counts[word]))
    merges = learn_merges(text, num_merges)
    spaced = re.sub(r"([^\w\s-])", r" \1 ", " ".join(captions))
    third = T5Vocabulary.learn(spaced, 3 + 95 + len(set(spaced.split())))
    return ClipVocabulary.from_merges(merges, PAD_1), ClipVocabulary.from_merges(merges, PAD_2), third


def _sizes(first: ClipVocabulary, second: ClipVocabulary, third: T5Vocabulary) -> dict[str, Any]:
    """Return the demo's sizes for these vocabularies."""
    sizes = named("demo").to_dict()
    for section, vocabulary in (("text_encoder", first), ("text_encoder_2", second)):
        ids = {"bos_token_id": vocabulary.bos_id, "eos_token_id": vocabulary.eos_id, "pad_token_id": vocabulary.pad_id}
        sizes[section] = sizes[section] | ids | {"vocab_size": len(vocabulary)}
    sizes["text_encoder_3"] = sizes["text_encoder_3"] | {"vocab_size": len(third)}
    return sizes
