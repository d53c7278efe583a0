"""One sample prompt: what can be asked for, and kohya's line of it (`a red cat --w 512 --d 42 --n blurry`)."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.sampling.samplers import sampler_fault

MAX_STEPS = 1000
MAX_SIDE = 16384
MAX_FRAMES = 4097
UNIT = 8  # sides are rounded down to its multiples, as kohya does


@dataclass(frozen=True)
class Prompt:
    """What to draw. None: the model's native size (at most 512), the run's sampler, seed or embedded guidance, or the
    training's shift.
    """

    prompt: str = ""
    negative_prompt: str = ""
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    sample_steps: int = 30
    scale: float = 7.5
    sample_sampler: str | None = None
    flow_shift: float | None = None
    guidance_scale: float | None = None
    control_image: tuple[str, ...] = ()  # files of reference images
    frame_count: int | None = None  # of a clip


@dataclass
class PromptEntry:
    """One prompt as somebody wrote it: its fields by kohya's names, what is wrong, and what is worth saying.

    unread: field -> what is wrong with the option of a line, which kohya's scripts pass over.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)

    def set_aside_idle(self, *, flow: bool, guided: bool = False, references: int = 0, clips: bool = False) -> None:
        """Set the fields aside that mean something to other models only.

        flow: whether the model learns a flow. guided: whether it is told a guidance. references: images that it is shown,
        which every prompt must name. clips: whether it draws clips.
        """
        meant = {SHIFT: flow, GUIDANCE: guided, CONTROL: references > 0, FRAMES: clips}
        files = self.fields.get(CONTROL, ()) if references else ()
        self.faults += [
            f"--ci ({CONTROL}): no such file: {file!r}" for file in files if not Path(file).expanduser().is_file()
        ]
        if references and CONTROL not in self.unread and (count := len(files)) != references:
            what = f"names {count} of {references} reference image{'s'[: references != 1]}"
            self.faults.append(f"--ci ({CONTROL}): {what}: a model that edits images is shown as many as in training")
        self.idle = [name for name in self.fields if name in IDLE and not meant.get(name)]
        for name, check in ((SHIFT, _shift), (GUIDANCE, _number), (FRAMES, _frames)):
            try:
                if meant[name] and name in self.fields:
                    self.fields[name] = check(self.fields[name])
            except ValueError as error:
                self.faults.append(f"{IDLE[name][0]} ({name}): {error}")

    def prompt(self) -> Prompt:
        """Return what is to be drawn; the entry must be settled and have no fault."""
        known = {field.name for field in fields_of(Prompt)} - set(self.idle)
        return Prompt(**{name: value for name, value in self.fields.items() if name in known})


SHIFT, GUIDANCE, CONTROL, FRAMES = "flow_shift", "guidance_scale", "control_image", "frame_count"
# kohya's field -> (option of a line, why it does nothing); its SDXL script reads them and draws without them too
IDLE: dict[str, tuple[str, str]] = {
    GUIDANCE: ("--g", "is embedded guidance, which this model does not have; --l (scale) is classifier-free guidance"),
    "controlnet_image": ("--cn", "is an image for a ControlNet, and ControlNets are not supported"),
    "cfg_trunc_ratio": ("--ctr", "is a guidance cut-off of Lumina"),
    "renorm_cfg": ("--rcfg", "is Lumina's guidance renormalisation"),
    SHIFT: ("--fs", "is a shift of flow-matching models"),
    CONTROL: ("--ci", "is a reference image of models that edit images"),
    FRAMES: ("--f", "is the number of frames of models that draw clips"),
}


def _integer_between(low: int, high: int) -> Callable[[Any], Any]:
    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"must be a whole number, got {value!r}")
        if not low <= value <= high:
            raise ValueError(f"must lie in {low} to {high}, got {value}")
        return value

    return check


_frames = _integer_between(1, MAX_FRAMES)


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"must be a number, got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"must be a finite number from 0 up, got {value}")
    return float(value)


def _shift(value: Any) -> float:
    try:
        shift = float(value)  # of a line it is still a text
    except (TypeError, ValueError):
        shift = math.nan
    if not 0 < shift < math.inf:
        raise ValueError(f"must be a finite number above 0, got {value!r}")
    return shift


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a text, got {value!r}")
    return value


def _sampler(value: Any) -> str:
    fault = sampler_fault(_text(value))
    if fault:
        raise ValueError(fault)
    return str(value)


