"""Ids of the configuration become paths of this machine, once, at the start; the configuration itself keeps the ids.

Rank 0 asks which commit each id stands for now, so that all machines take the same one; a run that goes on takes those
that it began with. Then one process a machine fetches what is missing, and the others wait.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from difftrain.config import TrainConfig, hub_ids
from difftrain.config.finding import option, value_of
from difftrain.config.hub_ids import HubId
from difftrain.contracts import ConfigFault, Fault
from difftrain.data.sources.configured import CAPTION_SUFFIXES
from difftrain.data.sources.repo_files import data_files
from difftrain.distributed.ranks import Ranks
from difftrain.models.parts import repo_files
from difftrain.models.registry import make_family
from difftrain.train.hub import client
from difftrain.train.hub.repository import DEFAULT, NotFetched, Repository, is_commit
from difftrain.train.together import for_all

log = logging.getLogger("difftrain")
T = TypeVar("T")
Pins = dict[str, str]  # "model org/name@revision" -> commit
Slot = tuple[str, str]  # a field of the configuration, and what is written there
Places = dict[Slot, str]  # -> path on this machine
Choose = Callable[[Sequence[str], str, repo_files.Read], repo_files.Files]

_CHOOSE: dict[str, Choose] = {
    "model.pretrained": repo_files.weights,
    "model.vae": repo_files.vae,
    "model.tokenizer1": repo_files.tokenizer,
    "model.tokenizer2": repo_files.tokenizer,
}
_PLACE = {
    "model.pretrained": "a diffusers folder or a .safetensors file",
    "model.vae": "a folder with config.json and its weights, or a .safetensors file",
    "model.tokenizer1": "a folder with CLIP's vocab.json and merges.txt",
    "model.tokenizer2": "a folder with CLIP's vocab.json and merges.txt",
    "data.dirs": "a folder of pictures, tars or parquet",
}
_TOKENIZERS = ("model.tokenizer1", "model.tokenizer2")


@dataclass(frozen=True)
class Wanted:
    """One id of the configuration. unasked: nobody wrote it, the weights come without this part."""

    field: str
    text: str
    id: HubId
    choose: Choose
    unasked: bool = False

    @property
    def kind(self) -> str:
        """Return model or dataset."""
        return self.id.kind or ("dataset" if self.field == "data.dirs" else "model")

    @property
    def flag(self) -> str:
        """Return the flag that it belongs to."""
        return option(self.field)

    @property
    def slot(self) -> Slot:
        """Return where in the configuration it stands."""
        return self.field, self.text

    @property
    def pin(self) -> str:
        """Return what a record calls it."""
        return f"{self.kind} {replace(self.id, path='')}"

    def fault(self, trouble: client.Trouble) -> Fault:
        """Say what is wrong, and what to place where."""
        what = f"the weights come without it; {self.text}" if self.unasked else self.text
        if not self.unasked and not self.id.explicit:
            what += ", which is no path here"
        remedy = trouble.remedy
        if trouble.away:
            kind = " --repo-type dataset" if self.kind == "dataset" else ""
            remedy = (
                f"give the path of {_PLACE[self.field]}; or where there is a network: hf download {self.id.repo}{kind}, "
                f"and copy its folder to {client.cache_folder()}"
            )
        return Fault(self.flag, f"{what}: {trouble.what}", remedy)


def wanted(cfg: TrainConfig) -> list[Wanted]:
    """List what is written as an id may be; whether a path of that name exists, each machine sees for itself."""
    captions = (cfg.captions.extension,) if cfg.captions.extension else CAPTION_SUFFIXES
    suffixes = tuple(each if each.startswith(".") else f".{each}" for each in captions)

    def data(files: Sequence[str], path: str, _read: repo_files.Read) -> repo_files.Files:
        return data_files(files, path, suffixes)

    given = [(field, value_of(cfg, field), choose) for field, choose in _CHOOSE.items()]
    given += [("data.dirs", text, data) for text in cfg.data.dirs]
    named = [(field, text, hub_ids.read(text), choose) for field, text, choose in given if text]
    return [Wanted(field, text, id, choose) for field, text, id, choose in named if id is not None]


def unasked(cfg: TrainConfig) -> list[Slot]:
    """List what the weights, which lie here, come without. Nothing where they have faults, which are found elsewhere."""
    try:
        return list(make_family(cfg).comes_without().items())
    except ConfigFault:
        return []


def _wanted_unasked(slots: Sequence[Slot]) -> list[Wanted]:
    named = [(field, text, hub_ids.read(text)) for field, text in slots]
    return [Wanted(field, text, id, _CHOOSE[field], unasked=True) for field, text, id in named if id is not None]


def is_needed(cfg: TrainConfig) -> bool:
    """Tell whether anything is to be fetched."""
    return any(not hub_ids.lies_here(each.text) for each in wanted(cfg)) or bool(unasked(cfg))


def fetch(cfg: TrainConfig, ranks: Ranks, pins: Mapping[str, str]) -> tuple[TrainConfig, Pins]:
    """Return the configuration with paths in the place of ids, and the commits that were taken. Every rank calls it.

    pins: commits that the run began with. Raises ConfigFault with everything that could not be had.
    """
    places, taken = _fetch_all(cfg, wanted(cfg), ranks, pins)
    here = localised(cfg, places)
    rest = _wanted_unasked(for_all(ranks, ranks.is_logger, lambda: unasked(here)))
    if rest:
        log.info("the weights come without a tokenizer: taken are %s", ", ".join(each.text for each in rest))
        more, commits = _fetch_all(cfg, rest, ranks, pins)
        here, taken = localised(here, more), taken | commits
    return here, taken


def localised(cfg: TrainConfig, places: Mapping[Slot, str]) -> TrainConfig:
    """Return the configuration with paths in the place of ids."""
    if not places:
        return cfg
    model = {field.partition(".")[2]: path for (field, _), path in places.items() if field in _CHOOSE}
    dirs = tuple(places.get(("data.dirs", text), text) for text in cfg.data.dirs)
    update = {"model": cfg.model.model_copy(update=model), "data": cfg.data.model_copy(update={"dirs": dirs})}
    return cfg.model_copy(update=update)


def _fetch_all(cfg: TrainConfig, names: Sequence[Wanted], ranks: Ranks, pins: Mapping[str, str]) -> tuple[Places, Pins]:
    if not names:
        return {}, {}
    taken = for_all(ranks, ranks.is_logger, lambda: _commits(cfg, names, pins))
    mine: Places = {}

    def work() -> None:
        mine.update(_each(names, lambda each: _place(cfg, each, taken.get(each.pin), each.pin in pins)))

    for_all(ranks, ranks.local_rank == 0, work)
    told = ranks.gather(mine)
    return told[ranks.rank - ranks.local_rank], taken


def _commits(cfg: TrainConfig, names: Sequence[Wanted], pins: Mapping[str, str]) -> Pins:
    """Settle the commit of every id that is to be fetched."""

    def settle(each: Wanted) -> str | None:
        if each.pin in pins:
            return pins[each.pin]
        if _given_here(cfg, each):
            return None
        return Repository.find(each.id.repo, each.kind, each.id.revision).commit

    commits = _each(names, settle)
    return {each.pin: commits[each.slot] for each in names if each.slot in commits}


def _each(names: Sequence[Wanted], action: Callable[[Wanted], T | None]) -> dict[Slot, T]:
    """Do something for every id; return what it gave, by its place. Raises ConfigFault with the faults of all."""
    found: dict[Slot, T] = {}
    faults = []
    for each in names:
        try:
            result = action(each)
        except NotFetched as error:
            faults.append(each.fault(error.trouble))
        except repo_files.Unfit as error:
            faults.append(each.fault(client.Trouble(str(error))))
        else:
            if result is not None:
                found[each.slot] = result
    if faults:
        raise ConfigFault(faults)
    return found


def _given_here(cfg: TrainConfig, each: Wanted) -> str | None:
    """Return the path of what lies here already: one of that name, or a tokenizer in the cache of tokenizers."""
    if hub_ids.lies_here(each.text):
        return each.text
    folder = _kept_tokenizer(cfg, each)
    if folder is not None and any((folder / name).is_file() for name in ("merges.txt", "tokenizer.json")):
        return str(folder)
    return None


def _kept_tokenizer(cfg: TrainConfig, each: Wanted) -> Path | None:
    """Return where --tokenizer_cache_dir keeps a tokenizer, under kohya's name: its id with "_" for "/"."""
    if each.field not in _TOKENIZERS or not cfg.model.tokenizer_cache_dir:
        return None
    return Path(cfg.model.tokenizer_cache_dir).expanduser() / str(each.id).replace("/", "_")


