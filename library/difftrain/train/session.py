"""How a session begins: the folder is claimed, the checkpoint to go on from is chosen, and what is taken from it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from difftrain import checkpoint
from difftrain.checkpoint import DIFFUSERS, Claim, Empty, Finished, Foreign, RunRecord, Unfinished
from difftrain.config import TrainConfig
from difftrain.config.digest import differences, digest, without_empty
from difftrain.config.digest import identity as config_identity
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Family, Fault, Parts
from difftrain.data.loader import check_sizes
from difftrain.data.plan.plan import EVERY, WHOLE_BATCHES, EpochPlan, changes, kind_of, total_steps, why_no_step
from difftrain.data.prepare import Data, global_batches, make_plan, open_data
from difftrain.distributed.collective import run_on
from difftrain.distributed.ranks import Ranks
from difftrain.hub.fetch import fetch_state
from difftrain.train import shared_checkpoint
from difftrain.train.agreement import agree_on_data
from difftrain.train.averages import SNAPSHOTS
from difftrain.train.checkpoints import CLOCK_FILE
from difftrain.train.run_dir import RESETS, Torchruns, launch_of, resume_option, wrote
from difftrain.train.state import PROGRESS_FILE, Run, TrainProgress

log = logging.getLogger("difftrain")


@dataclass(frozen=True)
class Session:
    """Say from where a session begins.

    cfg: with a seed. claim: on the output folder. record: to be written once the run is put together; one that cannot
    start leaves no trace. checkpoint: None at a fresh start. meta: what the checkpoint says of itself. auto: it is the
    very same run that is to go on, so its data must be the same. launch: that this session is of.
    """

    cfg: TrainConfig
    claim: Claim
    record: RunRecord
    checkpoint: Path | None
    meta: dict[str, Any]
    auto: bool
    finished: bool = False
    launch: Torchruns = ()

    @property
    def pins(self) -> dict[str, str]:
        """Return the commits of a hub that this run began with, or the one that its checkpoint is of."""
        return {**self.meta.get("hub", {}), **self.record.hub}

    @property
    def step(self) -> int:
        """Return the number of updates done before this session."""
        return int(self.meta.get("step", 0))


@contextmanager
def open_session(cfg: TrainConfig, ranks: Ranks, drawn_seed: int, *, epochs_given: bool = False) -> Iterator[Session]:
    """Claim the output folder for as long as the session lasts, and say how it begins. Every rank calls it.

    drawn_seed: taken by a new run that was given none. epochs_given: data.epoch_batches is the user's own word, not the
    entry point's: without it a run goes on with epochs as its checkpoint has them. Raises ConfigFault where the folder must not be written to.
    """
    out, resume = cfg.output_dir, fetch_state(cfg, ranks)
    ours, names = digest(cfg, cfg.replicas(ranks.size)), checkpoint.naming_of(cfg.save)
    with checkpoint.claim_together(out, ours, ranks, log.info) as claim:
        # what a killed session left half written goes
        if claim.owned:
            for folder in (out, out / SNAPSHOTS):
                checkpoint.clean(folder, log.info)
            checkpoint.clean_exports(out, names, log.info)

        # the state of the folder, and the checkpoint that the session begins at
        state = run_on(ranks, ranks.is_logger, lambda: checkpoint.inspect(out, names, deep=False))
        if resume == "auto" and not isinstance(state, Empty):
            of_run = names if isinstance(state, Foreign) else state.record.names
            state = replace(state, newest=shared_checkpoint.newest(out, of_run, ranks))
        source = shared_checkpoint.choose(out, ranks, lambda ask: _chosen(cfg, resume, ranks, state, ours, ask))
        meta = run_on(ranks, ranks.is_logger, lambda: checkpoint.load_meta(source) if source else {})

        # is it the run that the folder holds, and has that come to its end?
        known = state.record if isinstance(state, Unfinished | Finished) else None
        same = known if known and known.config_digest == ours else None
        at = int(meta.get("step", 0))
        ended_at = same.finished_step if same is not None else None
        finished = ended_at is not None and (resume == "auto" or (cfg.save.run_dirs and ended_at == at))

        # the seed that is given, of the resumed run, or drawn now
        seed = cfg.training.seed
        if seed is None:
            earlier = meta.get("seed", same.seed if same else None)
            seed = ranks.broadcast(drawn_seed if earlier is None else int(earlier))
            log.info("seed %d, %s", seed, "chosen for this run" if earlier is None else "of the resumed run")
        seeded = cfg.model_copy(update={"training": cfg.training.model_copy(update={"seed": seed})})

        if source is not None and not epochs_given:
            seeded = _with_epochs_of(seeded, meta)

        # a checkpoint of this very launch has begun anew what was asked to
        launch = launch_of(ranks)
        if source is not None and wrote(meta, launch):
            seeded = _without_resets(seeded)

        # the record of the run from here on
        goes_on = cfg.save.run_dirs or (names is DIFFUSERS and source is not None)
        record = same or _new_record(cfg, ours, seed, ranks, known if goes_on else None)
        if source is not None:
            log.info("resuming from %s at step %d", source, meta["step"])
        exact = names is not DIFFUSERS or same is not None  # else another configuration goes on from what there is
        auto = (resume == "auto" and exact) or (cfg.save.run_dirs and known is not None)
        yield Session(seeded, claim, record.begun(at, ranks.size, launch), source, meta, auto, finished, launch)


def _chosen(
    cfg: TrainConfig,
    resume: str | None,
    ranks: Ranks,
    state: checkpoint.record.State,
    ours: str,
    ask: shared_checkpoint.Ask,
) -> Path | None:
    """Choose the checkpoint, or None for a fresh start; refuse what would mix two runs."""
    inside = resume == "auto"
    if resume and resume != "auto":
        if not cfg.save.run_dirs or cfg.hub.resume:  # else that has just been done
            checkpoint.open_given(Path(resume), resume_option(cfg.save), ask)
        inside = Path(resume).resolve().parent == cfg.output_dir.resolve()
    # One folder, one configuration: else a later --resume=auto could not tell which checkpoint is whose.
    if inside and isinstance(state, Unfinished | Finished) and state.record.config_digest != ours:
        parted = differences(without_empty(state.record.identity), config_identity(cfg, cfg.replicas(ranks.size)))
        if not parted:
            return checkpoint.choose_start(state, resume, ours, cfg.output_dir)
        if cfg.save.run_dirs:  # its own checkpoint was asked for; what must be equal is looked at by check_same
            message = "the configuration differs from the one that %s started with, and applies from here on: %s"
            log.warning(message, cfg.output_dir, "; ".join(parted))
            return Path(str(resume))
        if cfg.save.naming == DIFFUSERS.value:  # diffusers' examples go on whatever the flags say
            message = "the configuration differs from the one that %s started with, and applies from here on: %s"
            log.warning(message, cfg.output_dir, "; ".join(parted))
            return checkpoint.choose_start(state, resume, ours, cfg.output_dir)
        raise ConfigFault(
            [
                Fault(
                    f"{option('save.resume')}={resume}",
                    f"{cfg.output_dir} holds a run of another configuration ({'; '.join(parted[:6])})",
                    f"give another {option('save.output_dir')}; {option('save.resume')}=FOLDER continues a checkpoint there under the new configuration",
                )
            ]
        )
    return checkpoint.choose_start(state, resume, ours, cfg.output_dir)


def _without_resets(cfg: TrainConfig) -> TrainConfig:
    """Return cfg for a checkpoint of this very launch, which has begun anew what it was told to."""
    resets = [name for name in RESETS if getattr(cfg.save, name)]
    if not resets:
        return cfg
    log.info(
        "%s: was applied when this launch started, and is not applied again", ", ".join(f"--{name}" for name in resets)
    )
    return cfg.model_copy(update={"save": cfg.save.model_copy(update=dict.fromkeys(resets, False))})


def _with_epochs_of(cfg: TrainConfig, meta: dict[str, Any]) -> TrainConfig:
    """Return cfg with the kind of epochs that a checkpoint was written with."""
    kind = kind_of(meta.get("plan", {}))
    if kind == (cfg.data.epoch_batches or WHOLE_BATCHES) or (kind == EVERY and cfg.data.tar_order == "sequential"):
        return cfg
    log.info("%s, as the checkpoint was written", option("data.epoch_batches", kind))
    return cfg.model_copy(update={"data": cfg.data.model_copy(update={"epoch_batches": kind})})


def _new_record(cfg: TrainConfig, ours: str, seed: int, ranks: Ranks, before: RunRecord | None) -> RunRecord:
    """Describe a run; before: the same one under another configuration."""
    new = RunRecord(
        config_digest=ours,
        seed=seed,
        output_name=cfg.save.output_name,
        total_steps=cfg.training.max_steps,
        identity=config_identity(cfg, cfg.replicas(ranks.size)),
        naming=cfg.save.naming,
    )
    return new if before is None else replace(new, started=before.started, sessions=before.sessions, hub=before.hub)


# ---------------------------------------------------------------------- what a run is to do, and whether it is the same


def open_run_data(cfg: TrainConfig, folder: Path, family: Family) -> Data:
    """Open an index that is prepared, and look whether the model takes its sizes. Raises DataFault."""
    data = open_data(cfg, folder)
    check_sizes(data.tables, family.features)
    return data


def plan_run(
    cfg: TrainConfig, data: Data, replicas: int, ranks: Ranks | None = None, session: Session | None = None
) -> tuple[EpochPlan, int]:
    """Return the plan of the global batches, where the session goes on in it, and the number of steps.

    Without ranks and session it is the plan of a fresh run, as --dry_run shows it. Raises DataFault, ConfigFault.
    """
    plan = make_plan(data, cfg, global_batches(cfg, replicas))
    if ranks is not None:
        agree_on_data(plan, ranks)
    if session is not None:
        resume_position(plan, session)
    total = total_steps(cfg.training, plan)
    if session is not None:
        check_length(session, total)
    if total < 1 and (session is None or session.checkpoint is None) and not cfg.sample.test_only:
        raise ConfigFault([why_no_step(cfg.training, plan)])
    return plan, total


def identity_of(
    cfg: TrainConfig, parts: Parts, plan: EpochPlan, session: Session, ranks: Ranks, threads: int
) -> dict[str, Any]:
    """Return what a checkpoint says of the run that wrote it, as JSON."""
    return {
        "family": cfg.model.family,
        "model": parts.config,
        "trained": sorted({name.split(".")[0] for name, p in parts.root.named_parameters() if p.requires_grad}),
        "seed": cfg.training.seed,
        "global_batch": plan.describe()["global_batch"],
        "plan": plan.describe(),
        "plan_digest": plan.digest,
        "config_digest": digest(cfg, cfg.replicas(ranks.size)),
        "world_size": ranks.size,
        "threads": threads,
        **({"held": parts.base_fingerprints} if parts.base_fingerprints else {}),
        "hub": session.record.hub,
        "launch": list(session.launch),
    }


def check_same(session: Session, now: dict[str, Any]) -> None:
    """Compare a checkpoint with the run that wants to continue it.

    Another model or another global batch is refused; other data too where exactness was promised (auto), else said.
    Data that are begun anew need not be those of before.
    """
    was, save = session.meta, session.cfg.save
    if not was:
        return
    now = json.loads(json.dumps(now))  # as the checkpoint has been: a tuple is a list
    faults, flag = [], resume_option(save)

    # another model is always refused
    for key, word in (("family", "model family"), ("model", "model"), ("trained", "set of trained parts")):
        if was.get(key) != now[key]:
            faults.append(_differs(flag, word, was.get(key), now[key]))
    if (was.get("held") or {}) != (now.get("held") or {}):  # the checkpoint has what is trained alone
        faults.append(_differs(flag, "weights that are not trained (train_only)", was.get("held"), now.get("held")))

    # another global batch or kind of epoch is refused, other data only where exactness was promised
    planned, plans = was.get("plan", {}), now["plan"]
    if save.reset_dataloader:
        pass
    elif kind_of(planned) != kind_of(plans):
        path, kind = "data.epoch_batches", kind_of(planned)
        what = f"the checkpoint was written with {kind}: step {session.step} is elsewhere in the data"
        remedy = f"{option(path, kind)}, or {option('save.reset_dataloader', True)}, which begins the epoch anew"
        faults.append(Fault(option(path, kind_of(plans)), what, remedy))
    elif was.get("global_batch") != now["global_batch"]:
        faults.append(_differs(flag, "global batch", was.get("global_batch"), now["global_batch"]))
    elif planned.get("micro_batch") != plans.get("micro_batch"):
        faults.append(_differs(flag, "micro batch", planned.get("micro_batch"), plans.get("micro_batch")))
    elif was.get("plan_digest") != now["plan_digest"]:
        parted = "; ".join(changes(planned, plans)[:6])
        if session.auto and not session.cfg.training.only_warn:
            remedy = (
                f"start from the checkpoint with {option('save.resume')}=FOLDER in another {option('save.output_dir')}"
            )
            if save.run_dirs:
                remedy = "--reset_dataloader restarts the epoch with the data as it is now"
            remedy = f"restore the data, or {remedy}"
            faults.append(
                Fault(option("data.dirs"), f"the data or its order changed since the checkpoint: {parted}", remedy)
            )
        else:
            log.warning(
                "the data or its order differs from the checkpoint's: %s; step %d continues with it",
                parted,
                session.step,
            )
    if faults:
        raise ConfigFault(faults)

    # ranks and threads change the rounding alone
    if was.get("threads") != now["threads"] or was.get("world_size") != now["world_size"]:
        log.warning(
            "the checkpoint was written by %s ranks with %s threads, this is %s with %s: the same samples and random "
            "numbers, sums rounded differently",
            was.get("world_size"),
            was.get("threads"),
            now["world_size"],
            now["threads"],
        )


def _differs(flag: str, word: str, was: Any, now: Any) -> Fault:
    if isinstance(was, dict) and isinstance(now, dict):
        return Fault(flag, f"the checkpoint has another {word}: {'; '.join(_parted(was, now)[:6])}")
    return Fault(flag, f"the checkpoint has another {word}: {was} there, {now} here", "they must be equal")


def _parted(was: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for key in sorted(was.keys() | now.keys()):
        a, b = was.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += _parted(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key} {a} there, {b} here")
    return lines


def resume_position(plan: EpochPlan, session: Session) -> None:
    """Bring the plan to where the checkpoint was in the data; with --reset_dataloader its epoch begins anew there.

    As in diffusion-pipe the number of the epoch stays, and so do the steps and examples that are counted.
    """
    if session.checkpoint is None:
        return
    if not session.cfg.save.reset_dataloader:
        plan.offset = int(session.meta.get("data_offset", 0))
        return
    epoch = session.meta.get("epoch")
    if epoch is None:  # written before checkpoints said it
        epoch, _ = plan.locate(session.step)
    plan.begin_epoch_at(int(epoch), session.step)
    log.info("--reset_dataloader: epoch %d restarts with step %d", epoch + 1, session.step + 1)


def check_length(session: Session, total: int) -> None:
    """Refuse to train a run that is shorter than what is done already. Raises ConfigFault."""
    if session.checkpoint is not None and session.step > total and not session.cfg.sample.test_only:
        what = f"the checkpoint is of step {session.step}, the run has {total} step{'s'[: total > 1]}"
        raise ConfigFault(
            [Fault(resume_option(session.cfg.save), what, "train for longer, or resume from an earlier step")]
        )


def schedule_from(session: Session) -> int:
    """Return the number of updates that were done when the schedule of the learning rate began."""
    return session.step if session.cfg.save.reset_optimizer else int(session.meta.get("schedule_from", 0))


def restore(run: Run, session: Session) -> None:
    """Take weights, optimizer, schedule, averages and counters from the checkpoint. Every rank calls it."""
    if session.checkpoint is None:
        return
    save = run.cfg.save
    run.model.engine.restore(
        session.checkpoint,
        optimizer=not save.reset_optimizer,
        params=not save.reset_optimizer_params,
        schedule_from=run.schedule_from,
    )
    if save.reset_optimizer:
        log.info("--reset_optimizer: optimizer and schedule restart with step %d", session.step + 1)
    elif save.reset_optimizer_params:
        log.info("--reset_optimizer_params: rate, decay and betas are the configuration's, moments the checkpoint's")
    load_counters(run, session.checkpoint)


def load_counters(run: Run, folder: Path) -> None:
    """Take counters, clock and averaged weights from a checkpoint; the engine takes the rest. Every rank calls it.

    The logger's disk has them; ranks of machines with disks of their own get them from there.
    """
    texts = run_on(
        run.ranks, run.ranks.is_logger, lambda: [(folder / name).read_text() for name in (PROGRESS_FILE, CLOCK_FILE)]
    )
    run.progress = TrainProgress.of(texts[0])
    run.clock.load(json.loads(texts[1]))
    run.model.averages.load(folder, run.ranks, run.progress.step)
