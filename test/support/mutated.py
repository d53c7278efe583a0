"""Configurations as nobody means them: recipes and command lines with some of their values made hostile, by a seed.

Each case runs as `--dry_run` in a process forked from one that has imported what it needs, under a limit of time. What must
not come of it: a traceback, or no end.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from difftrain.config.schema.validate import fields
from difftrain.config.spellings.flags import FLAGS
from difftrain.config.spellings.keys import KEYS
from difftrain.testing.pictures import write_folder

ROOT = Path(__file__).resolve().parents[2]
RECIPES = tuple(
    path
    for path in sorted((ROOT / "configs").glob("*/*.toml"))
    if "[[directory]]" not in path.read_text(encoding="utf-8")
)
LIMIT_S = 60.0
NUMBERS = (
    0, -1, 1, 2, 3, 7, -13, 1000, 16384, 65535, 10**6, 2**31, 2**53, 2**63 - 1, -(2**63), 10**30, 0.0, -0.5, 0.1, 0.999,
    1.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS = (
    "", " ", "0", "-1", "nan", "1e999", "auto", "latest", "tiny", "no", "\u2028", "\x00", "\x1b[31m", "a" * 5000, "../..",
    "/", "/dev/null", "/dev/null/x", "/dev/full/y", "~nobody/x", "{", "{data.dirs}", "%s%n", "100%", "a/b", "org/name@rev/sub",
    "http://127.0.0.1:9/x", "s3://nowhere/x", "adafactor:1e-3", "torch.optim.Adam", "os.system", "key=__import__('os')",
)  # fmt: skip
FLAG_TEXTS = tuple(text for text in TEXTS if "\x00" not in text)  # no command line holds one


@dataclass(frozen=True)
class Case:
    """One start: the entry point's command, and its words."""

    command: str
    words: tuple[str, ...]


@dataclass
class Counts:
    """What came of many cases. silent: exit code 1, and not a word."""

    codes: Counter[int] = field(default_factory=Counter)
    tracebacks: list[tuple[Case, str]] = field(default_factory=list)
    hangs: list[Case] = field(default_factory=list)
    silent: list[Case] = field(default_factory=list)

    def __str__(self) -> str:
        codes = ", ".join(f"{count} exit {code}" for code, count in sorted(self.codes.items()))
        return f"{len(self.tracebacks)} tracebacks, {len(self.hangs)} without end, {len(self.silent)} silent ({codes})"


def prepared(folder: Path) -> Path:
    """Write pictures and a dataset's file that sound configurations are about; return the folder."""
    write_folder(folder / "pictures" / "2_cat", [(64, 64), (48, 64), (64, 40)])
    (folder / "data.toml").write_text(f"resolutions = [64]\n[[directory]]\npath = '{folder / 'pictures'}'\n")
    (folder / "prompts.txt").write_text("a cat --d 1\n")
    return folder


def recipe_cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    """Yield mutations of the recipes, each written into the folder."""
    rng = random.Random(f"recipes {seed}")
    for number in range(count):
        tables = _sound(tomllib.loads(rng.choice(RECIPES).read_text(encoding="utf-8")), folder)
        for _ in range(rng.choice((1, 1, 2, 3))):
            _mutate(tables, rng)
        content = _written(tables).encode("utf-8", "surrogatepass")
        if rng.random() < 0.15:
            content = _torn(content, rng)
        path = folder / f"case-{number:05d}.toml"
        path.write_bytes(content)
        yield Case("train", (f"--config={path}", "--dry_run"))


def line_cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    """Yield command lines of kohya's flags: some that make a run, and some that nobody means."""
    rng = random.Random(f"lines {seed}")
    names = list(FLAGS)
    for _ in range(count):
        words = [
            "--init_from_config=tiny", f"--train_data_dir={folder / 'pictures'}", f"--output_dir={folder / 'out'}",
            "--resolution=64,64", f"--cache_dir={folder / 'cache'}", "--max_train_steps=2", "--dry_run",
        ]  # fmt: skip
        for _ in range(rng.choice((1, 2, 3, 6))):
            name = rng.choice(names)
            if name in ("demo", "config", "output_config"):  # what they do is no dry run's
                continue
            value = rng.choice((rng.choice(FLAG_TEXTS), repr(rng.choice(NUMBERS)), repr(rng.choice(NUMBERS))))
            takes = FLAGS[name].kind != "switch" or rng.random() < 0.1
            words.append(f"--{name}={value}" if takes else f"--{name}")
        if rng.random() < 0.1:
            del words[rng.randrange(len(words) - 1)]
        yield Case("sdxl", tuple(words))


# --- recipes as trees


