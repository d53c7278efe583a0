"""Sections about data: what is read, cached, and evaluated on."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from difftrain.config.schema.section import BatchSize, CacheDtype, IntOrShare, PositiveInt, Section, Share, Side

_SPACED = "with a space between; none in diffusion-pipe's datasets, where it is joined as is"


class CaptionSection(Section):
    """How the caption of a draw is made from a record's caption."""

    extension: str | None = Field(None, description="suffix of caption files; unset: .caption, then .txt")
    separator: str = Field(",", description="separator between the parts of a caption")
    shuffle: bool = Field(False, description="shuffle the parts of a caption at every use")
    keep_tokens: Annotated[int, Field(ge=0)] = Field(
        0, description="leading caption parts that are never shuffled or dropped"
    )
    keep_tokens_separator: str | None = Field(
        None,
        description="text before it in a caption stays in front, text after a second one stays at the end:"
        " a ||| b, c ||| d",
    )
    secondary_separator: str | None = Field(
        None, description="joins parts that move as one; becomes {captions.separator} at the end"
    )
    enable_wildcard: bool = Field(
        False, description="pick one of {a|b|c}, and one line of captions with several; {{ and }} are braces"
    )
    prefix: str | None = Field(None, description=f"text before every caption, {_SPACED}")
    suffix: str | None = Field(None, description=f"text after every caption, {_SPACED}")
    token_warmup_min: Annotated[int, Field(ge=0)] = Field(
        1, description="parts of a caption that {captions.token_warmup_step} begins with"
    )
    token_warmup_step: IntOrShare = Field(
        0,
        description="updates until captions have all their parts; below 1: a share of all; 0: from the start",
    )
    weighted: bool = Field(
        False, description="weights in captions: (a) (a:1.2) [a]; a backslash before a bracket keeps it"
    )
    dropout_rate: Share = Field(
        0.0, description="fraction of uses with an empty caption, for all text encoders together"
    )
    dropout_every_n_epochs: Annotated[int, Field(ge=0)] = Field(
        0, description="every n-th epoch has empty captions; 0: none"
    )
    tag_dropout_rate: Share = Field(0.0, description="fraction of caption parts that is left out")
    allow_empty: bool = Field(
        False,
        description="train on images without a caption instead of rejecting them; with kohya's flags this is the default",
    )
    shuffle_capitalization: bool = Field(
        False, description="the first letter of a caption is upper or lower case at random"
    )
    dialect: Literal["kohya", "diffusion_pipe"] = Field(
        "kohya",
        description="diffusion_pipe: all lines of a file, tags joined by their separator, the prefix joined as is",
    )
    variants: PositiveInt | None = Field(
        None, description="captions sampled per record, once; unset: {cache.shuffle_num}"
    )


class SizeSection(Section):
    """Which shapes images get."""

    resolution: tuple[Side, Side] | None = Field(
        None, description="width and height in pixels, or one number for a square"
    )
    enable_bucket: bool = Field(False, description="keep aspect ratios: group images into buckets of one area")
    min_bucket_reso: Side = Field(256, description="shortest side of a bucket")
    max_bucket_reso: Side = Field(1024, description="longest side of a bucket")
    bucket_reso_steps: Side = Field(64, description="bucket sides are multiples of this")
    bucket_no_upscale: bool = Field(False, description="never enlarge an image; buckets follow its size")
    sizes: tuple[tuple[Side, Side], ...] = Field((), description="width, height of every bucket, in place of those")


class ClipSection(Section):
    """Which frames of a video are a sample."""

    frame_buckets: tuple[PositiveInt, ...] = Field(
        (1,),
        description="frames of clips, such as [1, 33, 65]: each clip has as many as the largest that its video fills; images are"
        " clips of one frame, whatever is listed; [1]: videos are not read",
    )
    framerate: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        None, description="frames a second that clips are read with, whatever a video has; unset: those of the family"
    )
    video_clip_mode: Literal["single_beginning", "single_middle", "multiple_overlapping", "random"] = Field(
        "single_beginning",
        description="single_beginning, single_middle: one clip of a video; multiple_overlapping: as many as cover it, evenly"
        " spaced; random: one, from another moment at every use",
    )


