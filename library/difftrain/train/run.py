"""One run from configuration to report: put the parts together, train, leave everything whole."""

from __future__ import annotations

import errno
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from difftrain import optim
from difftrain.config import TrainConfig
from difftrain.config.secrets import redact_text
from difftrain.config.sections import CacheSection
from difftrain.config.toml import dump
from difftrain.contracts import Batch, ConfigFault, DataFault, Engine, Family, Fault, Parts, TrainingFault
from difftrain.data.index import Index
from difftrain.data.indexing import TooManyRejects
from difftrain.data.length import total_steps
from difftrain.data.loader import check_sizes, make_loader
from difftrain.data.plan import EpochPlan
from difftrain.data.prepare import Data, global_batches, make_plan, open_data, prepare
from difftrain.device import Device, choose, use_attention
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.models.registry import make_family
from difftrain.report.clock import Clock
from difftrain.report.environment import command, process_age_s, redacted
from difftrain.report.files import write_whole
from difftrain.train import out_of_memory
from difftrain.train.averages import announce, require_profiles, start_averages
from difftrain.train.caching import lazy_parts, with_cache
from difftrain.train.check import check, check_device
from difftrain.train.drawing import Drawing
from difftrain.train.ending import finish, parameter_counts, say_what_runs, settle_uploads, write_reports
from difftrain.train.evaluating import Evaluating
from difftrain.train.evaluating_sets import EvaluatingSets, open_sets
from difftrain.train.hub.fetch import fetch
from difftrain.train.hub.ids import away
from difftrain.train.hub.target import open_target
from difftrain.train.hub.uploads import AT_STOP_S, Uploads
from difftrain.train.loop import train
from difftrain.train.meter import Meter
from difftrain.train.outputs import Outputs, set_up_logging, write_rejects
from difftrain.train.resuming import check_length, place, restore, schedule_from
from difftrain.train.run_dir import as_given, how_to_go_on, settled
from difftrain.train.saving import Saving
from difftrain.train.signals import Requests
from difftrain.train.start import Start, begin, check_same, identity
from difftrain.train.state import Hook, Run
from difftrain.train.together import for_all, on_each_machine

log = logging.getLogger("difftrain")
CONFIG_FILE, DATASET_FILE = "config.toml", "dataset.toml"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def run(cfg: TrainConfig, argv: list[str]) -> int:
    """Train as configured and return the exit code: 0 finished, 128 + signal where a signal ended it early."""
    try:
        return _run(cfg, argv)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise TrainingFault(
            f"{error.filename or cfg.output_dir}: {error.strerror}; checkpoints that were whole stay so: "
            f"make room, then {how_to_go_on(cfg.save)} from the newest "
            f"({'--checkpoint_every_n_minutes' if cfg.save.run_dirs else '--save_state'} keeps some on the way)"
        ) from error


def _run(cfg: TrainConfig, argv: list[str]) -> int:
    launch = Launch.from_environment()
    if cfg.sample.test_only:
        cfg = cfg.model_copy(update={"cache": CacheSection()})  # no batch is made, so there is nothing to be cached
    fetches = away(cfg)  # looked at once it is here: before a device is touched nothing can be waited for together
    check(cfg, make_family(cfg), fetches, whole=False)
    if cfg.training.threads:
        torch.set_num_threads(cfg.training.threads)
    device = choose(cfg.training.device, launch.local_rank, launch.local_size)
    check_device(cfg, device)
    with ExitStack() as stack:
        stack.enter_context(out_of_memory.told(cfg, device, launch))
        ranks = stack.enter_context(Ranks.open(launch, device, cfg.training.ddp_timeout_min))
        requests = stack.enter_context(Requests().listening())
        set_up_logging(cfg.logging, ranks.rank)
        if cfg.cache.only:
            build_caches(fetch(cfg, ranks, {})[0], device, ranks)
            return 0
        cfg = stack.enter_context(settled(cfg, ranks))
        start = stack.enter_context(begin(cfg, ranks, drawn_seed=secrets.randbits(31)))
        if start.finished:
            log.info("%s: this run is finished at step %d; nothing to do", cfg.output_dir, start.step)
            return 0
        require_profiles(start.cfg, start.checkpoint, ranks)
        uploads = stack.enter_context(open_uploads(cfg, ranks))
        here, pins = fetch(start.cfg, ranks, start.pins)
        if fetches:
            check(here, make_family(here), whole=False)
        start = replace(start, record=replace(start.record, hub=pins))
        this = assemble(start.cfg, argv, device, ranks, start, here)
        this.uploads = uploads
        if cfg.sample.test_only:
            Drawing(this).once(this)
            log.info("drawn from the weights after step %d; nothing was trained", this.progress.step)
            return 0
        if ranks.is_logger:
            start.record.write(cfg.output_dir)
        outputs = stack.enter_context(open_outputs(this, start))
        this.meter = Meter(this, outputs)
        saving, evaluating, drawing = Saving(this), Evaluating(this, outputs), Drawing(this, outputs)
        # what a step is worth is written down before the step is saved: a kill in between loses neither
        hooks: list[Hook] = [evaluating, EvaluatingSets(this, outputs), drawing, saving]
        say_what_runs(this)
        for hook in hooks:
            hook.before_training(this)
        steps = make_loader(
            this.data,
            this.plan,
            this.family.features,
            this.family.tokenizer(this.parts),
            this.cfg,
            dp_rank=this.engine.dp_rank,
            dp_size=this.engine.dp_size,
            first_step=this.progress.step,
            last_step=this.total_steps,
            local_size=ranks.local_size,
        )
        if not train(this, steps, hooks, saving, requests):
            outputs.session_ends(this, "stopped")
            settle_uploads(this, AT_STOP_S)
            if ranks.is_logger:
                write_reports(this)
            number = ranks.agree(requests.stop_signal)
            why = "a signal" if number else "save_quit"
            log.info("stopped by %s at step %d; %s", why, this.progress.step, how_to_go_on(cfg.save))
            return 128 + number if number else 0
        finish(this, outputs, saving, evaluating, start)
        if this.facts.get("not_finite"):
            raise TrainingFault(f"the weights that were trained are no numbers: {this.facts['not_finite']}")
    return 0


