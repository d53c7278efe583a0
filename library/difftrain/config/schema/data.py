"""Sections about data: what is read, cached, and evaluated on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from difftrain.config.schema.section import CacheDtype, IntOrShare, PositiveInt, Section, Share

_SPACED = "with a space between; none in diffusion-pipe's data sets, where it is joined as it is"


class CaptionSection(Section):
    """How the caption of a draw is made from a record's caption."""

    extension: str | None = None  # None: .caption, then .txt
    separator: str = ","
    shuffle: bool = False
    keep_tokens: Annotated[int, Field(ge=0)] = 0
    keep_tokens_separator: str | None = None
    secondary_separator: str | None = None
    enable_wildcard: bool = False
    prefix: str | None = Field(None, description=f"text in front of every caption, {_SPACED}")
    suffix: str | None = Field(None, description=f"text behind every caption, {_SPACED}")
    token_warmup_min: Annotated[int, Field(ge=0)] = 1
    token_warmup_step: IntOrShare = 0
    weighted: bool = False
    dropout_rate: Share = 0.0
    dropout_every_n_epochs: Annotated[int, Field(ge=0)] = 0
    tag_dropout_rate: Share = 0.0
    allow_empty: bool = False
    shuffle_capitalization: bool = Field(
        False, description="the first letter of a caption is made large or small by chance"
    )
    dialect: Literal["kohya", "diffusion_pipe"] = Field(
        "kohya", description="diffusion_pipe: whole files, tags joined as they were cut, the prefix put before as it is"
    )
    variants: PositiveInt | None = Field(None, description="captions drawn of a record, once; unset: cache.shuffle_num")


class SizeSection(Section):
    """Which shapes pictures get."""

    resolution: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="[width, height] in pixels, or one number for a square"
    )
    enable_bucket: bool = False
    min_bucket_reso: PositiveInt = 256
    max_bucket_reso: PositiveInt = 1024
    bucket_reso_steps: PositiveInt = 64
    bucket_no_upscale: bool = False
    sizes: tuple[tuple[PositiveInt, PositiveInt], ...] = Field(
        (), description="width, height of every bucket, in place of those"
    )


class PictureSection(Section):
    """How a picture becomes pixels, and what masks its loss."""

    resize_interpolation: Literal["lanczos", "nearest", "bilinear", "linear", "bicubic", "cubic", "area"] | None = None
    flip: bool = False
    random_crop: bool = False
    color_aug: bool = False
    face_crop_range: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] | None = Field(
        None,
        description="[low, high]: cut around the face that a file name ends in (_x_y_width_height), the shorter side so many times the face",
    )
    alpha_mask: bool = False
    conditioning_dir: str | None = Field(None, description="masks of the loss, by the pictures' names")


class SubsetSection(PictureSection):
    """One source of a data set, every setting resolved: a table of [[datasets.subsets]], or a folder of the flags."""

    image_dir: str | None = None
    metadata_file: str | None = None  # kohya's json: captions and tags by picture
    dataset_class: str | None = None  # package.module.Class
    is_reg: bool = False
    class_tokens: str | None = None  # the caption of pictures without a caption file
    repeats: Annotated[int | float, Field(gt=0)] = Field(
        1, description="uses of a picture in an epoch; 0.5: in every second one"
    )
    share: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="of the records that are used, always the same")
    captions_file: str | None = Field(None, description="JSON of captions by file name, in place of caption files")
    default_mask: str | None = Field(None, description="mask of pictures that have none in conditioning_dir")
    masks_optional: bool = Field(False, description="a picture without a mask counts as a whole")
    flat: bool = Field(False, description="only what lies in the folder itself, as in kohya's image_dir")
    custom_attributes: dict[str, Any] = Field({}, description="the user's own words, kept with the run")
    captions: CaptionSection = CaptionSection()


class DatasetSection(SizeSection):
    """One table of [[datasets]], every setting resolved: sources that share buckets and a batch size."""

    batch_size: PositiveInt = 1
    validation_split: Annotated[float, Field(ge=0, lt=1)] = 0.0
    subsets: tuple[SubsetSection, ...] = ()