class PictureSection(Section):
    """How an image becomes pixels, and what masks its loss."""

    resize_interpolation: (
        Literal["lanczos", "nearest", "bilinear", "linear", "bicubic", "cubic", "area", "box"] | None
    ) = Field(None, description="how images are resized; unset: area when smaller, lanczos when larger; box is area")
    flip: bool = Field(False, description="mirror half of the uses, at random")
    random_crop: bool = Field(False, description="crop at a random position instead of the centre")
    color_aug: bool = Field(False, description="shift hue or gamma in a third of the uses")
    face_crop_range: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] | None = Field(
        None,
        description="lowest and highest: crop around the face that a file name ends in (_x_y_width_height), the shorter side so"
        " many times the face",
    )
    alpha_mask: bool = Field(
        False,
        description="mask the loss by the images' alpha, which is then not composited over white; no {loss.masked=true} needed",
    )
    conditioning_dir: str | None = Field(
        None,
        description="folder of masks for {loss.masked=true}: images of the same names, whose red channel weighs the loss",
    )
    control_dirs: tuple[str, ...] = Field(
        (),
        description="folders of reference images, which an editing model is shown: images of the same names, one folder for each"
        " reference, or a single one with name_0, name_1, ...; unset: they lie with their images in tars (name.control.png,"
        " name.reference_1.png) or parquet columns",
    )


class SubsetSection(PictureSection):
    """One source of a dataset, every setting resolved: a table of [[datasets.subsets]], or a folder of the flags."""

    image_dir: str | None = Field(None, description="folder of its images")
    metadata_file: str | None = Field(None, description="kohya's metadata json: captions and tags of the images")
    dataset_class: str | None = Field(None, description="package.module.Class of a dataset of your own")
    is_reg: bool = Field(False, description="regularisation images")
    class_tokens: str | None = Field(None, description="the caption of images without a caption file")
    repeats: Annotated[int | float, Field(gt=0)] = Field(
        1, description="uses of an image per epoch; 0.5: in every second epoch"
    )
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="fraction of the records that is used, always the same ones"
    )
    captions_file: str | None = Field(None, description="JSON of captions by file name, in place of caption files")
    default_mask: str | None = Field(None, description="mask of images that have none in conditioning_dir")
    masks_optional: bool = Field(False, description="an image without a mask counts in full")
    flat: bool = Field(False, description="only files in the folder itself, no subfolders, as in kohya's image_dir")
    custom_attributes: dict[str, Any] = Field({}, description="the user's own words, kept with the run")
    captions: CaptionSection = Field(CaptionSection(), description="how captions are made of the records'")


class DatasetSection(SizeSection, ClipSection):
    """One table of [[datasets]], every setting resolved: sources that share buckets and a batch size."""

    batch_size: BatchSize = Field(1, description="images that a device takes in one micro batch")
    image_batch_size: BatchSize | None = Field(None, description="the same of images among clips; unset: as many")
    validation_split: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of records held out for the validation loss"
    )
    subsets: tuple[SubsetSection, ...] = Field((), description="its sources")


