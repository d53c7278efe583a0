"""What SD3-Light's demos end with: losses beside those without a network, and pictures of captions that are new."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from difftrain.cache.build import on_device
from difftrain.data.evaluation_sets import EvaluationSet
from difftrain.data.loader import make_loader
from difftrain.demo import recipe
from difftrain.demo.judge import Baselines, obedience
from difftrain.diffusion import flow
from difftrain.diffusion.draws import key_of, normal
from difftrain.evaluation import quantile_losses
from difftrain.evaluation.losses import TENTHS, value_at, with_draw
from difftrain.report.report import ScoreTarget
from difftrain.sampling.draw import draw_batch
from difftrain.train.drawing import sampler_of

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.contracts import Batch, Draw
    from difftrain.train.state import Run


COLUMNS, ZOOM, GAP = 8, 2, 4
LINES, LINE_HEIGHT, WRAP = 3, 11, 22  # of a caption


def write_pairs(
    path: Path, captions: Sequence[str], real: Sequence[NDArray[np.uint8]], drawn: Sequence[NDArray[np.uint8]]
) -> None:
    """Write rows of captions, real pictures above and drawn ones below. Shapes: each picture (H, W, 3), all equal."""
    height, width = (ZOOM * side for side in real[0].shape[:2])
    cell = width + GAP, 2 * height + LINES * LINE_HEIGHT + 2 * GAP
    rows = -(-len(captions) // COLUMNS)
    image = Image.new("RGB", (min(COLUMNS, len(captions)) * cell[0], rows * cell[1]), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=10)
    for number, (caption, above, below) in enumerate(zip(captions, real, drawn, strict=True)):
        x, y = (number % COLUMNS) * cell[0], (number // COLUMNS) * cell[1]
        for line, text in enumerate(textwrap.wrap(caption, WRAP)[:LINES]):
            pen.text((x + 2, y + line * LINE_HEIGHT), text, fill="black", font=font)
        for row, picture in enumerate((above, below)):
            zoomed = Image.fromarray(picture).resize((width, height), Image.Resampling.LANCZOS)
            image.paste(zoomed, (x, y + LINES * LINE_HEIGHT + GAP + row * height))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)  # in full colour: colours are what is looked at


log = logging.getLogger("difftrain")

GUIDANCE, SAMPLER_STEPS = 3.0, 30
PICTURES = {"shapes": 128, "emoji": 64}
SHOWN = 24
KID = "kid_efflite0"
RATIOS = ("mean_latent", "nearest_caption", "gaussian")  # each to be beaten, whichever way it is read
OBEYED = {"shapes": (("colour_right", 0.6), ("size_right", 0.8))}  # which shape it is takes a longer run


def score_flow(run: Run) -> tuple[dict[str, Any], list[ScoreTarget]]:
    """Score the run; every rank calls it and takes its share. Return scores, and the targets of a full demo."""
    dataset = run.cfg.demo.dataset
    assert dataset is not None
    evaluation = next(one for one in run.sets if not one.held_out)
    with run.model.averages.averaged():
        scores = {**_losses(run, evaluation), **_pictures(run, evaluation, dataset)}
    scores |= _kid(run, evaluation.name)
    log.info("scores: %s", "  ".join(f"{name} {value:.3f}" for name, value in scores.items()))
    bounds = [(f"unseen_over_{name}", 1.0, False) for name in RATIOS]
    bounds += [(f"{KID}_last_over_first", 0.5, False)]
    bounds += [(name, least, True) for name, least in OBEYED.get(dataset, ())]
    full = run.progress.samples_seen >= FULL[dataset]
    targets = [ScoreTarget(name, scores[name], limit, least) for name, limit, least in bounds if name in scores]
    return scores, targets if full else []  # a shortened demo has no figures to meet


FULL = {"shapes": 12_000, "emoji": 60_000}  # samples from which a run counts as a whole demo


def _losses(run: Run, evaluation: EvaluationSet) -> dict[str, float]:
    """Return the mean over nine quantiles of the loss: ours, under wrong captions, and without a network."""
    batches = list(_batches(run, evaluation))
    draws = run.model.family.features.draws
    right = _mean(quantile_losses(run.model.engine, batches, draws, gather=run.ranks.gather))
    wrong = _mean(quantile_losses(run.model.engine, list(map(_others_words, batches)), draws, gather=run.ranks.gather))
    scores = {"unseen_loss": right, "wrong_caption_loss": wrong, "wrong_caption_ratio": wrong / right}
    without = _without_network(run, evaluation, batches)
    for name in RATIOS:  # a picture may be read as the velocity's mean, or as certain: what does better counts
        best = min(value for key, value in without.items() if key in (name, f"{name}_point"))
        scores[f"unseen_over_{name}"] = right / best
    scores["unseen_over_gaussian_about_nearest"] = right / without["gaussian_about_nearest"]
    return scores | {f"{name}_loss": value for name, value in without.items()}


def _batches(run: Run, evaluation: EvaluationSet) -> Iterator[Batch]:
    tokenize = run.model.family.tokenizer(run.model.parts)
    shard = run.model.engine.dp_rank, run.model.engine.dp_size
    yield from evaluation.batches(tokenize, run.model.family.features, *shard)


def _mean(rows: list[dict[str, Any]]) -> float:
    return math.fsum(row["loss"] for row in rows) / len(rows)


def _others_words(batch: Batch) -> Batch:
    """Give every record the words of one far from it: neighbours are often the same thing in another tone."""
    words = {
        name: value for name, value in batch.features.items() if name.startswith(("hidden", "pooled", "input_ids"))
    }
    return dataclasses.replace(
        batch, features=batch.features | {name: value.roll(max(1, len(value) // 2), 0) for name, value in words.items()}
    )


def _without_network(run: Run, evaluation: EvaluationSet, batches: list[Batch]) -> dict[str, float]:
    """Fit what needs no network to the training set, and measure it on the very inputs of the others."""
    fitted = Baselines(*_training_set(run))
    spec = run.model.family.features.draws["timestep"]
    sums: dict[str, float] = {}
    count = 0.0
    for batch in batches:
        predictors = fitted.of(_captions(evaluation, batch))
        for tenth in TENTHS:
            at = with_draw(batch, "timestep", value_at(spec, tenth, batch.bucket))
            inputs = run.model.family.inputs(run.device.to_device(at), run.model.parts)
            x, t, target = inputs.x_t.cpu(), inputs.timestep.cpu() / flow.SCALE, inputs.target.cpu()
            for name, velocity in predictors.items():
                error = (velocity(x, t) - target).square().flatten(1).mean(1).double().sum()
                sums[name] = sums.get(name, 0.0) + float(error)
            count += len(x)
    shares = run.ranks.gather((sums, count))
    total = math.fsum(share[1] for share in shares)
    return {name: math.fsum(share[0].get(name, 0.0) for share in shares) / total for name in fitted.names}


def _training_set(run: Run) -> tuple[Tensor, list[str]]:
    """Return latents and captions of the first epoch's records, each once, of all ranks."""
    shard = {"dp_rank": run.model.engine.dp_rank, "dp_size": run.model.engine.dp_size}
    tokenize = run.model.family.tokenizer(run.model.parts)
    first = run.plan.total_steps(0)  # not 0 where a resume began an epoch anew
    last = first + max(1, run.plan.steps(0))
    steps = make_loader(
        run.data, run.plan, run.model.family.features, tokenize, run.cfg, **shard, first_step=first, last_step=last
    )
    latents_by_id: dict[int, np.ndarray] = {}
    for batch in (run.device.to_device(batch) for step in steps for batch in step):
        latents = run.model.family.latents(batch, run.model.parts).float().cpu().numpy()
        latents_by_id |= dict(zip(batch.record_id.tolist(), latents, strict=True))
    every = {number: latents for share in run.ranks.gather(latents_by_id) for number, latents in share.items()}
    ids = sorted(every)
    captions = [record.captions[0] for record in run.data.index.records(ids)]
    return torch.from_numpy(np.stack([every[number] for number in ids])), captions


