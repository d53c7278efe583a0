"""Rules about cached features: what is made anew at every use cannot be encoded once."""

from __future__ import annotations

from collections.abc import Iterator

from difftrain.config.datasets import draws_captions
from difftrain.config.families import row_of
from difftrain.config.finding import Finding, Rule, option
from difftrain.config.names import CACHE_DTYPES, did_you_mean
from difftrain.config.rules import Need, lacking
from difftrain.config.sections import CaptionSection, PictureSection, TrainConfig
from difftrain.config.there import is_url

_PICTURE = {
    "random_crop": "cuts another part of a picture at every use",
    "color_aug": "colours a picture anew at every use",
    "face_crop_range": "cuts a picture anew at every use",
}
_CAPTION = {
    "token_warmup_step": "lets captions grow during training"
}  # what else is drawn is drawn --cache_shuffle_num times

_LATENTS = "has no effect: no latents are cached"
_TEXT = "has no effect: no outputs of text encoders are cached"
_DISK = "needs a cache on disk: --cache_latents_to_disk or --cache_text_encoder_outputs_to_disk"

NEEDS: tuple[Need, ...] = (
    Need("cache.latents_dtype", lambda c: _asked(c, "latents"), _LATENTS, note=True),
    Need("cache.text_dtype", lambda c: _asked(c, "text"), _TEXT, note=True),
    Need("cache.batch_size", lambda c: _asked(c, "text"), _TEXT, note=True),
    Need("cache.workers", lambda c: _asked(c, "latents") or _asked(c, "text"), "has no effect: nothing is cached", note=True),
    Need("cache.shuffle_num", draws_captions,
         "has no effect without --shuffle_caption, --enable_wildcard or --caption_tag_dropout_rate", note=True),
    Need("cache.skip_check", lambda c: _on_disk(c), "has no effect: nothing is cached on disk", note=True),
    Need("cache.segment_gib", lambda c: _on_disk(c), "has no effect: nothing is cached on disk", note=True),
    Need("cache.trust", lambda c: _on_disk(c), _DISK),
    Need("cache.regenerate", lambda c: _on_disk(c), _DISK),
    Need("cache.preload", lambda c: _on_disk(c), _DISK),
    Need("cache.copy_gib", lambda c: is_url(c.data.cache_dir), "needs a cache on an object store: --cache_dir=URL"),
)  # fmt: skip


def companions(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking(NEEDS, cfg, asked)


def latents(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Cached latents are of one cut of a picture."""
    cache = _asked(cfg, "latents")
    for field, why in _PICTURE.items() if cache else ():
        for place in _places(cfg, field):
            yield _contradiction(f"data.{field}", place, cache, why)
    if cfg.cache.latents_as == "sample" and not cache:
        remedy = "give --cache_latents or --cache_latents_to_disk, or leave it out: online each use draws its own"
        yield Finding(("cache.latents_as",), "sample: a latent that is drawn once must be kept", remedy)


def text(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Cached outputs of the text encoders are of captions that are known before, and of encoders that stay as they are."""
    cache = _asked(cfg, "text")
    if not cache:
        return
    if cfg.model.train_text_encoder:
        what = f"contradicts {option(cache)}: the outputs of an encoder in training change"
        yield Finding(("model.train_text_encoder", cache), what, "give one of them")
    for field, why in _CAPTION.items():
        for place in _places(cfg, field):
            yield _contradiction(f"captions.{field}", place, cache, why)


def dtypes(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """What single features are stored in is said of features that there are, in dtypes that there are."""
    latent = "moments" if cfg.cache.latents_as == "moments" else "latents"
    made = {latent: "latents"} | dict.fromkeys(row_of(cfg).text_features, "text")
    for name, dtype in cfg.cache.dtypes.items():
        if name not in made:
            remedy = did_you_mean(name, made) or f"known are {', '.join(made)}"
            yield Finding(("cache.dtypes",), f"no such feature: {name!r}", remedy)
        elif dtype not in CACHE_DTYPES:
            what = f"{name} must be one of {', '.join(CACHE_DTYPES)}; got {dtype!r}"
            yield Finding(("cache.dtypes",), what, did_you_mean(dtype, CACHE_DTYPES))
        elif not _asked(cfg, made[name]):
            yield Finding(("cache.dtypes",), f"{name} has no effect: it is not cached", note=True)


def only(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """What is built and left behind must be on disk."""
    cache = cfg.cache
    if cache.only and not _on_disk(cfg):
        remedy = "give --cache_latents_to_disk or --cache_text_encoder_outputs_to_disk"
        yield Finding(("cache.only",), "builds nothing that outlives it", remedy)
    for field, disk in (("latents", cache.latents_to_disk), ("text", cache.text_to_disk)):
        if cache.only and getattr(cache, field) and not disk:
            what = "would be gone at the end of --cache_only"
            yield Finding((f"cache.{field}", "cache.only"), what, f"give {option(f'cache.{field}_to_disk')}")
    if cache.only and cache.preload:
        what = "has no effect with --cache_only: nothing is read that could be kept in memory"
        yield Finding(("cache.preload", "cache.only"), what, note=True)


def once(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """What is trusted is not made anew, and what lies on an object store is only read."""
    cache, remote = cfg.cache, is_url(cfg.data.cache_dir)
    if cache.trust and cache.regenerate:
        what = "contradicts --trust_cache: one takes what is there, the other makes it anew"
        yield Finding(("cache.regenerate", "cache.trust"), what, "give one of them")
    if cache.trust and cfg.data.verify == "full":
        what = "contradicts --trust_cache, which reads no file of the data"
        yield Finding(("data.verify", "cache.trust"), what, "give one of them")
    for field in ("regenerate", "only"):
        if remote and getattr(cache, field):
            what = "contradicts --cache_dir: a cache on an object store is only read"
            remedy = "build it in a folder, and copy that to the store"
            yield Finding((f"cache.{field}", "data.cache_dir"), what, remedy)
    if remote and not _on_disk(cfg):
        remedy = f"{_DISK.partition(': ')[2]}; or a folder of this machine"
        yield Finding(("data.cache_dir",), "is the URL of a cache, and nothing is read from it", f"give {remedy}")


def _on_disk(cfg: TrainConfig) -> bool:
    return cfg.cache.latents_to_disk or cfg.cache.text_to_disk


def _asked(cfg: TrainConfig, field: str) -> str:
    """Return the field that asks for a cache, as "section.field", or nothing."""
    names = (f"{field}_to_disk", field)
    return next((f"cache.{name}" for name in names if getattr(cfg.cache, name)), "")


def _places(cfg: TrainConfig, field: str) -> Iterator[str]:
    """Yield where a setting of pictures or captions is on: "" for all data, else the name of a subset."""
    pairs: list[tuple[str, PictureSection, CaptionSection]] = [("", cfg.data, cfg.captions)]
    if cfg.data.datasets:
        every = [subset for dataset in cfg.data.datasets for subset in dataset.subsets]
        pairs = [(each.image_dir or each.metadata_file or "", each, each.captions) for each in every]
    for name, picture, caption in pairs:
        if getattr(caption if field in _CAPTION else picture, field):
            yield name


def _contradiction(path: str, place: str, cache: str, why: str) -> Finding:
    if place:
        what = f"{place}: {path.partition('.')[2]} contradicts {option(cache)}: it {why}"
        return Finding(("data.dataset_config", path, cache), what, "give one of them")
    return Finding((path, cache), f"contradicts {option(cache)}: it {why}", "give one of them")


RULES: tuple[Rule, ...] = (companions, latents, text, dtypes, only, once)
