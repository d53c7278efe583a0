"""One run from configuration to report: put the parts together, train, leave everything whole."""

from __future__ import annotations

import logging
import secrets
from contextlib import ExitStack

import torch

from difftrain.config import TrainConfig
from difftrain.contracts import ConfigFault, Fault
from difftrain.data.loader import make_loader
from difftrain.data.prepare import make_plan, open_data, prepare
from difftrain.device import Device, choose
from difftrain.diffusion.ema import Ema
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.engine import make_engine
from difftrain.models.registry import make_family
from difftrain.optim.registry import make_optimizer
from difftrain.optim.schedule import make_schedule
from difftrain.report.clock import Clock
from difftrain.report.environment import process_age_s, redacted
from difftrain.train.drawing import Drawing
from difftrain.train.ending import finish, say_what_runs
from difftrain.train.evaluating import Evaluating
from difftrain.train.loop import train
from difftrain.train.meter import Meter
from difftrain.train.outputs import Outputs, set_up_logging, write_rejects
from difftrain.train.saving import Saving, load_counters
from difftrain.train.signals import Requests
from difftrain.train.start import Start, begin, check_same, identity
from difftrain.train.state import Hook, Run
from difftrain.train.together import for_all

log = logging.getLogger("difftrain")


def run(cfg: TrainConfig, argv: list[str]) -> int:
    """Train as configured and return the exit code: 0 finished, 128 + signal where a signal ended it early."""
    launch = Launch.from_environment()
    if cfg.training.threads:
        torch.set_num_threads(cfg.training.threads)
    device = choose(cfg.training.device, launch.local_rank, launch.local_size)
    with ExitStack() as stack:
        ranks = stack.enter_context(Ranks.open(launch, device, cfg.training.ddp_timeout_min))
        requests = stack.enter_context(Requests().listening())
        set_up_logging(cfg.logging, ranks.rank)
        start = stack.enter_context(begin(cfg, ranks, drawn_seed=secrets.randbits(31)))
        if start.finished:
            log.info("%s: this run is finished at step %d; nothing to do", cfg.output_dir, start.step)
            return 0
        this = assemble(start.cfg, argv, device, ranks, start)
        outputs = stack.enter_context(open_outputs(this, start))
        this.meter = Meter(this, outputs)
        saving, evaluating = Saving(this), Evaluating(this, outputs)
        hooks: list[Hook] = [saving, evaluating, Drawing(this, outputs)]
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
        )
        if not train(this, steps, hooks, saving, requests):
            outputs.session_ends(this, "stopped")
            log.info("stopped by a signal at step %d; the same command with --resume=auto goes on", this.progress.step)
            return 128 + ranks.agree(requests.stop_signal)
        finish(this, outputs, saving, evaluating, start)
    return 0


def assemble(cfg: TrainConfig, argv: list[str], device: Device, ranks: Ranks, start: Start) -> Run:
    """Build data, model and engine, and bring them to the step at which this session begins."""
    folder = for_all(ranks, ranks.local_rank == 0, lambda: prepare(cfg, log=log.info))
    data = open_data(cfg, folder)
    if ranks.is_logger:
        write_rejects(cfg.output_dir, data.index.rejects())
    family = make_family(cfg)
    parts = family.load()
    engine = make_engine(cfg, device, ranks)
    faults = engine.faults()
    if faults:
        raise ConfigFault([Fault("--engine", fault) for fault in faults])
    global_batch = cfg.training.batch_size * cfg.training.accumulation * engine.dp_size
    plan = make_plan(data, cfg, global_batch)
    total = plan.total_steps(cfg.training.max_epochs) if cfg.training.max_epochs else cfg.training.max_steps
    facts = {"identity": identity(cfg, parts, plan, ranks, torch.get_num_threads())}
    check_same(start, facts["identity"])
    warm = warm_batches(cfg, data, plan, family, parts, engine)
    engine.build(
        family,
        parts,
        lambda groups: make_optimizer(
            cfg.optimizer, groups, dp_size=engine.dp_size, fused_ok=device.fused_optimizer
        ),
        lambda optimizer: make_schedule(cfg.optimizer, optimizer, total),
        warm,
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
        global_batch=global_batch,
        clock=Clock(device.synchronise, session_steps=total - start.step, age_s=process_age_s()),
        facts=facts,
    )
    if cfg.ema.enable:
        this.ema = Ema(((name, shard) for name, shard, _ in engine.shards()), cfg.ema.decay)
    if start.checkpoint is not None:
        engine.restore(start.checkpoint)
        load_counters(this, start.checkpoint)
    device.reset_peak_memory()
    return this