class DataSection(SizeSection, ClipSection, PictureSection):
    """Where samples come from and which shape they get."""

    dirs: tuple[str, ...] = Field(
        (),
        description="images with caption files, <repeats>_<class> folders, tars or parquet, or a hub id of such; one or"
        " several",
    )
    repeats: tuple[PositiveInt, ...] = Field(
        (1,), description="uses of an image in an epoch: one number, or one for each folder"
    )
    reg_dirs: tuple[str, ...] = Field(
        (),
        description="regularisation images, as <repeats>_<class> folders: as many uses as there are of training images",
    )
    in_json: str | None = Field(
        None, description="kohya's metadata json: captions and tags of the images in {data.dirs}"
    )
    dataset_class: str | None = Field(
        None,
        description="package.module.Class of a dataset of your own, made with {data.dirs}; see docs/data_sets.md",
    )
    dataset_config: str | None = Field(None, description="TOML file of the data: diffusion-pipe's, or kohya's")
    tar_order: Literal["random", "sequential"] = Field(
        "random", description="random: any record of a tar; sequential: tars are read in streams"
    )
    tar_streams: PositiveInt = Field(64, description="sequential streams, whatever the number of devices")
    tar_window: PositiveInt = Field(4, description="tars of a stream whose records are shuffled together")
    image_column: str | None = Field(None, description="parquet column with image bytes or paths; unset: found by name")
    caption_column: str | None = Field(
        None,
        description="parquet column with captions; unset: found by name; also the column of metadata.jsonl, .csv or .parquet"
        " next to images, which then provides their captions",
    )
    num_control: Annotated[int, Field(ge=0, le=3)] = Field(
        0, description="reference images of each image; an image with fewer or more is rejected"
    )
    control_columns: tuple[str, ...] = Field(
        (), description="parquet columns of the reference images, in order; unset: found by name"
    )
    control_size: Literal["target", "area"] = Field(
        "target",
        description="target: a reference image has its image's size; area: as many pixels as the family's pipeline shows it with, about a million,"
        " whatever the image's size; cut and mirrored as its image is either way",
    )
    control_dropout: Share = Field(
        0.0, description="fraction of uses whose reference images are zeros, so that guidance may start from there"
    )
    split: str | None = Field(
        None,
        description="of data divided into train, validation and test by names of folders and shards: the part that is read",
    )
    epoch_batches: Literal["whole", "every"] | None = Field(
        None,
        description="whole: steps of whole global batches, each of one bucket, what is left of it begins its next epoch; every: all"
        " uses in every epoch, the last micro batch of a bucket smaller, as in kohya's scripts; unset: what a checkpoint was written"
        " with, else every with kohya's flags and whole elsewhere",
    )
    max_samples: PositiveInt | None = Field(
        None, description="so many records, chosen by {training.seed}, are trained on; unset: all"
    )
    verify: Literal["auto", "full", "quick"] = Field(
        "auto",
        description="full: decode every image once; quick: headers only; auto: full for small sets, quick for large ones",
    )
    max_rejected_share: Share = Field(0.5, description="share of unusable items above which the run stops")
    shard_size: PositiveInt | None = Field(None, description="files of a plain folder that are one shard of a stream")
    prefetch: PositiveInt | None = Field(None, description="micro batches that a worker keeps ready; unset: 2")
    workers: Annotated[int, Field(ge=0)] = Field(
        8, description="processes that decode images, for each device; 0: none"
    )
    image_decoder: Literal["host", "device"] = Field(
        "host", description="who decodes JPEG; device: the NPU, by torchvision_npu, within 2/255 of the host"
    )
    cache_dir: str | None = Field(
        None,
        description="folder of the index and of cached features, or the URL of such a cache on an object store, which is"
        " only read; unset: the user's cache folder",
    )
    datasets: tuple[DatasetSection, ...] = Field(
        (), description="what {data.dataset_config} says, every setting resolved; a run writes it, nobody else"
    )


