"""`difftrain init FAMILY`: a diffusers folder of random weights, the same from the same seed.

`difftrain init sd3_light` begins SD3-Light: its VAE and text encoders are those of another SD3 folder, by a second name
of their files where the disk has such, or, of the size `tiny`, small ones that come with difftrain.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.cli.export import T5
from difftrain.cli.words import LOADING, alive, writing
from difftrain.config.door import enter
from difftrain.config.parse_flags import Parsed, resolve
from difftrain.config.render.help import entries
from difftrain.config.rules import paths
from difftrain.config.schema.names import did_you_mean
from difftrain.config.spellings.flags import FLAGS
from difftrain.config.spellings.row import Row
from difftrain.contracts.errors import ConfigFault, Fault
from difftrain.models.registry import FAMILIES
from difftrain.report.progress import SIGNS

if TYPE_CHECKING:
    from difftrain.config import TrainConfig

# what is made beside the families: a word of its own for a family that begins with only its denoiser at random
_BEGINNINGS = {f"{name}_light": name for name, row in FAMILIES.items() if row.networks_by_train_type}
KINDS = (*_BEGINNINGS, *FAMILIES)
SIZES = tuple(dict.fromkeys(size for kind in (*_BEGINNINGS.values(), *FAMILIES) for size in FAMILIES[kind].sizes))
SIZE = Row(
    "size",
    "str",
    "model.init_from_config",
    f"{', '.join(SIZES)} (the family's own sizes), or a JSON file: how many blocks, how wide",
)
OUTPUT = Row("output", "str", "", "the folder to write")
FROM = Row(
    "from",
    "str",
    "model.pretrained",
    "of sd3_light: SD3 folder of diffusers: source of VAE, encoders, tokenizers, and widths",
)
TABLE: dict[str, Row] = {
    "size": SIZE,
    "output": OUTPUT,
    "from": FROM,
    "seed": Row("seed", "int", "training.seed", "seed of the random weights; 0 by default"),
    **{name: FLAGS[name] for name in ("save_precision", "tokenizer1_path", "tokenizer2_path")},
    "tokenizer3_path": T5,
}


def main(argv: list[str]) -> int:
    """Write the folder and print its path."""
    prog = "difftrain init"
    return enter(prog, argv, lambda: read(argv), alive(prog, work, LOADING), lambda: _help(prog))


def read(argv: list[str]) -> Parsed:
    """Read the command line. Raises ConfigFault with every fault."""
    kind, remaining = _kind(argv)
    faults = list(_kind_faults(kind))
    family = _BEGINNINGS.get(kind or "", kind if kind in FAMILIES else next(iter(_BEGINNINGS.values())))
    try:
        parsed = resolve(
            [*remaining, f"--family={family}"], TABLE | {"family": FLAGS["family"]}, (paths.weights, paths.size)
        )
    except ConfigFault as error:
        raise ConfigFault([*faults, *error.faults]) from None
    begins = kind not in FAMILIES
    faults += _faults(parsed, begins=begins)
    if faults:
        raise ConfigFault(faults)
    parsed.bare["begins"] = "yes" if begins else ""
    return parsed


def _kind(argv: list[str]) -> tuple[str | None, list[str]]:
    """Take what is to be made out of a command line: its first word."""
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    return None, argv


def _kind_faults(kind: str | None) -> Iterator[Fault]:
    if kind is None:
        yield Fault("KIND", "is missing", f"difftrain init {KINDS[0]} --size=tiny --output=FOLDER")
    elif kind not in KINDS:
        yield Fault(
            repr(kind), "is not something init makes", did_you_mean(kind, KINDS) or f"known: {', '.join(KINDS)}"
        )


def _faults(parsed: Parsed, *, begins: bool) -> Iterator[Fault]:
    size, source = parsed.config.model.init_from_config, parsed.config.model.pretrained
    if size is None:
        yield Fault(SIZE.option, "is missing", SIZE.help)
    elif source and not begins:
        what = "has no effect here: all weights of the folder are random"
        yield Fault(FROM.option, what, "leave it out; difftrain init sd3_light takes parts of another folder")
    elif begins and size in SIZES and size != "tiny" and not source:
        what = "is missing: this size uses a pretrained VAE and text encoders"
        yield Fault(FROM.option, what, f"{FROM.help}; --size=tiny needs none")
    if "output" not in parsed.bare:
        yield Fault(OUTPUT.option, "is missing", OUTPUT.help)
        return
    output = Path(parsed.bare["output"])
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        yield Fault(OUTPUT.option, f"{str(output)!r} already exists", "choose another name, or remove it")


def work(parsed: Parsed) -> int:
    """Stream the weights into the folder."""
    from difftrain.device.choice import hide_unusable_npu, hold_autoload

    hold_autoload()
    hide_unusable_npu("cpu")
    path = Path(parsed.bare["output"])
    with writing(path):
        (begin if parsed.bare["begins"] else make)(parsed.config, path)
    print(path)
    return 0


def make(cfg: TrainConfig, path: Path) -> Path:
    """Write a folder of a family whose every weight is random, a function of the seed."""
    from difftrain.models.registry import make_family

    return _export(make_family(cfg), cfg, path)


def begin(cfg: TrainConfig, path: Path) -> Path:
    """Write the folder of a configuration whose size says the depth, and whose folder, if any, the rest."""
    from difftrain.models.registry import make_family

    train_type = next(iter(FAMILIES[cfg.model.family].networks_by_train_type))
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"train_type": train_type})})
    family: Any = make_family(cfg)
    family.source = family.beginning()
    return _export(family, cfg, path)


def _export(family: Any, cfg: TrainConfig, path: Path) -> Path:
    """Stream the weights of a family's source into a folder."""
    import torch

    dtypes: dict[Any, torch.dtype | None] = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    SIGNS.now("writing weights")
    parts = family.load(meta=True)
    for note in parts.notes:
        print(f"difftrain init: {note}", file=sys.stderr)
    count = sum(param.numel() for param in parts.root.parameters())
    print(f"difftrain init: {count:,} trainable parameters, seed {cfg.training.seed or 0}", file=sys.stderr)
    return Path(
        family.export(family.stream(parts), parts, "diffusers_safetensors", path, dtype=dtypes.get(cfg.save.precision))
    )


def _help(prog: str) -> str:
    return (
        f"usage: {prog} FAMILY --size=tiny --output=FOLDER [--seed=N]    FAMILY: {', '.join(FAMILIES)}\n"
        f"       {prog} sd3_light --size=tiny --output=FOLDER [--seed=N]\n"
        f"       {prog} sd3_light --size=light --from=SD3_FOLDER --output=FOLDER [--seed=N]\n\n"
        + entries(TABLE.values())
    )
