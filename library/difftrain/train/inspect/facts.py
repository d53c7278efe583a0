"""The facts of a data set, opened as training would open it: counts of all its records, and what stands out."""

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
MOST_EXAMPLES = 5  # of one finding
MUCH_LARGER = 2.0
MUCH_CUT = 0.7


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


# --- counts


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
    found = round(float(uses), 6)
    return int(found) if found == int(found) else found


def settings(recipe: Recipe) -> str:
    """Spell what a recipe asks for beyond the defaults."""
    said = []
    for one in fields(recipe):
        value = getattr(recipe, one.name)
        if one.name not in ("buckets", "captions") and (one.default is MISSING or value != one.default):
            said.append(_said(one.name, value))
    asked = recipe.captions.model_dump(exclude_defaults=True)
    return ", ".join([*said, *(_said(f"captions.{name}", value) for name, value in asked.items())])


def _said(name: str, value: object) -> str:
    return name if value is True else f"{name}={value}"


def buckets(look: Look, sizes: survey.Placements) -> list[dict[str, Any]]:
    """Count by bucket, and say how its pictures get there."""
    ids, out = look.data.tables.ids(), []
    held = {(rows.dataset, rows.bucket): rows.records for rows in look.data.tables.validation}
    for rows in look.plan.buckets:
        own = ids[rows.first : rows.first + rows.records]
        batch = look.plan.global_batches[rows.dataset]
        out.append(
            {
                "bucket": look.data.tables.name(rows),
                "width": rows.bucket.width,
                "height": rows.bucket.height,
                "records": rows.records,
                "draws_per_epoch": rows.uses,
                "share": rows.uses / look.plan.uses,
                "batches_per_epoch": rows.uses / batch,
                "held_out": held.get((rows.dataset, rows.bucket), 0),
                "upscaled": int((sizes.scale[own] > survey.LARGER).sum()),
                "median_scale": float(np.median(sizes.scale[own])),
                "cut_away": 1 - float(sizes.kept[own].mean()),
            }
        )
    return out


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
    found = survey.survey_captions(index)

    def named(entries: Sequence[tuple[int, int, str]]) -> list[dict[str, Any]]:
        return [
            {"characters": size, "caption": text[:600], "record": index.record(i).name} for size, i, text in entries
        ]

    facts: dict[str, Any] = {
        "count": found.count,
        "empty": found.empty,
        "several": found.several,
        "longest": named(found.longest),
        "shortest": named(found.shortest),
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


# --- what somebody should look at before training: each finding with its number, and examples by name


def findings(look: Look, sizes: survey.Placements, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what is suspicious. level: stop, where a training would not start; look, otherwise."""
    found = [
        *_refusals(look, facts),
        *_in_sizes(look, sizes),
        *_starved(look),
        *_in_captions(look, facts),
        *_in_copies(facts),
    ]
    return [finding for finding in found if finding]


def _finding(what: str, examples: list[str] | None = None, level: str = "look") -> dict[str, Any]:
    return {"level": level, "what": what, "examples": examples or []}


def _refusals(look: Look, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (_finding(stop, level="stop") for stop in look.stops)
    count, limit = facts["rejected"]["count"], look.cfg.data.max_rejected_share
    items = look.data.index.count + look.data.index.summary.rejected
    if count:
        share = count / items
        above = share > limit
        what = f"{count:,} of {items:,} items ({share:.1%}) are not trained on"
        if above:
            what += f": more than --max_rejected_share={limit:g} lets pass, so a training would not start"
        first = [f"{reject['path']}: {reject['reason']}" for reject in facts["rejected"]["first"][:MOST_EXAMPLES]]
        yield _finding(what, first, "stop" if above else "look")


def _in_sizes(look: Look, sizes: survey.Placements) -> Iterator[dict[str, Any]]:
    larger = np.flatnonzero(sizes.scale > survey.LARGER)
    if len(larger):
        much = int((sizes.scale > MUCH_LARGER).sum())
        worst = larger[np.argsort(-sizes.scale[larger], kind="stable")[:MOST_EXAMPLES]]
        what = f"{pictures(len(larger), 'is', 'are')} enlarged to fill the bucket, {much:,} of them more than {MUCH_LARGER:g} times"
        yield _finding(
            f"{what}; --bucket_no_upscale keeps their size", [_sized(look, i, sizes.scale[i]) for i in worst.tolist()]
        )
    cut = np.flatnonzero((sizes.kept > 0) & (sizes.kept < MUCH_CUT))
    if len(cut):
        worst = cut[np.argsort(sizes.kept[cut], kind="stable")[:MOST_EXAMPLES]]
        what = f"{pictures(len(cut), 'loses', 'lose')} more than {1 - MUCH_CUT:.0%} of the area to the cut"
        if not look.cfg.data.enable_bucket:
            what += "; --enable_bucket keeps their shape"
        yield _finding(what, [f"{_named(look, i)}: {1 - float(sizes.kept[i]):.0%} is cut away" for i in worst.tolist()])


def pictures(count: int, one: str, several: str) -> str:
    """Begin a sentence about some pictures."""
    return f"{count:,} picture{'s' if count != 1 else ''} {one if count == 1 else several}"


def _named(look: Look, record_id: int) -> str:
    record = look.data.index.record(record_id)
    return f"{record.name} ({record.size_hw[1]} x {record.size_hw[0]} px)"


def _sized(look: Look, record_id: int, scale: float) -> str:
    return f"{_named(look, record_id)}: {float(scale):.2f} times"


def _starved(look: Look) -> Iterator[dict[str, Any]]:
    starved = look.plan.starved
    if starved:
        named = [
            f"{look.data.tables.name(rows)}: {rows.uses} draws an epoch, served about every "
            f"{look.plan.global_batches[rows.dataset] / rows.uses:.1f} epochs"
            for rows in starved[:MOST_EXAMPLES]
        ]
        what = (
            f"{len(starved):,} of {len(look.plan.buckets):,} buckets have fewer draws than the global batch: "
            "nothing is dropped, but they are not served in every epoch"
        )
        yield _finding(what, named)


def _in_captions(look: Look, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    captions, tokens = facts["captions"], facts["captions"]["tokens"]
    if captions["empty"]:
        yield _finding(f"{captions['empty']:,} captions are empty")
    if tokens and tokens["cut"]:
        what = (
            f"{tokens['cut']:,} of {tokens['counted']:,} captions exceed the {tokens['limit']} tokens that the "
            "model reads: what lies beyond is cut off; --max_token_length=150 or 225 reads more"
        )
        yield _finding(
            what, [f"{one['record']}: {one['tokens']} tokens" for one in tokens["longest_cut"][:MOST_EXAMPLES]]
        )
    idle = [
        source["folder"]
        for source, recipe in zip(facts["sources"], look.data.recipes, strict=True)
        if recipe.captions.shuffle and not _has_parts(facts, recipe.captions.separator)
    ]
    if idle:
        yield _finding(
            "captions are to be shuffled, and none that was looked at has two parts", sorted(set(idle))[:MOST_EXAMPLES]
        )


def _has_parts(facts: dict[str, Any], separator: str) -> bool:
    """Tell whether any caption that is at hand has something to shuffle."""
    texts = [one["caption"] for key in ("longest", "shortest") for one in facts["captions"][key]]
    texts += [text for card in facts["cards"] for text in card["stored"]]
    return any(separator in text for text in texts)


def _in_copies(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    copies = facts["copies"]
    if copies["groups"]:
        named = [f"{group['pictures']} x {', '.join(group['names'][:3])}" for group in copies["first"][:MOST_EXAMPLES]]
        what = f"{pictures(copies['groups'], 'is', 'are')} there more than once, byte for byte; all copies are kept"
        yield _finding(what, named)
