"""DeepSpeed's own JSON: every key of it mapped onto a setting of ours, harmless here, or refused by name.

1. read      --deepspeed_config=FILE, [deepspeed] config = FILE of train.py's TOML
2. sections  precision, ZeRO with its offloading, batch sizes, optimizer, scheduler: by the tables of spellings/deepspeed.py
3. compare   what the run's own configuration says otherwise is a fault that names both; "auto" leaves it to that

A key means what it means to DeepSpeed 0.19 (deepspeed.ai/docs/config-json), its defaults too where they differ from ours.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from difftrain.config.layers import judged
from difftrain.config.resolve import Resolution
from difftrain.config.schema.names import did_you_mean
from difftrain.config.schema.validate import show
from difftrain.config.spellings import deepspeed as tables
from difftrain.config.spellings.spelling import option
from difftrain.contracts.errors import Fault

PATH = "?deepspeed_config"
_BATCH, _ACCUMULATION = "training.batch_size", "training.accumulation"
_RATE, _STEPS, _WARMUP = "optimizer.learning_rate", "training.max_steps", "optimizer.warmup_steps"
_SCHEDULE, _ARGS = "optimizer.scheduler", "optimizer.args"
_STAGE, _PRECISION = "deepspeed.zero_stage", "training.mixed_precision"

_NATIVE = "the deepspeed engine is not built yet: runs natively, every device with the whole model (DDP)"
_PIPELINE = "the deepspeed engine is not built yet: pipeline_stages runs the native pipeline engine"
_SHARDS = "[deepspeed] enable = true, or a --deepspeed_config with a zero stage, shards through accelerate's plugin"


def apply(out: Resolution) -> None:
    """Take the file that a layer names into the values that all layers come to; without one, say what --deepspeed does.

    A file that cannot be read, a key without a counterpart and one that contradicts the run are faults.
    """
    path, asked = out.pop(PATH), out.pop("?deepspeed")
    if path is None:
        if asked and not out.values.get("deepspeed.enable"):
            what = "" if out.where("?deepspeed") == "--deepspeed" else "engine = deepspeed: "
            out.note("?deepspeed", f"{what}{_PIPELINE}" if _stages(out) > 1 else f"{what}{_NATIVE}; {_SHARDS}")
        return
    named = f"{out.where(PATH)}={path}" if out.where(PATH).startswith("--") else f"{out.where(PATH)} = {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
        settings = json.loads(text)
    except FileNotFoundError:
        out.faults.append(Fault(named, "no such file", "give DeepSpeed's JSON file"))
        return
    except (OSError, ValueError, RecursionError) as error:
        out.faults.append(Fault(named, f"cannot be read as JSON: {error}"))
        return
    if not isinstance(settings, dict):
        out.faults.append(Fault(named, f"must be an object, got {show(settings)}"))
        return
    _DeepSpeedFile(out, path, lines_of(text)).take(settings)


def _stages(out: Resolution) -> int:
    """Return over how many devices one model is cut; a value that is none is a fault of its own."""
    stages = out.values.get("training.pipeline_stages", 1)
    return stages if isinstance(stages, int) and stages > 0 else 1


class _DeepSpeedFile:
    """One file on its way into a configuration."""

    def __init__(self, out: Resolution, path: str, lines: Mapping[str, int]) -> None:
        self.out, self.path, self.lines = out, path, lines

    # ------------------------------------------------------------------ what every section does

    def at(self, key: str) -> str:
        """Name the place of a key."""
        line = self.lines.get(key)
        return f"{self.path}{f':{line}' if line else ''} {key}"

    def fault(self, key: str, what: str, remedy: str = "") -> None:
        """Note a fault of a key."""
        self.out.faults.append(Fault(self.at(key), what, remedy))

    def set(self, key: str, field: str, value: Any) -> bool:
        """Give a field what a key says; return whether that holds: a run that says otherwise is a fault that names both."""
        value, wrong = judged(field, value)
        if wrong:
            self.fault(key, *wrong)
        elif field in self.out.values and self.out.values[field] != value:
            other = self.out.values[field]
            what = f"contradicts {self.out.where(field)}: {show(value)} here, {show(other)} there"
            self.fault(key, what, 'set it once; "auto" here leaves it open')
        elif field not in self.out.values:
            self.out.values[field] = value
            self.out.origins[field] = self.at(key)
        return self.out.values.get(field) == value

    def refuse(self, key: str, value: Any, passing: tuple[Any, ...]) -> None:
        """Refuse a key unless its value asks for nothing."""
        if not any(value == quiet and type(value) is type(quiet) for quiet in passing):
            name = key.rpartition(".")[2]
            self.fault(key, f"{show(value)} has no counterpart here", tables.INSTEAD.get(name, "leave it out"))

    def object(self, key: str, value: Any) -> dict[str, Any]:
        """Return a section; what is none is a fault, and "auto" says nothing."""
        if isinstance(value, dict):
            return value
        if value not in ("auto", None):
            self.fault(key, f"must be an object, got {show(value)}")
        return {}

    def table(
        self,
        section: str,
        values: Mapping[str, Any],
        fields: Mapping[str, str],
        off: Mapping[str, tuple[Any, ...]],
        tuning: Mapping[str, str],
        own: tuple[str, ...] = (),
    ) -> None:
        """Take the keys of a section by tables. own: keys that the caller takes."""
        for name, value in values.items():
            key = f"{section}.{name}" if section else name
            if name in own or value == "auto":
                continue
            if name in fields:
                if value is not None:
                    self.set(key, fields[name], value)
            elif name in off:
                self.refuse(key, value, off[name])
            elif name in tuning:
                self.out.notes.append(f"{self.at(key)}: {tuning[name]}")
            else:
                known = (*own, *fields, *off, *tuning)
                self.fault(key, "is not a known key", did_you_mean(name, known) or f"known are {', '.join(known)}")

    # ------------------------------------------------------------------ the file's sections

    def take(self, settings: dict[str, Any]) -> None:
        """Take the whole file."""
        own = (
            "zero_optimization",
            "fp16",
            "bf16",
            "bfloat16",
            "optimizer",
            "scheduler",
            "train_batch_size",
            "steps_per_print",
        )
        self.table("", settings, tables.TOP, tables.OFF, tables.TOP_TUNING, own)
        for name in ("fp16", "bf16", "bfloat16"):
            if name in settings:
                self._precision(name, self.object(name, settings[name]))
        self._zero(self.object("zero_optimization", settings.get("zero_optimization")))
        if (total := settings.get("train_batch_size")) not in (None, "auto"):
            self._global_batch(total)
        if (every := settings.get("steps_per_print")) not in (None, "auto"):
            self._print_every(every)
        self._optimizer(self.object("optimizer", settings.get("optimizer")))
        self._scheduler(self.object("scheduler", settings.get("scheduler")))

    def _precision(self, name: str, values: dict[str, Any]) -> None:
        """{"enabled": true} is the precision that is computed in; the rest of fp16 is the loss scale's."""
        word = "fp16" if name == "fp16" else "bf16"
        enabled, key = values.get("enabled"), f"{name}.enabled"
        if enabled not in (None, "auto", True, False):
            self.fault(key, f"must be true or false, got {show(enabled)}")
        elif enabled is True:
            self.set(key, _PRECISION, word)
        elif enabled is False and self.out.values.get(_PRECISION) == word:
            what = f"contradicts {self.out.where(_PRECISION)}: false here, {word} there"
            self.fault(key, what, 'set it once; "auto" here leaves it open')
        if enabled is False:  # the rest of a section that is switched off says nothing
            return
        if word == "fp16":
            fields = {"fp16_master_weights_and_grads": "deepspeed.fp16_master_weights"}
            self.table(name, values, fields, tables.FP16_OFF, tables.FP16_TUNING, ("enabled",))
        else:
            self.table(name, values, {}, tables.BF16_OFF, tables.BF16_TUNING, ("enabled",))

    def _zero(self, values: dict[str, Any]) -> None:
        """The stage and what waits off the device; stage 0 is every device with the whole model."""
        section, out = "zero_optimization", self.out
        own, stage = ("offload_optimizer", "offload_param"), values.get("stage")
        enabled = bool(out.values.get("deepspeed.enable"))
        if isinstance(stage, bool):
            self.fault(f"{section}.stage", f"must be 0, 1, 2 or 3, got {show(stage)}")
            return
        if stage == 0 and enabled and out.values.get(_STAGE, 0) != 0:
            self.set(f"{section}.stage", _STAGE, 0)  # a flag names another stage
            return
        if stage == 0 or (stage is None and not enabled):
            for field in ("deepspeed.enable", _STAGE):
                out.values.pop(field, None)
                out.origins.pop(field, None)
            origin = self.at(f"{section}.stage") if stage == 0 else self.path
            out.notes.append(f"{origin}: no zero stage above 0; {_NATIVE}")
            self.table(
                section,
                values,
                {},
                tables.ZERO_OFF,
                {**tables.TUNING, **dict.fromkeys((*tables.ZERO, *own), tables.BUCKETS)},
                ("stage",),
            )
            return
        self.table(section, values, tables.ZERO, tables.ZERO_OFF, tables.TUNING, own)
        origin = self.at(f"{section}.stage")
        if stage in (1, 2, 3, None, "auto"):
            out.values["deepspeed.enable"] = True
            out.origins.setdefault("deepspeed.enable", origin)
            if "training.engine" not in out.values:
                out.values["training.engine"] = "accelerate"
                out.origins["training.engine"] = origin
                out.notes.append(f"{origin}: runs DeepSpeed through accelerate's plugin")
        for name in own:
            key, inner = f"{section}.{name}", self.object(f"{section}.{name}", values.get(name))
            device, path = inner.get("device", "none"), inner.get("nvme_path")
            field = f"deepspeed.{name}_device"
            if device == "none" and inner and out.values.get(field) is not None:
                other = f"contradicts {out.where(field)}: none here, {out.values[field]} there"
                self.fault(f"{key}.device", other, 'set it once; "auto" here leaves it open')
            elif device not in ("none", "auto", None):
                self.set(f"{key}.device", field, device)
            if path not in (None, "auto") and device == "nvme":
                self.set(f"{key}.nvme_path", f"deepspeed.{name}_nvme_path", path)
            self.table(key, inner, {}, tables.OFFLOAD_OFF, tables.OFFLOAD_TUNING, ("device", "nvme_path"))

    def _global_batch(self, total: Any) -> None:
        """train_batch_size = micro batch x accumulation x processes: what two of them leave open follows."""
        key, world = "train_batch_size", os.environ.get("WORLD_SIZE", "")
        processes = max(1, (int(world) if world.isdecimal() else 1) // _stages(self.out))  # that see data of their own
        if isinstance(total, bool) or not isinstance(total, int) or total < 1:
            self.fault(key, f"must be a whole number from 1 up, got {show(total)}")
            return
        values = self.out.values
        micro, steps = (values.get(field) for field in (_BATCH, _ACCUMULATION))
        if not all(value is None or (isinstance(value, int) and value > 0) for value in (micro, steps)):
            return  # a fault of its own
        if micro is None:
            known, open_field, value = steps or 1, _BATCH, total // (processes * (steps or 1))
        elif steps is None:
            known, open_field, value = micro, _ACCUMULATION, total // (processes * micro)
        else:
            known, open_field, value = micro * steps, "", 1
        if value < 1 or known * value * processes != total:
            count = f"{processes} process{'es'[: 2 * (processes > 1)]}"
            shares = f"{micro or 'any'} a micro batch x {steps or 'any number'} accumulated x {count}"
            remedy = f'"auto", or {known * processes * max(1, round(total / (known * processes)))}'
            self.fault(key, f"{total} is not {shares}", remedy)
        elif open_field:
            self.set(key, open_field, value)

    def _print_every(self, every: Any) -> None:
        """Steps between lines of metrics, which the run may have under three names."""
        if isinstance(every, float) and (every == float("inf") or not every.is_integer()):
            self.out.notes.append(f"{self.at('steps_per_print')}: no effect: {show(every)} is no number of steps")
            return
        names = [name for name in ("logging.log_every", "?print_every", "?log_every") if name in self.out.values]
        if not names:
            self.set("steps_per_print", "logging.log_every", int(every) if isinstance(every, float) else every)
        elif all(self.out.values[name] != every for name in names):
            other = self.out.values[names[0]]
            what = f"contradicts {self.out.where(names[0])}: {show(every)} here, {show(other)} there"
            self.fault("steps_per_print", what, 'set it once; "auto" here leaves it open')

    def _optimizer(self, section: dict[str, Any]) -> None:
        """Name and arguments; DeepSpeed's Adam decouples its weight decay unless adam_w_mode is false."""
        if not section:
            return
        self.table("optimizer", section, {}, {"legacy_fusion": (False,)}, {}, ("type", "params"))
        params = dict(self.object("optimizer.params", section.get("params", {})))
        name = section.get("type")
        if name is None or name == "auto":
            if name is None:
                self.fault("optimizer", "names no type", "AdamW, Adam, Lion, or another of torch.optim")
            return
        kind = str(name).lower()
        decoupled = params.pop("adam_w_mode", True)
        ours = (
            ("AdamW" if kind == "adamw" or decoupled else "Adam")
            if kind in tables.ADAM
            else tables.OPTIMIZERS.get(kind)
        )
        if ours is None:
            remedy = f"one of Adam, AdamW, {', '.join(tables.OPTIMIZERS.values())}; others by name in the run's configuration"
            self.fault("optimizer.type", f"{show(name)} has no counterpart here", remedy)
            return
        of_torch = params.pop("torch_adam", False)
        named = self.out.values.get("optimizer.type")
        if isinstance(named, str) and named.removeprefix("torch.optim.").lower() == ours.lower():
            ours = named  # the same, as the run spells it
        self.set("optimizer.type", "optimizer.type", ours)
        for unused in ("fp32_optimizer_states", "bias_correction"):
            if params.pop(unused, True) not in (True, "auto"):
                self.fault(f"optimizer.params.{unused}", "false has no counterpart here", "leave it out")
        rate = params.pop("lr", None)
        if rate not in (None, "auto"):
            self.set("optimizer.params.lr", _RATE, rate)
        elif rate is None and _RATE not in self.out.values and kind in (*tables.ADAM, "lion"):
            self.out.values[_RATE] = tables.ADAM_RATE
            self.out.origins[_RATE] = self.at("optimizer.type")
            self.out.note(_RATE, f"takes DeepSpeed's rate of {tables.ADAM_RATE:g}, as lr is not given")
        if kind in tables.ADAM and not of_torch:
            params.setdefault("weight_decay", 0.0)  # torch's would be 0.01
        self._arguments({key: value for key, value in params.items() if value != "auto" and value is not None})

    def _arguments(self, params: dict[str, Any]) -> None:
        """Arguments of the constructor, beside those that the run gives: key=value, or keys of [optimizer]."""
        out, words = self.out, [str(word) for word in self.out.values.get(_ARGS, ())]
        named = {
            name.strip(): (_literal(text), out.where(_ARGS)) for name, _, text in (w.partition("=") for w in words)
        }
        for path in [path for path in out.values if path.startswith("?optimizer_args.")]:
            named[path.partition(".")[2]] = (out.values[path], out.where(path))
        for name, value in params.items():
            key = f"optimizer.params.{name}"
            value = tuple(value) if isinstance(value, list) else value
            other, origin = named.get(name, (None, ""))
            if origin and (tuple(other) if isinstance(other, list) else other) != value:
                if key not in self.lines:  # DeepSpeed's default, which a run may say otherwise
                    continue
                what = f"contradicts {name} of {origin}: {value!r} here, {other!r} there"
                self.fault(key, what, 'set it once; "auto" here leaves it open')
            elif not origin:
                words.append(f"{name}={value!r}")
                out.origins.setdefault(_ARGS, self.at(key if key in self.lines else "optimizer.type"))
        if words:
            out.values[_ARGS] = tuple(words)

    def _scheduler(self, section: dict[str, Any]) -> None:
        """A warm-up, in a line or a logarithm, and what follows it."""
        if not section:
            return
        self.table("scheduler", section, {}, {}, {}, ("type", "params"))
        name, params = section.get("type"), self.object("scheduler.params", section.get("params", {}))
        if name == "auto":
            return
        if name not in tables.SCHEDULERS:
            what = "names no type" if name is None else f"{show(name)} has no counterpart here"
            remedy = f"one of {', '.join(tables.SCHEDULERS)}; others by name in the run's configuration"
            self.fault("scheduler.type", what, remedy)
            return
        self.table("scheduler.params", params, {}, {}, {}, tables.SCHEDULER_KEYS[name])
        out = self.out

        # the schedule: a constant rate with a warm-up may be written as both
        if not (name == "WarmupLR" and out.values.get(_SCHEDULE) == "constant"):
            if not self.set("scheduler.type", _SCHEDULE, tables.NAMED[name]):
                return
        else:
            out.values[_SCHEDULE] = tables.NAMED[name]
        for low in ("warmup_min_lr", "warmup_min_ratio"):
            if params.get(low, 0) not in (0, "auto", None):
                self.fault(f"scheduler.params.{low}", f"{show(params[low])} has no counterpart here", "0")
        rate = params.get("warmup_max_lr")
        if rate not in (None, "auto"):
            self.set("scheduler.params.warmup_max_lr", _RATE, rate)
        steps = params.get("warmup_num_steps", tables.DEFAULT_WARMUP)
        if steps != "auto":
            self.set("scheduler.params.warmup_num_steps", _WARMUP, steps)
        if name == "WarmupCosineLR" and (floor := params.get("cos_min_ratio", tables.DEFAULT_FLOOR)) != "auto":
            self.set("scheduler.params.cos_min_ratio", "optimizer.min_lr_ratio", floor)
        self._total(params.get("total_num_steps"))

        # how it rises
        kind = params.get("warmup_type", "log")
        if kind not in ("log", "linear", "auto"):
            self.fault("scheduler.params.warmup_type", f"{show(kind)} is none of its words", "log or linear")
        elif kind == "log":
            words = tuple(out.values.get("optimizer.scheduler_args", ()))
            if not any(str(word).startswith("warmup_type=") for word in words):
                out.values["optimizer.scheduler_args"] = (*words, "warmup_type='log'")
                out.origins.setdefault("optimizer.scheduler_args", self.at("scheduler.type"))
            elif not any(re.fullmatch(r"warmup_type=['\"]?log['\"]?", str(word)) for word in words):
                origin = out.where("optimizer.scheduler_args")
                self.fault("scheduler.params.warmup_type", f"log contradicts warmup_type of {origin}", "set it once")

    def _total(self, total: Any) -> None:
        key, out = "scheduler.params.total_num_steps", self.out
        if total in (None, "auto"):
            return
        if "training.max_epochs" in out.values and _STEPS not in out.values:
            what = f"{show(total)}: the run's length is given in epochs, by {out.where('training.max_epochs')}"
            self.fault(key, what, f'"auto", or {option(_STEPS)}')
        else:
            self.set(key, _STEPS, total)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()


_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],:]|\n')


def lines_of(text: str) -> dict[str, int]:
    """Return the line of every key of a JSON object, as "zero_optimization.stage"."""
    lines: dict[str, int] = {}
    path: list[str] = []  # the key of every object that is open; "" in a list
    line, last, key = 1, "", ""
    for token in _tokens(text):
        if token == "\n":
            line += 1
        elif token == ":":
            key = json.loads(last)
            lines.setdefault(".".join([*path[1:], key] if path else [key]), line)
        elif token in "{[":
            path.append(key)
            key = ""
        elif token in "}]":
            key = path.pop() if path else ""
        else:
            last = token
    return lines


def _tokens(text: str) -> Iterator[str]:
    return (match[0] for match in _TOKEN.finditer(text))


__all__ = ["PATH", "apply", "lines_of"]
