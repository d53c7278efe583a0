"""Pictures from weights that are finished: the same walk as training's samples, written with how they were drawn."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import difftrain
from difftrain.config.schema.families import drawn_frames, learns_flow, row_of
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault, TrainingFault
from difftrain.device.choice import choose
from difftrain.distributed.ranks import Ranks
from difftrain.hub.fetch import fetch
from difftrain.io.clip_files import CLIP_SUFFIXES
from difftrain.io.files import write_bytes
from difftrain.models.registry import make_family
from difftrain.models.weights.adapter_files import AdapterChoice
from difftrain.sampling.draw import GridPicture, draw_one, drawn_size, evaluating, grid_of
from difftrain.sampling.edits import SourcePicture, check_references, read_image_file
from difftrain.sampling.png import parameters, png_bytes
from difftrain.sampling.prompts import Prompt, PromptEntry, PromptFile, prompts_of_lines, read_prompts, set_field
from difftrain.train.drawing import references_of, sampler_of
from difftrain.train.drawn_clips import write_drawn
from difftrain.train.inference.model import AS_SAMPLES, Inference, load_model

if TYPE_CHECKING:
    from PIL.Image import Image

    from difftrain.config import TrainConfig
    from difftrain.contracts import Drawer
    from difftrain.train.inference.weights_path import WeightsPath

log = logging.getLogger("difftrain")
PNG, GRID, CLIP = ".png", "grid.png", ".mp4"
# fields that weights say of themselves, where nobody gives them
_SAID_BY_WEIGHTS = ("model.prediction_type", "noise.zero_terminal_snr", "model.clip_skip")


@dataclass(frozen=True)
class GenerateRequest:
    """What is to be drawn, from what, and where to.

    fields: of every prompt that does not say them itself, by flag: (kohya's name, value). explicit: fields of the
    configuration that somebody gave. count: pictures of each prompt, with seeds that follow one another.
    """

    weights: WeightsPath
    output: Path
    lines: tuple[str, ...] = ()
    file: Path | None = None
    fields: dict[str, tuple[str, Any]] = field(default_factory=dict)
    count: int = 1
    image: Path | None = None
    mask: Path | None = None
    strength: float = 0.75
    adapters: tuple[AdapterChoice, ...] = ()
    ema: str = AS_SAMPLES
    explicit: frozenset[str] = frozenset()
    overwrite: bool = False


def generate(cfg: TrainConfig, request: GenerateRequest) -> list[Path]:
    """Draw and write; return the files. Raises ConfigFault before weights are read wherever that can be."""
    # --- what is asked, before a device is touched or a weight is read
    cfg = _of_run(cfg, request)
    prompts = prompts_of(cfg, request)
    source = _source(request)
    cfg = _fetched(cfg, request)
    cfg = _as_weights_say(cfg, request)
    outputs = planned(
        request, prompts.prompts, cfg.training.seed, [_frames(cfg, request, one) for one in prompts.prompts]
    )
    outputs[0].parent.mkdir(parents=True, exist_ok=True)

    # --- the model
    if cfg.training.threads:
        torch.set_num_threads(cfg.training.threads)
    device = choose(cfg.training.device)
    model = load_model(cfg, request.weights, device, ema=request.ema, adapters=request.adapters)
    drawer = model.drawer
    chosen = [_sized(drawer, prompt, source) for prompt in prompts.prompts for _ in range(request.count)]
    for note in (*prompts.notes, *model.notes, *_of_sizes(drawer, chosen[:: request.count], source)):
        log.info("%s", note)

    # --- pictures, each written as soon as it is there
    return list(_drawn(model, drawer, request, chosen, source, outputs))


def _drawn(
    model: Inference, drawer: Drawer, request: GenerateRequest, prompts: list[Prompt], source: SourcePicture | None,
    outputs: list[Path],
) -> Iterator[Path]:  # fmt: skip
    cfg, device = model.cfg, model.device
    about = {"version": difftrain.__version__, **model.about}
    if request.image is not None:
        about |= {"image": request.image.name, "strength": request.strength}
    if request.mask is not None:
        about["mask"] = request.mask.name
    singles, grid = outputs[: len(prompts)], outputs[-1]
    images: list[Image] = []
    facts: list[dict[str, Any]] = []
    for number, prompt in enumerate(_with_seeds(prompts, request.count, cfg.training.seed)):
        picture = _one(model, drawer, prompt, source)
        images.append(picture.image)
        facts.append(picture.facts(prompt, about))
        if picture.clip is not None and singles[number].suffix != PNG:
            yield write_drawn(singles[number], picture.clip, facts[-1])
        elif len(outputs) != 1 or len(prompts) == 1:
            yield write_bytes(singles[number], png_bytes(picture.image, parameters(facts[-1]), facts[-1]))
        log.info("%d of %d, seed %d on %s", number + 1, len(prompts), picture.seed, device.kind)
    if len(prompts) > 1 or len(outputs) > len(prompts):
        yield write_bytes(grid, png_bytes(grid_of(images), parameters(facts[0]), facts))


def _one(model: Inference, drawer: Drawer, prompt: Prompt, source: SourcePicture | None) -> GridPicture:
    """Draw one picture as a sample of the training is drawn. Raises TrainingFault where it is no numbers."""
    precision = model.cfg.training.mixed_precision
    with evaluating(drawer.modules), model.device.autocast(precision):
        picture = draw_one(drawer, prompt, sampler=sampler_of(model.cfg), seed=model.cfg.training.seed, source=source)
    if not picture.is_finite:
        wider = {"fp16": f"; {option('training.mixed_precision', 'bf16')} overflows later"}.get(precision, "")
        raise TrainingFault(
            f"the result for {prompt.prompt!r} has non-finite values, in mixed precision {precision}{wider}"
        )
    return picture


# --- prompts


def prompts_of(cfg: TrainConfig, request: GenerateRequest) -> PromptFile:
    """Read the prompts, from the command line or a file. Raises ConfigFault with everything that cannot be drawn."""
    defaults = PromptEntry()
    for flag, (name, value) in request.fields.items():
        set_field(defaults, name, value, flag)
    faults = [Fault(*fault.partition(": ")[::2]) for fault in defaults.faults]
    how: dict[str, Any] = {
        "flow": learns_flow(cfg),
        "guided": row_of(cfg).has("model.guidance"),
        "references": references_of(cfg),
        "clips": row_of(cfg).clips is not None,
        "option": {"sample.prompts": "--prompts", "sample.sampler": "--sampler"}.__getitem__,
        "defaults": defaults,
    }
    prompts = PromptFile()
    try:
        if request.file is not None:
            prompts = read_prompts(request.file, sampler_of(cfg), **how)
        if request.lines:
            lines = prompts_of_lines(request.lines, "--prompt", sampler_of(cfg), **how)
            prompts = PromptFile((*lines.prompts, *prompts.prompts), (*lines.notes, *prompts.notes))
    except ConfigFault as error:
        raise ConfigFault([*faults, *error.faults]) from None
    if faults:
        raise ConfigFault(faults)
    check_references(prompts.prompts)
    return prompts


def _with_seeds(prompts: Sequence[Prompt], count: int, seed: int | None) -> Iterator[Prompt]:
    """Give the pictures of one prompt seeds that follow one another."""
    for number, prompt in enumerate(prompts):
        first = prompt.seed if prompt.seed is not None else (seed or 0)
        yield replace(prompt, seed=(first + number % count) % 2**64)


def _sized(drawer: Drawer, prompt: Prompt, source: SourcePicture | None) -> Prompt:
    """Draw a prompt without a size in that of the picture that it begins at."""
    if source is None or prompt.width or prompt.height:
        return prompt
    return replace(prompt, width=source.image.width, height=source.image.height)


def _of_sizes(drawer: Drawer, prompts: Sequence[Prompt], source: SourcePicture | None) -> Iterator[str]:
    """Say which size is drawn in place of one that is asked for, and to which a picture is brought."""
    notes = set()
    for prompt in prompts:
        height, width = drawn_size(drawer, prompt)
        requested = (prompt.width or width, prompt.height or height)
        if requested != (width, height):
            notes.add(
                f"{requested[0]} x {requested[1]} px is sampled as {width} x {height}: sides are multiples of {drawer.unit}"
            )
        elif source is not None and source.image.size != (width, height):
            notes.add(f"the image of {source.image.width} x {source.image.height} px is resized to {width} x {height}")
        asked = prompt.frame_count
        if source is None and asked and (frames := drawer.frames_of(asked)) != asked:
            notes.add(f"{asked} frames are sampled as {frames}: the model draws some numbers of frames only")
    yield from sorted(notes)


# --- files


def planned(
    request: GenerateRequest, prompts: Sequence[Prompt], seed: int | None, frames: Sequence[int] = ()
) -> list[Path]:
    """Return the files to be written: of a file it alone, of a folder a single each, then the grid of several or of clips.

    frames: of each prompt, 1 of a picture. Raises ConfigFault where a file already exists and must not be replaced, or
    cannot hold what is drawn.
    """
    repeated = [prompt for prompt in prompts for _ in range(request.count)]
    counts = [count for count in frames or [1] * len(prompts) for _ in range(request.count)]
    suffix = request.output.suffix.lower()
    if suffix in CLIP_SUFFIXES and (len(repeated) > 1 or counts[0] == 1):
        what = f"'{request.output}' is one clip, and " + (
            "an image is drawn" if counts[0] == 1 else f"{len(repeated)} are"
        )
        raise ConfigFault([Fault("--output", what, "a folder, or a .png; --frames=N draws clips of models that do")])
    if suffix in (PNG, *CLIP_SUFFIXES):
        paths = [request.output]
    else:
        seeded = zip(_with_seeds(repeated, request.count, seed), counts)
        paths = [
            request.output / f"{number:03d}_{one.seed}{PNG if count == 1 else CLIP}"
            for number, (one, count) in enumerate(seeded)
        ]
        paths += [request.output / GRID] if len(repeated) > 1 or counts[0] > 1 else []
    taken = [path for path in paths if path.exists()]
    if taken and not request.overwrite:
        more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
        raise ConfigFault([Fault("--output", f"'{taken[0]}'{more} already exists", "another name, or --overwrite")])
    if folders := [path for path in taken if path.is_dir()]:
        raise ConfigFault([Fault("--output", f"'{folders[0]}' is a folder", "give another name")])
    return paths


def _frames(cfg: TrainConfig, request: GenerateRequest, prompt: Prompt) -> int:
    return 1 if request.image is not None else drawn_frames(cfg, prompt.frame_count)


def _source(request: GenerateRequest) -> SourcePicture | None:
    """Read the picture to begin at, and the mask. Raises ConfigFault."""
    if request.image is None:
        return None
    image = read_image_file(request.image, "--image")
    mask = read_image_file(request.mask, "--mask") if request.mask is not None else None
    if mask is not None and mask.size != image.size:
        what = f"{request.mask} is {mask.width} x {mask.height} px, the image {image.width} x {image.height}"
        raise ConfigFault([Fault("--mask", what, "white is redrawn, black is kept; same size as the image")])
    return SourcePicture(image, request.strength, mask)


# --- the configuration


def _of_run(cfg: TrainConfig, request: GenerateRequest) -> TrainConfig:
    """Take the seed that a run drew; its device, its engine and its prompts are not this command's."""
    training: dict[str, Any] = {} if "training.device" in request.explicit else {"device": "auto"}
    if request.weights.kind == "checkpoint" and cfg.training.seed is None:
        from difftrain.checkpoint import load_meta

        training["seed"] = load_meta(request.weights.path).get("seed")
    return cfg.model_copy(update={"training": cfg.training.model_copy(update=training)})


def _fetched(cfg: TrainConfig, request: GenerateRequest) -> TrainConfig:
    """Return the configuration with paths where parts are named by hub ids; a run's as it began with them."""
    from difftrain.checkpoint import RunRecord

    record = RunRecord.read(request.weights.config.parent) if request.weights.config is not None else None
    bare = cfg.model_copy(update={"data": type(cfg.data)()})  # no data are needed
    here, _ = fetch(bare, Ranks(), record.hub if record else {})
    return cfg.model_copy(update={"model": here.model})


def _as_weights_say(cfg: TrainConfig, request: GenerateRequest) -> TrainConfig:
    """Take what weights of others say of themselves, where nobody says it; of a checkpoint its run has said it."""
    if request.weights.kind == "checkpoint":
        return cfg
    family: Any = make_family(cfg)
    for path, value in family.stored_fields().items():
        section, _, name = path.partition(".")
        if path in request.explicit or getattr(getattr(cfg, section), name) == value or path not in _SAID_BY_WEIGHTS:
            continue
        log.info("%s: %s, according to the weights", option(path), json.dumps(value))
        cfg = cfg.model_copy(update={section: getattr(cfg, section).model_copy(update={name: value})})
    return cfg
