"""The page of a data set: counts, buckets, crops, captions, copies and rejects, from plain facts (train/inspect)."""

from __future__ import annotations

from typing import Any

from difftrain.config.spellings.spelling import option
from difftrain.report.charts import bar_chart, rank_chart
from difftrain.report.page import (
    bullets,
    cell,
    details,
    escape,
    figure,
    findings,
    grid,
    isolated,
    missing,
    note,
    page,
    panel,
    rows,
)

OPEN = 9  # images that are shown before the fold
FEW_WORDS = 10
LONG, SHORT = 600, 240  # letters of a caption that are shown of a picture, and in a list


def dataset_page(facts: dict[str, Any]) -> str:
    """Return the whole page."""
    # --- beside the title, and below it
    stops = any(finding["level"] == "stop" for finding in facts["findings"])
    count = len(facts["findings"])
    badge = ("bad", "would not start") if stops else ("plain", f"{count} to look at") if count else ("good", "fine")
    about = [
        f"seed {facts['seed']}" + ("" if facts["seeded"] else ": none is configured, a run chooses one"),
        f"global batch {', '.join(map(str, facts['global_batch']))}",
        f"{facts['ranks']} rank{'s'[: facts['ranks'] > 1]}",
        facts["written"],
    ]

    # --- what counts most
    totals, tokens = facts["totals"], facts["captions"]["tokens"]
    cards = [
        ("images with captions", totals["records"]),
        ("uses in an epoch, repeats counted", totals["draws_per_epoch"]),
        ("steps in the first epoch", facts["steps"][0] if facts["steps"] else None),
        ("buckets", totals["buckets"]),
        ("held out for validation", totals["held_out"]),
        ("not trained on", facts["rejected"]["count"]),
        ("exact duplicates", totals["copies"] if facts["copies"]["looked_for"] else None),
        ("near duplicates", facts["similar"]["images"] or None),
        ("images enlarged", totals["upscaled"]),
        ("captions longer than the model's limit", tokens["cut"] or None if tokens else None),
    ]
    return page(
        f"Dataset {facts['name']}",
        badges=[badge],
        about=escape(" · ".join(about)),
        cards=[(text, cell(value)) for text, value in cards if value is not None],
        sections=(
            ("findings", "What to look at", panel(findings(facts["findings"]))),
            ("pictures", "Images, as they will be cropped", _shots(facts)),
            ("sources", "Sources", _sources(facts["sources"])),
            ("buckets", "Buckets and resolutions", _buckets(facts["buckets"], facts["resolutions"])),
            ("clips", "Clips", _clips(facts.get("clips"))),
            ("captions", "Captions", _captions(facts["captions"])),
            ("words", "Words", _words(facts["captions"])),
            ("rejected", "Not trained on", _rejected(facts["rejected"])),
            ("copies", "Copies", _copies(facts["copies"])),
            ("similar", "Near duplicates", _similar(facts["similar"])),
            ("notes", "Notes", panel(bullets(facts["notes"]))),
        ),
    )


# --- counts


def _sources(sources: list[dict[str, Any]]) -> str:
    heads = {
        "source": "#", "dataset": "data set", "folder": "folder", "kind": "kind", "records": "images", "repeats": "repeats",
        "draws_per_epoch": "uses per epoch", "held_out": "held out", "upscaled": "enlarged", "refused": "refused",
        "no_bucket": "no bucket", "not_used": "surplus", "settings": "settings",
    }  # fmt: skip
    always = ("source", "folder", "kind", "records", "repeats", "draws_per_epoch", "settings")
    shown = {key: head for key, head in heads.items() if key in always or any(source[key] for source in sources)}
    if all(source["dataset"] == 1 for source in sources):
        shown.pop("dataset")
    return panel(rows(sources, shown), kind="sources")


