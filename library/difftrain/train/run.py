"""One run from configuration to report: put the parts together, train, leave everything whole."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from difftrain import optim
from difftrain.cache.build import deferred_parts, with_cache
from difftrain.config import TrainConfig
from difftrain.config.hidden_imports import collect_again
from difftrain.config.reads import recorded, refuse_unread
from difftrain.config.rules.pipeline import processes_fault
from difftrain.config.schema.sections import CacheSection
from difftrain.config.spellings.spelling import option
from difftrain.contracts import Batch, ConfigFault, Engine, Family, Fault, Parts, TrainingFault
from difftrain.data.evaluation_sets import held_out_set
from difftrain.data.index.build import TooManyRejects
from difftrain.data.index.index import Index
from difftrain.data.loader import make_loader
from difftrain.data.plan.plan import EpochPlan
from difftrain.data.prepare import Data, prepare
from difftrain.device import Device, choose, use_attention
from difftrain.distributed.collective import on_each_machine, run_on
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.hub.fetch import fetch
from difftrain.hub.ids import remote_refs
from difftrain.hub.uploads import AT_STOP_S, Uploads, open_target
from difftrain.io.files import DISK_ERRORS
from difftrain.models.registry import make_family
from difftrain.report.clock import Clock
from difftrain.report.environment import command, process_age_s
from difftrain.report.notices import open_notices
from difftrain.report.progress import SIGNS
from difftrain.train.agreement import agree_on_model, agree_on_start
from difftrain.train.averages import Averages, require_profiles
from difftrain.train.check import check, check_device
from difftrain.train.diagnosis import out_of_memory
from difftrain.train.diagnosis.non_finite import NonFinite
from difftrain.train.diagnosis.slow_ranks import PaceHook
from difftrain.train.diagnosis.tracing import Tracing
from difftrain.train.drawing import Drawing
from difftrain.train.estimate.fitting import require_fit
from difftrain.train.evaluating import Evaluating, open_sets, warn_of_trained
from difftrain.train.finalize import (
    finish,
    parameter_counts,
    report_so_far,
    say_what_runs,
    say_where,
    wait_for_uploads,
    write_reports,
)
from difftrain.train.kid import DrawnPictures
from difftrain.train.loop import train
from difftrain.train.meter import Meter
from difftrain.train.outputs import RunOutputs, open_outputs, set_up_logging, write_rejects
from difftrain.train.reporting import Reporting
from difftrain.train.run_dir import how_to_go_on, run_directory
from difftrain.train.run_log import logged
from difftrain.train.saving import Exports, Saving
from difftrain.train.session import (
    Session,
    check_same,
    identity_of,
    open_run_data,
    open_session,
    plan_run,
    restore,
    schedule_from,
)
from difftrain.train.state import Hook, Run, TrainedModel
from difftrain.train.triggers import PREEMPTED, NoticeFile, Requests

BAD_AT_END = 2  # losses in a row that are no number: one may be an accident, more at the end of a run are its failure
log = logging.getLogger("difftrain")


def run(cfg: TrainConfig, argv: list[str], explicit: Mapping[str, str] = MappingProxyType({})) -> int:
    """Train as configured and return the exit code: 0 finished, 128 + signal or PREEMPTED where somebody ended it early.

    explicit: fields that somebody gave -> where; one of them that nothing reads by the first step stops the run.
    """
    try:
        with ExitStack() as recording:
            reads = recording.enter_context(recorded()) if explicit else set()
            return _run(cfg, argv, explicit, reads, recording)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        kept = option("save.checkpoint_every_n_minutes") if cfg.save.run_dirs else option("save.state", True)
        raise TrainingFault(
            f"{error.filename or cfg.output_dir}: {error.strerror}; complete checkpoints remain valid: "
            f"free some space, then {how_to_go_on(cfg.save)} from the newest "
            f"({kept} saves some during training)"
        ) from error


def _run(
    cfg: TrainConfig, argv: list[str], explicit: Mapping[str, str], reads: set[str], recording: ExitStack
) -> int:  # fmt: skip
    launch = Launch.from_environment()
    if not cfg.cache.only and (wrong := processes_fault(cfg, launch.size)):
        raise ConfigFault([Fault(option("training.pipeline_stages"), *wrong)])
    if cfg.sample.test_only:
        cfg = cfg.model_copy(update={"cache": CacheSection()})  # no batch is made, so there is nothing to be cached
    fetches = remote_refs(
        cfg
    )  # looked at once it is here: before a device is touched nothing can be waited for together
    check(cfg, make_family(cfg), fetches, full=False)
    if not fetches and not cfg.cache.only:
        require_fit(cfg, launch)
    if cfg.training.threads:
        torch.set_num_threads(cfg.training.threads)
    device = choose(cfg.training.device, launch.local_rank, launch.local_size)
    check_device(cfg, device)
    collect_again()  # nearly all is imported
    with ExitStack() as stack:
        notices = stack.enter_context(open_notices(launch.rank == 0))
        stack.enter_context(out_of_memory.explained(cfg, device, launch))
        ranks = stack.enter_context(Ranks.open(launch, device, cfg.training.ddp_timeout_min))
        set_up_logging(cfg.logging, ranks.rank)
        notice = cfg.save.preempt_file if ranks.leads_node else None
        requests = stack.enter_context(Requests(NoticeFile(Path(notice)) if notice else None).listening())
        run_log = stack.enter_context(logged(ranks.is_logger))
        agree_on_start(cfg, ranks)
        if cfg.cache.only:
            build_caches(fetch(cfg, ranks, {})[0], device, ranks)
            return 0
        cfg = stack.enter_context(run_directory(cfg, ranks))
        session = stack.enter_context(
            open_session(cfg, ranks, secrets.randbits(31), epochs_given="data.epoch_batches" in explicit)
        )
        if session.finished:
            log.info("%s: this run is finished at step %d; nothing to do", cfg.output_dir, session.step)
            return 0
        if ranks.is_logger:
            stack.enter_context(run_log.kept_in(cfg.output_dir, command(argv)))
        require_profiles(session.cfg, session.checkpoint, ranks)
        uploads = stack.enter_context(open_uploads(cfg, ranks))
        local, pins = fetch(session.cfg, ranks, session.pins)
        if fetches:
            check(local, make_family(local), full=False)
            require_fit(local, launch)
        session = replace(session, record=replace(session.record, hub=pins))
        this = assemble(session.cfg, argv, device, ranks, session, local)
        this.uploads, this.notices = uploads, notices
        notices.describe(this.out, this.total_steps)

        if cfg.sample.test_only:
            Drawing(this.cfg, this.model, device, ranks, this.clock).draw(this.position)
            log.info("sampled from the weights after step %d; nothing was trained", this.progress.step)
            return 0

        if ranks.is_logger:
            session.record.write(cfg.output_dir)
        outputs = stack.enter_context(open_outputs(this, run_log))
        meter, saving, evaluating, drawing = make_hooks(this, outputs)
        # what a step is worth is written down before the step is saved: a kill in between loses neither
        tracing = Tracing(this.cfg, this.model, device, ranks, this.clock)
        pace = PaceHook(this.model.parts.root, ranks, this.clock, cfg.logging.log_every, device.marker())
        this.slow_ranks = pace.notes
        hooks: list[Hook] = [pace, tracing, evaluating, drawing, saving]
        if ranks.is_logger:
            hooks.append(Reporting(partial(report_so_far, this, outputs, meter, saving), saving, this.clock))
        say_what_runs(this)
        for hook in hooks:
            hook.before_training(this.position)
        recording.close()  # before the first step: what is read from here on is config/reads.py's LATER
        if explicit:
            refuse_unread(explicit, set().union(*ranks.gather(reads)))

        step = this.progress.step
        notices.send("started", f"training begins{f' after step {step}' if step else ''}", step=step)
        SIGNS.now("finishing the run")  # once the steps are done
        stack.enter_context(saving.checkpoints.kept_on_errors())
        with SIGNS.doing(outputs.progress):
            is_done = train(this, batches_of(this), hooks, meter, saving, requests, drawing.draw_now)
        if not is_done:
            outputs.session_ends(this.progress.step, this.clock.session().e2e_s, "stopped")
            wait_for_uploads(this, AT_STOP_S)
            if ranks.is_logger:
                write_reports(this, meter, saving)
            code = ranks.agree(requests.exit_code)
            why = {0: "save_quit", PREEMPTED: "a notice of pre-emption"}.get(code, "a signal")
            if ranks.is_logger:
                say_where(this, saving)
            log.info("stopped by %s at step %d; %s", why, this.progress.step, how_to_go_on(cfg.save))
            notices.send("stopped", f"stopped by {why} at step {this.progress.step}", step=this.progress.step)
            return code
        finish(this, outputs, meter, saving, evaluating, session.record)
        if saving.exports.not_finite:
            raise TrainingFault(f"the trained weights are not finite: {saving.exports.not_finite}")
        if meter.bad_losses >= max(1, min(BAD_AT_END, this.total_steps)):
            first = this.progress.step - meter.bad_losses + 1
            what = f"the losses of the last {meter.bad_losses} steps, {first} to {this.progress.step}, were not finite"
            raise TrainingFault(
                f"{what}: none of them trained anything; the lines above name each step and its records"
            )
        notices.send("finished", f"finished at step {this.progress.step}", step=this.progress.step)
    return 0


def batches_of(run: Run) -> Iterable[list[Batch]]:
    """Load the micro batches of every step that is left, this replica's share."""
    return _batches(run, run.cfg, run.progress.step, run.total_steps)