def _any(value: Any) -> Any:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        return value
    raise ValueError(f"must be a number or a text, got {value!r}")


def _files(value: Any) -> tuple[str, ...]:
    files = [value] if isinstance(value, str) else value
    if not isinstance(files, list | tuple) or not all(isinstance(file, str) and file for file in files):
        raise ValueError(f"must be the name of a file, or a list of names, got {value!r}")
    return tuple(files)


# field -> its value, or a ValueError that says what it must be
FIELDS: dict[str, Callable[[Any], Any]] = {
    "prompt": _text,
    "negative_prompt": _text,
    "width": _integer_between(1, MAX_SIDE),
    "height": _integer_between(1, MAX_SIDE),
    "seed": _integer_between(0, 2**64 - 1),
    "sample_steps": _integer_between(1, MAX_STEPS),
    "scale": _number,
    "sample_sampler": _sampler,
    **dict.fromkeys(IDLE, _any),
    CONTROL: _files,
}

_INT, _FLOAT, _REST = r"\d+", r"[\d.]+", r".+"
# option -> pattern of its value, field, conversion; kohya ignores the case of the option
OPTIONS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "w": (_INT, "width", int),
    "h": (_INT, "height", int),
    "d": (_INT, "seed", int),
    "s": (_INT, "sample_steps", lambda text: max(1, min(MAX_STEPS, int(text)))),
    "l": (_FLOAT, "scale", float),
    "g": (_FLOAT, "guidance_scale", float),
    "n": (r".*", "negative_prompt", str),
    "ss": (_REST, "sample_sampler", str.strip),
    "cn": (_REST, "controlnet_image", str),
    "ctr": (_REST, "cfg_trunc_ratio", float),
    "rcfg": (_REST, "renorm_cfg", float),
    "fs": (_REST, SHIFT, str),
    "f": (_INT, FRAMES, int),
    "ci": (_REST, CONTROL, lambda text: [text.strip()]),
}


def parse_line(line: str) -> PromptEntry:
    """Split a line into the fields that it gives; text behind " --" that begins with no option is dropped, and said."""
    text, *pieces = line.split(" --")
    entry = PromptEntry({"prompt": text})
    for piece in pieces:
        name, _, value = piece.partition(" ")
        if name.lower() in OPTIONS:
            _take(entry, name.lower(), value)
        else:
            entry.notes.append(f"{f'--{piece}'!r} is neither an option nor part of the prompt; it is ignored")
    return entry


def _take(entry: PromptEntry, name: str, value: str) -> None:
    pattern, target, convert = OPTIONS[name]
    match = re.match(pattern, value)
    try:
        if not match:
            raise ValueError
        converted = convert(match[0])
    except ValueError:
        entry.unread[target] = f"--{name} does not take {value!r}"
        return
    behind = value[match.end() :]
    if behind.strip():  # kohya reads the number in "512px" too
        entry.notes.append(f"--{name} takes {match[0]!r}; {behind!r} after it is ignored")
    if target == "sample_sampler" and (wrong := sampler_fault(str(converted))):
        entry.unread[target] = f"--{name}: {wrong}"
        return
    if target == CONTROL:  # once for each reference
        converted = [*entry.fields.get(CONTROL, ()), *converted]
    set_field(entry, target, converted, f"--{name}")


def parse_table(table: Mapping[str, Any]) -> PromptEntry:
    """Take the fields of a TOML table or a JSON object."""
    entry = PromptEntry()
    for name, value in table.items():
        if name in FIELDS:
            set_field(entry, name, value, name)
        else:
            near = get_close_matches(name, FIELDS, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(FIELDS)}"
            entry.faults.append(f"no such key: {name!r} ({remedy})")
    return entry


def set_field(entry: PromptEntry, name: str, value: Any, called: str) -> None:
    """Give a prompt a field, or note why the value is none of it. called: how messages call the field."""
    try:
        entry.fields[name] = FIELDS[name](value)
    except ValueError as error:
        entry.faults.append(f"{called}: {error}")


def rounded(prompt: Prompt) -> str:
    """Say how a size that is no multiple of 8 is drawn; an empty string where it is one."""
    sides = [side for side in (prompt.width, prompt.height) if side]
    if all(side % UNIT == 0 for side in sides):
        return ""
    drawn = " x ".join(str(max(UNIT, side - side % UNIT)) for side in sides)
    return f"{' x '.join(map(str, sides))} px is sampled as {drawn}: sides are multiples of {UNIT}"


