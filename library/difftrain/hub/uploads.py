"""Sending exports and states, one after the other, in the background where asked for.

Training never stops because of the hub: what cannot be sent after some attempts is named, with the command that sends
it later, and counted in the report. What waits or is being sent must not be deleted: ask holds().
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from difftrain.config.schema.sections import HubSection
from difftrain.config.secrets import redact_text
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.hub import client

log = logging.getLogger("difftrain")
WAITS_S = (2.0, 10.0, 30.0)  # before another attempt; huggingface_hub itself tries single requests again, too
AT_END_S = 3600.0  # a finished run waits so long for what is still to be sent
AT_STOP_S = 20.0  # a run that a signal ends: what sent it may not wait much longer
SAY_EVERY_S = 60.0


class Uploads:
    """Send files and folders to a target; without one, do nothing. Only the logger rank has a target."""

    def __init__(self, target: UploadTarget | None = None, *, background: bool = False) -> None:
        """Begin. background: add() returns at once, and a thread sends."""
        self.target = target
        self.sent: list[str] = []
        self.failed: list[str] = []
        self._background = background
        self._pending: list[Path] = []
        self._jobs: queue.SimpleQueue[tuple[Path, str] | None] = queue.SimpleQueue()  # None: no more will come
        self._thread: threading.Thread | None = None
        self._done = threading.Condition()
        self._given_up = threading.Event()

    def add(self, path: Path, message: str) -> None:
        """Send a file or a folder that is whole and will not change, in its turn."""
        if self.target is None:
            return
        with self._done:
            self._pending.append(path)
        if not self._background:
            self._finish(path, message)
            return
        self._jobs.put((path, message))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
            self._thread.start()

    def holds(self, path: Path) -> bool:
        """Tell whether a file or folder waits to be sent, or is being sent."""
        with self._done:
            return path in self._pending

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Where an error ends the run, wait a moment for what is still to be sent; a signal waits for nothing."""
        if kind is not None:
            self.wait(AT_STOP_S if issubclass(kind, Exception) else 0.0)

    def wait(self, limit_s: float) -> None:
        """Wait until all is sent or has failed; after the limit, or a signal, name what was not and give up on it."""
        if self.target is None:
            return
        end = time.monotonic() + limit_s
        try:
            with self._done:
                while self._pending:
                    left = end - time.monotonic()
                    if left <= 0:
                        break
                    log.info(
                        "waiting up to %.0f s for uploads: %s", left, ", ".join(path.name for path in self._pending)
                    )
                    self._done.wait_for(lambda: not self._pending, min(left, SAY_EVERY_S))
        finally:
            self._give_up("the run ended before it was uploaded")

    def _give_up(self, why: str) -> None:
        self._given_up.set()
        self._jobs.put(None)
        with self._done:
            late, self._pending = self._pending, []
        for path in late:
            self._name_failure(path, why)

    def facts(self) -> dict[str, Any] | None:
        """Return what a report says of it."""
        if self.target is None:
            return None
        with self._done:
            return {"repo": self.target.repo, "sent": list(self.sent), "failed": list(self.failed)}

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._given_up.is_set():
            self._finish(*job)

    def _finish(self, path: Path, message: str) -> None:
        """Send one, or say why not; in any case it is held no longer."""
        try:
            self._send(path, message)
        except Exception as error:
            self._fail(path, client.trouble(error, path.name) or client.Trouble(f"{type(error).__name__}: {error}"))
        finally:
            with self._done:
                if path in self._pending:
                    self._pending.remove(path)
                self._done.notify_all()

    def _send(self, path: Path, message: str) -> None:
        assert self.target is not None
        started, operations = time.monotonic(), None
        for wait in (*WAITS_S, None):
            tried = time.monotonic()
            try:
                # made once: what was sent of it in an attempt is not sent again in the next
                operations = operations or self.target.operations(path)
                self.target.commit(operations, message)
                break
            except Exception as error:
                trouble = client.trouble(error, self.target.repo)
                if wait is None or trouble is None or not trouble.passing:
                    raise
                if trouble.silent and time.monotonic() - tried > 2 * client.SILENCE_S:
                    raise  # huggingface_hub has asked six times: training, which may be waiting, does so no longer
                log.warning("upload of %s: %s; trying again in %.0f s", path.name, redact_text(trouble.what), wait)
                if self._given_up.wait(wait):
                    return
        if self._given_up.is_set():
            return
        with self._done:
            self.sent.append(path.name)
        log.info("uploaded %s to %s in %.0f s", path.name, self.target.repo, time.monotonic() - started)

    def _fail(self, path: Path, trouble: client.Trouble) -> None:
        if not self._given_up.is_set():  # else it is named already
            self._name_failure(path, str(trouble))

    def _name_failure(self, path: Path, why: str) -> None:
        assert self.target is not None
        with self._done:
            self.failed.append(path.name)
        log.warning(
            "%s was not uploaded to the hub: %s; upload it by hand: %s",
            path.name,
            redact_text(why),
            self.target.by_hand(path),
        )