def batches_again(run: Run, step: int) -> list[Batch]:
    """Load a step's micro batches once more, by its number from 1: each step is a function of its number."""
    here = run.cfg.model_copy(update={"data": run.cfg.data.model_copy(update={"workers": 0})})
    return next(iter(_batches(run, here, step - 1, step)))


def _batches(run: Run, cfg: TrainConfig, first_step: int, last_step: int) -> Iterable[list[Batch]]:
    return make_loader(
        run.data,
        run.plan,
        run.model.family.features,
        run.model.family.tokenizer(run.model.parts),
        cfg,
        dp_rank=run.model.engine.dp_rank,
        dp_size=run.model.engine.dp_size,
        first_step=first_step,
        last_step=last_step,
        local_size=run.ranks.local_size,
    )


def make_hooks(run: Run, outputs: RunOutputs) -> tuple[Meter, Saving, Evaluating, Drawing]:
    """Give everything that acts between steps what it uses of a run. Every rank calls it."""
    cfg, model, device, ranks, clock = run.cfg, run.model, run.device, run.ranks, run.clock
    origin = NonFinite(model, ranks, partial(batches_again, run), lambda step: run.plan.size(step - 1))
    meter = Meter(cfg, run.progress, run.plan, run.data.index, device, ranks, clock, outputs, origin)
    exports = Exports(cfg, model, ranks, run.uploads, run.identity, run.facts, run.notices)
    saving = Saving(cfg, model, ranks, clock, run.claim, meter, exports, run.meta, run.epoch_of(run.total_steps))
    drawing = Drawing(cfg, model, device, ranks, clock, outputs)
    if ranks.is_logger:
        warn_of_trained(run.sets, run.data.index)
    pictures = DrawnPictures(cfg, model, device, ranks, clock) if cfg.eval.sets and cfg.eval.kid else None
    return meter, saving, Evaluating(run.sets, model, device, ranks, clock, outputs, pictures), drawing


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
    target = run_on(ranks, ranks.is_logger, lambda: open_target(cfg.hub, run))
    return Uploads(target if ranks.is_logger else None, background=cfg.hub.async_upload)