def _buckets(buckets: list[dict[str, Any]], resolutions: list[dict[str, Any]]) -> str:
    by_shape = sorted(buckets, key=lambda bucket: (bucket["width"] / bucket["height"], bucket["width"]))
    chart = bar_chart(
        [_shape(bucket) for bucket in by_shape],
        [float(bucket["draws_per_epoch"]) for bucket in by_shape],
        x_label="uses per epoch, from tall to wide",
    )

    # --- the table, the fullest first
    table = [
        {
            "bucket": bucket["bucket"],
            "images": bucket["records"],
            "uses per epoch": bucket["draws_per_epoch"],
            "share, %": round(100 * bucket["share"], 1),
            "batches per epoch": round(bucket["batches_per_epoch"], 2),
            "held out": bucket["held_out"],
            "enlarged": bucket["upscaled"],
            "median scale": round(bucket["median_scale"], 3),
            "cropped away, %": round(100 * bucket["cut_away"], 1),
        }
        for bucket in sorted(buckets, key=lambda bucket: -bucket["draws_per_epoch"])
    ]

    # --- sizes of the files
    histogram = bar_chart(
        [str(one["from"]) for one in resolutions],
        [float(one["images"]) for one in resolutions],
        x_label="images by the side of a square of their area, px, from",
    )
    charts = grid(panel(chart, "Buckets"), panel(histogram, "Resolution of the files"))
    return charts + panel(rows(table), kind="buckets")


def _shape(bucket: dict[str, Any]) -> str:
    frames = bucket.get("frames", 1)
    return f"{bucket['width']}×{bucket['height']}" + (f"×{frames}" if frames > 1 else "")


def _clips(clips: dict[str, Any] | None) -> str:
    """Show how many frames samples have, and how much of the videos they are."""
    if not clips:
        return ""
    chart = bar_chart(
        [str(one["frames"]) for one in clips["frames"]],
        [float(one["samples"]) for one in clips["frames"]],
        x_label="samples by their frames; 1: images",
    )
    rates = ", ".join(clips["rates"])
    text = (
        f"{clips['clips']:,} clips, {clips['seconds']:,.0f} s in all, at {rates} frames a second: {clips['used']:.0%} of the frames "
        f"that {clips['videos']:,} videos have at this rate."
    )
    if clips["looked_up"] < clips["clips"]:
        text += f" Counted over {clips['looked_up']:,} of them."
    return panel(chart + note(text), "Frames")


def _rejected(rejected: dict[str, Any]) -> str:
    if not rejected["count"]:
        return ""
    reasons = [{**reason, "source": reason["source"] or "all"} for reason in rejected["reasons"]]
    more = rejected["count"] - len(rejected["first"])
    footer = note(f"and {more:,} more: a run lists all of them in rejected.jsonl") if more > 0 else ""
    return panel(rows(reasons) + details(f"{len(rejected['first'])} by name", rows(rejected["first"]) + footer))


def _copies(copies: dict[str, Any]) -> str:
    if not copies["looked_for"]:
        why = f"not searched: images were not decoded completely ({option('data.verify', 'full')} reads them)"
        return panel(missing(why))
    if not copies["groups"]:
        return ""
    table = [{"images": group["pictures"], "names": group["names"]} for group in copies["first"]]
    more = copies["groups"] - len(table)
    footer = note(f"and {more:,} more groups") if more > 0 else ""
    return panel(rows(table) + footer, "Images with identical bytes; all are kept")


def _similar(similar: dict[str, Any]) -> str:
    if not similar["looked_for"]:
        return panel(missing(f"not searched: there are more than {similar['limit']:,} images"))
    if not similar["groups"]:
        return ""
    panels = []
    for group in similar["first"]:
        figures = "".join(
            f'<figure><img class="zoom" src="{one["image"]}" alt="{escape(one["name"])}, small" '
            f'data-note="{escape(one["name"])}&#10;{escape(one["caption"])}">'
            f"<figcaption>{isolated(one['name'])}<br>{escape(one['size'])}</figcaption></figure>"
            for one in group["shown"]
            if one.get("image")
        )
        more = group["images"] - len(group["shown"])
        footer = note(f"and {more:,} more") if more > 0 else ""
        panels.append(f'<div class="panel"><div class="likes">{figures}</div>{footer}</div>')
    more = similar["groups"] - len(similar["first"])
    footer = note(f"and {more:,} more groups") if more > 0 else ""
    text = note(
        "Found by a hash of their brightness: resized, recompressed or slightly cropped duplicates. All are used."
    )
    return f'<div class="grid2">{"".join(panels)}</div>{footer}{text}'


