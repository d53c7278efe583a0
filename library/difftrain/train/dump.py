"""--dump_dataset: every sample of the first epoch as training sees it, decoded from its latents, beside its caption and mask."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from difftrain.cache.build import deferred_parts, with_cache
from difftrain.cache.encoding import on_device
from difftrain.config import TrainConfig
from difftrain.config.secrets import redact_text
from difftrain.contracts import Batch, ConfigFault, Family, Fault, Parts, Reject
from difftrain.data.loader import check_sizes, neighbours
from difftrain.data.plan.plan import EpochPlan, Uses, total_steps
from difftrain.data.prepare import Data, global_batches, make_plan, open_data, prepare
from difftrain.data.recipe import recipes_of
from difftrain.data.samples import Sample, SampleMaker
from difftrain.device import Device, choose
from difftrain.distributed.launch import Launch
from difftrain.distributed.ranks import Ranks
from difftrain.hub.fetch import fetch
from difftrain.models.registry import make_family
from difftrain.train.check import check
from difftrain.train.outputs import set_up_logging
from difftrain.train.run import attend

log = logging.getLogger("difftrain")
LIST = "samples.jsonl"
VAE = "vae"


def dump_dataset(cfg: TrainConfig, folder: str | Path) -> int:
    """Write the samples of the first epoch into a new folder and return how many; of several ranks, one does.

    NUMBER.png is the picture that the VAE makes of the latents, NUMBER.txt its caption, NUMBER_mask.png the mask of its
    loss and NUMBER_control.png its reference image where it has such, and samples.jsonl names of each the record, step, bucket and cut.
    Raises: ConfigFault; DataFault, TrainingFault as training would.
    """
    launch, folder = Launch.from_environment(), Path(folder)
    if launch.rank:
        return 0
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigFault([Fault("--dump_dataset", f"{folder} exists and is not empty", "give a new folder")])

    # training would draw a seed; what is looked at should come again the next time
    set_up_logging(cfg.logging, launch.rank)
    if cfg.training.seed is None:
        log.info("--dump_dataset: no seed is given, so the order is that of seed 0")
        cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"seed": 0})})

    # settings, files and device are checked before the data are opened
    ranks = Ranks()
    here, _ = fetch(cfg, ranks, {})
    family = make_family(here)
    check(here, family, full=False)
    device = choose(cfg.training.device, launch.local_rank, launch.local_size)

    # data, caches and plan of the whole launch; weights are read only where something is encoded
    data = open_data(here, prepare(here, log=log.info))
    check_sizes(data.tables, family.features)
    parts = family.load(meta=True, deferred=deferred_parts(here, family) | {VAE})
    attend(here, device, parts)
    data = with_cache(here, device, ranks, family, parts, data).data
    plan = make_plan(data, here, global_batches(here, launch.size))
    return _Dump(here, family, parts, device, data, plan, folder).write()


class _Dump:
    """One dump."""

    def __init__(
        self, cfg: TrainConfig, family: Family, parts: Parts, device: Device, data: Data, plan: EpochPlan, folder: Path
    ) -> None:
        self.cfg, self.family, self.parts, self.device, self.data, self.plan = cfg, family, parts, device, data, plan
        self.folder, self.total = folder, total_steps(cfg.training, plan)
        recipes, tokenize = recipes_of(cfg, data.index.sources), family.tokenizer(parts)
        self.maker = SampleMaker(data.index, recipes, family.features, tokenize, plan.seed, data.store, self.total)

    def write(self) -> int:
        """Walk through the epoch, a micro batch at a time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number, steps = 0, self.plan.total_steps(1)

        # the VAE is on the device for as long as there is something to decode
        with (
            on_device(self.parts, {VAE}, self.device),
            torch.no_grad(),
            (self.folder / LIST).open("w", encoding="utf-8") as listing,
        ):
            for step in range(steps):
                for uses in self._micro_batches(step):
                    # a micro batch as training gets it
                    samples, kept, rejects = self.maker.samples(
                        uses.bucket.bucket, self.plan.draws(uses), 0, partial(neighbours, self.plan, uses), step
                    )
                    batch = self.maker.collate(uses.bucket.bucket, samples, kept, rejects)
                    _log(rejects)

                    # what the model would see, beside where it comes from
                    references = self._references(batch)
                    for sample, pixels, facts in zip(samples, self._pictures(batch), self._facts(batch, samples, step)):
                        _save(self.folder, number, sample, pixels, batch, references, facts)
                        listing.write(redact_text(json.dumps({"number": number, **facts}, ensure_ascii=False)) + "\n")
                        number += 1
        log.info(
            "--dump_dataset: %s samples of %s steps, the first epoch, are in %s", f"{number:,}", steps, self.folder
        )
        return number

    def _micro_batches(self, step: int) -> Iterator[Uses]:
        """Cut a global batch into micro batches."""
        for uses in self.plan.parts(step):
            size = self.cfg.batch_sizes[uses.bucket.group]
            for start in range(0, len(uses.rows), size):
                yield uses.part(slice(start, start + size))

    def _pictures(self, batch: Batch) -> np.ndarray:
        """Decode the latents of a micro batch. Shape: (B, H, W, 3) uint8."""
        return self._decoded(self.family.latents(self.device.to_device(batch), self.parts))

    def _references(self, batch: Batch) -> dict[str, np.ndarray]:
        """Decode the latents of a micro batch's reference images, by name."""
        latents = self.family.references(self.device.to_device(batch), self.parts)
        return {name: self._decoded(value) for name, value in latents.items()}

    def _decoded(self, latents: torch.Tensor) -> np.ndarray:
        pixels = self.family.drawer(self.parts).decode(latents).cpu()
        images: np.ndarray = (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        return images

    def _facts(self, batch: Batch, samples: list[Sample], step: int) -> list[dict[str, Any]]:
        return [
            {
                "step": step,
                "record": self.data.index.path(sample.record),
                "occurrence": int(batch.occurrence[row]),
                "size": [batch.bucket.width, batch.bucket.height],
                "crop_top_left": list(sample.crop_top_left),
                "flipped": sample.flipped,
                "caption": sample.caption,
                "row": row,
            }
            for row, sample in enumerate(samples)
        ]


def _save(
    folder: Path, number: int, sample: Sample, pixels: np.ndarray, batch: Batch, references: dict[str, np.ndarray],
    facts: dict[str, Any],
) -> None:  # fmt: skip
    """Write one sample. references: by name, (B, H, W, 3) uint8. facts: "row" of the batch is taken out of them."""
    row = facts.pop("row")
    Image.fromarray(pixels).save(folder / f"{number:06d}.png")
    (folder / f"{number:06d}.txt").write_text(sample.caption + "\n", encoding="utf-8")
    if batch.loss_mask is not None:
        mask = (batch.loss_mask[row, 0] * 255).round().to(torch.uint8).numpy()
        Image.fromarray(mask).save(folder / f"{number:06d}_mask.png")
    for name, shown in references.items():
        Image.fromarray(shown[row]).save(folder / f"{number:06d}_{name}.png")


def _log(rejects: list[Reject]) -> None:
    for reject in rejects:
        log.warning("%s: %s; another one took its place", reject.path, reject.reason)
