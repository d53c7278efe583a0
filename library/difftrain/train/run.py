"""One run from configuration to report: put the parts together, train, leave everything whole."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from difftrain import optim
from difftrain.cache.build import deferred_parts, with_cache
from difftrain.config import TrainConfig
from difftrain.config.schema.sections import CacheSection
from difftrain.config.secrets import redact_text
from difftrain.config.spellings.spelling import option
from difftrain.config.toml import dump
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
from difftrain.io.files import DISK_ERRORS, write_text
from difftrain.models.registry import make_family
from difftrain.report.clock import Clock
from difftrain.report.environment import command, process_age_s, redacted
from difftrain.train import out_of_memory
from difftrain.train.averages import Averages, require_profiles
from difftrain.train.check import check, check_device
from difftrain.train.drawing import Drawing
from difftrain.train.evaluating import Evaluating, open_sets, warn_of_trained
from difftrain.train.finalize import finish, parameter_counts, say_what_runs, wait_for_uploads, write_reports
from difftrain.train.kid import DrawnPictures
from difftrain.train.loop import train
from difftrain.train.meter import Meter
from difftrain.train.outputs import RunOutputs, set_up_logging, write_rejects
from difftrain.train.run_dir import as_submitted, how_to_go_on, run_directory
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
from difftrain.train.triggers import Requests

log = logging.getLogger("difftrain")
CONFIG_FILE, DATASET_FILE = "config.toml", "dataset.toml"


def run(cfg: TrainConfig, argv: list[str]) -> int:
    """Train as configured and return the exit code: 0 finished, 128 + signal where a signal ended it early."""
    try:
        return _run(cfg, argv)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        kept = option("save.checkpoint_every_n_minutes") if cfg.save.run_dirs else option("save.state", True)
        raise TrainingFault(
            f"{error.filename or cfg.output_dir}: {error.strerror}; checkpoints that were whole stay so: "
            f"make room, then {how_to_go_on(cfg.save)} from the newest "
            f"({kept} keeps some on the way)"
        ) from error


def _run(cfg: TrainConfig, argv: list[str]) -> int:
    launch = Launch.from_environment()
    if cfg.sample.test_only:
        cfg = cfg.model_copy(update={"cache": CacheSection()})  # no batch is made, so there is nothing to be cached
    fetches = remote_refs(
        cfg
    )  # looked at once it is here: before a device is touched nothing can be waited for together
    check(cfg, make_family(cfg), fetches, whole=False)
    if cfg.training.threads:
        torch.set_num_threads(cfg.training.threads)
    device = choose(cfg.training.device, launch.local_rank, launch.local_size)
    check_device(cfg, device)
    with ExitStack() as stack:
        stack.enter_context(out_of_memory.explained(cfg, device, launch))
        ranks = stack.enter_context(Ranks.open(launch, device, cfg.training.ddp_timeout_min))
        requests = stack.enter_context(Requests().listening())
        set_up_logging(cfg.logging, ranks.rank)
        if cfg.cache.only:
            build_caches(fetch(cfg, ranks, {})[0], device, ranks)
            return 0
        cfg = stack.enter_context(run_directory(cfg, ranks))
        session = stack.enter_context(open_session(cfg, ranks, drawn_seed=secrets.randbits(31)))
        if session.finished:
            log.info("%s: this run is finished at step %d; nothing to do", cfg.output_dir, session.step)
            return 0
        require_profiles(session.cfg, session.checkpoint, ranks)
        uploads = stack.enter_context(open_uploads(cfg, ranks))
        local, pins = fetch(session.cfg, ranks, session.pins)
        if fetches:
            check(local, make_family(local), whole=False)
        session = replace(session, record=replace(session.record, hub=pins))
        this = assemble(session.cfg, argv, device, ranks, session, local)
        this.uploads = uploads

        if cfg.sample.test_only:
            Drawing(this.cfg, this.model, device, ranks, this.clock).draw(this.position)
            log.info("drawn from the weights after step %d; nothing was trained", this.progress.step)
            return 0

        if ranks.is_logger:
            session.record.write(cfg.output_dir)
        outputs = stack.enter_context(open_outputs(this))
        meter, saving, evaluating, drawing = make_hooks(this, outputs)
        # what a step is worth is written down before the step is saved: a kill in between loses neither
        hooks: list[Hook] = [evaluating, drawing, saving]
        say_what_runs(this)
        for hook in hooks:
            hook.before_training(this.position)

        if not train(this, batches_of(this), hooks, meter, saving, requests):
            outputs.session_ends(this.progress.step, this.clock.session().e2e_s, "stopped")
            wait_for_uploads(this, AT_STOP_S)
            if ranks.is_logger:
                write_reports(this, meter, saving)
            number = ranks.agree(requests.stop_signal)
            why = "a signal" if number else "save_quit"
            log.info("stopped by %s at step %d; %s", why, this.progress.step, how_to_go_on(cfg.save))
            return 128 + number if number else 0
        finish(this, outputs, meter, saving, evaluating, session.record)
        if saving.exports.not_finite:
            raise TrainingFault(f"the weights that were trained are no numbers: {saving.exports.not_finite}")
    return 0


def batches_of(run: Run) -> Iterable[list[Batch]]:
    """Load the micro batches of every step that is left, this replica's share."""
    return make_loader(
        run.data,
        run.plan,
        run.model.family.features,
        run.model.family.tokenizer(run.model.parts),
        run.cfg,
        dp_rank=run.model.engine.dp_rank,
        dp_size=run.model.engine.dp_size,
        first_step=run.progress.step,
        last_step=run.total_steps,
        local_size=run.ranks.local_size,
    )