def assemble(
    cfg: TrainConfig, argv: list[str], device: Device, ranks: Ranks, session: Session, local: TrainConfig
) -> Run:
    """Build data, model and engine, and bring them to the step at which this session begins. Every rank calls it.

    local: cfg with paths in the place of hub ids.
    """
    fresh = session.checkpoint is None

    # --- 1. data: indexed and opened; what was turned away is named before anything else can fail
    SIGNS.now("preparing the data")
    family = make_family(local)
    data = open_run_data(cfg, on_each_machine(ranks, lambda: prepared(local, ranks)), family)
    if ranks.is_logger:
        write_rejects(cfg.output_dir, data.rejects(), afresh=fresh)

    # --- 2. model and engine: weights that a cache may spare are read once the caches are built
    SIGNS.now("loading the model")
    parts = family.load(deferred=deferred_parts(local, family) | {"root"})
    engine = make_engine(cfg, device, ranks)
    if faults := engine.faults():
        raise ConfigFault([Fault(option("training.engine"), fault) for fault in faults])

    # --- 3. plan: which draws form each global batch, from the checkpoint's position on
    SIGNS.now("planning the batches")
    agree_on_model(parts.config, ranks)
    plan, total = plan_run(cfg, data, engine.dp_size, ranks, session)
    first_step = initial_step(cfg, plan, total) if fresh else session.step
    identity = identity_of(cfg, parts, plan, session, ranks, torch.get_num_threads())
    check_same(session, identity)
    attention, parameters = attend(cfg, device, parts), parameter_counts(parts)

    # --- 4. caches: of the training set, then of the evaluation sets
    SIGNS.now("preparing cached features")
    cached = with_cache(local, device, ranks, family, parts, data)
    if ranks.is_logger:
        write_rejects(cfg.output_dir, cached.rejects)
    sets = open_sets(local, device, ranks, family, parts)
    if ranks.is_logger:
        write_rejects(cfg.output_dir, [reject for eval_set in sets for reject in eval_set.rejects])
    if cfg.validation.split > 0:
        sets = (held_out_set(cfg, cached.data), *sets)

    # --- 5. the engine takes the model; weights, optimizer and counters become the checkpoint's
    SIGNS.now("setting up engine and optimizer")
    started_at, session_id = time.time(), str(secrets.randbits(32))
    schedule_begins = schedule_from(session)
    engine.build(
        family,
        parts,
        lambda groups: optim.make_optimizer(
            cfg.optimizer, groups, dp_size=engine.dp_size, fused_ok=device.fused_optimizer
        ),
        lambda optimizer: optim.make_schedule(cfg.optimizer, optimizer, total - schedule_begins),
        warm_batches(cfg, cached.data, plan, family, parts, engine),
    )
    run = Run(
        cfg=cfg,
        argv=argv,
        device=device,
        ranks=ranks,
        model=TrainedModel(family, parts, engine, Averages(cfg.ema, engine)),
        data=cached.data,
        plan=plan,
        total_steps=total,
        global_batch=max(plan.global_batches),
        clock=Clock(device.synchronise, session_steps=total - first_step, mark=device.marker(), age_s=process_age_s()),
        claim=session.claim,
        choices=[
            attention,
            *([device.allow_tf32()] if cfg.training.allow_tf32 else []),
            *optim.announce(cfg.optimizer, device.adamw_choice),
        ],
        begins_at=first_step if fresh else 0,
        sets=sets,
        identity=identity,
        hub=session.record.hub,
        schedule_from=schedule_begins,
        attention=attention,
        parameters=parameters,
        started_at=started_at,
        session_id=session_id,
    )
    run.progress.step = first_step
    restore(run, session)
    run.choices += run.model.averages.announce(cfg.model, run.begins_at, run.progress.step, total)
    device.reset_peak_memory()
    return run


