"""Launch one recipe on this machine: what the launchers under test/ and `difftrain launch` do.

`python library/difftrain/launch/main.py RECIPE LAYOUT [flags]` is what launch_common.sh calls once the packages and the
device's environment are there; cli/launch.py calls launch() where the package is installed.
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

if __name__ == "__main__":  # it runs as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from difftrain.config import TrainConfig
from difftrain.config.digest import digest
from difftrain.config.open_files import make_room
from difftrain.config.paths import checkout
from difftrain.config.secrets import to_environment
from difftrain.contracts import ConfigFault
from difftrain.launch import flags, light, machines, occupant, recipes, text_to_image
from difftrain.launch.flags import SCRIPTS, Caller, LaunchFlags
from difftrain.launch.machines import Where

LAYOUTS = {"1m_1p": 1, "1m_8p": 8, "nm_np": None, "1m_np": None}  # cards of each machine; None: those that are found
CACHES = {"sd3_light_cache"}  # recipes that train nothing; their folder must not be in the way of those that do
RECIPES = (*recipes.RECIPES, *light.RECIPES, text_to_image.NAME)
DOORS = {name: "sdxl_pretrain.py" for name in recipes.RECIPES} | {text_to_image.NAME: text_to_image.DOOR}


def choose(name: str, flags: LaunchFlags, where: Where) -> recipes.LaunchRecipe:
    """Return the job of a recipe: kohya's command line, diffusers' example's, or train.py's files."""
    if name == text_to_image.NAME:
        return text_to_image.choose(flags, where)
    return recipes.choose(name, flags, where) if name in recipes.RECIPES else light.choose(name, flags, where)


def script(recipe_name: str, layout: str) -> str:
    """Return the name of the launcher that was called."""
    if recipe_name in CACHES:
        return f"cache_{layout}_{recipe_name.removesuffix('_cache')}.sh"
    return f"{'train' if recipe_name == text_to_image.NAME else 'pretrain'}_full_{layout}_{recipe_name}.sh"


def entry_point(door: str) -> list[str]:
    """Return what Python is given to run an entry point: the script of a checkout, or the command of the package."""
    root = checkout()
    return [str(root / "sd_scripts_xl" / door)] if root else ["-m", "difftrain", recipes.COMMANDS[door]]


class LaunchRefused(Exception):
    """Carry every fault of a launch; exit code 2."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(f"  {fault}" for fault in faults))


@dataclass(frozen=True)
class LaunchPlan:
    """One launch, decided: where it runs, what it runs, where its files go.

    folder: of the launch; with several machines each has a folder of its own in it.
    """

    where: Where
    recipe: recipes.LaunchRecipe
    folder: Path
    output: Path
    index: int
    words: list[str]

    @property
    def log(self) -> Path:
        """Return the file that has everything the run prints."""
        return self.output / f"train_{self.index}.log"


def decide(
    recipe_name: str, layout: str, flags: LaunchFlags, environ: dict[str, str], caller: Caller = SCRIPTS
) -> LaunchPlan:
    """Work out everything before anything is done.

    Raises: LaunchRefused with every fault of the launcher's flags and of the training script's.
    """
    index = flags.number("device_id", machines.device_index(environ))
    devices = machines.find_devices()
    where = machines.where(layout, LAYOUTS[layout], flags, devices, environ, caller)
    recipe = choose(recipe_name, flags, where)
    folder = _folder(recipe_name, index, flags, caller)
    output = folder / f"node{where.node_rank}" if layout == "nm_np" else folder
    words = recipe.line(flags, output)
    faults = [*flags.faults, *where.faults, *recipe.faults]
    lacks = any(": is missing" in fault for fault in recipe.faults)  # the training script would name it once more
    refused = recipe.door_faults(recipe.checkable(words))
    faults += [fault for fault in refused if not (lacks and fault.startswith(recipes.MISSING))]
    if faults:
        raise LaunchRefused(faults)
    return LaunchPlan(where, recipe, folder, output, index, words)


