"""Keep tokens out of everything that is written: they move to the environment, and what is kept is redacted."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
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
    """Move a token to where the libraries that use it look for it."""
    os.environ[variable] = value
    _kept.add(variable)


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
