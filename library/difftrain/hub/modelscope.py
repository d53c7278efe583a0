"""Repositories of ModelScope, through its own client modelscope_hub, with what `Repository` offers for a hub of Hugging Face's kind.

ModelScope tells no commit of a branch. What stands for one here is a hash of the listing: every path with its sha256. Files
are kept in a folder of that hash, so that a branch that moves changes no run that has begun, and all machines have the same.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from difftrain.hub import client
from difftrain.hub.repository import NotFetched, Repository, is_commit, patiently, patterns, readable
from difftrain.io.files import write_text

log = logging.getLogger("difftrain")
NAME = "modelscope"
BRANCH = "master"  # ModelScope's default
_LISTING = "listing.txt"  # beside the files of a snapshot: what the repository holds, a line each: size and path
_PACKAGE = "pip install modelscope-hub"


@dataclass(frozen=True)
class ModelScopeRepository(Repository):
    """A repository at one state of its files. commit: the hash of its listing."""

    def __str__(self) -> str:
        return f"{NAME}://{self.repo}@{self.commit[:8]}"

    @classmethod
    def find(cls, repo: str, kind: str, revision: str, *, offline: bool = False) -> ModelScopeRepository:
        """Ask what a branch or tag holds now; without the hub, the cache's last answer counts. Raises NotFetched."""
        if is_commit(revision):
            return cls(repo, kind, revision)
        name = revision or BRANCH
        known = _home(repo, kind) / f"{name.replace('/', '_')}.ref"
        trouble = None
        if not offline:
            try:
                listing = _listing(repo, kind, name)
            except NotFetched as error:
                trouble = error.trouble
                if not (trouble.away or trouble.passing):
                    raise
            else:
                repository = cls(repo, kind, _hash(listing), name)
                write_text(
                    repository.folder / _LISTING, "".join(f"{size} {path}\n" for path, (size, _) in listing.items())
                )
                write_text(known, repository.commit)
                return repository
        try:
            repository = cls(repo, kind, known.read_text(encoding="utf-8"), name)
        except OSError as error:
            raise NotFetched(trouble or client.Trouble("it is not in the cache", away=True)) from error
        if trouble is not None:
            log.warning("%s: %s; taken is what the cache has of %s", repository, trouble.what, name)
        return repository

    @cached_property
    def folder(self) -> Path:
        """Return where the files of this state are kept."""
        return _home(self.repo, self.kind) / "snapshots" / self.commit

    def files(self, *, offline: bool = False) -> dict[str, int]:
        """List the repository: path -> size. Raises NotFetched."""
        try:
            lines = (self.folder / _LISTING).read_text(encoding="utf-8").splitlines()
        except OSError:
            self._require_now(offline)
            return self.files(offline=True)
        return {path: int(size) for size, _, path in (line.partition(" ") for line in lines)}

    def here(self, files: Sequence[str]) -> Path | None:
        """Return the folder of this state where all of these files are in it."""
        return self.folder if all((self.folder / file).is_file() for file in files) else None

    def fetch(self, files: Sequence[str], size: int) -> Path:
        """Bring files into the cache; return their folder. Raises NotFetched, also where the branch has moved on."""
        missing = [file for file in files if not (self.folder / file).is_file()]
        if not missing:
            log.info("%s: in the cache", self)
            return self.folder
        self._require_now()
        log.info("%s: fetching %d files, %s, from %s", self, len(missing), readable(size), endpoint())
        start = time.monotonic()
        patiently(lambda: self._download(missing), str(self), trouble)
        log.info("%s: fetched in %.0f s", self, time.monotonic() - start)
        if absent := [file for file in missing if not (self.folder / file).is_file()]:
            raise NotFetched(client.Trouble(f"{self}: {absent[0]} is not among the fetched files"))
        return self.folder

    def _require_now(self, offline: bool = False) -> None:
        """Make sure that the branch still holds this state. Raises NotFetched."""
        if offline:
            raise NotFetched(client.Trouble("it is not in the cache", away=True))
        now = type(self).find(self.repo, self.kind, self.name)
        if now.commit != self.commit:
            what = f"{self.repo} has other files now than when the run began ({now.commit[:8]}, then {self.commit[:8]})"
            raise NotFetched(client.Trouble(what, "name a tag, or give a folder of those files"))

    def _download(self, files: Sequence[str]) -> str:
        return str(
            _api().download_repo(
                self.repo, self.kind, revision=self.name or BRANCH, local_dir=self.folder, allow_patterns=patterns(files),
                progress_callbacks=[],
            )
        )  # fmt: skip


def endpoint() -> str:
    """Return the address of the hub, which MODELSCOPE_ENDPOINT names."""
    return str(_api()._config.endpoint)


def trouble(error: BaseException, name: str) -> client.Trouble | None:
    """Say what an error of modelscope_hub means; None where it has nothing to do with it."""
    from modelscope_hub import errors

    text = next(iter(str(error).splitlines()), "") or type(error).__name__
    if isinstance(error, errors.NotExistError):
        return client.Trouble(f"{endpoint()} has no {name}, or hides it from you", "check the spelling")
    if isinstance(error, errors.AuthenticationError | errors.PermissionDeniedError):
        return client.Trouble(f"{endpoint()} forbids it: {text}", "MODELSCOPE_API_TOKEN holds a token")
    if isinstance(error, errors.NetworkError):
        return client.Trouble(f"{endpoint()} cannot be reached ({text})", "see the network", passing=True, away=True)
    if isinstance(error, errors.ServerError | errors.RateLimitError | errors.StorageError | errors.FileIntegrityError):
        return client.Trouble(f"{endpoint()}: {text}", passing=True)
    if isinstance(error, errors.HubError):
        return client.Trouble(f"{endpoint()}: {text}")
    if isinstance(error, OSError) and error.errno:
        return client.Trouble(
            f"{error.filename or _cache()}: {error.strerror}", "MODELSCOPE_CACHE names another folder"
        )
    return None


def _listing(repo: str, kind: str, revision: str) -> dict[str, tuple[int, str]]:
    """Ask for every file: path -> size, sha256. Raises NotFetched."""
    api = _api()
    try:
        entries = api.list_repo_files(repo, kind, revision=revision)
    except Exception as error:
        meaning = trouble(error, repo)
        if meaning is None:
            raise
        raise NotFetched(meaning) from error
    return {entry.path: (entry.size, str(entry.sha256 or entry.blob_id)) for entry in entries if not entry.is_dir}


def _hash(listing: dict[str, tuple[int, str]]) -> str:
    """Return forty digits for what a repository holds, as a commit has."""
    lines = (f"{path}\0{size}\0{digest}\n" for path, (size, digest) in sorted(listing.items()))
    return hashlib.blake2b("".join(lines).encode(), digest_size=20).hexdigest()


def _api() -> Any:
    """Return the client. Raises NotFetched where its package is not installed."""
    try:
        from modelscope_hub import HubApi
    except ModuleNotFoundError as error:
        raise NotFetched(client.Trouble("the package modelscope-hub is not installed", _PACKAGE)) from error
    return HubApi()


def _cache() -> Path:
    """Return the folder of downloads: MODELSCOPE_CACHE, as its own client has it, and a folder of ours in it."""
    base = os.environ.get("MODELSCOPE_CACHE") or Path.home() / ".cache" / "modelscope"
    return Path(base).expanduser() / "difftrain"


def _home(repo: str, kind: str) -> Path:
    return _cache() / f"{kind}s--{repo.replace('/', '--')}"
