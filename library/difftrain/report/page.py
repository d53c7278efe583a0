"""The one builder of HTML pages: shell, panels, tables, lists and pictures.

A page is one file that opens without a network, runs no script but ours (page.js, named by its hash in the page's own
policy), and takes no text for markup: what these functions get is text unless they say HTML, and what they return is
HTML.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from PIL import Image, ImageDraw

from difftrain.report.line import fixed

# what a browser holds a page to, besides the one script that its hash allows
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
MOST_ROWS = 200
LONG = 30  # items of a list longer than this stand on lines of their own
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


# --- the shell


def page(
    title: str,
    *,
    badges: Iterable[tuple[str, str]],
    about: str,
    cards: Iterable[tuple[str, str]],
    sections: Iterable[tuple[str, str, str]],
    lead: str = "",
    refresh_s: int = 0,
) -> str:
    """Return a whole page.

    badges: (good, bad, busy or plain; text) beside the title. about: the line below it, HTML. cards: (text, value as
    HTML). sections: (anchor, heading, HTML); one without HTML is left out. lead: HTML between the title and the cards.
    refresh_s: seconds until the page loads itself again; 0: never.
    """
    kept = [section for section in sections if section[2]]
    marks = "".join(f'<span class="badge {kind}">{escape(text)}</span>' for kind, text in badges)
    links = "".join(f'<a href="#{anchor}">{escape(heading)}</a>' for anchor, heading, _ in kept)
    figures = "".join(f'<div class="card"><b>{value}</b><span>{escape(text)}</span></div>' for text, value in cards)
    policy = f"{POLICY}; script-src {script_hash()}"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    body = (
        f"<nav>{links}</nav>\n{lead}"
        + (f'<div class="cards">{figures}</div>\n' if figures else "")
        + "\n".join(f'<section id="{a}">\n<h2>{escape(h)}</h2>\n{body}\n</section>' for a, h, body in kept)
    )
    return shell(
        title,
        about,
        body,
        marks=marks,
        head=head + (f'<meta http-equiv="refresh" content="{refresh_s}">\n' if refresh_s else ""),
        end=f"<script>{asset('page.js')}</script>\n",
    )


def shell(title: str, about: str, body: str, *, marks: str = "", head: str = "", style: str = "", end: str = "") -> str:
    """Return a document around a body, HTML all but the title: of pages that are files, and of those that are served.

    marks: beside the title. head: in the document's head. style: CSS beside that of every page. end: behind the body,
    as it stands: a script's hash is of its very bytes.
    """
    document = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"{head}"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="{_icon()}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{asset('page.css')}{style}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{escape(title)}{marks}</h1><p>{about}</p></header>\n{body}\n</main>\n"
    )
    # names of files may hold bytes that are no text, and captions halves of characters
    document = _CONTROL.sub("\ufffd", document).encode("utf-8", "replace").decode()
    return f"{document}{end}</body>\n</html>\n"


@functools.cache
def _icon() -> str:
    """Draw a falling curve, the page's sign in a row of tabs."""
    image = Image.new("RGB", (32, 32), "#2563c9")
    ImageDraw.Draw(image).line([(5, 6), (10, 18), (17, 24), (27, 26)], fill="white", width=3)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return data_address(file.getvalue(), "png")


def asset(name: str) -> str:
    """Return a file that lies beside this one: page.css or page.js."""
    return resources.files("difftrain.report").joinpath(name).read_text(encoding="utf-8")


def script_hash() -> str:
    """Return what a policy says to let the pages' own script run, and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(asset('page.js').encode()).digest()).decode()}'"


def escape(value: object) -> str:
    """Write a text for any place of a page, quoted attributes included."""
    return html.escape(str(value))


def isolated(value: object) -> str:
    """Write a text of the data, so that its right-to-left letters turn nothing else around."""
    return f"<bdi>{escape(value)}</bdi>"


# --- blocks; their bodies are HTML


def panel(body: str, title: str = "", kind: str = "") -> str:
    """Frame a body. kind: a class of its own in the style sheet."""
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    return f'<div class="{f"panel {kind}".strip()}">{heading}{body}</div>'


def grid(*panels: str) -> str:
    """Lay panels side by side where there is room; nothing where there are none."""
    return f'<div class="grid2">{body}</div>' if (body := "".join(panels)) else ""


def details(summary: str, body: str) -> str:
    """Hide a body behind a line that opens it; nothing where there is none."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>" if body else ""


