"""The page of a data set: one file that opens anywhere, loads nothing, runs nothing, and takes no text for markup."""

from __future__ import annotations

import re
from html import escape
from importlib import resources
from typing import Any

from difftrain.config.spellings.spelling import option
from difftrain.report.html_parts import bar_chart, cell, rows

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # a browser holds the page to it
LONG = 600  # letters of a caption that are shown
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def page(facts: dict[str, Any]) -> str:
    """Return the whole page."""
    title = f"Data set {facts['name']}"
    sections = (
        _head(facts, title),
        _cards(facts),
        *(_section(anchor, heading, body(facts)) for anchor, heading, body in SECTIONS),
    )
    text = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text_of(title)}</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )
    # names of files may hold bytes that are no text, and captions halves of characters
    return _CONTROL.sub("\ufffd", text).encode("utf-8", "replace").decode()


def _style() -> str:
    return "".join(
        resources.files(room).joinpath("page.css").read_text(encoding="utf-8")
        for room in ("difftrain.report", "difftrain.train.inspect")
    )


def text_of(value: object) -> str:
    """Escape a text for any place of the page."""
    return escape(str(value), quote=True)


def _section(anchor: str, title: str, body: str) -> str:
    return f'<section id="{anchor}">\n<h2>{text_of(title)}</h2>\n{body}\n</section>' if body else ""


def _panel(body: str, title: str = "", kind: str = "") -> str:
    heading = f"<h3>{text_of(title)}</h3>" if title else ""
    return f'<div class="{f"panel {kind}".strip()}">{heading}{body}</div>'


def _head(facts: dict[str, Any], title: str) -> str:
    stops = any(finding["level"] == "stop" for finding in facts["findings"])
    looks = len(facts["findings"])
    kind, verdict = (
        ("bad", "would not start") if stops else ("plain", f"{looks} to look at") if looks else ("good", "fine")
    )
    batch = ", ".join(map(str, facts["global_batch"]))
    seed = f"seed {facts['seed']}" if facts["seeded"] else f"seed {facts['seed']}: none is configured, a run draws one"
    told = [seed, f"global batch {batch}", f"{facts['ranks']} rank{'s'[: facts['ranks'] > 1]}", facts["written"]]
    badge = f'<span class="badge {kind}">{verdict}</span>'
    links = "".join(f'<a href="#{anchor}">{text_of(heading)}</a>' for anchor, heading, _ in SECTIONS)
    return f"<header><h1>{text_of(title)}{badge}</h1><p>{text_of(' · '.join(told))}</p><nav>{links}</nav></header>"


def _cards(facts: dict[str, Any]) -> str:
    totals, tokens = facts["totals"], facts["captions"]["tokens"]
    cards = [
        ("pictures with captions", totals["records"]),
        ("uses in an epoch, repeats counted", totals["draws_per_epoch"]),
        ("steps in the first epoch", facts["steps"][0] if facts["steps"] else None),
        ("buckets", totals["buckets"]),
        ("held out for validation", totals["held_out"]),
        ("not trained on", facts["rejected"]["count"]),
        ("copies, byte for byte", totals["copies"] if facts["copies"]["looked_for"] else None),
        ("enlarged", totals["upscaled"]),
        ("captions that are cut", tokens["cut"] if tokens else None),
    ]
    body = "".join(
        f'<div class="card"><b>{"–" if value is None else cell(value)}</b><span>{text_of(says)}</span></div>'
        for says, value in cards
    )
    return f'<div class="cards">{body}</div>'


def _findings(facts: dict[str, Any]) -> str:
    items = "".join(
        f'<li class="{"stop" if finding["level"] == "stop" else "look"}"><b>{text_of(finding["what"])}</b>'
        + (
            f"<ul>{''.join(f'<li>{_said(one)}</li>' for one in finding['examples'])}</ul>"
            if finding["examples"]
            else ""
        )
        + "</li>"
        for finding in facts["findings"]
    )
    return _panel(f'<ul class="findings">{items or "<li class=fine><b>nothing stands out</b></li>"}</ul>')


def _said(value: object) -> str:
    """Write text of the data: isolated, so that right-to-left letters turn nothing else around."""
    return f"<bdi>{text_of(value)}</bdi>"


