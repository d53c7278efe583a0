"""`difftrain convert`: an adapter (LoRA) in another layout, merged into a model, or taken out of two models.

1. --adapter: its file is read and written for another reader, or for all of them; family and size are found from it.
2. --merge_into: its products are added to a model's weights, which are written as `difftrain export` writes them.
3. --extract_from: the difference of a trained model and its base becomes an adapter of a rank.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.cli.export import SUFFIXES
from difftrain.cli.generate import adapters_of
from difftrain.cli.words import LOADING, alive, writing
from difftrain.config.door import enter
from difftrain.config.parse_flags import Parsed, resolve
from difftrain.config.render.help import entries
from difftrain.config.rules import objective
from difftrain.config.rules.optimizer import one_of
from difftrain.config.spellings.flags import FLAGS
from difftrain.config.spellings.row import Row
from difftrain.contracts.errors import ConfigFault, Fault
from difftrain.device.choice import KINDS
from difftrain.models.row import CLIP_TARGETS
from difftrain.report.progress import SIGNS

if TYPE_CHECKING:
    from difftrain.models.weights.adapter_models import ModelWeights

PROG = "difftrain convert"
LAYOUTS = ("diffusers", "peft", "comfyui", "kohya")
ALL = "all"
RULES = (objective.other_family, one_of("training.device", ("auto", *KINDS)))
_FILE = ".safetensors"
OWN: dict[str, Row] = {row.name: row for row in (
    Row("adapter", "str", "", "LoRA of diffusers, PEFT, ComfyUI or kohya; with --merge_into FILE[:SCALE], may be given several times, of other kinds PEFT's folder too"),
    Row("to", "str", "", f"layout to write: {', '.join(LAYOUTS)}; not given: a folder with all that the family has"),
    Row("merge_into", "str", "", "model to add the adapters to: a diffusers folder, a single file, or a file with only the denoiser"),
    Row("extract_from", "str", "", "trained model, of whose difference to --base a LoRA is made"),
    Row("base", "str", "", "the model that --extract_from was trained from; with --adapter the model that it is for, where its sizes are"
        " no release's"),
    Row("rank", "int", "", "rank of the LoRA that is extracted"),
    Row("output", "str", "", "file or folder to write; a missing suffix is added"),
)}  # fmt: skip
TABLE: dict[str, Row] = {
    **OWN,
    **{name: FLAGS[name] for name in ("family", "save_model_as", "save_precision", "device", "threads", "no_metadata")},
}


def main(argv: list[str]) -> int:
    """Write what is asked for and print its path."""
    return enter(PROG, argv, lambda: read(argv), alive(PROG, lambda parsed: work(parsed, argv), LOADING), _help)


def read(argv: list[str]) -> Parsed:
    """Read the command line. Raises ConfigFault with every fault that needs no file to be opened."""
    parsed = resolve(argv, TABLE, RULES)
    if faults := [*_mode_faults(parsed), *_path_faults(parsed)]:
        raise ConfigFault(faults)
    return parsed


def _mode_faults(parsed: Parsed) -> Iterator[Fault]:
    """Say what contradicts, and what is missing for what is asked."""
    bare, words = parsed.bare, parsed.words
    if "output" not in bare:
        yield Fault("--output", "is missing", OWN["output"].help)
    if "adapter" in words and "extract_from" in bare:
        yield Fault("--extract_from", "contradicts --adapter: it makes a LoRA, and needs none", "give one of the two")
    elif "adapter" not in words and "extract_from" not in bare:
        remedy = (
            "--adapter=FILE, or --extract_from=MODEL --base=MODEL --rank=N; models are converted by difftrain export"
        )
        yield Fault("--adapter", "is missing", remedy)
    if "extract_from" in bare:
        for name in ("base", "rank"):
            if name not in bare:
                yield Fault(f"--{name}", "is missing", OWN[name].help)
    elif "rank" in bare:
        yield Fault("--rank", "needs --extract_from", "an adapter that is converted keeps its rank")
    if int(bare.get("rank", 1)) < 1:
        yield Fault("--rank", f"got {bare['rank']}", "from 1 up")
    for name in ("to", "base", "extract_from"):
        if "merge_into" in bare and name in bare:
            yield Fault(
                f"--{name}", "contradicts --merge_into", "what is written there is a model, see --save_model_as"
            )
    if len(words.get("adapter", ())) > 1 and "merge_into" not in bare:
        yield Fault("--adapter", "is given several times", "several are merged, with --merge_into")
    if "to" in bare and bare["to"] not in (*LAYOUTS, ALL):
        yield Fault("--to", f"got {bare['to']!r}", f"one of {', '.join(LAYOUTS)}")


def _path_faults(parsed: Parsed) -> Iterator[Fault]:
    for name in ("merge_into", "extract_from", "base"):
        if name in parsed.bare and not Path(parsed.bare[name]).expanduser().exists():
            yield Fault(f"--{name}", f"no such file or folder: {parsed.bare[name]!r}", OWN[name].help)
    if "output" in parsed.bare and "merge_into" not in parsed.bare:
        target = _output(parsed)
        if target.suffix == _FILE and target.is_dir():
            yield Fault("--output", f"{str(target)!r} is a folder", f"--to={parsed.bare['to']} is one file")
        elif target.suffix != _FILE and _is_something_else(target):
            yield Fault("--output", f"{str(target)!r} exists and is no folder of an adapter", "choose another name")


def _is_something_else(path: Path) -> bool:
    """Say whether a path holds what a folder of an adapter must not replace."""
    if not path.is_dir():
        return path.exists()
    own = ("adapter_config.json", "pytorch_lora_weights.safetensors")
    return any(path.iterdir()) and not any((path / name).is_file() for name in own)


def _output(parsed: Parsed) -> Path:
    """Return what is written: of one layout a file, but for PEFT's; else a folder."""
    output = Path(parsed.bare["output"]).expanduser()
    if parsed.bare.get("to", ALL) in ("peft", ALL) or output.suffix == _FILE:
        return output
    return output.with_name(output.name + _FILE)


