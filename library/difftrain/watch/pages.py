"""What `difftrain watch` shows, as HTML: the list of runs, one run, and a page for what went wrong.

Each page can be read without a script; with one it refreshes itself. Everything that comes from a run is escaped.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from importlib import resources
from urllib.parse import urlencode

from difftrain.report.line import fixed
from difftrain.report.page import escape, missing, note, panel, shell
from difftrain.watch.runs import DEPTH, MOST_RUNS, RunStatus

REFRESH_S = 5
# of a state: how its badge looks
KINDS = {"running": "good", "finished": "good", "failed": "bad", "killed": "bad"}
STATES = {
    "running": "running",
    "finished": "finished",
    "stopped": "stopped before its end",
    "failed": "failed",
    "killed": "killed: its process is gone",
    "unknown": "nothing says how it ended",
}
ACTIONS = {
    "save": ("Save now", "checkpoint and export; training continues"),
    "sample": ("Sample now", "generate samples; training continues"),
    "stop": ("Save and stop", "checkpoint and export, then the run ends; it can be resumed"),
}
HEADS = ("Step", "Loss", "Images per second", "Time left", "Last step, ago")
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def link(path: str, **query: str) -> str:
    """Return the address of a page on this server, ready for an attribute."""
    return escape(f"{path}?{urlencode(query)}" if query else path)


# --- the pages


def runs_page(statuses: Sequence[RunStatus], *, folder: str, more: int, token: str, nonce: str) -> str:
    """Return the list of runs. more: how many older ones are not shown."""
    if not statuses:
        body = panel(
            missing(
                f"there is no run in {folder} or up to {DEPTH} folders below it yet; this page shows one as soon as it "
                "writes its first file"
            )
        )
    else:
        head = "".join(f"<th>{escape(text)}</th>" for text in ("Run", "State", *HEADS))
        table = "".join(_row(status, token) for status in statuses)
        body = panel(
            f'<div class="wide"><table class="rows runs"><thead><tr>{head}</tr></thead><tbody>{table}</tbody></table></div>'
        )
        body += note(f"the {MOST_RUNS} newest runs; {more} older ones are not shown") if more else ""
    count, running = len(statuses) + more, sum(status.state == "running" for status in statuses)
    about = f"{escape(folder)} · {count} run{'s'[: count != 1]}, {running} running"
    return _shell("Runs", about, f'<div id="live" data-state="" data-refresh="{1000 * REFRESH_S}">{body}</div>', nonce)


def run_page(
    status: RunStatus,
    *,
    log: tuple[str, str],
    samples: Iterable[str],
    report: str,
    token: str,
    nonce: str,
    requested: str,
) -> str:
    """Return the page of one run.

    log: its name and its end. report: the key that opens the report. requested: an action that was just asked for.
    """
    # --- what changes while it runs
    cards = [
        ("step", f"{status.step}{f' of {status.total_steps}' if status.total_steps else ''}"),
        ("time left, about", duration(status.left_s)),
        ("loss", _figure(status.loss, 4)),
        ("images per second", _figure(status.fps, 3)),
        ("seconds per step", _figure(status.step_s, 3)),
        ("since the last step", ago(status.changed)),
    ]
    figures = "".join(f'<div class="card"><b>{escape(value)}</b><span>{text}</span></div>' for text, value in cards)
    bar = f'<div class="bar"><i style="width:{100 * status.share:.2f}%"></i></div>' if status.share is not None else ""
    live = f"{bar}<div class='cards'>{figures}</div>"
    if status.error:
        live += f'<p class="said bad">{escape(_text(status.error))}</p>'
    if status.skipped:
        live += note(f"{status.skipped} updates were skipped: their loss or gradient was not finite")
    for action in status.requested:
        live += f'<p class="said">{escape(_waiting(action, status))}</p>'
    if pictures := "".join(_sample(status.name, name, token) for name in samples):
        live += f'<section><h2>Newest samples</h2><div class="samples">{pictures}</div></section>'
    name, text = log
    shown = f'<pre class="log" tabindex="0">{escape(_text(text))}</pre>' if text else missing("no log in this folder")
    live += f"<section><h2>Log</h2>{panel(shown, name)}</section>"

    # --- what stays
    query = {"name": status.name, "key": report}
    frame = (
        f'<p><a href="{link("/report", **query)}" target="_blank" rel="noopener">open the report by itself</a></p>'
        f'<iframe title="report" sandbox="allow-scripts" loading="lazy" src="{link("/report", **query)}"></iframe>'
    )
    body = (
        f"{_actions(status, token, requested)}"
        f'<div id="live" data-state="{escape(status.state)}" data-refresh="{1000 * REFRESH_S}">{live}</div>'
        f"<section><h2>Report</h2>{frame}</section>"
    )
    about = f'<a href="{link("/", token=token)}">all runs</a> · {escape(STATES[status.state])}'
    return _shell(status.title, about, body, nonce, badge=_badge(status.state))


def message_page(title: str, text: str, *, form: bool = False) -> str:
    """Return a page that says what is wrong. form: it asks for the token."""
    asks = '<form action="/"><input name="token" type="password" aria-label="token" autofocus> <button>Open</button></form>'
    return _shell(title, escape(text), asks if form else "", "", refreshes=False)


# --- parts


def _shell(title: str, about: str, body: str, nonce: str, *, badge: str = "", refreshes: bool = True) -> str:
    again = f'<noscript><meta http-equiv="refresh" content="{3 * REFRESH_S}"></noscript>\n' if refreshes else ""
    script = f'<script nonce="{nonce}">{_asset("watch.js")}</script>\n' if refreshes else ""
    away = '<p id="away" class="said bad" hidden>difftrain watch does not answer; what is shown is old</p>'
    return shell(_text(title), about, away + body, marks=badge, head=again, style=_asset("watch.css"), end=script)


def _asset(name: str) -> str:
    return resources.files("difftrain.watch").joinpath(name).read_text(encoding="utf-8")


def _badge(state: str) -> str:
    return f'<span class="badge {KINDS.get(state, "plain")}">{escape(state)}</span>'


def _row(status: RunStatus, token: str) -> str:
    share = f" ({100 * status.share:.0f} %)" if status.share is not None else ""
    name = f'<a href="{link("/run", name=status.name, token=token)}">{escape(_text(status.title))}</a>'
    cells = (
        escape(f"{status.step}{f' of {status.total_steps}' if status.total_steps else ''}{share}"),
        escape(_figure(status.loss, 4)),
        escape(_figure(status.fps, 3)),
        escape(duration(status.left_s)),
        escape(ago(status.changed)),
    )
    figures = "".join(f'<td data-head="{head}">{cell}</td>' for head, cell in zip(HEADS, cells))
    return f"<tr><td>{name}</td><td>{_badge(status.state)}</td>{figures}</tr>"


def _sample(run: str, name: str, token: str) -> str:
    address = link("/sample", name=run, file=name, token=token)
    return (
        f'<figure><a href="{address}" target="_blank" rel="noopener"><img src="{address}" alt="{escape(name)}"></a>'
        f"<figcaption>{escape(_text(name))}</figcaption></figure>"
    )


def _actions(status: RunStatus, token: str, requested: str) -> str:
    """Write the buttons of a run that is going on."""
    notice = ""
    if requested in ACTIONS and requested not in status.requested:
        notice = f'<p class="said">{escape(ACTIONS[requested][0])}: the run has seen it, and acts after a step</p>'
    if status.state != "running":
        return notice
    forms = ""
    for action, (title, meaning) in ACTIONS.items():
        kind = ' class="bad"' if action == "stop" else ""
        form = (
            f'<form method="post" action="/do"><input type="hidden" name="token" value="{escape(token)}">'
            f'<input type="hidden" name="name" value="{escape(status.name)}">'
            f'<button name="action" value="{action}" title="{escape(meaning)}"{kind}>{escape(title)}</button></form>'
        )
        # one touch must not end a run
        forms += f"<details><summary>Stop …</summary>{note(meaning)}{form}</details>" if action == "stop" else form
    return f'{notice}<section class="actions">{forms}</section>'


def _waiting(action: str, status: RunStatus) -> str:
    if status.state == "running":
        return f"{ACTIONS[action][0]}: requested, the run has not reached it yet"
    return f"{ACTIONS[action][0]}: requested, and not yet seen; a resumed run acts on it after its first step"


def _figure(value: float | None, significant: int) -> str:
    return "–" if value is None else fixed(value, significant)


def _text(text: str) -> str:
    """Return text without colours and other codes for terminals."""
    return _CONTROL.sub("\ufffd", _ANSI.sub("", text)).encode("utf-8", "replace").decode()


def duration(seconds: float | None) -> str:
    """Write a time for people: 45 s, 12 min, 3 h 20 min, 2 d 5 h."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def ago(moment: float) -> str:
    """Write how long ago a moment was, given in seconds since the epoch; 0: it never was."""
    return duration(max(0.0, time.time() - moment)) if moment else "–"
