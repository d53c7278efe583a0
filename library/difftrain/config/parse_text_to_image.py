"""The command line of diffusers' train_text_to_image.py -> TrainConfig, with every fault at once.

Precedence: field default < this door's < --config TOML < accelerate's launcher < flag.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from difftrain.config import accelerate_environment, hub_ids, launch_options
from difftrain.config.door import enter
from difftrain.config.layers import Layer
from difftrain.config.parse_flags import RULES, Parsed, resolve_flags, scan
from difftrain.config.paths import expanded, is_folder, toml_entry_point
from difftrain.config.resolve import Door, Resolution
from difftrain.config.rules.finding import Rule
from difftrain.config.schema.validate import choices_of, default_of
from difftrain.config.spellings.spelling import meaning, option, speaking
from difftrain.config.spellings.text_to_image import ADAM, DEFAULTS, FLAGS, NUM_EPOCHS, WARMUP_STEPS
from difftrain.models.registry import FAMILIES
from difftrain.models.row import FamilyRow

PIPELINE = "StableDiffusionPipeline"  # of the models that the example trains
_MODEL, _RATE, _TYPE = "model.pretrained", "optimizer.learning_rate", "optimizer.type"
_TRACKERS = choices_of("logging.log_with")


@dataclass(frozen=True)
class WeightsIdentity:
    """Say what a folder, file or repository of weights is, as far as it tells without a tensor being read.

    family: "" where it does not tell. prediction_type: as its scheduler says. faults: why it cannot be trained here, each
    with what would be right.
    """

    family: str = ""
    prediction_type: str = ""
    faults: tuple[tuple[str, str], ...] = ()


Identify = Callable[[str], WeightsIdentity]


def open_text_to_image_door(
    prog: str, argv: list[str], work: Callable[[Parsed], int], identify: Identify, rules: Sequence[Rule] = ()
) -> int:
    """Parse a command line of the example, say what is worth saying, do the work, and return the exit code.

    identify: says what weights are; it may ask a hub. rules: those of rooms that configuration must not know.
    """

    def help() -> str:
        from difftrain.config.render.help import text_to_image_help

        return text_to_image_help(prog)

    with speaking("text_to_image"):
        return enter(prog, argv, lambda: parse(argv, identify, rules), work, help)


def parse(argv: list[str], identify: Identify, extra_rules: Sequence[Rule] = ()) -> Parsed:
    """Read a command line. Raises ConfigFault with every fault of flags, environment, TOML file and their combination."""
    with speaking("text_to_image"):
        environment = accelerate_environment.layer_of(os.environ)
        _local_rank(argv, environment)
        door = Door(together=partial(_together, identify=identify), defaults=_defaults, remedy=_help)
        return resolve_flags(argv, FLAGS, (*RULES, *extra_rules), door, [environment])


def _local_rank(argv: list[str], layer: Layer) -> None:
    """Take --local_rank where the launcher has set no variable, which wins in the example."""
    words = scan(argv, FLAGS).words.get("local_rank")
    if words and "LOCAL_RANK" not in os.environ:
        launch_options.local_place({"local_rank": words[-1]}, layer)


def _defaults(row: FamilyRow) -> dict[str, Any]:
    own = {path: value for path, value in row.defaults.items() if path.startswith("model.")}
    return {**DEFAULTS, **own}


def _help(path: str) -> str:
    flag = next((flag for flag in FLAGS.values() if flag.to == path), None)
    return meaning(flag) if flag and not choices_of(path) else ""


# ------------------------------------------------------------------ what flags mean together


def _together(out: Resolution, layers: Sequence[Layer], identify: Identify) -> None:
    _model(out, identify)
    _family(out)
    _data(out)
    _length(out)
    _rate(out)
    _adam(out)
    _outputs(out)
    _resume(out)


def _model(out: Resolution, identify: Identify) -> None:
    """Find out which family the weights are of and what they predict; put a revision behind the id of a hub."""
    revision, unet = out.pop("?revision"), out.pop("?non_ema_revision")
    weights = out.values.get(_MODEL)
    if unet is not None and unet != revision:
        what = f"{unet} is another revision than that of the weights, {revision or 'which is not given'}"
        out.fault("?non_ema_revision", what, "give --revision that trains on what --non_ema_revision named")
    if revision is not None:
        if not weights or hub_ids.lies_here(weights):
            out.note("?revision", "has no effect: the weights are a local folder or file")
        elif (hub_id := hub_ids.read(weights)) is None or hub_id.revision:
            out.fault("?revision", f"cannot be used with {weights!r}", "give organisation/name of a hub")
        else:
            weights = out.values[_MODEL] = f"{hub_id.repo}@{revision}" + (f"/{hub_id.path}" if hub_id.path else "")

    # weights that are missing are named by a rule; random ones are of the family that the example is for
    if not weights or hub_ids.missing(weights):
        out.values.setdefault("model.family", _example_families()[0])
        return
    known = "model.family" in out.values and "model.prediction_type" in out.values
    identity = WeightsIdentity() if known else identify(weights)
    for what, remedy in identity.faults:
        out.fault(_MODEL, what, remedy)
    if "model.family" not in out.values:
        if not identity.family:
            if not identity.faults:
                out.fault(_MODEL, f"{weights!r} does not tell which model it is", f"give {option('model.family')}")
            out.values["model.family"] = _example_families()[0]
        else:
            out.values["model.family"] = identity.family
    if identity.prediction_type and "model.prediction_type" not in out.values:
        out.values["model.prediction_type"] = identity.prediction_type


def _family(out: Resolution) -> None:
    """A family that learns a flow is not noised as the example does it."""
    row = FAMILIES.get(str(out.values["model.family"]))
    if row is not None and row.objective != "ddpm":
        what = f"{row.title} is a flow-matching model, and this script trains noise prediction over 1000 steps"
        out.fault("model.family", what, f"{toml_entry_point()} trains it")


def _example_families() -> list[str]:
    """Return the families of the example's pipeline; of all that are noised alike, where there is none."""
    own = [name for name, row in FAMILIES.items() if row.pipeline == PIPELINE]
    return own or [name for name, row in FAMILIES.items() if row.objective == "ddpm"]


