"""What a recipe's `[demo] make` names, made before training where it is missing: then the recipe runs from nothing.

The doors ask what that is before they read the configuration, which is judged as if it were there; it is made when
nothing else is wrong. This looks at the file and the command line for that alone; what is wrong with them is said by
those who read them in earnest. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from difftrain.config.document import text_of, toml_of
from difftrain.config.paths import PendingFiles
from difftrain.demo.recipe import GLOBAL_BATCH, SIDE, DemoPlan, cache_root, ema_decay
from difftrain.models.registry import FAMILIES

MODEL, TRAIN, UNSEEN, MISMATCHED, REFERENCE = "model", "train", "unseen", "mismatched", "reference"
SETS = {  # the data sets of each kind, what is trained on first
    "tiny": (TRAIN,),
    "shapes": (TRAIN, UNSEEN),
    "emoji": (TRAIN, UNSEEN),
    "pairs": (TRAIN, UNSEEN, MISMATCHED),
    "clips": (TRAIN, UNSEEN),
}
RANDOM = ("tiny",)  # kinds whose model is the smallest of its family, and fitted to nothing
FRAME_BUCKETS = {"clips": (1, 17)}
KINDS = tuple(SETS)
DEFAULT_FAMILY = next(name for name, row in FAMILIES.items() if row.networks_by_train_type)  # of the launchers' demos
SHOWN = "shown"  # references of the prompts, with the pictures
_WAIT_S = 3600.0  # for another process that makes it
_PATHS = {  # what the folder holds, by the keys that name it
    MODEL: ("model.diffusers_path", "model.pretrained"),
    "data": ("output.dataset", "dataset", "data.dataset_config"),
}


class DemoRequest(NamedTuple):
    """What to make where, for which family."""

    kind: str
    folder: Path
    parts: tuple[str, ...]  # "model", "data"
    family: str


def wished(argv: Sequence[str]) -> DemoRequest | None:
    """Return what a command line's recipe asks for and is not there; nothing for any other command line."""
    flags = _flags_of(argv)
    tables = _tables(flags.get("config"))
    table = tables.get("demo")
    table = dict(table) if isinstance(table, dict) else {}
    section = {name: flags.get(f"demo.{name}", table.get(name)) for name in ("make", "folder")}
    if section["make"] not in KINDS or not isinstance(section["folder"], str) or {"help", "h"} & set(flags):
        return None
    from difftrain.config import DemoSection

    demo: DemoSection = DemoSection.model_validate(section)
    assert demo.make is not None and demo.folder is not None
    home = Path(demo.folder)
    named: dict[str, list[object]] = {
        part: [*(flags[key] for key in keys if key in flags)] or [_at(tables, key) for key in keys]
        for part, keys in _PATHS.items()
    }
    parts = tuple(part for part, values in named.items() if any(_inside(value, home) for value in values))
    absent = tuple(part for part in parts if not _exists(home, part))
    family = flags.get("model.type") or _at(tables, "model.type") or _at(tables, "type")
    return DemoRequest(demo.make, home, absent, str(family or DEFAULT_FAMILY)) if absent else None


def foreseen(argv: Sequence[str], log: Callable[[str], None] = print) -> PendingFiles | None:
    """Return what a command line's recipe asks to be made, and how; nothing where it asks for nothing, or all is there."""
    wish = wished(argv)
    if wish is None:
        return None
    what = f"{' and '.join(wish.parts)} of the demo {wish.kind!r}, in {wish.folder}"
    return PendingFiles(what, _files(wish), lambda: _make(wish, log))


def data_text(pictures: Path, references: Path | None = None, frame_buckets: Sequence[int] = ()) -> str:
    """Return the file of a data set: one folder of pictures or clips, and that of reference images."""
    control = f'control_path = "{references.resolve()}"\n' if references else ""
    frames = f"frame_buckets = {list(frame_buckets)}\n" if frame_buckets else ""
    return f'resolutions = [{SIDE}]\n{frames}\n[[directory]]\npath = "{pictures.resolve()}"\n{control}'


def references_of(kind: str, family: str, pictures: Path) -> Path | None:
    """Return the folder of reference images: the tiny data of a family that edits have some."""
    row = FAMILIES.get(family)
    return pictures / REFERENCE if kind == "tiny" and row is not None and row.control and row.control_least else None


def _files(wish: DemoRequest) -> dict[Path, str | None]:
    home, files = wish.folder, dict[Path, str | None]()
    buckets = FRAME_BUCKETS.get(wish.kind, ())
    if MODEL in wish.parts:
        files[home / MODEL] = None
    if "data" in wish.parts:
        for name in SETS[wish.kind]:
            pictures = home / "pictures" / name
            references = references_of(wish.kind, wish.family, home / "pictures")
            files |= {pictures.resolve(): None, home / f"{name}.toml": data_text(pictures, references, buckets)}
            files |= {references.resolve(): None} if references else {}
        if UNSEEN in SETS[wish.kind]:
            files[home / "prompts.txt"] = ""
    return files


