"""What keys of train.py mean that are not simply the value of one field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from difftrain.config.schema.names import did_you_mean
from difftrain.config.schema.validate import show
from difftrain.models.registry import ALSO, FAMILIES, LATER


@dataclass(frozen=True)
class KeyValue:
    """One key as it is written: `table` is "" at the top of a file. text: how the command line wrote its value."""

    table: str
    name: str
    value: Any
    origin: str
    folder: Path | None = None  # of the file, against which a relative path is looked for too
    text: str | None = None


class LayerLike(Protocol):
    """Take what a key means: values by the path of a field, faults, notes (config/layers.py)."""

    other_family: str  # one that is not built yet
    notes: list[str]

    def set(self, path: str, value: Any, origin: str) -> bool: ...
    def put(self, path: str, value: Any, item: KeyValue) -> None: ...
    def fault(self, item: KeyValue, what: str, remedy: str = "", *, bad: str = "") -> None: ...
    def path(self, item: KeyValue, value: Any) -> Any: ...


Meaning = Callable[[LayerLike, KeyValue, Any], None]


def _family(layer: LayerLike, item: KeyValue, value: Any) -> None:
    """Take a family by its name; one that is known and not built yet is refused by that."""
    built = f"built are {', '.join(FAMILIES)}"
    if (name := ALSO.get(str(value), value)) in FAMILIES:
        layer.put("model.family", name, item)
    elif value in LATER:
        layer.other_family = str(value)
        layer.fault(item, f"the family {value!r} is not built yet", built, bad="model.family")
    else:
        remedy = did_you_mean(str(value), (*FAMILIES, *LATER)) or built
        layer.fault(item, f"no such family: {value!r}", remedy, bad="model.family")


def _batch(layer: LayerLike, item: KeyValue, value: Any) -> None:
    """Take one number, or one for the data of each resolution."""
    pairs = _pairs(value)
    if not layer.set("?batch_as_given", value, item.origin):
        return
    if pairs:
        layer.set("?batch_of", pairs, item.origin)
        layer.put("training.batch_size", max(batch for _, batch in pairs), item)
    elif isinstance(value, list):
        remedy = "[[512, 4], [1024, 1]]: at 512 pixels 4 samples at once"
        layer.fault(
            item,
            f"must be a number, or [[resolution, batch], ...], got {show(value)}",
            remedy,
            bad="training.batch_size",
        )
    else:
        layer.set("?batch_of", (), item.origin)
        layer.put("training.batch_size", value, item)


def _image_batch(layer: LayerLike, item: KeyValue, value: Any) -> None:
    if (isinstance(value, list) and not _pairs(value)) or isinstance(value, str | bool | float):
        layer.fault(
            item, f"must be a number, or [[resolution, batch], ...], got {show(value)}", bad="training.batch_size"
        )
    else:
        layer.set("?image_batch", _pairs(value) or value, item.origin)


def _pairs(value: Any) -> tuple[tuple[int, int], ...]:
    """Return the pairs of [[resolution, batch], ...], or nothing where a value is something else."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return ()
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for pair in value for n in pair):
        return ()
    return tuple((side, batch) for side, batch in value)


def _checkpointing(layer: LayerLike, item: KeyValue, value: Any) -> None:
    if value not in (True, False, "unsloth") or (isinstance(value, int | float) and not isinstance(value, bool)):
        layer.fault(item, f"must be true, false or 'unsloth', got {show(value)}", bad="training.gradient_checkpointing")
        return
    layer.put("training.gradient_checkpointing", bool(value), item)
    if value is not True:
        layer.put("training.cpu_offload_checkpointing", value == "unsloth", item)


def _engine(layer: LayerLike, item: KeyValue, value: Any) -> None:
    if value == "deepspeed":
        layer.set("?deepspeed", True, item.origin)
    elif value == "pipeline":
        layer.fault(item, "the pipeline engine is not built yet", "native", bad="training.engine")
    else:
        layer.put("training.engine", value, item)


def _deepspeed_config(layer: LayerLike, item: KeyValue, value: Any) -> None:
    """Take the path of DeepSpeed's JSON, which may be relative to the file's folder."""
    if value:
        layer.set("?deepspeed_config", layer.path(item, value), item.origin)


def _eval_sets(layer: LayerLike, item: KeyValue, value: Any) -> None:
    """Take a list of {name, config}."""
    tables = value if isinstance(value, list) and all(isinstance(table, dict) for table in value) else None
    if tables is None:
        layer.fault(item, f"must be a list of tables, got {show(value)}", "[{name = 'held out', config = 'FILE.toml'}]")
        return
    sets: list[dict[str, Any]] = []
    for number, table in enumerate(tables, 1):
        at = f"{number}:"
        for key in table.keys() - {"name", "config"}:
            layer.fault(item, f"{at} no such key: {key}", did_you_mean(key, ("name", "config")) or "name and config")
        wrong = [key for key in ("name", "config") if not isinstance(table.get(key), str) or not table[key].strip()]
        for key in wrong:
            what = f"must be text in quotes, got {show(table[key])}" if key in table else "is missing"
            layer.fault(
                item, f"{at} {key} {what}", "name: how it is called in the metrics; config: TOML file of its data"
            )
        if not wrong:
            sets.append({"name": table["name"], "config": layer.path(item, table["config"])})
    names = [section["name"] for section in sets]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        layer.fault(item, f"two sets are called {name!r}", "give each a name of its own")
    layer.put("eval.sets", sets, item)