def note(text: str) -> str:
    """Write a remark below what it is about."""
    return f'<p class="note">{escape(text)}</p>'


def missing(text: str) -> str:
    """Write a text in place of what is not there."""
    return f'<p class="none">{escape(text)}</p>'


def bullets(items: Iterable[str], otherwise: str = "none") -> str:
    """Write texts of the data as a list. otherwise: where there are none."""
    body = "".join(f"<li>{isolated(item)}</li>" for item in items)
    return f"<ul>{body}</ul>" if body else missing(otherwise)


def findings(entries: Sequence[Mapping[str, Any]]) -> str:
    """List what somebody should look at: level (stop or look), what, and examples."""
    body = "".join(
        f'<li class="{entry["level"]}"><b>{escape(entry["what"])}</b>'
        + (bullets(entry["examples"]) if entry["examples"] else "")
        + "</li>"
        for entry in entries
    )
    return f'<ul class="findings">{body or "<li class=fine><b>nothing stands out</b></li>"}</ul>'


def figure(image: str, caption: str, kind: str = "") -> str:
    """Put a caption below an image, HTML."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<figure{attribute}>{image}<figcaption>{escape(caption)}</figcaption></figure>"


# --- plain data as tables


def cell(value: Any) -> str:
    """Write one value."""
    if value is None:
        return '<span class="none">not measured</span>'
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and not math.isfinite(value):
        return "not a number"
    if isinstance(value, int) or (isinstance(value, float) and abs(value) >= 1e6):
        return f"{value:,.0f}".replace(",", "\u202f")  # narrow space: no reader takes it for a decimal point
    if isinstance(value, float):
        return fixed(value, 5)
    if isinstance(value, Mapping):
        return pairs(value) if value else "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        if value and all(isinstance(item, Mapping) for item in value):
            return rows(value)
        between = "<br>" if any(len(str(item)) > LONG for item in value) else ", "
        return between.join(map(escape, value)) or "none"
    return escape(value) or "none"


def words(key: object) -> str:
    """Write a key as words."""
    return escape(str(key).replace("_", " "))


def pairs(values: Mapping[str, Any]) -> str:
    """Write a mapping as a table of two columns."""
    body = "".join(f"<tr><th>{words(key)}</th><td>{cell(value)}</td></tr>" for key, value in values.items())
    return f'<table class="pairs">{body}</table>'


def rows(records: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | None = None) -> str:
    """Write records as a table. columns: key -> heading; without, every key that occurs, in order."""
    if not records:
        return missing("none")
    heads = columns or {key: str(key).replace("_", " ") for record in records for key in record}

    def align(value: Any) -> str:
        return ' class="number"' if isinstance(value, int | float) and not isinstance(value, bool) else ""

    def data(value: Any, head: str) -> str:
        if value == "":
            return "<td></td>"
        return f'<td{align(value)} data-head="{escape(head)}">{cell(value)}</td>'  # beside it where a row is a block

    head = "".join(f"<th{align(records[0].get(key))}>{escape(text)}</th>" for key, text in heads.items())
    lines = ("".join(data(record.get(key, ""), text) for key, text in heads.items()) for record in records[:MOST_ROWS])
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    footer = missing(f"and {len(records) - MOST_ROWS} more") if len(records) > MOST_ROWS else ""
    table = f'<table class="rows"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="wide">{table}</div>{footer}'


# --- pictures


def data_address(raw: bytes, kind: str) -> str:
    """Return a picture's file as an address that a page holds in itself. kind: png or jpeg."""
    return f"data:image/{kind};base64,{base64.b64encode(raw).decode()}"


def jpeg_address(picture: Image.Image, tries: Iterable[tuple[int, int]], most: int) -> str:
    """Return a small JPEG of a picture, of the first (longest side, quality) that keeps within so many bytes."""
    small = picture.copy()
    for side, quality in tries:
        small.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=3.0)
        file = io.BytesIO()
        small.save(file, "JPEG", quality=quality, optimize=True)
        if file.tell() <= most:
            break
    return data_address(file.getvalue(), "jpeg")
