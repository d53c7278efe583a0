"""What keys of train.py mean together, and what its command line takes by default."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from difftrain.config import deepspeed_json
from difftrain.config.constructors import optimizer_takes, wrong_argument
from difftrain.config.datasets.clips import clip_buckets
from difftrain.config.layers import Layer, judged, keys_of
from difftrain.config.paths import toml_entry_point
from difftrain.config.resolve import Door, Resolution
from difftrain.config.schema.families import encoder_fields
from difftrain.config.schema.names import KAHAN, OPTIMIZERS_LATER, OPTIMIZERS_NEAR
from difftrain.config.schema.validate import default_of
from difftrain.config.spellings.key_meanings import ENCODER
from difftrain.config.spellings.keys import home_of
from difftrain.contracts.errors import Fault
from difftrain.models.registry import DEFAULT, FAMILIES

# what differs from a field's own default in this door; a family's row says what does for it
DOOR_DEFAULTS: dict[str, Any] = {"save.run_dirs": True, "save.naming": "steps"}
EMA_DEFAULTS = {"ema.decay": 0.99, "ema.update_every": 100}
_RATE = "optimizer.learning_rate"


def train_door(preset: Mapping[str, Any]) -> Door:
    """Return how the layers of train.py come together. preset: fields that an entry point stands for, with their values."""

    def before(layers: Sequence[Layer]) -> None:
        _text_encoders(layers, preset)

    def together(out: Resolution, layers: Sequence[Layer]) -> None:
        # what a door is for cannot be changed by what comes through it
        for path, value in preset.items():
            if out.values.get(path, value) != value:
                out.fault(
                    path,
                    f"{out.values[path]} contradicts this entry point, which is for {value}",
                    f"use {toml_entry_point()}",
                )
            out.values[path] = value
        for step in _STEPS:
            step(out, layers)

    return Door(before, _other_weights, together, lambda row: {**DOOR_DEFAULTS, **row.defaults})


def _other_weights(out: Resolution, layer: Layer) -> None:
    """Weights from a folder take the place of an earlier layer's seed, and the other way round."""
    pair = ("model.pretrained", "model.init_from_config")
    for new, old in (pair, pair[::-1]):
        if new in layer.values and old not in layer.values and old in out.values:
            out.note(old, f"{out.pop(old)} is ignored: weights are taken from {layer.values[new]}")


def _text_encoders(layers: Sequence[Layer], preset: Mapping[str, Any]) -> None:
    """Give a path that names a text encoder by its kind to the field of the family's encoder of that kind.

    Done in each layer before they are merged, so that a later layer wins whichever way it names the encoder.
    """
    family = DEFAULT
    for values in (*(layer.values for layer in layers), preset):
        family = str(values.get("model.family", family))
    row = FAMILIES[family]
    unknown = any(layer.other_family or "model.family" in layer.bad for layer in layers)
    for layer in layers:
        for path in [path for path in layer.values if path.startswith(ENCODER)]:
            value, origin, kind = layer.values.pop(path), layer.origins.pop(path), path.removeprefix(ENCODER)
            fields = encoder_fields(row, kind)
            if unknown:  # nobody knows which encoders it has
                continue
            if len(fields) == 1:
                layer.set(fields[0], value, origin)
            else:
                what = f"{row.title} has {len(fields) or 'no'} text encoder{'s' if fields else ''} of this kind"
                remedy = f"text_encoders = [{{type = ..., path = ...}}], types {', '.join(row.encoders)}"
                layer.faults.append(Fault(origin, what, remedy))


def _deepspeed(out: Resolution, layers: Sequence[Layer]) -> None:
    """What DeepSpeed's JSON says, before anything is derived from it."""
    deepspeed_json.apply(out)


def _warnings(out: Resolution, layers: Sequence[Layer]) -> None:
    """Where faults of the data are warnings, no share of rejected samples is too large."""
    if out.values.get("training.only_warn"):
        out.set("data.max_rejected_share", 1.0, "training.only_warn")