def _sources(facts: dict[str, Any]) -> str:
    heads = {
        "source": "#", "dataset": "data set", "folder": "folder", "kind": "kind", "records": "pictures", "repeats": "repeats",
        "draws_per_epoch": "uses an epoch", "held_out": "held out", "upscaled": "enlarged", "refused": "refused",
        "no_bucket": "no bucket", "not_used": "surplus", "settings": "settings",
    }  # fmt: skip
    always = ("source", "folder", "kind", "records", "repeats", "draws_per_epoch", "settings")
    found = facts["sources"]
    shown = {key: head for key, head in heads.items() if key in always or any(source[key] for source in found)}
    if all(source["dataset"] == 1 for source in found):
        shown.pop("dataset")
    return _panel(rows(facts["sources"], shown), kind="sources")


def _buckets(facts: dict[str, Any]) -> str:
    found = sorted(facts["buckets"], key=lambda one: (one["width"] / one["height"], one["width"]))
    chart = bar_chart(
        [f"{one['width']}×{one['height']}" for one in found],
        [float(one["draws_per_epoch"]) for one in found],
        x_label="uses an epoch, from tall to wide",
    )
    table = [
        {
            "bucket": one["bucket"],
            "pictures": one["records"],
            "uses an epoch": one["draws_per_epoch"],
            "share, %": round(100 * one["share"], 1),
            "batches an epoch": round(one["batches_per_epoch"], 2),
            "held out": one["held_out"],
            "enlarged": one["upscaled"],
            "median scale": round(one["median_scale"], 3),
            "cut away, %": round(100 * one["cut_away"], 1),
        }
        for one in sorted(facts["buckets"], key=lambda one: -one["draws_per_epoch"])
    ]
    return _panel(f'<div class="chart">{chart}</div>') + _panel(rows(table), kind="buckets")


def _shots(facts: dict[str, Any]) -> str:
    if not facts["cards"]:
        return ""
    total = facts["totals"]["trained"]
    note = (
        f"{len(facts['cards'])} of {total:,} pictures, some of every bucket and source. Left the original with the cut of "
        "its first use, right what the model gets. Below, its captions as the plan draws them"
        f" in the first {facts['epochs']} epoch{'s'[: facts['epochs'] > 1]}; steps are counted from 0."
    )
    return f'<div class="shots">{"".join(map(_shot, facts["cards"]))}</div><p class="note">{text_of(note)}</p>'


def _shot(card: dict[str, Any]) -> str:
    badge = '<span class="badge plain">regularisation</span>' if card["regularisation"] else ""
    pictures = _pair(card) if card["images"] else f'<p class="bad">{text_of(card["fault"])}</p>'
    return f'<article class="panel shot"><h3>{_said(card["name"])}{badge}</h3>{pictures}{_told(card)}</article>'


def _pair(card: dict[str, Any]) -> str:
    (width, height), (wide, high), (left, top, w, h) = card["size"], card["resized"], card["crop"]
    place = ";".join(
        f"{side}:{100 * share:.2f}%"
        for side, share in (("left", left / wide), ("top", top / high), ("width", w / wide), ("height", h / high))
    )
    name = text_of(card["name"])
    how = [f"{w} × {h} px", f"scaled {wide / width:.2f}"]
    how += ["mirrored"] if card["flipped"] else []
    third = ""
    if "mask" in card["images"]:
        third = _figure(f'<img src="{card["images"]["mask"]}" alt="mask of {name}">', "mask of the loss", "third")
    original = f'<div class="frame"><img src="{card["images"]["original"]}" alt="{name}"><i style="{place}"></i></div>'
    result = f'<img src="{card["images"]["result"]}" alt="{name}, cut">'
    pair = _figure(original, f"{width} × {height} px") + _figure(result, ", ".join(how)) + third
    return f'<div class="pair">{pair}</div>'


