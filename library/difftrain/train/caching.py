"""The cache of features: at the start all ranks encode what is asked for, and from then on it is read."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import torch

from difftrain.config import TrainConfig
from difftrain.contracts import ConfigFault, DataFault, Encoder, Family, Fault, Parts, Reject, TrainingFault
from difftrain.data.cache.places import Damaged, Folder, Rejected, SharedMemory
from difftrain.data.cache.store import FeatureStore, Shelf
from difftrain.data.cache.work import CaptionWork, PictureWork
from difftrain.data.loader import num_workers
from difftrain.data.prepare import Data, index_folder
from difftrain.data.samples import SampleMaker
from difftrain.device import Device, fp8, host
from difftrain.device.memory import during
from difftrain.train.encoding import Job, amount, encode, moved
from difftrain.train.out_of_memory import CACHING
from difftrain.train.together import News, for_all, on_each_machine

if TYPE_CHECKING:
    from difftrain.distributed.ranks import Ranks

log = logging.getLogger("difftrain")
FOLDER = "features"  # beside the indexes of the same data


def with_cache(cfg: TrainConfig, device: Device, ranks: Ranks, family: Family, parts: Parts, data: Data) -> Data:
    """Encode what is asked for and not there yet, and return the data that read it. Every rank calls it.

    parts: on the host; encoders that no step needs any more rest there.
    Raises: ConfigFault where it does not fit, DataFault where too much cannot be decoded, TrainingFault for a full disk.
    """
    if not wanted(cfg):
        return data
    jobs: list[Job] = []
    for_all(ranks, True, lambda: jobs.extend(asked_for(cfg, family, parts, data)))
    for job in jobs:
        _find_place(cfg, ranks, parts, job)
    for_all(ranks, True, lambda: _look(cfg, ranks, jobs))
    _make_sure_of_room(ranks, jobs)
    for job in jobs:
        news = News()
        for_all(ranks, True, partial(_encode, cfg, device, ranks, parts, job, news), news)
        job.rejected = _all_rejected(ranks, job)
        _refuse(cfg, job)
        parts.resting |= set(job.encoder.modules)
    names = sorted(parts.resting)
    size = sum(each.numel() * each.element_size() for name in names for each in parts.frozen[name].parameters())
    said = f"no step needs {', '.join(names)}; they stay on the host, {amount(size)} less on the device"
    parts.notes.append(f"cached features: {said}")
    return dataclasses.replace(data, store=_store(jobs))


def awake(parts: Parts, device: Device) -> AbstractContextManager[None]:
    """Bring the resting encoders to the device for a while: pictures are drawn with them."""
    return moved(parts, parts.resting, device)


def undecodable(data: Data) -> list[Reject]:
    """Return what could not be decoded when it was to be encoded."""
    if data.store.pictures is None:
        return []
    found = data.store.pictures.rejected.items()
    return [Reject(data.index.path(data.index.record(record_id)), reason) for record_id, reason in found]


def wanted(cfg: TrainConfig) -> bool:
    """Tell whether anything is to be cached."""
    section = cfg.cache
    return section.latents or section.latents_to_disk or section.text or section.text_to_disk


def asked_for(cfg: TrainConfig, family: Family, parts: Parts, data: Data) -> list[Job]:
    """Lay out what is asked for; where it lies is not decided yet."""
    section = cfg.cache
    asked = (
        ("latents", "--cache_latents", "pictures", section.latents, section.latents_to_disk),
        ("text", "--cache_text_encoder_outputs", "captions", section.text, section.text_to_disk),
    )
    if not wanted(cfg):
        return []
    tokenize, described = family.tokenizer(parts), family.encoders(parts)
    plain = tuple(dataclasses.replace(recipe.plain(), conditioning_dir=None) for recipe in data.recipes)
    maker = SampleMaker(data.index, plain, family.features, tokenize, seed=0)
    jobs: list[Job] = []
    for name, flag, things, in_memory, to_disk in asked:
        if not (in_memory or to_disk):
            continue
        encoder = described[name]
        work: PictureWork | CaptionWork
        if encoder.source == "pixels":
            size = cfg.model.vae_batch_size or max(cfg.batch_sizes)
            work = PictureWork(maker, data.tables, encoder, size, flip=any(recipe.flip for recipe in data.recipes))
        else:
            work = CaptionWork(maker, data.tables, encoder, tokenize)
        jobs.append(Job(name, flag, things, to_disk, encoder, work))
    return jobs


def _find_place(cfg: TrainConfig, ranks: Ranks, parts: Parts, job: Job) -> None:
    """Decide where the features lie: in files that name what they are of, or in this machine's memory."""
    layout = job.work.layout
    if job.to_disk:
        fingerprint = on_each_machine(ranks, lambda: fingerprint_of(job.encoder, parts))
        folder = index_folder(cfg) / FOLDER / f"{job.name}-{fingerprint[:16]}"
        job.place = Folder(folder, job.work.names(fingerprint))
    else:
        path = on_each_machine(ranks, lambda: SharedMemory.reserve(layout.bytes))
        job.place = SharedMemory(path, layout.parts)


