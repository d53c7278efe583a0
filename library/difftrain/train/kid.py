"""KID-efflite0 during training: pictures drawn for held-out captions, compared with the held-out pictures themselves."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from difftrain.cache.build import on_device
from difftrain.config.rules.outputs import LEAST_PICTURES
from difftrain.contracts import Bucket, Draw, Drawer
from difftrain.data.evaluation_sets import SEED
from difftrain.device.memory import SAMPLING, during
from difftrain.diffusion.draws import normal
from difftrain.diffusion.permutation import Permutation
from difftrain.distributed.collective import run_on
from difftrain.evaluation.features import INSTALL, NAME, EffLite0, missing
from difftrain.evaluation.kid import kid
from difftrain.sampling.draw import draw_batch
from difftrain.train.drawing import sampler_of

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.data.evaluation_sets import EvaluationSet
    from difftrain.data.prepare import Data
    from difftrain.device import Device
    from difftrain.distributed.ranks import Ranks
    from difftrain.report.clock import Clock
    from difftrain.train.state import TrainedModel

log = logging.getLogger("difftrain")
TAG = "kid_efflite0"
TAG_OF_CLIPS = TAG + "_middle_frame"  # of clips one frame is looked at: motion is not measured


@dataclass(frozen=True)
class Lot:
    """Some held-out records of one bucket. real: their pictures' features, (N, 1280); through: after the VAE only.

    references: images that a model is shown which edits, (N, 3, H, W) uint8 each.
    """

    bucket: Bucket
    keys: tuple[bytes, ...]
    captions: tuple[str, ...]
    real: Tensor
    through: Tensor
    references: tuple[Tensor, ...] = ()


class DrawnPictures:
    """Draw the same captions from the same noise at every measurement, each rank its share."""

    def __init__(self, cfg: TrainConfig, model: TrainedModel, device: Device, ranks: Ranks, clock: Clock) -> None:
        """Look for the packages; without them on every rank, say so once, and measure nothing."""
        self._cfg, self._model, self._device, self._ranks, self._clock = cfg, model, device, ranks, clock
        self._network: EffLite0 | None = None
        self._lots: dict[str, dict[int, Lot]] = {}  # of each set, this rank's by number
        lacking = sorted({name for names in ranks.gather(missing()) for name in names})
        self._on = not lacking
        if lacking and ranks.is_logger:
            log.warning("%s is not measured: %s not installed; %s", NAME, " and ".join(lacking), INSTALL)

    def measure(self, eval_set: EvaluationSet, step: int) -> dict[str, Any]:
        """Return the distance of a set, with its error. Every rank calls it."""
        if not self._on:
            return {}

        # each rank draws its lots; the time is none of training's
        drawn: dict[int, Tensor] = {}
        with self._clock.paused("sampling"), during(SAMPLING):
            run_on(self._ranks, True, lambda: drawn.update(self._work(eval_set)))
        lots = self._lots[eval_set.name]

        # lots in one order, so that the figure is the same on any number of ranks
        shares = self._ranks.gather(
            {n: tuple(side.numpy() for side in (lot.real, lot.through, drawn[n])) for n, lot in lots.items()}
        )
        pairs = [pair for _, pair in sorted(item for share in shares for item in share.items())]
        count = sum(len(real) for real, *_ in pairs)
        if count < LEAST_PICTURES:
            log.warning(
                "%s of %s is not measured: %d images are too few, at least %d are needed",
                NAME,
                eval_set.name,
                count,
                LEAST_PICTURES,
            )
            return {}

        # what the VAE only costs is the least that any model can reach
        real, through, ours = (torch.from_numpy(np.concatenate(side)) for side in zip(*pairs, strict=True))
        of_clips = any(rows.bucket.frames > 1 for rows in eval_set.data.tables.training)
        tag = TAG_OF_CLIPS if of_clips else TAG
        drawn_kid, least = kid(ours, real, paired=True), kid(through, real, paired=True)
        log.info(
            "%s of %s at step %d: %.6f ± %.6f over %d images (%s; guidance %g, %d sampler steps; the VAE only %.6f)",
            f"{NAME} of middle frames" if of_clips else NAME,
            eval_set.name,
            step,
            drawn_kid.value,
            drawn_kid.error,
            count,
            self._model.averages.drawable()[1],
            self._cfg.eval.kid_guidance,
            self._cfg.eval.kid_steps,
            least.value,
        )
        return {
            f"{eval_set.name}/{tag}": drawn_kid.value,
            f"{eval_set.name}/{tag}_error": drawn_kid.error,
            f"{eval_set.name}/{tag}_vae": least.value,
            f"{eval_set.name}/{tag}_pictures": count,
        }

    def _work(self, eval_set: EvaluationSet) -> Iterator[tuple[int, Tensor]]:
        """Yield the features of what this rank draws, by the number of the lot."""
        section, family, parts = self._cfg.eval, self._model.family, self._model.parts
        engine = self._model.engine
        if not engine.leads:
            self._lots.setdefault(eval_set.name, {})
            with self._model.averages.drawable()[0], engine.drawing():
                return  # the rank that leads has drawn
        if self._network is None:
            self._network = EffLite0(self._device.torch_device)
        with (
            self._model.averages.drawable()[0],
            on_device(parts, self._device),
            self._device.autocast(self._cfg.training.mixed_precision),
            engine.drawing() as predict,
        ):
            # --- the lots of this rank, once: pictures and captions that are compared
            drawer = family.drawer(parts, predict)
            if eval_set.name not in self._lots:
                numbered = enumerate(chosen(eval_set.data, section.kid_pictures, eval_set.cfg.batch_sizes))
                mine = [(n, *lot) for n, lot in numbered if n % engine.dp_size == engine.dp_rank]
                self._lots[eval_set.name] = dict(self._looked_at(eval_set, mine, drawer))

            # --- drawn from the same noise every time
            for number, lot in self._lots[eval_set.name].items():
                shape = family.features.draws["noise"].shape(lot.bucket)
                noise = np.stack([normal(SEED, key, 0, "drawn", shape) for key in lot.keys])
                pictures = draw_batch(
                    drawer,
                    lot.captions,
                    torch.from_numpy(noise).to(self._device.torch_device),
                    size_hw=(lot.bucket.height, lot.bucket.width),
                    steps=section.kid_steps,
                    guidance=section.kid_guidance,
                    sampler=sampler_of(self._cfg),
                    seeds=[int.from_bytes(hashlib.blake2b(key, digest_size=6).digest()) for key in lot.keys],
                    references=lot.references,
                    frames=lot.bucket.frames,
                )
                yield number, self._features(pictures)

    def _looked_at(
        self, eval_set: EvaluationSet, lots: list[tuple[int, Bucket, np.ndarray]], drawer: Drawer
    ) -> Iterator[tuple[int, Lot]]:
        """Read held-out pictures, as large as they will be drawn, and their captions."""
        bare = eval_set.uncached()
        family, parts = self._model.family, self._model.parts
        maker = bare.maker(family.tokenizer(parts), family.features)
        for number, bucket, rows in lots:
            ids, keys = bare.data.tables.take(rows)
            draws = [Draw(record_id, key, 0) for record_id, key in zip(ids, keys, strict=True)]
            samples, kept, rejects = maker.samples(bucket, draws, 0, spare=None)
            for reject in rejects:
                log.warning("left out of %s: %s: %s", NAME, reject.path, reject.reason)
            pixels = [torch.from_numpy(sample.pixels) for sample in samples if sample.pixels is not None]
            if pixels:
                captions = tuple(sample.caption for sample in samples)
                real = self._features(torch.stack(pixels) / 255)
                batch = self._device.to_device(maker.collate(bucket, samples, kept, rejects))
                with torch.no_grad():
                    through = self._features(drawer.decode(family.latents(batch, parts)))
                shown = tuple(torch.from_numpy(np.stack(one)) for one in zip(*(sample.control for sample in samples)))
                yield number, Lot(bucket, tuple(draw.key for draw in kept), captions, real, through, shown)

    def _features(self, pictures: Tensor) -> Tensor:
        """Look at a lot's pictures by themselves: which lots a rank has changes no bit of them."""
        assert self._network is not None
        if pictures.ndim == 5:  # of clips their middle frame
            pictures = pictures[:, :, pictures.shape[2] // 2]
        with torch.autocast(pictures.device.type, enabled=False):
            return self._network(pictures)


def chosen(data: Data, count: int, batch_sizes: tuple[int, ...]) -> Iterator[tuple[Bucket, np.ndarray]]:
    """Choose so many records of a set, by chance but always the same, and cut them into lots of one bucket.

    Yields buckets and rows of the tables.
    """
    buckets = data.tables.training
    ends = np.cumsum([rows.records for rows in buckets])
    order = Permutation(int(ends[-1]), SEED, "drawn")
    slots = np.sort([order(n) for n in range(min(count, int(ends[-1])))])
    which = np.searchsorted(ends, slots, side="right")
    for index, bucket_rows in enumerate(buckets):
        begin = int(ends[index - 1]) if index else 0
        rows = bucket_rows.first + slots[which == index] - begin
        size = batch_sizes[bucket_rows.group]
        for start in range(0, len(rows), size):
            yield bucket_rows.bucket, rows[start : start + size]
