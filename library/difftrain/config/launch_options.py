"""What launchers hand over on the command line: --deepspeed and its JSON, --local_rank, --master_port."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from difftrain.config.layers import KeyValue, Layer
from difftrain.config.schema.names import did_you_mean
from difftrain.config.schema.validate import show
from difftrain.contracts.errors import Fault

_NATIVE = "the deepspeed engine is not built yet: runs natively, every device with the whole model (DDP)"
_PIPELINE = "the deepspeed engine is not built yet: pipeline_stages runs the native pipeline engine"
_ZERO = "[deepspeed] enable = true, or a --deepspeed_config with a zero stage, shards through accelerate's plugin"
_OPTION = "--deepspeed_config"
# JSON key -> field, for what both may say; "auto" says nothing
_SHARED = {
    "train_micro_batch_size_per_gpu": "training.batch_size",
    "gradient_accumulation_steps": "training.accumulation",
    "gradient_clipping": "training.max_grad_norm",
    "steps_per_print": "?print_every",
}
_ZERO_KEYS = {
    "stage": "deepspeed.zero_stage",
    "stage3_gather_16bit_weights_on_model_save": "deepspeed.zero3_save_16bit",
}
# what DeepSpeed decides by itself here: the numbers of a run do not hang on it
_TUNING = frozenset({
    "overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions", "reduce_bucket_size",
    "allgather_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "sub_group_size",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "round_robin_gradients",
})  # fmt: skip
_SAID_ELSEWHERE = {
    "optimizer": "name it in [optimizer] of the TOML file", "scheduler": "name it as lr_scheduler in the TOML file",
    "fp16": "set dtype = 'float16' in [model]", "bf16": "set dtype = 'bfloat16' in [model]",
    "train_batch_size": "it is computed from micro_batch_size_per_gpu, gradient_accumulation_steps and the number of devices",
}  # fmt: skip


def local_place(bare: Mapping[str, str], line: Layer) -> None:
    """Put --local_rank and --master_port where the environment has none; a contradiction is a fault."""
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    for name in ("local_rank", "master_port"):
        text = bare.get(name)
        if text is None or (name == "local_rank" and text == "-1"):
            continue
        variable = name.upper()
        environment_value = os.environ.get(variable, "").strip()
        if not text.isdecimal():
            line.faults.append(Fault(f"--{name}", f"must be a number, got {text!r}"))
        elif environment_value and environment_value != text:
            line.faults.append(
                Fault(f"--{name}", f"{text} contradicts {variable}={environment_value} of the environment", "give one")
            )
        elif not environment_value and started:
            os.environ[variable] = text
            line.notes.append(f"--{name}: taken as {variable}={text}, which the launcher did not set")
        elif not environment_value and text != "0" and name == "local_rank":
            what = f"{text}, but the environment has no RANK and no WORLD_SIZE"
            line.faults.append(Fault(f"--{name}", what, "start with torchrun, or leave it out"))
        elif not environment_value:
            line.notes.append(f"--{name}: no effect: this is a single process")


def deepspeed(bare: Mapping[str, str], line: Layer, lower: Mapping[str, Any]) -> None:
    """Take --deepspeed, and the JSON of --deepspeed_config, which must not say otherwise than the TOML file.

    lower: what the layers below say.
    """
    is_asked_for = "deepspeed" in bare or lower.get("?deepspeed")
    if "deepspeed_config" not in bare:
        if is_asked_for and not lower.get("deepspeed.enable"):
            stages = lower.get("training.pipeline_stages", 1)
            how = _PIPELINE if isinstance(stages, int) and stages > 1 else f"{_NATIVE}; {_ZERO}"
            line.notes.append(f"{'--deepspeed' if 'deepspeed' in bare else 'engine = deepspeed'}: {how}")
        return
    path = Path(bare["deepspeed_config"])
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        line.faults.append(Fault(f"{_OPTION}={path}", "no such file", "give DeepSpeed's JSON file"))
        return
    except (OSError, ValueError) as error:
        line.faults.append(Fault(f"{_OPTION}={path}", f"cannot be read as JSON: {error}"))
        return
    if not isinstance(settings, dict):
        line.faults.append(Fault(f"{_OPTION}={path}", f"must be an object, got {show(settings)}"))
        return
    _take(path, settings, line, lower)


def _take(path: Path, settings: dict[str, Any], line: Layer, lower: Mapping[str, Any]) -> None:
    def set_field(key: str, field: str, value: Any) -> None:
        if value == "auto" or value is None:
            return
        origin = f"{path} {key}"
        if field in lower and lower[field] != value:
            what = f"contradicts the run's configuration: {show(value)} here, {show(lower[field])} there"
            line.faults.append(Fault(origin, what, 'set it once; "auto" here leaves it open'))
        else:
            line.put(field, value, KeyValue("", key, value, origin)) if field[0] != "?" else line.set(
                field, value, origin
            )

    zero = settings.get("zero_optimization", {})
    zero = zero if isinstance(zero, dict) else {}
    sharded = zero.get("stage", 0) != 0
    for key, value in settings.items():
        if key in _SHARED:
            set_field(key, _SHARED[key], value)
        elif key in ("fp16", "bf16"):
            _precision(path, key, value, line, lower)
        elif key == "zero_optimization" or (key in _SAID_ELSEWHERE and value == "auto"):
            continue
        elif key in _SAID_ELSEWHERE:
            line.faults.append(Fault(f"{path} {key}", "is not read from here", _SAID_ELSEWHERE[key]))
        else:
            known = (*_SHARED, *_SAID_ELSEWHERE, "zero_optimization")
            remedy = did_you_mean(key, known) or f"known are {', '.join(known)}"
            line.faults.append(Fault(f"{path} {key}", "is not a known key", remedy))
    if sharded:
        origin = f"{path} zero_optimization.stage"
        line.set("deepspeed.enable", True, origin)
        line.set("training.engine", "accelerate", origin)
        line.notes.append(f"{origin}: runs DeepSpeed through accelerate's plugin")
    else:
        line.notes.append(f"{_OPTION}={path}: no zero stage above 0; {_NATIVE}")
    for key, value in zero.items():
        zero_key = f"zero_optimization.{key}"
        if key in _ZERO_KEYS:
            if sharded:
                set_field(zero_key, _ZERO_KEYS[key], value)
        elif key in ("offload_optimizer", "offload_param") and isinstance(value, dict):
            for inner, one in value.items():
                target = {"device": f"deepspeed.{key}_device", "nvme_path": f"deepspeed.{key}_nvme_path"}.get(inner)
                if target and one != "none":
                    set_field(f"{zero_key}.{inner}", target, one)
                elif target is None and inner != "pin_memory":
                    line.faults.append(Fault(f"{path} {zero_key}.{inner}", "is not a known key", "device, nvme_path"))
        elif key in _TUNING:
            line.notes.append(f"{path} {zero_key}: no effect: accelerate's plugin chooses it")
        else:
            known = (*_ZERO_KEYS, "offload_optimizer", "offload_param", *sorted(_TUNING))
            line.faults.append(Fault(f"{path} {zero_key}", "is not a known key", did_you_mean(key, known)))


def _precision(path: Path, key: str, value: Any, line: Layer, lower: Mapping[str, Any]) -> None:
    """{"enabled": true} says what dtype says; loss scales and the like are ours."""
    enabled = value.get("enabled") if isinstance(value, dict) else value
    here = lower.get("training.mixed_precision", "no")
    if enabled is True and here != key:
        what = f"is enabled, but the run computes in {'fp32' if here == 'no' else here}"
        line.faults.append(Fault(f"{path} {key}", what, _SAID_ELSEWHERE[key]))
    elif enabled is False and here == key:
        line.faults.append(Fault(f"{path} {key}", f"is not enabled, but dtype asks for {here}", "set it once"))