def fingerprint_of(encoder: Encoder, parts: Parts) -> str:
    """Hash an encoder: its weights bit by bit, and all else that decides what it makes."""
    state = hashlib.blake2b(repr((encoder.settings, sorted(encoder.features.items()))).encode(), digest_size=16)
    for name in encoder.modules:
        for key, tensor in sorted(parts.frozen[name].state_dict().items()):
            state.update(f"{name}.{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
            state.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        for key in fp8.held(parts.frozen[name]):  # a state dict holds layers in 8 bits as they were before
            state.update(f"{name}.{key} in 8 bits".encode())
    return state.hexdigest()


def _look(cfg: TrainConfig, ranks: Ranks, jobs: Sequence[Job]) -> None:
    """Find out which parts of this rank's share are missing; a damaged one is named and encoded anew."""
    for job in jobs:
        if isinstance(job.place, Folder) and ranks.leads_node:
            job.place.clean(time.time())
        for part in job.work.layout.parts[ranks.local_rank :: ranks.local_size]:
            try:
                whole = job.place.whole(part, check=not cfg.cache.skip_check)
            except Damaged as damage:
                log.warning("%s: %s; it is encoded anew", job.place.find(part)[0], damage)
                whole = False
            if not whole:
                job.missing.append(part)


def _encode(cfg: TrainConfig, device: Device, ranks: Ranks, parts: Parts, job: Job, news: News) -> None:
    if job.missing:
        workers = num_workers(cfg.data.workers, ranks.local_size)
        with during(CACHING):
            encode(job, device, cfg.training.mixed_precision, parts, workers, news.stop)


def _make_sure_of_room(ranks: Ranks, jobs: Sequence[Job]) -> None:
    """Say what the caches take, before anything is encoded. Raises ConfigFault where a machine has not got it."""
    shares = ranks.gather([sum(part.bytes for part in job.missing) for job in jobs])
    first = ranks.rank - ranks.local_rank
    wanted = [sum(sizes) for sizes in zip(*shares[first : first + ranks.local_size], strict=True)]
    faults = _short_of(jobs, wanted) if ranks.leads_node else []
    found = [fault for each in ranks.gather(faults) for fault in each]
    if found:
        raise ConfigFault(dict.fromkeys(found))


def _short_of(jobs: Sequence[Job], wanted: Sequence[int]) -> list[Fault]:
    """Compare what this machine has with what is wanted in bytes, job by job."""
    faults = []
    memory, on_disk = host.available_bytes(), 0
    for job, size in zip(jobs, wanted, strict=True):
        if isinstance(job.place, Folder):
            log.info("%s, %s of it to be encoded; %s", job.needs, amount(size), job.where)
            _say_unused(job.place)
            there = next(path for path in (job.place.path, *job.place.path.parents) if path.exists())
            free, on_disk = shutil.disk_usage(there).free - on_disk, on_disk + size
            if size > free:
                what = f"needs {amount(size)} more below {job.where}, where {amount(free)} are free"
                faults.append(Fault(f"{job.flag}_to_disk", what, "make room, or name another --cache_dir"))
            continue
        known = "" if memory is None else f", of {amount(memory)} that are free"
        log.info("%s of this machine's memory%s", job.needs, known)
        if memory is not None and size > memory:
            what = f"needs {amount(size)} of memory, and {amount(memory)} are free"
            faults.append(Fault(job.flag, what, f"{job.flag}_to_disk keeps it in files instead"))
        memory = None if memory is None else memory - size
    return faults


def _say_unused(place: Folder) -> None:
    count, size = place.unused()
    if count:
        log.info(
            "%s: %d files (%s) belong to other states of the data; remove them where no run reads them",
            place.path,
            count,
            amount(size),
        )


def _all_rejected(ranks: Ranks, job: Job) -> Rejected:
    """Return what is missing of all parts, whoever encoded them. Raises TrainingFault where a part is not there."""
    if not isinstance(job.place, Folder):
        first = ranks.rank - ranks.local_rank
        shares = ranks.gather(job.rejected)[first : first + ranks.local_size]
        return {slot: reason for share in shares for slot, reason in share.items()}
    found: Rejected = {}
    for part in job.work.layout.parts:
        try:
            found |= {part.first + row: reason for row, reason in job.place.rejected(part).items()}
        except Damaged as damage:
            raise TrainingFault(f"{job.place.file(part)}: {damage}, though it was just written; start again") from None
    return found


def _refuse(cfg: TrainConfig, job: Job) -> None:
    """Raise DataFault where too much could not be decoded."""
    count, of = len(job.rejected), job.work.layout.count
    if count > cfg.data.max_rejected_share * of or count == of:
        some = next(iter(job.rejected.values()))
        raise DataFault(
            f"{count:,} of {of:,} pictures cannot be decoded (--max_rejected_share={cfg.data.max_rejected_share:g}), such as: {some}"
        )


def _store(jobs: Sequence[Job]) -> FeatureStore:
    pictures = captions = None
    for job in jobs:
        shelf = Shelf(job.work.layout, [job.place.find(part) for part in job.work.layout.parts])
        if isinstance(job.work, PictureWork):
            pictures = job.work.found(shelf, job.rejected)
        else:
            captions = job.work.found(shelf)
    return FeatureStore(pictures, captions)
