"""Launch one recipe on this machine: `python library/difftrain/launch/main.py RECIPE LAYOUT [flags]`.

launch_common.sh calls it once the packages and the device's environment are there.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT / "library")  # this file runs as a script

from difftrain.config import TrainConfig  # noqa: E402
from difftrain.config.digest import digest  # noqa: E402
from difftrain.launch import flags, light, machines, occupant, recipes  # noqa: E402
from difftrain.launch.flags import LaunchFlags  # noqa: E402
from difftrain.launch.machines import Where  # noqa: E402

LAYOUTS = {"1m_1p": 1, "1m_8p": 8, "nm_np": None, "1m_np": None}  # cards of each machine; None: those that are found
CACHES = {"sd3_light_cache"}  # recipes that train nothing; their folder must not be in the way of those that do


def choose(name: str, flags: LaunchFlags, where: Where) -> recipes.LaunchRecipe:
    """Return the job of a recipe: kohya's command line, or train.py's files."""
    return recipes.choose(name, flags, where) if name in recipes.RECIPES else light.choose(name, flags, where)


def script(recipe_name: str, layout: str) -> str:
    """Return the name of the launcher that was called."""
    if recipe_name in CACHES:
        return f"cache_{layout}_{recipe_name.removesuffix('_cache')}.sh"
    return f"pretrain_full_{layout}_{recipe_name}.sh"


class LaunchRefused(Exception):
    """Carry every fault of a launch; exit code 2."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(f"  {fault}" for fault in faults))


@dataclass(frozen=True)
class LaunchPlan:
    """One launch, decided: where it runs, what it runs, where its files go."""

    where: Where
    recipe: recipes.LaunchRecipe
    output: Path
    index: int
    door: Path
    words: list[str]

    @property
    def log(self) -> Path:
        """Return the file that has everything the run prints."""
        return self.output / f"train_{self.index}.log"


def decide(recipe_name: str, layout: str, flags: LaunchFlags, environ: dict[str, str]) -> LaunchPlan:
    """Work out everything before anything is done.

    Raises: LaunchRefused with every fault of the launcher's flags and of the training script's.
    """
    index = flags.number("device_id", machines.device_index(environ))
    devices = machines.find_devices()
    where = machines.where(layout, LAYOUTS[layout], flags, devices, environ)
    recipe = choose(recipe_name, flags, where)
    output = ROOT / "test" / "output" / (f"cache_{index}" if recipe_name in CACHES else str(index))
    if layout == "nm_np":
        output /= f"node{where.node_rank}"
    words = recipe.line(flags, output)
    faults = [*flags.faults, *where.faults, *recipe.faults]
    if not recipe.faults:
        faults += recipe.door_faults(recipe.checkable(words))
    if faults:
        raise LaunchRefused(faults)
    return LaunchPlan(where, recipe, output, index, ROOT / "sd_scripts_xl" / recipe.door, words)


def sentences(launch: LaunchPlan, flags: LaunchFlags) -> list[str]:
    """Return what was chosen and why."""
    from_elsewhere = [(name, origin) for name, origin in flags.origins.items() if not origin.startswith("--")]
    return [
        *(
            f"{name}={flags.values[name]} comes from {origin}"
            for name, origin in from_elsewhere
            if name in flags.values
        ),
        launch.where.sentence,
        *launch.recipe.notes,
        f"files go to {launch.output}",
    ]


def dry_run(launch: LaunchPlan) -> int:
    """Let the training script print its plan, for as many processes as the launch would start."""
    code = launch.recipe.prepare(dry=True)
    if code:
        return code
    environ = {**os.environ, **launch.where.dry_environment()}
    words = launch.recipe.dry_words(launch.words)
    return subprocess.run([sys.executable, str(launch.door), *words], env=environ).returncode


def clear_the_way(launch: LaunchPlan, cfg: TrainConfig) -> None:
    """Keep an unfinished run of this configuration; move a finished or different one aside.

    Raises: LaunchRefused where another process is training in the folder.
    """
    occupied = occupant.look(launch.output, cfg, launch.where.world_size)
    if occupied.running:
        raise LaunchRefused([f"{occupied.sentence} (stop it, or give another --device_id)"])
    if not occupied.in_the_way:
        if occupied.sentence:
            print(f"{launch.output} {occupied.sentence}", flush=True)
        return
    root = ROOT / "test" / "output"
    base = root / launch.output.relative_to(root).parts[0]
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = base.with_name(f"{base.name}.{stamp}") / launch.output.relative_to(base)
    aside.parent.mkdir(parents=True, exist_ok=True)
    launch.output.rename(aside)
    print(f"{launch.output} {occupied.sentence}: moved aside to {aside}", flush=True)


def main(argv: list[str]) -> int:
    """Launch; return the exit code, or become the process that starts the ranks."""
    recipe_name, layout, *rest = argv
    if {"--help", "-h"} & set(rest):
        print(flags.usage(script(recipe_name, layout), recipe_name))
        return 0
    given_flags = flags.read(rest, os.environ)
    try:
        launch = decide(recipe_name, layout, given_flags, dict(os.environ))
        lines = sentences(launch, given_flags)
        print("\n".join(lines), flush=True)
        if given_flags.values.get("dry_run"):
            return dry_run(launch)
        code = launch.recipe.prepare(dry=False)
        if code:
            return code
        cfg = launch.recipe.parse(launch.words)
        clear_the_way(launch, cfg)
    except LaunchRefused as refused:
        print(f"cannot start:\n{refused}", file=sys.stderr)
        return 2
    start(launch, digest(cfg, launch.where.world_size), lines)
    return 0


def start(launch: LaunchPlan, config_digest: str, lines: list[str]) -> None:
    """Become the process that starts the ranks; what was said so far opens the log."""
    launch.output.mkdir(parents=True, exist_ok=True)
    occupant.write_note(launch.output, config_digest, finished=False)
    environ = launch.where.environment(dict(os.environ))
    ranks = [*launch.where.torchrun(), str(launch.door), *launch.words]
    command = "torchrun " + shlex.join(ranks)
    print(command, flush=True)
    with launch.log.open("a", encoding="utf-8") as log:
        log.writelines(f"{line}\n" for line in (*lines, command))
    workers = Path(__file__).with_name("workers.py")
    os.execve(
        sys.executable, [sys.executable, str(workers), str(launch.log), config_digest, json.dumps(ranks)], environ
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
