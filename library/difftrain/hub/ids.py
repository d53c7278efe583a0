"""What the configuration names that may be on a hub, which files of it are needed, and paths in the place of ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from difftrain.config import TrainConfig, hub_ids
from difftrain.config.datasets.datasets import subsets_of
from difftrain.config.hub_ids import HubId
from difftrain.config.rules.finding import value_of
from difftrain.config.schema.sections import SubsetSection
from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.data.sources.base import IMAGE_SUFFIXES, split_suffix
from difftrain.data.sources.configured import CAPTION_SUFFIXES, kind_of_suffixes
from difftrain.data.sources.image_folder import METADATA
from difftrain.hub import client
from difftrain.models.registry import make_family
from difftrain.models.weights import repo_files

Slot = tuple[str, str]  # a field of the configuration, and what is written there
Places = dict[Slot, str]  # -> path on this machine
Choose = Callable[[Sequence[str], str, repo_files.Read], repo_files.Files]

_CLIP = ("model.tokenizer1", "model.tokenizer2")
TOKENIZERS = (*_CLIP, "model.tokenizer3")
_CHOOSE: dict[str, Choose] = {
    "model.pretrained": repo_files.weights,
    "model.vae": repo_files.vae,
    **dict.fromkeys(_CLIP, repo_files.tokenizer),
    "model.tokenizer3": repo_files.t5_tokenizer,
}
_PATHS = {
    "model.pretrained": "a diffusers folder or a .safetensors file",
    "model.vae": "a folder with config.json and its weights, or a .safetensors file",
    **dict.fromkeys(_CLIP, "a folder with CLIP's vocab.json and merges.txt"),
    "model.tokenizer3": "a folder with T5's tokenizer.json or spiece.model",
}
_PICTURES = "a folder of images, tars or parquet"
_IN_TABLES, _REGULAR, _TRAINED = "data.dataset_config", "data.reg_dirs", "data.dirs"


@dataclass(frozen=True)
class HubRequest:
    """One id of the configuration. unasked: nobody wrote it, the weights come without this part."""

    field: str
    text: str
    id: HubId
    choose: Choose
    unasked: bool = False

    @property
    def kind(self) -> str:
        """Return model or dataset."""
        return self.id.kind or ("model" if self.field in _CHOOSE else "dataset")

    @property
    def flag(self) -> str:
        """Return the flag that it belongs to."""
        return option(self.field)

    @property
    def slot(self) -> Slot:
        """Return where in the configuration it stands."""
        return self.field, self.text

    @property
    def pin(self) -> str:
        """Return what a record calls it."""
        return f"{self.kind} {replace(self.id, path='')}"

    def fault(self, trouble: client.Trouble) -> Fault:
        """Say what is wrong, and what to place where."""
        what = f"the weights do not include it; {self.text}" if self.unasked else self.text
        if not self.unasked and not self.id.explicit:
            what += ", which is not a local path"
        remedy = trouble.remedy
        if trouble.away:
            kind = " --repo-type dataset" if self.kind == "dataset" else ""
            fetched = f"hf download {self.id.repo}{kind}, and copy its folder to {client.cache_folder()}"
            if self.id.hub:
                fetched = f"fetch {self.id.repo} with ModelScope's own client, and give that folder"
            remedy = f"give the path of {_PATHS.get(self.field, _PICTURES)}; or where there is a network: {fetched}"
        return Fault(self.flag, f"{what}: {trouble.what}", remedy)


def hub_requests(cfg: TrainConfig) -> list[HubRequest]:
    """List what is written as an id may be; whether a path of that name exists, each machine sees for itself."""
    return [*named((field, value_of(cfg, field)) for field in _CHOOSE), *_data(cfg)]


def named(slots: Iterator[tuple[str, str | None]] | Sequence[Slot], *, unasked: bool = False) -> list[HubRequest]:
    """List what of this, parts of the model, is written as an id may be."""
    read = [(field, text, hub_ids.read(text)) for field, text in slots if text]
    return [HubRequest(field, text, id, _CHOOSE[field], unasked) for field, text, id in read if id is not None]


def _data(cfg: TrainConfig) -> Iterator[HubRequest]:
    for subset in subsets_of(cfg):
        text = subset.image_dir
        id = hub_ids.read(text) if text and not subset.dataset_class else None
        if text and id is not None:
            yield HubRequest(_field_of(cfg, subset), text, id, _choice(subset))


def _field_of(cfg: TrainConfig, subset: SubsetSection) -> str:
    if cfg.data.datasets:
        return _IN_TABLES
    return _REGULAR if subset.is_reg else _TRAINED


def _choice(subset: SubsetSection) -> Choose:
    """Choose what a subset reads: its caption files, and of kohya's folders only what lies in them."""
    extension = subset.captions.extension
    captions = (extension if extension.startswith(".") else f".{extension}",) if extension else CAPTION_SUFFIXES

    def choose(files: Sequence[str], path: str, _read: repo_files.Read) -> repo_files.Files:
        return data_files(files, path, captions, flat=subset.flat)

    return choose


