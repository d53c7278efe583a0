"""Some pictures of a data set: how each is cut at its first use, and its captions in the first epochs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from difftrain.contracts import Draw, Record, control_name
from difftrain.data.media.media import Unusable, decode
from difftrain.report.page import jpeg_address
from difftrain.train.inspect.clips import about, first_frame, sheet
from difftrain.train.inspect.facts import Look

LEAST_STEPS, MOST_STEPS, ENOUGH_USES = 1_000, 8_000, 64_000  # of each epoch that is searched
MOST_USES = 2  # of one picture in one epoch that are shown
BYTES = 4_200_000  # of all pictures together
TRIES = (
    (512, 80),
    (416, 78),
    (320, 78),
    (232, 82),
    (232, 70),
    (184, 75),
    (144, 72),
    (112, 65),
    (88, 60),
    (64, 55),
)  # longest side, quality


@dataclass(frozen=True)
class Walk:
    """The uses of the first steps of each epoch, one entry a use; epochs and steps are counted from 0."""

    rows: np.ndarray
    occurrences: np.ndarray
    steps: np.ndarray
    epochs: np.ndarray
    searched: tuple[int, ...]  # steps of each epoch
    complete: tuple[bool, ...]


def walk(look: Look) -> Walk:
    """Follow the plan through the epochs that are looked at, step by step, as the loader does."""
    plan = look.plan
    most = min(MOST_STEPS, max(LEAST_STEPS, ENOUGH_USES // max(plan.global_batches)))
    parts: list[np.ndarray] = [np.zeros((4, 0), np.int64)]
    searched = []
    for epoch in range(look.epochs):
        first = plan.total_steps(epoch)
        searched.append(min(plan.steps(epoch), most))
        for step in range(first, first + searched[-1]):
            for uses in plan.parts(step):
                when = np.full((2, len(uses.rows)), [[step], [epoch]])
                parts.append(np.concatenate([[uses.rows, uses.occurrences], when]))
    rows, occurrences, steps, epochs = np.concatenate(parts, axis=1)
    complete = tuple(count == plan.steps(epoch) for epoch, count in enumerate(searched))
    return Walk(rows, occurrences, steps, epochs, tuple(searched), complete)


def choose(look: Look, walked: Walk) -> list[int]:
    """Choose rows to show: of every bucket and source in turn, those that come in most epochs and first.

    Of buckets that are not served in these epochs, one each, as long as they are few.
    """
    rows, first, column = np.unique(walked.rows, return_index=True, return_inverse=True)
    seen = np.zeros((look.epochs, len(rows)), bool)
    seen[walked.epochs, column] = True
    bucket = np.searchsorted([one.first for one in look.plan.buckets], rows, side="right") - 1
    source = np.asarray(look.data.index.columns().source)[look.data.tables.ids()[rows]]
    group = bucket * len(look.data.index.sources) + source
    order = np.lexsort((first, -seen.sum(axis=0), group))
    _, starts, counts = np.unique(group[order], return_index=True, return_counts=True)
    turn = np.arange(len(order)) - np.repeat(starts, counts)
    chosen = rows[order[np.lexsort((-np.repeat(counts, counts), turn))]].tolist()
    served = set(bucket.tolist())
    waiting = [one.first for i, one in enumerate(look.plan.buckets) if i not in served][: look.pictures // 6]
    return [*chosen[: look.pictures - len(waiting)], *waiting]


def cards_of(look: Look) -> list[dict[str, Any]]:
    """Return the facts and pictures of the uses that are shown."""
    if not look.pictures:
        return []
    walked = walk(look)
    rows = choose(look, walked)
    budget = BYTES // (2 * max(1, len(rows)))
    cards = [_card(look, walked, row, budget) for row in rows]
    if look.tokens is not None:
        shown = [caption for card in cards for caption in card["captions"]]
        for caption, count in zip(shown, look.tokens.lengths([one["text"] for one in shown]), strict=True):
            caption["tokens"] = count
    return cards


def _card(look: Look, walked: Walk, row: int, budget: int) -> dict[str, Any]:
    ids, keys = look.data.tables.take(np.array([row]))
    record = look.data.index.record(ids[0])

    # its uses in the epochs that are looked at; one that has none is shown as its first would be
    own = np.flatnonzero(walked.rows == row)
    uses = [
        (int(walked.epochs[i]), int(walked.steps[i]), Draw(ids[0], keys[0], int(walked.occurrences[i]))) for i in own
    ]
    epoch, step, draw = uses[0] if uses else (0, 0, Draw(ids[0], keys[0], 0))

    # what is done to it: fit, crop, flip, captions; width comes before height, as people read it
    window = look.maker.crop_window(record, draw)
    left, top, width, height = window.crop
    recipe = look.data.recipes[record.media.source]
    return {
        "name": record.name,
        "source": record.media.source + 1,
        "regularisation": recipe.is_reg,
        "size": [record.size_hw[1], record.size_hw[0]],
        "bucket": str(window.fit.bucket),
        "resized": list(window.fit.resized_wh),
        "crop": [left, top, width, height],
        "flipped": window.flip,
        "stored": [text[:600] for text in record.captions[:8]],
        "captions": [_caption(look, record, *use) for use in _few(uses)],
        "unused": [e + 1 for e in range(look.epochs) if all(use[0] != e for use in uses)],
        "searched": [None if walked.complete[e] else walked.searched[e] for e in range(look.epochs)],
        **_pictures(look, record, draw, epoch, step, budget),
    }


def _few(uses: list[tuple[int, int, Draw]]) -> list[tuple[int, int, Draw]]:
    return [use for i, use in enumerate(uses) if sum(before[0] == use[0] for before in uses[:i]) < MOST_USES]


def _caption(look: Look, record: Record, epoch: int, step: int, draw: Draw) -> dict[str, Any]:
    text = look.maker.caption(record, draw, epoch, step)
    return {"epoch": epoch + 1, "step": step, "use": draw.occurrence, "text": text}


def _pictures(look: Look, record: Record, draw: Draw, epoch: int, step: int, budget: int) -> dict[str, Any]:
    """Draw the original and what the model gets; where either cannot be read any more, say why."""
    try:
        sample = look.maker.sample(record, draw, epoch, step)
        clip = about(look, record)
        original = decode(look.data.index.read(record.media)) if clip is None else first_frame(look, record)
    except (Unusable, OSError) as error:
        return {"images": {}, "fault": str(error), "clip": None}
    assert sample.pixels is not None
    pixels = sample.pixels
    result = sheet(pixels) if pixels.ndim == 4 else Image.fromarray(pixels.transpose(1, 2, 0))
    images = {
        "original": jpeg_address(Image.fromarray(original), TRIES, budget),
        "result": jpeg_address(result, TRIES, budget),
    }
    if sample.mask is not None:
        grey = np.rint(sample.mask[0] * 255).astype(np.uint8)
        images["mask"] = jpeg_address(Image.fromarray(grey), TRIES, budget // 2)
    for number, reference in enumerate(sample.control):
        shown = Image.fromarray(reference.transpose(1, 2, 0))
        images[control_name(number)] = jpeg_address(shown, TRIES, budget // 2)
    return {"images": images, "fault": None, "clip": clip}
