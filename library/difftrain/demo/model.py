"""The demos' models: every part of the real one, small and from a seed, with a VAE fitted to the demo's own pictures."""

from __future__ import annotations

import json
import re
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from difftrain.config import LossSection, ModelSection, TrainConfig, TrainingSection
from difftrain.config.hidden_imports import collect_again
from difftrain.data.media.media import decode
from difftrain.demo import clips, recipe, splits
from difftrain.demo.make import FRAME_BUCKETS
from difftrain.models.facts import Text
from difftrain.models.registry import make_family
from difftrain.models.text.clip_tokens import PAD_1, PAD_2
from difftrain.models.text.clip_vocabulary import ClipVocabulary, learn_merges
from difftrain.models.text.llm_vocabulary import LlmVocabulary
from difftrain.models.text.see import IMAGE
from difftrain.models.text.t5_vocabulary import T5Vocabulary
from difftrain.models.vae.fit import channels_last, closed_form_encoder, hold_frames, principal, psnr, train_decoder
from difftrain.models.vae.latents import posterior
from difftrain.report.progress import SIGNS, Progress

if TYPE_CHECKING:
    from torch import Tensor


ENCODER_PICTURES = 1500  # the encoder's directions change no more with further ones
HELD_OUT = 64
WHITEN = 0.5  # of the patch components' unequal variances, half is kept (as logarithms): large forms stay strong


def write_model(dataset: str, scale: float, data: Path, folder: Path, log: Callable[[str], None]) -> None:
    """Build the model, fit its VAE to the pictures of `data`, and save all as a diffusers folder."""
    cfg = TrainConfig(
        model=ModelSection(init_from_config="demo", prediction_type="v_prediction"),
        training=TrainingSection(seed=recipe.SEED),
    )
    family = make_family(cfg)
    parts = family.load()
    steps = round(recipe.SIZES[dataset].vae_steps * scale**0.5)  # with too few, pictures of any UNet are a blur
    fit_vae(parts.frozen["vae"], load_pictures(data), steps, log)
    weights = ((name, value.detach()) for name, value in parts.root.named_parameters())
    family.export(weights, parts, "diffusers_safetensors", folder)


def load_pictures(data: Path) -> Tensor:
    """Read every picture of a folder of tars as training sees it. Shape: (N, 3, side, side) uint8."""
    pictures = []
    for path in sorted(data.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith((".png", ".webp")) and ".reference." not in member.name:
                    stream = tar.extractfile(member)
                    assert stream is not None
                    pictures.append(_shrink(torch.tensor(decode(stream.read()))))
    return torch.stack(pictures)


def _shrink(rgb: Tensor) -> Tensor:
    """Average (H, W, 3) down to (3, side, side)."""
    x = rgb.movedim(-1, 0)
    if x.shape[1] == recipe.SIDE:
        return x.contiguous()
    return torch.nn.functional.interpolate(x[None].float(), size=recipe.SIDE, mode="area")[0].round().byte()


def fit_vae(vae: Any, pictures: Tensor, steps: int, log: Callable[[str], None]) -> None:
    """Fit the encoder in closed form and train the decoder; say how well it reconstructs pictures it has not seen."""
    collect_again()
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(recipe.SEED))
    held_out, seen = pictures[order[:HELD_OUT]], pictures[order[HELD_OUT:]]
    started = time.monotonic()
    channels_last(vae)
    progress = Progress(steps)
    with SIGNS.doing(lambda: f"fitting the VAE to them: {progress.text()}"):
        closed_form_encoder(vae, seen[:ENCODER_PICTURES], whiten=WHITEN)
        train_decoder(vae, seen, steps=steps, seed=recipe.SEED, report=lambda step, _: progress.advance(step))
    vae.to(memory_format=torch.contiguous_format)
    spent = time.monotonic() - started
    log(f"VAE fitted to them in {spent:.0f} s: {psnr(vae, held_out):.1f} dB on unseen images")


COMPONENTS, BATCH, RATE, WARM_UP, LEFT_OUT = 128, 128, 3e-3, 40, 0.15
NO_WORD = 1  # CLIP's id of a quotation mark, which no caption of a demo has
TEXT_HELD_OUT = 256  # captions that only tell how well it went