# --- Files of sample prompts, as kohya has them: .txt, a prompt a line; .toml, [prompt] and [[prompt.subset]]; .json


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
    references: int = 0,
    clips: bool = False,
    option: Callable[[str], str] = str,
    defaults: PromptEntry | None = None,
    passes_over: bool = False,
) -> PromptFile:
    """Read a file of prompts by its suffix.

    sampler: that of prompts that name none. flow: whether the model learns a flow. guided: whether it is told a
    guidance. references: how many images it is shown. clips: whether it draws clips. option: how messages call the settings
    sample.prompts and sample.sampler. defaults: what prompts take that do not say it themselves. passes_over: an option of a line with a value that it does not take is left out, as in kohya's
    scripts, and said. Raises: ConfigFault with every fault of the file, where there is nothing to draw, or where
    the sampler cannot be used: at the start of a run, not at its first picture.
    """
    entries, faults = _entries(path, option("sample.prompts"))
    if not entries and not faults:
        faults.append(Fault(option("sample.prompts"), f"{path} {_NONE}", _REMEDIES[path.suffix.lower()]))
    if passes_over:
        for _, entry in entries:
            if "sample_sampler" in entry.unread:
                entry.fields["sample_sampler"] = "ddim"
                entry.notes.append(f"{entry.unread.pop('sample_sampler')}; ddim is taken, as in kohya's scripts")
            entry.notes += [f"{what}; it is left out, as in kohya's scripts" for what in entry.unread.values()]
            entry.unread.clear()
    return _judged(entries, faults, sampler, flow, guided, references, clips, option, defaults)


def prompts_of_lines(
    lines: Sequence[str],
    where: str,
    sampler: str,
    *,
    flow: bool = False,
    guided: bool = False,
    references: int = 0,
    clips: bool = False,
    option: Callable[[str], str] = str,
    defaults: PromptEntry | None = None,
) -> PromptFile:
    """Take prompts from a command line, each written as a line of a file. where: the flag. As read_prompts does."""
    entries = [(f"{where} {number}", parse_line(line.strip())) for number, line in enumerate(lines, start=1)]
    return _judged(entries, [], sampler, flow, guided, references, clips, option, defaults)


def _judged(
    entries: _Placed,
    faults: list[Fault],
    sampler: str,
    flow: bool,
    guided: bool,
    references: int,
    clips: bool,
    option: Callable[[str], str],
    defaults: PromptEntry | None,
) -> PromptFile:
    """Make prompts of entries, and name all that is wrong with them. Raises ConfigFault."""
    if defaults is not None:
        for _, entry in entries:
            entry.fields = defaults.fields | entry.fields
    for _, entry in entries:
        entry.set_aside_idle(flow=flow, guided=guided, references=references, clips=clips)
    faults += [Fault(where, what) for where, entry in entries for what in (*entry.unread.values(), *entry.faults)]
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
    "": "write one prompt per line",
    ".txt": "write one prompt per line",
    ".toml": "write a table [[prompt.subset]] for each prompt, and what they share in [prompt]",
    ".json": "write a list of objects, one per prompt",
}


def _entries(path: Path, where: str) -> tuple[_Placed, list[Fault]]:
    read = _READERS.get(path.suffix.lower())
    if read is None:
        return [], [Fault(where, f"{path} is not a file of prompts", "give a .txt, .toml or .json file")]
    try:
        return read(path, path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        why = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        return [], [Fault(where, f"{path} cannot be read: {why}", "give a file of UTF-8 text")]
    except (ValueError, RecursionError) as error:
        return [], [Fault(str(path), f"cannot be read as {path.suffix[1:].upper()}: {error}")]


def _lines(path: Path, text: str) -> tuple[_Placed, list[Fault]]:
    """Read a prompt a line; empty lines and lines that begin with # are left out."""
    numbered = enumerate(re.split(r"\r\n|\r|\n", text), start=1)  # at line ends alone, not at U+2028 and its like
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
        if notes := places[name]:
            more = f" and {len(notes) - 1} more" if len(notes) > 1 else ""
            yield f"{notes[0]}{more}: {letter} ({name}) has no effect: it {why}"
