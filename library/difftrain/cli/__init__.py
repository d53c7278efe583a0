"""The `difftrain` command: training, and what is done with models, data and runs besides.

The way of a command:
 1. __main__.py     `python -m difftrain.cli`, as the installed `difftrain`
 2. COMMANDS below names each in one line; its module is imported when it is called, so that the quick ones stay quick
 3. words.py        the words of a command; its flags are rows of the same kind as training's
 4. train.py, launch.py   training; cache.py, dataset.py, export.py, generate.py, compare.py, watch.py, doctor/ the rest
 5. completion.py   the same registry as a shell's completion
"""

from __future__ import annotations

import sys
from importlib import import_module

import difftrain

# name -> ("module:function" of argv, what it does), in the order of --help
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("difftrain.cli.train:train", "train from a TOML file: --config FILE.toml"),
    "sdxl": ("difftrain.cli.train:train_sdxl", "train SDXL with the flags of kohya's sdxl_train.py"),
    "sdxl_network": (
        "difftrain.cli.train:train_sdxl_network",
        "train a LoRA of SDXL with the flags of kohya's sdxl_train_network.py",
    ),
    "sd3_light": ("difftrain.cli.train:train_sd3_light", "pretrain SD3-Light: train, with the type set"),
    "text_to_image": (
        "difftrain.cli.train:train_text_to_image",
        "fine-tune Stable Diffusion with the flags of diffusers' train_text_to_image.py",
    ),
    "launch": ("difftrain.cli.launch:main", "1p | np | nm RECIPE: train on one device, all of them, several machines"),
    "recipes": ("difftrain.cli.recipes:main", "list recipes; copy NAME [DIR]: one to train with or to edit"),
    "init": ("difftrain.cli.init:main", "sd3_light: a folder to start SD3-Light from, its transformer random"),
    "dataset": ("difftrain.cli.dataset:main", "inspect: a page of a dataset as training will see it"),
    "cache": ("difftrain.cli.cache:main", "build, info, verify, repair, gc, export: the feature cache"),
    "report": ("difftrain.cli.documents:build_report", "RUN_DIR: rebuild report.html from the files of a run"),
    "compare": (
        "difftrain.cli.compare:main",
        "RUN_A RUN_B ...: do runs agree step by step, and which is faster",
    ),
    "watch": ("difftrain.cli.watch:main", "[RUN | FOLDER]: serve a page of runs with buttons: save, sample, stop"),
    "generate": ("difftrain.cli.generate:main", "generate images from a checkpoint, an export or other weights"),
    "export": ("difftrain.cli.export:main", "write weights in another layout or precision, or random ones"),
    "convert": ("difftrain.cli.convert:main", "an adapter (LoRA) to another layout, merged into a model, or extracted"),
    "doctor": ("difftrain.cli.doctor:main", "check what is installed, and the devices of this machine"),
    "families": (
        "difftrain.cli.documents:print_families",
        "list the families of models: parts, tasks, sizes, what each trains",
    ),
    "schema": ("difftrain.cli.documents:print_schema", "print the JSON schema of a kind of TOML file, for editors"),
    "completion": ("difftrain.cli.completion:main", "bash or zsh: print the script that completes this command"),
}
# the command that opens a paragraph of --help -> its heading
_HEADINGS = {
    "train": "train",
    "recipes": "prepare",
    "report": "follow and compare runs",
    "generate": "use trained weights",
    "doctor": "this installation",
}
# names of our scripts, and words that other trainers have -> the command
_MEANT = {
    "pretrain": "train", "finetune": "train", "fine-tune": "train", "run": "train", "sdxl_pretrain": "sdxl",
    "sdxl_train": "sdxl", "sdxl_train_network": "sdxl_network", "train_network": "sdxl_network", "sd3_light_pretrain": "sd3_light", "train_text_to_image": "text_to_image", "recipe": "recipes",
    "configs": "recipes", "config": "recipes", "examples": "recipes", "sample": "generate", "infer": "generate",
    "inference": "generate", "merge": "convert", "extract": "convert", "inspect": "dataset", "models": "families", "check": "doctor",
    "env": "doctor", "diff": "compare",
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["--version"]:
        print(difftrain.__version__)
        return 0
    if words[:1] == ["help"] and len(words) > 1:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] not in COMMANDS:
        return _refuse(words)
    module, _, function = COMMANDS[words[0]][0].partition(":")
    code: int = getattr(import_module(module), function)(words[1:])
    return code


def usage() -> str:
    """Return the help of the command."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: difftrain COMMAND ...        difftrain COMMAND --help lists the flags of a command",
        "",
        "Train diffusion models on Ascend NPU, CUDA and CPU. A first run, on any machine, with no data and no download:",
        "  difftrain recipes copy sd3_light/tiny .",
        "  difftrain train --config tiny.toml --training.max_steps=4",
        "On several devices: torchrun --nproc_per_node 8 -m difftrain train --config FILE.toml",
    ]
    for name, (_, what) in COMMANDS.items():
        if name in _HEADINGS:
            lines += ["", _HEADINGS[name]]
        lines.append(f"  {name:<{width}}  {what}")
    return "\n".join(lines)


def _refuse(words: list[str]) -> int:
    """Say what an unknown command may have meant; return the exit code."""
    from difftrain.config.door import guard
    from difftrain.config.schema.names import did_you_mean
    from difftrain.contracts.errors import ConfigFault, Fault

    word = words[0]
    meant = _MEANT.get(word.removesuffix(".py").lower())
    remedy = f"did you mean {meant}?" if meant else did_you_mean(word, COMMANDS) or f"known are {', '.join(COMMANDS)}"
    if word.startswith("-"):
        remedy = "a command comes first: difftrain train --config FILE.toml"

    def refuse() -> int:
        raise ConfigFault([Fault(repr(word), "no such command", remedy)])

    return guard("difftrain", refuse)
