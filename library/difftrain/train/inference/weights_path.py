"""What a path to weights is: a checkpoint of a run, a run, a diffusers folder, or a single file. Imports no torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from difftrain import checkpoint
from difftrain.checkpoint.commit import MANIFEST
from difftrain.checkpoint.find import ONE_FILE, Own, candidates, fault_of
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.models.weights.detect import INDEX, family_of_folder

log = logging.getLogger("difftrain")
CONFIG = "config.toml"  # of a run's folder
_REMEDY = "give a run's folder or checkpoint, a diffusers folder, or a single file of weights"


@dataclass(frozen=True)
class WeightsPath:
    """Where weights lie. config: of the run, of a checkpoint. family: of a folder; of a file its tensors say it."""

    kind: Literal["checkpoint", "folder", "file"]
    path: Path
    config: Path | None = None
    family: str = ""


def locate(text: str, flag: str, config: str | None = None) -> WeightsPath:
    """Say what lies at a path. config: of a run, where a checkpoint has been moved away from its own. Raises ConfigFault."""
    path = Path(text).expanduser()
    if path.is_file():
        return WeightsPath("file", path)
    if not path.is_dir():
        raise ConfigFault([Fault(flag, f"no such file or folder: '{path}'", _REMEDY)])
    if (path / MANIFEST).is_file():
        return _checkpoint(checkpoint.open_given(path, flag), flag, config)
    if (path / INDEX).is_file():
        return WeightsPath("folder", path, family=family_of_folder(path, flag))
    if (path / CONFIG).is_file():
        return _checkpoint(newest_of_run(path, flag), flag, config)
    if len(files := [*path.glob(f"{ONE_FILE}.safetensors"), *path.glob(f"{ONE_FILE}.ckpt")]) == 1:
        return WeightsPath("file", files[0])  # an export of a run whose saves are folders by step
    inside = [candidate.path.name for candidate in candidates(path)]
    runs = sorted(config_file.parent.name for config_file in path.glob(f"*/{CONFIG}"))
    if len(runs) == 1 and not inside:
        log.info("%s: the only run in it is %s", path, runs[0])
        return locate(str(path / runs[0]), flag, config)
    what = f"'{path}' is neither a checkpoint nor a diffusers folder"
    if inside:
        what, remedy = f"'{path}' has checkpoints and no {CONFIG}", f"{inside[0]} is the newest"
    elif runs:
        remedy = f"it holds runs: {runs[-1]} is the newest"
    else:
        names = sorted(entry.name for entry in path.iterdir())[:5]
        remedy = f"{_REMEDY}; it holds {', '.join(names) or 'nothing'}"
    raise ConfigFault([Fault(flag, what, remedy)])


def newest_of_run(folder: Path, flag: str) -> Path:
    """Return a run's newest whole checkpoint. Raises ConfigFault that names what is there in its place."""
    record = checkpoint.RunRecord.read(folder)
    torn: list[str] = []
    if record is not None and isinstance(record.names, Own):
        from difftrain.train.run_dir import checkpoints

        paths = [candidate.path for candidate in checkpoints(folder)]
    else:
        paths = [candidate.path for candidate in candidates(folder, record.names if record else None, torn.append)]
    for path in paths:
        if not (fault := fault_of(path)):
            return path
        torn.append(f"{path.name}: {fault}")
    exports = sorted({entry.name for entry in folder.iterdir() if _is_export(entry)})
    what = f"'{folder}' has no complete checkpoint" + (f" ({'; '.join(torn[:3])})" if torn else "")
    remedy = f"give one of its exports: {', '.join(exports[:3])}"
    if not exports:  # whichever entry point trains it
        flag_of_kohya, key_of_train = (option("save.state", True, door=door) for door in ("kohya", "train"))
        remedy = f"train with {flag_of_kohya}, or {key_of_train} of train.py, to save checkpoints"
    raise ConfigFault([Fault(flag, what, remedy)])


def _is_export(path: Path) -> bool:
    return path.suffix in (".safetensors", ".ckpt") or (path / INDEX).is_file() or any(path.glob(f"{ONE_FILE}.*"))


def _checkpoint(path: Path, flag: str, config: str | None) -> WeightsPath:
    """Find the configuration of the run that wrote a checkpoint. Raises ConfigFault where there is none."""
    own = Path(config).expanduser() if config else path.resolve().parent / CONFIG
    if not own.is_file():
        what = f"{path} is a checkpoint, and there is no {own}" if config is None else f"no such file: {own}"
        raise ConfigFault([Fault(flag, what, f"give the run's {CONFIG} as --config")])
    return WeightsPath("checkpoint", path, own)
