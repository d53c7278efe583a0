"""`difftrain generate`: pictures from a run's checkpoint, an export, or others' weights, as training's samples are drawn.

The command line is read twice: its own flags first, then with the configuration that the weights are of, which for a
checkpoint is its run's, and for others' weights the family's defaults. Flags win over either.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.cli.export import T5
from difftrain.cli.words import LOADING, alive, writing
from difftrain.config.door import enter, print_notes
from difftrain.config.parse_flags import Parsed, resolve
from difftrain.config.render.help import entries
from difftrain.config.rules import engine, objective, paths
from difftrain.config.rules.adapter import scaled
from difftrain.config.rules.optimizer import one_of
from difftrain.config.spellings.flags import FLAGS
from difftrain.config.spellings.row import Row
from difftrain.contracts.errors import ConfigFault, Fault
from difftrain.device.choice import KINDS
from difftrain.io.clip_files import CLIP_SUFFIXES
from difftrain.report.progress import SIGNS

if TYPE_CHECKING:
    from difftrain.train.inference.generate import GenerateRequest
    from difftrain.train.inference.weights_path import WeightsPath

PROG = "difftrain generate"
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff")
# flag -> kohya's name of the field of a prompt that it is the default of
FIELDS = {
    "negative": "negative_prompt", "width": "width", "height": "height", "seed": "seed", "steps": "sample_steps",
    "cfg": "scale", "guidance": "guidance_scale", "flow_shift": "flow_shift", "control": "control_image", "frames": "frame_count",
}  # fmt: skip
OWN: dict[str, Row] = {row.name: row for row in (
    Row("weights", "str", "", "a run's folder or checkpoint, a diffusers folder, or a single file"),
    Row("base", "str", "", "for a file with only the denoiser: the diffusers folder with the other parts"),
    Row("ema", "str", "", "for a checkpoint, its averaged weights: --ema the moving average, --ema=0.05 that of this relative"
        " width, --ema=no the raw weights; not given: as for the samples during training"),
    Row("adapter", "str", "", "FILE[:SCALE], LoRA of diffusers, PEFT, ComfyUI or kohya, merged at a scale (1); may be given several times"),
    Row("prompt", "str", "", "the prompt, optionally with kohya's options (--w --h --d --s --l --n --ss --fs --f --ci); may be"
        " given several times"),
    Row("prompts", "str", "", "file of prompts: .txt, .toml or .json, as for --sample_prompts"),
    Row("negative", "str", "", "negative prompt, for prompts that have none"),
    Row("seed", "int", "", "seed for prompts that have none; not given: the run's, or 0"),
    Row("count", "int", "", "images per prompt, with consecutive seeds"),
    Row("steps", "int", "", "sampler steps; 30 by default"),
    Row("width", "int", "", "not given: the run's, or the model's own up to 512, or that of --image"),
    Row("height", "int", "", "as the width"),
    Row("frames", "int", "", "frames of a clip, of models that draw clips; not given: those of the run's longest clips, or 1, an image"),
    Row("cfg", "float", "", "classifier-free guidance scale; 1 or less: off; 7.5 by default"),
    Row("guidance", "float", "", "guidance value passed to a guidance-distilled model"),
    Row("flow_shift", "float", "", "time shift of a flow model, in place of the model's own"),
    Row("sampler", "str", "sample.sampler"),
    Row("control", "str", "", "reference image of a model that edits images, for prompts without --ci; may be given several times"),
    Row("control_size", "str", "data.control_size", "target: references are brought to the size that is drawn; area: to that of the family's"
        " pipeline; not given: as in the training, target for weights alone"),
    Row("image", "str", "", "image to start from (img2img)"),
    Row("mask", "str", "", "mask for --image (inpainting): white is redrawn, black is kept; same size as the image"),
    Row("strength", "float", "", "denoising strength for --image, above 0 and up to 1; 0.75 by default"),
    Row("output", "str", "", "a .png (of several images a grid; of a clip some frames), an .mp4 or .webp of one clip, or a folder (each image or clip,"
        " and a grid)"),
    Row("overwrite", "switch", "", "replace existing files"),
)}  # fmt: skip
TABLE: dict[str, Row] = {
    **OWN,
    **{
        name: FLAGS[name]
        for name in (
            "config", "family", "vae", "tokenizer1_path", "tokenizer2_path", "device", "threads", "mixed_precision",
            "full_fp16", "full_bf16", "half_vae", "v_parameterization", "zero_terminal_snr", "clip_skip",
            "max_token_length", "disable_mmap_load_safetensors",
        )
    },
    "tokenizer3_path": T5,
    "t5_max_length": Row("t5_max_length", "int", "model.t5_max_length"),
    "llm_max_length": Row("llm_max_length", "int", "model.llm_max_length"),
}  # fmt: skip
RULES = (objective.other_family, engine.full_precision, paths.weights, one_of("training.device", ("auto", *KINDS)))


def main(argv: list[str]) -> int:
    """Draw what is asked for and print the files."""
    argv = ["--ema=yes" if word == "--ema" and _stands_alone(argv, at) else word for at, word in enumerate(argv)]
    return enter(PROG, argv, lambda: read(argv), alive(PROG, lambda parsed: work(parsed, argv), LOADING), _help)


def _stands_alone(argv: list[str], at: int) -> bool:
    return at + 1 == len(argv) or argv[at + 1].startswith("--")


def read(argv: list[str]) -> Parsed:
    """Read the command line by itself. Raises ConfigFault with every fault that needs no weights."""
    try:
        parsed = resolve(_without(argv, "config"), TABLE, ())
    except ConfigFault as error:
        raise ConfigFault([*error.faults, *_missing({word[2:].partition("=")[0] for word in argv})]) from None
    if faults := [*_missing(set(parsed.words)), *_faults(parsed)]:
        raise ConfigFault(faults)
    return parsed


def _missing(flags: set[str]) -> Iterator[Fault]:
    for name in ("weights", "output"):
        if name not in flags:
            yield Fault(TABLE[name].option, "is missing", TABLE[name].help)
    if not flags & {"prompt", "prompts"}:
        yield Fault("--prompt", "is missing", "--prompt=TEXT, or --prompts=FILE")


def _faults(parsed: Parsed) -> Iterator[Fault]:
    """Judge what can be judged before anything is read."""
    bare = parsed.bare
    for name in ("prompts", "image", "mask"):
        if name in bare and not Path(bare[name]).expanduser().is_file():
            yield Fault(f"--{name}", f"no such file: '{bare[name]}'", TABLE[name].help)
    if "mask" in bare and "image" not in bare:
        yield Fault("--mask", "needs --image", "the image of which a part is redrawn")
    if "strength" in bare and "image" not in bare:
        yield Fault("--strength", "needs --image", "the image to start from")
    if "image" in bare and int(bare.get("frames", 1)) > 1:
        yield Fault("--frames", "has no use beside --image", "clips are drawn from noise alone: leave one of them out")
    if not 0 < float(bare.get("strength", 1)) <= 1:
        yield Fault("--strength", f"got {bare['strength']}", "above 0 and up to 1")
    if int(bare.get("count", 1)) < 1:
        yield Fault("--count", f"got {bare['count']}", "from 1 up")
    if "output" not in bare:  # named with all that is missing
        return
    output = Path(bare["output"]).expanduser()
    if output.suffix.lower() in CLIP_SUFFIXES:
        if output.is_file() and "overwrite" not in bare:
            yield Fault("--output", f"'{output}' already exists", "another name, or --overwrite")
    elif output.suffix.lower() in PICTURES[1:]:
        yield Fault(
            "--output", f"'{output}' is not a .png", "images are written as PNG, which records how they were made"
        )
    elif output.suffix.lower() == PICTURES[0] and output.is_file() and "overwrite" not in bare:
        yield Fault("--output", f"'{output}' already exists", "another name, or --overwrite")
    elif output.suffix.lower() != PICTURES[0] and output.is_file():
        yield Fault("--output", f"'{output}' is a file, and not a .png", "a .png, or a folder")


def work(parsed: Parsed, argv: list[str]) -> int:
    """Find out what the weights are of, and draw."""
    from difftrain.device.choice import calm_threads, hide_unusable_npu, hold_autoload
    from difftrain.train.inference.weights_path import locate

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("difftrain").setLevel(logging.INFO)
    source = locate(parsed.bare["weights"], "--weights", _config_of(argv))
    hold_autoload()
    calm_threads()
    hide_unusable_npu(parsed.config.training.device)
    resolved, source = _of_weights(parsed, argv, source)
    resolved = _with_references(resolved, len(parsed.words.get("control", ())))
    _refuse_sampler(parsed, resolved)

    from difftrain.train.inference.generate import generate

    SIGNS.now("loading the weights and drawing")
    request = request_of(parsed, resolved, source)
    with writing(request.output):
        for path in generate(resolved.config, request):
            print(path)
    return 0


def _config_of(argv: list[str]) -> str | None:
    """Return the value of --config, which the first reading leaves out."""
    for at, word in enumerate(argv):
        if word.startswith("--config="):
            return word.partition("=")[2]
        if word == "--config" and at + 1 < len(argv):
            return argv[at + 1]
    return None


def _of_weights(parsed: Parsed, argv: list[str], source: WeightsPath) -> tuple[Parsed, WeightsPath]:
    """Read the command line again, over the configuration that the weights are of. Raises ConfigFault."""
    remaining = _without(argv, "config")
    if source.kind == "checkpoint":
        resolved = resolve([f"--config={source.config}", *remaining], TABLE, RULES)
        return resolved, source
    config = [f"--config={named}"] if (named := _config_of(argv)) else []
    family, whole_file = parsed.words.get("family", [""])[-1] or source.family, True
    if source.kind == "file":
        from difftrain.models.weights.detect import family_of_file

        detected = None if family else family_of_file(source.path, "--weights")
        family, whole_file = (detected.name, detected.is_whole) if detected else (family, "base" not in parsed.bare)
        source = dataclasses.replace(source, family=family)
        alone = not whole_file and not config and "base" not in parsed.bare
        if alone and (beside := _run_beside(source, remaining)) is not None:
            return beside, source
    resolved = resolve([*config, f"--family={family}", *_without(remaining, "family")], TABLE, RULES)
    return dataclasses.replace(resolved, config=_named(resolved.config, parsed, source, whole_file)), source


def _run_beside(source: WeightsPath, rest: list[str]) -> Parsed | None:
    """Return the configuration of the run in whose folder a denoiser's file lies, with the file in it.

    Nothing where there is no such run, where it is of another family, or where it began without weights.
    """
    from difftrain.train.inference.weights_path import CONFIG

    above = (source.path.parent, source.path.parent.parent)
    folder = next((path for path in above if (path / CONFIG).is_file()), None)
    if folder is None:
        return None
    own = resolve([f"--config={folder / CONFIG}"], TABLE, ()).config.model
    if own.family != source.family or not own.pretrained:
        return None
    run = resolve([f"--config={folder / CONFIG}", *_without(rest, "family")], TABLE, RULES)
    model = run.config.model
    note = f"{source.path.name} holds the denoiser alone: other parts are those of its run, {model.pretrained}"
    print_notes(PROG, [note])
    changed = model.model_copy(update={"transformer": str(source.path), "init_from_config": None})
    return dataclasses.replace(run, config=run.config.model_copy(update={"model": changed}))


def _named(cfg: Any, parsed: Parsed, source: WeightsPath, whole_file: bool) -> Any:
    """Return the configuration with the weights in it. Raises ConfigFault where other parts are missing."""
    base = parsed.bare.get("base")
    if source.kind == "file" and not whole_file:
        if base is None:
            what = f"{source.path} contains only the denoiser of {cfg.model.family}"
            raise ConfigFault([Fault("--weights", what, "give the diffusers folder with the other parts as --base")])
        named = {"pretrained": base, "transformer": str(source.path)}
    elif base is not None:
        raise ConfigFault([Fault("--base", f"has no use: {source.path} contains a complete model", "leave it out")])
    else:
        named = {"pretrained": str(source.path)}
    return cfg.model_copy(update={"model": cfg.model.model_copy(update={**named, "init_from_config": None})})


def _refuse_sampler(parsed: Parsed, resolved: Parsed) -> None:
    """A sampler that is given is drawn with, or refused; only a default gives way to a flow's own. Raises ConfigFault."""
    from difftrain.config.schema.families import learns_flow
    from difftrain.sampling.samplers import sampler_fault

    names = parsed.words.get("sampler")
    if names and (fault := sampler_fault(names[-1], flow=learns_flow(resolved.config))):
        raise ConfigFault([Fault("--sampler", fault)])


