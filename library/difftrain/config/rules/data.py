"""Rules about what is trained on, and about caches of it."""

from __future__ import annotations

from collections.abc import Iterator

from difftrain.config import hub_ids
from difftrain.config.datasets.clips import reads_clips
from difftrain.config.datasets.datasets import datasets_of, draws_captions, subsets_of
from difftrain.config.paths import expanded, is_file, is_folder, is_url, path_exists
from difftrain.config.rules.finding import Finding, Rule
from difftrain.config.rules.run import Companion, lacking
from difftrain.config.schema.families import multiple_of, row_of
from difftrain.config.schema.names import CACHE_DTYPES, did_you_mean
from difftrain.config.schema.sections import CaptionSection, PictureSection, SizeSection, TrainConfig
from difftrain.config.spellings.spelling import option, spelled
from difftrain.contracts import control_name


def _reads_clips(cfg: TrainConfig) -> bool:
    """Tell whether videos are read for any data set."""
    return any(reads_clips(dataset.frame_buckets) for dataset in datasets_of(cfg.data, cfg.captions))


_NO_CLIPS = "has no effect: no clips are read (frame_buckets, of families that make them)"

DATA_NEEDS: tuple[Companion, ...] = (
    Companion("loss.prior_weight", lambda c: any(subset.is_reg for subset in subsets_of(c)),
         "has no effect without regularisation images: {data.reg_dirs}, or is_reg in the dataset TOML", note=True),
    Companion("data.shard_size", lambda c: c.data.tar_order == "sequential",
         "has no effect: data are not read in sequence ({data.tar_order=sequential})", note=True),
    Companion("data.framerate", _reads_clips, _NO_CLIPS, note=True),
    Companion("data.video_clip_mode", _reads_clips, _NO_CLIPS, note=True),
    Companion("data.prefetch", lambda c: c.data.workers != 0, "needs {data.workers}: no worker loads ahead", passes_there=True),
    Companion("data.epoch_batches", lambda c: c.data.epoch_batches != "every" or c.data.tar_order == "random",
         "every needs {data.tar_order=random}: data that are read in sequence come in whole batches"),
)  # fmt: skip
_NAMED_BY_FLAGS = ("data.dirs", "data.reg_dirs", "data.in_json", "data.dataset_class")
_CLASS = "data.dataset_class"


