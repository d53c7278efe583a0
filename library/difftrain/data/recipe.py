"""How the samples of one source are made: sizes, captions, augmentation, masks and weight. One recipe a source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from difftrain.config.datasets.datasets import datasets_of
from difftrain.config.schema.families import row_of
from difftrain.config.schema.sections import CaptionSection
from difftrain.data.captions import varies
from difftrain.data.media.decoders import HOST
from difftrain.data.media.masks import Masks
from difftrain.data.plan.buckets import BucketTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from difftrain.config.schema.sections import DatasetSection, SubsetSection, TrainConfig
    from difftrain.contracts import Record, ReferenceArea
    from difftrain.data.sources import SourceInfo


@dataclass(frozen=True)
class Recipe:
    """Say how a record of one source becomes a sample. Picklable.

    batch_size: images a rank takes in one micro batch. face_crop_range: lowest and highest zoom. masks: where
    those of the loss lie that are files of their own. num_control: reference images that each picture has. control_area: the size that these
    are brought to; None: their picture's. loss_weight: multiplies the loss of every use; is_reg: a regularisation picture.
    num_variants: captions of a record, of which each use draws one; None: each use has one of its own. moves_clips: each use of a
    video takes another part of it.
    """

    captions: CaptionSection
    buckets: BucketTable
    batch_size: int
    flip: bool = False
    random_crop: bool = False
    color_aug: bool = False
    face_crop_range: tuple[float, float] | None = None
    alpha_mask: bool = False
    masks: Masks | None = None
    num_control: int = 0
    control_area: ReferenceArea | None = None
    interpolation: str | None = None
    loss_weight: float = 1.0
    is_reg: bool = False
    decoder: str = HOST
    num_variants: int | None = None
    moves_clips: bool = False

    @property
    def has_masks(self) -> bool:
        """Tell whether every picture has a mask of the loss."""
        return self.alpha_mask or self.masks is not None

    def variants_of(self, record: Record) -> int:
        """Return how many captions a record is drawn with: in diffusion-pipe's data sets, so many of each that is written."""
        assert self.num_variants is not None
        return self.num_variants * (len(record.captions) if self.captions.dialect == "diffusion_pipe" else 1)

    def of_variant(self, record: Record, variant: int) -> Record:
        """Return a record with the captions that a variant is made of."""
        if self.captions.dialect != "diffusion_pipe":
            return record
        return replace(record, captions=(record.captions[variant % len(record.captions)],))

    def plain(self) -> Recipe:
        """Return the recipe of validation: no augmentation, and the caption as it stands."""
        options = {
            "shuffle": False,
            "dropout_rate": 0.0,
            "dropout_every_n_epochs": 0,
            "tag_dropout_rate": 0.0,
            "token_warmup_step": 0,
            "shuffle_capitalization": False,
        }
        captions = self.captions.model_copy(update=options)
        return replace(
            self,
            captions=captions,
            num_variants=self.num_variants if varies(captions) else None,
            flip=False,
            random_crop=False,
            color_aug=False,
            face_crop_range=None,
            loss_weight=1.0,
            moves_clips=False,
        )


def recipes_of(cfg: TrainConfig, sources: Sequence[SourceInfo]) -> tuple[Recipe, ...]:
    """Return the recipe of each source, by its ordinal."""
    datasets = datasets_of(cfg.data, cfg.captions)
    tables = [BucketTable.of(dataset) for dataset in datasets]
    return tuple(
        _recipe(cfg, info.dataset, datasets[info.dataset], tables[info.dataset], info.subset) for info in sources
    )


def _recipe(cfg: TrainConfig, ordinal: int, dataset: DatasetSection, buckets: BucketTable, position: int) -> Recipe:
    subset = dataset.subsets[position]
    return Recipe(
        captions=subset.captions,
        buckets=buckets,
        batch_size=cfg.batch_sizes[ordinal],
        flip=subset.flip,
        random_crop=subset.random_crop,
        color_aug=subset.color_aug,
        face_crop_range=None if dataset.enable_bucket else subset.face_crop_range,  # kohya's buckets know no faces
        alpha_mask=subset.alpha_mask,
        masks=_masks(subset) if cfg.loss.masked else None,
        num_control=cfg.data.num_control,
        control_area=row_of(cfg).control_area if cfg.data.control_size == "area" else None,
        interpolation=subset.resize_interpolation,
        loss_weight=cfg.loss.prior_weight if subset.is_reg else 1.0,
        is_reg=subset.is_reg,
        decoder=cfg.data.image_decoder,
        num_variants=_variants(subset.captions, cfg),
        moves_clips=dataset.video_clip_mode == "random",
    )


def _variants(captions: CaptionSection, cfg: TrainConfig) -> int | None:
    return (captions.variants or cfg.cache.shuffle_num) if varies(captions) else None


def _masks(subset: SubsetSection) -> Masks | None:
    if not (subset.conditioning_dir or subset.default_mask):
        return None
    return Masks(subset.conditioning_dir or "", subset.default_mask or "", subset.masks_optional)
