"""Plain data as HTML tables, escaped; whatever shape a room's summary has, it is shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from difftrain.report.line import fixed

MOST_ROWS = 200
LONG = 30  # items of a list longer than this stand on lines of their own


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
        return between.join(escape(str(item)) for item in value) or "none"
    return escape(str(value)) or "none"


def name(key: str) -> str:
    """Write a key as words."""
    return escape(str(key).replace("_", " "))


def pairs(values: Mapping[str, Any]) -> str:
    """Write a mapping as a table of two columns."""
    return (
        '<table class="pairs">'
        + "".join(f"<tr><th>{name(k)}</th><td>{cell(v)}</td></tr>" for k, v in values.items())
        + "</table>"
    )


def rows(records: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | None = None) -> str:
    """Write records as a table. columns: key -> heading; without, every key that occurs, in order."""
    if not records:
        return '<p class="none">none</p>'
    heads = columns or {key: str(key).replace("_", " ") for record in records for key in record}
    head = "".join(
        f'<th class="number">{escape(text)}</th>' if _is_number(records[0].get(key)) else f"<th>{escape(text)}</th>"
        for key, text in heads.items()
    )
    body = "".join(
        "<tr>" + "".join(_data(record.get(key, "")) for key in heads) + "</tr>" for record in records[:MOST_ROWS]
    )
    more = len(records) - MOST_ROWS
    rest = f'<p class="none">and {more} more</p>' if more > 0 else ""
    return (
        f'<div class="wide"><table class="rows"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{rest}'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _data(value: Any) -> str:
    return (
        f'<td class="number">{cell(value)}</td>'
        if _is_number(value)
        else f"<td>{'' if value == '' else cell(value)}</td>"
    )
