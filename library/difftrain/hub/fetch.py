"""Ids of the configuration become paths of this machine, once, at the start; the configuration itself keeps the ids.

Rank 0 asks which commit each id stands for now, so that all machines take the same one; a run that goes on takes those
that it began with. Then one process a machine fetches what is missing, and the others wait.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from difftrain.config import TrainConfig, hub_ids
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.distributed.collective import run_on
from difftrain.distributed.ranks import Ranks
from difftrain.hub import client
from difftrain.hub.ids import TOKENIZERS, HubRequest, Places, Slot, hub_requests, localised, named, unasked
from difftrain.hub.modelscope import ModelScopeRepository
from difftrain.hub.repository import DEFAULT, NotFetched, Repository, is_commit
from difftrain.io.files import atomic_folder
from difftrain.models.weights import repo_files

log = logging.getLogger("difftrain")
T = TypeVar("T")
Pins = dict[str, str]  # "model org/name@revision" -> commit


def fetch(
    cfg: TrainConfig, ranks: Ranks, pins: Mapping[str, str], *, complete: bool = True
) -> tuple[TrainConfig, Pins]:
    """Return the configuration with paths in the place of ids, and the commits that were taken. Every rank calls it.

    pins: commits that the run began with. complete: also what the weights come without, to train or to draw. Raises
    ConfigFault with everything that could not be had.
    """
    places, taken = _fetch_all(cfg, hub_requests(cfg), ranks, pins)
    here = localised(cfg, places)
    if not complete:
        return here, taken
    remaining = named(run_on(ranks, ranks.is_logger, lambda: unasked(here)), unasked=True)
    if remaining:
        log.info("the weights have no tokenizer: using %s", ", ".join(request.text for request in remaining))
        more, commits = _fetch_all(cfg, remaining, ranks, pins)
        here, taken = localised(here, more), taken | commits
    return here, taken


def _fetch_all(
    cfg: TrainConfig, requests: Sequence[HubRequest], ranks: Ranks, pins: Mapping[str, str]
) -> tuple[Places, Pins]:
    if not requests:
        return {}, {}
    taken = run_on(ranks, ranks.is_logger, lambda: _commits(cfg, requests, pins))
    places: Places = {}

    def work() -> None:
        places.update(
            _for_all(requests, lambda request: _fetch_one(cfg, request, taken.get(request.pin), request.pin in pins))
        )

    run_on(ranks, ranks.local_rank == 0, work)
    answers = ranks.gather(places)
    return answers[ranks.rank - ranks.local_rank], taken


def _commits(cfg: TrainConfig, requests: Sequence[HubRequest], pins: Mapping[str, str]) -> Pins:
    """Settle the commit of every id that is to be fetched; parts of one repository are of one commit."""
    known = dict(pins)

    def commit_of(request: HubRequest) -> str | None:
        if request.pin not in known:
            if _local_path(cfg, request):
                return None
            known[request.pin] = _hub_of(request).find(request.id.repo, request.kind, request.id.revision).commit
        return known[request.pin]

    commits = _for_all(requests, commit_of)
    return {request.pin: commits[request.slot] for request in requests if request.slot in commits}


def _hub_of(request: HubRequest) -> type[Repository]:
    """Return the kind of repository that an id names."""
    return ModelScopeRepository if request.id.hub else Repository


def _for_all(requests: Sequence[HubRequest], action: Callable[[HubRequest], T | None]) -> dict[Slot, T]:
    """Do something for every id; return what it gave, by its place. Raises ConfigFault with the faults of all."""
    results: dict[Slot, T] = {}
    faults = []
    for request in requests:
        try:
            result = action(request)
        except NotFetched as error:
            faults.append(request.fault(error.trouble))
        except repo_files.Unfit as error:
            faults.append(request.fault(client.Trouble(str(error))))
        else:
            if result is not None:
                results[request.slot] = result
    if faults:
        raise ConfigFault(faults)
    return results


def _local_path(cfg: TrainConfig, request: HubRequest) -> str | None:
    """Return the path of what lies here already: one of that name, or a tokenizer in the cache of tokenizers."""
    if hub_ids.lies_here(request.text):
        return request.text
    folder = _kept_tokenizer(cfg, request)
    if folder is not None and any((folder / name).is_file() for name in ("merges.txt", "tokenizer.json")):
        return str(folder)
    return None


def _kept_tokenizer(cfg: TrainConfig, request: HubRequest) -> Path | None:
    """Return where --tokenizer_cache_dir keeps a tokenizer, under kohya's name: its id with "_" for "/"."""
    if request.field not in TOKENIZERS or not cfg.model.tokenizer_cache_dir:
        return None
    return Path(cfg.model.tokenizer_cache_dir).expanduser() / str(request.id).replace("/", "_")