def _data(out: Resolution) -> None:
    """One folder or repository of data; of --dataset_name the train split, and a folder in it where one is named."""
    name, config, folder = (out.pop(f"?{key}") for key in ("dataset_name", "dataset_config_name", "train_data_dir"))
    if name is None:
        if config is not None:
            out.fault("?dataset_config_name", "needs --dataset_name", "it is a sub-folder of it")
        if folder is not None:
            out.set("data.dirs", (folder,), "?train_data_dir")
        return
    dataset = str(name)
    for field, inner in (
        ("?dataset_config_name", config if config != "default" else None),
        ("?train_data_dir", folder),
    ):
        if inner is None:
            continue
        if hub_ids.lies_here(dataset) and not is_folder(Path(expanded(dataset)) / inner):
            out.fault(
                field, f"no such folder in {dataset}: {inner!r}", "a sub-folder of --dataset_name, or leave it out"
            )
            return
        dataset = str(Path(expanded(dataset)) / inner) if hub_ids.lies_here(dataset) else f"{dataset}/{inner}"
    out.set("data.dirs", (dataset,), "?dataset_name")
    out.values.setdefault("data.split", "train")


def _length(out: Resolution) -> None:
    """Steps win over epochs."""
    epochs, steps = "training.max_epochs", "training.max_steps"
    if steps in out.values:
        if epochs in out.values and epochs in out.origins:
            out.note(epochs, f"has no effect: {option(steps)} wins")
        out.pop(epochs)
        out.origins.pop(epochs, None)
    else:
        out.values.setdefault(epochs, NUM_EPOCHS)


