"""The repository that exports and states go to: looked at before training, then one commit for each of them."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from difftrain.config.schema.sections import HubSection
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.hub import client

log = logging.getLogger("difftrain")


@dataclass(frozen=True)
class UploadTarget:
    """A repository, and the folder in it ("": its top)."""

    repo: str
    kind: str
    folder: str = ""

    def place_of(self, path: Path) -> str:
        """Return the path in the repository of a file or folder that is sent."""
        return f"{self.folder}/{path.name}" if self.folder else path.name

    def operations(self, path: Path) -> list[Any]:
        """Return what makes a file or folder of the repository equal to this one: what else lies there goes."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        place = self.place_of(path)
        if path.is_file():
            return [CommitOperationAdd(place, path)]
        files = sorted(each for each in path.rglob("*") if each.is_file())
        if not files:
            raise FileNotFoundError(errno.ENOENT, "is gone, or empty", str(path))
        adds = {f"{place}/{file.relative_to(path).as_posix()}": file for file in files}
        gone = [file for file in self._lying_at(place) if file not in adds]
        return [*(CommitOperationDelete(file) for file in gone), *(CommitOperationAdd(*add) for add in adds.items())]

    def _lying_at(self, place: str) -> list[str]:
        from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

        try:
            tree = client.api().list_repo_tree(self.repo, place, recursive=True, repo_type=self.kind)
            return [each.path for each in tree if hasattr(each, "size")]
        except (EntryNotFoundError, RevisionNotFoundError):  # nothing there yet, or nothing in it at all
            return []

    def commit(self, operations: list[Any], message: str) -> None:
        """Send it all, in one commit: whole, or not to be seen."""
        client.api().create_commit(self.repo, operations, commit_message=message, repo_type=self.kind)

    def by_hand(self, path: Path) -> str:
        """Return the command that sends a file or folder later."""
        kind = "" if self.kind == "model" else f" --repo-type {self.kind}"
        return f"hf upload {self.repo} {path} {self.place_of(path)}{kind}"


def open_target(hub: HubSection, run: str = "") -> UploadTarget | None:
    """Find the repository, or make it, and see that it may be written to. None where nothing is sent.

    run: name of a run directory, a folder of the repository too: its saves are called as those of other runs. Raises ConfigFault: a hub that cannot be reached or says no is found out about before training.
    """
    if not hub.repo_id:
        return None

    # what is wrong without asking the hub
    if client.is_offline():
        raise _fault(
            option("hub.repo_id"), "HF_HUB_OFFLINE forbids to send anything", "unset it, or leave the flag out"
        )
    if not client.has_token():
        what = "needs a token that may write, and none is given"
        raise _fault(option("hub.repo_id"), what, "export HF_TOKEN=…, or hf auth login")

    # whose token it is, and whether it may write at all
    who = _asked("--huggingface_token", "your account", lambda api: api.whoami())
    role = who.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise _fault("--huggingface_token", "the token may only read", "make one on the hub that may write")

    # the repository, made where it is missing, and whether this account may write to it
    repo = hub.repo_id if "/" in hub.repo_id else f"{who['name']}/{hub.repo_id}"
    private = _visibility(hub, repo)
    _asked(option("hub.repo_id"), repo, lambda api: _may_write(api, repo, hub.repo_type))

    # where saves will lie, said before training
    target = UploadTarget(repo, hub.repo_type, "/".join(filter(None, ((hub.path_in_repo or "").strip("/"), run))))
    log.info(
        "exports%s go to the %s %s %s as %s%s",
        " and states" if hub.save_state else "",
        "private" if private else "public",
        hub.repo_type,
        f"{repo}/{target.folder}".rstrip("/"),
        who["name"],
        ", in the background" if hub.async_upload else "",
    )
    return target


def _visibility(hub: HubSection, repo: str) -> bool:
    """Tell whether the repository is private; make it where it is missing. Raises ConfigFault where it is not as asked."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    def look(api: Any) -> Any:
        try:
            return api.repo_info(repo, repo_type=hub.repo_type)
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            return None

    found = _asked(option("hub.repo_id"), repo, look)
    if found is None:
        private = hub.visibility != "public"
        _asked(
            option("hub.repo_id"),
            repo,
            lambda api: api.create_repo(repo, repo_type=hub.repo_type, private=private, exist_ok=True),
        )
        return private
    if hub.visibility and bool(found.private) != (hub.visibility == "private"):
        what = f"{repo} is {'private' if found.private else 'public'} already, {hub.visibility} is asked for"
        raise _fault(option("hub.visibility"), what, "change it on the hub, or leave the flag out")
    return bool(found.private)


def _may_write(api: Any, repo: str, kind: str) -> None:
    """Ask how an empty file would be sent, which only those may ask who may send it; nothing is."""
    from huggingface_hub import CommitOperationAdd

    api.preupload_lfs_files(repo, [CommitOperationAdd(".difftrain", b"")], repo_type=kind)


def _asked(flag: str, name: str, action: Any) -> Any:
    try:
        return action(client.api())
    except Exception as error:
        said = client.trouble(error, name)
        if said is None:
            raise
        origin = option("hub.repo_id") if said.away else flag  # nobody has looked at the token yet
        raise _fault(origin, said.what, said.remedy) from error


def _fault(flag: str, what: str, remedy: str) -> ConfigFault:
    return ConfigFault([Fault(flag, what, remedy)])
