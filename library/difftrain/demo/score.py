"""Score a demo run at its end: obedience of its pictures to their captions, held-out loss, weight of the captions."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from difftrain.cache.build import on_device
from difftrain.config.schema.families import learns_flow
from difftrain.contracts import Batch, Bucket
from difftrain.data.evaluation_sets import held_out_set
from difftrain.data.loader import make_loader
from difftrain.demo import datasets, recipe
from difftrain.demo.judge import Wiener, obedience
from difftrain.diffusion.draws import key_of, normal
from difftrain.evaluation import validate
from difftrain.report.report import ScoreTarget
from difftrain.sampling.draw import draw_batch

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.train.state import Run

log = logging.getLogger("difftrain")

ROUNDS = 8  # timesteps at which each held-out record is looked at
GUIDANCE = 2.0
SAMPLER_STEPS = 25
PICTURES = {"shapes": 128, "emoji": 32}
COLUMNS = 16

# name in the scores, bound, whether at least: what the full demo reaches on two cores
TARGETS: dict[str, tuple[tuple[str, float, bool], ...]] = {
    "shapes": (
        ("colour_right", 0.70, True),
        ("size_right", 0.90, True),
        ("one_piece", 0.80, True),
        ("held_out_over_wiener", 0.80, False),
        ("wrong_caption_ratio", 1.3, True),
    ),
    "emoji": (
        ("held_out_over_wiener", 0.97, False),
        ("wrong_caption_ratio", 1.05, True),
    ),
}


def score_run(run: Run) -> tuple[dict[str, Any], list[ScoreTarget]]:
    """Score the averaged weights; every rank calls it and takes its share. Return scores, and targets of a full demo."""
    if learns_flow(run.cfg):
        from difftrain.demo.flow_score import score_flow

        return score_flow(run)
    dataset = run.cfg.demo.dataset
    assert dataset is not None
    with run.model.averages.averaged():
        scores = {**_losses(run), **_pictures(run, dataset)}
    log.info("scores: %s", "  ".join(f"{name} {value:.3f}" for name, value in scores.items()))
    full = run.progress.samples_seen >= recipe.SIZES[dataset].steps * recipe.GLOBAL_BATCH
    bounds = TARGETS[dataset] if full else ()  # a shortened demo has no figures to meet
    return scores, [
        ScoreTarget(name, scores[name], limit, at_least) for name, limit, at_least in bounds if name in scores
    ]


def _losses(run: Run) -> dict[str, float]:
    """Return the held-out loss, the linear predictor's on the same inputs, and the loss under wrong captions."""
    tokenize = run.model.family.tokenizer(run.model.parts)
    size = run.model.engine.dp_rank, run.model.engine.dp_size
    held_out = list(held_out_set(run.cfg, run.data).batches(tokenize, run.model.family.features, *size))
    looks = [_at_round(batch, number) for number in range(ROUNDS) for batch in held_out]
    right = validate(run.model.engine, looks, gather=run.ranks.gather).loss
    wrong = validate(run.model.engine, _with_wrong_captions(looks), gather=run.ranks.gather).loss
    linear = _wiener_loss(run, looks)
    return {
        "held_out_loss": right,
        "wiener_loss": linear,
        "held_out_over_wiener": right / linear,
        "wrong_caption_loss": wrong,
        "wrong_caption_ratio": wrong / right,
    }


def _at_round(batch: Batch, number: int) -> Batch:
    """Spread the timesteps of the records evenly, other ones in every round: fewer records give a steady mean."""
    position = (batch.record_id.double() * 0.6180339887498949 + number / ROUNDS) % 1.0
    return dataclasses.replace(batch, draws={**batch.draws, "timestep": (position * 1000).long()})


def _with_wrong_captions(batches: list[Batch]) -> Iterator[Batch]:
    """Give every record the caption of another one that reads differently."""
    names = [name for name in (batches[0].features if batches else {}) if name.startswith("input_ids")]
    pool = {name: torch.cat([batch.features[name] for batch in batches]) for name in names}
    first = 0
    for batch in batches:
        count = len(batch.record_id)
        wrong = torch.tensor([_another(pool[names[0]], row) for row in range(first, first + count)])
        first += count
        swapped = {name: pool[name][wrong] for name in names}
        yield dataclasses.replace(batch, features={**batch.features, **swapped})


def _another(ids: Tensor, row: int) -> int:
    for step in range(1, len(ids)):
        row_of_other = (row + step) % len(ids)
        if not torch.equal(ids[row_of_other], ids[row]):
            return row_of_other
    return row