def _length(out: Resolution, layers: Sequence[Layer]) -> None:
    """With epochs and steps, what comes first ends the run; a run's own record may say otherwise."""
    epochs, steps = "training.max_epochs" in out.values, "training.max_steps" in out.values
    if not epochs and not steps and not {"training.max_epochs", "training.max_steps"} & out.bad:
        out.fault("training.max_epochs", "is missing", "how long to train: epochs, or max_steps")
    asked_now = bool(layers) and "training.max_steps" in layers[-1].values
    if epochs and steps and (asked_now or "training.first_limit" not in out.values):
        out.values["training.first_limit"] = True


def _batches(out: Resolution, layers: Sequence[Layer]) -> None:
    """What holds for images alone wins in families that make nothing else; beside clips it is theirs."""
    out.pop("?batch_as_given")
    looked_at = out.pop("?image_eval_batch")
    if looked_at is not None:
        value, wrong = judged("eval.batch_size", looked_at)
        if wrong:
            out.fault("?image_eval_batch", *wrong)
        else:
            out.set("eval.batch_size", value, "?image_eval_batch")
    pictures = out.pop("?image_batch")
    if pictures is None:
        return
    pairs = pictures if isinstance(pictures, tuple) else ()
    if FAMILIES[str(out.values.get("model.family", DEFAULT))].clips is not None:
        out.set("training.image_batch_size", max(batch for _, batch in pairs) if pairs else pictures, "?image_batch")
        out.values["?image_batch_of"] = pairs
        return
    out.set("training.batch_size", max(batch for _, batch in pairs) if pairs else pictures, "?image_batch")
    out.values["?batch_of"] = pairs


def _clips(out: Resolution, layers: Sequence[Layer]) -> None:
    """Frames of clips come down to what the family takes, k n + 1 of them, as in diffusion-pipe; images are one frame."""
    path = "data.frame_buckets"
    facts = FAMILIES[str(out.values.get("model.family", DEFAULT))].clips
    value, wrong = judged(path, out.values[path]) if path in out.values else (None, None)
    if facts is None or value is None or wrong:
        return
    buckets, notes = clip_buckets(value, facts)
    for note in notes:
        out.note(path, note)
    out.values[path] = list(buckets)


def _adapter(out: Resolution, layers: Sequence[Layer]) -> None:
    """Adapters to be added to the weights stand as tables in other trainers' files: {path, weight}."""
    path = "adapter.fuse_adapters"
    rows = out.values.get(path)
    if not isinstance(rows, list | tuple) or not any(isinstance(row, dict) for row in rows):
        return
    words = []
    for row in rows:
        if not isinstance(row, dict):
            words.append(row)
        elif row.keys() - {"path", "weight"} or not isinstance(row.get("path"), str):
            out.fault(path, f"{row!r} is no adapter", "{ path = 'FILE', weight = 1.0 }, or 'FILE:1.0'")
            return
        else:
            words.append(f"{row['path']}:{row.get('weight', 1.0)}")
    out.values[path] = words


def _precision(out: Resolution, layers: Sequence[Layer]) -> None:
    """What trained weights are kept in, and what is asked of frozen ones where none is frozen."""
    mixed = out.values.get("training.mixed_precision", "no")
    masters = out.pop("?masters")
    if masters is False and mixed == "no":
        out.note("?masters", "false has no effect: dtype is float32, and weights are kept in it")
    elif masters is False:
        out.set("training.full_precision", mixed, "?masters")
        out.set("training.master_weights", "none", "?masters")
        out.note("?masters", f"false: weights, gradients and optimizer state in {mixed}, 8 B a parameter with AdamW in place of "
                 "16; updates below half a unit in the last place are lost ('kahan', 14 B, keeps them)")  # fmt: skip
    if masters is None and mixed == "bf16" and out.values.get("training.master_weights") in ("kahan", "stochastic"):
        out.set("training.full_precision", mixed, "training.master_weights")  # both are ways of keeping bf16 weights
    storage = out.pop("?held")
    frozen = out.values.get("optimizer.unet_lr") == 0
    holds = out.values.get("model.train_only") or out.values.get("adapter.type")
    if storage == "float8" and frozen:
        out.set("model.fp8_frozen", "unet", "?held")
    elif storage == "float8" and holds and "model.base_dtype" not in out.values:
        out.set("model.base_dtype", "fp8", "?held")
    elif storage and holds:
        out.note("?held", f"{storage} has no effect: what is not trained is kept in dtype, or as base_dtype says")
    elif storage and storage != "float32" and masters is not False:
        what = f"{storage} is for weights that are not trained: all of the denoiser is trained, and stays fp32"
        out.note("?held", f"{what} (16 B a parameter with AdamW: weight, gradient, two of state; master_weights)")