def make_hooks(run: Run, outputs: RunOutputs) -> tuple[Meter, Saving, Evaluating, Drawing]:
    """Give everything that acts between steps what it uses of a run. Every rank calls it."""
    cfg, model, device, ranks, clock = run.cfg, run.model, run.device, run.ranks, run.clock
    meter = Meter(cfg, run.progress, run.plan, run.data.index, device, ranks, clock, outputs)
    exports = Exports(cfg, model, ranks, run.uploads, run.identity, run.facts)
    saving = Saving(cfg, model, ranks, clock, run.claim, meter, exports, run.meta)
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
    family = make_family(local)
    data = open_run_data(cfg, on_each_machine(ranks, lambda: prepared(local, ranks)), family)
    if ranks.is_logger:
        write_rejects(cfg.output_dir, data.rejects(), afresh=fresh)

    # --- 2. model and engine: weights that a cache may spare are read once the caches are built
    parts = family.load(deferred=deferred_parts(local, family) | {"root"})
    engine = make_engine(cfg, device, ranks)
    if faults := engine.faults():
        raise ConfigFault([Fault(option("training.engine"), fault) for fault in faults])

    # --- 3. plan: which draws form each global batch, from the checkpoint's position on
    plan, total = plan_run(cfg, data, engine.dp_size, ranks, session)
    first_step = initial_step(cfg, plan, total) if fresh else session.step
    identity = identity_of(cfg, parts, plan, session, ranks, torch.get_num_threads())
    check_same(session, identity)
    attention, parameters = attend(cfg, device, parts), parameter_counts(parts)

    # --- 4. caches: of the training set, then of the evaluation sets
    cached = with_cache(local, device, ranks, family, parts, data)
    if ranks.is_logger:
        write_rejects(cfg.output_dir, cached.rejects)
    sets = open_sets(local, device, ranks, family, parts)
    if ranks.is_logger:
        write_rejects(cfg.output_dir, [reject for each in sets for reject in each.rejects])
    if cfg.validation.split > 0:
        sets = (held_out_set(cfg, cached.data), *sets)

    # --- 5. the engine takes the model; weights, optimizer and counters become the checkpoint's
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
        choices=[attention, *optim.announce(cfg.optimizer, device.adamw_choice)],
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
    check(cfg, family, whole=False)
    folder = on_each_machine(ranks, lambda: prepare(cfg, log=log.info))
    data = open_run_data(cfg, folder, family)
    parts = family.load(meta=True, deferred=deferred_parts(cfg, family))
    attend(cfg, device, parts)
    with_cache(cfg, device, ranks, family, parts, data)
    open_sets(cfg, device, ranks, family, parts)
    log.info(f"{option('cache.only', True)}: the caches are whole, nothing was trained")


def initial_step(cfg: TrainConfig, plan: EpochPlan, total: int) -> int:
    """Return the step at which a fresh run begins: 0, or what is to be skipped. Raises ConfigFault where none is left."""
    training = cfg.training
    if not training.skip_until_initial_step:
        return 0
    first = training.initial_step or plan.total_steps(training.initial_epoch - 1)
    if first >= total:
        what = f"the run has {total} steps and is to begin at step {first}"
        raise ConfigFault(
            [Fault(option("training.skip_until_initial_step", True), what, "begin earlier, or train for longer")]
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
    write_text(run.out / DATASET_FILE, redact_text(text))


@contextmanager
def open_outputs(run: Run) -> Iterator[RunOutputs]:
    """Open console, metrics and trackers; a session that ends by an error is recorded as failed."""
    config = redacted(run.cfg.model_dump(mode="json"))
    if run.ranks.is_logger:
        write_text(run.out / CONFIG_FILE, redact_text(dump(as_submitted(run.cfg))))  # --config takes it
        keep_dataset_file(run)
    outputs = RunOutputs(
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
            outputs.session_ends(run.progress.step, run.clock.session().e2e_s, "failed")
        raise
    finally:
        outputs.close()
