"""kohya's TOML of arguments: `--config_file` reads one, `--output_config` writes one.

Keys are the names of flags; tables only group them, their names mean nothing, as in kohya's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from difftrain.config.document import text_of, toml_of
from difftrain.config.schema.names import did_you_mean
from difftrain.config.spellings.other_names import meant
from difftrain.config.spellings.row import Row, convert
from difftrain.config.spellings.spelling import meaning
from difftrain.contracts.errors import ConfigFault, Fault

ITS_OWN = ("config", "config_file", "output_config", "dry_run", "debug_dataset")  # say what to do, not how to train
# keys of the settings that kohya's graphical interface saves, beside those of his script, which never reads them
OF_THE_INTERFACE = {
    "epoch": "max_train_steps or max_train_epochs say how long to train",
    "noise_offset_type": "noise_offset and multires_noise_iterations say which noise",
    "learning_rate_te": "SDXL's text encoders have learning_rate_te1 and learning_rate_te2",
    "no_token_padding": "it belongs to the scripts of Stable Diffusion 1 and 2",
    "stop_text_encoder_training": "it belongs to the scripts of Stable Diffusion 1 and 2",
}
Words = dict[str, list[str]]


def path_of(name: str) -> Path:
    """Return the file that `--config_file` names; .toml need not be written."""
    return Path(name if name.endswith(".toml") else f"{name}.toml")


def read(path: Path, table: Mapping[str, Row]) -> tuple[Words, list[Fault], list[str]]:
    """Read a file into the words that each flag would have on a command line, every fault of it, and notes.

    `switch = false` is as if the flag were not given, and so is `false` or `""` of any other.
    """
    try:
        tables = toml_of(text_of(path))
    except FileNotFoundError:
        return {}, [Fault(f"--config_file={path}", "no such file", "give a TOML file of arguments")], []
    except (OSError, ValueError) as error:
        return {}, [Fault(f"--config_file={path}", f"cannot be read as TOML: {error}")], []

    # all faults are told together, so that the file is mended in one go
    words: Words = {}
    faults: list[Fault] = []
    notes: list[str] = []
    for key, value in _flat(tables):
        origin = f"{path} {key}"
        flag = table.get(key)
        off = value is False or value in ("", [])
        if flag is None and key in OF_THE_INTERFACE:
            if not off:
                notes.append(f"{origin}: {value} has no effect, as in kohya's scripts: {OF_THE_INTERFACE[key]}")
        elif flag is None:
            remedy = meant(key) or did_you_mean(key, table) or "see --help for every flag"
            if off or _is_zero(value):
                notes.append(f"{origin}: no such flag, and {value!r} asks for nothing ({remedy})")
            else:
                faults.append(Fault(origin, "no such flag", remedy))
        elif flag.name in ITS_OWN and not (off or key == "debug_dataset"):
            faults.append(Fault(origin, "belongs on the command line", f"give {flag.option} there"))
        elif key in words:
            faults.append(Fault(origin, "appears in two tables", "give it once"))
        elif off and not (value == [] and flag.takes_many):
            if flag.kind != "switch" and "" not in flag.passes:
                notes.append(f"{origin}: {value!r} is taken as off, as if it were not given")
        elif (texts := _texts(flag, value)) is None:
            faults.append(Fault(origin, f"must be {_expected(flag)}, got {value!r}", meaning(flag, "kohya")))
        else:
            words[key] = texts
    return words, faults, notes


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


def _flat(tables: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in tables.items():
        pairs += list(value.items()) if isinstance(value, dict) else [(key, value)]
    return pairs


def _texts(flag: Row, value: Any) -> list[str] | None:
    """Return the words of a value, or None where it is of the wrong kind."""
    if flag.kind == "switch":
        return [] if value is True else None
    if flag.takes_many:
        values = value if isinstance(value, list) else [value]
        return [str(item) for item in values] if all(_is_word(item) for item in values) else None
    return [str(value)] if _is_word(value) and (flag.kind == "str" or value != "") else None


def _is_word(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _expected(flag: Row) -> str:
    kinds = {"switch": "true or false", "int": "a whole number", "float": "a number", "number": "a number"}
    return "a list of texts or numbers" if flag.takes_many else kinds.get(flag.kind, "a text")


def write(path: Path, words: Words, table: Mapping[str, Row]) -> None:
    """Write the words of a command line as a file that `read` takes. Raises ConfigFault where it exists already."""
    lines = [
        f"{name} = {_value(table[name], texts)}\n"
        for name, texts in words.items()
        if name not in ITS_OWN and not table[name].secret
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.writelines(lines)
    except FileExistsError:
        remedy = "choose a new name, or leave out --output_config to read it"
        raise ConfigFault([Fault("--output_config", f"{path} exists already", remedy)]) from None
    except OSError as error:
        raise ConfigFault([Fault("--output_config", f"{path} cannot be written: {error.strerror}")]) from None


def _value(flag: Row, texts: list[str]) -> str:
    if flag.kind == "switch":
        return "true"
    if flag.kind in ("int", "float", "number") and not texts[-1].endswith("%"):
        return repr(convert(flag, texts))
    values = [json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in texts]
    return f"[{', '.join(values)}]" if flag.takes_many else values[-1]
