"""The cache of features: at the start all ranks encode what is missing of it, and from then on it is read."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING

import numpy as np

from difftrain.config import TrainConfig
from difftrain.config.finding import option
from difftrain.config.there import expanded, is_url
from difftrain.config.user_cache import user_cache
from difftrain.contracts import EVERY, ConfigFault, DataFault, Family, Fault, Parts, Reject, Tokenize
from difftrain.data.cache.decoding import Decoding
from difftrain.data.cache.guard import HandedOut
from difftrain.data.cache.reader import Reader
from difftrain.data.cache.wanted import Wanted
from difftrain.data.cache.work import build_wanted
from difftrain.data.loader import num_workers
from difftrain.data.prepare import Data
from difftrain.device import Device, choose
from difftrain.device.memory import during
from difftrain.train import encoding
from difftrain.train.cache_disk import Listed
from difftrain.train.cache_places import InMemory, OnDisk, Place
from difftrain.train.cache_plan import Need, Wish, amount, wanted, wishes
from difftrain.train.cache_store import rejects_of, store_of
from difftrain.train.encoding import Job, Progress
from difftrain.train.out_of_memory import CACHING
from difftrain.train.together import News, for_all, on_each_machine

if TYPE_CHECKING:
    from difftrain.distributed.ranks import Ranks

log = logging.getLogger("difftrain")
_NAMED = 10  # items that cannot be encoded are named on the console, and all of them in rejected.jsonl


@dataclasses.dataclass(frozen=True)
class Cached:
    """Data that read what is cached. rejects: what could not be encoded, and is not trained on."""

    data: Data
    rejects: list[Reject] = dataclasses.field(default_factory=list)


def with_cache(
    cfg: TrainConfig, device: Device, ranks: Ranks, family: Family, parts: Parts, data: Data, *, trains: bool = True
) -> Cached:
    """Encode what is asked for and not there yet, and return the data that read it. Every rank calls it.

    parts: on the host, or lazy; encoders that no step needs any more rest. trains: these data are trained on.
    Raises: ConfigFault where it does not fit or must not be written, DataFault where too much cannot be decoded,
    TrainingFault for a full disk or a damaged cache.
    """
    if not wanted(cfg):
        return Cached(data)
    tokenize = family.tokenizer(parts)
    asked: list[Wish] = []
    for_all(ranks, True, lambda: asked.extend(wishes(cfg, family, parts, data, trains=trains)))
    listed = _listed(cfg, ranks, data, asked, tokenize)
    places = _places(cfg, ranks, data, listed)
    _make_sure_of_room(ranks, places)
    work = _Work(cfg, encoding_device(cfg, device, ranks), ranks, family, parts, data, tokenize)
    for place in places:
        for each in place.listed:
            work.encode(each, place)
        place.finish()
    readers = {each.wish.name: place.reader(each) for place in places for each in place.listed}
    passed = {address: why for place in places for address, why in place.passed.items()}
    rejects = _rejects(cfg, ranks, data, places, readers)
    _let_rest(parts, asked)
    return Cached(dataclasses.replace(data, store=store_of(listed, readers, passed)), rejects)


def encoding_device(cfg: TrainConfig, device: Device, ranks: Ranks) -> Device:
    """Return the device that encodes what is cached: that of training, or of the kind that is asked for.

    Raises ConfigFault where there is none of it.
    """
    kind = cfg.cache.device
    if kind is None or kind == device.kind:
        return device
    try:
        found = choose(kind, ranks.local_rank, ranks.local_size)
    except ConfigFault as fault:
        remedy = "leave it out: the device of training encodes"
        raise ConfigFault([Fault("--cache.device", each.what, remedy) for each in fault.faults]) from None
    log.info("what is cached is encoded on %s, training is on %s", found.kind, device.kind)
    return found


def awake(parts: Parts, device: Device) -> AbstractContextManager[None]:
    """Bring the resting encoders to the device for a while: pictures are drawn with them."""
    return encoding.awake(parts, parts.resting - parts.training_only, device)


def lazy_parts(cfg: TrainConfig, family: Family) -> frozenset[str]:
    """Return the frozen parts that are needed only where something is to be encoded. Raises ConfigFault."""
    if not wanted(cfg):
        return frozenset()
    parts = family.load(meta=True, lazy=EVERY)
    return frozenset(name for wish in wishes(cfg, family, parts) for name in wish.encoder.modules)


def _listed(cfg: TrainConfig, ranks: Ranks, data: Data, asked: Sequence[Wish], tokenize: Tokenize) -> list[Listed]:
    """Tell each encoder by its fingerprint, and list what is wanted of it; one process a machine does it."""
    fingerprints = on_each_machine(ranks, lambda: {wish.name: wish.encoder.fingerprint() for wish in asked})
    for wish in asked:
        if len({each[wish.name] for each in ranks.gather(fingerprints)}) > 1:
            raise DataFault(f"the machines have different weights of {wish.name} (or other versions of this program)")
    lists = on_each_machine(
        ranks,
        lambda: build_wanted(
            data,
            [wish.asked(fingerprints[wish.name]) for wish in asked],
            tokenize,
            look=not cfg.cache.trust,
            say=log.info,
        ),
    )
    return [Listed(wish, fingerprints[wish.name], Wanted(lists[wish.name])) for wish in asked]


def _places(cfg: TrainConfig, ranks: Ranks, data: Data, listed: Sequence[Listed]) -> list[Place]:
    """Open where the features lie, and find out what is missing there."""
    disk, memory = ([each for each in listed if each.wish.to_disk is to_disk] for to_disk in (True, False))
    places: list[Place] = []
    if disk:
        facts = {
            "dirs": list(cfg.data.dirs),
            "index": data.index.fingerprint,
            "records": data.index.count,
            "model": cfg.model.pretrained,
        }
        places.append(OnDisk(where_of(cfg), cfg.cache, ranks, disk, facts))
    if memory:
        places.append(InMemory(ranks, memory))
    return places


def where_of(cfg: TrainConfig) -> str:
    """Return the folder of the cache, or its URL."""
    given = cfg.data.cache_dir
    return str(user_cache()) if not given else given if is_url(given) else expanded(given)


def _make_sure_of_room(ranks: Ranks, places: Sequence[Place]) -> None:
    """Say what the caches take, before anything is encoded. Raises ConfigFault where a machine has not got it."""
    faults = []
    for place in places:
        needs = [Need.of(each.wish, each.wanted.buckets(), place.missing[each.wish.name]) for each in place.listed]
        for need in needs:
            log.info(need.sentence())
        faults += list(place.short(needs, log.info))
    found = [fault for each in ranks.gather(faults) for fault in each]
    if found:
        raise ConfigFault(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class _Work:
    """What encoding needs of a run."""

    cfg: TrainConfig
    device: Device
    ranks: Ranks
    family: Family
    parts: Parts
    data: Data
    tokenize: Tokenize

    def encode(self, each: Listed, place: Place) -> None:
        """Encode what is missing of one encoder, all ranks of a group together. What cannot be read now is passed over."""
        cfg, ranks = self.cfg, self.ranks
        job = Job.of(each.wish, each.wanted, place.missing[each.wish.name])
        if not ranks.any(bool(len(job.todo))):
            return
        news, token = News(), ranks.broadcast(uuid.uuid4().hex)
        of_group = f"cache/{token}/{place.group.leader}"
        handed = HandedOut(job.todo, ranks.counter(f"{of_group}/next"), news.stop)
        progress = Progress(each.wish.name, int(np.count_nonzero(job.missing)), ranks.tally(f"{of_group}/done"))
        setting = "data.workers" if cfg.cache.workers is None else "cache.workers"
        wanted_workers = cfg.data.workers if cfg.cache.workers is None else cfg.cache.workers

        def encode_here() -> None:
            sink = place.sink(each)
            try:
                with during(CACHING), closing(sink):
                    encoding.encode(
                        job,
                        Decoding(self.data, job.wanted, self.tokenize),
                        handed,
                        sink,
                        progress,
                        parts=self.parts,
                        device=self.device,
                        precision=cfg.training.mixed_precision,
                        workers=num_workers(wanted_workers, ranks.local_size, said_by=option(setting)),
                        stop=news.stop,
                    )
            except BaseException as error:
                news.failed.set()
                if isinstance(error, SystemExit):
                    log.info("stopped by a signal; what was encoded stays, and the same command goes on from there")
                raise

        for_all(ranks, bool(len(job.todo)), encode_here, news)
        if len(job.todo):
            progress.end()
        place.passed |= job.passed


def _rejects(
    cfg: TrainConfig, ranks: Ranks, data: Data, places: Sequence[Place], readers: Mapping[str, Reader]
) -> list[Reject]:
    """Name what of this run's records nothing could be made of. Raises DataFault where that is too much."""
    found: dict[str, Reject] = {}

    def look() -> None:
        for place in places:
            for each in place.listed:
                bad = list(rejects_of(each, place.rejects(), readers[each.wish.name], data, place.passed))
                found.update((reject.path, reject) for reject in bad)
                found.update((reject.path, reject) for reject in each.wanted.passed)
                count, of = len({reject.path for reject in bad}) + each.wanted.num_passed, data.index.count
                if count > cfg.data.max_rejected_share * of or (count and count == of):
                    such = next((f", such as {one.path}: {one.reason}" for one in (*bad, *each.wanted.passed)), "")
                    raise DataFault(
                        f"{count:,} of {of:,} pictures cannot be encoded "
                        f"(--max_rejected_share={cfg.data.max_rejected_share:g}){such}"
                    )
        for reject in list(found.values())[:_NAMED]:
            log.warning("%s: %s; it is not in the cache", reject.path, reject.reason)
        if len(found) > _NAMED:
            log.warning("and %s more; rejected.jsonl names them all", f"{len(found) - _NAMED:,}")

    for_all(ranks, ranks.leads_node, look)
    return sorted(found.values(), key=lambda reject: reject.path)


def _let_rest(parts: Parts, asked: Sequence[Wish]) -> None:
    """Say which parts no step needs any more."""
    fresh = {name for wish in asked for name in wish.encoder.modules} - parts.resting
    if not fresh:  # an evaluation set's cache follows the training set's
        return
    parts.resting |= fresh
    names = sorted(parts.resting)
    size = sum(each.numel() * each.element_size() for name in names for each in parts.frozen[name].parameters())
    asleep = [name for name in names if parts.sleeps(name)]
    where = "are not loaded" if asleep == names else "stay on the host"
    parts.notes.append(
        f"cached features: no step needs {', '.join(names)}; they {where}, {amount(size)} less on the device"
    )
