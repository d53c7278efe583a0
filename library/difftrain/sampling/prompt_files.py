"""Files of sample prompts, as kohya has them: .txt, a prompt a line; .toml, [prompt] and [[prompt.subset]]; .json."""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.sampling.prompts import IDLE, Prompt, PromptEntry, parse_line, parse_table, rounded
from difftrain.sampling.samplers import sampler_fault

_NONE = "holds no prompt"


@dataclass(frozen=True)
class PromptFile:
    """What a file asks for, and what is worth saying about it, a sentence each."""

    prompts: tuple[Prompt, ...] = ()
    notes: tuple[str, ...] = ()


def read_prompts(
    path: Path,
    sampler: str = "ddim",
    *,
    flow: bool = False,
    guided: bool = False,
    option: Callable[[str], str] = str,
) -> PromptFile:
    """Read a file of prompts by its suffix.

    sampler: that of prompts that name none. flow: whether the model learns a flow. guided: whether it is told a
    guidance. option: how messages call the settings sample.prompts and sample.sampler. Raises: ConfigFault with every fault of the file, where there is nothing to draw, or where the sampler
    cannot be used: at the start of a run, not at its first picture.
    """
    entries, faults = _entries(path, option("sample.prompts"))
    for _, entry in entries:
        entry.settle(flow=flow, guided=guided)
    faults += [Fault(where, what) for where, entry in entries for what in entry.faults]
    if not entries and not faults:
        faults.append(Fault(option("sample.prompts"), f"{path} {_NONE}", _REMEDIES[path.suffix.lower()]))
    for where, entry in entries:
        own = entry.fields.get("sample_sampler")
        if own and (fault := sampler_fault(own, flow=flow)):
            faults.append(Fault(where, fault))
    unusable = sampler_fault(sampler, flow=flow)
    if unusable:
        faults.append(Fault(option("sample.sampler"), unusable))
    if faults:
        raise ConfigFault(faults)
    prompts = tuple(entry.prompt() for _, entry in entries)
    return PromptFile(prompts, tuple(_notes(entries, prompts)))


_Placed = list[tuple[str, PromptEntry]]  # where a prompt stands, and the prompt
_REMEDIES = {
    "": "write a prompt a line",
    ".txt": "write a prompt a line",
    ".toml": "write a table [[prompt.subset]] for each prompt, and what they share in [prompt]",
    ".json": "write a list of objects, a prompt each",
}


def _entries(path: Path, where: str) -> tuple[_Placed, list[Fault]]:
    read = _READERS.get(path.suffix.lower())
    if read is None:
        return [], [Fault(where, f"{path} is no file of prompts", "give a .txt, .toml or .json file")]
    try:
        return read(path, path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        why = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        return [], [Fault(where, f"{path} cannot be read: {why}", "give a file of UTF-8 text")]
    except (ValueError, RecursionError) as error:
        return [], [Fault(str(path), f"cannot be read as {path.suffix[1:].upper()}: {error}")]


def _lines(path: Path, text: str) -> tuple[_Placed, list[Fault]]:
    """Read a prompt a line; empty lines and lines that begin with # are left out."""
    numbered = enumerate(text.splitlines(), start=1)
    kept = [(n, line) for n, line in numbered if line.strip() and not line.startswith("#")]
    return [(f"{path}, line {n}", parse_line(line.strip())) for n, line in kept], []


def _json(path: Path, text: str) -> tuple[_Placed, list[Fault]]:
    """Read a list of objects; a text among them is a line."""
    data = json.loads(text)
    if not isinstance(data, list):
        return [], [Fault(str(path), f"must be a list, got {_kind(data)}", _REMEDIES[".json"])]
    entries, faults = [], []
    for number, item in enumerate(data, start=1):
        where = f"{path}, entry {number}"
        if isinstance(item, str):
            entries.append((where, parse_line(item)))
        elif isinstance(item, dict):
            entries.append((where, parse_table({key: value for key, value in item.items() if key != "subset"})))
        else:
            faults.append(Fault(where, f"must be an object or a text, got {_kind(item)}", _REMEDIES[".json"]))
    return entries, faults


def _toml(path: Path, text: str) -> tuple[_Placed, list[Fault]]:
    """Read [[prompt.subset]] tables over the defaults in [prompt]; a subset's own value wins."""
    data = tomllib.loads(text)
    faults = [Fault(f"{path} {key}", "no such table", "known is [prompt]") for key in data if key != "prompt"]
    shared = data.get("prompt", {})
    if not isinstance(shared, dict):
        return [], [*faults, Fault(f"{path} prompt", f"must be a table, got {_kind(shared)}", _REMEDIES[".toml"])]
    subsets = shared.pop("subset", [])
    if not isinstance(subsets, list) or not all(isinstance(subset, dict) for subset in subsets):
        return [], [*faults, Fault(f"{path} prompt.subset", "must be tables", _REMEDIES[".toml"])]
    defaults = parse_table(shared)
    faults += [Fault(f"{path} [prompt]", what) for what in defaults.faults]
    entries = []
    for number, subset in enumerate(subsets, start=1):
        own = parse_table(subset)
        entries.append((f"{path} [[prompt.subset]] {number}", PromptEntry(defaults.fields | own.fields, own.faults)))
    return entries, faults


_READERS: dict[str, Callable[[Path, str], tuple[_Placed, list[Fault]]]] = {
    "": _lines,
    ".txt": _lines,
    ".toml": _toml,
    ".json": _json,
}


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), f"{value!r}")


def _notes(entries: _Placed, prompts: tuple[Prompt, ...]) -> Iterator[str]:
    """Say what was left out, what is rounded, and, once each, which options do nothing here."""
    for (where, entry), prompt in zip(entries, prompts, strict=True):
        yield from (f"{where}: {note}" for note in entry.notes)
        if size := rounded(prompt):
            yield f"{where}: {size}"
    places: dict[str, list[str]] = defaultdict(list)
    for where, entry in entries:
        for name in entry.idle:
            places[name].append(where)
    for name, (letter, why) in IDLE.items():
        if found := places[name]:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            yield f"{found[0]}{more}: {letter} ({name}) has no effect: it {why}"
