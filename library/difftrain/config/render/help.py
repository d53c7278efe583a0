"""What --help prints in every door, from their tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from difftrain.config.render.keys import every_table, lines, not_built, says
from difftrain.config.schema.names import OPTIMIZERS_LATER
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import choices_of, default_of, section_class
from difftrain.config.spellings import text_to_image
from difftrain.config.spellings.flags import FLAGS, KOHYA, OURS
from difftrain.config.spellings.keys import OPTIONS
from difftrain.config.spellings.row import Row
from difftrain.config.spellings.spelling import meaning
from difftrain.config.toml import value_text
from difftrain.models.registry import LATER

_GAP = 42  # columns of what is typed
FORMS = {
    "int": "N", "float": "X", "number": "N|X%", "size": "W,H", "strs": "TEXT ...", "ints": "N ...", "floats": "X ...",
    "str": "TEXT", "pairs": "NAME=VALUE ...",
}  # fmt: skip


def flag_help(prog: str) -> str:
    """Write the help of a training door, a paragraph a section."""
    parts = [
        f"usage: {prog} --init_from_config=SIZE | --pretrained_model_name_or_path=PATH\n"
        "           --train_data_dir=DIR --resolution=W,H --output_dir=OUT [--flag=value ...]\n",
        "--key=value and --key value both work; no prefix of a name stands for it. Lowest first, what counts is the\n"
        "default, the file of --config, that of --config_file, the flag. Faults are all reported, with exit code 2.\n",
        _paragraph("general", "What is done", [flag for flag in (*OURS, *KOHYA) if _offered(flag) and not flag.to]),
    ]
    for section in TrainConfig.model_fields:
        flags = [flag for flag in FLAGS.values() if _offered(flag) and flag.to.lstrip("?").split(".")[0] == section]
        parts.append(_paragraph(section, section_class(section).__doc__ or "", flags))
    refused = ", ".join(
        f"{flag.option} ({meaning(flag, 'kohya')})" for flag in FLAGS.values() if flag.status == "refused"
    )
    parts.append(_wrapped("not offered", refused))
    return "\n".join(parts)


def text_to_image_help(prog: str) -> str:
    """Write the help of the door that takes the flags of diffusers' example."""
    render_entries = partial(entries, defaults=text_to_image.DEFAULTS)
    parts = [
        f"usage: {prog} --pretrained_model_name_or_path=PATH|ID --dataset_name=DIR|ID | --train_data_dir=DIR\n"
        "           [--flag=value ...]\n",
        "--key=value and --key value both work; no prefix of a name stands for it. Lowest first, what counts is the\n"
        "default, the file of --config, what accelerate's launcher says, the flag. Faults are all reported, with exit code 2.\n"
        "docs/text_to_image.md says more.\n",
        "flags of diffusers' example\n" + render_entries(flag for flag in text_to_image.DIFFUSERS if _offered(flag)),
        "ours\n" + render_entries(flag for flag in text_to_image.OURS if _offered(flag)),
    ]
    refused = [f"{flag.option} ({meaning(flag)})" for flag in text_to_image.DIFFUSERS if not _offered(flag)]
    return "\n".join([*parts, _wrapped("not offered", ", ".join(refused))])


def _offered(flag: Row) -> bool:
    return flag.status in ("offered", "nearest")


def _paragraph(title: str, says: str, flags: Iterable[Row]) -> str:
    return f"[{title}] {says.splitlines()[0]}\n" + entries(flags)


def entries(flags: Iterable[Row], defaults: Mapping[str, Any] | None = None) -> str:
    """Write a line or more for each flag: how it is spelt, what it means, its default. defaults: as default_text."""
    return "".join(_entry(*_spelt(flag, _with_default(meaning(flag), default_text(flag, defaults)))) for flag in flags)


_WIDEST = 100  # characters of a flag with its words, beside which nothing stands


def _spelt(flag: Row, explained: str) -> tuple[str, str]:
    """Return a flag with what follows its name, and what explains it: words that fill more than a line stand there."""
    spelt = form(flag)
    if len(flag.option + spelt) <= _WIDEST:
        return flag.option + spelt, explained
    return f"{flag.option}=NAME", f"{explained}; one of {spelt.removeprefix('=').replace('|', ', ')}"


def form(flag: Row) -> str:
    """Return what follows a flag's name: the words to choose from, or what kind of value it takes."""
    if flag.kind == "switch":
        return f"[={'|'.join(flag.choices)}]" if flag.choices else ""
    return f"={'|'.join(map(str, choices_of(flag.to) if _is_field(flag.to) else flag.choices)) or FORMS[flag.kind]}"


def _is_field(path: str) -> bool:
    return bool(path) and not path.startswith("?")


def default_text(flag: Row, defaults: Mapping[str, Any] | None = None) -> str:
    """Name the default where there is one to name. defaults: "section.field" -> what a door takes in place of a field's."""
    if flag.kind == "switch":
        return ""
    value = flag.default
    if value is None and _is_field(flag.to):
        value = (defaults or {}).get(flag.to, default_of(flag.to))
    if value in (None, "", (), {}):
        return ""
    return value if isinstance(value, str) else value_text(value)


def _wrapped(title: str, text: str) -> str:
    return (
        f"[{title}]\n{textwrap.fill(text, 116, initial_indent='  ', subsequent_indent='  ', break_on_hyphens=False)}\n"
    )


def key_help(prog: str) -> str:
    """Write the help of the TOML door: options, then every key by table."""
    parts = [
        f"usage: {prog} --config FILE.toml [options] [--section.key value ...]\n",
        "Every key below is written in a TOML file, or as --section.key value, whose value is read as TOML has it, else as\n"
        "text. Lowest first, what counts is the default, the family's default, the file, the command line. A key of\n"
        "diffusion-pipe's flat files may stand at the top of the file too. Faults are all reported, with exit code 2.\n"
        "docs/train_toml.md says more.\n",
        "options\n" + "".join(_entry(option_form(row), meaning(row, "train")) for row in OPTIONS.values()),
    ]
    for table in every_table():
        rows = (_entry(f"{line.name}={line.values}", _with_default(line.help, line.default)) for line in lines(table))
        parts.append(f"[{table}] {says(table)}\n" + "".join(rows))
    waiting = ", ".join(
        [*(f"[model] type = '{name}'" for name in LATER),
         *(f"[optimizer] type = '{name}'" for name in OPTIMIZERS_LATER), *(key.toml_key for key in not_built()),
         "[engine] type = 'deepspeed'"])  # fmt: skip
    parts.append(f"not built yet\n{textwrap.fill(waiting, 116, initial_indent='  ', subsequent_indent='  ')}\n")
    return "\n".join(parts)


def option_form(row: Row) -> str:
    """Return an option of train.py with what may follow it."""
    return row.option + (form(row) if row.kind == "switch" else f" {row.takes}".rstrip())


def _with_default(text: str, default: str) -> str:
    return f"{text} [{default}]" if default else text


def _entry(left: str, text: str) -> str:
    """Write a line or more: what is typed on the left, what it means beside it, or below where that is too long."""
    wrapped = textwrap.wrap(text, 76) or [""]
    gap = " " * _GAP
    if len(left) > _GAP - 4:
        return "\n".join([f"  {left}", *(gap + line for line in wrapped)]) + "\n"
    return f"  {left:<{_GAP - 2}}" + f"\n{gap}".join(wrapped) + "\n"
