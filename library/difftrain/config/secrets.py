"""Keep tokens out of everything that is written: they move to the environment, and what is kept is redacted."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from difftrain.config.spellings.flags import FLAGS

REDACTED = "***"
WEBHOOK = "DIFFTRAIN_WEBHOOK_URL"
SECRET_FLAGS = {f"--{flag.name}": flag.secret for flag in FLAGS.values() if flag.secret}
SECRET_VARIABLES = (*SECRET_FLAGS.values(), "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN")
_SHAPES = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,})")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")

_NAMES = re.compile(r"(?:^|[._])(?:key|token|secret|password|webhook_url)$", re.IGNORECASE)
KNOWN = {
    "hf_token": "HF_TOKEN",
    "huggingface_token": "HF_TOKEN",
    "wandb_api_key": "WANDB_API_KEY",
    "webhook_url": WEBHOOK,
}
_kept: set[str] = set()  # variables that this process moved something to


def redact(argv: Iterable[str]) -> list[str]:
    """Return a command line without its tokens: what records of a run may hold."""
    out: list[str] = []
    hidden = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if hidden and not word.startswith("--"):
            out.append(REDACTED)
        elif equals and is_secret(name):
            out.append(f"{name}={REDACTED}")
        else:
            out.append(redact_text(word))
        hidden = is_secret(word)
    return out


def is_secret(option: str) -> bool:
    """Tell an option that holds a token: --monitoring.wandb_api_key, or what is meant by --wandb_api_key."""
    return option.startswith("--") and (
        option[2:] in KNOWN or option in SECRET_FLAGS or ("." in option and bool(_NAMES.search(option)))
    )


def redact_text(text: str) -> str:
    """Return text without any token that this process knows of, or that looks like one, and without logins in addresses."""
    for variable in (*SECRET_VARIABLES, *_kept):
        value = os.environ.get(variable, "")
        if len(value) >= 8:  # a shorter one would blank out ordinary words
            text = text.replace(value, REDACTED)
    return _LOGIN.sub(REDACTED, _SHAPES.sub(REDACTED, text))


def keep_in_environment(variable: str, value: str) -> None:
    """Move a token to where the libraries that use it look for it, and out of what `ps` shows of this process."""
    os.environ[variable] = value
    _kept.add(variable)
    hide_in_command_line(value)


def hide_in_command_line(value: str) -> None:
    """Write over a token where the kernel keeps this process's arguments, which every user of the machine can read.

    Processes forked later show the same. Where the kernel does not let us (only Linux does), they stay.
    """
    text = os.fsencode(value)
    if not text or text not in _read("/proc/self/cmdline"):
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        # proc(5): fields 48 and 49 are where the arguments begin and end; the second field may hold blanks
        fields = _read("/proc/self/stat").rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:  # noqa: PTH123 - unbuffered, or it reads ahead
            memory.seek(start)
            arguments = memory.read(end - start)
            at = arguments.find(text)
            while at >= 0:
                memory.seek(start + at)
                memory.write(b"*" * len(text))
                at = arguments.find(text, at + len(text))


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def to_environment(words: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """Take tokens out of a command line for another process; return the rest, and the variables that hold them there."""
    kept: list[str] = []
    variables: dict[str, str] = {}
    waiting = ""  # the variable whose value is the next word
    for word in words:
        option, equals, value = word.partition("=")
        name = option.removeprefix("--").rpartition(".")[2]
        variable = (SECRET_FLAGS.get(option) or variable_of(name)) if is_secret(option) else ""
        if waiting and not word.startswith("--"):
            variables[waiting] = word
        elif not variable:
            kept.append(word)
        elif equals:
            variables[variable] = value
        waiting = "" if equals else variable
    return kept, variables


def unfit_secret(variable: str, value: str) -> str:
    """Say what is wrong with the value of a secret, without it; nothing where it may be right."""
    return unfit_webhook(value) if variable == WEBHOOK else ""


def unfit_webhook(url: str) -> str:
    """Say what is wrong with the address of a webhook, without it; nothing where there is none."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_one = False
    if not url or (is_one and url.isprintable() and " " not in url):
        return ""
    return "must be the whole address of a webhook, https://HOST/PATH"


def looks_secret(name: str, value: object) -> bool:
    """Tell whether what somebody called by a name is not to be handed on: by that name, or by its form."""
    return bool(_NAMES.search(name) or (isinstance(value, str) and _SHAPES.search(value)))


def variable_of(name: str) -> str:
    """Return the variable of the environment that a secret of this name moves to, or "" where the name is not known."""
    return KNOWN.get(name.lower(), "")