def prepared(cfg: TrainConfig, ranks: Ranks) -> Path:
    """Prepare the data; where too much of it is rejected, name all of that before the run stops."""
    try:
        return prepare(cfg, log=log.info)
    except TooManyRejects as fault:
        if ranks.is_logger:
            write_rejects(cfg.output_dir, Index(fault.index).rejects(), afresh=True)
        raise


def open_uploads(cfg: TrainConfig, ranks: Ranks) -> Uploads:
    """Look at where exports go to, on the rank that writes them. Every rank calls it. Raises ConfigFault."""
    run = cfg.output_dir.name if cfg.save.run_dirs else ""
    target = for_all(ranks, ranks.is_logger, lambda: open_target(cfg.hub, run))
    return Uploads(target if ranks.is_logger else None, background=cfg.hub.async_upload)


def assemble(cfg: TrainConfig, argv: list[str], device: Device, ranks: Ranks, start: Start, here: TrainConfig) -> Run:
    """Build data, model and engine, and bring them to the step at which this session begins.

    here: cfg with paths in the place of hub ids.
    """
    family = make_family(here)
    folder = on_each_machine(ranks, lambda: prepared(here, ranks))
    data = open_data(cfg, folder)
    check_sizes(data.tables, family.features)
    if ranks.is_logger:
        write_rejects(cfg.output_dir, data.rejects(), afresh=start.checkpoint is None)
    parts = family.load(lazy=lazy_parts(here, family) | {"root"})  # its weights are read once the caches are built
    engine = make_engine(cfg, device, ranks)
    faults = engine.faults()
    if faults:
        raise ConfigFault([Fault("--engine", fault) for fault in faults])
    plan = make_plan(data, cfg, global_batches(cfg, engine.dp_size))
    if len(set(ranks.gather(plan.digest))) > 1:
        raise DataFault("the machines see different data under --train_data_dir: their plans differ; copy it anew")
    place(plan, start)
    total = total_steps(cfg.training, plan)
    check_length(start, total)
    first_step = start.step if start.checkpoint is not None else initial_step(cfg, plan, total)
    facts: dict[str, Any] = {"identity": identity(cfg, parts, plan, ranks, torch.get_num_threads())}
    facts["hub"] = facts["identity"]["hub"] = start.record.hub
    facts["identity"]["launch"] = list(start.launch)
    facts["schedule_from"] = schedule_from(start)
    check_same(start, facts["identity"])
    facts["attention"], facts["parameters"] = attend(cfg, device, parts), parameter_counts(parts)
    cached = with_cache(here, device, ranks, family, parts, data)
    data = cached.data
    if ranks.is_logger:
        write_rejects(cfg.output_dir, cached.rejects)
    sets = open_sets(here, device, ranks, family, parts)
    if ranks.is_logger:
        write_rejects(cfg.output_dir, [reject for each in sets for reject in each.rejects])
    facts["started_at"] = time.time()
    facts["session_id"] = str(secrets.randbits(32))  # kohya's: another one for every start
    engine.build(
        family,
        parts,
        lambda groups: optim.make_optimizer(
            cfg.optimizer, groups, dp_size=engine.dp_size, fused_ok=device.fused_optimizer
        ),
        lambda optimizer: optim.make_schedule(cfg.optimizer, optimizer, total - facts["schedule_from"]),
        warm_batches(cfg, data, plan, family, parts, engine),
    )
    this = Run(
        cfg=cfg,
        argv=argv,
        device=device,
        ranks=ranks,
        family=family,
        parts=parts,
        engine=engine,
        data=data,
        plan=plan,
        total_steps=total,
        global_batch=max(plan.global_batches),
        clock=Clock(device.synchronise, session_steps=total - first_step, mark=device.marker(), age_s=process_age_s()),
        claim=start.claim,
        facts=facts,
        choices=[facts["attention"], *optim.announce(cfg.optimizer, device.adamw_choice)],
        begins_at=0 if start.checkpoint is not None else first_step,
        sets=sets,
    )
    this.ema, this.profiles = start_averages(cfg.ema, engine)
    this.progress.step = first_step
    restore(this, start)
    this.choices += announce(this)
    device.reset_peak_memory()
    return this


