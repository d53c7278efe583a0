"""Rules about adapters: what each kind takes, and what a run that trains one alone cannot go with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from difftrain.config.paths import expanded
from difftrain.config.rules.finding import Finding, Rule, value_of
from difftrain.config.schema.adapter import AdapterSection
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import default_of
from difftrain.config.spellings.spelling import option

_TYPE = "adapter.type"
# field -> the kinds that it means something to
_ONLY = {
    "rank": ("lora", "dora", "lokr", "oft"),
    "alpha": ("lora", "dora", "lokr"),
    "use_rslora": ("lora", "dora"),
    "dropout": ("lora", "dora", "lokr", "oft"),
    "rank_pattern": ("lora", "dora", "lokr"),
    "alpha_pattern": ("lora", "dora", "lokr"),
    "decompose_factor": ("lokr",),
    "scale_weight_norms": ("lora",),
    "loraplus_lr_ratio": ("lora", "dora"),
    "loraplus_unet_lr_ratio": ("lora", "dora"),
    "loraplus_text_encoder_lr_ratio": ("lora", "dora"),
    "init_from_existing": ("lora", "dora"),
}


def adapter(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What an adapter is, and what does not go with it."""
    section = cfg.adapter
    asked = [name for name in AdapterSection.model_fields if name != "type" and _is_set(cfg, f"adapter.{name}")]
    if section.type is None:
        for name in asked:
            yield Finding((f"adapter.{name}",), f"needs {option(_TYPE, 'lora')}: without a type no adapter is trained")
        return

    # --- what the kind takes
    for name in asked:
        kinds = _ONLY.get(name)
        if kinds is not None and section.type not in kinds:
            what = f"means nothing to {section.type}"
            yield Finding((f"adapter.{name}", _TYPE), what, f"it is for {', '.join(kinds)}")
    for name in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"):
        for word in getattr(section, name):
            try:
                re.compile(word)
            except re.error as error:
                what = f"{word!r} is neither the end of a name nor a regular expression: {error}"
                yield Finding((f"adapter.{name}",), what, r"to_q, or .*\.attn\.to_(q|k)")
    if section.init_from_existing and not Path(expanded(section.init_from_existing)).exists():
        yield Finding(("adapter.init_from_existing",), f"no such file or folder: '{section.init_from_existing}'")
    for word in section.fuse_adapters:
        path, scale = scaled(word)
        if not Path(expanded(path)).exists():
            yield Finding(("adapter.fuse_adapters",), f"no such file or folder: '{path}'", "FILE, or FILE:SCALE")
        elif scale is None:
            yield Finding(("adapter.fuse_adapters",), f"{word!r} has no number behind its colon", "FILE:0.8")

    # --- what it cannot go with
    alone = "only the adapter is trained"
    for field in ("model.train_only", "optimizer.block_lr"):
        if _is_set(cfg, field):
            yield Finding((field, _TYPE), f"cannot be used with {option(_TYPE, section.type)}: {alone}", "leave it out")
    if section.loraplus_text_encoder_lr_ratio and not cfg.model.train_text_encoder:
        what = "has no effect: text encoders get no adapter"
        yield Finding(("adapter.loraplus_text_encoder_lr_ratio",), what, note=True)
    for field in ("model.fp8_frozen", "model.base_dtype"):
        if section.type == "dora" and value_of(cfg, field):
            what = f"needs the lengths of weights, which are held as {field.partition('.')[2]} says"
            yield Finding((_TYPE, field), what, f"{option(_TYPE, 'lora')}")
    if section.fuse_adapters and cfg.model.base_dtype:
        what = "adds to weights that base_dtype rounds while they are read"
        yield Finding(("adapter.fuse_adapters", "model.base_dtype"), what, "leave one of them out")
    if "save.model_as" in requested and cfg.save.naming != "kohya":
        what = "has no effect: an adapter is exported in every layout that it has"
        yield Finding(("save.model_as", _TYPE), what, note=True)


def needs_one(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """At kohya's entry point for networks one is trained."""
    if cfg.adapter.type is None:
        what = "is missing: this entry point trains an adapter"
        yield Finding((_TYPE,), what, "--network_module=networks.lora; sdxl_pretrain.py trains all weights")


def scaled(word: str) -> tuple[str, float | None]:
    """Return path and scale of FILE[:SCALE]; None where what is behind the colon is no number."""
    path, colon, text = word.rpartition(":")
    if not colon or Path(expanded(word)).exists():
        return word, 1.0
    try:
        return path, float(text)
    except ValueError:
        return (path, None) if Path(expanded(path)).exists() else (word, 1.0)


def _is_set(cfg: TrainConfig, path: str) -> bool:
    return bool(value_of(cfg, path) != default_of(path))


ADAPTER_RULES: tuple[Rule, ...] = (adapter,)
