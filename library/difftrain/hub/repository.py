"""One repository at one commit: which commit a name stands for, what it holds, and its files on this machine."""

from __future__ import annotations

import glob
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from difftrain.contracts import DifftrainError
from difftrain.hub import client
from difftrain.io.files import write_text

log = logging.getLogger("difftrain")
WAITS_S = (2.0, 10.0)  # before a second and a third attempt; what has been fetched so far is kept
REPORT_EVERY_S = 15.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
DEFAULT = "main"  # what every hub calls the branch that nobody names
_EXACT = 100  # so many files are asked for by name, more by folder and suffix


def is_commit(revision: str) -> bool:
    """Tell a commit from the names of branches and tags."""
    return bool(_COMMIT.fullmatch(revision))


class NotFetched(DifftrainError):
    """Say why a repository or its files are not here. away: because no hub answered."""

    def __init__(self, trouble: client.Trouble) -> None:
        super().__init__(str(trouble))
        self.trouble = trouble


@dataclass(frozen=True)
class Repository:
    """A repository at a commit. kind: model or dataset. name: a branch or tag that stands for the commit now."""

    repo: str
    kind: str
    commit: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.repo}@{self.commit[:8]}"

    @classmethod
    def find(cls, repo: str, kind: str, revision: str, *, offline: bool = False) -> Repository:
        """Ask which commit a revision ("" is the default branch) is now; without a hub, the cache's last answer counts.

        Raises NotFetched where neither knows.
        """
        if is_commit(revision):
            return cls(repo, kind, revision)

        # where a branch or tag is now; a hub that cannot be reached just now is no fault yet
        trouble = None
        if not offline:
            try:
                info = client.api().repo_info(repo, repo_type=kind, revision=revision or None)
                return cls(repo, kind, str(info.sha))
            except Exception as error:
                trouble = _trouble(error, repo)
                if not (trouble.away or trouble.passing):
                    raise NotFetched(trouble) from error

        # where it was at the last fetch, as the cache has it
        try:
            folder = _snapshot(
                repo, repo_type=kind, revision=revision or None, allow_patterns=[], local_files_only=True
            )
        except Exception as error:
            raise NotFetched(trouble or _trouble(error, repo)) from error
        repository = cls(repo, kind, Path(folder).name)
        if trouble is not None:
            log.warning("%s: %s; using commit %s from the cache", repo, trouble.what, repository.commit[:8])
        return repository

    @cached_property
    def _key(self) -> dict[str, Any]:
        return {"repo_type": self.kind, "revision": self.commit}

    def files(self, *, offline: bool = False) -> dict[str, int]:
        """List the repository: path -> size. Raises NotFetched where neither the cache nor the hub knows."""
        known = self._listed_before()
        if known is not None:
            return known
        if not offline:
            try:
                tree = client.api().list_repo_tree(self.repo, recursive=True, **self._key)
                return {entry.path: entry.size for entry in tree if hasattr(entry, "size")}
            except Exception as error:
                trouble = _trouble(error, self.repo)
                if not trouble.away:
                    raise NotFetched(trouble) from error
        try:
            folder = Path(_snapshot(self.repo, allow_patterns=[], local_files_only=True, **self._key))
        except Exception as error:
            raise NotFetched(_trouble(error, self.repo)) from error
        log.warning("%s: the cache does not list all its files; those present are used", self)
        paths = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}

    def _listed_before(self) -> dict[str, int] | None:
        try:
            from huggingface_hub import get_cached_repo_tree
        except ImportError:  # before huggingface_hub 2
            return None
        try:
            return {file.path: file.size for file in get_cached_repo_tree(self.repo, **self._key)}
        except Exception:  # it was never listed
            return None

    def here(self, files: Sequence[str]) -> Path | None:
        """Return the folder of this commit in the cache where all of these files are in it."""
        try:
            folder = Path(_snapshot(self.repo, allow_patterns=[], local_files_only=True, **self._key))
        except Exception:
            return None
        return folder if all((folder / file).is_file() for file in files) else None

    def fetch(self, files: Sequence[str], size: int) -> Path:
        """Bring files into the cache; return the folder of this commit there. Broken transfers go on where they were.

        Raises NotFetched.
        """
        folder = self.here(files)
        if folder is not None:
            log.info("%s: in the cache", self)
            self._note_name(folder)
            return folder
        count = f"{len(files)} file{'s' if len(files) > 1 else ''}"
        log.info("%s: fetching %s, %s, from %s", self, count, readable(size), client.endpoint())
        started = time.monotonic()
        made = patiently(lambda: self._download(files), str(self))
        log.info("%s: fetched in %.0f s", self, time.monotonic() - started)
        missing = [file for file in files if not (Path(made) / file).is_file()]
        if missing:
            raise NotFetched(client.Trouble(f"{self}: {missing[0]} is not among the fetched files"))
        self._note_name(Path(made))
        return Path(made)

    def _note_name(self, folder: Path) -> None:
        """Let the cache know which commit a branch stands for, as it does where a branch is fetched by its name."""
        if not self.name:
            return
        ref = folder.parent.parent / "refs" / self.name
        try:
            write_text(ref, self.commit)
        except OSError as error:  # a cache that may only be read serves too, as long as a hub can be asked
            log.debug("%s: %s", ref, error.strerror)

    def _download(self, files: Sequence[str]) -> str:
        return _snapshot(self.repo, allow_patterns=patterns(files), tqdm_class=progress_of(str(self)), **self._key)


