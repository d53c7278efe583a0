"""How the id of something on a hub is written, and how it is told from a path of this machine.

    org/name   org/name@revision   org/name/folder   org/name/folder/file.safetensors
    hf://org/name@revision/folder   hf://datasets/org/name
    modelscope://org/name@revision/folder   modelscope://datasets/org/name

What exists on this machine is a path, whatever it looks like. A scheme says that a hub is meant, and which. No package of a hub is
imported here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from difftrain.config.paths import expanded, is_folder, path_exists

SCHEMES = {"hf://": "", "modelscope://": "modelscope"}  # -> what HubId.hub says
_PART = re.compile(r"\w[\w.-]{0,95}")
_REVISION = re.compile(r"refs/(?:pr|convert)/[^/@]+|[^/@]+")
_FILE = re.compile(r"\.(safetensors|ckpt|pth?|bin|json|toml|txt|tar|zip|parquet|csv|png|jpe?g|webp)$", re.IGNORECASE)
_CACHED = re.compile(r"(?:model|dataset)s--([^/]+)--([^/]+)/snapshots/[0-9a-f]{40}(/.+)?$")


@dataclass(frozen=True)
class HubId:
    """A place on a hub. revision: branch, tag or commit; "" is the default branch. path: a folder or file inside.

    kind: model or dataset where the text says so. explicit: it is written with a scheme. hub: "" is huggingface_hub's.
    """

    repo: str
    revision: str = ""
    path: str = ""
    kind: str = ""
    explicit: bool = False
    hub: str = ""

    def __str__(self) -> str:
        scheme = f"{self.hub}://" if self.hub else ""
        at = f"@{self.revision}" if self.revision else ""
        return f"{scheme}{self.repo}{at}" + (f"/{self.path}" if self.path else "")


def read(text: str) -> HubId | None:
    """Read an id; None where the text can only be a path. The disk is not looked at."""
    scheme = next((scheme for scheme in SCHEMES if text.startswith(scheme)), "")
    explicit, hub = bool(scheme), SCHEMES.get(scheme, "")
    remaining, kind = text.removeprefix(scheme), ""
    if explicit and (prefix := re.match(r"(model|dataset)s/", remaining)):
        remaining, kind = remaining[prefix.end() :], prefix[1]
    if remaining.startswith(("/", ".", "~")) or remaining.endswith("/") or "//" in remaining or "\\" in remaining:
        return None
    org, _, tail = remaining.partition("/")
    named = re.match(r"[^/@]+", tail)
    if named is None:
        return None
    name, tail = named[0], tail[named.end() :]
    revision = ""
    if tail.startswith("@"):
        matched = _REVISION.match(tail, 1)
        if matched is None:
            return None
        revision, tail = matched[0], tail[matched.end() :]
    path = tail.removeprefix("/")
    if not is_repo(f"{org}/{name}") or ".." in path.split("/") or (not path and not explicit and _FILE.search(name)):
        return None
    return HubId(f"{org}/{name}", revision, path, kind, explicit, hub)


def read_state(text: str) -> HubId | None:
    """Read what --resume names with --resume_from_huggingface: REPO_ID/PATH[:REVISION[:TYPE]], as kohya writes it."""
    repo_path, _, remaining = text.partition(":")
    revision, _, kind = remaining.partition(":")
    org, name, path = [*repo_path.split("/", 2), "", ""][:3]
    path = path.strip("/")
    if not is_repo(f"{org}/{name}") or not path or ".." in path.split("/") or kind not in ("", "model", "dataset"):
        return None
    return HubId(f"{org}/{name}", revision, path, kind)


def is_repo(text: str) -> bool:
    """Tell whether a hub would take this as the name of a repository: name, or organisation/name."""
    parts = text.split("/")
    return (
        len(parts) in (1, 2)
        and all(_PART.fullmatch(part) and not part.endswith((".", "-")) for part in parts)
        and not any(bad in text for bad in ("--", ".."))
        and not text.endswith(".git")
    )


def lies_here(text: str) -> bool:
    """Tell whether a text is a path of something that exists: then it is no id."""
    return not text.startswith(tuple(SCHEMES)) and path_exists(expanded(text))


def missing(text: str) -> str:
    """Say what is wrong with a text that is neither a path of something that exists nor likely to be an id, or "".

    org/name/... whose first folder is here is taken for a path with a slip in it.
    """
    if lies_here(text):
        return ""
    hub_id = read(text)
    if hub_id is None:
        return f"no such file or folder: {text!r}"
    folder = text.split("/")[0]
    if not hub_id.explicit and is_folder(folder):
        return f"no such file or folder: {text!r} in the folder {folder!r} of {Path.cwd()}"
    return ""


def name_of(path: str) -> str:
    """Return what to call a path: its last name, or the id where it lies in the cache of a hub."""
    match = _CACHED.search(path.rstrip("/"))
    return f"{match[1]}/{match[2]}{match[3] or ''}" if match else Path(path).name


def known_by(path: str, last_name: str) -> str:
    """Return what stays the same where a configuration moves to another machine.

    The last name of a path; all of what is an id beyond doubt.
    """
    hub_id = read(path)
    return str(hub_id) if hub_id and (hub_id.explicit or hub_id.revision) else last_name
