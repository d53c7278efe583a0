"""The facts of a data set, opened as training would open it: counts of all its records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import islice
from typing import Any

import numpy as np

from difftrain.config import TrainConfig
from difftrain.contracts import Draw
from difftrain.data.index import survey
from difftrain.data.plan.plan import EpochPlan
from difftrain.data.prepare import NO_BUCKET, Data
from difftrain.data.recipe import Recipe
from difftrain.data.samples import SampleMaker

MOST_CAPTIONS = 200_000  # whose tokens are counted; of more records, every so-manyth
MOST_NAMED = 200  # rejects and groups of copies that are named on the page
BINS = 16
SIDES = (0, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096)  # px: square roots of areas


@dataclass(frozen=True)
class Look:
    """A data set, opened as training would open it.

    epochs: how many are looked at. pictures: how many are shown at most. seeded: whether a seed is configured. stops:
    what would stop a training at its start.
    """

    cfg: TrainConfig
    data: Data
    plan: EpochPlan
    maker: SampleMaker
    epochs: int
    pictures: int
    seeded: bool
    ranks: int
    stops: list[str]
    tokens: Any = None  # counts tokens (a family's tokenizer), or None without a model


def totals(look: Look, sizes: survey.Placements) -> dict[str, Any]:
    """Sum the whole data set up."""
    summary = look.data.summary()
    return {
        "records": summary["count"],
        "trained": int((sizes.part == survey.TRAINED).sum()),
        "held_out": int((sizes.part == survey.HELD_OUT).sum()),
        "draws_per_epoch": look.plan.uses,
        "buckets": len(look.plan.buckets),
        "rejected": summary["rejected"],
        "copies": summary["duplicates"],
        "upscaled": int((sizes.scale > survey.LARGER).sum()),
    }


def sources(look: Look, sizes: survey.Placements) -> list[dict[str, Any]]:
    """Count by source: one folder, shard set or subset each."""
    index, out = look.data.index, []
    refused = survey.rejects_by_source(index)
    for info, recipe in zip(index.sources, look.data.recipes, strict=True):
        own = sizes.source == info.ordinal
        part = sizes.part[own]
        out.append(
            {
                "source": info.ordinal + 1,
                "dataset": info.dataset + 1,
                "folder": survey.folder_of(index, info.ordinal),
                "kind": "regularisation" if recipe.is_reg else info.kind,
                "records": int(own.sum()),
                "repeats": info.repeats,
                "draws_per_epoch": _number(sizes.repeats[own].sum()),
                "held_out": int((part == survey.HELD_OUT).sum()),
                "no_bucket": int((part == survey.UNPLACED).sum()),
                "not_used": int((part == survey.SURPLUS).sum()),
                "refused": sum(refused.get(info.ordinal, {}).values()),
                "upscaled": int((sizes.scale[own] > survey.LARGER).sum()),
                "settings": settings(recipe),
            }
        )
    return out


def _number(uses: float) -> int | float:
    rounded = round(float(uses), 6)
    return int(rounded) if rounded == int(rounded) else rounded


def settings(recipe: Recipe) -> str:
    """Spell what a recipe asks for beyond the defaults."""
    spelled = []
    for one in fields(recipe):
        value = getattr(recipe, one.name)
        if one.name not in ("buckets", "captions") and (one.default is MISSING or value != one.default):
            spelled.append(_spelled(one.name, value))
    requested = recipe.captions.model_dump(exclude_defaults=True)
    return ", ".join([*spelled, *(_spelled(f"captions.{name}", value) for name, value in requested.items())])


def _spelled(name: str, value: object) -> str:
    return name if value is True else f"{name}={value}"


def buckets(look: Look, sizes: survey.Placements) -> list[dict[str, Any]]:
    """Count by bucket, and say how its pictures get there."""
    ids, out = look.data.tables.ids(), []
    held_out = {(rows.dataset, rows.bucket): rows.records for rows in look.data.tables.validation}
    for rows in look.plan.buckets:
        own = ids[rows.first : rows.first + rows.records]
        batch = look.plan.global_batches[rows.group]
        out.append(
            {
                "bucket": look.data.tables.name(rows),
                "width": rows.bucket.width,
                "height": rows.bucket.height,
                "frames": rows.bucket.frames,
                "records": rows.records,
                "draws_per_epoch": rows.uses,
                "share": rows.uses / look.plan.uses,
                "batches_per_epoch": rows.uses / batch,
                "held_out": held_out.get((rows.dataset, rows.bucket), 0),
                "upscaled": int((sizes.scale[own] > survey.LARGER).sum()),
                "median_scale": float(np.median(sizes.scale[own])),
                "cut_away": 1 - float(sizes.kept[own].mean()),
            }
        )
    return out


def resolutions(data: Data) -> list[dict[str, Any]]:
    """Count images by the side of the square that has their area, from the smallest that occurs to the largest."""
    columns = data.index.columns()
    sides = np.sqrt(np.asarray(columns.width, np.float64) * np.asarray(columns.height, np.float64))
    counts = np.bincount(np.searchsorted(SIDES, sides, side="right") - 1, minlength=len(SIDES))
    occur = np.flatnonzero(counts)
    if not len(occur):
        return []
    return [{"from": SIDES[i], "images": int(counts[i])} for i in range(occur[0], occur[-1] + 1)]


def rejected(data: Data) -> dict[str, Any]:
    """Count what is not trained on, by source and reason, and name the first."""
    index = data.index
    reasons = [
        {"source": None if source is None else source + 1, "reason": kind, "items": count}
        for source, kinds in survey.rejects_by_source(index).items()
        for kind, count in kinds.items()
    ]
    if data.tables.unplaced:
        reasons.append({"source": None, "reason": NO_BUCKET, "items": data.tables.unplaced})
    first = [{"path": reject.path, "reason": reject.reason} for reject in islice(data.rejects(), MOST_NAMED)]
    return {"count": sum(reason["items"] for reason in reasons), "reasons": reasons, "first": first}


def copies(data: Data) -> dict[str, Any]:
    """Group records that have the same bytes."""
    if data.index.duplicates is None:
        return {"looked_for": False, "groups": 0, "first": []}
    groups, first = survey.copies(data.index, MOST_NAMED)
    names = [[data.index.record(i).name for i in group[:20]] for group in first]
    return {
        "looked_for": True,
        "groups": groups,
        "first": [{"pictures": len(group), "names": named} for group, named in zip(first, names, strict=True)],
    }


def captions(look: Look) -> dict[str, Any]:
    """Describe captions as they stand, and count their tokens without dropout and shuffling."""
    index = look.data.index
    surveyed = survey.survey_captions(index)

    def named(entries: Sequence[tuple[int, int, str]]) -> list[dict[str, Any]]:
        return [
            {"characters": size, "caption": text[:600], "record": index.record(i).name} for size, i, text in entries
        ]

    facts: dict[str, Any] = {
        "count": surveyed.count,
        "empty": surveyed.empty,
        "several": surveyed.several,
        "longest": named(surveyed.longest),
        "shortest": named(surveyed.shortest),
        "words": surveyed.words,
        "tags": surveyed.tags,
        "counted": surveyed.counted,
        "tokens": None,
    }
    if look.tokens is not None:
        facts["tokens"] = tokens(look, facts)
    return facts


def tokens(look: Look, facts: dict[str, Any]) -> dict[str, Any]:
    """Count the tokens of every caption's first use, and list the longest that are cut."""
    every = -(-look.data.index.count // MOST_CAPTIONS)
    texts = dict(plain_captions(look, range(0, look.data.index.count, every)))
    lengths = np.array(look.tokens.lengths(list(texts.values())), dtype=np.int64)
    limit = look.tokens.limit
    order = np.argsort(-lengths, kind="stable")
    ids = list(texts)
    cut = [i for i in order[:10].tolist() if lengths[i] > limit]
    return {
        "counted": len(texts),
        "limit": limit,
        "cut": int((lengths > limit).sum()),
        "mean": float(lengths.mean()),
        "most": int(lengths.max()),
        "bins": bins(lengths, limit),
        "longest_cut": [
            {"tokens": int(lengths[i]), "record": look.data.index.record(ids[i]).name, "caption": texts[ids[i]][:600]}
            for i in cut
        ],
    }


def plain_captions(look: Look, ids: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Make the captions of records as validation does: whole, with prefix and suffix, in their own order."""
    plain = replace(look.maker, recipes=tuple(recipe.plain() for recipe in look.maker.recipes))
    for i in ids:
        record = look.data.index.record(i)
        yield i, plain.caption(record, Draw(i, record.key, 0), 0)


def bins(lengths: np.ndarray, limit: int) -> list[dict[str, Any]]:
    """Count lengths in equal steps that fill the limit; what lies far beyond stands in the last."""
    step = max(1, -(-limit // (BINS - 4)))
    edges = list(range(0, limit + 1, step))
    edges += [edges[-1] + step * i for i in range(1, BINS - len(edges) + 1)]
    counts = np.bincount(np.minimum(lengths // step, len(edges) - 1), minlength=len(edges))
    return [{"from": low, "to": low + step - 1, "captions": int(n)} for low, n in zip(edges, counts, strict=True)]
