"""`difftrain completion bash|zsh`: the script by which a shell completes commands, flags, values, recipes and files.

The training commands' words come from their tables, those of other commands from their --help, which tables make too: a
new flag or command is completed the day it is added. The script holds all words, so that no key waits for Python.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from importlib import resources

from difftrain.cli import COMMANDS
from difftrain.cli import main as run_command
from difftrain.cli.words import asks_for_help, exactly
from difftrain.config.door import guard
from difftrain.config.render.help import FORMS, form
from difftrain.config.render.keys import every_table, lines
from difftrain.config.schema.names import did_you_mean
from difftrain.config.spellings import text_to_image
from difftrain.config.spellings.flags import FLAGS
from difftrain.config.spellings.keys import OPTIONS
from difftrain.config.spellings.row import Row
from difftrain.contracts.errors import ConfigFault, Fault

USAGE = """usage: difftrain completion bash|zsh

Print the script by which the shell completes difftrain: commands, flags, their values, recipes, files.
  bash: eval "$(difftrain completion bash)"        in ~/.bashrc
  zsh:  eval "$(difftrain completion zsh)"         in ~/.zshrc, after compinit"""
FILES, NUMBER, SWITCH = "@files", "@number", "@switch"  # what a flag takes where that is no list of words
_NO_WORDS = {*FORMS.values(), "X", "TEXT", "..."}
_WORD = re.compile(r"[A-Za-z0-9_][\w.+-]*")
_HELP_FLAG = re.compile(r"^  (--[a-z]\w*)(?:[= ](\S+))?", re.MULTILINE)
_USAGE_FLAG = re.compile(r"(--[a-z]\w*)(?:=([^\s\]]+))?")

SHELLS = ("bash", "zsh")  # completion.SHELL beside this file is how each asks for the words
_OF_COMMANDS = ("recipes", "dataset", "cache")  # commands whose first word is a command too

Flags = dict[str, str]  # "--flag" -> the words that it takes, separated by spaces, or FILES, NUMBER, SWITCH


def main(argv: list[str]) -> int:
    """Print the script of a shell; return the exit code."""
    if asks_for_help(argv):
        print(USAGE)
        return 0

    def work() -> int:
        (shell,) = exactly("completion", argv, "bash|zsh")
        if shell not in SHELLS:
            remedy = did_you_mean(shell, SHELLS) or f"one of {', '.join(SHELLS)}"
            raise ConfigFault([Fault(repr(shell), "no script for this shell", remedy)])
        print(script(shell), end="")
        return 0

    return guard("difftrain completion", work)


# --- the words: by topic, a command or a command and its first word


def words() -> dict[str, tuple[str, ...]]:
    """Return what may follow a topic beside flags; "" is the command line's first word."""
    from difftrain.cli import cache, init, recipes

    return {
        "": tuple(COMMANDS),
        "recipes": ("copy",),
        "recipes copy": tuple(recipes.shipped()),
        "init": init.KINDS,
        "dataset": ("inspect",),
        "cache": ("build", *cache.COMMANDS),
        "completion": SHELLS,
    }


def flags_of_topics() -> dict[str, Flags]:
    """Return the flags of every topic that has some."""
    keys: Flags = {row.option: FILES if row.takes else SWITCH for row in OPTIONS.values()}
    keys |= {f"--{table}.{line.name}": takes(line.values) for table in every_table() for line in lines(table)}
    by_function = {
        "train": keys,
        "train_sd3_light": keys,
        "train_sdxl": _rows(FLAGS),
        "train_sdxl_network": _rows(FLAGS),
        "train_text_to_image": _rows(text_to_image.FLAGS),
    }
    called = {name: target.partition(":")[2] for name, (target, _) in COMMANDS.items()}
    topics: dict[str, Flags] = {
        "": {"--help": SWITCH, "--version": SWITCH},
        **{name: by_function[function] for name, function in called.items() if function in by_function},
        "dataset inspect": _rows(FLAGS) | _of_help(["dataset", "inspect"]),
        "cache build": _rows(FLAGS),
    }
    of_commands = [f"{name} {word}" for name in _OF_COMMANDS for word in words()[name]]
    for topic in (*(name for name in COMMANDS if name not in _OF_COMMANDS), *of_commands):
        if topic not in topics and (flags := _of_help(topic.split())):
            topics[topic] = flags
    return topics


def _rows(table: Mapping[str, Row]) -> Flags:
    offered = (row for row in table.values() if row.status in ("offered", "nearest"))
    return {row.option: SWITCH if row.kind == "switch" else takes(form(row)[1:]) for row in offered}


def _of_help(command: list[str]) -> Flags:
    """Return the flags that a command's --help lists or its usage names."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_command([*command, "--help"])
    text = printed.getvalue()
    matches = [*_HELP_FLAG.findall(text), *_USAGE_FLAG.findall(text.partition("\n\n")[0])]
    flags: Flags = {}
    for flag, value in matches:
        if flag != "--flag":  # "[--flag=value ...]"
            flags.setdefault(flag, takes(value) if value else SWITCH)
    return flags


def takes(values: str) -> str:
    """Return what a flag takes, by how its help spells it: "fp16|bf16" is words, "N" a number, "FILE" a path or text."""
    parts = values.split("|")
    if all(part in ("N", "X", "X%", "N%", "W,H", "N ...", "X ...") for part in parts):
        return NUMBER
    listed = [part for part in parts if part not in _NO_WORDS and _WORD.fullmatch(part) and not part.isupper()]
    return " ".join(listed) or FILES


# --- the scripts: the words as functions of both shells, and what asks them in each


def script(shell: str) -> str:
    """Return the script of a shell."""
    topics = flags_of_topics()
    listed = {
        topic: " ".join(f"{flag}=" if what != SWITCH else flag for flag, what in flags.items())
        for topic, flags in topics.items()
    }
    parts = [
        f"# {shell} completion of difftrain, written by `difftrain completion {shell}`",
        _function("_difftrain_words", {topic: " ".join(values) for topic, values in words().items()}),
        _function("_difftrain_flags", listed),
        _function("_difftrain_values", dict(_values(topics))),
    ]
    return "\n".join(
        [*parts, resources.files("difftrain.cli").joinpath(f"completion.{shell}").read_text(encoding="utf-8")]
    )


def _values(topics: Mapping[str, Flags]) -> Iterator[tuple[str, str]]:
    """Yield 'topic --flag', or '* --flag' where it is the same in every topic, and what the flag takes.

    What is left are paths.
    """
    for flag in dict.fromkeys(flag for flags in topics.values() for flag in flags):
        kinds = {topic: flags[flag] for topic, flags in topics.items() if flag in flags}
        if len(set(kinds.values())) == 1:
            kinds = {"*": next(iter(kinds.values()))}
        yield from ((f"{topic} {flag}", what) for topic, what in kinds.items() if what != FILES)


def _function(name: str, answers: Mapping[str, str]) -> str:
    """Write a shell function that answers its argument; equal answers share a branch, a leading * is any topic."""
    by_answer: dict[str, list[str]] = {}
    for question, answer in answers.items():
        quoted = f'*"{question[1:]}"' if question.startswith("*") else f'"{question}"'
        by_answer.setdefault(answer, []).append(quoted)
    branches = [f'    {"|".join(questions)}) echo "{answer}" ;;' for answer, questions in by_answer.items()]
    return "\n".join([f"{name}() {{", '  case "$1" in', *branches, "  esac", "}"])