def work(parsed: Parsed, argv: list[str]) -> int:
    """Do one of the three."""
    from difftrain.device.choice import calm_threads, hide_unusable_npu, hold_autoload

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("difftrain").setLevel(logging.INFO)
    hold_autoload()
    calm_threads()
    hide_unusable_npu(parsed.config.training.device)
    with writing(Path(parsed.bare["output"])):
        if "merge_into" in parsed.bare:
            path = _merge(parsed, argv)
        elif "extract_from" in parsed.bare:
            path = _extract(parsed)
        else:
            path = _convert(parsed)
    print(path)
    return 0


# ------------------------------------------------------------------ another layout


def _convert(parsed: Parsed) -> Path:
    """Write an adapter once more; factors and alphas stay as they are, unless a precision is asked for."""
    from difftrain.models.weights.adapter_files import fitting, load_adapter, sort_adapter
    from difftrain.models.weights.adapter_models import identify_adapter

    (choice,) = adapters_of(parsed.words["adapter"])
    SIGNS.now("reading the adapter")
    file = load_adapter(choice)
    if "base" in parsed.bare:
        model = _model(parsed, "base")
        layouts = model.layouts
        pairs = fitting(choice, sort_adapter(choice, file, layouts), layouts)
    else:
        layouts, pairs = identify_adapter(choice, file, parsed.words.get("family", [""])[-1])
    return _write(parsed, layouts, pairs, dict(file.header), _targets_of(file.settings))


def _targets_of(settings: Any) -> tuple[str, ...]:
    """Return the targets that a file names, of whichever part."""
    named = [value for part in settings.values() for key, value in part.items() if key.endswith("target_modules")]
    return tuple(named[0]) if named and isinstance(named[0], list) else ()


def _write(parsed: Parsed, layouts: Any, pairs: Any, header: dict[str, str], targets: tuple[str, ...]) -> Path:
    """Write one layout, or a folder with all."""
    from difftrain.models.weights.adapter_export import described, facts_of, layouts_of, write_all, write_one

    family, to, output = layouts.family, parsed.bare.get("to", ALL), _output(parsed)
    if to != ALL and to not in layouts_of(family):
        what = f"{to} is no layout of {family.row.title}'s adapters"
        raise ConfigFault([Fault("--to", what, f"one of {', '.join(layouts_of(family))}")])
    dtype = _dtype(parsed)
    SIGNS.now("writing the adapter")
    metadata = {} if parsed.config.save.no_metadata else described(family, header)
    facts = facts_of(pairs, targets=targets, dtype=dtype, metadata=metadata)
    if to == ALL:
        return write_all(layouts, pairs, output, output.stem, facts)
    return write_one(layouts, pairs, to, output, facts)


def _dtype(parsed: Parsed) -> Any:
    """Return the precision that is asked for; None: as weights are."""
    from difftrain.models.placeholder import DTYPES

    precision = parsed.config.save.precision
    return None if precision is None else DTYPES[{"float": "no"}.get(precision, precision)]


