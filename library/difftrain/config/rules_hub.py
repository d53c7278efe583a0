"""Rules about what is sent to a hub and fetched from one; whether a hub agrees is asked when the run starts."""

from __future__ import annotations

from collections.abc import Iterator

from difftrain.config import hub_ids
from difftrain.config.finding import Finding, Rule
from difftrain.config.sections import TrainConfig

_STATE = "give --resume=REPO_ID/PATH[:REVISION[:model|dataset]]"


def target(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """What exports are sent to is a name of a repository and a plain folder in it."""
    hub = cfg.hub
    if hub.repo_id is not None and not hub_ids.is_repo(hub.repo_id):
        yield Finding(("hub.repo_id",), f"is no name of a repository: {hub.repo_id!r}", "organisation/name")
    folder = hub.path_in_repo
    if folder is not None and (folder.startswith("/") or "\\" in folder or ".." in folder.split("/")):
        yield Finding(("hub.path_in_repo",), f"is no folder of a repository: {folder!r}", "as in models/first")


def state(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """A state on a hub has a place there; the newest of a hub is nobody's to choose."""
    if not cfg.hub.resume:
        return
    given = cfg.save.resume
    if not given:
        yield Finding(("hub.resume", "save.resume"), "needs --resume, which names the state", _STATE)
    elif given == "auto":
        what = "does not go with --resume=auto, which looks in --output_dir only"
        yield Finding(("hub.resume", "save.resume"), what, _STATE)
    elif hub_ids.read_state(given) is None:
        yield Finding(("save.resume",), f"names no state on a hub: {given!r}", _STATE)


RULES: tuple[Rule, ...] = (target, state)
