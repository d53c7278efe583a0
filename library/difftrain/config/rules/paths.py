"""Rules about paths that must exist, and about hubs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from difftrain.config import hub_ids
from difftrain.config.document import text_of, toml_of
from difftrain.config.paths import expanded, is_file, is_folder, is_url, path_exists, unreadable_url
from difftrain.config.rules.finding import Finding, Rule, value_of
from difftrain.config.rules.outputs import can_be_resumed
from difftrain.config.schema import names
from difftrain.config.schema.families import row_of
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.spellings.spelling import option, spelled

_HUB = "give a path, or a hub id: organisation/name, hf://organisation/name/file where a folder here has the same name"


_WEIGHTS = (
    "model.pretrained", "model.vae", "model.transformer", "model.text_encoder1", "model.text_encoder2",
    "model.text_encoder3", "model.text_encoder4", "model.tokenizer1", "model.tokenizer2", "model.tokenizer3",
    "model.tokenizer4",
)  # fmt: skip


def weights(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Weights and tokenizers are files or folders of this machine, or may be on a hub."""
    for field in _WEIGHTS:
        value = value_of(cfg, field)
        if value and (what := hub_ids.missing(value)):
            yield Finding((field,), what, _HUB)


def size(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """A size of random weights is one of ours, or a file."""
    name, shipped = cfg.model.init_from_config, row_of(cfg).sizes
    if name is None or name in shipped:
        return
    remedy = names.did_you_mean(name, shipped) or f"{', '.join(shipped)} or a JSON file"
    if not name.endswith(".json"):
        yield Finding(("model.init_from_config",), f"no such size: {name!r}", remedy)
    elif not is_file(name):
        yield Finding(("model.init_from_config",), f"no such file: {name!r}", remedy)


def folders(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Folders of data and of a state to resume."""
    for folder in cfg.data.dirs:
        if hub_ids.missing(folder):
            remedy = "give a folder of images, tars or parquet, or a hub id of such: organisation/name"
            yield Finding(("data.dirs",), f"no such folder: {folder!r}", remedy)
    resume, save = cfg.save.resume, cfg.save
    if resume and not cfg.hub.resume and not can_be_resumed(save):
        remedy = (
            "give a run directory, a folder global_stepN or a step"
            if save.run_dirs
            else "give the folder of a state, or auto"
        )
        if is_file(resume):
            weights = "is a file of weights, and resuming needs the complete state: {save.resume} takes a folder"
            yield Finding(
                ("save.resume",),
                f"{resume!r} {spelled(weights)}",
                f"to start from weights: {option('model.pretrained')}",
            )
        else:
            yield Finding(("save.resume",), f"no such folder: {resume!r}", remedy)


def store(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """The package that reads from an object store is installed; a cache of this machine is a folder."""
    cache_dir = cfg.data.cache_dir
    if cache_dir and is_url(cache_dir):
        if fault := unreadable_url(cache_dir):
            yield Finding(("data.cache_dir",), *fault)
    elif cache_dir and is_file(cache_dir):  # a folder that can't be written to may do: a whole cache is only read
        yield Finding(("data.cache_dir",), f"{cache_dir!r} is a file, not a folder", "choose another folder")
    elif cache_dir:
        above = next(filter(path_exists, Path(expanded(cache_dir)).absolute().parents), Path("/"))
        if not is_folder(above):
            yield Finding(("data.cache_dir",), f"{str(above)!r} is a file, not a folder", "choose another folder")


def output(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """The output folder can be made and written to; the name of files is a plain name."""
    name = cfg.save.output_name
    if name != Path(name).name or name in (".", ".."):
        yield Finding(
            ("save.output_name",),
            f"must be a plain file name, got {name!r}",
            f"folders go to {option('save.output_dir')}",
        )
    if not cfg.save.output_dir:
        return
    yield from _unwritable("save.output_dir", Path(cfg.save.output_dir))


def logs(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """The log file and the folder of events can be made and written to."""
    if cfg.logging.console_file:
        file = Path(cfg.logging.console_file)
        if is_folder(file):
            yield Finding(("logging.console_file",), f"{str(file)!r} is a folder, not a file", "give a file's name")
        elif path_exists(file) and not os.access(file, os.W_OK):
            yield Finding(("logging.console_file",), f"{str(file)!r} can't be written to", "choose another file")
        else:
            yield from _unwritable("logging.console_file", file.parent)
    if cfg.logging.logging_dir:
        yield from _unwritable("logging.logging_dir", Path(cfg.logging.logging_dir))


def notice(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """A notice of pre-emption is a file, in a folder that is there: else nobody could put it where it is looked for."""
    path = cfg.save.preempt_file
    if path is None:
        return
    if not path or is_folder(path):
        what = "is empty" if not path else f"{path!r} is a folder, not a file"
        yield Finding(("save.preempt_file",), what, "give the name of the file that announces the end of this machine")
    elif not is_folder(Path(path).absolute().parent):
        what = f"there is no folder for it: {str(Path(path).absolute().parent)!r}"
        yield Finding(("save.preempt_file",), what, "make the folder, or give another file")


def _unwritable(field: str, folder: Path) -> Iterator[Finding]:
    """Say why a folder cannot be made or written to, by the nearest of its parents that is there."""
    nearest = next((path for path in (folder, *folder.absolute().parents) if path_exists(path)), Path("/"))
    if not is_folder(nearest):
        yield Finding((field,), f"{str(nearest)!r} is a file, not a folder", "choose another folder")
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield Finding((field,), f"{str(nearest)!r} can't be written to", "choose another folder")


def thumbnail(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """The picture for the header of exports can be read; a data URL is one already."""
    value = cfg.metadata.thumbnail
    if not value or value.startswith("data:"):
        return
    path = expanded(value)
    remedy = "give an image file or a data: URL"
    if not is_file(path):
        yield Finding(("metadata.thumbnail",), f"no such file: {value!r}", remedy)
    elif not os.access(path, os.R_OK):
        yield Finding(("metadata.thumbnail",), f"{value!r} can't be read", remedy)


def prompts(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """The prompt file exists and is of a kind that is read."""
    path = cfg.sample.prompts
    if not path:
        return
    if Path(path).suffix.lower() not in ("", ".txt", ".toml", ".json"):
        yield Finding(("sample.prompts",), f"is not a file of prompts: {path!r}", "give a .txt, .toml or .json file")
    elif not is_file(path):
        yield Finding(("sample.prompts",), f"no such file: {path!r}", "give a .txt file, one prompt per line")


def trackers(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """A tracker that is asked for is installed, and its arguments can be read."""
    asks = cfg.logging.log_with
    for package in ("wandb", "tensorboard") if asks == "all" else [asks] if asks else []:
        if find_spec(package) is None:
            remedy = f"pip install {package}, or choose another tracker"
            yield Finding(
                ("logging.log_with",), f"{asks!r} needs the package {package}, which is not installed", remedy
            )
    config = cfg.logging.tracker_config
    if not config:
        return
    try:
        toml_of(text_of(Path(config)))
    except FileNotFoundError:
        yield Finding(
            ("logging.tracker_config",), f"no such file: {config!r}", "a TOML file with one table per tracker"
        )
    except (OSError, ValueError) as error:
        yield Finding(("logging.tracker_config",), f"{config!r} cannot be read as TOML: {error}")


PATH_RULES: tuple[Rule, ...] = (weights, size, folders, store, output, logs, notice, thumbnail, prompts, trackers)


_STATE = "give {save.resume}=REPO_ID/PATH[:REVISION[:model|dataset]]"


def target(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What exports are sent to is a name of a repository and a plain folder in it."""
    hub = cfg.hub
    if hub.repo_id is not None and not hub_ids.is_repo(hub.repo_id):
        yield Finding(("hub.repo_id",), f"is not a repository name: {hub.repo_id!r}", "organisation/name")
    folder = hub.path_in_repo
    if folder is not None and (folder.startswith("/") or "\\" in folder or ".." in folder.split("/")):
        yield Finding(("hub.path_in_repo",), f"is not a folder of a repository: {folder!r}", "as in models/first")


def state(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """A state on a hub has a place there; the newest of a hub is nobody's to choose."""
    if not cfg.hub.resume:
        return
    resume = cfg.save.resume
    if not resume:
        yield Finding(
            ("hub.resume", "save.resume"), f"needs {option('save.resume')}, which names the state", spelled(_STATE)
        )
    elif resume == "auto":
        what = f"cannot be used with {option('save.resume', 'auto')}, which only looks in {option('save.output_dir')}"
        yield Finding(("hub.resume", "save.resume"), what, spelled(_STATE))
    elif hub_ids.read_state(resume) is None:
        yield Finding(("save.resume",), f"is not a state on a hub: {resume!r}", spelled(_STATE))


HUB_RULES: tuple[Rule, ...] = (target, state)
