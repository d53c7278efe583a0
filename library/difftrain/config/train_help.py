"""What --help of train.py prints, from the table of keys and the options."""

from __future__ import annotations

import textwrap

from difftrain.config.names import OPTIMIZERS_LATER
from difftrain.config.train_options import OPTIONS
from difftrain.config.train_rows import Row, every_table, not_built, rows, says
from difftrain.models.registry import LATER, UNTRAINED

_GAP = 42


def help_text(prog: str) -> str:
    """Write the help of the TOML door: options, then every key by table."""
    parts = [
        f"usage: {prog} --config FILE.toml [options] [--section.key value ...]\n",
        "Every key below is written in a TOML file, or as --section.key value, whose value is read as TOML has it, else as\n"
        "text. Lowest first, what counts is the default, the family's default, the file, the command line. A key of\n"
        "diffusion-pipe's flat files may stand at the top of the file too. Faults are all reported, with exit code 2.\n"
        "docs/train_toml.md says more.\n",
        "options\n"
        + "".join(
            _line(f"--{name}{' ' + each.takes if each.takes else ''}", each.help) for name, each in OPTIONS.items()
        ),
    ]
    for table in every_table():
        parts.append(f"[{table}] {says(table)}\n" + "".join(_line(_left(row), _right(row)) for row in rows(table)))
    waiting = ", ".join(
        [*(f"[model] type = '{name}'" for name in (*UNTRAINED, *LATER)), "[adapter]",
         *(f"[optimizer] type = '{name}'" for name in OPTIMIZERS_LATER), *(key.place for key in not_built()),
         "[optimization] pipeline_stages above 1", "[engine] type = 'deepspeed'"])  # fmt: skip
    parts.append(f"not built yet\n{textwrap.fill(waiting, 116, initial_indent='  ', subsequent_indent='  ')}\n")
    return "\n".join(parts)


def _left(row: Row) -> str:
    return f"{row.name}={row.values}"


def _right(row: Row) -> str:
    return row.help + (f" [{row.default}]" if row.default else "")


def _line(left: str, text: str) -> str:
    lines = textwrap.wrap(text, 76) or [""]
    gap = " " * _GAP
    if len(left) > _GAP - 4:
        return "\n".join([f"  {left}", *(gap + line for line in lines)]) + "\n"
    return f"  {left:<{_GAP - 2}}" + f"\n{gap}".join(lines) + "\n"
