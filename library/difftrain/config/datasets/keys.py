"""The one table of the keys of both data set TOMLs, kohya's and diffusion-pipe's.

A row says where a key may stand, what it sets, what its value must be and what it means; reader.py judges by it, and
tests hold docs/data_sets.md and docs/dataset_toml.md to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from difftrain.config.schema.validate import choices_of

File = Literal["kohya", "diffusion_pipe"]
SubsetKind = Literal["dreambooth", "finetune", "controlnet"]
Status = Literal["offered", "nearest", "later", "refused"]
Kind = Callable[[Any], str]  # what a value must be, or "" where it is that

# where a key may stand, the innermost table last
DATASET = ("[general]", "[[datasets]]")
SUBSET = (*DATASET, "[[datasets.subsets]]")
OWN = ("[[datasets.subsets]]",)
TOP = ("", "[[directory]]")  # "": above all directories
DIRECTORY = ("[[directory]]",)


@dataclass(frozen=True, slots=True)
class DatasetKey:
    """One row of the table.

    tables: where it may stand. to: "section.field" that it sets, of the sections of a resolved data set. run: the field
    of the run's configuration that counts where no table has the key. kind: None is whatever the field takes.
    passes: values that are right whatever the kind. filled: an empty text is a fault, not none. subsets: the kinds of
    kohya's subsets in which it means something. why: the reason of what is refused, or not built yet for a family whose
    row lacks `needs`. remedy: what would be right. spells: the key that it is another spelling of.
    help: its meaning; of kohya's keys that fall back to the run it is that of the run's field.
    """

    name: str
    tables: tuple[str, ...]
    to: str = ""
    run: str = ""
    help: str = ""
    kind: Kind | None = None
    status: Status = "offered"
    passes: tuple[Any, ...] = ()
    filled: bool = False
    subsets: tuple[SubsetKind, ...] = ("dreambooth", "finetune", "controlnet")
    needs: str = ""
    why: str = ""
    remedy: str = ""
    spells: str = ""

    @property
    def field(self) -> str:
        """Return the field that it sets, without its section."""
        return self.to.partition(".")[2]


# --- kinds of values

MOST_SIDE = 16384  # px
LEAST_RATIO, MOST_RATIO = 0.01, 100.0  # width / height
LEAST_REPEATS = 0.0001
CLIP_MODES = choices_of("data.video_clip_mode")


def _kind(expected: str, fits: Callable[[Any], bool]) -> Kind:
    return lambda value: "" if fits(value) else expected


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_texts(value: list[Any]) -> bool:
    return value != [] and all(isinstance(entry, str) and entry != "" for entry in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_side(value: Any) -> bool:
    return _is_whole(value, 1) and value <= MOST_SIDE


def _are_sides(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(map(_is_side, value))


def _is_ratio(value: Any) -> bool:
    return _is_number(value) and LEAST_RATIO <= value <= MOST_RATIO


def _list(expected: str, fits: Callable[[Any], bool]) -> Kind:
    return _kind(
        f"a list of {expected}", lambda value: isinstance(value, list) and value != [] and all(map(fits, value))
    )


CLIP_MODE = _kind(f"one of {', '.join(CLIP_MODES)}", lambda value: value in CLIP_MODES)
BOOL = _kind("true or false", lambda value: isinstance(value, bool))
TEXT = _kind("text in quotes", lambda value: isinstance(value, str))
FILLED = _kind("text in quotes, not empty", lambda value: isinstance(value, str) and value != "")
PATHS = _kind(
    "text in quotes, or a list of it, not empty",
    lambda value: _are_texts(value if isinstance(value, list) else [value]),
)
NUMBER = _kind("a number", _is_number)
COUNT = _kind("a whole number, at least 0", lambda value: _is_whole(value, 0))
POSITIVE = _kind("a whole number, at least 1", lambda value: _is_whole(value, 1))
RATE = _kind("a number above 0", lambda value: _is_number(value) and 0 < value < float("inf"))
SHARE = _kind("a number above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1)
REPEATS = _kind(f"a number, at least {LEAST_REPEATS:g}: 2, or 0.5 for every second epoch",
                lambda value: _is_number(value) and LEAST_REPEATS <= value < float("inf"))  # fmt: skip
RATIO = _kind(f"width / height: a number from {LEAST_RATIO:g} to {MOST_RATIO:g}", _is_ratio)
SIDES = _list(f"sides up to {MOST_SIDE}, or of [width, height], such as [512, 1024] or [[1280, 720]]",
              lambda entry: _is_side(entry) or _are_sides(entry, 2))  # fmt: skip
RATIOS = _list(f"width / height, {LEAST_RATIO:g} to {MOST_RATIO:g}, or of [width, height], such as [0.75, 1.0, 1.5]",
               lambda entry: _is_ratio(entry) or (_are_sides(entry, 2) and _is_ratio(entry[0] / entry[1])))  # fmt: skip
SIZES = _list("[width, height, frames], such as [[512, 512, 1], [640, 384, 1]]", lambda size: _are_sides(size, 3))
FRAMES = _list("whole numbers, such as [1, 33]", lambda count: _is_whole(count, 1))


# --- the rows

Row = DatasetKey
_RANGE = "Buckets evenly spaced in log space between the two, which are 0.01 to 100."
_NO_CLIPS = "no effect, which the log notes, for a family that makes images."

# fmt: off
KEYS: tuple[DatasetKey, ...] = (
    # kohya's, of a data set
    Row("batch_size", DATASET, "dataset.batch_size", "training.batch_size"),
    Row("resolution", DATASET, "dataset.resolution", "data.resolution", remedy="a number for a square, or [width, height]"),
    Row("enable_bucket", DATASET, "dataset.enable_bucket", "data.enable_bucket"),
    Row("min_bucket_reso", DATASET, "dataset.min_bucket_reso", "data.min_bucket_reso"),
    Row("max_bucket_reso", DATASET, "dataset.max_bucket_reso", "data.max_bucket_reso"),
    Row("bucket_reso_steps", DATASET, "dataset.bucket_reso_steps", "data.bucket_reso_steps"),
    Row("bucket_no_upscale", DATASET, "dataset.bucket_no_upscale", "data.bucket_no_upscale"),
    Row("validation_split", DATASET, "dataset.validation_split", "validation.split"),
    Row("validation_seed", DATASET, "validation.seed", help="one for all datasets: it decides what is held out"),
    Row("network_multiplier", DATASET, help="1.0 only", kind=NUMBER, status="refused", passes=(1, 1.0),
        why="it scales adapters, and full weights are trained here", remedy="leave it out, or 1.0"),
    # of a subset, or of all subsets below a table
    Row("color_aug", SUBSET, "subset.color_aug", "data.color_aug"),
    Row("face_crop_aug_range", SUBSET, "subset.face_crop_range", "data.face_crop_range", remedy="[low, high]"),
    Row("flip_aug", SUBSET, "subset.flip", "data.flip"),
    Row("num_repeats", SUBSET, "subset.repeats", "data.repeats", passes=(0,)),  # 0: kohya's way to leave a subset out
    Row("random_crop", SUBSET, "subset.random_crop", "data.random_crop"),
    Row("resize_interpolation", SUBSET, "subset.resize_interpolation", "data.resize_interpolation"),
    Row("custom_attributes", SUBSET, "subset.custom_attributes", help="free attributes, kept with the run"),
    Row("shuffle_caption", SUBSET, "captions.shuffle", "captions.shuffle"),
    Row("keep_tokens", SUBSET, "captions.keep_tokens", "captions.keep_tokens"),
    Row("keep_tokens_separator", SUBSET, "captions.keep_tokens_separator", "captions.keep_tokens_separator"),
    Row("secondary_separator", SUBSET, "captions.secondary_separator", "captions.secondary_separator"),
    Row("caption_separator", SUBSET, "captions.separator", "captions.separator", filled=True),
    Row("enable_wildcard", SUBSET, "captions.enable_wildcard", "captions.enable_wildcard"),
    Row("token_warmup_min", SUBSET, "captions.token_warmup_min", "captions.token_warmup_min"),
    Row("token_warmup_step", SUBSET, "captions.token_warmup_step", "captions.token_warmup_step"),
    Row("caption_prefix", SUBSET, "captions.prefix", "captions.prefix"),
    Row("caption_suffix", SUBSET, "captions.suffix", "captions.suffix"),
    Row("caption_dropout_every_n_epochs", SUBSET, "captions.dropout_every_n_epochs", "captions.dropout_every_n_epochs"),
    Row("caption_dropout_rate", SUBSET, "captions.dropout_rate", "captions.dropout_rate"),
    Row("caption_tag_dropout_rate", SUBSET, "captions.tag_dropout_rate", "captions.tag_dropout_rate"),
    Row("caption_extension", SUBSET, "captions.extension", "captions.extension", filled=True,
        subsets=("dreambooth", "controlnet")),
    Row("class_tokens", SUBSET, "subset.class_tokens", subsets=("dreambooth",), help="caption of images without a caption file"),
    Row("cache_info", SUBSET, kind=BOOL, subsets=("dreambooth", "controlnet"), status="nearest", help="no effect: sizes are always kept"),
    # of one subset
    Row("image_dir", OWN, "subset.image_dir", filled=True, help="the folder of the images; subfolders are not read"),
    Row("is_reg", OWN, "subset.is_reg", subsets=("dreambooth",), help="regularisation pictures"),
    Row("alpha_mask", OWN, "subset.alpha_mask", "data.alpha_mask", subsets=("dreambooth", "finetune")),
    Row("metadata_file", OWN, "subset.metadata_file", filled=True, subsets=("finetune",), help="kohya's fine-tuning metadata"),
    Row("conditioning_data_dir", OWN, "subset.conditioning_dir", filled=True, subsets=("controlnet",),
        help="masks by the images' names; reference images where the family edits images and loss.masked is not on"),

    # diffusion-pipe's
    Row("path", DIRECTORY, "subset.image_dir", kind=FILLED, help=(
        "A folder of images with caption files, of `.tar` shards (LAION, WebDataset) or of `.parquet` files, or the id of a dataset on a hub. "
        "If the folder itself has any, its subfolders are not read, so masks may be there; otherwise it is read at any depth.")),
    Row("root", DIRECTORY, kind=FILLED, spells="path"),
    Row("mask_path", TOP, "subset.conditioning_dir", kind=FILLED, help=(
        "A folder of masks by the images' names, any suffix. White is trained on, grey in part, black not; only red counts. An image without "
        "one counts in full; the log says at the start how many there are (not of images in tars). Its masks apply whatever `loss.masked` says.")),
    Row("default_mask_file", TOP, "subset.default_mask", kind=FILLED, help=(
        "The mask of images that have none; it is stretched to each. An entirely black one is refused.")),
    Row("control_path", TOP, "subset.control_dirs", kind=PATHS, status="later", needs="control", remedy="leave it out, or name a family that edits images",
        why="the family {family!r} is shown no reference images", help=(
        "A folder of reference (control) images by the images' names, any suffix, of the same aspect ratio: they are cut and mirrored as the images are. "
        "A list: a folder for each reference. With `num_control` above 1 a single folder may hold name_0, name_1, ... instead. "
        "An error for a family that is shown no reference images.")),
    Row("num_repeats", TOP, "subset.repeats", kind=REPEATS, help=(
        "Uses of an image in an epoch, 1 by default. Fractions are exact: 0.5 uses every image in every second epoch, 1.25 once in each, "
        "and once more in every fourth.")),
    Row("subsample_ratio", TOP, "subset.share", kind=SHARE, help=(
        "The fraction of the images that is used. They are chosen by a hash of their names: always the same ones, whatever other data there is.")),
    Row("caption_prefix", TOP, "captions.prefix", "captions.prefix", kind=TEXT, help=(
        "Put before every caption as is, without a space. It stays in front when tags are shuffled.")),
    Row("caption_extension", TOP, "captions.extension", "captions.extension", kind=FILLED, help=(
        "Of caption files; by default `.caption`, then `.txt`. All lines of a file are one caption.")),
    Row("shuffle_tags", TOP, "captions.shuffle", kind=BOOL, help="Tags are shuffled."),
    Row("shuffle_delimiter", TOP, kind=FILLED, spells="cache_shuffle_delimiter"),
    Row("cache_shuffle_delimiter", TOP, "captions.separator", kind=FILLED, help='Separator of tags; `", "` by default.'),
    Row("shuffle_count", TOP, kind=COUNT, spells="cache_shuffle_num"),
    Row("cache_shuffle_num", TOP, "captions.variants", kind=COUNT, help=(
        "Number of shuffled variants made of each caption, once; each use takes one of them. 0: no shuffling.")),
    Row("shuffle_capitalization", TOP, "captions.shuffle_capitalization", "captions.shuffle_capitalization", kind=BOOL, help=(
        "The first letter of a caption is upper or lower case at random.")),
    Row("online_captions", TOP, "subset.captions_file", kind=BOOL, help="`captions.json` must be there (see below)."),
    Row("skip_empty_caption", TOP, "captions.allow_empty", "captions.allow_empty", kind=BOOL, help=(
        "true (the default): an image without a caption is left out, counted and named in `rejected.jsonl`. false: it is trained with an "
        "empty caption.")),
    Row("shuffle_metadata", TOP, kind=BOOL, status="nearest", help=(
        "false has no effect, with a note in the log: every epoch is shuffled by the seed.")),
    Row("resolutions", TOP, "dataset.resolution", "data.resolution", kind=SIDES, help=(
        "Side lengths up to 16384, or `[width, height]`, which stands for its area. Every image is used at every resolution, each time "
        "with its own noise and timesteps; the folder is indexed once for all of them.")),
    Row("enable_ar_bucket", TOP, "dataset.enable_bucket", kind=BOOL, help="Images roughly keep their aspect ratio; false (the default) crops squares."),
    Row("ar_buckets", TOP, "dataset.sizes", kind=RATIOS, help="Width / height of every bucket, or `[width, height]`, in place of these three."),
    Row("min_ar", TOP, "dataset.sizes", kind=RATIO, help=_RANGE),
    Row("max_ar", TOP, "dataset.sizes", kind=RATIO, help=_RANGE),
    Row("num_ar_buckets", TOP, "dataset.sizes", kind=POSITIVE, help=_RANGE),
    Row("size_buckets", TOP, "dataset.sizes", kind=SIZES, help="`[width, height, 1]` of every bucket, in place of resolutions and aspect ratios."),
    Row("frame_buckets", TOP, "dataset.frame_buckets", "data.frame_buckets", kind=FRAMES, help=(
        "Frames of clips, such as `[1, 33, 65]`: each clip has as many as the largest that its video fills; 1, of images, is always there, and "
        f"others come down to what the family takes (4 n + 1 of Wan). Without others videos are not read; {_NO_CLIPS}")),
    Row("support_video", TOP, kind=BOOL, status="later", needs="clips", passes=(False,), remedy="leave this directory out, or name one of images",
        why="the family {family!r} makes images, no clips",
        help="false: videos of this directory are not read, whatever frame_buckets says. true is an error for a family that makes images."),
    Row("framerate", TOP, "dataset.framerate", "data.framerate", kind=RATE, help=(
        f"Frames a second that clips are read with; by default the family's. {_NO_CLIPS[0].upper()}{_NO_CLIPS[1:]}")),
    Row("video_clip_mode", TOP, "dataset.video_clip_mode", "data.video_clip_mode", kind=CLIP_MODE, help=(
        "`single_beginning` (the default), `single_middle`: one clip of a video; `multiple_overlapping`: as many as cover it, evenly spaced; "
        f"`random`: one, from another moment at every use. {_NO_CLIPS[0].upper()}{_NO_CLIPS[1:]}")),
)
# fmt: on
KOHYA = {key.name: key for key in KEYS if "[[directory]]" not in key.tables}
DIFFUSION_PIPE = {key.name: key for key in KEYS if "[[directory]]" in key.tables}
KEYS_OF: dict[File, dict[str, DatasetKey]] = {"kohya": KOHYA, "diffusion_pipe": DIFFUSION_PIPE}
# what somebody may write who has another file in mind -> what he means
RENAMED: dict[File, dict[str, str]] = {
    "kohya": {"train_batch_size": "batch_size", "dataset_repeats": "num_repeats", "train_data_dir": "image_dir",
              "in_json": "metadata_file", "reg_data_dir": "image_dir, with is_reg = true"},
    "diffusion_pipe": {"resolution": "resolutions", "repeats": "num_repeats", "image_dir": "path",
                       "directories": "[[directory]]", "dataset": "[[datasets]]", "prefix": "caption_prefix",
                       "frames": "frame_buckets"},
}  # fmt: skip