def _captions(evaluation: EvaluationSet, batch: Batch) -> list[str]:
    return [record.captions[0] for record in evaluation.data.index.records(batch.record_id.tolist())]


def _pictures(run: Run, evaluation: EvaluationSet, dataset: str) -> dict[str, float]:
    """Draw held-out captions, judge what can be judged, and leave the first beside the pictures that have them."""
    lots = list(enumerate(_chosen(run, evaluation, dataset)))
    own = [(number, lot) for number, lot in lots if number % run.ranks.size == run.ranks.rank]

    # every rank draws its share; the noise depends on the caption's place and on no rank
    drawn: dict[int, np.ndarray] = {}
    with on_device(run.model.parts, run.device), run.device.autocast(run.cfg.training.mixed_precision):
        model = run.model.family.drawer(run.model.parts)
        for number, (size_hw, captions, _) in own:
            shape = (len(captions), *_latent_shape(run, size_hw))
            noise = np.stack([normal(recipe.SEED, key_of("score"), number * 1000 + n, "noise", shape[1:])
                              for n in range(shape[0])])  # fmt: skip
            pictures = draw_batch(
                model, captions, torch.from_numpy(noise).to(run.device.torch_device), size_hw=size_hw,
                steps=SAMPLER_STEPS, guidance=GUIDANCE, sampler=sampler_of(run.cfg), seeds=range(len(captions)),
            )  # fmt: skip
            drawn[number] = (pictures.movedim(1, -1).cpu().numpy() * 255).round().astype(np.uint8)

    # all pictures on every rank, in the captions' order
    everyone = {number: part for share in run.ranks.gather(drawn) for number, part in share.items()}
    ours = [picture for number, _ in lots for picture in everyone[number]]
    captions = [caption for _, (_, part, _) in lots for caption in part]
    real = [picture for _, (_, _, part) in lots for picture in part]

    # some of them to look at, and figures where a program can judge
    if run.ranks.is_logger:
        every = max(1, len(ours) // SHOWN)
        path = run.out / "sample" / f"{run.name}_unseen_captions.png"
        write_pairs(path, captions[::every][:SHOWN], real[::every][:SHOWN], ours[::every][:SHOWN])
        log.info("held-out images next to those generated for their captions: %s", path)
    return obedience(ours, captions) if dataset == "shapes" else {}


Lot = tuple[tuple[int, int], list[str], list[np.ndarray]]  # size, captions, pictures


def _chosen(run: Run, evaluation: EvaluationSet, dataset: str) -> Iterator[Lot]:
    """Yield records of the set, evenly picked, with their pictures. Every rank sees the same."""
    from difftrain.contracts import Draw

    maker = evaluation.uncached().maker(run.model.family.tokenizer(run.model.parts), run.model.family.features)
    count = min(PICTURES[dataset], max(8, run.total_steps // 4))  # a shortened demo draws fewer
    for rows in evaluation.data.tables.training:
        picked = np.unique(np.linspace(rows.first, rows.first + rows.records - 1, count).astype(np.int64))
        ids, keys = evaluation.data.tables.take(picked)
        draws: list[Draw] = [Draw(record_id, key, 0) for record_id, key in zip(ids, keys, strict=True)]
        for first in range(0, len(draws), recipe.GLOBAL_BATCH):
            samples, _, _ = maker.samples(rows.bucket, draws[first : first + recipe.GLOBAL_BATCH], 0, spare=None)
            shown = [(sample.caption, sample.pixels) for sample in samples if sample.pixels is not None]
            size = rows.bucket.height, rows.bucket.width
            yield size, [caption for caption, _ in shown], [np.moveaxis(pixels, 0, -1) for _, pixels in shown]


def _latent_shape(run: Run, size_hw: tuple[int, int]) -> tuple[int, ...]:
    from difftrain.contracts import Bucket

    return run.model.family.features.draws["noise"].shape(Bucket(*size_hw))


def _kid(run: Run, name: str) -> dict[str, float]:
    """Return the first and the last distance that the run measured, and how far it fell; nothing where it did not."""
    path = run.out / "evaluation.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    values = [line[f"{name}/{KID}"] for line in lines if f"{name}/{KID}" in line]
    if len(values) < 2:
        return {}
    return {f"{KID}_first": values[0], f"{KID}_last": values[-1], f"{KID}_last_over_first": values[-1] / values[0]}