def build_caches(cfg: TrainConfig, device: Device, ranks: Ranks) -> None:
    """Do what `assemble` does until the caches on disk are whole; nothing is written to the output folder."""
    family = make_family(cfg)
    check(cfg, family, full=False)
    folder = on_each_machine(ranks, lambda: prepare(cfg, log=log.info))
    data = open_run_data(cfg, folder, family)
    parts = family.load(meta=True, deferred=deferred_parts(cfg, family))
    attend(cfg, device, parts)
    with_cache(cfg, device, ranks, family, parts, data)
    open_sets(cfg, device, ranks, family, parts)
    log.info(f"{option('cache.only', True)}: the caches are complete, nothing was trained")


def initial_step(cfg: TrainConfig, plan: EpochPlan, total: int) -> int:
    """Return the step at which a fresh run begins: 0, or what is to be skipped. Raises ConfigFault where none is left."""
    training = cfg.training
    if not training.skip_until_initial_step:
        return 0
    first = training.initial_step or plan.total_steps(training.initial_epoch - 1)
    if first >= total:
        what = f"the run has {total} steps and would start at step {first}"
        raise ConfigFault(
            [Fault(option("training.skip_until_initial_step", True), what, "start earlier, or train for longer")]
        )
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
    if engine.dp_size == cfg.training.sequence_parallel == 1:
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