def fit_text(
    encoders: Sequence[Any], ids: Sequence[Tensor], latents: Tensor, steps: int, log: Callable[[str], None]
) -> None:
    """Train CLIP encoders in place to tell latents from captions; say how much of their variance they tell of others.

    ids: of every encoder (N, L) int64. latents: (N, C, H, W), of the captions' pictures.
    """
    started, rng = time.monotonic(), torch.Generator().manual_seed(recipe.SEED)
    order = torch.randperm(len(latents), generator=rng)
    held_out = min(TEXT_HELD_OUT, len(order) // 8)
    few, seen = order[:held_out], order[held_out:]

    # the target: the latents' principal components, centred
    x = latents.flatten(1).float()
    basis, _ = principal(x[..., None, None], min(COMPONENTS, *x.shape))
    target = (x - x.mean(0)) @ basis.T
    scale = target.std()

    # a linear head reads it from the encoders' outputs, and all of them are trained
    with torch.no_grad():
        width = _outputs_of(encoders, [tokens[:1] for tokens in ids]).shape[1]
    head = torch.nn.Linear(width, target.shape[1])
    torch.nn.init.normal_(head.weight, std=head.in_features**-0.5, generator=rng)
    torch.nn.init.zeros_(head.bias)
    weights = [*head.parameters(), *(weight for encoder in encoders for weight in encoder.parameters())]
    trainable = [weight.requires_grad for weight in weights]
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.99), weight_decay=0.1)

    # training: the rate goes up and down, and some words of each caption are hidden
    progress = Progress(steps)
    with SIGNS.doing(lambda: f"fitting the text encoders to them: {progress.text()}"):
        for step in range(steps):
            rows = seen[torch.randint(len(seen), (BATCH,), generator=rng)]
            optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
            outputs = _outputs_of(
                encoders, [_fewer(encoder.config, tokens[rows], rng) for encoder, tokens in zip(encoders, ids)]
            )
            loss = (head(outputs) - target[rows] / scale).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            progress.advance(step + 1)

    # how much of the variance is told from captions that were held out
    for weight, before in zip(weights, trainable):
        weight.requires_grad_(before)
    with torch.no_grad():
        left = (head(_outputs_of(encoders, [tokens[few] for tokens in ids])) * scale - target[few]).square().sum()
    explained = 1 - float(left / (target[few] - target[seen].mean(0)).square().sum())
    log(
        f"text encoders fitted to them in {time.monotonic() - started:.0f} s: "
        f"they explain {100 * explained:.0f} % of image variance on unseen captions"
    )


def _outputs_of(encoders: Sequence[Any], ids: Sequence[Tensor]) -> Tensor:
    outputs = [encoder(tokens) for encoder, tokens in zip(encoders, ids)]
    return torch.cat([out.text_embeds if "text_embeds" in out else out.pooler_output for out in outputs], dim=-1)


def _fewer(config: Any, ids: Tensor, rng: torch.Generator) -> Tensor:
    """Put a token that stands in no caption in the place of some."""
    marks = torch.tensor([config.bos_token_id, config.eos_token_id, config.pad_token_id])
    gone = (torch.rand(ids.shape, generator=rng) < LEFT_OUT) & ~torch.isin(ids, marks)
    return torch.where(gone, NO_WORD, ids)


Log = Callable[[str], None]
Vocabulary = ClipVocabulary | T5Vocabulary | LlmVocabulary


class DemoFit(NamedTuple):
    """How a demo's parts are fitted: merges of a CLIP vocabulary (words are one piece to three then), steps of a full demo.

    text_steps: 0 where any encoder tells the captions apart, because they are few.
    """

    merges: int
    vae_steps: int
    text_steps: int

    def scaled(self, scale: float) -> DemoFit:
        """Return the steps of a shortened demo, which shrink by the root: with too few, images are a blur."""
        steps = (steps and max(2, round(steps * scale**0.5)) for steps in self[1:])
        return DemoFit(self.merges, *steps)