def build_caches(cfg: TrainConfig, device: Device, ranks: Ranks) -> None:
    """Do what `assemble` does until the caches on disk are whole; nothing is written to the output folder."""
    family = make_family(cfg)
    check(cfg, family, whole=False)
    folder = on_each_machine(ranks, lambda: prepare(cfg, log=log.info))
    data = open_data(cfg, folder)
    check_sizes(data.tables, family.features)
    parts = family.load(meta=True, lazy=lazy_parts(cfg, family))
    attend(cfg, device, parts)
    with_cache(cfg, device, ranks, family, parts, data)
    open_sets(cfg, device, ranks, family, parts)
    log.info("--cache_only: the caches are whole, nothing was trained")


def initial_step(cfg: TrainConfig, plan: EpochPlan, total: int) -> int:
    """Return the step at which a fresh run begins: 0, or what is to be skipped. Raises ConfigFault where none is left."""
    training = cfg.training
    if not training.skip_until_initial_step:
        return 0
    first = training.initial_step or plan.total_steps(training.initial_epoch - 1)
    if first >= total:
        what = f"the run has {total} steps and is to begin at step {first}"
        raise ConfigFault([Fault("--skip_until_initial_step", what, "begin earlier, or train for longer")])
    if first:
        log.info("the first %d steps of the data are skipped; the schedule of the learning rate begins at 0", first)
    return first


def attend(cfg: TrainConfig, device: Device, parts: Parts) -> str:
    """Give every part the one attention function, also those that are built later; return which it is, in a sentence."""
    training = cfg.training
    give = partial(
        use_attention,
        device=device,
        fused=training.fused_attention,
        choice=training.attention,
        precision=training.mixed_precision,
    )
    parts.on_build.append(give)
    return give(torch.nn.ModuleList([parts.root, *parts.frozen.values()]))


def warm_batches(
    cfg: TrainConfig, data: Data, plan: EpochPlan, family: Family, parts: Parts, engine: Engine
) -> list[Batch]:
    """Return one real micro batch where several ranks need it to settle the order of their sums."""
    if engine.dp_size == 1:
        return []
    here = cfg.model_copy(update={"data": cfg.data.model_copy(update={"workers": 0})})
    first = max(0, plan.total_steps(0))  # where a resume began an epoch anew the data may begin behind step 0
    steps = make_loader(
        data,
        plan,
        family.features,
        family.tokenizer(parts),
        here,
        dp_rank=engine.dp_rank,
        dp_size=engine.dp_size,
        first_step=first,
        last_step=first + 1,
    )
    return next(iter(steps))[:1]


def keep_dataset_file(run: Run) -> None:
    """Copy the file that named the data sets into the run directory, without secrets."""
    given = run.cfg.data.dataset_config
    if not (run.cfg.save.run_dirs and given):
        return
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:  # what it said is in the configuration too
        log.warning("%s is not copied into the run directory: %s", given, error)
        return
    write_whole(run.out / DATASET_FILE, redact_text(text))


@contextmanager
def open_outputs(run: Run, start: Start) -> Iterator[Outputs]:
    """Open console, metrics and trackers; a session that ends by an error is recorded as failed."""
    config = redacted(run.cfg.model_dump(mode="json"))
    if run.ranks.is_logger:
        write_whole(run.out / CONFIG_FILE, redact_text(dump(as_given(run.cfg))))  # --config takes it
        keep_dataset_file(run)
    outputs = Outputs(
        run.cfg,
        is_logger=run.ranks.is_logger,
        step=run.progress.step,
        samples_seen=run.progress.samples_seen,
        total_steps=run.total_steps,
        earlier_s=run.clock.total().e2e_s - run.clock.session().e2e_s,
        facts={"command": command(run.argv), "world_size": run.ranks.size, "device": run.device.kind},
        recorded=config,
    )
    try:
        yield outputs
    except BaseException:
        with suppress(OSError):  # the disk may be full; the first error is the one to be seen
            outputs.session_ends(run, "failed")
        raise
    finally:
        outputs.close()