class CacheSection(Section):
    """What is encoded once, at the start, and read from then on."""

    latents: bool = Field(False, description="encode every image once, at the start, and keep its latents in memory")
    latents_to_disk: bool = Field(
        False,
        description="encode every image once, at the start, and keep its latents in the cache of {data.cache_dir}, for later runs too",
    )
    text: bool = Field(
        False,
        description="encode every caption once, at the start, and keep the outputs of the text encoders in memory",
    )
    text_to_disk: bool = Field(
        False,
        description="encode every caption once, at the start, and keep the outputs of the text encoders in the cache of"
        " {data.cache_dir}, for later runs too",
    )
    latents_as: Literal["moments", "mean", "sample"] = Field(
        "moments",
        description="moments: mean and deviation, sampled at every use; mean: no sampling; sample: sampled once",
    )
    latents_dtype: CacheDtype = Field("fp32", description="what latents are stored in; fp8: with scales")
    text_dtype: Literal["auto", CacheDtype] = Field(
        "auto",
        description="what outputs of text encoders are stored in; auto: what they are computed in; fp8: with scales",
    )
    dtypes: dict[str, str] = Field(
        {}, description="the same for single features, each by its name, such as hidden_2 = fp8; wins"
    )
    shuffle_num: PositiveInt | None = Field(
        None,
        description="captions sampled per record, once; each use takes one of them; unset: sampled at every use, or 10 with cached text",
    )
    skip_check: bool = Field(False, description="compare no checksum where a cached entry is read first")
    trust: bool = Field(
        False,
        description="list, look at and hash no file of the data: index and cache are taken as they are; fingerprints of the encoders and checksums still count",
    )
    regenerate: bool = Field(False, description="encode everything that this run reads from its cache again")
    only: bool = Field(False, description="build the cache on disk, and stop")
    preload: bool = Field(False, description="copy what is read from a cache on disk into memory, once for a machine")
    batch_size: BatchSize = Field(32, description="captions that a text encoder takes at once while a cache is built")
    workers: Annotated[int, Field(ge=0)] | None = Field(
        None, description="processes that decode for a device while a cache is built; unset: {data.workers}"
    )
    device: str | None = Field(None, description="kind of device that encodes; unset: the one that trains")
    segment_gib: Annotated[float, Field(gt=0)] = Field(1.0, description="GiB of a file of the cache, about")
    copy_gib: Annotated[float, Field(gt=0)] = Field(
        50.0, description="GiB of a cache on an object store that are kept on local disk, at most"
    )


class EvalSetSection(Section):
    """One evaluation set: its name in the metrics, its dataset TOML, and what that says, every setting resolved."""

    name: str = Field(description="how it is called in the metrics")
    config: str = Field(description="TOML file of its data")
    datasets: tuple[DatasetSection, ...] = Field(
        (), description="what that says, every setting resolved; a run writes it, nobody else"
    )


class EvalSection(Section):
    """Loss on evaluation sets at nine fixed quantiles of the time, and KID of drawn images against them."""

    sets: tuple[EvalSetSection, ...] = Field((), description="sets whose loss is measured")
    every_n_steps: PositiveInt | None = Field(None, description="measure every n steps")
    every_n_epochs: PositiveInt | None = Field(None, description="measure every n epochs")
    every_n_examples: PositiveInt | None = Field(None, description="measure every n samples")
    before_first_step: bool = Field(False, description="measure before training; unset: where there are sets")
    batch_size: BatchSize | None = Field(
        None, description="samples that a device takes at once while measuring; unset: {training.batch_size}"
    )
    kid: bool = Field(False, description="KID-efflite0 of images generated for the sets' captions")
    kid_pictures: PositiveInt = Field(256, description="how many images")
    kid_every_n_steps: PositiveInt | None = Field(None, description="unset: with every evaluation")
    kid_guidance: Annotated[float, Field(ge=1)] = Field(1.0, description="their guidance; 1: none")
    kid_steps: PositiveInt = Field(20, description="their steps of the sampler")


class ValidationSection(Section):
    """Loss on records that are never trained on, with fixed draws."""

    split: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of records held out for the validation loss"
    )
    seed: int | None = Field(None, description="seed of that choice; unset: {training.seed}")
    every_n_steps: PositiveInt | None = Field(None, description="validation loss every n steps")
    every_n_epochs: PositiveInt | None = Field(
        None,
        description="validation loss every n epochs; unset: every epoch, unless there is {validation.every_n_steps}",
    )
    max_steps: PositiveInt | None = Field(None, description="global batches of one validation; unset: all")