def _folder(recipe_name: str, index: int, flags: LaunchFlags, caller: Caller) -> Path:
    if "output_dir" in flags.values:
        return Path(flags.text("output_dir")).expanduser().absolute()
    root = (checkout() if caller is SCRIPTS else None) or Path.cwd()
    return root / caller.output / (f"cache_{index}" if recipe_name in CACHES else str(index))


def sentences(launch: LaunchPlan, flags: LaunchFlags) -> list[str]:
    """Return what was chosen and why."""
    shell = "the shell variable "
    from_the_shell = [(name, origin) for name, origin in flags.origins.items() if origin.startswith(shell)]
    return [
        *(
            f"{name}={flags.values[name]} comes from {origin}"
            for name, origin in from_the_shell
            if name in flags.values
        ),
        *launch.where.notes,
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
    words, tokens = to_environment(launch.recipe.dry_words(launch.words))
    command = [sys.executable, *entry_point(launch.recipe.door), *words]
    return subprocess.run(command, env=environ | tokens).returncode


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
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = launch.folder.with_name(f"{launch.folder.name}.{stamp}") / launch.output.relative_to(launch.folder)
    aside.parent.mkdir(parents=True, exist_ok=True)
    launch.output.rename(aside)
    print(f"{launch.output} {occupied.sentence}: moved to {aside}", flush=True)


def launch(recipe_name: str, layout: str, argv: list[str], command: str, caller: Caller = SCRIPTS) -> int:
    """Launch; return the exit code, or become the process that starts the ranks. command: what the user typed for it."""
    if {"--help", "-h"} & set(argv):
        door = DOORS.get(recipe_name, light.DOOR)
        print(flags.usage(command, door if caller is SCRIPTS else recipes.COMMANDS[door], caller))
        return 0
    given_flags = flags.read(argv, os.environ)
    try:
        plan = decide(recipe_name, layout, given_flags, dict(os.environ), caller)
        lines = sentences(plan, given_flags)
        print("\n".join(lines), flush=True)
        if given_flags.values.get("dry_run"):
            return dry_run(plan)
        code = plan.recipe.prepare(dry=False)
        if code:
            return code
        cfg = plan.recipe.parse(plan.words)
        try:
            note = make_room(cfg.data.workers)  # torchrun and the ranks inherit it
        except ConfigFault as fault:
            raise LaunchRefused([str(problem) for problem in fault.faults]) from fault
        lines += [note] if note else []
        clear_the_way(plan, cfg)
        start(plan, cfg, lines)
    except LaunchRefused as refused:
        print(f"cannot start:\n{refused}", file=sys.stderr)
        return 2
    return 0


def start(launch: LaunchPlan, cfg: TrainConfig, lines: list[str]) -> None:
    """Become the process that starts the ranks; what was said so far opens the log."""
    launch.output.mkdir(parents=True, exist_ok=True)
    config_digest = digest(cfg, cfg.replicas(launch.where.world_size))
    occupant.write_note(launch.output, config_digest, finished=False)
    words, tokens = to_environment(launch.words)  # neither the log nor `ps` shows them
    environ = launch.where.environment(dict(os.environ)) | tokens
    wait_s = 60 * (cfg.training.ddp_timeout_min or machines.WAIT_MIN)
    ranks = [*launch.where.torchrun(wait_s), *entry_point(launch.recipe.door), *words]
    command = "torchrun " + shlex.join(ranks)
    print(command, flush=True)
    with launch.log.open("a", encoding="utf-8") as log:
        log.writelines(f"{line}\n" for line in (*lines, command))
    workers = Path(__file__).with_name("workers.py")
    os.execve(
        sys.executable, [sys.executable, str(workers), str(launch.log), config_digest, json.dumps(ranks)], environ
    )


def main(argv: list[str]) -> int:
    """Do what a launcher under test/ asks for: RECIPE LAYOUT [flags]."""
    recipe_name, layout, *remaining = argv
    return launch(recipe_name, layout, remaining, f"bash test/{script(recipe_name, layout)}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
