"""Loader processes: micro batch n of a rank is a pure function of n, so any number of workers yields the same.

How a batch travels from its worker: data/transfer.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from difftrain.config import TrainConfig
from difftrain.config.spellings.spelling import option
from difftrain.contracts import Batch, DataFault, FeatureSpec, Tokenize, TrainingFault
from difftrain.data.plan.plan import EpochPlan, RankShare, Uses, total_steps
from difftrain.data.plan.readahead import Readahead
from difftrain.data.plan.tables import PlanTables
from difftrain.data.plan.whole import WholePlan
from difftrain.data.recipe import recipes_of
from difftrain.data.samples import SampleMaker
from difftrain.data.transfer import Sent, receive, send
from difftrain.distributed.launch import Launch

if TYPE_CHECKING:
    from difftrain.data.prepare import Data

log = logging.getLogger("difftrain")

SPARE = 16  # neighbours that are tried for a record whose file is gone, before the data is called unreadable
_TURN_S = 0.0005  # of the threads of a worker: the one that sends what is ready need not wait for the next picture
_LOOK_S = 1.0  # between two looks at workers that are waited for
_PREFETCH = 2  # micro batches a worker keeps ready


class MicroBatches(Dataset[Any]):
    """Item n is micro batch n % accumulation of step n // accumulation; None where a step has fewer. Picklable."""

    def __init__(self, maker: SampleMaker, plan: EpochPlan, share: RankShare) -> None:
        self._maker, self._plan, self._share = maker, plan, share
        self._readahead: Readahead | None = None
        if isinstance(plan, WholePlan) and plan.order == "sequential":
            self._readahead = Readahead(maker.index, plan)

    def __getitem__(self, n: int) -> Batch | DataFault | TrainingFault | None:
        step, micro = divmod(n, self._share.accumulation)
        if self._readahead is not None and isinstance(self._plan, WholePlan):
            self._readahead.advise(step, self._share.part(micro, self._plan.group(step)))
        uses = self._plan.micro_batch(step, micro, self._share)
        if uses is None:
            return None
        draws = self._plan.draws(uses)
        epoch, _ = self._plan.locate(step)
        try:
            batch = self._maker.batch(
                uses.bucket.bucket, draws, epoch, lambda slot: neighbours(self._plan, uses, slot), step
            )
        except (DataFault, TrainingFault) as fault:
            return fault  # raised by the parent, without the worker's traceback around it
        # whoever counts it names what was replaced in it
        return replace(batch, idle=True, counts={"samples": 0.0}, rejects=()) if uses.idle else batch


def neighbours(plan: EpochPlan, uses: Uses, slot: int) -> list[int]:
    """Return the ids of the next records of the bucket in the order of its table: by key, or by key in a shard."""
    bucket, row = uses.bucket, int(uses.rows[slot])
    after = row - bucket.first + 1 + np.arange(min(SPARE, bucket.records - 1))
    ids, _ = plan.tables.take(bucket.first + after % bucket.records)
    return ids


class StepLoader:
    """Iterate over steps: a list of micro batches each, `accumulation` of them or fewer, on every rank as many."""

    def __init__(self, loader: DataLoader[Any], accumulation: int) -> None:
        self._loader, self._accumulation = loader, accumulation

    def __len__(self) -> int:
        return len(self._loader) // self._accumulation

    def __iter__(self) -> Iterator[list[Batch]]:
        micro: list[Batch] = []
        for number, batch in enumerate(items_of(self._loader), 1):
            if batch is not None:
                micro.append(batch)
            if number % self._accumulation == 0:
                yield micro
                micro = []


def make_loader(
    data: Data,
    plan: EpochPlan,
    features: FeatureSpec,
    tokenize: Tokenize,
    cfg: TrainConfig,
    *,
    dp_rank: int,
    dp_size: int,
    first_step: int,
    last_step: int,
    local_size: int | None = None,
) -> StepLoader:
    """Yield this rank's micro batches of steps first_step to last_step - 1.

    local_size: processes of this machine that load data (default: what the launcher says); they share its processors.
    """
    share = RankShare(dp_rank, dp_size, cfg.batch_sizes, cfg.training.accumulation)
    if share.global_batches != plan.global_batches:
        raise ValueError(f"a plan with global batch {plan.global_batches} for ranks that take {share.global_batches}")
    check_sizes(data.tables, features)

    # what makes the samples
    total = total_steps(cfg.training, plan)
    recipes = recipes_of(cfg, data.index.sources)
    maker = SampleMaker(data.index, recipes, features, tokenize, plan.seed, data.store, total)

    # item n of the loader is micro batch n of the run
    items = range(first_step * share.accumulation, last_step * share.accumulation)
    workers = num_workers(cfg.data.workers, local_size)
    loader = data_loader(MicroBatches(maker, plan, share), items, workers, maker.forks, ahead=cfg.data.prefetch)
    return StepLoader(loader, share.accumulation)


def check_sizes(tables: PlanTables, features: FeatureSpec) -> None:
    """Refuse buckets that the model cannot take. Raises DataFault."""
    multiple = features.size_multiple
    sizes = sorted({rows.bucket for rows in (*tables.training, *tables.validation)})
    odd = [str(size) for size in sizes if size.height % multiple or size.width % multiple]
    if odd:
        raise DataFault(
            f"the model takes sizes that are multiples of {multiple}, the data has {', '.join(odd[:6])}: "
            f"choose {option('data.resolution')} and {option('data.bucket_reso_steps')} accordingly"
        )


class WorkerDied(TrainingFault):
    """Say that a process that loads data was killed, or crashed."""