# --- The repository that exports and states go to: looked at before training, then one commit for each of them


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

        path_in_repo = self.place_of(path)
        if path.is_file():
            return [CommitOperationAdd(path_in_repo, path)]
        files = sorted(file for file in path.rglob("*") if file.is_file())
        if not files:
            raise FileNotFoundError(errno.ENOENT, "is gone, or empty", str(path))
        adds = {f"{path_in_repo}/{file.relative_to(path).as_posix()}": file for file in files}
        gone = [file for file in self._lying_at(path_in_repo) if file not in adds]
        return [*(CommitOperationDelete(file) for file in gone), *(CommitOperationAdd(*add) for add in adds.items())]

    def _lying_at(self, path_in_repo: str) -> list[str]:
        from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

        try:
            tree = client.api().list_repo_tree(self.repo, path_in_repo, recursive=True, repo_type=self.kind)
            return [entry.path for entry in tree if hasattr(entry, "size")]
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
            option("hub.repo_id"),
            "HF_HUB_OFFLINE is set, so nothing can be uploaded",
            "unset it, or leave the flag out",
        )
    if not client.has_token():
        what = "needs a token with write access, and none is given"
        raise _fault(option("hub.repo_id"), what, "export HF_TOKEN=…, or hf auth login")

    # whose token it is, and whether it may write at all
    who = _call_hub(option("hub.token"), "your account", lambda api: api.whoami())
    role = who.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise _fault(option("hub.token"), "the token has read access only", "create one with write access on the hub")

    # the repository, made where it is missing, and whether this account may write to it
    repo = hub.repo_id if "/" in hub.repo_id else f"{who['name']}/{hub.repo_id}"
    private = _visibility(hub, repo)
    _call_hub(option("hub.repo_id"), repo, lambda api: _may_write(api, repo, hub.repo_type))

    # where saves will lie, said before training
    target = UploadTarget(repo, hub.repo_type, "/".join(filter(None, ((hub.path_in_repo or "").strip("/"), run))))
    log.info(
        "exports%s are uploaded to the %s %s %s as %s%s",
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

    visibility = _call_hub(option("hub.repo_id"), repo, look)
    if visibility is None:
        private = hub.visibility != "public"
        _call_hub(
            option("hub.repo_id"),
            repo,
            lambda api: api.create_repo(repo, repo_type=hub.repo_type, private=private, exist_ok=True),
        )
        return private
    if hub.visibility and bool(visibility.private) != (hub.visibility == "private"):
        what = f"{repo} is {'private' if visibility.private else 'public'} already, {hub.visibility} is requested"
        raise _fault(option("hub.visibility"), what, "change it on the hub, or leave the flag out")
    return bool(visibility.private)


def _may_write(api: Any, repo: str, kind: str) -> None:
    """Ask how an empty file would be sent, which only those may ask who may send it; nothing is."""
    from huggingface_hub import CommitOperationAdd

    api.preupload_lfs_files(repo, [CommitOperationAdd(".difftrain", b"")], repo_type=kind)


def _call_hub(flag: str, name: str, action: Any) -> Any:
    try:
        return action(client.api())
    except Exception as error:
        trouble = client.trouble(error, name)
        if trouble is None:
            raise
        origin = option("hub.repo_id") if trouble.away else flag  # nobody has looked at the token yet
        raise _fault(origin, trouble.what, trouble.remedy) from error


def _fault(flag: str, what: str, remedy: str) -> ConfigFault:
    return ConfigFault([Fault(flag, what, remedy)])
