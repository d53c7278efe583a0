"""What somebody should look at before training: each finding with its number, and examples by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from difftrain.config.spellings.spelling import option
from difftrain.data.index import survey
from difftrain.train.inspect.facts import Look

MOST = 5  # examples of one finding
MUCH_LARGER = 2.0
MUCH_CUT = 0.7


def findings(look: Look, sizes: survey.Placements, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what is suspicious. level: stop, where a training would not start; look, otherwise."""
    entries = [
        *_stops(look, facts),
        *_sizes(look, sizes),
        *_starved(look),
        *_captions(look, facts),
        *_copies(facts),
        *_clips(facts),
    ]
    return [finding for finding in entries if finding]


def _finding(what: str, examples: list[str] | None = None, level: str = "look") -> dict[str, Any]:
    return {"level": level, "what": what, "examples": examples or []}


def _stops(look: Look, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (_finding(stop, level="stop") for stop in look.stops)
    count, limit = facts["rejected"]["count"], look.cfg.data.max_rejected_share
    items = look.data.index.count + look.data.index.summary.rejected
    if count:
        share = count / items
        above = share > limit
        what = f"{count:,} of {items:,} items ({share:.1%}) are not trained on"
        if above:
            what += f": more than {option('data.max_rejected_share')}={limit:g} allows, so training would not start"
        first = [f"{reject['path']}: {reject['reason']}" for reject in facts["rejected"]["first"][:MOST]]
        yield _finding(what, first, "stop" if above else "look")


def _sizes(look: Look, sizes: survey.Placements) -> Iterator[dict[str, Any]]:
    larger = np.flatnonzero(sizes.scale > survey.LARGER)
    if len(larger):
        much = int((sizes.scale > MUCH_LARGER).sum())
        worst = larger[np.argsort(-sizes.scale[larger], kind="stable")[:MOST]]
        what = f"{pictures(len(larger), 'is', 'are')} enlarged to fill the bucket, {much:,} of them more than {MUCH_LARGER:g} times"
        yield _finding(
            f"{what}; {option('data.bucket_no_upscale', True)} keeps their size",
            [_sized(look, i, sizes.scale[i]) for i in worst.tolist()],
        )
    cut = np.flatnonzero((sizes.kept > 0) & (sizes.kept < MUCH_CUT))
    if len(cut):
        worst = cut[np.argsort(sizes.kept[cut], kind="stable")[:MOST]]
        what = f"{pictures(len(cut), 'loses', 'lose')} more than {1 - MUCH_CUT:.0%} of the area to cropping"
        if not look.cfg.data.enable_bucket:
            what += f"; {option('data.enable_bucket', True)} keeps their shape"
        yield _finding(
            what, [f"{_named(look, i)}: {1 - float(sizes.kept[i]):.0%} is cropped away" for i in worst.tolist()]
        )


def pictures(count: int, one: str, several: str) -> str:
    """Begin a sentence about some pictures."""
    return f"{count:,} image{'s' if count != 1 else ''} {one if count == 1 else several}"


def _named(look: Look, record_id: int) -> str:
    record = look.data.index.record(record_id)
    return f"{record.name} ({record.size_hw[1]} x {record.size_hw[0]} px)"


def _sized(look: Look, record_id: int, scale: float) -> str:
    return f"{_named(look, record_id)}: {float(scale):.2f} times"


def _starved(look: Look) -> Iterator[dict[str, Any]]:
    starved = look.plan.starved
    if starved:
        named = [
            f"{look.data.tables.name(rows)}: {rows.uses} samples an epoch, used about every "
            f"{look.plan.global_batches[rows.group] / rows.uses:.1f} epochs"
            for rows in starved[:MOST]
        ]
        what = (
            f"{len(starved):,} of {len(look.plan.buckets):,} buckets have fewer samples than the global batch: "
            "nothing is dropped, but they are not used in every epoch"
        )
        yield _finding(what, named)


def _clips(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    clips = facts["clips"]
    if clips and clips["short"]:
        many = f"{clips['short']:,} video{'s are' if clips['short'] != 1 else ' is'}"
        remedy = f"{option('data.video_clip_mode', 'multiple_overlapping')} covers them, larger frame_buckets make clips longer"
        named = [f"{one['name']}: {one['share']:.0%} of {one['available']:,} frames" for one in clips["shortest"]]
        yield _finding(f"{many} used by less than half of the frames; {remedy}", named)


def _captions(look: Look, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    captions, tokens = facts["captions"], facts["captions"]["tokens"]
    if captions["empty"]:
        yield _finding(f"{captions['empty']:,} captions are empty")
    if tokens and tokens["cut"]:
        what = (
            f"{tokens['cut']:,} of {tokens['counted']:,} captions exceed the {tokens['limit']} tokens that the "
            f"model reads: the rest is cut off; {option('model.max_token_length')}=150 or 225 reads more"
        )
        yield _finding(what, [f"{one['record']}: {one['tokens']} tokens" for one in tokens["longest_cut"][:MOST]])
    idle = [
        source["folder"]
        for source, recipe in zip(facts["sources"], look.data.recipes, strict=True)
        if recipe.captions.shuffle and not _has_parts(facts, recipe.captions.separator)
    ]
    if idle:
        yield _finding("captions are to be shuffled, and none of those checked has two parts", sorted(set(idle))[:MOST])


def _has_parts(facts: dict[str, Any], separator: str) -> bool:
    """Tell whether any caption that is at hand has something to shuffle."""
    texts = [one["caption"] for key in ("longest", "shortest") for one in facts["captions"][key]]
    texts += [text for card in facts["cards"] for text in card["stored"]]
    return any(separator in text for text in texts)


def _copies(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    copies = facts["copies"]
    if copies["groups"]:
        named = [f"{group['pictures']} x {', '.join(group['names'][:3])}" for group in copies["first"][:MOST]]
        what = f"{pictures(copies['groups'], 'is', 'are')} duplicated, byte for byte; all copies are kept"
        yield _finding(what, named)
    similar = facts["similar"]
    if similar["groups"]:
        named = [", ".join(one["name"] for one in group["shown"][:3]) for group in similar["first"][:MOST]]
        yield _finding(
            f"{similar['images']:,} images look nearly the same as another, in {similar['groups']:,} groups", named
        )