def _sound(tables: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Let a recipe name what is here: tiny random weights, a few pictures."""
    model = tables.setdefault("model", {})
    for name in ("path", "pretrained", "diffusers_path", "checkpoint_path", "transformer_path", "vae", "text_encoders"):
        model.pop(name, None)
    model["init_from_config"] = "tiny"
    for name in ("demo", "repa", "eval", "eval_datasets"):
        tables.pop(name, None)
    if "prompts" in tables.get("sample", {}):
        tables["sample"]["prompts"] = str(folder / "prompts.txt")
    tables["output"] = {"output_dir": str(folder / "out"), "dataset": str(folder / "data.toml")}
    tables.pop("save", None)
    tables.pop("data", None)
    return tables


def _mutate(tables: dict[str, Any], rng: random.Random) -> None:
    places = [(table, key) for table in (tables, *_inner(tables)) for key in table]
    table, key = rng.choice(places)
    match rng.randrange(8):
        case 0:
            del table[key]
        case 1:
            table[key + rng.choice("sx_é")] = table.pop(key)
        case 2 | 3:
            name = rng.choice([*fields(), *(f"{each.home}.{each.name}" for each in KEYS)])
            section, _, setting = name.rpartition(".")
            home = tables.setdefault(section, {}) if section else tables
            (home if isinstance(home, dict) else tables)[setting] = _value(rng)
        case 4:
            table[key] = copy.deepcopy(tables.get(rng.choice(list(tables)), 1))
        case _:
            table[key] = _value(rng)


def _inner(tables: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for value in tables.values():
        if isinstance(value, dict):
            yield value
            yield from _inner(value)


def _value(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(12):
        case 0 | 1 | 2 | 3:
            return rng.choice(NUMBERS)
        case 4 | 5 | 6:
            return rng.choice(TEXTS)
        case 7:
            return rng.random() < 0.5
        case 8:
            return _Raw(
                rng.choice(("1979-05-27T07:32:00Z", "07:32:00", "[[[[1]]]]", "[" * 3000 + "]" * 3000, "9" * 5000))
            )
        case 9 if depth < 3:
            return {rng.choice("abc"): _value(rng, depth + 1)}
        case _ if depth < 3:
            return [_value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 3)))]
    return 0


class _Raw(str):
    """TOML as it is written."""


def _written(tables: dict[str, Any], name: str = "") -> str:
    """Write tables; values that no TOML holds are left to the reader to refuse."""
    plain = [f"{json.dumps(key)} = {_text(value)}\n" for key, value in tables.items() if not isinstance(value, dict)]
    below = [
        _written(value, f"{name}.{json.dumps(key)}" if name else json.dumps(key))
        for key, value in tables.items()
        if isinstance(value, dict)
    ]
    return (f"[{name}]\n" if name else "") + "".join(plain) + "".join(below)


def _text(value: Any) -> str:
    if isinstance(value, _Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _torn(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    match rng.randrange(4):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + bytes(rng.randrange(256) for _ in range(4)) + content[at:]
        case 2:
            return content + content
    return content + b"\n" + b"a." * rng.choice((30, 3000)) + b"b = 1\n"


# --- running them


def counted(cases: Sequence[Case] | Iterator[Case], folder: Path, limit_s: float = LIMIT_S) -> Counts:
    """Run each case in a process forked from this one."""
    _import(folder)
    counts = Counts()
    for case in cases:
        code, said = _run(case, folder, limit_s)
        if code is None:
            counts.hangs.append(case)
            continue
        counts.codes[code] += 1
        if "Traceback (most recent call last)" in said or code < 0:
            counts.tracebacks.append((case, said))
        elif code and not said.strip():
            counts.silent.append(case)
    return counts


def _import(folder: Path) -> None:
    """Import what dry runs import, so that their processes need not: a sound one of each family says what that is."""
    if _imported:
        return
    from difftrain.cli import train  # noqa: F401

    for family in ("sdxl", "sd3", "flux"):
        path = folder / f"sound-{family}.toml"
        tables = {"model": {"type": family, "init_from_config": "tiny"}, "training": {"epochs": 1}}
        path.write_text(_written(_sound(tables, folder)))
        _, said = _run(Case("train", (f"--config={path}", "--dry_run")), folder, LIMIT_S, tell=True)
        for name in said.rpartition("\x1e")[2].split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    _imported.append(True)


_imported: list[bool] = []


def _run(case: Case, folder: Path, limit_s: float, *, tell: bool = False) -> tuple[int | None, str]:
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if not pid:
            _child(case, folder, output.fileno(), tell=tell)
        code = _ended(pid, limit_s)
        output.seek(0)
        return code, output.read().decode("utf-8", "replace")


def _child(case: Case, folder: Path, output: int, *, tell: bool) -> None:
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.environ |= {"XDG_CACHE_HOME": str(folder / "user"), "HF_HUB_OFFLINE": "1"}
        from difftrain.cli import train

        start = {"train": train.train, "sdxl": train.train_sdxl}[case.command]
        code = start(list(case.words))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            if tell:  # what was imported
                print("\x1e" + "\n".join(name for name in sys.modules if name.isascii() and name != "__main__"))
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _ended(pid: int, limit_s: float) -> int | None:
    """Wait for a process; None where it was stopped, with all that it began."""
    ended = os.pidfd_open(pid)
    try:
        in_time = bool(select.select([ended], [], [], limit_s)[0])
    finally:
        os.close(ended)
    if not in_time:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if in_time else None


def slowest(cases: Sequence[Case], folder: Path, limit_s: float) -> list[tuple[float, Case]]:
    """Return the cases by the time that they take, the longest first: for whoever looks for what does not end."""
    _import(folder)
    timed = []
    for case in cases:
        began = time.monotonic()
        _run(case, folder, limit_s)
        timed.append((time.monotonic() - began, case))
    return sorted(timed, key=lambda each: -each[0])
