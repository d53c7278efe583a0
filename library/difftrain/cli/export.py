"""`difftrain export`: weights in another layout or precision, averages of a run, or random ones, a tensor at a time.

The model is never in memory: modules are built on the meta device, and every weight goes from its source to the file.
With --ema_width the configuration of a run's folder holds, flags win, and trained weights are made from its snapshots.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from difftrain.cli.words import LOADING, alive, writing
from difftrain.cli.words import run_folder as run_folder_of
from difftrain.config.door import enter
from difftrain.config.parse_flags import Parsed, resolve
from difftrain.config.render.help import entries
from difftrain.config.rules import objective, paths, run
from difftrain.config.schema.families import row_of
from difftrain.config.schema.validate import build_section
from difftrain.config.spellings.flags import FLAGS, KOHYA
from difftrain.config.spellings.row import Row
from difftrain.contracts.errors import ConfigFault, Fault
from difftrain.report.progress import SIGNS

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig

SUFFIXES = {"safetensors": ".safetensors", "ckpt": ".ckpt", "diffusers": "", "diffusers_safetensors": ""}
OUTPUT = Row("output", "str", "", "file or folder to write; a missing suffix is added")
WIDTH = Row(
    "ema_width", "float", "", "with RUN_FOLDER: weights averaged over this fraction of the run, from its snapshots"
)
T5 = Row("tokenizer3_path", "str", "model.tokenizer3", "of sd3: T5's tokenizer.json, or a folder with it")
RUN_CONFIG = "config.toml"
TABLE: dict[str, Row] = {
    "output": OUTPUT,
    "ema_width": WIDTH,
    "tokenizer3_path": T5,
    **{
        name: FLAGS[name]
        for name in (
            "family", "init_from_config", "pretrained_model_name_or_path", "vae", "tokenizer1_path", "tokenizer2_path",
            "save_model_as", "use_safetensors", "save_precision", "v_parameterization", "seed", "no_metadata",
            *(flag.name for flag in KOHYA if flag.to.startswith("metadata.")),
        )
    },
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Write what is asked for and print its path."""
    prog = "difftrain export"
    return enter(prog, argv, lambda: read(argv), alive(prog, work, LOADING), lambda: _help(prog))


def read(argv: list[str]) -> Parsed:
    """Read the command line.

    Raises: ConfigFault with every fault.
    """
    faults: list[Fault] = []
    names = {word.partition("=")[0] for word in argv}
    if OUTPUT.option not in names:
        faults.append(Fault(OUTPUT.option, "is missing", OUTPUT.help))
    table, folder = TABLE, None
    if WIDTH.option in names:
        folder, argv = run_folder(argv)
        faults += _run_faults(folder)
    if folder is not None and not faults:
        table = TABLE | {"config": FLAGS["config"]}
        argv = [f"--config={folder / RUN_CONFIG}", *argv]
    judged = () if faults and WIDTH.option in names else (run.model,)  # a run's own configuration names its model
    try:
        parsed = resolve(argv, table, (*judged, run.no_metadata, objective.layout, paths.weights, paths.size))
    except ConfigFault as error:
        raise ConfigFault([*faults, *error.faults]) from None
    faults = faults or [*_width_faults(parsed), *_target_faults(parsed)]
    if faults:
        raise ConfigFault(faults)
    return parsed


def run_folder(argv: list[str]) -> tuple[Path | None, list[str]]:
    """Take RUN_FOLDER out of a command line: the word that is no flag, and no value of the flag before it."""
    for position, word in enumerate(argv):
        before = argv[position - 1] if position else "="
        takes = before.startswith("--") and "=" not in before and TABLE.get(before[2:], WIDTH).kind != "switch"
        if not word.startswith("--") and not takes:
            return Path(word), argv[:position] + argv[position + 1 :]
    return None, argv


def _run_faults(folder: Path | None) -> Iterator[Fault]:
    if folder is None:
        yield Fault(WIDTH.option, "needs RUN_FOLDER", "difftrain export --ema_width=0.08 RUN_FOLDER --output=FILE")
    elif not (folder / RUN_CONFIG).is_file():
        yield Fault(
            "RUN_FOLDER", f"{str(folder)!r} is not the folder of a run: it has no {RUN_CONFIG}", _remedy(folder)
        )


def _remedy(folder: Path) -> str:
    try:
        run_folder_of(folder, RUN_CONFIG)
    except ConfigFault as error:
        return error.faults[0].remedy
    return "give its --output_dir"