def _wiener_loss(run: Run, looks: list[Batch]) -> float:
    """Fit the linear predictor to the training records and evaluate it on held-out inputs."""
    fitted = Wiener.from_moments(*_moments(run))
    total = count = 0.0
    for batch in looks:
        inputs = run.model.family.inputs(run.device.to_device(batch), run.model.parts)
        guess = fitted.predict(inputs.x_t, inputs.timestep, run.cfg.model.prediction_type)
        error = (guess - inputs.target.cpu()).square().flatten(1).mean(1)
        total, count = total + float(error.sum()), count + len(error)
    shares = run.ranks.gather((total, count))
    return sum(share[0] for share in shares) / sum(share[1] for share in shares)


def _moments(run: Run) -> tuple[int, Tensor, Tensor]:
    """Sum the training latents of the first epoch, and their outer products, over all ranks."""
    first = run.plan.total_steps(0)  # not 0 where a resume began an epoch anew
    steps = make_loader(
        run.data,
        run.plan,
        run.model.family.features,
        run.model.family.tokenizer(run.model.parts),
        run.cfg,
        dp_rank=run.model.engine.dp_rank,
        dp_size=run.model.engine.dp_size,
        first_step=first,
        last_step=first + max(1, run.plan.steps(0)),
    )
    batches = (run.device.to_device(batch) for step in steps for batch in step)
    flat = torch.cat([run.model.family.latents(batch, run.model.parts).flatten(1).double().cpu() for batch in batches])
    shares = run.ranks.gather((len(flat), flat.sum(0), flat.T @ flat))
    return sum(s[0] for s in shares), sum(s[1] for s in shares), sum(s[2] for s in shares)


def _pictures(run: Run, dataset: str) -> dict[str, float]:
    """Draw captions and judge what came; leave the pictures as a grid."""
    captions = _captions(run, dataset)
    own = list(range(run.ranks.rank, len(captions), run.ranks.size))
    with on_device(run.model.parts, run.device):
        drawn = dict(zip(own, draw(run, [captions[number] for number in own], own), strict=True))
    everyone: dict[int, NDArray[np.uint8]] = {}
    for share in run.ranks.gather(drawn):
        everyone |= share
    pictures = [everyone[number] for number in range(len(captions))]
    if run.ranks.is_logger:
        _write_grid(run, pictures[: 4 * COLUMNS])
    return obedience(pictures, captions) if dataset == "shapes" else {}


def _captions(run: Run, dataset: str) -> list[str]:
    count = min(PICTURES[dataset], max(8, run.total_steps // 4))  # a shortened demo draws fewer
    if dataset == "shapes":
        every = datasets.captions()
        return [every[number % len(every)] for number in range(count)]
    ids = np.linspace(0, run.data.index.count - 1, count).astype(int).tolist()
    return [record.captions[0] for record in run.data.index.records(ids)]


def draw(run: Run, captions: list[str], numbers: list[int]) -> list[NDArray[np.uint8]]:
    """Draw captions, from noise that is the same on every device."""
    width, height = run.cfg.data.resolution or (recipe.SIDE, recipe.SIDE)
    shape = run.model.family.features.draws["noise"].shape(Bucket(height, width))
    model = run.model.family.drawer(run.model.parts)
    pictures: list[NDArray[np.uint8]] = []
    for first in range(0, len(captions), recipe.GLOBAL_BATCH):
        part = slice(first, first + recipe.GLOBAL_BATCH)
        noise = np.stack([normal(recipe.SEED, key_of("score"), n, "noise", shape) for n in numbers[part]])
        with run.device.autocast(run.cfg.training.mixed_precision):
            drawn = draw_batch(
                model, captions[part], torch.from_numpy(noise).to(run.device.torch_device), size_hw=(height, width),
                steps=SAMPLER_STEPS, guidance=GUIDANCE, sampler="ddim", seeds=numbers[part], spacing="trailing",
            )  # fmt: skip
        pictures += list((drawn.movedim(1, -1).cpu().numpy() * 255).round().astype(np.uint8))
    return pictures


def _write_grid(run: Run, pictures: list[NDArray[np.uint8]]) -> None:
    height, width = pictures[0].shape[:2]
    rows = -(-len(pictures) // COLUMNS)
    grid = Image.new("RGB", (COLUMNS * width, rows * height), "white")
    for number, picture in enumerate(pictures):
        grid.paste(Image.fromarray(picture), ((number % COLUMNS) * width, (number // COLUMNS) * height))
    path = run.out / "sample" / f"{run.name}_captions_grid.png"
    path.parent.mkdir(exist_ok=True)
    grid.save(path)
    log.info("images of %d captions: %s", len(pictures), path)
