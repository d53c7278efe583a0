"""Where and with what a run was made: enough for an outsider to repeat it, and no secret."""

from __future__ import annotations

import functools
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

import difftrain
from difftrain.config import secrets

PACKAGES = (
    "torch",
    "torch_npu",
    "diffusers",
    "transformers",
    "accelerate",
    "safetensors",
    "numpy",
    "pillow",
    "pyarrow",
    "av",
    "pydantic",
    "tokenizers",
    "huggingface_hub",
    "deepspeed",
    "fairscale",
    "bitsandbytes",
    "triton",
)

NO_VERSIONS = {"kind", "index", "count", "reason", "name", "threads", "host", "memory_gib"}  # in Device.describe()

HIDDEN = secrets.REDACTED
_SECRET_NAME = re.compile(r"(token|secret|password|passwd|api_?key|access_?key|credentials?)$", re.IGNORECASE)


def versions(device: dict[str, Any] | None = None) -> dict[str, str]:
    """Return versions of Python, of every package that matters and is installed, and of the device's software.

    device: what Device.describe() says; what it knows of drivers and libraries is taken over.
    """
    installed = {"difftrain": difftrain.__version__, "python": platform.python_version()}
    installed |= {package: version for package in PACKAGES if (version := _version(package))}
    installed |= {key: str(value) for key, value in (device or {}).items() if value and key not in NO_VERSIONS}
    return installed


@functools.cache  # every report of a run asks
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def code_version(folder: Path | None = None) -> str:
    """Return the commit of the checkout that this code runs from (with + where it was changed), or its version."""
    folder = folder or Path(__file__).resolve().parent
    release = f"{difftrain.__version__} (package)"
    if not any((parent / ".git").exists() for parent in folder.parents):
        return release  # a wheel, perhaps inside somebody else's checkout: site-packages is never tracked there
    if _git(folder, "ls-files", "--error-unmatch", str(Path(__file__).resolve())) is None:
        return release
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return release
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{difftrain.__version__} commit {commit[:12]}" + ("+ (changed since)" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def redact(text: str) -> str:
    """Hide what is or looks like a secret in one value: tokens, and logins in addresses."""
    return secrets.redact_text(text)


def command(argv: Sequence[str]) -> str:
    """Return the command line as one can type it again, secrets hidden.

    argv: with or without the script before the flags. Where a launcher started several processes, their number follows
    as a comment.
    """
    script = _started_as(sys.argv) if not argv or argv[0].startswith("-") else []
    words = [Path(sys.executable).name, *script, *(redact(word) for word in secrets.redact(argv))]
    size = int(os.environ.get("WORLD_SIZE", "1") or 1)
    local = os.environ.get("LOCAL_WORLD_SIZE", size)
    return shlex.join(words) + (f"  # {size} processes, {local} on this machine" if size > 1 else "")


def _started_as(argv: Sequence[str]) -> list[str]:
    """Return what Python was given before the flags: a script, or `difftrain` and the name of its command."""
    started, command = Path(argv[0]), takewhile(lambda word: not word.startswith("-"), argv[1:])
    if started.name == "__main__.py" and started.parent.name == "difftrain":
        return ["-m", "difftrain", *command]
    return [argv[0], *(command if started.name == "difftrain" else [])]


def redacted(config: Any, name: str = "") -> Any:
    """Return a configuration with its secrets hidden, ready for JSON."""
    if isinstance(config, dict):
        return {str(key): redacted(value, str(key)) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [redacted(value, name) for value in config]
    if isinstance(config, str | Path):
        return HIDDEN if config and _SECRET_NAME.search(name) else redact(str(config))
    return config


def process_age_s() -> float:
    """Return for how long this process has run: imports and loading belong to the end-to-end time, too."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started_s, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()