def _with_references(resolved: Parsed, count: int) -> Parsed:
    """Show a model that also draws without references as many as are named; others, and runs, have a number of their own.

    Raises ConfigFault where there are more than it takes.
    """
    from difftrain.config.schema.families import row_of

    cfg, row = resolved.config, row_of(resolved.config)
    if row.control_least or not row.control or not count:
        return resolved
    if count > row.control:
        what = f"names {count} images: {row.title} is shown at most {row.control}"
        raise ConfigFault([Fault("--control", what, f"{row.control} or fewer")])
    data = cfg.data.model_copy(update={"num_control": count})
    return dataclasses.replace(resolved, config=cfg.model_copy(update={"data": data}))


def _without(argv: list[str], name: str) -> list[str]:
    """Leave a flag and its value out of a command line."""
    left: list[str] = []
    skips = False
    for word in argv:
        if skips and not word.startswith("--"):
            skips = False
            continue
        skips = word == f"--{name}"
        if not skips and not word.startswith(f"--{name}="):
            left.append(word)
    return left


def request_of(parsed: Parsed, resolved: Parsed, source: WeightsPath) -> GenerateRequest:
    """Put together what is to be drawn."""
    from difftrain.train.inference.generate import GenerateRequest
    from difftrain.train.inference.model import AS_SAMPLES

    bare, words = parsed.bare, parsed.words
    converted: dict[str, Any] = {"int": int, "float": float, "str": str}
    fields: dict[str, tuple[str, Any]] = {
        f"--{flag}": (name, converted[TABLE[flag].kind](bare[flag])) for flag, name in FIELDS.items() if flag in bare
    }
    if "control" in words:
        fields["--control"] = (FIELDS["control"], list(words["control"]))
    path = {name: Path(bare[name]).expanduser() if name in bare else None for name in ("prompts", "image", "mask")}
    return GenerateRequest(
        weights=source,
        output=Path(bare["output"]).expanduser(),
        lines=tuple(words.get("prompt", ())),
        file=path["prompts"],
        fields=fields,
        count=int(bare.get("count", 1)),
        image=path["image"],
        mask=path["mask"],
        strength=float(bare.get("strength", 0.75)),
        adapters=adapters_of(words.get("adapter", ())),
        ema=bare.get("ema", AS_SAMPLES),
        explicit=frozenset(TABLE[name].to for name in resolved.words) - {""},
        overwrite="overwrite" in bare,
    )


def adapters_of(texts: Iterable[str]) -> tuple[Any, ...]:
    """Read FILE[:SCALE], each. Raises ConfigFault where what is behind the colon of a file is no number."""
    from difftrain.models.weights.adapter_files import AdapterChoice

    words = [(text, *scaled(text)) for text in texts]
    if unread := [text for text, _, scale in words if scale is None]:
        raise ConfigFault(
            [Fault("--adapter", f"{text!r} has no number behind its colon", "FILE:0.8") for text in unread]
        )
    return tuple(AdapterChoice(Path(path), float(scale or 0), "--adapter") for _, path, scale in words)


def _help() -> str:
    return f"usage: {PROG} --weights=PATH --prompt=TEXT --output=FILE.png|FOLDER [--flag=value ...]\n\n" + entries(
        TABLE.values()
    )