def _place(cfg: TrainConfig, each: Wanted, commit: str | None, pinned: bool) -> str:
    """Return the path of what an id stands for, fetched where it is missing. pinned: the commit is an earlier one."""
    here = _given_here(cfg, each)
    if here is not None:
        return here
    name = "" if pinned or is_commit(each.id.revision) else each.id.revision or DEFAULT
    if commit is None:  # rank 0's machine has it under a path
        commit = Repository.find(each.id.repo, each.kind, each.id.revision).commit
    repository = Repository(each.id.repo, each.kind, commit, name)
    sizes = repository.files()
    small = repository.fetch  # model_index.json comes first: it says what else is needed
    files, target = each.choose(
        list(sizes), each.id.path, lambda file: (small([file], sizes[file]) / file).read_bytes()
    )
    if not files:
        raise repo_files.Unfit(
            f"holds no pictures, tars or parquet files{f' in {each.id.path}' if each.id.path else ''}"
        )
    path = repository.fetch(files, sum(sizes[file] for file in files)) / target
    kept = _kept_tokenizer(cfg, each)
    return str(path if kept is None else _keep(path, kept))


def _keep(path: Path, kept: Path) -> Path:
    """Copy a tokenizer into the cache of tokenizers, whole or not at all."""
    if path.is_file():
        return path
    aside = kept.with_name(f".{kept.name}.{uuid.uuid4().hex}")
    try:
        shutil.copytree(path, aside)
        if not kept.exists():
            aside.rename(kept)
    except OSError as error:
        what = f"{kept.parent} cannot be written to: {error.strerror}"
        raise ConfigFault([Fault("--tokenizer_cache_dir", what, "give another folder")]) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return kept


