"""The `difftrain` command: what is done with models, data and runs beside training them.

A command is one line of the registry; its module is imported when it is called, so that the quick ones stay quick.
"""

from __future__ import annotations

import sys
from importlib import import_module

import difftrain
from difftrain.config.door import guard
from difftrain.config.schema.names import did_you_mean
from difftrain.contracts.errors import ConfigFault, Fault

# name -> ("module:function" of argv, what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("difftrain.cli.init:main", "sd3_light: a folder to begin SD3-Light with, its transformer random"),
    "export": ("difftrain.cli.export:main", "write weights in another layout or precision, or random ones"),
    "dataset": ("difftrain.cli.dataset:main", "inspect: a page of a data set as training will see it"),
    "cache": ("difftrain.cli.cache:main", "build, info, verify, repair, gc, export: what was encoded once"),
    "families": (
        "difftrain.cli.documents:print_families",
        "list the families of models: parts, tasks, sizes, what each trains",
    ),
    "report": ("difftrain.cli.documents:build_report", "RUN_DIR: build report.html anew from the files of a run"),
    "schema": ("difftrain.cli.documents:print_schema", "print the JSON schema of the TOML, for editors"),
    "doctor": ("difftrain.cli.doctor:main", "say what is installed, which devices are there, and check them"),
}
LATER = ("generate", "compare")


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--version"]:
        print(difftrain.__version__)
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] not in COMMANDS:
        return guard("difftrain", lambda: _refuse(words[0]))
    module, _, function = COMMANDS[words[0]][0].partition(":")
    code: int = getattr(import_module(module), function)(words[1:])
    return code


def usage() -> str:
    """Return the help of the command."""
    lines = ["usage: difftrain COMMAND ...", ""]
    lines += [f"  {name:<8}  {says}" for name, (_, says) in COMMANDS.items()]
    lines += [
        "",
        f"not built yet: {', '.join(LATER)}",
        "training: sd_scripts_xl/train.py --help, sdxl_pretrain.py --help",
    ]
    return "\n".join(lines)


def _refuse(word: str) -> int:
    if word in LATER:
        raise ConfigFault([Fault(f"difftrain {word}", "is not built yet", f"built are {', '.join(COMMANDS)}")])
    remedy = did_you_mean(word, (*COMMANDS, *LATER)) or f"known are {', '.join((*COMMANDS, *LATER))}"
    raise ConfigFault([Fault(repr(word), "no such command", remedy)])
