"""How a session begins: the folder is claimed, what it holds is looked at, and the checkpoint to go on from is chosen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from difftrain import checkpoint
from difftrain.checkpoint import Claim, Finished, RunRecord, Unfinished
from difftrain.config import TrainConfig
from difftrain.config.digest import differences, digest
from difftrain.config.digest import identity as config_identity
from difftrain.contracts import ConfigFault, Fault, Parts
from difftrain.data.plan import EpochPlan, changes
from difftrain.distributed.ranks import Ranks
from difftrain.train.averages import SNAPSHOTS
from difftrain.train.hub.fetch import fetch_state
from difftrain.train.together import for_all

log = logging.getLogger("difftrain")


@dataclass(frozen=True)
class Start:
    """Say from where a session begins.

    cfg: with a seed. claim: on the output folder. record: to be written once the run is put together; one that cannot
    start leaves no trace. checkpoint: None at a fresh start. meta: what the checkpoint says of itself. auto:
    --resume=auto, which promises the very same run.
    """

    cfg: TrainConfig
    claim: Claim
    record: RunRecord
    checkpoint: Path | None
    meta: dict[str, Any]
    auto: bool
    finished: bool = False

    @property
    def pins(self) -> dict[str, str]:
        """Return the commits of a hub that this run began with, or the one that its checkpoint is of."""
        return {**self.meta.get("hub", {}), **self.record.hub}

    @property
    def step(self) -> int:
        """Return the number of updates done before this session."""
        return int(self.meta.get("step", 0))


@contextmanager
def begin(cfg: TrainConfig, ranks: Ranks, drawn_seed: int) -> Iterator[Start]:
    """Claim the output folder for as long as the session lasts, and say how it begins. Every rank calls it.

    drawn_seed: taken by a new run that was given none. Raises ConfigFault where the folder must not be written to.
    """
    out, resume = cfg.output_dir, fetch_state(cfg, ranks)
    ours = digest(cfg, ranks.size)
    with checkpoint.claim_together(out, ours, ranks, log.info) as claim:
        if claim.owned:
            for folder in (out, out / SNAPSHOTS):
                checkpoint.clean(folder, log.info)
        state = for_all(ranks, ranks.is_logger, lambda: checkpoint.inspect(out, cfg.save.output_name, log.warning))
        finished = isinstance(state, Finished) and resume == "auto"
        found = for_all(ranks, ranks.is_logger, lambda: _chosen(cfg, resume, ranks, state, ours))
        if resume == "auto" and found is not None and ranks.size > ranks.local_size:
            name = state.record.output_name if isinstance(state, Unfinished | Finished) else cfg.save.output_name
            found = checkpoint.newest_everywhere(out, name, ranks, log.warning)
        meta = for_all(ranks, ranks.is_logger, lambda: checkpoint.load_meta(found) if found else {})
        known = state.record if isinstance(state, Unfinished | Finished) else None
        same = known if known and known.config_digest == ours else None
        seed = cfg.training.seed
        if seed is None:
            earlier = meta.get("seed", same.seed if same else None)
            seed = ranks.broadcast(drawn_seed if earlier is None else int(earlier))
            log.info("seed %d, %s", seed, "drawn for this run" if earlier is None else "of the run that goes on")
        seeded = cfg.model_copy(update={"training": cfg.training.model_copy(update={"seed": seed})})
        record = same or _new_record(cfg, ours, seed, ranks)
        if found is not None:
            log.info("resuming from %s at step %d", found, meta["step"])
        record = record.begun(int(meta.get("step", 0)), ranks.size)
        yield Start(seeded, claim, record, found, meta, resume == "auto", finished)


def _chosen(
    cfg: TrainConfig, resume: str | None, ranks: Ranks, state: checkpoint.record.State, ours: str
) -> Path | None:
    """Choose the checkpoint, or None for a fresh start; refuse what would mix two runs."""
    inside = resume == "auto"
    if resume and resume != "auto":
        checkpoint.open_given(Path(resume))
        inside = Path(resume).resolve().parent == cfg.output_dir.resolve()
    # One folder, one configuration: else a later --resume=auto could not tell which checkpoint is whose.
    if inside and isinstance(state, Unfinished | Finished) and state.record.config_digest != ours:
        parted = differences(state.record.identity, config_identity(cfg, ranks.size))
        raise ConfigFault(
            [
                Fault(
                    f"--resume={resume}",
                    f"{cfg.output_dir} holds a run of another configuration ({'; '.join(parted[:6])})",
                    "give another --output_dir; --resume=FOLDER continues a checkpoint there under the new configuration",
                )
            ]
        )
    return checkpoint.choose_start(state, resume, ours, cfg.output_dir)


def _new_record(cfg: TrainConfig, ours: str, seed: int, ranks: Ranks) -> RunRecord:
    return RunRecord(
        config_digest=ours,
        seed=seed,
        output_name=cfg.save.output_name,
        total_steps=cfg.training.max_steps,
        identity=config_identity(cfg, ranks.size),
    )


def identity(cfg: TrainConfig, parts: Parts, plan: EpochPlan, ranks: Ranks, threads: int) -> dict[str, Any]:
    """Return what a checkpoint says of the run that wrote it, as JSON."""
    return {
        "family": cfg.model.family,
        "model": parts.config,
        "trained": sorted({name.split(".")[0] for name, p in parts.root.named_parameters() if p.requires_grad}),
        "seed": cfg.training.seed,
        "global_batch": plan.describe()["global_batch"],
        "plan": plan.describe(),
        "plan_digest": plan.digest,
        "config_digest": digest(cfg, ranks.size),
        "world_size": ranks.size,
        "threads": threads,
    }


def check_same(start: Start, now: dict[str, Any]) -> None:
    """Compare a checkpoint with the run that wants to continue it.

    Another model or another global batch is refused; other data too where exactness was promised (auto), else said.
    """
    was = start.meta
    if not was:
        return
    faults = []
    for key, word in (("family", "model family"), ("model", "model"), ("trained", "set of trained parts")):
        if was.get(key) != now[key]:
            faults.append(_differs(word, was.get(key), now[key]))
    if was.get("global_batch") != now["global_batch"]:
        faults.append(_differs("global batch", was.get("global_batch"), now["global_batch"]))
    elif was.get("plan_digest") != now["plan_digest"]:
        parted = "; ".join(changes(was.get("plan", {}), now["plan"])[:6])
        if start.auto:
            remedy = "put the data back, or start from the checkpoint with --resume=FOLDER in another --output_dir"
            faults.append(
                Fault("--train_data_dir", f"the data or its order changed since the checkpoint: {parted}", remedy)
            )
        else:
            log.warning(
                "the data or its order is not that of the checkpoint: %s; step %d goes on in it", parted, start.step
            )
    if faults:
        raise ConfigFault(faults)
    if was.get("threads") != now["threads"] or was.get("world_size") != now["world_size"]:
        log.warning(
            "the checkpoint was written by %s ranks with %s threads, this is %s with %s: the same samples and draws, "
            "sums rounded otherwise",
            was.get("world_size"),
            was.get("threads"),
            now["world_size"],
            now["threads"],
        )


def _differs(word: str, was: Any, now: Any) -> Fault:
    if isinstance(was, dict) and isinstance(now, dict):
        return Fault("--resume", f"the checkpoint is of another {word}: {'; '.join(_parted(was, now)[:6])}")
    return Fault("--resume", f"the checkpoint has another {word}: {was} there, {now} here", "they must be equal")


def _parted(was: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    said = []
    for key in sorted(was.keys() | now.keys()):
        a, b = was.get(key), now.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            said += _parted(a, b, f"{prefix}{key}.")
        elif a != b:
            said.append(f"{prefix}{key} {a} there, {b} here")
    return said