class DataSection(SizeSection, PictureSection):
    """Where samples come from and which shape they get."""

    dirs: tuple[str, ...] = ()
    repeats: tuple[PositiveInt, ...] = (1,)
    reg_dirs: tuple[str, ...] = ()
    in_json: str | None = None
    dataset_class: str | None = None  # package.module.Class
    dataset_config: str | None = None  # the file that `datasets` came from
    tar_order: Literal["random", "sequential"] = "random"
    tar_streams: PositiveInt = 64
    tar_window: PositiveInt = Field(4, description="shards whose records are shuffled together")
    image_column: str | None = None
    caption_column: str | None = None
    verify: Literal["auto", "full", "quick"] = "auto"
    max_rejected_share: Share = 0.5
    shard_size: PositiveInt | None = Field(None, description="plain files of a shard where data are read in sequence")
    prefetch: PositiveInt | None = Field(None, description="micro batches that a worker keeps ready; unset: 2")
    workers: Annotated[int, Field(ge=0)] = 8
    image_decoder: Literal["host", "device"] = Field("host", description="device: of JPEG, by torchvision_npu")
    cache_dir: str | None = None
    datasets: tuple[DatasetSection, ...] = ()  # in place of the folders above


class CacheSection(Section):
    """What is encoded once, at the start, and read from then on."""

    latents: bool = Field(False, description="in memory, for the length of the run")
    latents_to_disk: bool = Field(False, description="in the cache's folder, for other runs too")
    text: bool = Field(False, description="outputs of frozen text encoders: in memory")
    text_to_disk: bool = False
    latents_as: Literal["moments", "mean", "sample"] = Field("moments", description="moments: every use draws anew")
    latents_dtype: CacheDtype = "fp32"
    text_dtype: Literal["auto", CacheDtype] = Field("auto", description="auto: what the encoder computes in")
    dtypes: dict[str, str] = Field({}, description="feature -> CacheDtype, for one feature; wins")
    shuffle_num: PositiveInt | None = Field(None, description="captions that are drawn of a record, once")
    skip_check: bool = Field(False, description="checksums are not compared where entries are read first")
    trust: bool = Field(False, description="the index and the list of what is cached are taken as they are")
    regenerate: bool = Field(False, description="encode all of this run's entries anew")
    only: bool = Field(False, description="stop when the cache is whole")
    preload: bool = Field(False, description="copy a cache on disk into memory that all processes share")
    batch_size: PositiveInt = Field(32, description="captions that a text encoder takes at once")
    workers: Annotated[int, Field(ge=0)] | None = Field(None, description="while building; unset: data.workers")
    device: str | None = Field(None, description="kind of device that encodes; unset: the one that trains")
    segment_gib: Annotated[float, Field(gt=0)] = Field(1.0, description="size at which the next segment is begun")
    copy_gib: Annotated[float, Field(gt=0)] = Field(50.0, description="bound of what is kept of an object store")


class EvalSetSection(Section):
    """One evaluation set: its name in the metrics, its data set TOML, and what that says, every setting resolved."""

    name: str
    config: str
    datasets: tuple[DatasetSection, ...] = ()


class EvalSection(Section):
    """Loss on evaluation sets at nine fixed quantiles of the time, and KID of drawn pictures against them."""

    sets: tuple[EvalSetSection, ...] = ()
    every_n_steps: PositiveInt | None = None
    every_n_epochs: PositiveInt | None = None
    every_n_examples: PositiveInt | None = None
    before_first_step: bool = False
    batch_size: PositiveInt | None = Field(None, description="images a rank takes at once; unset: training.batch_size")
    kid: bool = Field(False, description="KID-efflite0 of pictures drawn for the sets' captions")
    kid_pictures: PositiveInt = Field(256, description="how many pictures")
    kid_every_n_steps: PositiveInt | None = Field(None, description="unset: with every evaluation")
    kid_guidance: Annotated[float, Field(ge=1)] = Field(1.0, description="their guidance; 1: none")
    kid_steps: PositiveInt = Field(20, description="their steps of the sampler")


class ValidationSection(Section):
    """Loss on records that are never trained on, with fixed draws."""

    split: Annotated[float, Field(ge=0, lt=1)] = 0.0
    seed: int | None = None
    every_n_steps: PositiveInt | None = None
    every_n_epochs: PositiveInt | None = None
    max_steps: PositiveInt | None = None
