"""Rules of where data come from: one way of naming them, and sizes that fit together in every data set."""

from __future__ import annotations

from collections.abc import Iterator

from difftrain.config import hub_ids
from difftrain.config.datasets import subsets_of
from difftrain.config.families import multiple_of
from difftrain.config.finding import Finding, Rule, option
from difftrain.config.rules import Need, lacking
from difftrain.config.sections import SizeSection, TrainConfig
from difftrain.config.there import expanded, is_file, is_there

NEEDS: tuple[Need, ...] = (
    Need("loss.prior_weight", lambda c: any(subset.is_reg for subset in subsets_of(c)),
         "has no effect without regularisation pictures: --reg_data_dir, or is_reg in the data set TOML", note=True),
    Need("data.shard_size", lambda c: c.data.tar_order == "sequential",
         "has no effect: data are not read in sequence (--tar_order=sequential)", note=True),
)  # fmt: skip
_NAMED_BY_FLAGS = ("data.dirs", "data.reg_dirs", "data.in_json", "data.dataset_class")
_CLASS = "data.dataset_class"


def companions(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking(NEEDS, cfg, asked)


def one_way(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Data are named by folders, a metadata json, a class or a data set TOML: the others would be passed over."""
    data = cfg.data
    given = [path for path in _NAMED_BY_FLAGS if getattr(data, path.partition(".")[2])]
    if data.dataset_config or data.datasets:
        for path in given:
            remedy = "the file names the data; give one of them"
            yield Finding((path, "data.dataset_config"), "contradicts --dataset_config", remedy)
        if len(data.repeats) > 1:
            what = f"has {len(data.repeats)} numbers; every subset falls back to one"
            yield Finding(("data.repeats", "data.dataset_config"), what, "give one, or num_repeats in the file")
        return
    if data.in_json and data.reg_dirs:
        remedy = "for both, write a data set TOML: a subset with metadata_file, another with is_reg = true"
        yield Finding(("data.reg_dirs", "data.in_json"), "contradicts --in_json", remedy)
    for path in ("data.in_json", "data.reg_dirs"):
        if data.dataset_class and path in given:
            yield Finding((path, _CLASS), "contradicts --dataset_class", "give one of them")
    for path in ("data.in_json", _CLASS):
        if path in given and len(data.dirs) > 1:
            what = f"goes with one --train_data_dir, {len(data.dirs)} are given"
            yield Finding((path, "data.dirs"), what, "give one; for several, write a data set TOML")


def there(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """What is named exists, and a class has the form of one."""
    data = cfg.data
    if data.in_json and not is_file(expanded(data.in_json)):
        yield Finding(("data.in_json",), f"no such file: {data.in_json!r}", "give kohya's metadata json")
    for folder in data.reg_dirs:
        if hub_ids.missing(folder):
            yield Finding(
                ("data.reg_dirs",), f"no such folder: {folder!r}", "give a folder of <repeats>_<class> folders"
            )
    module, _, name = (data.dataset_class or "a.B").rpartition(".")
    if not module or not all(part.isidentifier() for part in (*module.split("."), name)):
        what = f"must be package.module.Class, got {data.dataset_class!r}"
        yield Finding((_CLASS,), what, "the module is imported in every process; put it on PYTHONPATH")
    for number, dataset in enumerate(data.datasets, 1):
        for subset in dataset.subsets:
            pictures = subset.image_dir if subset.image_dir and hub_ids.missing(subset.image_dir) else None
            for path in (pictures, subset.metadata_file, subset.conditioning_dir, subset.default_mask):
                if path and not is_there(expanded(path)):
                    yield Finding(("data.datasets",), f"[[datasets]] {number}: no such file or folder: {path!r}")


def sizes(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Sizes must fit together, and what the family's model divides them by."""
    multiple = multiple_of(cfg)
    if not cfg.data.datasets:
        for keys, what, remedy in _misfits(cfg.data, multiple):
            yield Finding(tuple(f"data.{key}" for key in keys), what, remedy)
    for number, dataset in enumerate(cfg.data.datasets, 1):
        for keys, what, remedy in _misfits(dataset, multiple):
            yield Finding(("data.datasets",), f"[[datasets]] {number} {keys[0]} {what}", remedy)


def _misfits(size: SizeSection, multiple: int) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Find (fields, what is wrong, what would be right); the first field is the one to name."""
    for width, height in size.sizes:
        if width % multiple or height % multiple:
            yield ("sizes",), f"must be multiples of {multiple}, got {width},{height}", "the family's own multiple"
    if size.sizes:
        return
    width, height = size.resolution or (multiple, multiple)
    least = 8 if size.enable_bucket else multiple  # of buckets it is the area alone
    if width % least or height % least:
        yield ("resolution",), f"must be multiples of {least}, got {width},{height}", "1024,1024 for SDXL"
    if not size.enable_bucket:
        return
    for key in ("min_bucket_reso", "max_bucket_reso", "bucket_reso_steps"):
        divisor = multiple if key == "bucket_reso_steps" else 8  # both ends are rounded to the steps
        if getattr(size, key) % divisor:
            yield (key,), f"must be a multiple of {divisor}, got {getattr(size, key)}", "64 is usual"
    low, high = size.min_bucket_reso, size.max_bucket_reso
    if low > high:
        about = ("min_bucket_reso", "max_bucket_reso")
        yield about, f"is above --max_bucket_reso: {low} > {high}", "the shortest side comes first"
        return
    if size.resolution and min(width, height) < low:
        what = f"is above the shorter side of --resolution: {low} > {min(width, height)}"
        yield ("min_bucket_reso", "resolution"), what, "make it smaller"
    if size.resolution and max(width, height) > high:
        what = f"is below the longer side of --resolution: {high} < {max(width, height)}"
        yield ("max_bucket_reso", "resolution"), what, "make it larger"


def overridden(fields: set[str], origin: str) -> Iterator[str]:
    """Say which of the command line's fields the data sets of a file set throughout."""
    for path in sorted(fields):
        yield f"{option(path)}: has no effect: {origin} sets it for every data set"


RULES: tuple[Rule, ...] = (companions, one_way, there, sizes)
