"""`difftrain launch LAYOUT RECIPE`: what the launchers under test/ do, from an installed package too.

The two words may come in either order, flags before or behind them. Imports no torch.
"""

from __future__ import annotations

from difftrain.config.door import guard
from difftrain.config.schema.names import did_you_mean
from difftrain.contracts.errors import ConfigFault, Fault
from difftrain.launch import main as launchers
from difftrain.launch.flags import COMMAND, OWNED

PROG = "difftrain launch"
LAYOUTS = {"1p": "1m_1p", "np": "1m_np", "nm": "nm_np"}
RECIPES = {name.removesuffix("_sd1-4"): name for name in launchers.RECIPES}


def main(argv: list[str]) -> int:
    """Launch a recipe in a layout; return the exit code, or become the process that starts the ranks."""
    both_named = set(argv) & set(LAYOUTS) and set(argv) & set(RECIPES)
    if not argv or (set(argv) & {"-h", "--help"} and not both_named):
        print(usage())
        return 0 if argv else 2
    return guard(PROG, lambda: _launch(argv))


def usage() -> str:
    """Return the help of the command."""
    lines = [f"usage: {PROG} LAYOUT RECIPE [flags]", "", "layouts:"]
    lines += [
        "  1p   one process, on one device",
        "  np   one process per device of this machine, or --nproc_per_node of them",
        "  nm   several machines: the same command on each; which one it is comes from --nnodes, --node_rank and",
        "       --master_ip, or from Slurm, Kubernetes, Volcano, ModelArts or torchrun's PET_* variables",
        "",
        "recipes:",
        "  sdxl             SDXL, with the flags of kohya's sdxl_train.py",
        "  sd3_light        SD3-Light from a TOML recipe",
        "  sd3_light_cache  its cache stage only: encode, train nothing",
        "  text_to_image    the Stable Diffusion 1.4 baseline",
        "",
        "With no model and no data the embedded demo runs:",
        f"  {PROG} 1p sdxl",
        f"  {PROG} np sdxl --model_name=FOLDER --dataset_name=FOLDER --batch_size=4",
        f"  srun --ntasks-per-node=1 {PROG} nm sdxl --model_name=FOLDER --dataset_name=FOLDER",
        f"{PROG} 1p sdxl --help lists the flags of a recipe.",
    ]
    return "\n".join(lines)


def _launch(argv: list[str]) -> int:
    layout, recipe, remaining = _parts(argv)
    try:
        return launchers.launch(RECIPES[recipe], LAYOUTS[layout], remaining, f"{PROG} {layout} {recipe}", COMMAND)
    except KeyboardInterrupt:
        return 130


def _parts(argv: list[str]) -> tuple[str, str, list[str]]:
    """Return layout, recipe and the other words. Raises: ConfigFault."""
    faults: list[Fault] = []
    words: dict[str, str] = {}
    remaining = list(argv)
    for what, known in (("LAYOUT", LAYOUTS), ("RECIPE", RECIPES)):
        # a recipe's name behind a flag is that flag's value: only words in front or behind another positional count
        position = next(
            (at for at, word in enumerate(remaining) if word in known and not _is_value(remaining, at)), None
        )
        if position is not None:
            words[what] = remaining.pop(position)
    stray = next(
        (word for at, word in enumerate(remaining[:2]) if not word.startswith("-") and not _is_value(remaining, at)), ""
    )
    missing = [what for what in ("LAYOUT", "RECIPE") if what not in words]
    for what in missing:
        known = LAYOUTS if what == "LAYOUT" else RECIPES
        remedy = f"give one of {', '.join(known)}"
        if stray:
            faults.append(Fault(what, f"{stray!r} is not one", did_you_mean(stray, known) or remedy))
            stray = ""
        else:
            faults.append(Fault(what, "is missing", remedy))
    if stray and not missing:
        faults.append(Fault(repr(stray), "is an unexpected argument", f"{PROG} LAYOUT RECIPE [flags]"))
    if faults:
        raise ConfigFault(faults)
    return words["LAYOUT"], words["RECIPE"], remaining


def _is_value(words: list[str], at: int) -> bool:
    """Tell whether a word is the value of the flag before it."""
    before = words[at - 1] if at else ""
    switches = {f"--{name}" for flag in OWNED if flag.kind == "switch" for name in flag.names}
    return before.startswith("--") and "=" not in before and before not in switches
