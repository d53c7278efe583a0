"""diffusion-pipe's data set TOML as data sets, its resolutions and buckets included."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from difftrain.config import hub_ids
from difftrain.config.datasets.clips import VIDEO_SUFFIXES, clip_buckets, reads_clips
from difftrain.config.datasets.datasets import Resolved
from difftrain.config.datasets.keys import DIFFUSION_PIPE, KEYS
from difftrain.config.datasets.kohya import KohyaReader
from difftrain.config.datasets.reader import Table, TomlReader
from difftrain.config.paths import expanded, is_file, is_folder, resolve_path
from difftrain.config.schema.families import row_of
from difftrain.config.schema.sections import CaptionSection, DatasetSection, PictureSection, SubsetSection, TrainConfig

Size = tuple[int, int]


class Sizes(NamedTuple):
    """The buckets of one resolution, as (width, height), in the order of their aspect ratios.

    side: of the square of the same area. nominal: that square, in multiples of what the family takes.
    """

    side: int
    nominal: Size
    sizes: tuple[Size, ...]


class Clips(NamedTuple):
    """Which frames of videos are read, as ClipSection has them."""

    frame_buckets: tuple[int, ...]
    framerate: float | None
    video_clip_mode: str


def sides_of(resolutions: list[Any]) -> list[float]:
    """Return the side of the square of each area, each once, ascending."""
    return sorted({float(side) if isinstance(side, int) else math.sqrt(side[0] * side[1]) for side in resolutions})


def ratios_of(values: Table) -> list[float]:
    """Return width / height of every bucket, ascending: as listed, or evenly in log space from min_ar to max_ar."""
    if not values.get("enable_ar_bucket", False):
        return [1.0]
    listed = values.get("ar_buckets")
    if listed:
        return sorted({ratio[0] / ratio[1] if isinstance(ratio, list) else float(ratio) for ratio in listed})
    low, high, count = values["min_ar"], values["max_ar"], values["num_ar_buckets"]
    if count == 1:
        return [float(low)]
    return sorted({low * (high / low) ** (n / (count - 1)) for n in range(count)})


def sizes_of(values: Table, multiple: int) -> list[Sizes]:
    """Return the buckets of each resolution: every one with the resolution's area, its sides rounded to `multiple`."""
    listed = values.get("size_buckets")
    if listed:
        sizes = tuple(dict.fromkeys((rounded(w, multiple), rounded(h, multiple)) for w, h, _ in listed))
        largest = round(math.sqrt(max(width * height for width, height in sizes)))
        return [Sizes(largest, _square(largest, multiple), tuple(sorted(sizes, key=lambda size: size[0] / size[1])))]
    all_sizes = []
    for side in sides_of(values["resolutions"]):
        sizes = tuple(dict.fromkeys(_of_area(side, ratio, multiple) for ratio in ratios_of(values)))
        all_sizes.append(Sizes(round(side), _square(side, multiple), sizes))
    return all_sizes


def rounded(side: float, multiple: int) -> int:
    """Round a side to the nearest multiple, up at the middle, and never to 0."""
    return max(1, int(side / multiple + 0.5)) * multiple


def _of_area(side: float, ratio: float, multiple: int) -> Size:
    width = math.sqrt(side * side * ratio)
    return rounded(width, multiple), rounded(side * side / width, multiple)


def _square(side: float, multiple: int) -> Size:
    return rounded(side, multiple), rounded(side, multiple)


BatchOf = Callable[[int], int]  # side of a resolution -> images of a micro batch

