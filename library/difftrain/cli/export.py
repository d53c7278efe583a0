"""`difftrain export`: weights in another layout or precision, or random ones, a tensor at a time.

The model is never in memory: modules are built on the meta device, and every weight goes from its source to the file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from difftrain.config import rules, rules_paths
from difftrain.config.door import enter
from difftrain.config.flag import Flag, on
from difftrain.config.flags import FLAGS, KOHYA
from difftrain.config.help import entries
from difftrain.config.parse import Parsed, resolve
from difftrain.contracts.errors import ConfigFault, Fault

SUFFIXES = {"safetensors": ".safetensors", "ckpt": ".ckpt", "diffusers": "", "diffusers_safetensors": ""}
OUTPUT = on("output", "str", "", "file or folder to write; a file's suffix is added where it lacks it")
TABLE: dict[str, Flag] = {
    "output": OUTPUT,
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
    return enter(prog, argv, lambda: read(argv), work, lambda: _help(prog))


def read(argv: list[str]) -> Parsed:
    """Read the command line.

    Raises: ConfigFault with every fault.
    """
    faults: list[Fault] = []
    if not any(word.partition("=")[0] == OUTPUT.option for word in argv):
        faults.append(Fault(OUTPUT.option, "is missing", OUTPUT.help))
    try:
        parsed = resolve(argv, TABLE, (rules.model, rules.no_metadata, rules_paths.weights, rules_paths.size))
    except ConfigFault as error:
        raise ConfigFault([*faults, *error.faults]) from None
    if faults := faults or list(_target_faults(parsed)):
        raise ConfigFault(faults)
    return parsed


def layout_of(parsed: Parsed) -> str:
    """Return the layout that is asked for; safetensors where none is."""
    return parsed.config.save.model_as or "safetensors"


def _stem(parsed: Parsed) -> Path:
    """Return the output without the layout's suffix."""
    output = Path(parsed.bare["output"])
    return output.with_name(output.name.removesuffix(SUFFIXES[layout_of(parsed)]))


def _target_faults(parsed: Parsed) -> Iterator[Fault]:
    """Never replace a folder that is no model, and write no layout under another one's suffix."""
    output, layout = Path(parsed.bare["output"]), layout_of(parsed)
    suffix = SUFFIXES[layout]
    other = [name for name, ending in SUFFIXES.items() if ending and ending != suffix and output.name.endswith(ending)]
    if other:
        yield Fault("--output", f"{str(output)!r} is named as {other[0]}, and would be {layout}", "see --save_model_as")
    target = _stem(parsed).with_name(_stem(parsed).name + suffix)
    if suffix and target.is_dir():
        yield Fault("--output", f"{str(target)!r} is a folder", f"{layout} is one file")
    if not suffix and _is_something_else(target):
        what = f"{str(target)!r} is there and is no diffusers folder, so it is not replaced"
        yield Fault("--output", what, "choose another name")


def _is_something_else(path: Path) -> bool:
    """Say whether a path holds what an export of a folder must not replace."""
    if not path.is_dir():
        return path.exists()
    return not (path / "model_index.json").is_file() and any(path.iterdir())


def work(parsed: Parsed) -> int:
    """Stream the weights into the file."""
    from difftrain.device.choice import hold_autoload

    hold_autoload()
    import torch

    from difftrain.models.registry import make_family

    cfg = parsed.config
    dtypes = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    family = make_family(cfg)
    parts = family.load(meta=True)
    path = family.export(
        family.stream(parts),
        parts,
        layout_of(parsed),
        _stem(parsed),
        dtype=dtypes[cfg.save.precision] if cfg.save.precision else None,
        metadata=None if cfg.save.no_metadata else family.metadata(_stem(parsed).name, time.time()),
    )
    print(path)
    return 0


def _help(prog: str) -> str:
    return (
        f"usage: {prog} --output=FILE --pretrained_model_name_or_path=PATH | --init_from_config=SIZE [--flag=value ...]\n\n"
        + entries(TABLE.values())
    )