def _figure(inner: str, says: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<figure{attribute}>{inner}<figcaption>{text_of(says)}</figcaption></figure>"


def _told(card: dict[str, Any]) -> str:
    lines = [
        (one["epoch"], f"epoch {one['epoch']}<br>step {one['step']:,}", _caption(one["text"], one.get("tokens")))
        for one in card["captions"]
    ]
    for epoch in card["unused"]:
        searched = card["searched"][epoch - 1]
        why = "not used in this epoch" if searched is None else f"not in the first {searched:,} steps of this epoch"
        lines.append((epoch, f"epoch {epoch}", f'<span class="none">{why}</span>'))
    lines.sort(key=lambda line: line[0])
    if not card["captions"]:
        lines += [(0, "as it stands", _said(_short(text, LONG))) for text in card["stored"]]
    body = "".join(f"<tr><th>{head}</th><td>{text}</td></tr>" for _, head, text in lines)
    return f'<table class="told">{body}</table>'


def _caption(text: str, tokens: int | None) -> str:
    shown = _said(_short(text, LONG)) if text else '<span class="none">empty</span>'
    return shown + (f' <span class="none">({tokens} tokens)</span>' if tokens is not None else "")


def _captions(facts: dict[str, Any]) -> str:
    found = facts["captions"]
    told = [f"{found['count']:,} captions"]
    told += [f"several of {found['several']:,} pictures"] if found["several"] else []
    told += [f"{found['empty']:,} are empty"] if found["empty"] else []
    panels = [_tokens(found["tokens"], ", ".join(told))]
    if found["tokens"] and found["tokens"]["longest_cut"]:
        panels.append(_panel(_quotes(found["tokens"]["longest_cut"], "tokens"), "The longest of those that are cut"))
    for key in ("longest", "shortest"):
        panels.append(_panel(_quotes(found[key], "characters"), f"The {key}, as they stand"))
    return f'<div class="grid2">{"".join(panels)}</div>'


def _quotes(found: list[dict[str, Any]], unit: str) -> str:
    items = "".join(
        f"<li><b>{one[unit]:,} {unit}</b>{_said(_short(one['caption']))}<span>{_said(one['record'])}</span></li>"
        for one in found
    )
    return f'<ul class="quotes">{items}</ul>' if items else '<p class="none">none</p>'


def _short(text: str, most: int = 240) -> str:
    return text if len(text) <= most else f"{text[:most]} …"


def _tokens(tokens: dict[str, Any] | None, told: str) -> str:
    if tokens is None:
        why = f"Tokens are counted where a model is named: {option('model.pretrained')} or {option('model.init_from_config')}."
        return _panel(f'<p class="note">{text_of(told)}. {text_of(why)}</p>', "Tokens")
    chart = bar_chart(
        [str(one["from"]) for one in tokens["bins"]],
        [float(one["captions"]) for one in tokens["bins"]],
        x_label="tokens of a caption, from",
    )
    note = (
        f"{told}. Tokens of {tokens['counted']:,}: {tokens['mean']:.1f} on average, {tokens['most']:,} at most; the model "
        f"reads {tokens['limit']}, so that {tokens['cut']:,} are cut. Counted with prefix and suffix, without dropout."
    )
    return _panel(f'{chart}<p class="note">{text_of(note)}</p>', "Tokens")


def _rejected(facts: dict[str, Any]) -> str:
    found = facts["rejected"]
    if not found["count"]:
        return _panel('<p class="none">everything is used</p>')
    reasons = [{**one, "source": one["source"] or "all"} for one in found["reasons"]]
    more = found["count"] - len(found["first"])
    rest = f'<p class="note">and {more:,} more: a run names all of them in rejected.jsonl</p>' if more > 0 else ""
    named = f"<details><summary>{len(found['first'])} by name</summary>{rows(found['first'])}{rest}</details>"
    return _panel(rows(reasons) + named)


def _copies(facts: dict[str, Any]) -> str:
    found = facts["copies"]
    if not found["looked_for"]:
        why = f"not looked for: pictures were not read whole ({option('data.verify')}=full reads them)"
        return _panel(f'<p class="none">{text_of(why)}</p>')
    if not found["groups"]:
        return _panel('<p class="none">none</p>')
    table = [{"pictures": one["pictures"], "names": one["names"]} for one in found["first"]]
    more = found["groups"] - len(found["first"])
    rest = f'<p class="note">and {more:,} more groups</p>' if more > 0 else ""
    return _panel(rows(table) + rest, "Pictures with the same bytes; all are kept")


def _notes(facts: dict[str, Any]) -> str:
    return _panel(f"<ul>{''.join(f'<li>{_said(note)}</li>' for note in facts['notes'])}</ul>")


SECTIONS = (
    ("findings", "What to look at", _findings),
    ("sources", "Sources", _sources),
    ("buckets", "Buckets", _buckets),
    ("captions", "Captions", _captions),
    ("rejected", "Not trained on", _rejected),
    ("copies", "Copies", _copies),
    ("pictures", "Pictures, as they will be cut", _shots),
    ("notes", "Notes", _notes),
)