CAPTIONS_FILE = "captions.json"
SPELLINGS = {key.name: key.spells for key in KEYS if key.spells}
_LISTS = ("directory", "datasets")
_RANGE = ("min_ar", "max_ar", "num_ar_buckets")
_MANY_RESOLUTIONS = 3
_MOST_RATIOS = 1000
_PATHS = ("path", "mask_path", "default_mask_file")
SHARDS = (".tar", ".parquet")
_DATA = (*SHARDS, *VIDEO_SUFFIXES, ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")
# what the file sets for every data set, whatever the run's configuration says of it
_OVERRIDDEN = frozenset({
    "data.enable_bucket", "data.min_bucket_reso", "data.max_bucket_reso", "data.bucket_reso_steps",
    "data.bucket_no_upscale", "data.sizes", "data.repeats", "data.conditioning_dir", "data.control_dirs", "captions.shuffle",
    "captions.separator",
})  # fmt: skip
# how a picture becomes pixels is the run's to say: the file has no keys for it
_INHERITED = tuple(name for name in PictureSection.model_fields if f"data.{name}" not in _OVERRIDDEN)


def resolve(
    path: Path,
    cfg: TrainConfig,
    *,
    multiple: int,
    batch_of: BatchOf | None = None,
    image_batch_of: BatchOf | None = None,
) -> Resolved:
    """Read a file of data sets, of either kind, and settle every setting of its data sets.

    cfg: what the run says otherwise. multiple: of which the family's sizes are. batch_of, image_batch_of: None takes the run's.
    """
    reader = DirectoryReader(path, cfg)
    tables = reader.tables(str(path))
    if tables is None:
        return reader.out
    datasets = tables.get("datasets")
    listed = datasets if isinstance(datasets, list) else [datasets]
    if "general" not in tables and not any("subsets" in entry for entry in listed if isinstance(entry, dict)):
        images = cfg.training.image_batch_size
        of_images = image_batch_of or (None if images is None else lambda side: images)
        return reader.take(tables, multiple, batch_of or (lambda side: cfg.training.batch_size), of_images)

    # kohya's file, whose sources are subsets
    out = KohyaReader(path, cfg).take(tables)
    if batch_of is not None:
        what = "have no effect: every dataset of the file sets batch_size"
        if "training.batch_size" not in out.overridden:
            largest = cfg.training.batch_size
            what = f"do not apply to kohya's datasets: those without batch_size take the largest, {largest}"
        out.notes.append(f"{path}: batch sizes by resolution {what}")
    return out


class DirectoryReader(TomlReader):
    """Reads what stands above all directories, and each [[directory]]."""

    file = "diffusion_pipe"
    sized_by_run = False  # a directory without resolutions takes the run's

    def take(self, tables: Table, multiple: int, batch_of: BatchOf, image_batch_of: BatchOf | None = None) -> Resolved:
        """Make a data set of each list of buckets and batch: the sources are the directories that have both."""
        grouped: dict[tuple[Sizes, int, int | None, Clips], list[SubsetSection]] = {}
        for directory in self.directories(tables):
            subset, clips = directory.subset(), directory.clips()
            for size in directory.sizes(multiple):
                if subset is not None:
                    images = directory.batch(size, image_batch_of) if image_batch_of else None
                    grouped.setdefault((size, directory.batch(size, batch_of), images, clips), []).append(subset)
        split, out = self.cfg.validation.split, self.out
        out.datasets = tuple(
            DatasetSection(
                resolution=size.nominal,
                enable_bucket=len(size.sizes) > 1,
                sizes=size.sizes,
                batch_size=batch,
                image_batch_size=images,
                validation_split=split,
                subsets=tuple(subsets),
                **clips._asdict(),
            )
            for (size, batch, images, clips), subsets in grouped.items()
        )
        every = [subset for dataset in out.datasets for subset in dataset.subsets]
        out.masked = any(subset.conditioning_dir or subset.default_mask for subset in every)
        out.overridden = set(_OVERRIDDEN) | (set() if self.sized_by_run else {"data.resolution"})
        out.faults, out.notes = list(dict.fromkeys(out.faults)), list(dict.fromkeys(out.notes))
        return out

    def directories(self, tables: Table) -> list[Directory]:
        """Check every table: what stands above all directories counts in each that says nothing else."""
        lists = [name for name in _LISTS if name in tables]
        if len(lists) != 1:
            what = "the file has both [[directory]] and [[datasets]]" if lists else "no directory is given"
            self.fault("", what, "begin each with [[directory]]")
        above, bad_above = self.spelt({name: value for name, value in tables.items() if name not in _LISTS}, "", "")
        out = []
        for name in lists:
            listed = tables[name] if isinstance(tables[name], list) else [tables[name]]
            for number, table in enumerate(listed, 1):
                location = f"[[{name}]] {number}"
                if self.is_table(table, f"[[{name}]]", location):
                    own, bad = self.spelt(table, "[[directory]]", location)
                    out.append(Directory(self, location, above | own, bad_above | bad, set(own)))
        return out

    def spelt(self, table: Table, header: str, location: str) -> tuple[Table, set[str]]:
        """Return what is right in a table by our spelling of each key, and the keys whose values cannot be used."""
        right = self.checked(table, header, location)
        bad = table.keys() - right.keys()
        for other, one in SPELLINGS.items():
            if other in right and right.setdefault(one, right[other]) != right[other]:
                what = f"contradicts {one}: {right[other]!r} and {right[one]!r}"
                self.fault(f"{location} {other}".strip(), what, "give one")
            right.pop(other, None)
        return right, bad | {one for other, one in SPELLINGS.items() if other in bad}


@dataclass
class Directory:
    """One directory with the values of all levels, each checked. location: what messages call its table.

    bad: keys that are there with a value that cannot be used. own: keys of the directory itself.
    """

    reader: DirectoryReader
    location: str
    values: Table
    bad: set[str]
    own: set[str]

    def where(self, name: str) -> str:
        """Return what messages call a key: by its table, or alone where it stands above all directories."""
        return f"{self.location} {name}" if name in self.own or name not in self.values else name

    def fault(self, name: str, what: str, remedy: str) -> None:
        self.reader.fault(self.where(name), what, remedy)

    def note(self, name: str, what: str) -> None:
        self.reader.note(self.where(name), what)

    def unused(self, names: Sequence[str], why: str) -> None:
        """Say of those of the keys that are there that they do nothing."""
        for name in sorted(self.values.keys() & set(names)):
            self.note(name, f"has no effect: {why}")

    # --- shapes

    def batch(self, size: Sizes, batch_of: BatchOf) -> int:
        """Return the batch of a list of buckets: of buckets of several areas the smallest one."""
        batches = {batch_of(round((w * h) ** 0.5)) for w, h in size.sizes if self.values.get("size_buckets")}
        return min(batches) if batches else batch_of(size.side)

    def sizes(self, multiple: int) -> list[Sizes]:
        """Return the buckets of each resolution; none where something about them is wrong."""
        values, resolution = dict(self.values), self.reader.cfg.data.resolution

        # buckets that are named need neither sides nor ratios
        if values.get("size_buckets"):
            self.least("size_buckets", [min(size_bucket[:2]) for size_bucket in values["size_buckets"]], multiple)
            self.unused(("resolutions", "ar_buckets", *_RANGE), "size_buckets sets the buckets")
            return sizes_of(values, multiple)

        # sides: the directory's own, else the run's resolution
        if "resolutions" not in values and not self.bad & {"resolutions", "size_buckets"}:
            if resolution is None:
                remedy = "give a list of sides, such as [512, 1024]"
                self.reader.fault(self.location, "resolutions is missing", remedy)
            else:
                values["resolutions"] = [list(resolution)]
                self.reader.sized_by_run = True

        # ratios: a list, or a range and how many are spread over it
        if not values.get("enable_ar_bucket"):
            self.unused(("ar_buckets", *_RANGE), "enable_ar_bucket is not true")
        elif "ar_buckets" in self.bad or not (values.get("ar_buckets") or self.has_range()):
            return []

        # one set of buckets for each side
        if "resolutions" not in values:
            return []
        if (count := len(values["resolutions"])) > _MANY_RESOLUTIONS:
            many = f"every image is used at each of {count} resolutions: an epoch is longer by that factor"
            self.note("resolutions", many)
        self.least("resolutions", sides_of(values["resolutions"]), multiple)
        return sizes_of(values, multiple)

    def has_range(self) -> bool:
        """Tell whether a range of ratios is there, and right."""
        values, bad = self.values, self.bad & set(_RANGE)
        missing = [name for name in _RANGE if name not in values and name not in bad]
        right = not missing and not bad
        if missing:
            remedy = "with enable_ar_bucket give min_ar, max_ar and num_ar_buckets, or ar_buckets"
            self.reader.fault(self.location, f"{', '.join(missing)}: missing", remedy)
        elif right and values["min_ar"] > values["max_ar"]:
            what = f"is above max_ar: {values['min_ar']:g} > {values['max_ar']:g}"
            self.fault("min_ar", what, "width / height of the narrowest bucket comes first")
            right = False
        if values.get("num_ar_buckets", 0) > _MOST_RATIOS:
            what = f"must be at most {_MOST_RATIOS}, got {values['num_ar_buckets']}"
            self.fault("num_ar_buckets", what, "a few dozen are plenty")
            right = False
        return right

    def least(self, name: str, sides: Sequence[float], multiple: int) -> None:
        """Refuse a side that the family has no bucket for: rounded, it would be another size altogether."""
        if min(sides) < multiple:
            family = self.reader.cfg.model.family
            what = f"{min(sides):g} is below {multiple}, the smallest side of the family {family!r}"
            self.fault(name, what, f"sides in pixels, multiples of {multiple}")

    # --- what is read

    def subset(self) -> SubsetSection | None:
        """Resolve what is read of the directory; None where it cannot be used."""
        values, data = self.values, self.reader.cfg.data
        self.refuse()

        # without a folder of pictures there is no subset
        paths = {name: self.resolve_path(name) for name in _PATHS if name in values}
        if "path" not in values:
            if "path" not in self.bad:
                self.fault("path", "is missing", "give the folder of the images")
            return None
        folder = paths["path"]

        # captions of the directory's own file, where it has one, and keys without effect
        json_there = is_file(Path(expanded(folder)) / CAPTIONS_FILE)
        if values.get("online_captions") and not json_there:
            self.fault("online_captions", f"{folder} holds no {CAPTIONS_FILE}", "write one, or leave it out")
        if values.get("shuffle_metadata") is False:
            self.note("shuffle_metadata", "false has no effect: every epoch is shuffled by the seed")

        # the same in the terms of this library's own subsets
        repeats = Fraction(str(values.get("num_repeats", 1)))
        look: dict[str, Any] = {name: getattr(data, name) for name in _INHERITED}
        return SubsetSection(
            image_dir=folder,
            repeats=repeats.numerator if repeats.denominator == 1 else float(repeats),
            share=values.get("subsample_ratio", 1.0),
            conditioning_dir=paths.get("mask_path"),
            control_dirs=self.control_dirs(),
            default_mask=paths.get("default_mask_file"),
            masks_optional=True,
            captions_file=CAPTIONS_FILE if json_there else None,
            flat=_holds_data(folder),
            captions=self.captions(),
            **look,
        )

    def clips(self) -> Clips:
        """Settle which frames of its videos are read."""
        values, data, row = self.values, self.reader.cfg.data, row_of(self.reader.cfg)
        base = Clips(data.frame_buckets, data.framerate, data.video_clip_mode)
        if row.clips is None:
            return base
        buckets, notes = clip_buckets(values.get("frame_buckets", base.frame_buckets), row.clips)
        for note in notes if "frame_buckets" in values else ():
            self.note("frame_buckets", note)
        if values.get("support_video") is False:
            buckets = (1,)
        elif values.get("support_video") and not reads_clips(buckets):
            self.fault(
                "support_video", "true, and frame_buckets names no clip", "frame_buckets = [1, 33]: frames of clips"
            )
        if not reads_clips(buckets):
            self.unused(("framerate", "video_clip_mode"), "frame_buckets names no clip, and videos are not read")
        rate = values.get("framerate", base.framerate)
        return Clips(
            buckets, None if rate is None else float(rate), values.get("video_clip_mode", base.video_clip_mode)
        )

    def control_dirs(self) -> tuple[str, ...]:
        """Settle the folders of reference images."""
        folders = self.values.get("control_path", ())
        return tuple(
            self.resolve_path("control_path", one)
            for one in (folders if isinstance(folders, list) else [folders])
            if one
        )

    def resolve_path(self, name: str, value: str | None = None) -> str:
        """Settle a path of the file, and see whether it is there. value: of a key that has several."""
        path, wrong_with = resolve_path(value or self.values[name], self.reader.path.parent)
        if wrong_with:
            self.fault(name, wrong_with, "write the whole path of one of them")
        elif name == "path" and is_file(expanded(path)) and not path.lower().endswith(SHARDS):
            self.fault(name, f"{path!r} is a file", "give a folder, or a .tar or .parquet file")
        elif name == "path" and not is_folder(expanded(path)) and (missing := hub_ids.missing(path)):
            self.fault(name, missing.replace("file or folder", "folder"), "give a folder of images")
        elif name == "default_mask_file" and not is_file(expanded(path)):
            self.fault(name, f"no such file: {path!r}", "give an image: white is trained on")
        elif name in ("mask_path", "control_path") and not is_folder(expanded(path)):
            what = "masks" if name == "mask_path" else "reference images"
            self.fault(name, f"no such folder: {path!r}", f"give a folder of {what}")
        return path

    def refuse(self) -> None:
        """Name what needs a family that is not built yet, and what is without effect in one without clips."""
        values, family, row = self.values, self.reader.cfg.model.family, row_of(self.reader.cfg)
        for key in DIFFUSION_PIPE.values():
            is_set = key.status == "later" and key.name in values and values[key.name] not in key.passes
            if is_set and not getattr(row, key.needs):
                self.fault(key.name, key.why.format(family=family), key.remedy)
        if any(frames > 1 for _, _, frames in values.get("size_buckets", ())):
            what = "every third number must be 1: frames of clips are the same for all sizes"
            self.fault("size_buckets", what, "[width, height, 1], and frame_buckets = [1, 33]")
        if row.clips is not None:
            return
        if any(frames > 1 for frames in values.get("frame_buckets", ())):
            self.note(
                "frame_buckets",
                f"images go to frame bucket 1, the others stay empty: the family {family!r} makes no clips",
            )
        if not values.get("support_video"):
            self.unused(("framerate", "video_clip_mode"), "there are no clips")

    def captions(self) -> CaptionSection:
        """Resolve how captions are made of what is written."""
        values, base, cache = self.values, self.reader.cfg.captions, self.reader.cfg.cache
        count, tags = values.get("cache_shuffle_num", 0), values.get("shuffle_tags", False)
        change = values.get("shuffle_capitalization", base.shuffle_capitalization)
        cached = cache.text or cache.text_to_disk
        drawn = (count or int(tags) or 2) if tags or count or (change and cached) else None
        update: dict[str, Any] = {
            "dialect": "diffusion_pipe",
            "prefix": values.get("caption_prefix", base.prefix or "") or None,
            "extension": values.get("caption_extension", base.extension),
            "separator": values.get("cache_shuffle_delimiter", ", "),
            "shuffle": bool(tags or count),
            "variants": drawn if cached or count else None,
            "shuffle_capitalization": change,
            "allow_empty": not values.get("skip_empty_caption", not base.allow_empty),
        }
        return base.model_copy(update=update)


def _holds_data(folder: str) -> bool:
    """Tell whether a folder itself holds pictures or shards: then nothing below it is read, such as its masks."""
    with suppress(OSError), os.scandir(expanded(folder)) as entries:
        return any(entry.name.lower().endswith(_DATA) and not entry.name.startswith(".") for entry in entries)
    return False
