"""Write docs/flags.md, docs/train_toml.md, docs/text_to_image.md and the pages of model families from the tables.

What stands above these is in the .md files beside this one.

python -m difftrain.config.render.docs flags > docs/flags.md
python -m difftrain.config.render.docs keys > docs/train_toml.md
python -m difftrain.config.render.docs text_to_image > docs/text_to_image.md
python -m difftrain.config.render.docs models > docs/models/README.md
python -m difftrain.config.render.docs models_zh > docs/zh/models.md
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from difftrain.config.derive import DOOR_DEFAULTS
from difftrain.config.render.help import default_text, form, option_form
from difftrain.config.render.keys import every_table, lines, nearest, not_built, says
from difftrain.config.render.model_pages import CHINESE, ENGLISH, page_in
from difftrain.config.schema.names import OPTIMIZERS_LATER, OPTIMIZERS_NEAR
from difftrain.config.spellings import text_to_image
from difftrain.config.spellings.flags import KOHYA, OURS
from difftrain.config.spellings.keys import OPTIONS
from difftrain.config.spellings.row import AS_OURS, Row
from difftrain.config.spellings.spelling import meaning
from difftrain.models.registry import FAMILIES, LATER

_HERE = Path(__file__).parent


def flags_page() -> str:
    """Return the whole page."""
    offered = [flag for flag in KOHYA if flag.status in ("offered", "nearest")]
    return "\n".join(
        [
            (_HERE / "flags.md").read_text(encoding="utf-8").format(kohya=len(KOHYA), offered=len(offered)),
            "## Implemented, kohya's names\n\n" + _flag_table(flag for flag in KOHYA if flag.status == "offered"),
            "## Implemented, ours\n\n" + _flag_table(flag for flag in OURS if flag.status == "offered"),
            "## Accepted, meaning the nearest thing here (said once)\n\n"
            + _reasons("what it means", (flag for flag in (*KOHYA, *OURS) if flag.status == "nearest")),
            "## Not offered\n\n" + _reasons("reason", (flag for flag in (*KOHYA, *OURS) if flag.status == "refused")),
        ]
    )


def _flag_table(flags: Iterable[Row]) -> str:
    return _table(
        ("flag", "meaning", "default", "kohya's, where another", "TOML"),
        (
            (
                f"`{flag.option}{form(flag)}`",
                meaning(flag, "kohya"),
                "off" if flag.kind == "switch" else default_text(flag).strip("[]"),
                "" if flag.kohya is AS_OURS else f"`{flag.kohya}`" if flag.kohya not in (None, "") else "unset",
                f"`[{'] '.join(flag.to.split('.'))}`" if flag.to and not flag.to.startswith("?") else "",
            )
            for flag in flags
        ),
    )


def text_to_image_page() -> str:
    """Return the whole page of the door that takes the flags of diffusers' example."""
    own = text_to_image.DIFFUSERS
    return "\n".join(
        [
            (_HERE / "text_to_image.md").read_text(encoding="utf-8").format(known=len(own)),
            "## The example's flags\n\n" + _door_table(flag for flag in own if flag.status == "offered"),
            "## Accepted, meaning the nearest thing here (said once)\n\n"
            + _door_reasons("what it means", (flag for flag in own if flag.status == "nearest")),
            "## Not offered\n\n" + _door_reasons("reason", (flag for flag in own if flag.status == "refused")),
            "## Ours\n\n" + _door_table(text_to_image.OURS),
        ]
    )


def _door_table(flags: Iterable[Row]) -> str:
    rows = (
        (
            f"`{flag.option}{form(flag)}`",
            meaning(flag, "text_to_image"),
            "off" if flag.kind == "switch" else default_text(flag, text_to_image.DEFAULTS).strip("[]"),
            f"`[{'] '.join(flag.to.split('.'))}`" if flag.to and not flag.to.startswith("?") else "",
        )
        for flag in flags
    )
    return _table(("flag", "meaning", "default", "TOML"), rows)


def _door_reasons(title: str, flags: Iterable[Row]) -> str:
    return _table(("flag", title), ((f"`{flag.option}`", meaning(flag, "text_to_image")) for flag in flags))


def _reasons(title: str, flags: Iterable[Row]) -> str:
    return _table(("flag", title), ((f"`{flag.option}`", meaning(flag, "kohya")) for flag in flags))


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Write a table of Markdown."""
    cells = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    body = [f"| {' | '.join(row)} |" for row in (titles, *cells)]
    return "\n".join([body[0], "|" + "---|" * len(titles), *body[1:]]) + "\n"


def keys_page() -> str:
    """Return the whole page."""
    parts = [(_HERE / "train_toml.md").read_text(encoding="utf-8"), "## Options\n\n" + _options()]
    for table in every_table():
        parts.append(f"## [{table}]\n\n{says(table)}\n\n" + _key_table(table))
    parts += [
        "## Defaults of this door and of a family\n\n" + _defaults(),
        "## Accepted, and without effect here (said once)\n\n"
        + _lines([f"`{key.toml_key}`: {meaning(key, 'train')}" for key in nearest()]),
        "## Not built yet\n\n"
        + _lines(
            [
                f"`[model] type`: {', '.join(LATER)}",
                f"`[optimizer] type`: {', '.join(OPTIMIZERS_LATER)}; "
                + "; ".join(f"{name} means {ours}, {why}" for name, (ours, why) in OPTIMIZERS_NEAR.items()),
                '`[engine] type = "deepspeed"` runs natively, with several `pipeline_stages` too',
                *(f"`{key.toml_key}`: {meaning(key, 'train')}" + _passes(key.passes) for key in not_built()),
            ]
        ),
    ]
    return "\n".join(parts)


def _options() -> str:
    rows = ((f"`{option_form(row)}`", meaning(row, "train")) for row in OPTIONS.values())
    return _table(("option", "meaning"), rows)


def _key_table(table: str) -> str:
    return _table(
        ("key", "values", "also in", "meaning", "default", "field"),
        (
            (
                f"`{line.name}`",
                f"`{line.values}`",
                ", ".join("flat" if other == "" else f"[{other}]" for other in line.others),
                line.help,
                f"`{line.default}`" if line.default else "",
                f"`{line.field}`" if line.field else "",
            )
            for line in lines(table)
        ),
    )


def _defaults() -> str:
    sentences = [f"every run of this door: {_pairs(DOOR_DEFAULTS)}"]
    sentences += [
        f"`{family}`: {_pairs(row.defaults) if row.defaults else 'as sdxl_pretrain.py'}"
        for family, row in FAMILIES.items()
    ]
    return _lines(sentences)


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(
        f"`{path} = {str(value).lower() if isinstance(value, bool) else value}`" for path, value in values.items()
    )


def _passes(values: tuple[object, ...]) -> str:
    texts = [str(value) for value in values if value not in ("", None, [])]
    return f"; {' and '.join(dict.fromkeys(texts))} passes" if texts else ""


def _lines(sentences: list[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "flags": flags_page,
    "keys": keys_page,
    "text_to_image": text_to_image_page,
    "models": partial(page_in, ENGLISH),
    "models_zh": partial(page_in, CHINESE),
}

if __name__ == "__main__":
    print(PAGES[sys.argv[1]](), end="")
