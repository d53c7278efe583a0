"""diffusion-pipe's data set TOML as data sets, its resolutions and buckets included."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from difftrain.config import hub_ids
from difftrain.config.datasets import kohya
from difftrain.config.datasets.diffusion_pipe_keys import Directory, directories_of, is_kohyas, tables_of
from difftrain.config.datasets.kohya import Resolved
from difftrain.config.paths import expanded, is_file, is_folder, resolve_path
from difftrain.config.schema.families import row_of
from difftrain.config.schema.sections import CaptionSection, DatasetSection, PictureSection, SubsetSection, TrainConfig
from difftrain.contracts.errors import Fault

Size = tuple[int, int]
Table = dict[str, Any]


class Sizes(NamedTuple):
    """The buckets of one resolution, as (width, height), in the order of their aspect ratios.

    side: of the square of the same area. nominal: that square, in multiples of what the family takes.
    """

    side: int
    nominal: Size
    sizes: tuple[Size, ...]


def sides_of(resolutions: list[Any]) -> list[float]:
    """Return the side of the square of each area, each once, ascending."""
    return sorted({float(each) if isinstance(each, int) else math.sqrt(each[0] * each[1]) for each in resolutions})


def ratios_of(values: Table) -> list[float]:
    """Return width / height of every bucket, ascending: as listed, or evenly in log space from min_ar to max_ar."""
    if not values.get("enable_ar_bucket", False):
        return [1.0]
    listed = values.get("ar_buckets")
    if listed:
        return sorted({each[0] / each[1] if isinstance(each, list) else float(each) for each in listed})
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
    found = []
    for side in sides_of(values["resolutions"]):
        sizes = tuple(dict.fromkeys(_of_area(side, ratio, multiple) for ratio in ratios_of(values)))
        found.append(Sizes(round(side), _square(side, multiple), sizes))
    return found


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
_MANY_RESOLUTIONS = 3
_MOST_RATIOS = 1000
_PATHS = ("path", "mask_path", "default_mask_file", "control_path")
SHARDS = (".tar", ".parquet")
_DATA = (*SHARDS, ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")
# what the file sets for every data set, whatever the run's configuration says of it
_OVERRIDDEN = frozenset({
    "data.enable_bucket", "data.min_bucket_reso", "data.max_bucket_reso", "data.bucket_reso_steps",
    "data.bucket_no_upscale", "data.sizes", "data.repeats", "data.conditioning_dir", "captions.shuffle", "captions.separator",
})  # fmt: skip
# how a picture becomes pixels is the run's to say: the file has no keys for it
_INHERITED = tuple(name for name in PictureSection.model_fields if f"data.{name}" not in _OVERRIDDEN)


def resolve(path: Path, cfg: TrainConfig, *, multiple: int, batch_of: BatchOf | None = None) -> Resolved:
    """Read a file of data sets, of either kind, and settle every setting of its data sets.

    cfg: what the run says otherwise. multiple: of which the family's sizes are. batch_of: None takes the run's batch.
    """
    out = Resolved()
    tables = tables_of(path, out.faults)
    if tables is None:
        return out
    if is_kohyas(tables):
        out = kohya.resolve(path, cfg)
        if batch_of is not None:
            what = "have no effect: every data set here has batch_size"
            if "training.batch_size" not in out.overridden:
                largest = cfg.training.batch_size
                what = f"are not for kohya's data sets: those without batch_size take the largest, {largest}"
            out.notes.append(f"{path}: batch sizes by resolution {what}")
        return out
    directories = directories_of(path, tables, out.faults)
    _DirectoryResolver(path, cfg, out, multiple, batch_of or (lambda side: cfg.training.batch_size)).take(directories)
    return out


class _DirectoryResolver:
    """One reading of one file."""

    def __init__(self, path: Path, cfg: TrainConfig, out: Resolved, multiple: int, batch_of: BatchOf) -> None:
        self.path, self.cfg, self.out, self.multiple, self.batch_of = path, cfg, out, multiple, batch_of
        self.look: dict[str, Any] = {name: getattr(cfg.data, name) for name in _INHERITED}
        self.sized_by_run = False  # a directory without resolutions takes the run's

    def take(self, directories: list[Directory]) -> None:
        grouped: dict[tuple[Sizes, int], list[SubsetSection]] = {}
        for each in directories:
            subset = self.subset(each)
            for size in self.sizes(each):
                if subset is not None:
                    grouped.setdefault((size, self.batch(each, size)), []).append(subset)
        split = self.cfg.validation.split
        self.out.datasets = tuple(
            DatasetSection(
                resolution=size.nominal,
                enable_bucket=len(size.sizes) > 1,
                sizes=size.sizes,
                batch_size=batch,
                validation_split=split,
                subsets=tuple(subsets),
            )
            for (size, batch), subsets in grouped.items()
        )
        every = [subset for dataset in self.out.datasets for subset in dataset.subsets]
        self.out.masked = any(subset.conditioning_dir or subset.default_mask for subset in every)
        self.out.overridden = set(_OVERRIDDEN) | (set() if self.sized_by_run else {"data.resolution"})

    def fault(self, place: str, what: str, remedy: str = "") -> None:
        found = Fault(f"{self.path} {place}", what, remedy)
        if found not in self.out.faults:
            self.out.faults.append(found)

    def note(self, place: str, what: str) -> None:
        said = f"{self.path} {place}: {what}"
        if said not in self.out.notes:
            self.out.notes.append(said)

    def batch(self, directory: Directory, size: Sizes) -> int:
        """Return the batch of a list of buckets: of buckets of several areas the smallest one."""
        found = {self.batch_of(round((w * h) ** 0.5)) for w, h in size.sizes if directory.values.get("size_buckets")}
        return min(found) if found else self.batch_of(size.side)

    def sizes(self, directory: Directory) -> list[Sizes]:
        """Return the buckets of each resolution of a directory; none where something about them is wrong."""
        place, values, bad = directory.place, dict(directory.values), directory.faulted

        # buckets that are named need neither sides nor ratios
        if values.get("size_buckets"):
            self.least(directory, "size_buckets", [min(each[:2]) for each in values["size_buckets"]])
            for name in sorted(values.keys() & {"resolutions", "ar_buckets", "min_ar", "max_ar", "num_ar_buckets"}):
                self.note(directory.where(name), "has no effect: size_buckets names the buckets")
            return sizes_of(values, self.multiple)

        # sides: the directory's own, else the run's resolution
        if "resolutions" not in values and not bad & {"resolutions", "size_buckets"}:
            if self.cfg.data.resolution is None:
                self.fault(place, "resolutions is missing", "give a list of sides, such as [512, 1024]")
            else:
                values["resolutions"] = [list(self.cfg.data.resolution)]
                self.sized_by_run = True

        # ratios: a list, or a range and how many are spread over it
        ranged = ("min_ar", "max_ar", "num_ar_buckets")
        if values.get("enable_ar_bucket") and "ar_buckets" in bad:
            return []
        if values.get("enable_ar_bucket") and not values.get("ar_buckets"):
            missing = [name for name in ranged if name not in values and name not in bad]
            if missing:
                remedy = "with enable_ar_bucket give min_ar, max_ar and num_ar_buckets, or ar_buckets"
                self.fault(place, f"{', '.join(missing)}: missing", remedy)
            elif not bad & set(ranged) and values["min_ar"] > values["max_ar"]:
                what = f"is above max_ar: {values['min_ar']:g} > {values['max_ar']:g}"
                self.fault(directory.where("min_ar"), what, "width / height of the narrowest bucket comes first")
                bad = bad | {"min_ar"}
            if values.get("num_ar_buckets", 0) > _MOST_RATIOS:
                what = f"must be at most {_MOST_RATIOS}, got {values['num_ar_buckets']}"
                self.fault(directory.where("num_ar_buckets"), what, "some tens are more than enough")
                bad = bad | {"num_ar_buckets"}
            if missing or bad & set(ranged):
                return []
        elif not values.get("enable_ar_bucket"):
            for name in sorted(values.keys() & {"ar_buckets", *ranged}):
                self.note(directory.where(name), "has no effect: enable_ar_bucket is not true")

        # one set of buckets for each side
        if "resolutions" not in values:
            return []
        if len(values["resolutions"]) > _MANY_RESOLUTIONS:
            many = (
                f"every picture is used at each of {len(values['resolutions'])} resolutions: an epoch is as much longer"
            )
            self.note(directory.where("resolutions"), many)
        self.least(directory, "resolutions", sides_of(values["resolutions"]))
        return sizes_of(values, self.multiple)

    def least(self, directory: Directory, name: str, sides: Sequence[float]) -> None:
        """Refuse a side that the family has no bucket for: rounded, it would be another size altogether."""
        if min(sides) < self.multiple:
            what = f"{min(sides):g} is below {self.multiple}, the least side that the family {self.cfg.model.family!r} takes"
            self.fault(directory.where(name), what, f"sides in pixels, multiples of {self.multiple}")

    def subset(self, directory: Directory) -> SubsetSection | None:
        """Resolve what is read of a directory; None where it cannot be used."""
        place, values = directory.place, directory.values
        self.refuse(directory)

        # without a folder of pictures there is no subset
        paths = {name: self.resolve_path(directory, name) for name in _PATHS if name in values}
        if "path" not in values:
            if "path" not in directory.faulted:
                self.fault(f"{place} path", "is missing", "give the folder of the pictures")
            return None
        folder = paths["path"]

        # captions of the directory's own file, where it has one, and keys without effect
        json_there = is_file(Path(expanded(folder)) / CAPTIONS_FILE)
        if values.get("online_captions") and not json_there:
            self.fault(
                directory.where("online_captions"), f"{folder} holds no {CAPTIONS_FILE}", "write one, or leave it out"
            )
        if values.get("shuffle_metadata") is False:
            self.note(
                directory.where("shuffle_metadata"),
                "false has no effect: the order of every epoch is drawn from the seed",
            )

        # the same in the terms of this library's own subsets
        repeats = Fraction(str(values.get("num_repeats", 1)))
        return SubsetSection(
            image_dir=folder,
            repeats=repeats.numerator if repeats.denominator == 1 else float(repeats),
            share=values.get("subsample_ratio", 1.0),
            conditioning_dir=paths.get("mask_path"),
            default_mask=paths.get("default_mask_file"),
            masks_optional=True,
            captions_file=CAPTIONS_FILE if json_there else None,
            flat=_holds_data(folder),
            captions=self.captions(directory),
            **self.look,
        )

    def resolve_path(self, directory: Directory, name: str) -> str:
        """Settle a path of the file, and see whether it is there."""
        path, wrong_with = resolve_path(directory.values[name], self.path.parent)
        if wrong_with:
            self.fault(directory.where(name), wrong_with, "write the whole path of one of them")
        elif name == "path" and is_file(expanded(path)) and not path.lower().endswith(SHARDS):
            self.fault(directory.where(name), f"{path!r} is a file", "give a folder, or a .tar or .parquet file")
        elif name == "path" and not is_folder(expanded(path)) and (missing := hub_ids.missing(path)):
            self.fault(directory.where(name), missing.replace("file or folder", "folder"), "give a folder of pictures")
        elif name == "default_mask_file" and not is_file(expanded(path)):
            self.fault(directory.where(name), f"no such file: {path!r}", "give a picture: white is trained on")
        elif name == "mask_path" and not is_folder(expanded(path)):
            self.fault(directory.where(name), f"no such folder: {path!r}", "give a folder of masks")
        return path

    def refuse(self, directory: Directory) -> None:
        """Name what needs a family that is not built yet."""
        values, family = directory.values, self.cfg.model.family
        if "control_path" in values and not row_of(self.cfg).control:
            what = f"training on control pictures is not built yet, for the family {family!r} or any other"
            self.fault(directory.where("control_path"), what, "leave it out")
        if row_of(self.cfg).clips:
            return
        if values.get("support_video"):
            what = f"clips are not built yet for the family {family!r}, which makes pictures"
            self.fault(directory.where("support_video"), what, "leave this directory out, or name one of pictures")
        if any(frames > 1 for _, _, frames in values.get("size_buckets", ())):
            what = f"clips are not built yet for the family {family!r}: every third number must be 1"
            self.fault(directory.where("size_buckets"), what, "[width, height, 1]")
        if any(frames > 1 for frames in values.get("frame_buckets", ())):
            said = f"pictures go to 1, the others stay empty: the family {family!r} makes no clips"
            self.note(directory.where("frame_buckets"), said)
        for name in ("framerate", "video_clip_mode"):
            if name in values and not values.get("support_video"):
                self.note(directory.where(name), "has no effect: there are no clips")

    def captions(self, directory: Directory) -> CaptionSection:
        """Resolve how captions are made of what is written."""
        values, base = directory.values, self.cfg.captions
        count, tags = values.get("cache_shuffle_num", 0), values.get("shuffle_tags", False)
        change = values.get("shuffle_capitalization", base.shuffle_capitalization)
        cached = self.cfg.cache.text or self.cfg.cache.text_to_disk
        drawn = (count or int(tags) or 2) if tags or count or (change and cached) else None
        told: dict[str, Any] = {
            "dialect": "diffusion_pipe",
            "prefix": values.get("caption_prefix", base.prefix or "") or None,
            "extension": values.get("caption_extension", base.extension),
            "separator": values.get("cache_shuffle_delimiter", ", "),
            "shuffle": bool(tags or count),
            "variants": drawn if cached or count else None,
            "shuffle_capitalization": change,
            "allow_empty": not values.get("skip_empty_caption", not base.allow_empty),
        }
        return base.model_copy(update=told)


def _holds_data(folder: str) -> bool:
    """Tell whether a folder itself holds pictures or shards: then nothing below it is read, such as its masks."""
    with suppress(OSError), os.scandir(expanded(folder)) as entries:
        return any(entry.name.lower().endswith(_DATA) and not entry.name.startswith(".") for entry in entries)
    return False
