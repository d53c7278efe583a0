"""From draws to a micro batch: decode, crop, flip, caption, tokens, noise. A function of the draws alone.

Runs in loader workers. No random state is read or left behind: every choice is a counter-based draw of its own purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from difftrain.contracts import Batch, Bucket, DataFault, Draw, DrawSpec, FeatureSpec, Record, Reject, Tokenize
from difftrain.data.buckets import Fit
from difftrain.data.captions import caption_of
from difftrain.data.media import Unusable, decode, fit
from difftrain.data.recipe import Recipe
from difftrain.diffusion.draws import Stream, integer, normal, uniform
from difftrain.diffusion.noise import mixed

if TYPE_CHECKING:
    from difftrain.data.index import Index

Spare = Callable[[int], Iterable[int]]  # place in the batch -> ids to take instead, in order


class Place(NamedTuple):
    """Where one use of a picture is cut: resized to fit.resized_wh, from (left, top) on, and mirrored or not."""

    fit: Fit
    left: int
    top: int
    flip: bool


@dataclass(frozen=True)
class Sample:
    """One picture as the model gets it, and the sizes SDXL is conditioned on, as (height, width) and (top, left)."""

    record: Record
    pixels: np.ndarray  # (3, H, W) uint8
    caption: str
    original_size: tuple[int, int]
    crop_top_left: tuple[int, int]
    target_size: tuple[int, int]


@dataclass(frozen=True)
class SampleMaker:
    """Make samples and batches of them. Picklable; validation makes its own without augmentation.

    recipes: of each source of the index.
    """

    index: Index
    recipes: tuple[Recipe, ...]
    features: FeatureSpec
    tokenize: Tokenize
    seed: int

    def batch(self, bucket: Bucket, draws: Sequence[Draw], epoch: int, spare: Spare) -> Batch:
        """Make a micro batch.

        What cannot be decoded any more is named in Batch.rejects. Its place is taken by the first of `spare` that can
        be: a picture and caption of another record, under the draws (crop, noise, timestep) of the planned one.

        Raises: DataFault, with the paths, where no spare one can be decoded either.
        """
        samples, _, rejects = self.samples(bucket, draws, epoch, spare)
        return self.collate(bucket, samples, draws, rejects)

    def samples(
        self, bucket: Bucket, draws: Sequence[Draw], epoch: int, spare: Spare | None
    ) -> tuple[list[Sample], list[Draw], list[Reject]]:
        """Make samples as `batch` does; without `spare`, leave out what cannot be decoded. Also return whose they are."""
        samples: list[Sample] = []
        kept: list[Draw] = []
        rejects: list[Reject] = []
        for place, draw in enumerate(draws):
            failed: list[Reject] = []
            sample = self._first_good(draw, place, bucket, epoch, spare, failed)
            rejects += failed
            if sample is not None:
                samples.append(sample)
                kept.append(draw)
            elif spare is not None:
                tried = "; ".join(f"{reject.path} ({reject.reason})" for reject in failed)
                raise DataFault(
                    f"bucket {bucket}: of {len(failed)} neighbours none can be read any more: {tried}. "
                    "They could when the index was made: is the disk still there? Start again to index what is left."
                )
        return samples, kept, rejects

    def _first_good(
        self, draw: Draw, place: int, bucket: Bucket, epoch: int, spare: Spare | None, failed: list[Reject]
    ) -> Sample | None:
        for record_id in _then([draw.record_id], place, spare):
            record = self.index.record(record_id)
            try:
                return self.sample(record, draw, bucket, epoch)
            except (Unusable, OSError) as error:
                failed.append(Reject(self.index.path(record), str(error)))
        return None

    def sample(self, record: Record, draw: Draw, bucket: Bucket, epoch: int) -> Sample:
        """Make one sample. Raises Unusable or OSError where its file is not what was indexed."""
        rgb = decode(self.index.read(record.media))
        if rgb.shape[:2] != record.size_hw:
            (h, w), (was_h, was_w) = rgb.shape[:2], record.size_hw
            raise Unusable("changed", f"{w} x {h} px, {was_w} x {was_h} when it was indexed")
        found, left, top, flip = self.place(record, draw)
        crop = (left, top, bucket.width, bucket.height)
        pixels = fit(rgb, found.resized_wh, crop, flip, self.recipes[record.media.source].interpolation)
        caption = self.caption(record, draw, epoch)
        return Sample(record, pixels, caption, found.original_hw, found.top_left(flip), found.target_hw)

    def place(self, record: Record, draw: Draw) -> Place:
        """Say where one use of a picture is cut. Raises ValueError where no bucket fits."""
        recipe = self.recipes[record.media.source]
        found = recipe.buckets.select((record.size_hw[1], record.size_hw[0]))
        left, top = found.crop
        if recipe.random_crop:
            stream = Stream(self.seed, draw.key, draw.occurrence, "crop")
            left = stream.integer(found.resized_wh[0] - found.bucket.width + 1)
            top = stream.integer(found.resized_wh[1] - found.bucket.height + 1)
        flip = recipe.flip and integer(self.seed, draw.key, draw.occurrence, "flip", 2) == 1
        return Place(found, left, top, flip)

    def caption(self, record: Record, draw: Draw, epoch: int) -> str:
        """Make the caption of one use of a record."""
        stream = Stream(self.seed, draw.key, draw.occurrence, "caption")
        return caption_of(record, stream, self.recipes[record.media.source].captions, epoch)

    def collate(
        self, bucket: Bucket, samples: Sequence[Sample], draws: Sequence[Draw], rejects: Sequence[Reject]
    ) -> Batch:
        """Put samples together, with the host draws of their uses."""
        features = {"pixels": torch.from_numpy(np.stack([sample.pixels for sample in samples]))}
        for name in ("original_size", "crop_top_left", "target_size"):
            features[name] = torch.tensor([getattr(sample, name) for sample in samples], dtype=torch.int64)
        features |= self.tokenize([sample.caption for sample in samples])
        return Batch(
            bucket=bucket,
            record_id=torch.tensor([sample.record.id for sample in samples], dtype=torch.int64),
            occurrence=torch.tensor([draw.occurrence for draw in draws], dtype=torch.int64),
            features=features,
            draws={
                name: host_draws(name, spec, bucket, draws, self.seed) for name, spec in self.features.draws.items()
            },
            counts={"samples": float(len(samples))},
            keys=tuple(sample.record.key for sample in samples),
            rejects=tuple(rejects),
        )


def _then(planned: list[int], place: int, spare: Spare | None) -> Iterator[int]:
    """Yield what was planned, then, only when it is asked for, what may stand in for it."""
    yield from planned
    if spare is not None:
        yield from spare(place)


def host_draws(name: str, spec: DrawSpec, bucket: Bucket, draws: Sequence[Draw], seed: int) -> torch.Tensor:
    """Draw for each sample what a family asks for; the draw's name is its purpose.

    Shapes: normal (B, *spec.shape(bucket)) fp32; integer (B,) int64 in [low, high); uniform (B,) fp32 in [0, 1], from
    fp64 and rounded once.
    """
    if spec.kind == "normal":
        out = torch.empty((len(draws), *spec.shape(bucket)), dtype=torch.float32)
        rows, shape = out.numpy(), spec.shape(bucket)
        for place, draw in enumerate(draws):
            if spec.mix is None:
                rows[place] = normal(seed, draw.key, draw.occurrence, name, shape)
            else:
                rows[place] = mixed(seed, draw.key, draw.occurrence, name, shape, spec.mix)
        return out
    if spec.kind == "integer":
        span = spec.high - spec.low
        whole = [spec.low + integer(seed, draw.key, draw.occurrence, name, span) for draw in draws]
        return torch.tensor(whole, dtype=torch.int64)
    if spec.kind == "uniform":
        return torch.tensor([uniform(seed, draw.key, draw.occurrence, name) for draw in draws], dtype=torch.float32)
    raise ValueError(f"draw {name!r} is of unknown kind {spec.kind!r}")