# --- captions


def _captions(captions: dict[str, Any]) -> str:
    counts = f"{captions['count']:,} captions"
    counts += f", several of {captions['several']:,} images" if captions["several"] else ""
    counts += f", {captions['empty']:,} are empty" if captions["empty"] else ""
    tokens = captions["tokens"]
    panels = [_tokens(tokens, counts)]
    if tokens and tokens["longest_cut"]:
        panels.append(panel(_quotes(tokens["longest_cut"], "tokens"), "The longest of those that are cut"))
    return grid(*panels) + "".join(
        panel(details(f"the {key}, as they stand", _quotes(captions[key], "characters")))
        for key in ("longest", "shortest")
        if captions[key]
    )


def _words(captions: dict[str, Any]) -> str:
    """Show which words and tags are frequent: the captions that have them."""
    panels = []
    for key, title in (("words", "Words, and how many captions have them"), ("tags", "Tags, between commas")):
        # what one caption has alone says nothing of a dataset, but where there is little else
        ranked = [(name, count) for i, (name, count) in enumerate(captions[key]) if count > 1 or i < FEW_WORDS]
        if ranked:
            panels.append(panel(rank_chart([name for name, _ in ranked], [count for _, count in ranked]), title))
    left_out = captions["count"] - captions["counted"]
    return grid(*panels) + (note(f"Of the first {captions['counted']:,} captions.") if panels and left_out > 0 else "")


def _tokens(tokens: dict[str, Any] | None, counts: str) -> str:
    if tokens is None:
        why = f"Tokens are counted if a model is given: {option('model.pretrained')} or {option('model.init_from_config')}."
        return panel(note(f"{counts}. {why}"), "Tokens")
    chart = bar_chart(
        [str(one["from"]) for one in tokens["bins"]],
        [float(one["captions"]) for one in tokens["bins"]],
        x_label="tokens per caption, from",
    )
    text = (
        f"{counts}. Tokens of {tokens['counted']:,}: {tokens['mean']:.1f} on average, {tokens['most']:,} at most; the model "
        f"reads {tokens['limit']}, so {tokens['cut']:,} are cut. Counted with prefix and suffix, without dropout."
    )
    return panel(chart + note(text), "Tokens")


def _quotes(captions: list[dict[str, Any]], unit: str) -> str:
    items = "".join(
        f"<li><b>{one[unit]:,} {unit}</b>{_caption(one['caption'], SHORT)}<span>{isolated(one['record'])}</span></li>"
        for one in captions
    )
    return f'<ul class="quotes">{items}</ul>' if items else missing("none")


def _caption(text: str, most: int) -> str:
    return isolated(text if len(text) <= most else f"{text[:most]} …")


# --- pictures: how each is cut, and its captions in the first epochs


def _shots(facts: dict[str, Any]) -> str:
    if not facts["cards"]:
        return ""
    text = (
        f"{len(facts['cards'])} of {facts['totals']['trained']:,} images, some of every bucket and source. Left: the "
        "original with the crop of its first use, right: what the model gets. Below: its captions as they are used"
        f" in the first {facts['epochs']} epoch{'s'[: facts['epochs'] > 1]}; steps are counted from 0."
    )
    first, footer = facts["cards"][:OPEN], facts["cards"][OPEN:]
    folded = f'<div class="shots">{"".join(map(_shot, footer))}</div>' if footer else ""
    return (
        _filter(facts["cards"])
        + f'<div class="shots">{"".join(map(_shot, first))}</div>'
        + details(f"{len(footer)} more", folded)
        + note(text)
    )