FITS = {
    "shapes": DemoFit(52, 250, 100),
    "emoji": DemoFit(1000, 800, 300),
    "pairs": DemoFit(20, 800, 0),
    "clips": DemoFit(20, 400, 0),
}
_MARKS = {"image_token_id": IMAGE, "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
SEEN = 128 * 128  # pixels that an encoder reads of a picture, which has been brought to a family's area before
_WORD = re.compile(r"[^\W\d_]+|\d|[^\w\s]+")


def write_tiny(folder: Path, family: str) -> None:
    """Write the tiny random model, the one of `difftrain init FAMILY --size=tiny --seed=1`."""
    _export(_config(family, "tiny"), folder)


def write_flow_model(dataset: str, scale: float, data: Path, folder: Path, log: Log, family: str) -> None:
    """Build a demo's model, fit VAE, vocabularies and CLIP to a folder of tars, and save all as a diffusers folder."""
    from difftrain.models.weights.find import shipped_sizes

    moves = dataset in FRAME_BUCKETS
    captions, steps = list((clips if moves else splits).captions_of(data)), FITS[dataset].scaled(scale)
    described: Any = make_family(_config(family, "demo"))
    vocabularies = _vocabularies(captions, steps.merges, described.texts)
    with tempfile.TemporaryDirectory() as aside:
        sizes, fields = Path(aside) / "sizes.json", {}
        content = _sizes(shipped_sizes(described, "demo"), described, vocabularies)
        sizes.write_text(json.dumps(content), encoding="utf-8")
        for number, vocabulary in enumerate(vocabularies, 1):
            vocabulary.save(Path(aside) / f"tokenizer_{number}")
            fields[f"tokenizer{number}"] = str(Path(aside) / f"tokenizer_{number}")

        def fit(model: Any, parts: Any) -> None:
            pictures = torch.from_numpy(clips.some_frames(data)) if moves else load_pictures(data)
            fit_vae(parts.frozen["vae"], pictures, steps.vae_steps, log)
            if moves:
                hold_frames(parts.frozen["vae"])
            model.sights = tuple(sight and replace(sight, most=SEEN) for sight in model.sights)
            if steps.text_steps:
                _fit_clips(model, parts, captions, pictures, steps.text_steps, log)

        _export(_config(family, str(sizes), **fields), folder, fit)


def _fit_clips(
    model: Any, parts: Any, captions: Sequence[str], pictures: Tensor, steps: int, log: Callable[[str], None]
) -> None:
    """Train the CLIP encoders among a model's parts on captions and what its VAE makes of their pictures."""
    ids = model.tokenizer(parts)(captions)
    clips = [(position, text) for position, text in enumerate(model.texts, start=1) if text.kind == "clip"]
    encoders = [parts.frozen[text.part] for _, text in clips]
    inputs = [ids[f"input_ids_{position}"] for position, _ in clips]
    latents, _ = posterior(parts.frozen["vae"], pictures, fp32=True, batch_size=64)
    fit_text(encoders, inputs, latents, steps, log)


def _config(family: str, sizes: str, **fields: str) -> TrainConfig:
    return TrainConfig(
        model=ModelSection(family=family, init_from_config=sizes, **fields),  # type: ignore[arg-type]
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
    """Learn one for each text encoder from captions: for CLIP so many pairs of pieces, for others every word."""
    counts = Counter(word for caption in captions for word in _WORD.findall(caption.lower()))
    text = " ".join(word for word in sorted(counts) for _ in range(counts[word]))
    merges = learn_merges(text, num_merges)
    spaced = re.sub(r"([^\w\s-])", r" \1 ", " ".join(captions))

    def learned(text: Text) -> Vocabulary:
        if text.kind == "llm":
            return LlmVocabulary.learn(text, captions)
        if text.kind == "t5":
            return T5Vocabulary.learn(spaced, 3 + 95 + len(set(spaced.split())))
        return ClipVocabulary.from_merges(merges, PAD_2 if text.pads_zero else PAD_1)

    return tuple(learned(text) for text in texts)


def _sizes(sizes: dict[str, Any], family: Any, vocabularies: Sequence[Vocabulary]) -> dict[str, Any]:
    """Return the demo's sizes for these vocabularies."""
    for text, vocabulary in zip(family.texts, vocabularies, strict=True):
        section = sizes[family.folder(text.part)]
        section.get("text_config", section)["vocab_size"] = len(vocabulary)
        if isinstance(vocabulary, ClipVocabulary):
            section["bos_token_id"], section["eos_token_id"] = vocabulary.bos_id, vocabulary.eos_id
            section["pad_token_id"] = vocabulary.pad_id
        elif text.picture:
            section |= {name: vocabulary.backend().token_to_id(mark) for name, mark in _MARKS.items()}
    return sizes