def _text_encoders(layer: LayerLike, item: KeyValue, value: Any) -> None:
    """Take a list of {type, path}."""
    tables = value if isinstance(value, list) and all(isinstance(section, dict) for section in value) else None
    if tables is None:
        layer.fault(item, f"must be a list of tables, got {show(value)}", "[{type = 't5', path = 'FOLDER'}]")
        return
    for number, table in enumerate(tables, 1):
        kind, path = table.get("type"), table.get("path")
        for key in table.keys() - {"type", "path"}:
            layer.fault(item, f"{number}: no such key: {key}", did_you_mean(key, ("type", "path")) or "type and path")
        if kind not in _ENCODERS or not isinstance(path, str):
            what = f"type is {show(kind)}" if kind not in _ENCODERS else f"path is {show(path)}"
            layer.fault(item, f"{number}: {what}", f"type one of {', '.join(_ENCODERS)}, path a folder")
        else:
            layer.set(ENCODER + _ENCODERS[kind], layer.path(item, path), item.origin)


ENCODER = "?encoder."  # before a kind: which field that is hangs on the family, which another line may name
_ENCODERS = {"clip_l": "clip_l", "clip_g": "clip_g", "t5": "t5", "t5xxl": "t5", "umt5": "umt5", "llm": "llm"}


def _encoder(kind: str) -> Meaning:
    """Take the path of the text encoder of a kind."""

    def take(layer: LayerLike, item: KeyValue, value: Any) -> None:
        if value:
            layer.set(ENCODER + kind, layer.path(item, value), item.origin)

    return take


def _first_encoder(layer: LayerLike, item: KeyValue, value: Any) -> None:
    if value:
        layer.put("model.text_encoder1", layer.path(item, value), item)


def _masters(layer: LayerLike, item: KeyValue, value: Any) -> None:
    """Take true (fp32 masters), false (none), or a word of the field's."""
    if isinstance(value, bool):
        layer.set("?masters", value, item.origin)
    else:
        layer.put("training.master_weights", value, item)


def _encoder_rate(number: int) -> Meaning:
    def take(layer: LayerLike, item: KeyValue, value: Any) -> None:
        layer.put(f"optimizer.learning_rate_te{number}", value, item)
        if value > 0:
            layer.put("model.train_text_encoder", True, item)

    return take


def _resume(layer: LayerLike, item: KeyValue, value: Any) -> None:
    if value is False or value == "":
        return
    latest = value is True
    if isinstance(value, bool | str) or (isinstance(value, int) and value >= 0):
        layer.put(
            "save.resume",
            "latest" if latest else layer.path(item, value) if isinstance(value, str) else str(value),
            item,
        )
    else:
        layer.fault(item, f"must be latest, a step or a folder, got {show(value)}", bad="save.resume")


def _both(*paths: str) -> Meaning:
    def take(layer: LayerLike, item: KeyValue, value: Any) -> None:
        for path in paths:
            layer.put(path, value, item)

    return take


def _loss(kind: str, field: str) -> Meaning:
    def take(layer: LayerLike, item: KeyValue, value: Any) -> None:
        layer.put("loss.type", kind, item)
        layer.put(field, value, item)

    return take


def _word(path: str) -> Meaning:
    """Take text, of which an empty one says nothing."""

    def take(layer: LayerLike, item: KeyValue, value: Any) -> None:
        if value:
            layer.put(path, value, item)

    return take


MEANINGS: Mapping[str, Meaning] = {
    "?family": _family,
    "?batch": _batch,
    "?image_batch": _image_batch,
    "?checkpointing": _checkpointing,
    "?deepspeed_config": _deepspeed_config,
    "?engine": _engine,
    "?eval_sets": _eval_sets,
    "?masters": _masters,
    "?text_encoders": _text_encoders,
    "?text_encoder_path": _first_encoder,
    **{f"?{kind}_path": _encoder(kind) for kind in ("clip", "t5", "llm")},
    "?te1": _encoder_rate(1),
    "?te2": _encoder_rate(2),
    "?resume": _resume,
    "?caching_batch": _both("cache.batch_size", "model.vae_batch_size"),
    "?pseudo_huber": _loss("pseudo_huber", "loss.pseudo_huber_c"),
    "?huber_delta": _loss("huber_delta", "loss.bend"),
    "?smooth_l1_beta": _loss("smooth_l1_beta", "loss.bend"),
    "?wandb_project": _word("logging.tracker_name"),
    "?wandb_run": _word("logging.wandb_run_name"),
}
