"""Rules about cached features: what is made anew at every use cannot be encoded once."""

from __future__ import annotations

from collections.abc import Iterator

from difftrain.config.finding import Finding, Rule, option
from difftrain.config.sections import CaptionSection, PictureSection, TrainConfig

# kohya refuses the same, but for wildcards and the drop-out of whole epochs, of which its cache knows nothing
_PICTURE = {
    "random_crop": "cuts another part of a picture at every use",
    "color_aug": "colours a picture anew at every use",
    "face_crop_range": "cuts a picture anew at every use",
}
_CAPTION = {
    "shuffle": "makes another caption at every use",
    "dropout_rate": "drops captions by chance",
    "dropout_every_n_epochs": "drops the captions of whole epochs",
    "tag_dropout_rate": "drops parts of captions by chance",
    "token_warmup_step": "lets captions grow during training",
    "enable_wildcard": "makes another caption at every use",
    "weighted": "weighs the tokens of a caption, which are not cached",
}


def latents(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Cached latents are of one cut of a picture."""
    cache = _asked(cfg, "latents")
    for field, why in _PICTURE.items() if cache else ():
        for place in _places(cfg, field):
            yield _contradiction(f"data.{field}", place, cache, why)


def text(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Cached outputs of the text encoders are of captions as they stand, and of encoders that stay as they are."""
    cache = _asked(cfg, "text")
    if not cache:
        return
    if cfg.model.train_text_encoder:
        what = f"contradicts {option(cache)}: the outputs of an encoder in training change"
        yield Finding(("model.train_text_encoder", cache), what, "give one of them")
    for field, why in _CAPTION.items():
        for place in _places(cfg, field):
            yield _contradiction(f"captions.{field}", place, cache, why)


def only(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """What is built and left behind must be on disk."""
    cache = cfg.cache
    on_disk = cache.latents_to_disk or cache.text_to_disk
    if cache.only and not on_disk:
        remedy = "give --cache_latents_to_disk or --cache_text_encoder_outputs_to_disk"
        yield Finding(("cache.only",), "builds nothing that outlives it", remedy)
    for field, disk in (("latents", cache.latents_to_disk), ("text", cache.text_to_disk)):
        if cache.only and getattr(cache, field) and not disk:
            what = "would be gone at the end of --cache_only"
            yield Finding((f"cache.{field}", "cache.only"), what, f"give {option(f'cache.{field}_to_disk')}")
    if cache.skip_check and not on_disk:
        yield Finding(("cache.skip_check",), "has no effect: nothing is cached on disk", note=True)


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


RULES: tuple[Rule, ...] = (latents, text, only)
