"""The cache of a run: what is missing is encoded at the start by all ranks together, and from then on it is read."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING

import numpy as np

from difftrain.cache import encoding
from difftrain.cache.decoding import BatchQueue, DecodingDataset
from difftrain.cache.disk import EncoderManifest
from difftrain.cache.encoding import BuildJob, BuildProgress
from difftrain.cache.locations import CacheLocation, DiskLocation, MemoryLocation
from difftrain.cache.manifest.manifest import CacheManifest
from difftrain.cache.request import (
    CacheRequest,
    StorageEstimate,
    build_manifests,
    bytes_text,
    cache_requests,
    caches_anything,
    encoders_of,
)
from difftrain.cache.serve import feature_store, rejected_records
from difftrain.cache.store.read import Reader
from difftrain.config import TrainConfig
from difftrain.config.paths import expanded, is_url, user_cache
from difftrain.config.spellings.spelling import option
from difftrain.contracts import EVERY, ConfigFault, DataFault, Family, Fault, Parts, Reject, Tokenize
from difftrain.data.loader import num_workers
from difftrain.data.prepare import Data
from difftrain.device import Device, choose
from difftrain.device.memory import CACHING, during
from difftrain.distributed.collective import Events, on_each_machine, run_on

if TYPE_CHECKING:
    from difftrain.distributed.ranks import Ranks

log = logging.getLogger("difftrain")
_NAMED = 10  # items that cannot be encoded are named on the console, and all of them in rejected.jsonl


@dataclasses.dataclass(frozen=True)
class CachedData:
    """Data that read what is cached. rejects: what could not be encoded, and is not trained on."""

    data: Data
    rejects: list[Reject] = dataclasses.field(default_factory=list)


def with_cache(
    cfg: TrainConfig, device: Device, ranks: Ranks, family: Family, parts: Parts, data: Data, *, trains: bool = True
) -> CachedData:
    """Encode what is asked for and not there yet, and return the data that read it. Every rank calls it.

    parts: on the host, or deferred; encoders that no step needs any more are offloaded. trains: these data are trained on.
    Raises: ConfigFault where it does not fit or must not be written, DataFault where too much cannot be decoded,
    TrainingFault for a full disk or a damaged cache.
    """
    if not caches_anything(cfg):
        return CachedData(data)
    tokenize = family.tokenizer(parts)

    # what is asked for, what is missing of it, and whether there is room
    requests: list[CacheRequest] = []
    run_on(ranks, True, lambda: requests.extend(cache_requests(cfg, family, parts, data, trains=trains)))
    manifests = _manifests(cfg, ranks, data, requests, tokenize)
    locations = _locations(cfg, ranks, data, manifests)
    _check_room(ranks, locations)

    # encode it, one encoder after another
    work = _Build(cfg, encoding_device(cfg, device, ranks), ranks, family, parts, data, tokenize)
    for location in locations:
        for manifest in location.manifests:
            work.encode(manifest, location)
        location.finish()

    # from now on it is read
    readers = {
        manifest.request.name: location.reader(manifest) for location in locations for manifest in location.manifests
    }
    passed = {address: why for location in locations for address, why in location.passed.items()}
    rejects = _rejects(cfg, ranks, data, locations, readers)
    _let_rest(parts, requests)
    fresh = [encoder for name, encoder in encoders_of(family, parts, trains=trains).items() if name not in readers]
    needs_pixels, needs_control = (any(kind in encoder.source for encoder in fresh) for kind in ("pixels", "control"))
    store = feature_store(manifests, readers, passed, needs_pixels=needs_pixels, needs_control=needs_control)
    return CachedData(dataclasses.replace(data, store=store), rejects)


def encoding_device(cfg: TrainConfig, device: Device, ranks: Ranks) -> Device:
    """Return the device that encodes what is cached: that of training, or of the kind that is asked for.

    Raises ConfigFault where there is none of it.
    """
    kind = cfg.cache.device
    if kind is None or kind == device.kind:
        return device
    try:
        chosen = choose(kind, ranks.local_rank, ranks.local_size)
    except ConfigFault as fault:
        remedy = "leave it out: the training device encodes"
        raise ConfigFault([Fault("--cache.device", problem.what, remedy) for problem in fault.faults]) from None
    log.info("features are encoded on %s, training runs on %s", chosen.kind, device.kind)
    return chosen


def on_device(parts: Parts, device: Device) -> AbstractContextManager[None]:
    """Bring the offloaded encoders to the device for a while: pictures are drawn with them."""
    return encoding.on_device(parts, parts.offloaded - parts.training_only, device)


def deferred_parts(cfg: TrainConfig, family: Family) -> frozenset[str]:
    """Return the frozen parts that are needed only where something is to be encoded. Raises ConfigFault."""
    if not caches_anything(cfg):
        return frozenset()
    parts = family.load(meta=True, deferred=EVERY)
    return frozenset(name for request in cache_requests(cfg, family, parts) for name in request.encoder.modules)


def _manifests(
    cfg: TrainConfig, ranks: Ranks, data: Data, requests: Sequence[CacheRequest], tokenize: Tokenize
) -> list[EncoderManifest]:
    """Tell each encoder by its fingerprint, and list what is wanted of it; one process a machine does it."""
    fingerprints = on_each_machine(ranks, lambda: {request.name: request.encoder.fingerprint() for request in requests})
    for request in requests:
        if len({by_encoder[request.name] for by_encoder in ranks.gather(fingerprints)}) > 1:
            raise DataFault(
                f"the machines have different weights of {request.name} (or other versions of this program)"
            )
    lists = on_each_machine(
        ranks,
        lambda: build_manifests(
            data,
            [request.manifest_request(fingerprints[request.name]) for request in requests],
            tokenize,
            look=not cfg.cache.trust,
            log=log.info,
        ),
    )
    return [
        EncoderManifest(request, fingerprints[request.name], CacheManifest(lists[request.name])) for request in requests
    ]


def _locations(cfg: TrainConfig, ranks: Ranks, data: Data, manifests: Sequence[EncoderManifest]) -> list[CacheLocation]:
    """Open where the features lie, and find out what is missing there."""
    disk, memory = (
        [manifest for manifest in manifests if manifest.request.to_disk is to_disk] for to_disk in (True, False)
    )
    locations: list[CacheLocation] = []
    if disk:
        facts = {
            "dirs": list(cfg.data.dirs),
            "index": data.index.fingerprint,
            "records": data.index.count,
            "model": cfg.model.pretrained,
        }
        locations.append(DiskLocation(cache_path(cfg), cfg.cache, ranks, disk, facts))
    if memory:
        locations.append(MemoryLocation(ranks, memory))
    return locations


def cache_path(cfg: TrainConfig) -> str:
    """Return the folder of the cache, or its URL."""
    folder = cfg.data.cache_dir
    return str(user_cache()) if not folder else folder if is_url(folder) else expanded(folder)


def _check_room(ranks: Ranks, locations: Sequence[CacheLocation]) -> None:
    """Say what the caches take, before anything is encoded. Raises ConfigFault where a machine has not got it."""
    faults = []
    for location in locations:
        estimates = [
            StorageEstimate.of(manifest.request, manifest.manifest.buckets(), location.missing[manifest.request.name])
            for manifest in location.manifests
        ]
        for estimate in estimates:
            log.info(estimate.sentence())
        faults += list(location.shortage(estimates, log.info))
    problems = [fault for rank_fault in ranks.gather(faults) for fault in rank_fault]
    if problems:
        raise ConfigFault(dict.fromkeys(problems))


@dataclasses.dataclass(frozen=True)
class _Build:
    """What encoding needs of a run."""

    cfg: TrainConfig
    device: Device
    ranks: Ranks
    family: Family
    parts: Parts
    data: Data
    tokenize: Tokenize

    def encode(self, encoder_manifest: EncoderManifest, location: CacheLocation) -> None:
        """Encode what is missing of one encoder, all ranks of a group together. What cannot be read now is passed over."""
        cfg, ranks = self.cfg, self.ranks
        job = BuildJob.of(
            encoder_manifest.request, encoder_manifest.manifest, location.missing[encoder_manifest.request.name]
        )
        if not ranks.any(bool(len(job.todo))):
            return
        # a name that no earlier build of this run has used: counters of the store are never reset
        events, token = Events(), ranks.broadcast(uuid.uuid4().hex)
        of_group = f"cache/{token}/{location.group.leader}"
        # ranks draw batch numbers from one counter, so that a fast rank does more and none waits
        batch_queue = BatchQueue(job.todo, ranks.counter(f"{of_group}/next"), events.stop)
        progress = BuildProgress(
            encoder_manifest.request.name, int(np.count_nonzero(job.missing)), ranks.tally(f"{of_group}/done")
        )
        setting = "data.workers" if cfg.cache.workers is None else "cache.workers"
        wanted_workers = cfg.data.workers if cfg.cache.workers is None else cfg.cache.workers

        def encode_here() -> None:
            sink = location.sink(encoder_manifest)
            try:
                with during(CACHING), closing(sink):
                    encoding.encode(
                        job,
                        DecodingDataset(self.data, job.manifest, self.tokenize),
                        batch_queue,
                        sink,
                        progress,
                        parts=self.parts,
                        device=self.device,
                        precision=cfg.training.mixed_precision,
                        workers=num_workers(wanted_workers, ranks.local_size, said_by=option(setting)),
                        stop=events.stop,
                    )
            except BaseException as error:
                events.failed.set()
                if isinstance(error, SystemExit):
                    log.info("stopped by a signal; what was encoded stays, and the same command continues from there")
                raise

        run_on(ranks, bool(len(job.todo)), encode_here, events)
        if len(job.todo):
            progress.end()
        location.passed |= job.passed


def _rejects(
    cfg: TrainConfig, ranks: Ranks, data: Data, locations: Sequence[CacheLocation], readers: Mapping[str, Reader]
) -> list[Reject]:
    """Name what of this run's records nothing could be made of. Raises DataFault where that is too much."""
    rejects: dict[str, Reject] = {}

    def look() -> None:
        for location in locations:
            for manifest in location.manifests:
                bad = list(
                    rejected_records(
                        manifest, location.rejects(), readers[manifest.request.name], data, location.passed
                    )
                )
                rejects.update((reject.path, reject) for reject in bad)
                rejects.update((reject.path, reject) for reject in manifest.manifest.passed)
                count, of = len({reject.path for reject in bad}) + manifest.manifest.num_passed, data.index.count
                if count > cfg.data.max_rejected_share * of or (count and count == of):
                    such = next(
                        (f", such as {reject.path}: {reject.reason}" for reject in (*bad, *manifest.manifest.passed)),
                        "",
                    )
                    raise DataFault(
                        f"{count:,} of {of:,} images cannot be encoded "
                        f"({option('data.max_rejected_share')}={cfg.data.max_rejected_share:g}){such}"
                    )
        # one rank of a machine says it; all get the list
        for reject in list(rejects.values())[:_NAMED]:
            log.warning("%s: %s; it is not in the cache", reject.path, reject.reason)
        if len(rejects) > _NAMED:
            log.warning("and %s more; rejected.jsonl names them all", f"{len(rejects) - _NAMED:,}")

    run_on(ranks, ranks.leads_node, look)
    return sorted(rejects.values(), key=lambda reject: reject.path)


def _let_rest(parts: Parts, requests: Sequence[CacheRequest]) -> None:
    """Say which parts no step needs any more."""
    fresh = {name for request in requests for name in request.encoder.modules} - parts.offloaded
    if not fresh:  # an evaluation set's cache follows the training set's
        return
    parts.offloaded |= fresh
    names = sorted(parts.offloaded)
    size = sum(param.numel() * param.element_size() for name in names for param in parts.frozen[name].parameters())
    deferred = [name for name in names if not parts.is_loaded(name)]
    where = "are not loaded" if deferred == names else "stay on the host"
    parts.notes.append(
        f"cached features: no step needs {', '.join(names)}; they {where}, {bytes_text(size)} less on the device"
    )
