"""The one client of a hub, with limits on waiting; and what its errors mean, in words of a user."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CONNECT_S = 10.0
SILENCE_S = 120.0  # a server that says nothing for so long is gone; a large commit may take it a minute
_TRANSIENT = (408, 409, 412, 425, 429, 500, 502, 503, 504)


@functools.cache
def api() -> HfApi:
    """Return the client. Its token is whatever HF_TOKEN or a former login says at the time of a call."""
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # they would be drawn across the log
    _limit_waiting(huggingface_hub)
    return huggingface_hub.HfApi(library_name="difftrain")


def _limit_waiting(hub: Any) -> None:
    """Let requests give up on a silent server: from version 1 on, huggingface_hub waits for ever."""
    if not hasattr(hub, "set_client_factory"):
        return
    plain = hub.get_session()
    limits = type(plain.timeout)(SILENCE_S, connect=CONNECT_S)
    hooks = plain.event_hooks
    hub.set_client_factory(lambda: type(plain)(event_hooks=hooks, follow_redirects=True, timeout=limits))


def endpoint() -> str:
    """Return the address of the hub."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def cache_folder() -> str:
    """Return where downloads are kept."""
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def is_offline() -> bool:
    """Tell whether the user has forbidden network access."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def has_token() -> bool:
    """Tell whether there is a token at all."""
    from huggingface_hub import get_token

    return get_token() is not None


@dataclass(frozen=True)
class Trouble:
    """What went wrong with a hub.

    passing: it may be over in a moment. away: no answer came, of whatever kind. silent: it was waited for in vain.
    """

    what: str
    remedy: str = ""
    passing: bool = False
    away: bool = False
    silent: bool = False

    def __str__(self) -> str:
        return self.what + (f" ({self.remedy})" if self.remedy else "")


def trouble(error: BaseException, name: str) -> Trouble | None:
    """Say what an error of huggingface_hub means for `name`; None where it has nothing to do with it."""
    from huggingface_hub import errors

    for cause in _causes(error):
        if isinstance(cause, errors.LocalEntryNotFoundError):  # what led to it tells more
            continue
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return Trouble("HF_HUB_OFFLINE is set, so it cannot be fetched", away=True)
        if isinstance(cause, errors.HfHubHTTPError):
            return _answered(cause, name)
        if isinstance(cause, errors.HTTPError | ConnectionError | TimeoutError):
            text = f": {cause}" if str(cause) else ""
            return Trouble(
                f"{endpoint()} cannot be reached ({type(cause).__name__}{text})",
                "check the network, HF_ENDPOINT and proxies",
                passing=True,
                away=True,
                silent="Timeout" in type(cause).__name__,
            )
        if isinstance(cause, OSError) and cause.errno:  # a full disk, a folder that is not one's own
            path = str(cause.filename or cache_folder())
            remedy = "HF_HOME names another folder" if path.startswith(cache_folder()) else ""
            return Trouble(f"{path}: {cause.strerror}", remedy)
        if isinstance(cause, errors.FileMetadataError):
            return Trouble(f"{endpoint()} does not respond like a hub", "see HF_ENDPOINT")
    if isinstance(error, errors.LocalEntryNotFoundError):
        return Trouble("it is not in the cache", away=True)
    if isinstance(error, OSError) and "onsistency check" in str(error):
        return Trouble(f"{endpoint()} closed the connection midway", passing=True)
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Walk from an error to what it came from: the hub's client wraps the telling one."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _answered(error: Any, name: str) -> Trouble:
    """Tell the refusals of a hub apart."""
    from huggingface_hub import errors

    token = "the token in HF_TOKEN" if has_token() else "no token is given, HF_TOKEN holds one"
    status = getattr(error.response, "status_code", 0)
    if isinstance(error, errors.GatedRepoError):
        return Trouble(f"{name} is gated, and {token} gives no access", "ask for access on its page of the hub")
    if isinstance(error, errors.RevisionNotFoundError):
        return Trouble(f"{name} has no such revision", "a branch, a tag or a commit after @")
    if isinstance(error, errors.EntryNotFoundError):
        return Trouble(f"{name} has no such file")
    if isinstance(error, errors.DisabledRepoError):
        return Trouble(f"{name} is disabled by the hub")
    if isinstance(error, errors.RepositoryNotFoundError):
        return Trouble(f"{endpoint()} has no {name}, or hides it from you ({token})", "check the spelling")
    if status == 401:
        return Trouble(f"{endpoint()} refuses {token}", "make a new one on the hub")
    if status == 403:
        return Trouble(f"{endpoint()} forbids access with {token}", _first_line(error))
    return Trouble(f"{endpoint()} answers {status}: {_first_line(error)}", passing=status in _TRANSIENT)


def _first_line(error: Any) -> str:
    text = getattr(error, "server_message", None) or str(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason is given")