def _width_faults(parsed: Parsed) -> Iterator[Fault]:
    """Judge the width as a run's own --ema_profiles are."""
    if "ema_width" not in parsed.bare:
        return
    _, misfits = build_section("ema", {"profiles": (width_of(parsed),)})
    for *_, what, remedy in misfits:
        yield Fault(WIDTH.option, what, remedy or WIDTH.help)


def width_of(parsed: Parsed) -> float:
    """Return the width that is asked for."""
    return float(parsed.bare["ema_width"])


def layout_of(parsed: Parsed) -> str:
    """Return the layout that is asked for; safetensors where none is."""
    return str(parsed.config.save.model_as or row_of(parsed.config).defaults.get("save.model_as", "safetensors"))


def _stem(parsed: Parsed) -> Path:
    """Return the output without the layout's suffix."""
    output = Path(parsed.bare["output"])
    return output.with_name(output.name.removesuffix(SUFFIXES[layout_of(parsed)]))


def _target_faults(parsed: Parsed) -> Iterator[Fault]:
    """Never replace a folder that is no model, and write no layout under another one's suffix."""
    output, layout = Path(parsed.bare["output"]), layout_of(parsed)
    suffix = SUFFIXES[layout]
    endings = [
        name for name, ending in SUFFIXES.items() if ending and ending != suffix and output.name.endswith(ending)
    ]
    if endings:
        yield Fault(
            "--output", f"{str(output)!r} is named like {endings[0]}, and would be {layout}", "see --save_model_as"
        )
    target = _stem(parsed).with_name(_stem(parsed).name + suffix)
    if suffix and target.is_dir():
        yield Fault("--output", f"{str(target)!r} is a folder", f"{layout} is one file")
    if not suffix and _is_something_else(target):
        what = f"{str(target)!r} exists and is not a diffusers folder, so it is not replaced"
        yield Fault("--output", what, "choose another name")


def _is_something_else(path: Path) -> bool:
    """Say whether a path holds what an export of a folder must not replace."""
    if not path.is_dir():
        return path.exists()
    return not (path / "model_index.json").is_file() and any(path.iterdir())


def work(parsed: Parsed) -> int:
    """Stream the weights into the file."""
    from difftrain.device.choice import hide_unusable_npu, hold_autoload

    hold_autoload()
    hide_unusable_npu("cpu")
    import torch

    from difftrain.models.registry import make_family

    SIGNS.now("writing weights")
    cfg = _fetched(parsed)
    dtypes = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    family = make_family(cfg)
    # on the meta device: weights are streamed, one tensor in memory at a time
    parts = family.load(meta=True)
    weights = family.stream(parts)
    if "ema_width" in parsed.bare:
        weights = _averaged(parsed, weights)
    with writing(Path(parsed.bare["output"])):
        path = family.export(
            weights,
            parts,
            layout_of(parsed),
            _stem(parsed),
            dtype=dtypes[cfg.save.precision] if cfg.save.precision else None,
            metadata=None if cfg.save.no_metadata else family.metadata(_stem(parsed).name, time.time()),
        )
    print(path)
    return 0


def _fetched(parsed: Parsed) -> TrainConfig:
    """Return the configuration with paths where the model is named by hub ids; a run's are taken as it began with them."""
    from difftrain.checkpoint import RunRecord
    from difftrain.distributed.ranks import Ranks
    from difftrain.hub.fetch import fetch

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("difftrain").setLevel(logging.INFO)
    cfg = parsed.config
    record = RunRecord.read(Path(parsed.bare["config"]).parent) if "ema_width" in parsed.bare else None
    model = cfg.model_copy(update={"data": type(cfg.data)()})  # no data are needed
    folder = not SUFFIXES[layout_of(parsed)]
    here, _ = fetch(model, Ranks(), record.hub if record else {}, complete=folder)  # a single file has no tokenizers
    return cfg.model_copy(update={"model": here.model})


def _averaged(parsed: Parsed, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Put the reconstructed average in place of what was trained; say how near it comes to the asked for one."""
    from difftrain.train.averages import Reconstruction, snapshots_of

    stored = snapshots_of(Path(parsed.bare["config"]).parent)
    average = Reconstruction(stored, width_of(parsed))
    says = f"width {width_of(parsed):g} after {average.updates} updates from {len(stored)} snapshots"
    print(f"{says}: its profile is matched to {average.error:.2%}", file=sys.stderr)
    return average.put_into(weights)


def _help(prog: str) -> str:
    return (
        f"usage: {prog} --output=FILE --pretrained_model_name_or_path=PATH | --init_from_config=SIZE [--flag=value ...]\n"
        f"       {prog} --output=FILE --ema_width=X RUN_FOLDER [--flag=value ...]\n\n" + entries(TABLE.values())
    )
