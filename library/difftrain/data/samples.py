"""From draws to a micro batch: decode, crop, flip, caption, tokens, noise. A function of the draws alone.

Runs in loader workers. No random state is read or left behind: every choice is a counter-based draw of its own purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch

from difftrain.contracts import (
    Batch,
    Bucket,
    Clip,
    DataFault,
    Draw,
    DrawSpec,
    FeatureSpec,
    Record,
    Reject,
    Tokenize,
    control_name,
)
from difftrain.data.captions import caption_of, is_dropped, variant_of, varies, written
from difftrain.data.features import NOTHING_CACHED, FeatureStore
from difftrain.data.media.clips import decode_clip
from difftrain.data.media.control import fit_reference
from difftrain.data.media.crop import CropWindow, crop_window, recoloured
from difftrain.data.media.decoders import HOST
from difftrain.data.media.masks import fit_mask
from difftrain.data.media.media import Decoded, Unusable, decode_for, decode_rgba, fit
from difftrain.data.recipe import Recipe
from difftrain.diffusion.draws import Stream, choice, integer, mixed, normal, uniform

if TYPE_CHECKING:
    from difftrain.data.index.index import Index
    from difftrain.data.media.clips import MediaFile

Spare = Callable[[int], Iterable[int]]  # slot in the batch -> ids to take instead, in order


@dataclass(frozen=True)
class Sample:
    """One picture as the model gets it, and the sizes SDXL is conditioned on, as (height, width) and (top, left)."""

    record: Record
    pixels: np.ndarray | None  # (3, H, W) uint8, of a clip (3, F, H, W); None where all that is read of it is cached
    caption: str
    original_size: tuple[int, int]
    crop_top_left: tuple[int, int]
    target_size: tuple[int, int]
    mask: np.ndarray | None = None  # (1, H, W) fp32 in 0..1; None: the whole picture counts, or masks are cached
    flipped: bool = False
    control: tuple[
        np.ndarray, ...
    ] = ()  # of each reference image (3, H, W) uint8; none where all read of them is cached


@dataclass(frozen=True)
class SampleMaker:
    """Make samples and batches of them. Picklable; validation makes its own without augmentation.

    recipes: of each source of the index. total_steps: updates of the whole run, for captions that grow.
    """

    index: Index
    recipes: tuple[Recipe, ...]
    features: FeatureSpec
    tokenize: Tokenize
    seed: int
    store: FeatureStore = NOTHING_CACHED
    total_steps: int = 0

    @property
    def forks(self) -> bool:
        """Tell whether workers that make samples may be forked: those that decode on a device may not."""
        return all(recipe.decoder == HOST for recipe in self.recipes)

    def batch(self, bucket: Bucket, draws: Sequence[Draw], epoch: int, spare: Spare, step: int = 0) -> Batch:
        """Make a micro batch of update `step`.

        What cannot be decoded any more is named in Batch.rejects. Its place is taken by the first of `spare` that can
        be: a picture and caption of another record, under the draws (crop, noise, timestep) of the planned one.

        Raises: DataFault, with the paths, where no spare one can be decoded either.
        """
        samples, _, rejects = self.samples(bucket, draws, epoch, spare, step)
        return replace(self.collate(bucket, samples, draws, rejects), step=step)

    def samples(
        self, bucket: Bucket, draws: Sequence[Draw], epoch: int, spare: Spare | None, step: int = 0
    ) -> tuple[list[Sample], list[Draw], list[Reject]]:
        """Make samples as `batch` does; without `spare`, leave out what cannot be decoded. Also return whose they are."""
        samples: list[Sample] = []
        kept: list[Draw] = []
        rejects: list[Reject] = []
        for slot, draw in enumerate(draws):
            failed: list[Reject] = []
            candidates = _planned_then_spare(draw.record_id, slot, spare)
            sample = self._first_good(draw, candidates, epoch, step, failed)
            rejects += failed
            if sample is not None:
                samples.append(sample)
                kept.append(draw)
            elif spare is not None:
                tried = "; ".join(f"{reject.path} ({reject.reason})" for reject in failed)
                raise DataFault(
                    f"bucket {bucket}: of {len(failed)} neighbours none can be read any more: {tried}. "
                    "They were readable when they were indexed: is the disk still mounted? Start again to index what is left."
                )
        return samples, kept, rejects

    def _first_good(
        self, draw: Draw, candidates: Iterable[int], epoch: int, step: int, failed: list[Reject]
    ) -> Sample | None:
        for record_id in candidates:
            record = self.index.record(record_id)
            try:
                return self.sample(record, draw, epoch, step)
            except (Unusable, OSError) as error:
                failed.append(Reject(self.index.path(record), str(error)))
        return None

    def sample(self, record: Record, draw: Draw, epoch: int, step: int = 0) -> Sample:
        """Make one sample. Raises Unusable or OSError where a file of it, its mask or its references is not what was indexed."""
        recipe, window, store = self.recipes[record.media.source], self.crop_window(record, draw), self.store
        caption = self.caption(record, draw, epoch, step)

        # what is read from a cache must hold this use
        if store.pictures is not None:
            store.pictures.check(record.id, window.flip)
        if store.masks is not None:
            store.masks.check(record.id, window.flip)
        if store.pairs is not None:
            store.pairs.check(record.id, window.flip, self.tokenize([caption]))

        # pixels
        pixels = mask = layers = None
        by_alpha = store.masks is None and recipe.alpha_mask and recipe.masks is None  # files win (kohya)
        if record.clip is not None:
            pixels = self._clip(record, draw, recipe, window) if store.decodes else None
        elif store.decodes or by_alpha:
            layers = decode_layers(record, recipe, window, self.index.read(record.media))
        if store.decodes and layers is not None:
            pixels = cut_pixels(layers, recipe, window)
            if recipe.color_aug:
                pixels = recoloured(pixels, Stream(self.seed, draw.key, draw.occurrence, "colour"))

        # mask of the loss
        if store.masks is None and recipe.masks is not None:
            read = recipe.masks.read(record)
            mask = None if read is None else fit_mask(read, window, recipe.interpolation)
        elif by_alpha and layers is not None:
            mask = fit_mask(layers[..., 3], window, recipe.interpolation)
        control = self._control(record, draw, recipe, window) if store.decodes_control else ()
        return Sample(record, pixels, caption, *window.sizes, mask, window.flip, control)

    def _clip(self, record: Record, draw: Draw, recipe: Recipe, window: CropWindow) -> np.ndarray:
        """Decode a clip, each frame cut as a picture is. Shape: (3, F, H, W) uint8. Raises Unusable, OSError."""
        clip = record.clip
        assert clip is not None
        if recipe.moves_clips:
            first = integer(self.seed, draw.key, draw.occurrence, "clip", clip.available - clip.frames + 1)
            clip = clip._replace(first=first)
        pixels = cut_clip(self.index.open_media(record.media), record, clip, recipe, window)
        if recipe.color_aug:  # all frames alike
            frames = [
                recoloured(frame, Stream(self.seed, draw.key, draw.occurrence, "colour"))
                for frame in pixels.swapaxes(0, 1)
            ]
            pixels = np.stack(frames, axis=1)
        return pixels

    def _control(self, record: Record, draw: Draw, recipe: Recipe, window: CropWindow) -> tuple[np.ndarray, ...]:
        """Make the references of one use: cut, mirrored and coloured as the picture is. Raises Unusable, OSError."""
        references = []
        for number in range(recipe.num_control):
            data = self.index.read(record.control[number])
            pixels = fit_reference(
                record, number, data, window, recipe.interpolation, recipe.decoder, recipe.control_area
            )
            if recipe.color_aug:
                pixels = recoloured(pixels, Stream(self.seed, draw.key, draw.occurrence, "colour"))
            references.append(pixels)
        return tuple(references)

    def crop_window(self, record: Record, draw: Draw) -> CropWindow:
        """Say where one use of a picture is cut. Raises ValueError where no bucket fits."""
        return crop_window(self.recipes[record.media.source], record, draw, self.seed)

    def caption(self, record: Record, draw: Draw, epoch: int, step: int = 0) -> str:
        """Make the caption of one use of a record: of its own, or one of the record's variants."""
        stream = Stream(self.seed, draw.key, draw.occurrence, "caption")
        recipe = self.recipes[record.media.source]
        if recipe.num_variants is None:
            return caption_of(record, stream, recipe.captions, epoch, step, self.total_steps)
        if is_dropped(record, stream, recipe.captions, epoch):
            return ""
        variant = integer(self.seed, draw.key, draw.occurrence, "caption variant", recipe.variants_of(record))
        chosen = recipe.of_variant(record, variant)
        return variant_of(chosen, variant_stream(record, variant), recipe.captions, step, self.total_steps)

    def collate(
        self, bucket: Bucket, samples: Sequence[Sample], draws: Sequence[Draw], rejects: Sequence[Reject]
    ) -> Batch:
        """Put samples together, with the host draws of their uses."""
        # what is known of the pictures: pixels or latents, sizes
        features = self._pictures(samples)
        for name in ("original_size", "crop_top_left", "target_size"):
            features[name] = torch.tensor([getattr(sample, name) for sample in samples], dtype=torch.int64)

        # tokens, and what a cache holds of them
        captions = [sample.caption for sample in samples]
        features |= (tokens := self.tokenize(captions))
        if self.store.captions is not None:
            features |= self.store.captions.read(tokens)
        if self.store.pairs is not None:
            features |= self.store.pairs.read(*_records(samples), tokens)

        if any(recipe.loss_weight != 1 for recipe in self.recipes):
            weights = [self.recipes[sample.record.media.source].loss_weight for sample in samples]
            features["loss_weight"] = torch.tensor(weights, dtype=torch.float32)

        return Batch(
            bucket=bucket,
            record_id=torch.tensor([sample.record.id for sample in samples], dtype=torch.int64),
            occurrence=torch.tensor([draw.occurrence for draw in draws], dtype=torch.int64),
            features=features,
            loss_mask=self._masks(bucket, samples),
            draws={
                name: host_draws(name, spec, bucket, draws, self.seed) for name, spec in self.features.draws.items()
            },
            counts={"samples": float(len(samples))},
            keys=tuple(sample.record.key for sample in samples),
            rejects=tuple(rejects),
        )

    def _pictures(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """Stack pixels, or read what is cached of them."""
        features = {} if self.store.pictures is None else self.store.pictures.read(*_records(samples))
        if self.store.decodes:
            features["pixels"] = torch.from_numpy(np.stack([s.pixels for s in samples if s.pixels is not None]))
        for number, references in enumerate(zip(*(sample.control for sample in samples), strict=True)):
            features[f"{control_name(number)}_pixels"] = torch.from_numpy(np.stack(references))
        return features

    def _masks(self, bucket: Bucket, samples: Sequence[Sample]) -> torch.Tensor | None:
        """Stack masks, or read what is cached of them. Shape: (B, 1, H, W) fp32."""
        if self.store.masks is not None:
            return self.store.masks.read(*_records(samples))
        return _stacked_masks(bucket, samples)


def _records(samples: Sequence[Sample]) -> tuple[list[int], list[bool]]:
    """Return by what the cached features of pictures are found: whose they are, and whether they are mirrored."""
    return [sample.record.id for sample in samples], [sample.flipped for sample in samples]


def decode_layers(record: Record, recipe: Recipe, window: CropWindow, data: bytes) -> np.ndarray:
    """Decode a picture, with its alpha where that masks the loss. Shape: (h, w, 3 or 4) uint8. Raises Unusable."""
    if recipe.alpha_mask:
        layers, size_wh = decode_rgba(data)
    else:
        layers, size_wh = decode_for(data, window.fit.resized_wh, recipe.interpolation, decoder=recipe.decoder)
    check_unchanged(size_wh, record)
    return layers


def check_unchanged(size_wh: tuple[int, int], record: Record) -> None:
    """Refuse a file that has another size than when it was indexed. Raises Unusable."""
    (w, h), (was_h, was_w) = size_wh, record.size_hw
    if size_wh != (was_w, was_h):
        raise Unusable("changed", f"{w} x {h} px, {was_w} x {was_h} when it was indexed")


def cut_pixels(layers: np.ndarray, recipe: Recipe, window: CropWindow) -> np.ndarray:
    """Resize and cut a picture. Shape: (h, w, 3 or 4) uint8 -> (3, H, W) uint8."""
    return fit(layers[..., :3], window.fit.resized_wh, window.crop, window.flip, recipe.interpolation)


def cut_clip(file: MediaFile, record: Record, clip: Clip, recipe: Recipe, window: CropWindow) -> np.ndarray:
    """Decode a clip, each frame resized and cut as a picture is. Shape: (3, F, H, W) uint8. Raises Unusable."""

    def cut(frame: Decoded) -> np.ndarray:
        check_unchanged(frame.size_wh, record)
        return fit(frame.pixels, resized_wh, window.crop, window.flip, recipe.interpolation)

    resized_wh = window.fit.resized_wh
    frames = decode_clip(
        file, first=clip.first, frames=clip.frames, fps=Fraction(clip.fps), start_ms=clip.start_ms, cut=cut,
        resized_wh=resized_wh, interpolation=recipe.interpolation,
    )  # fmt: skip
    return np.ascontiguousarray(frames.swapaxes(0, 1))


def captions_of(record: Record, recipe: Recipe) -> list[str]:
    """Return every caption that a record can be drawn with, but for "", in the order of the variants.

    Raises: ValueError where there is no end of them.
    """
    if recipe.num_variants is not None:
        return [
            variant_of(recipe.of_variant(record, variant), variant_stream(record, variant), recipe.captions)
            for variant in range(recipe.variants_of(record))
        ]
    if varies(recipe.captions) or recipe.captions.token_warmup_step:
        raise ValueError("captions that are remade at every use cannot be listed: num_variants is not set")
    return written(record, variant_stream(record, 0), recipe.captions)


def variant_stream(record: Record, variant: int) -> Stream:
    """Return the draws of a caption's variant. They are the same with any seed, so that runs can share what is cached."""
    return Stream(0, record.key, variant, "caption")


def _stacked_masks(bucket: Bucket, samples: Sequence[Sample]) -> torch.Tensor | None:
    """Stack masks to (B, 1, H, W), ones where a sample has none; None where no sample has one."""
    if all(sample.mask is None for sample in samples):
        return None
    ones = np.ones((1, bucket.height, bucket.width), dtype=np.float32)
    return torch.from_numpy(np.stack([ones if sample.mask is None else sample.mask for sample in samples]))


def _planned_then_spare(planned: int, slot: int, spare: Spare | None) -> Iterator[int]:
    """Yield the id that was planned, then, only when it is asked for, those that may stand in for it."""
    yield planned
    if spare is not None:
        yield from spare(slot)


def host_draws(name: str, spec: DrawSpec, bucket: Bucket, draws: Sequence[Draw], seed: int) -> torch.Tensor:
    """Draw for each sample what a family asks for; the draw's name is its purpose.

    Shapes: normal (B, *spec.shape(bucket)) fp32; integer (B,) int64 in [low, high); uniform (B,) fp32 in [0, 1], from
    fp64 and rounded once; choice (B, *spec.shape(bucket)) int64.
    """
    if spec.kind == "normal":
        out = torch.empty((len(draws), *spec.shape(bucket)), dtype=torch.float32)
        rows, shape = out.numpy(), spec.shape(bucket)
        for slot, draw in enumerate(draws):
            if spec.mix is None:
                rows[slot] = normal(seed, draw.key, draw.occurrence, name, shape)
            else:
                rows[slot] = mixed(seed, draw.key, draw.occurrence, name, shape, spec.mix)
        return out

    # which of the bucket's cells stay
    if spec.kind == "choice":
        cells, (kept,) = spec.cells(bucket), spec.shape(bucket)
        chosen = [choice(seed, draw.key, draw.occurrence, name, cells, kept) for draw in draws]
        return torch.from_numpy(np.stack(chosen))

    # one number a sample
    if spec.kind == "integer":
        span = spec.high - spec.low
        integers = [spec.low + integer(seed, draw.key, draw.occurrence, name, span) for draw in draws]
        return torch.tensor(integers, dtype=torch.int64)
    if spec.kind == "uniform":
        quantiles = [uniform(seed, draw.key, draw.occurrence, name) for draw in draws]
        if spec.through is not None:
            quantiles = [spec.through(u, bucket) for u in quantiles]
        return torch.tensor(quantiles, dtype=torch.float64).float()
    raise ValueError(f"draw {name!r} is of unknown kind {spec.kind!r}")