def data_companions(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking(DATA_NEEDS, cfg, requested)


def one_way(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Data are named by folders, a metadata json, a class or a data set TOML: the others would be passed over."""
    data = cfg.data
    present = [path for path in _NAMED_BY_FLAGS if getattr(data, path.partition(".")[2])]
    if data.dataset_config or data.datasets:
        for path in present:
            remedy = "the file names the data; give one of them"
            yield Finding((path, "data.dataset_config"), f"contradicts {option('data.dataset_config')}", remedy)
        if len(data.repeats) > 1:
            what = f"has {len(data.repeats)} numbers; every subset uses one of them"
            yield Finding(("data.repeats", "data.dataset_config"), what, "give one, or num_repeats in the file")
        return
    if data.in_json and data.reg_dirs:
        remedy = "for both, write a dataset TOML: a subset with metadata_file, another with is_reg = true"
        yield Finding(("data.reg_dirs", "data.in_json"), f"contradicts {option('data.in_json')}", remedy)
    for path in ("data.in_json", "data.reg_dirs"):
        if data.dataset_class and path in present:
            yield Finding((path, _CLASS), f"contradicts {option('data.dataset_class')}", "give one of them")
    for path in ("data.in_json", _CLASS):
        if path in present and len(data.dirs) > 1:
            what = f"needs a single {option('data.dirs')}, {len(data.dirs)} are given"
            yield Finding((path, "data.dirs"), what, "give one; for several, write a dataset TOML")


def sources_exist(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
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
            named = (pictures, subset.metadata_file, subset.conditioning_dir, subset.default_mask, *subset.control_dirs)
            for path in named:
                if path and not path_exists(expanded(path)):
                    yield Finding(("data.datasets",), f"[[datasets]] {number}: no such file or folder: {path!r}")


def sizes(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Sizes must fit together, and what the family's model divides them by."""
    multiple = multiple_of(cfg)
    if not cfg.data.datasets:
        for keys, what, remedy in _misfits(cfg.data, multiple):
            yield Finding(tuple(f"data.{key}" for key in keys), what, remedy)
    for number, dataset in enumerate(cfg.data.datasets, 1):
        for keys, what, remedy in _misfits(dataset, multiple):
            yield Finding(("data.datasets",), f"[[datasets]] {number} {keys[0]} {what}", remedy)
    for evaluated in cfg.eval.sets:
        for dataset in evaluated.datasets:
            for keys, what, remedy in _misfits(dataset, multiple):
                yield Finding(("eval.sets",), f"{evaluated.name}: {keys[0]} {what}", remedy)


def _nearest(side: int, multiple: int) -> int:
    return max(1, round(side / multiple)) * multiple


def _misfits(size: SizeSection, multiple: int) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Find (fields, what is wrong, what would be right); the first field is the one to name."""
    for width, height in size.sizes:
        if width % multiple or height % multiple:
            yield ("sizes",), f"must be multiples of {multiple}, got {width},{height}", "the family's own multiple"
    if size.sizes:
        return

    # one resolution: the size of every picture, or the area of the buckets
    width, height = size.resolution or (multiple, multiple)
    least = 8 if size.enable_bucket else multiple  # of buckets it is the area alone
    if width % least or height % least:
        yield (
            ("resolution",),
            f"must be multiples of {least}, got {width},{height}",
            f"{_nearest(width, least)},{_nearest(height, least)} is near",
        )
    if not size.enable_bucket:
        return

    # the grid on which the buckets' sides lie
    for key in ("min_bucket_reso", "max_bucket_reso", "bucket_reso_steps"):
        divisor = multiple if key == "bucket_reso_steps" else 8  # both ends are rounded to the steps
        if getattr(size, key) % divisor:
            yield (key,), f"must be a multiple of {divisor}, got {getattr(size, key)}", "64 is usual"

    # an end below one step is taken as it is, and the grid begins there
    alone = not size.bucket_no_upscale and size.min_bucket_reso < size.bucket_reso_steps
    if alone and size.min_bucket_reso % multiple and not size.min_bucket_reso % 8:
        what = f"must be a multiple of {multiple} below {option('data.bucket_reso_steps')}, got {size.min_bucket_reso}"
        yield ("min_bucket_reso",), what, f"{multiple}, or one of the steps"

    # the ends in order, and the resolution between them
    low, high = size.min_bucket_reso, size.max_bucket_reso
    if low > high:
        about = ("min_bucket_reso", "max_bucket_reso")
        yield about, f"is above {option('data.max_bucket_reso')}: {low} > {high}", "the shortest side comes first"
        return
    if size.resolution and min(width, height) < low:
        what = f"is above the shorter side of {option('data.resolution')}: {low} > {min(width, height)}"
        yield ("min_bucket_reso", "resolution"), what, "make it smaller"
    if size.resolution and max(width, height) > high:
        what = f"is below the longer side of {option('data.resolution')}: {high} < {max(width, height)}"
        yield ("max_bucket_reso", "resolution"), what, "make it larger"


def overridden(fields: set[str], origin: str) -> Iterator[str]:
    """Say which of the command line's fields the data sets of a file set throughout."""
    for path in sorted(fields):
        yield f"{option(path)}: has no effect: {origin} sets it for every dataset"


def references(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """An editing model is shown as many reference images as it takes, and each image has as many."""
    row, count = row_of(cfg), cfg.data.num_control
    if not row.control:
        return
    about = ("data.num_control",)
    if count < row.control_least:
        remedy = "an editing model learns from references; a family without them learns from captions alone"
        yield Finding(about, f"is {count}: {row.title} is trained with reference images", remedy)
    elif count > row.control:
        yield Finding(about, f"is {count}: {row.title} is shown at most {row.control}", f"{row.control} or fewer")

    # folders, one of each reference or one of all
    if not count and not row.control_least and any(subset.control_dirs for subset in subsets_of(cfg)):
        remedy = f"1 to {row.control}; or leave the folders out, to learn from captions alone"
        yield Finding(
            ("data.control_dirs", *about), f"names folders of references, {option('data.num_control')} is 0", remedy
        )
    for dirs in dict.fromkeys(subset.control_dirs for subset in subsets_of(cfg)):
        if len(dirs) not in (0, 1, count):
            what = f"names {len(dirs)} folders, {option('data.num_control')} is {count}"
            yield Finding(("data.control_dirs", *about), what, "a folder for each reference, or one with all of them")
        for folder in dirs if not cfg.data.datasets else ():
            if not is_folder(expanded(folder)):
                remedy = "give the folder of the reference images, each named as its image"
                yield Finding(("data.control_dirs",), f"no such folder: {folder!r}", remedy)
    columns = len(cfg.data.control_columns)
    if columns not in (0, count):
        what = f"names {columns} columns, {option('data.num_control')} is {count}"
        yield Finding(("data.control_columns", *about), what, "a column for each reference")


def clips(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Clips have no alpha, and what is cached of them is of one moment."""
    if not _reads_clips(cfg):
        return
    for _ in _places(cfg, "alpha_mask"):
        remedy = "leave it out; masks of their own hold for all frames of a clip"
        yield Finding(("data.alpha_mask", "data.frame_buckets"), "masks by alpha, which clips have not", remedy)
    read = [one for one in datasets_of(cfg.data, cfg.captions) if reads_clips(one.frame_buckets)]
    if len(rates := sorted({one.framerate or cfg.data.framerate or 0.0 for one in read})) > 1:
        what = f"differs between the datasets: {', '.join(f'{rate:g}' for rate in rates)} frames a second"
        yield Finding(
            ("data.framerate",), what, "one rate for all clips of a run: models are told it, or have learnt it"
        )
    cache = _cache_flag(cfg, "latents")
    modes = {dataset.video_clip_mode for dataset in read}
    if cache and "random" in modes:
        what = f"random contradicts {option(cache)}: it takes another moment of a video at every use"
        yield Finding(("data.video_clip_mode", cache), what, "multiple_overlapping caches all of a video")


DATA_RULES: tuple[Rule, ...] = (data_companions, one_way, sources_exist, sizes, references, clips)


_PICTURE = {
    "random_crop": "crops another part of an image at every use",
    "color_aug": "recolours an image at every use",
    "face_crop_range": "crops an image differently at every use",
}
_CAPTION = {
    "token_warmup_step": "lets captions grow during training"
}  # what else is drawn is drawn --cache_shuffle_num times

_LATENTS = "has no effect: no latents are cached"
_TEXT = "has no effect: no outputs of text encoders are cached"
_DISK = "needs a cache on disk: {cache.latents_to_disk=true} or {cache.text_to_disk=true}"

CACHE_NEEDS: tuple[Companion, ...] = (
    Companion("cache.latents_dtype", lambda c: _cache_flag(c, "latents"), _LATENTS, note=True),
    Companion("cache.text_dtype", lambda c: _cache_flag(c, "text"), _TEXT, note=True),
    Companion("cache.batch_size", lambda c: _cache_flag(c, "text"), _TEXT, note=True),
    Companion("cache.workers", lambda c: _cache_flag(c, "latents") or _cache_flag(c, "text"), "has no effect: nothing is cached", note=True),
    Companion("cache.shuffle_num", draws_captions,
         "has no effect without {captions.shuffle=true}, {captions.enable_wildcard=true} or {captions.tag_dropout_rate}", note=True),
    Companion("cache.skip_check", lambda c: _on_disk(c), "has no effect: nothing is cached on disk", note=True),
    Companion("cache.segment_gib", lambda c: _on_disk(c), "has no effect: nothing is cached on disk", note=True),
    Companion("cache.trust", lambda c: _on_disk(c), _DISK),
    Companion("cache.regenerate", lambda c: _on_disk(c), _DISK),
    Companion("cache.preload", lambda c: _on_disk(c), _DISK),
    Companion("cache.copy_gib", lambda c: is_url(c.data.cache_dir), "needs a cache on an object store: {data.cache_dir}=URL"),
)  # fmt: skip


def cache_companions(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking(CACHE_NEEDS, cfg, requested)


def latents(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Cached latents are of one cut of a picture."""
    cache = _cache_flag(cfg, "latents")
    for field, why in _PICTURE.items() if cache else ():
        for subset_name in _places(cfg, field):
            yield _contradiction(f"data.{field}", subset_name, cache, why)
    if cfg.cache.latents_as == "sample" and not cache:
        remedy = f"give {option('cache.latents', True)} or {option('cache.latents_to_disk', True)}, or leave it out: without a cache each use samples its own"
        yield Finding(("cache.latents_as",), "sample: a latent sampled once must be stored", remedy)


def text(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Cached outputs of the text encoders are of captions that are known before, and of encoders that stay as they are."""
    cache = _cache_flag(cfg, "text")
    if not cache:
        return
    if cfg.model.train_text_encoder:
        what = f"contradicts {option(cache)}: the outputs of an encoder that is trained change"
        yield Finding(("model.train_text_encoder", cache), what, "give one of them")
    for field, why in _CAPTION.items():
        for subset_name in _places(cfg, field):
            yield _contradiction(f"captions.{field}", subset_name, cache, why)


def dtypes(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What single features are stored in is said of features that there are, in dtypes that there are."""
    latent = "moments" if cfg.cache.latents_as == "moments" else "latents"
    latents = [latent, *(f"{control_name(number)}_latents" for number in range(cfg.data.num_control))]
    made = dict.fromkeys(latents, "latents") | dict.fromkeys(row_of(cfg).text_features, "text")
    for name, dtype in cfg.cache.dtypes.items():
        if name not in made:
            remedy = did_you_mean(name, made) or f"known are {', '.join(made)}"
            yield Finding(("cache.dtypes",), f"no such feature: {name!r}", remedy)
        elif dtype not in CACHE_DTYPES:
            what = f"{name} must be one of {', '.join(CACHE_DTYPES)}; got {dtype!r}"
            yield Finding(("cache.dtypes",), what, did_you_mean(dtype, CACHE_DTYPES))
        elif not _cache_flag(cfg, made[name]):
            yield Finding(("cache.dtypes",), f"{name} has no effect: it is not cached", note=True)


def only(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What is built and left behind must be on disk."""
    cache = cfg.cache
    if cache.only and not _on_disk(cfg):
        remedy = f"give {option('cache.latents_to_disk', True)} or {option('cache.text_to_disk', True)}"
        yield Finding(("cache.only",), "builds nothing that stays", remedy)
    for field, disk in (("latents", cache.latents_to_disk), ("text", cache.text_to_disk)):
        if cache.only and getattr(cache, field) and not disk:
            what = f"would be lost at the end of {option('cache.only', True)}"
            yield Finding((f"cache.{field}", "cache.only"), what, f"give {option(f'cache.{field}_to_disk')}")
    if cache.only and cache.preload:
        what = f"has no effect with {option('cache.only', True)}: nothing is read back that could be kept in memory"
        yield Finding(("cache.preload", "cache.only"), what, note=True)


def once(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What is trusted is not made anew, and what lies on an object store is only read."""
    cache, remote = cfg.cache, is_url(cfg.data.cache_dir)
    if cache.trust and cache.regenerate:
        what = f"contradicts {option('cache.trust', True)}: one uses the cache as it is, the other rebuilds it"
        yield Finding(("cache.regenerate", "cache.trust"), what, "give one of them")
    if cache.trust and cfg.data.verify == "full":
        what = f"contradicts {option('cache.trust', True)}, which reads no data files"
        yield Finding(("data.verify", "cache.trust"), what, "give one of them")
    for field in ("regenerate", "only"):
        if remote and getattr(cache, field):
            what = f"contradicts {option('data.cache_dir')}: a cache on an object store is read-only"
            remedy = "build it in a folder, and copy that to the store"
            yield Finding((f"cache.{field}", "data.cache_dir"), what, remedy)
    if remote and not _on_disk(cfg):
        remedy = f"{spelled(_DISK).partition(': ')[2]}; or a folder of this machine"
        yield Finding(("data.cache_dir",), "is the URL of a cache, and nothing would be read from it", f"give {remedy}")


def _on_disk(cfg: TrainConfig) -> bool:
    return cfg.cache.latents_to_disk or cfg.cache.text_to_disk


def _cache_flag(cfg: TrainConfig, field: str) -> str:
    """Return the field that asks for a cache, as "section.field", or nothing."""
    names = (f"{field}_to_disk", field)
    return next((f"cache.{name}" for name in names if getattr(cfg.cache, name)), "")


def _places(cfg: TrainConfig, field: str) -> Iterator[str]:
    """Yield where a setting of pictures or captions is on: "" for all data, else the name of a subset."""
    pairs: list[tuple[str, PictureSection, CaptionSection]] = [("", cfg.data, cfg.captions)]
    if cfg.data.datasets:
        every = [subset for dataset in cfg.data.datasets for subset in dataset.subsets]
        pairs = [(section.image_dir or section.metadata_file or "", section, section.captions) for section in every]
    for name, picture, caption in pairs:
        if getattr(caption if field in _CAPTION else picture, field):
            yield name


def _contradiction(path: str, subset_name: str, cache: str, why: str) -> Finding:
    if subset_name:
        what = f"{subset_name}: {path.partition('.')[2]} contradicts {option(cache)}: it {why}"
        return Finding(("data.dataset_config", path, cache), what, "give one of them")
    return Finding((path, cache), f"contradicts {option(cache)}: it {why}", "give one of them")


CACHE_RULES: tuple[Rule, ...] = (cache_companions, latents, text, dtypes, only, once)