def unasked(cfg: TrainConfig) -> list[Slot]:
    """List what the weights, which lie here, come without. Nothing where they have faults, which are found elsewhere."""
    try:
        return list(make_family(cfg).missing_tokenizers().items())
    except ConfigFault:
        return []


def remote_refs(cfg: TrainConfig) -> frozenset[str]:
    """Return the fields, "section.field", of which something is to be fetched."""
    requested = {ref.field for ref in hub_requests(cfg) if not hub_ids.lies_here(ref.text)}
    return frozenset(requested | {field for field, _ in unasked(cfg)})


def localised(cfg: TrainConfig, places: Mapping[Slot, str]) -> TrainConfig:
    """Return the configuration with paths in the place of ids."""
    if not places:
        return cfg
    model = {field.partition(".")[2]: path for (field, _), path in places.items() if field in _CHOOSE}

    def moved(field: str, text: str) -> str:
        return places.get((field, text), text)

    def moved_subset(subset: SubsetSection) -> SubsetSection:
        return subset.model_copy(update={"image_dir": moved(_IN_TABLES, subset.image_dir)} if subset.image_dir else {})

    data = {
        "dirs": tuple(moved(_TRAINED, text) for text in cfg.data.dirs),
        "reg_dirs": tuple(moved(_REGULAR, text) for text in cfg.data.reg_dirs),
        "datasets": tuple(
            dataset.model_copy(update={"subsets": tuple(map(moved_subset, dataset.subsets))})
            for dataset in cfg.data.datasets
        ),
    }
    update = {"model": cfg.model.model_copy(update=model), "data": cfg.data.model_copy(update=data)}
    return cfg.model_copy(update=update)


# --- Which files of a repository are data to train on: those that a folder of the same content would be read from


def data_files(
    files: Sequence[str], path: str, captions: Sequence[str] = CAPTION_SUFFIXES, *, flat: bool = False
) -> tuple[list[str], str]:
    """Choose tars, or pictures with their captions, or parquet files below a folder ("": the top); or one file named.

    flat: only of the folder itself. Return them, and the path to hand on. The first level that holds any decides, as on
    disk. No files: no data.
    """
    if path in files:
        return [path], path
    prefix = f"{path}/" if path else ""
    inside = [file for file in files if file.startswith(prefix) and not _hidden(file[len(prefix) :])]
    if flat:
        inside = [file for file in inside if "/" not in file[len(prefix) :]]
    kind = next(filter(None, map(kind_of_suffixes, _levels(inside))), "")
    hub_requests = {"tar": {".tar"}, "parquet": {".parquet"}, "folder": {*IMAGE_SUFFIXES, *captions}}.get(kind, set())
    named = METADATA if kind == "folder" else ()
    return [file for file in inside if _suffix(file) in hub_requests or file.rpartition("/")[2] in named], path


def _levels(files: Sequence[str]) -> list[set[str]]:
    """Return the suffixes of each depth, the top first."""
    levels: dict[int, set[str]] = {}
    for file in files:
        levels.setdefault(file.count("/"), set()).add(_suffix(file))
    return [levels[depth] for depth in sorted(levels)]


def _suffix(file: str) -> str:
    return split_suffix(file.rpartition("/")[2])[1]


def _hidden(file: str) -> bool:
    return any(part.startswith(".") for part in file.split("/"))