class WorkersSilent(TrainingFault):
    """Say that the data loader processes delivered nothing for longer than is waited for."""


def data_loader(
    dataset: Dataset[Any],
    items: Iterable[int],
    workers: int,
    forks: bool = True,
    *,
    watched: bool = False,
    ahead: int | None = None,
) -> DataLoader[Any]:
    """Make a loader over items in their order, that neither reads nor moves the process's random state.

    forks: workers need nothing that is lost in a fork; else they are started anew, which takes seconds.
    watched: its workers are looked after while an item is waited for (see items_of). ahead: items that a worker keeps
    ready.
    """
    more: dict[str, Any] = {}
    if workers:
        more = {
            "prefetch_factor": ahead or _PREFETCH,
            "worker_init_fn": _start_worker,
            "timeout": _LOOK_S if watched else 0,
        }
        if not forks:
            # threads of a tokenizer or a store do not survive a fork
            more["multiprocessing_context"] = "spawn"

    # an item is whole when it comes from the dataset: the loader puts nothing together
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=items,
        num_workers=workers,
        collate_fn=send if workers else _as_it_is,
        generator=torch.Generator(),  # else the loader seeds its workers from the global generator, and moves it
        **more,
    )


def _as_it_is(item: Any) -> Any:
    return item


def _start_worker(_: int) -> None:
    """Leave signals to the parent: it finishes its step and saves, for which it needs this worker.

    torchrun, batch systems and Ctrl-C signal whole process groups. But the parent itself ends its workers by SIGTERM,
    so that only its own counts.
    """
    sys.setswitchinterval(_TURN_S)
    for name in ("SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if hasattr(signal, "sigwaitinfo") and parent is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before any other thread is started
        threading.Thread(target=_end_with, args=(parent.pid,), name="sigterm", daemon=True).start()


def _end_with(parent: int | None) -> None:
    """Wait for a SIGTERM from the parent, and end this process."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def items_of(loader: DataLoader[Any], patience_s: float = 0) -> Iterator[Any]:
    """Iterate over a loader's items; raise the fault that a worker handed on, and name a worker's death.

    patience_s: how long an item is waited for, where the loader was made to look after its workers; 0: for ever.
    """
    iterator = iter(loader)
    with _deaths_noticed_here() if loader.timeout else contextlib.nullcontext():
        try:
            while True:
                try:
                    item = _next(iterator, loader, patience_s)
                except StopIteration:
                    return
                if isinstance(item, DataFault | TrainingFault):
                    raise item
                yield item
        finally:
            del iterator  # ends the workers, even where a traceback keeps this frame


def _next(iterator: Iterator[Any], loader: DataLoader[Any], patience_s: float) -> Any:
    """Return the next item. Raises: WorkerDied, WorkersSilent."""
    began = time.monotonic()
    while True:
        try:
            item = next(iterator)
            return receive(item) if isinstance(item, Sent) else item
        except RuntimeError as error:
            if str(error).startswith("DataLoader timed out"):
                if time.monotonic() - began < patience_s:
                    continue
                _end_workers(iterator)
                what = f"the data loader processes delivered nothing for {patience_s:g} s"
                raise WorkersSilent(what) from error
            if not str(error).startswith("DataLoader worker"):
                raise
            raise _died(iterator, loader, str(error)) from error
        except (ConnectionError, FileNotFoundError, EOFError) as error:
            # shared memory comes over a connection to its worker; a dataset may raise the same of its files
            if not _has_lost_worker(iterator):
                raise
            raise _died(
                iterator, loader, f"DataLoader worker is killed before it could hand over a batch ({error})"
            ) from error


def _has_lost_worker(iterator: Iterator[Any]) -> bool:
    """Tell whether a worker has ended, or does so now: its connections close a moment before."""
    workers = iterator._workers if isinstance(iterator, _MultiProcessingDataLoaderIter) else []
    return bool(workers and multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=_LOOK_S))


def _died(iterator: Iterator[Any], loader: DataLoader[Any], what: str) -> WorkerDied:
    _end_workers(iterator)
    return WorkerDied(
        f"{what}. A data loader process was killed, most often for lack of memory: "
        f"try a smaller {option('data.workers')} than {loader.num_workers}"
    )


@contextlib.contextmanager
def _deaths_noticed_here() -> Iterator[None]:
    """Let a worker's death be noticed where its item is waited for; torch's handler raises wherever this process is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _end_workers(iterator: Any) -> None:
    """End the workers of a loader now: the traceback keeps the iterator, and one that hangs in C hears no SIGTERM."""
    if isinstance(iterator, _MultiProcessingDataLoaderIter):
        iterator._shutdown_workers()  # also forgets them, else the signal of their end is taken for another death
        for worker in iterator._workers:
            worker.kill()


def num_workers(requested: int, local_size: int | None = None, *, said_by: str = "") -> int:
    """Return the number of loader processes: as many as wanted, at most one a processor that this process has.

    said_by: what wants so many; unset: the option of the loader's workers.
    """
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = local_size or Launch.from_environment().local_size
    most = max(1, processors // ranks)
    if requested > most:
        _log_capped(requested, most, processors, ranks, said_by or option("data.workers"))
    return min(requested, most)


@functools.cache
def _log_capped(requested: int, most: int, processors: int, ranks: int, said_by: str) -> None:
    log.info(
        "%d loader process%s a rank instead of %d (%s): %d processors for %d rank%s here",
        most,
        "es"[: 2 * (most > 1)],
        requested,
        said_by,
        processors,
        ranks,
        "s"[: ranks > 1],
    )