# ------------------------------------------------------------------ merging


def _merge(parsed: Parsed, argv: list[str]) -> Path:
    """Write a model with adapters in its weights: as export does, or the denoiser's file once more."""
    from difftrain.models.weights.adapter_models import changes_of, merge_file, merged_stream

    model = _model(parsed, "merge_into")
    change = changes_of(adapters_of(parsed.words["adapter"]), model.layouts)
    output = Path(parsed.bare["output"]).expanduser()
    dtype = _dtype(parsed)
    SIGNS.now("writing weights")
    if not model.complete:
        path = output if output.suffix == _FILE else output.with_name(output.name + _FILE)
        return merge_file(model, change, path, dtype)

    # --- the model as export writes it
    import time

    from difftrain.config.schema.families import row_of

    flags = [f"--family={model.family.name}", *(word for word in argv if word.startswith("--save_"))]
    cfg = resolve(flags, TABLE, (objective.layout,)).config
    own = "safetensors" if model.path.is_file() else "diffusers_safetensors"
    layout = str(parsed.config.save.model_as or (own if own in row_of(cfg).layouts else row_of(cfg).layouts[0]))
    if not SUFFIXES[layout] and output.suffix in SUFFIXES.values() and output.suffix:
        what = f"{str(output)!r} is named like a file, and would be a folder: {layout}"
        raise ConfigFault([Fault("--output", what, "see --save_model_as")])
    stem = output.with_name(output.name.removesuffix(SUFFIXES[layout]))
    family: Any = model.family
    parts = family.load(meta=True)
    weights = merged_stream(family, family.stream(parts), change)
    metadata = None if cfg.save.no_metadata else family.metadata(stem.name, time.time())
    return Path(family.export(weights, parts, layout, stem, dtype=dtype, metadata=metadata))


def _model(parsed: Parsed, flag: str) -> ModelWeights:
    """Open the model that a flag names. Raises ConfigFault where it is none, or another family's."""
    from difftrain.models.weights.adapter_models import ModelWeights
    from difftrain.models.weights.detect import family_of_file, family_of_folder

    path, option = Path(parsed.bare[flag]).expanduser(), f"--{flag}"
    named = parsed.words.get("family", [""])[-1]
    SIGNS.now(f"reading {path.name}")
    if path.is_dir():
        return ModelWeights.at(path, option, named or family_of_folder(path, option), complete=True)
    detected = family_of_file(path, option) if not named else None
    if detected is None:
        from difftrain.models.weights.detect import is_complete

        return ModelWeights.at(path, option, named, complete=is_complete(path, option, named))
    return ModelWeights.at(path, option, detected.name, complete=detected.is_whole)


# ------------------------------------------------------------------ extraction


def _extract(parsed: Parsed) -> Path:
    """Write the difference of two models as an adapter, and say how much of it that holds."""
    from difftrain.device.choice import choose
    from difftrain.models.weights.adapter_models import extract

    tuned, base = _model(parsed, "extract_from"), _model(parsed, "base")
    if tuned.family.name != base.family.name:
        what = f"{base.path} holds {base.family.row.title}, --extract_from {tuned.family.row.title}"
        raise ConfigFault([Fault("--base", what, "give the model it was trained from")])
    family = tuned.family
    targets = {family.folder(family.denoiser): family.lora.targets}
    if tuned.complete and base.complete and family.lora.kohya:
        targets |= {folder: CLIP_TARGETS for folder in tuned.layouts.text_folders()}
    rank = int(parsed.bare["rank"])
    device = choose(parsed.config.training.device).torch_device
    made = extract(tuned, base, rank, targets, device, lambda layer: SIGNS.now(f"singular values of {layer}"))
    path = _write(parsed, tuned.layouts, made.pairs, {}, tuple(family.lora.targets))
    print(
        f"rank {rank} holds {made.share:.1%} of the squared difference in {len(made.pairs)} layers, in which lie "
        f"{made.inside:.1%} of it",
        file=sys.stderr,
    )
    return path


def _help() -> str:
    return (
        f"usage: {PROG} --adapter=FILE --output=PATH [--to=LAYOUT] [--family=FAMILY | --base=MODEL]\n"
        f"       {PROG} --adapter=FILE[:SCALE] ... --merge_into=MODEL --output=PATH [--save_precision=bf16]\n"
        f"       {PROG} --extract_from=MODEL --base=MODEL --rank=N --output=PATH [--to=LAYOUT]\n\n"
        + entries(TABLE.values())
    )
