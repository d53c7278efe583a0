"""What --help prints, from the table and the sections."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from difftrain.config.flag import Flag
from difftrain.config.flags import FLAGS, KOHYA, OURS
from difftrain.config.sections import TrainConfig
from difftrain.config.toml import value_text
from difftrain.config.validate import choices_of, default_of, section_class

WORDS = {
    "int": "N", "float": "X", "number": "N", "size": "W,H", "strs": "TEXT ...", "ints": "N ...", "floats": "X ...",
    "str": "TEXT", "pairs": "NAME=VALUE ...",
}  # fmt: skip


def help_text(prog: str) -> str:
    """Write the help of a training door, a paragraph a section."""
    parts = [
        f"usage: {prog} --init_from_config=SIZE | --pretrained_model_name_or_path=PATH\n"
        "           --train_data_dir=DIR --resolution=W,H --output_dir=OUT [--flag=value ...]\n",
        "--key=value and --key value both work; no prefix of a name stands for it. Lowest first, what counts is the\n"
        "default, the file of --config, that of --config_file, the flag. Faults are all reported, with exit code 2.\n",
        _paragraph("general", "What is done", [flag for flag in (*OURS, *KOHYA) if _offered(flag) and not flag.to]),
    ]
    for section in TrainConfig.model_fields:
        flags = [flag for flag in FLAGS.values() if _offered(flag) and flag.to.split(".")[0] == section]
        parts.append(_paragraph(section, section_class(section).__doc__ or "", flags))
    waiting = ", ".join(flag.option for flag in FLAGS.values() if flag.status == "later")
    refused = ", ".join(f"{flag.option} ({flag.help})" for flag in FLAGS.values() if flag.status == "refused")
    parts.append(_wrapped("not built yet", waiting) + _wrapped("not offered", refused))
    return "\n".join(parts)


def _offered(flag: Flag) -> bool:
    return flag.status in ("implemented", "nearest")


def _paragraph(title: str, says: str, flags: Iterable[Flag]) -> str:
    return f"[{title}] {says.splitlines()[0]}\n" + entries(flags)


def entries(flags: Iterable[Flag]) -> str:
    """Write a line or more for each flag: how it is spelt, what it means, its default."""
    return "".join(map(_entry, flags))


def _entry(flag: Flag) -> str:
    choices = choices_of(flag.to) if flag.to else ()
    word = "" if flag.kind == "switch" else "=" + ("|".join(map(str, choices)) or WORDS[flag.kind])
    text = flag.help + default_text(flag)
    left = f"  {flag.option}{word}"
    lines = textwrap.wrap(text, 76)
    gap = " " * 42
    if len(left) > 40:
        return "\n".join([left, *(gap + line for line in lines)]) + "\n"
    return f"{left:<42}" + f"\n{gap}".join(lines) + "\n"


def default_text(flag: Flag) -> str:
    """Name the default where there is one to name."""
    if flag.kind == "switch" or not flag.to or (value := default_of(flag.to)) in (None, "", (), {}):
        return ""
    return f" [{value if isinstance(value, str) else value_text(value)}]"


def _wrapped(title: str, text: str) -> str:
    return (
        f"[{title}]\n{textwrap.fill(text, 116, initial_indent='  ', subsequent_indent='  ', break_on_hyphens=False)}\n"
    )