def _fetch_one(cfg: TrainConfig, request: HubRequest, commit: str | None, pinned: bool) -> str:
    """Return the path of what an id stands for, fetched where it is missing. pinned: the commit is an earlier one."""
    here = _local_path(cfg, request)
    if here is not None:
        return here
    hub = _hub_of(request)
    name = request.id.revision
    if hub is Repository:
        name = "" if pinned or is_commit(name) else name or DEFAULT
    if commit is None:  # rank 0's machine has it under a path
        commit = hub.find(request.id.repo, request.kind, request.id.revision).commit
    repository = hub(request.id.repo, request.kind, commit, name)
    sizes = repository.files()
    small = repository.fetch  # model_index.json comes first: it says what else is needed
    files, target = request.choose(
        list(sizes), request.id.path, lambda file: (small([file], sizes[file]) / file).read_bytes()
    )
    if not files:
        raise repo_files.Unfit(
            f"holds no images, tars or parquet files{f' in {request.id.path}' if request.id.path else ''}"
        )
    path = repository.fetch(files, sum(sizes[file] for file in files)) / target
    kept = _kept_tokenizer(cfg, request)
    return str(path if kept is None else _keep(path, kept))


def _keep(path: Path, kept: Path) -> Path:
    """Copy a tokenizer into the cache of tokenizers, whole or not at all."""
    if path.is_file():
        return path
    try:
        with atomic_folder(kept) as aside:
            shutil.copytree(path, aside)
    except OSError as error:
        what = f"{kept.parent} cannot be written to: {error.strerror}"
        raise ConfigFault([Fault(option("model.tokenizer_cache_dir"), what, "give another folder")]) from error
    return kept


def looked_up(cfg: TrainConfig) -> tuple[TrainConfig, list[HubRequest]]:
    """Return the configuration with paths where the cache has them, and what a run would fetch.

    Nothing is asked or fetched.
    """
    places: Places = {}
    missing = _look(cfg, hub_requests(cfg), places)
    here = localised(cfg, places)
    if not missing:  # else nobody knows what the weights come without
        missing = _look(cfg, named(unasked(here), unasked=True), places)
        here = localised(cfg, places)
    return here, missing


def _look(cfg: TrainConfig, requests: Sequence[HubRequest], places: Places) -> list[HubRequest]:
    """Note where each lies; return those that lie nowhere."""
    located = [(request, _in_cache(cfg, request)) for request in requests]
    places |= {request.slot: path for request, path in located if path is not None}
    return [request for request, path in located if path is None]


def _in_cache(cfg: TrainConfig, request: HubRequest) -> str | None:
    here = _local_path(cfg, request)
    if here is not None:
        return here
    try:
        repository = _hub_of(request).find(request.id.repo, request.kind, request.id.revision, offline=True)
        sizes = repository.files(offline=True)
        files, target = request.choose(
            list(sizes), request.id.path, lambda file: _cached(repository, file).read_bytes()
        )
        folder = repository.here(files)
    except (NotFetched, repo_files.Unfit):
        return None
    return str(folder / target) if folder is not None and files else None


def _cached(repository: Repository, file: str) -> Path:
    folder = repository.here([file])
    if folder is None:
        raise NotFetched(client.Trouble("it is not in the cache"))
    return folder / file


def fetch_state(cfg: TrainConfig, ranks: Ranks) -> str | None:
    """Return what --resume names on this machine: a state on a hub is fetched to it. Every rank calls it.

    Raises ConfigFault.
    """
    resume = cfg.save.resume
    id = hub_ids.read_state(resume) if resume and cfg.hub.resume else None
    if id is None:
        return resume
    kind = id.kind or "model"

    def find() -> str:
        return Repository.find(id.repo, kind, id.revision).commit

    def bring(commit: str) -> str:
        repository = Repository(id.repo, kind, commit)
        sizes = repository.files()
        inside = [file for file in sizes if file.startswith(f"{id.path}/")]
        if not inside:
            raise NotFetched(client.Trouble(f"{repository} has no folder {id.path}"))
        return str(repository.fetch(inside, sum(sizes[file] for file in inside)) / id.path)

    def as_fault(action: Callable[[], str]) -> str:
        try:
            return action()
        except NotFetched as error:
            where = f"copy the state to this machine and give its folder, without {option('hub.resume')}"
            remedy = where if error.trouble.away else error.trouble.remedy
            raise ConfigFault([Fault(option("save.resume"), f"{resume}: {error.trouble.what}", remedy)]) from error

    # one rank settles the commit, so that all machines fetch the same; one of each machine fetches
    commit = run_on(ranks, ranks.is_logger, lambda: as_fault(find))
    paths: list[str] = []
    run_on(ranks, ranks.local_rank == 0, lambda: paths.append(as_fault(lambda: bring(commit))))
    return str(ranks.gather(paths)[ranks.rank - ranks.local_rank][0])