def _rate(out: Resolution) -> None:
    """Scale the rate by what a step holds; a schedule that warms up does so in 500 steps."""
    if out.pop("?scale_lr"):
        world = os.environ.get("WORLD_SIZE", "1")
        processes = int(world) if world.isdecimal() else 1
        product = processes * 1.0
        for path in (_RATE, "training.batch_size", "training.accumulation"):
            value = out.values.get(path, DEFAULTS.get(path, default_of(path)))
            product *= value if isinstance(value, int | float) else 1.0  # what is no number is a fault of its own
        out.set(_RATE, product, "?scale_lr")
        out.note("?scale_lr", f"the rate is {product:g}")
    warmup, schedule = "optimizer.warmup_steps", str(out.values.get("optimizer.scheduler", "constant"))
    if schedule.lower() != "constant":
        out.values.setdefault(warmup, WARMUP_STEPS)
    elif out.pop(warmup):
        out.note(warmup, "has no effect on constant; constant_with_warmup has a warm-up")


def _adam(out: Resolution) -> None:
    """Give AdamW its arguments; another optimizer has its own."""
    values = {name: out.pop(f"?{name}") for name in ADAM}
    kind = str(out.values.get(_TYPE, default_of(_TYPE)))
    if kind.lower() not in ("adamw", "adamw8bit"):
        for name in [name for name, value in values.items() if value is not None]:
            out.fault(f"?{name}", f"has no effect on {kind}", "give its arguments as args in [optimizer] of --config")
        return
    value = {name: ADAM[name] if values[name] is None else values[name] for name in ADAM}
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= value[name] < 1:
            out.fault(f"?{name}", f"must lie in 0 to 1, below 1, got {value[name]:g}")
    for name in ("adam_weight_decay", "adam_epsilon"):
        if not value[name] >= 0:
            out.fault(f"?{name}", f"must be at least 0, got {value[name]:g}")
    out.values.setdefault("optimizer.args", (
        f"betas=({value['adam_beta1']!r}, {value['adam_beta2']!r})", f"eps={value['adam_epsilon']!r}",
        f"weight_decay={value['adam_weight_decay']!r}",
    ))  # fmt: skip


def _outputs(out: Resolution) -> None:
    """Trackers, their folder below the run's, and the repository that the pipeline is sent to."""
    folder = str(out.values.get("save.output_dir", DEFAULTS["save.output_dir"]))
    tracker, logs = out.pop("?report_to"), out.values.get("logging.logging_dir")
    if tracker is None:
        if find_spec("tensorboard"):
            out.values.setdefault("logging.log_with", "tensorboard")
    elif tracker not in _TRACKERS:
        what = "comet_ml is not offered" if tracker == "comet_ml" else f"no such tracker: {tracker!r}"
        out.fault("?report_to", what, f"one of {', '.join(_TRACKERS)}")
    else:
        out.set("logging.log_with", tracker, "?report_to")
    if logs is not None and "logging.logging_dir" in out.origins:
        out.values["logging.logging_dir"] = str(Path(folder) / logs)

    push, repository = out.pop("?push_to_hub"), out.pop("?hub_model_id")
    if push:
        out.set("hub.repo_id", repository or Path(folder).name, "?hub_model_id" if repository else "?push_to_hub")
    elif repository is not None:
        out.note("?hub_model_id", "has no effect without --push_to_hub")


def _resume(out: Resolution) -> None:
    """The newest whole checkpoint of the output folder, or one of it by its name alone."""
    resume = out.values.get("save.resume")
    if resume == "latest":
        out.values["save.resume"] = "auto"
    elif resume and resume != "auto" and not is_folder(resume):
        inside = Path(str(out.values.get("save.output_dir", DEFAULTS["save.output_dir"]))) / Path(resume).name
        if is_folder(inside):
            out.values["save.resume"] = str(inside)
            return
        numbers = sorted(int(match[1]) for path in inside.parent.glob("checkpoint-*")
                         if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and path.is_dir())  # fmt: skip
        here = ", ".join(f"checkpoint-{number}" for number in numbers[-4:])
        holds = f"{inside.parent} holds {here}" if here else f"{inside.parent} holds no checkpoint"
        out.fault("save.resume", f"no such folder: {resume!r}", f"latest, or one that is there: {holds}")


__all__ = ["PIPELINE", "Identify", "WeightsIdentity", "open_text_to_image_door", "parse"]