def looked_up(cfg: TrainConfig) -> tuple[TrainConfig, list[Wanted]]:
    """Return the configuration with paths where the cache has them, and what a run would fetch.

    Nothing is asked or fetched.
    """
    places: Places = {}
    missing = _look(cfg, wanted(cfg), places)
    here = localised(cfg, places)
    if not missing:  # else nobody knows what the weights come without
        missing = _look(cfg, _wanted_unasked(unasked(here)), places)
        here = localised(cfg, places)
    return here, missing


def _look(cfg: TrainConfig, names: Sequence[Wanted], places: Places) -> list[Wanted]:
    """Note where each lies; return those that lie nowhere."""
    found = [(each, _in_cache(cfg, each)) for each in names]
    places |= {each.slot: path for each, path in found if path is not None}
    return [each for each, path in found if path is None]


def _in_cache(cfg: TrainConfig, each: Wanted) -> str | None:
    here = _given_here(cfg, each)
    if here is not None:
        return here
    try:
        repository = Repository.find(each.id.repo, each.kind, each.id.revision, offline=True)
        sizes = repository.files(offline=True)
        files, target = each.choose(list(sizes), each.id.path, lambda file: _cached(repository, file).read_bytes())
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

    def told(action: Callable[[], str]) -> str:
        try:
            return action()
        except NotFetched as error:
            where = f"copy the state to this machine and give its folder, without {option('hub.resume')}"
            remedy = where if error.trouble.away else error.trouble.remedy
            raise ConfigFault([Fault(option("save.resume"), f"{resume}: {error.trouble.what}", remedy)]) from error

    commit = for_all(ranks, ranks.is_logger, lambda: told(find))
    mine: list[str] = []
    for_all(ranks, ranks.local_rank == 0, lambda: mine.append(told(lambda: bring(commit))))
    return str(ranks.gather(mine)[ranks.rank - ranks.local_rank][0])