def _filter(cards: list[dict[str, Any]]) -> str:
    """Offer to show only some: hidden where no script can answer."""
    buckets = sorted({card["bucket"] for card in cards})
    options = "".join(f'<option value="{escape(bucket)}">{escape(bucket)}</option>' for bucket in buckets)
    return (
        '<div class="filter" hidden><input type="search" placeholder="words of captions or names" '
        'aria-label="words of captions or names">'
        f'<select aria-label="bucket"><option value="">all buckets</option>{options}</select><output></output></div>'
    )


def _shot(card: dict[str, Any]) -> str:
    badge = '<span class="badge plain">regularisation</span>' if card["regularisation"] else ""
    pictures = _pair(card) if card["images"] else f'<p class="bad">{escape(card["fault"])}</p>'
    return (
        f'<article class="panel shot" data-bucket="{escape(card["bucket"])}"><h3>{isolated(card["name"])}{badge}</h3>'
        f"{pictures}{_uses(card)}</article>"
    )


def _pair(card: dict[str, Any]) -> str:
    """Show the original with a frame around the cut, what the model gets, the mask of the loss and the references."""
    (width, height), (wide, high), (left, top, w, h) = card["size"], card["resized"], card["crop"]
    shares = {"left": left / wide, "top": top / high, "width": w / wide, "height": h / high}
    frame = ";".join(f"{side}:{100 * share:.2f}%" for side, share in shares.items())
    name, images = escape(card["name"]), card["images"]
    result = f"{w} × {h} px, scaled {wide / width:.2f}" + (", mirrored" if card["flipped"] else "")
    clip, shown = card.get("clip"), f"{width} × {height} px"
    if clip:
        result = f"{clip['frames']} of {clip['available']:,} frames, {result}"
        shown += f", {clip['format']}, from {clip['from_s']:.2f} s: {_rate(clip)}"
    original = (
        f'<div class="frame"><img class="zoom" src="{images["original"]}" alt="{name}"><i style="{frame}"></i></div>'
    )
    figures = [
        figure(original, shown),
        figure(f'<img class="zoom" src="{images["result"]}" alt="{name}, cut">', result),
    ]
    if "mask" in images:
        figures.append(
            figure(f'<img class="zoom" src="{images["mask"]}" alt="mask of {name}">', "mask of the loss", "third")
        )
    for number, key in enumerate((key for key in images if key.startswith("control")), start=1):
        picture = f'<img class="zoom" src="{images[key]}" alt="reference {number} of {name}">'
        figures.append(figure(picture, f"reference {number}", "third"))
    return f'<div class="pair">{"".join(figures)}</div>'


def _rate(clip: dict[str, Any]) -> str:
    """Say how the rate of a clip differs from its file's."""
    uneven = "" if clip["is_constant"] else ", uneven"
    if abs(clip["fps"] - clip["file_fps"]) < 0.005 * clip["fps"]:
        return f"{clip['fps']:g} frames a second{uneven}"
    return f"{clip['file_fps']:.4g} frames a second{uneven}, read at {clip['fps']:g}"


def _uses(card: dict[str, Any]) -> str:
    """List the uses of a picture in the epochs that are looked at, with the caption of each."""
    lines = []
    for use in card["captions"]:
        text = _caption(use["text"], LONG) if use["text"] else '<span class="none">empty</span>'
        text += f' <span class="none">({use["tokens"]} tokens)</span>' if use.get("tokens") is not None else ""
        lines.append((use["epoch"], f"epoch {use['epoch']}<br>step {use['step']:,}", text))
    for epoch in card["unused"]:
        searched = card["searched"][epoch - 1]
        why = "not used in this epoch" if searched is None else f"not in the first {searched:,} steps of this epoch"
        lines.append((epoch, f"epoch {epoch}", f'<span class="none">{why}</span>'))
    lines.sort(key=lambda line: line[0])
    if not card["captions"]:
        lines += [(0, "unchanged", _caption(text, LONG)) for text in card["stored"]]
    body = "".join(f"<tr><th>{head}</th><td>{text}</td></tr>" for _, head, text in lines)
    return f'<table class="uses">{body}</table>'