def _make(wish: DemoRequest, log: Callable[[str], None]) -> int:
    """Make it, once a machine; return 0, or the exit code of what failed.

    Of several processes the first of each machine makes it, the others wait until it is there.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return _wait(wish)
    log(f"{wish.folder}: making {' and '.join(wish.parts)} of the demo {wish.kind!r}, which the recipe uses")
    words = [
        f"--make={wish.kind}",
        f"--folder={wish.folder}",
        f"--family={wish.family}",
        *(f"--part={part}" for part in wish.parts),
    ]
    library = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, [str(library), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "difftrain.demo", *words]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}).returncode


def _flags_of(argv: Sequence[str]) -> dict[str, str]:
    flags: dict[str, str] = {}
    for word, after in zip(argv, [*argv[1:], "--"]):
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            flags[name] = text if equals else "" if after.startswith("--") else after
    return {name: text.strip("\"'") for name, text in flags.items()}


def _tables(path: str | None) -> Mapping[str, Any]:
    try:
        return toml_of(text_of(Path(path or "")))
    except (OSError, ValueError):
        return {}


def _at(tables: Mapping[str, Any], key: str) -> object:
    table, _, name = key.rpartition(".")
    within = tables.get(table) if table else tables
    return within.get(name) if isinstance(within, dict) else None


def _inside(value: object, home: Path) -> bool:
    """Say whether a path of the recipe leads into the folder: another one is the user's own."""
    return isinstance(value, str) and bool(value) and Path(value).parent == home


def _exists(home: Path, part: str) -> bool:
    return (home / MODEL).is_dir() if part == MODEL else (home / f"{TRAIN}.toml").is_file()


def _wait(wish: DemoRequest) -> int:
    until = time.monotonic() + _WAIT_S
    while not all(_exists(wish.folder, part) for part in wish.parts):
        if time.monotonic() > until:
            print(f"{wish.folder}: not made within {_WAIT_S:.0f} s by the first process here", file=sys.stderr)
            return 2
        time.sleep(0.2)
    return 0


# --- How SD3-Light's demos run on the device at hand: over configs/sd3_light/shapes.toml or emoji.toml
# Imports no torch: launchers ask it before anything is started.


_PARTS_OF_KEY = (
    "datasets.py", "model.py", "prepare.py", "splits.py"
)  # fmt: skip
STEPS = {"shapes": 600, "emoji": 3600}  # as their files say
STEPS_BY_MANY = {"shapes": 400, "emoji": 2400}  # where several processes share a CPU
_WHAT = {
    "shapes": "coloured shapes on white, generated here, so nothing is downloaded",
    "emoji": "3372 emoji in all skin tones with their names, fetched through npm at first use",
}


def folder(dataset: str, scale: float) -> Path:
    """Return where a demo's data and model are kept; another version of the code has another folder."""
    key = hashlib.blake2b(digest_size=6)
    for name in _PARTS_OF_KEY:
        key.update(resources.files(__package__).joinpath(name).read_bytes())
    return cache_root() / "demo" / f"sd3_light-{dataset}-{scale:g}-{key.hexdigest()}"


def plan(dataset: str, kind: str, processes: int, scale: float = 1.0) -> DemoPlan:
    """Choose precision, batch and steps for the device at hand.

    kind: of device, as the device room names it. processes: ranks over all machines. scale: share of the full demo.
    """
    home, cpu = folder(dataset, scale), kind == "cpu"
    crowded = cpu and processes > 1
    batch = max(1, GLOBAL_BATCH // processes)
    steps = max(2, round((STEPS_BY_MANY if crowded else STEPS)[dataset] * scale))
    third = max(1, steps // 3)

    # the flags of the run
    unseen = f'[{{name = "{UNSEEN}", config = "{home / f"{UNSEEN}.toml"}"}}]'
    flags: dict[str, object] = {
        "demo.folder": home,
        "model.diffusers_path": home / MODEL,
        "output.dataset": home / f"{TRAIN}.toml",
        "eval.eval_datasets": unseen,
        "sample.prompts": home / "prompts.txt",
        "data.cache_dir": home / "cache",
        "save.output_name": dataset,
        "model.dtype": "float32" if cpu else "bfloat16",
        "training.micro_batch_size_per_gpu": batch,
        "training.max_steps": steps,
        "training.warmup_steps": max(1, steps // 10),
        "ema.decay": ema_decay(steps),
        "eval.eval_every_n_steps": third,
        "sample.every_n_steps": third,
        "save.save_every_n_steps": third,
        "data.num_dataloader_workers": 0 if crowded else 1 if cpu else 4,
        "monitoring.logging_steps": 10 if steps >= 100 else 1,
    }
    if dataset == "emoji":
        flags["eval.kid_every_n_steps"] = third

    # what is said of them at the start
    notes = (
        f"the embedded demo: {_WHAT[dataset]}, a small SD3-Light from random weights"
        + (f", {scale:g} of its full length" if scale != 1 else ""),
        f"  precision {'fp32: a CPU computes best in it' if cpu else 'bf16, with fp32 weights'}",
        f"  batch {batch} x {processes} process{'es' if processes > 1 else ''} = {batch * processes}: "
        "the batch the demo is tuned for"
        + ("" if batch * processes == GLOBAL_BATCH else ", as close as the number of processes allows"),
        f"  {steps} steps" + (": smaller than with one process, since they share the cores" if crowded else ""),
    )
    return DemoPlan(flags, notes, [f"--make={dataset}", f"--folder={home}", f"--scale={scale:g}"])