Meaning = Callable[[BaseException, str], client.Trouble | None]  # of an error, with what it was about


def patiently(action: Callable[[], str], name: str, meaning: Meaning = client.trouble) -> str:
    """Do something with the hub, again where the reason may pass. meaning: of a hub's errors. Raises NotFetched."""
    for wait in (*WAITS_S, None):
        try:
            return action()
        except Exception as error:
            trouble = _trouble(error, name, meaning)
            if wait is None or not trouble.passing:
                raise NotFetched(trouble) from error
            log.warning("%s: %s; trying again in %.0f s", name, trouble.what, wait)
            time.sleep(wait)
    raise AssertionError


def _snapshot(repo: str, **options: Any) -> str:
    from huggingface_hub import snapshot_download

    client.api()  # its limits on waiting hold for downloads too
    return snapshot_download(repo, **options)


def _trouble(error: Exception, name: str, meaning: Meaning = client.trouble) -> client.Trouble:
    trouble = meaning(error, name)
    if trouble is None:
        raise error
    return trouble


def patterns(files: Sequence[str]) -> list[str]:
    """Write file names as the patterns that the hub's client takes; very many by their folders and suffixes."""
    if len(files) <= _EXACT:
        return [glob.escape(file) for file in files]
    pairs = {(file.rpartition("/")[0], file[file.rfind(".") :]) for file in files}
    return sorted(f"{glob.escape(folder + '/') if folder else ''}*{glob.escape(suffix)}" for folder, suffix in pairs)


def readable(size: float) -> str:
    """Write a number of bytes: 6.9 GB."""
    power = 0
    while size >= 1000 and power < 4:
        size, power = size / 1000, power + 1
    return f"{size:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def progress_of(name: str) -> type:
    """Make a progress bar that writes a line into the log now and then instead of drawing."""
    from tqdm.std import tqdm

    lock = threading.Lock()
    said_at = [time.monotonic()]

    class DownloadProgress(tqdm):  # type: ignore[misc, type-arg]
        monitor_interval = 0  # no thread that redraws

        def display(self, *_: Any, **__: Any) -> None:
            with lock:
                if self.unit != "B" or not self.n or time.monotonic() - said_at[0] < REPORT_EVERY_S:
                    return
                said_at[0] = time.monotonic()
            log.info("%s: %s of %s", name, readable(self.n), readable(self.total or self.n))

        def close(self) -> None:
            self.disable = True

    return DownloadProgress
