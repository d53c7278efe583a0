"""What a finished run leaves: last export and checkpoint, scores, report.json, report.html, CaseName.log."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from difftrain.cache.request import bytes_text
from difftrain.contracts import Bucket, Parts
from difftrain.data.plan.plan import EVERY, why
from difftrain.device.quantised import count_parameters
from difftrain.distributed.collective import heartbeat
from difftrain.engine.half_precision import precision_of
from difftrain.hub.uploads import AT_END_S
from difftrain.report.facts import network_of
from difftrain.report.peaks import measure_matmul
from difftrain.report.report import (
    ReportFacts,
    ScoreTarget,
    final_lines,
    make_report,
    write_case_log,
    write_report,
)
from difftrain.report.run_page import PAGE, build_html
from difftrain.report.sessions import RUNNING
from difftrain.train.evaluating import Evaluating
from difftrain.train.run_dir import how_to_train_longer
from difftrain.train.run_log import CONSOLE_LOG
from difftrain.train.state import Run

if TYPE_CHECKING:
    from difftrain.checkpoint import RunRecord
    from difftrain.train.meter import Meter
    from difftrain.train.outputs import RunOutputs
    from difftrain.train.saving import Saving

log = logging.getLogger("difftrain")
PARTS_FROM_ELSEWHERE = ("vae", "transformer", "text_encoder1", "text_encoder2", "text_encoder3", "text_encoder4")


def finish(
    run: Run, outputs: RunOutputs, meter: Meter, saving: Saving, evaluating: Evaluating, record: RunRecord
) -> None:
    """Save the end, score it, and report. Every rank calls it; the record says finished only when all is written."""
    saving.after_training(run.position)
    wait_for_uploads(run, AT_END_S)
    scores, targets = _scores(run)
    quantiles = evaluating.quantiles()
    if not run.ranks.is_logger:
        return
    outputs.session_ends(run.progress.step, run.clock.session().e2e_s, "finished")
    report = write_reports(run, meter, saving, scores=scores, targets=targets, quantile_losses=quantiles)
    record.ended(run.progress.step).write(run.out)
    say_where(run, saving)
    if saving.newest is not None:
        log.info(how_to_train_longer(run.cfg, saving.newest))
    for line in final_lines(report):
        outputs.print(line)


def say_where(run: Run, saving: Saving) -> None:
    """Say at the end of a session where its weights, its report and its checkpoints are."""
    lines = [f"weights: {path} ({bytes_text(size)})" for path, size in saving.exports.newest.items()]
    if saving.newest is not None:
        lines.append(f"checkpoint: {saving.newest}")
    lines.append(f"report: {run.out / PAGE}; full log: {run.out / CONSOLE_LOG}")
    for line in lines:
        log.info(line)


def wait_for_uploads(run: Run, limit_s: float) -> None:
    """Wait for what is still to be sent, but not for ever. Every rank calls it."""
    if run.cfg.hub.repo_id is None:
        return
    with run.clock.paused("uploading"), heartbeat(run.ranks, run.ranks.is_logger):
        run.uploads.wait(limit_s)


def write_reports(run: Run, meter: Meter, saving: Saving, *, at_end: bool = True, **late: Any) -> dict[str, Any]:
    """Write report.json and report.html of the session so far, at its end also CaseName.log.

    at_end: else the device is left alone, so that its matmul rate is not known. late: ReportFacts known only at the end.
    """
    # what is known only while the run is open
    last, device = meter.last, run.device
    matmul = None
    if at_end:
        matmul = measure_matmul(device.torch_device, run.cfg.training.mixed_precision, device.synchronise)
    facts = ReportFacts(
        run_dir=run.out,
        network=network_of(run.cfg),
        argv=run.argv,
        device=device.describe(),
        world_size=run.ranks.size,
        global_batch=run.global_batch,
        timed_images=run.plan.size(timed - 1) if (timed := run.cfg.logging.timed_step) else None,
        steps=run.progress.step,
        planned_steps=run.total_steps,
        epochs=run.epoch,
        samples_seen=run.progress.samples_seen,
        account=run.clock.total(),
        session=run.clock.session(),
        dataset=run.data.summary(),
        weights=weights_of(run),
        peak_memory_gib=last.peak_memory_gib if last else device.peak_memory_gib(),
        attention=run.attention,
        kernels=meter.kernels,
        skipped=run.progress.skipped,
        parameters=run.parameters,
        flops_per_sample=run.model.family.flops_per_sample(run.model.parts, main_bucket(run)),
        matmul_flops=matmul,
        notes=notes_of(run, saving.failed),
        **late,
    )

    # the page is made from the files, so it comes last
    report = make_report(run.cfg, facts)
    write_report(run.out, report)
    if at_end:
        write_case_log(run.out, report)
    build_html(run.out)
    return report


def report_so_far(run: Run, outputs: RunOutputs, meter: Meter, saving: Saving) -> None:
    """Write the report of a run that goes on."""
    outputs.session_ends(run.progress.step, run.clock.session().e2e_s, RUNNING)
    write_reports(run, meter, saving, at_end=False)


def notes_of(run: Run, failed_saves: int) -> dict[str, Any]:
    """Return what else is to be known of a run: what failed, what was chosen, what came from a hub and went there."""
    notes = {
        "failed_saves": failed_saves,
        "choices": run.choices,
        "model": list(dict.fromkeys(run.model.parts.notes)),
    }
    hub = {"fetched": run.hub, "uploads": run.uploads.facts(), "slow_ranks": run.slow_ranks}
    return notes | {key: value for key, value in hub.items() if value}


def main_bucket(run: Run) -> Bucket:
    """Return the bucket of --resolution, for figures that need one shape; else the one with most uses."""
    if run.cfg.data.resolution:
        width, height = run.cfg.data.resolution
        return Bucket(height, width)
    most = max(run.data.tables.training, key=lambda rows: (rows.uses, rows.bucket))
    return most.bucket


def parameter_counts(parts: Parts) -> dict[str, int]:
    """Count parameters of every part, and those that are trained; before an engine may cut them into pieces."""
    counts = {name: count_parameters(part) for name, part in parts.root.named_children()}
    counts |= {name: count_parameters(part) for name, part in parts.frozen.items()}
    return {**counts, "trained": sum(p.numel() for p in parts.root.parameters() if p.requires_grad)}


def weights_of(run: Run) -> str:
    """Say where the weights at the start came from."""
    model = run.cfg.model
    origin = model.pretrained or f"random ({model.init_from_config}), seed {run.cfg.training.seed}"
    elsewhere = [(name, getattr(model, name)) for name in PARTS_FROM_ELSEWHERE]
    return "; ".join([origin, *(f"{name} of {source}" for name, source in elsewhere if source)])


def _scores(run: Run) -> tuple[dict[str, Any], list[ScoreTarget]]:
    """Score a demo run by what it drew; nothing for any other."""
    if not run.cfg.demo.score:
        return {}, []
    scoring = importlib.import_module("difftrain.demo.score")  # by name: the demos stand above training
    with run.clock.paused("scoring"):
        scores: tuple[dict[str, Any], list[ScoreTarget]] = scoring.score_run(run)
    return scores


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def say_what_runs(run: Run) -> None:
    """Print once, at the start, what is trained on what, the batch arithmetic, and each automatic choice."""
    cfg, size = run.cfg, run.model.engine.dp_size
    counts, batches = run.parameters, run.plan.global_batches
    lines = [
        f"device: {run.device.torch_device} ({run.device.reason}), {run.ranks.size} rank{'s'[: run.ranks.size != 1]}, "
        f"precision {precision_of(cfg.training)}",
        f"model: {weights_of(run)}; " + ", ".join(f"{name} {count / 1e6:.2f} M" for name, count in counts.items()),
        f"batch: {_listed(cfg.batch_sizes)} a rank x {cfg.training.accumulation} accumulated x {size} rank{'s'[: size != 1]} "
        f"= {_listed(batches)} image{'s'[: batches != (1,)]} per step{cfg.batches_by}"
        f"{', fewer where a bucket or an epoch ends' if run.plan.kind == EVERY else ''}",
        *run.plan.lines(),
        f"length: {run.total_steps} steps"
        + (f" ({why(cfg.training, run.plan)})" if cfg.training.max_epochs else "")
        + (f", {run.progress.step} of them done" if run.progress.step else ""),
        *run.model.parts.notes,
        *run.choices,
    ]
    for line in lines:
        log.info(line)