def _optimizer(out: Resolution, layers: Sequence[Layer]) -> None:
    """Names of other trainers' optimizers, and arguments of the constructor."""
    path = "optimizer.type"
    name = str(out.values.get(path, "")).lower()
    half = out.values.get("training.mixed_precision") == "bf16" and out.values.get("training.full_precision") is None
    if name == KAHAN[0].lower() and half:
        out.note(path, "trained weights are fp32, which need no summation of Kahan's; [training] master_weights = 'kahan' keeps them "
                 "in bf16 with it")  # fmt: skip
    if name in OPTIMIZERS_LATER:
        out.fault(path, f"{out.values[path]} is not built yet", OPTIMIZERS_LATER[name])
        out.values.pop(path)
    elif name in OPTIMIZERS_NEAR:
        nearest, why = OPTIMIZERS_NEAR[name]
        out.note(path, f"{out.values[path]}: {nearest} is taken, {why}")
        out.values[path] = nearest

    # arguments come as words, or as keys of a table: these are checked against the constructor
    args = {word.partition("=")[0].strip(): word for word in out.values.get("optimizer.args", ())}
    start = "?optimizer_args."
    name = str(out.values.get(path, default_of(path)))
    taken = None if path in out.bad else optimizer_takes(name)
    for source in [source for source in out.values if source.startswith(start)]:
        value = out.pop(source)
        key = source.removeprefix(start)
        if wrong := wrong_argument(name, key, value, taken, keys_of("optimizer")):
            home = home_of(key)
            out.fault(
                source, *((f"does not belong in [optimizer]: {wrong[0]}", f"it belongs {home}") if home else wrong)
            )
            continue
        args[key] = f"{key}={tuple(value) if isinstance(value, list) else value!r}"
        out.origins.setdefault("optimizer.args", out.where(source))

    # a half-life in samples is a decay, and so an argument too
    half_life = out.pop("?half_life")
    if half_life is not None:
        _half_life(out, half_life, args)
    if args:
        out.values["optimizer.args"] = tuple(args.values())


