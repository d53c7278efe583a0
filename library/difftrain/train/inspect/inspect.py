"""`difftrain dataset inspect` and --debug_dataset: gather the facts of a data set, draw some pictures, write one page."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from difftrain.config import TrainConfig
from difftrain.contracts import DataFault, FeatureSpec, Parts
from difftrain.data.index import survey
from difftrain.data.loader import check_sizes
from difftrain.data.plan.plan import total_steps
from difftrain.data.prepare import global_batches, make_plan, open_data, prepare
from difftrain.data.samples import SampleMaker
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.hub.fetch import fetch, looked_up
from difftrain.io.files import write_text
from difftrain.models.registry import make_family
from difftrain.report.dataset_page import dataset_page
from difftrain.train.inspect.cards import cards_of
from difftrain.train.inspect.clips import clips
from difftrain.train.inspect.facts import Look, buckets, captions, copies, rejected, resolutions, sources, totals
from difftrain.train.inspect.findings import findings
from difftrain.train.inspect.similar import similar

Log = Callable[[str], None]
PAGE = "dataset.html"


def inspect(
    cfg: TrainConfig, output: Path, *, epochs: int = 3, pictures: int = 48, facts: Path | None = None, log: Log = print
) -> Path:
    """Write the page; return its path. facts: also write what it says as JSON.

    No device is touched and no weights are read. Raises: ConfigFault; DataFault where there is nothing to look at.
    """
    gathered = gather(look_at(cfg, epochs, pictures, log))
    page = write_text(output, dataset_page(gathered))
    if facts is not None:
        cards = [{key: value for key, value in card.items() if key != "images"} for card in gathered.pop("cards")]
        for group in gathered["similar"]["first"]:
            group["shown"] = [{key: value for key, value in one.items() if key != "image"} for one in group["shown"]]
        write_text(facts, json.dumps({**gathered, "cards": cards}, indent=1) + "\n")
    return page


def debug_dataset(cfg: TrainConfig, log: Log = print) -> None:
    """Write dataset.html into the output folder and say where; of several ranks, one does."""
    if Launch.from_environment().rank == 0:
        log(str(inspect(cfg, cfg.output_dir / PAGE, log=log)))


def gather(look: Look) -> dict[str, Any]:
    """Return all that the page says, as JSON takes it; cards hold their pictures as data addresses."""
    data, plan = look.data, look.plan
    sizes = survey.placements(data)
    made: dict[str, Any] = {
        "name": data.summary()["name"],
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "seed": plan.seed,
        "seeded": look.seeded,
        "epochs": look.epochs,
        "global_batch": list(plan.global_batches),
        "ranks": look.ranks,
        "steps": [plan.steps(epoch) for epoch in range(look.epochs)],
        "totals": totals(look, sizes),
        "sources": sources(look, sizes),
        "buckets": buckets(look, sizes),
        "rejected": rejected(data),
        "copies": copies(data),
        "similar": similar(look),
        "resolutions": resolutions(data),
        "clips": clips(look),
        "captions": captions(look),
        "notes": [*data.index.summary.notes, *plan.lines()],
        "cards": cards_of(look),
    }
    return made | {"findings": findings(look, sizes, made)}


def look_at(cfg: TrainConfig, epochs: int, pictures: int, log: Log) -> Look:
    """Open the data set as training would; what would only stop a training is said on the page instead."""
    # --- data that is named by a hub id is fetched; weights are only taken where they are
    here, missing = looked_up(cfg)
    weights = [file for file in missing if file.field.startswith("model.")]
    if len(weights) < len(missing):
        fetched, _ = fetch(cfg.model_copy(update={"model": TrainConfig().model}), Ranks(), {})
        here = here.model_copy(update={"data": fetched.data})
    for file in weights:
        log(f"{file.flag}: {file.id} is not available locally, so tokens are not counted; a run fetches it")
    has_model = bool(cfg.model.pretrained or cfg.model.init_from_config) and not weights
    cfg = here
    seeded = cfg.training.seed is not None
    if not seeded:
        cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"seed": 0})})

    # --- rejects are what one wants to look at, so that too many of them are no reason to stop here
    lenient = cfg.model_copy(update={"data": cfg.data.model_copy(update={"max_rejected_share": 1.0})})
    data = open_data(cfg, prepare(lenient, log=log))
    ranks = Launch.from_environment().size
    plan = make_plan(data, cfg, global_batches(cfg, ranks))

    # --- the loader's maker of samples, but without a cache; without a model there are no tokens, which it does without
    family = make_family(cfg) if has_model else None
    tokenize = family.tokenizer(Parts(root=nn.Module())) if family else None
    features = family.features if family else FeatureSpec({}, {})
    total = total_steps(cfg.training, plan)
    maker = SampleMaker(data.index, data.recipes, features, tokenize or _no_tokens, plan.seed, total_steps=total)

    # --- what of the data's sizes would stop a training at its start
    stops = []
    try:
        if family is not None:
            check_sizes(data.tables, family.features)
    except DataFault as fault:
        stops.append(str(fault))
    return Look(
        cfg=cfg,
        data=data,
        plan=plan,
        maker=maker,
        epochs=epochs,
        pictures=pictures,
        seeded=seeded,
        ranks=ranks,
        stops=stops,
        tokens=tokenize,
    )


def _no_tokens(captions: list[str]) -> dict[str, Tensor]:
    raise RuntimeError("no model is configured, so there is no tokenizer")