def _half_life(out: Resolution, half_life: float, args: dict[str, str]) -> None:
    """Turn samples into the decay of one update."""
    if half_life <= 0:
        out.fault("?half_life", f"must be above 0, got {half_life:g}")
        return
    world = os.environ.get("WORLD_SIZE", "1")
    batch = out.values.get("training.batch_size", 1) * out.values.get("training.accumulation", 1)
    stages = out.values.get("training.pipeline_stages", 1)
    step = batch * max(1, int(world) // stages if world.isdecimal() and isinstance(stages, int) and stages else 1)
    first = args.get("betas", "betas=(0.9,").partition("(")[2].partition(",")[0] or "0.9"
    args["betas"] = f"betas=({first}, {0.5 ** (step / half_life)!r})"
    out.origins.setdefault("optimizer.args", out.where("?half_life"))
    out.note("?half_life", f"{args['betas']} for {step} samples a step")


def _rates(out: Resolution, layers: Sequence[Layer]) -> None:
    """A warm-up before a constant rate is a schedule of its own here; rates of 0 leave the text encoders alone."""
    constant = out.pop("?constant_lr")
    if constant is not None:
        value, wrong = judged(_RATE, constant)
        if wrong:
            out.fault("?constant_lr", *wrong)
        else:
            for path, new in ((_RATE, value), ("optimizer.scheduler", "constant"), ("optimizer.warmup_steps", 0)):
                out.set(path, new, "?constant_lr")
            if out.values.get("save.resume") not in (None, "auto"):  # auto goes on only where the rate is the same
                out.set("save.reset_optimizer_params", True, "?constant_lr")
    warm, schedule = out.values.get("optimizer.warmup_steps", 0), out.values.get("optimizer.scheduler", "constant")
    free = str(out.values.get("optimizer.type", "")).lower().endswith("schedulefree")
    if warm and schedule == "constant" and not free:
        out.values["optimizer.scheduler"] = "constant_with_warmup"
    rates = [f"optimizer.learning_rate_te{number}" for number in (1, 2)]
    if not out.values.get("model.train_text_encoder") and not any(out.values.get(rate) for rate in rates):
        for rate in rates:
            out.pop(rate)


def _average(out: Resolution, layers: Sequence[Layer]) -> None:
    """[ema] says anything: there is an average, with diffusion-pipe's decay, unless it says otherwise."""
    ema_paths = [path for path in EMA_DEFAULTS if path in out.values]
    if "ema.enable" not in out.values and ema_paths:
        out.set("ema.enable", True, ema_paths[0])
    if out.values.get("ema.enable"):
        for path, value in EMA_DEFAULTS.items():
            out.values.setdefault(path, value)
    else:
        for path in ema_paths:  # a table that is switched off
            out.pop(path)


def _loggers(out: Resolution, layers: Sequence[Layer]) -> None:
    """TensorBoard where it is installed, W&B where it is asked for; the smaller of two cadences."""
    wandb = out.pop("?wandb")
    if wandb:
        out.set("logging.log_with", "all" if find_spec("tensorboard") else "wandb", "?wandb")
    elif "logging.log_with" not in out.values and find_spec("tensorboard"):
        out.values["logging.log_with"] = "tensorboard"
    if not wandb and out.values.get("logging.log_with") == "tensorboard":
        out.pop("logging.wandb_run_name")
    cadences = {path: out.pop(path) for path in ("?print_every", "?log_every")}
    values = {path: value for path, value in cadences.items() if value is not None}
    for path, value in values.items():
        if wrong := judged("logging.log_every", value)[1]:
            out.fault(path, *wrong)
            return
    if values:
        least = min(values, key=lambda path: values[path])
        out.set("logging.log_every", values[least], least)
        if len(set(values.values())) > 1:
            out.note(least, f"{values[least]}: the smaller of steps_per_print and logging_steps counts for both")


def _evaluation(out: Resolution, layers: Sequence[Layer]) -> None:
    """Sets are measured before the first step too, unless that is said otherwise."""
    if out.values.get("eval.sets"):
        out.values.setdefault("eval.before_first_step", True)


def _caches(out: Resolution, layers: Sequence[Layer]) -> None:
    """What is asked of a cache where none was named means one on disk of everything that is frozen."""
    asks = [path for path in ("cache.only", "cache.trust", "cache.regenerate") if out.values.get(path)]
    named = [path for path in ("latents", "latents_to_disk", "text", "text_to_disk") if f"cache.{path}" in out.values]
    if (
        not asks
        or named
        or FAMILIES[str(out.values.get("model.family", DEFAULT))].defaults.get("cache.latents_to_disk")
    ):
        return
    trained = bool(out.values.get("model.train_text_encoder"))
    out.set("cache.latents_to_disk", True, asks[0])
    out.set("cache.text_to_disk", not trained, asks[0])
    what = "latents" if trained else "latents and outputs of the text encoders"
    out.note(asks[0], f"{what} are cached on disk, since [cache] does not say otherwise")


_STEPS = (
    _deepspeed,
    _warnings,
    _length,
    _batches,
    _clips,
    _adapter,
    _precision,
    _optimizer,
    _rates,
    _average,
    _loggers,
    _evaluation,
    _caches,
)
