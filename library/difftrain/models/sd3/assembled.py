"""An SD3 model put together: from a diffusers folder, with parts from elsewhere, its transformer stored or random."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from difftrain.contracts import ConfigFault, Fault
from difftrain.models.parts.stored_part import read_json
from difftrain.models.sd3.architecture import LIGHT_LAYERS, PARTS, SECTIONS, Architecture, of_depth
from difftrain.models.sd3.folder_source import FACTS, FOLDERS, FULL, BranchlessPart, FolderPart, read_part_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from difftrain.config import TrainConfig
    from difftrain.models.sd3.sources import Modules, Source

FLAG = "[model] diffusers_path"
FIELDS = {
    "transformer": "transformer",
    "vae": "vae",
    "text_encoder_1": "text_encoder1",
    "text_encoder_2": "text_encoder2",
    "text_encoder_3": "text_encoder3",
}
LIGHT = "sd3_light_pretrain"


def elsewhere(cfg: TrainConfig) -> dict[str, str]:
    """Return where parts are taken from that do not come with the model."""
    model = cfg.model
    given = (model.transformer, model.vae, model.text_encoder1, model.text_encoder2, model.text_encoder3)
    return {part: path for part, path in zip(PARTS, given, strict=True) if path}


class Part(Protocol):
    """Give the weights of one part."""

    def faults(self, module: Any) -> list[Fault]: ...
    def weights(self, module: Any) -> Iterator[tuple[str, Tensor]]: ...
    def fingerprint(self, part: str) -> str: ...


class Place(NamedTuple):
    """A part's folder, and what the user called it."""

    folder: Path
    flag: str


@dataclass(frozen=True)
class Assembled:
    """Give each part from its own place; what is nowhere stored is drawn."""

    architecture: Architecture
    parts: Mapping[str, Part]
    drawn: Source  # of the same sizes
    tokenizer_dirs: Mapping[int, Path]
    notes: tuple[str, ...] = ()
    shift: float | None = None  # of the stored model's sampler, where its transformer is taken

    def faults(self, modules: Modules) -> list[Fault]:
        return [fault for name, part in self.parts.items() if name in modules for fault in part.faults(modules[name])]

    def weights(self, part: str, module: Any) -> Iterator[tuple[str, Tensor]]:
        stored = self.parts.get(part)
        return stored.weights(module) if stored else self.drawn.weights(part, module)

    def fingerprint(self, part: str) -> str:
        return (self.parts.get(part) or self.drawn).fingerprint(part)

    def as_it_lies(self, part: str, stem: str, dtype: torch.dtype | None) -> list[tuple[Path, str]] | None:
        """Name the files of a part that an export can have as they are; None: they must be written anew."""
        stored = self.parts.get(part)
        return stored.as_it_lies(stem, dtype) if isinstance(stored, FolderPart) else None


def assembled(cfg: TrainConfig, base: Mapping[str, Any]) -> Assembled:
    """Put a model together. base: sizes of parts that may be given nowhere. Raises ConfigFault with every fault found."""
    model, whole = cfg.model, cfg.loss.text_recon_gamma > 0
    root = Path(model.pretrained).expanduser() if model.pretrained else None
    faults = _folder_faults(root)
    places, missing = _places(cfg, None if faults else root)
    sizes, unread = _sizes(places, base, lost=bool(faults))
    faults += missing + unread
    if faults:
        raise ConfigFault(faults)
    found = Architecture.from_dict({"init": base.get("init", "adaln_zero")} | sizes, str(root or "[model]"))
    facts = read_json(root / FACTS) if root else {}
    depth, stored, notes, faults = _depth(cfg, found, "transformer" in places, bool(facts.get("light")))
    if faults:
        raise ConfigFault(faults)
    architecture = replace(of_depth(found, depth), text_branch=whole)
    readers: dict[str, Part] = {
        part: FolderPart(place.folder, part, place.flag, mmap=not model.disable_mmap)
        for part, place in places.items()
        if part != "transformer" or stored
    }
    if whole and isinstance(transformer := readers.get("transformer"), FolderPart):
        readers["transformer"], said = _whole(transformer, architecture, cfg)
        notes.append(said)
    elif "transformer" in readers and root is not None and (root / FULL).is_dir():
        notes.append(f"{root / FULL} is left aside: without text_recon_gamma the last block has no text branch")
    notes += [f"{part} is {place.folder}" for part, place in places.items() if place.flag != FLAG]
    drawn = _drawn(cfg, architecture)
    if drawn_parts := [part for part in PARTS if part not in readers and part != "transformer"]:
        notes.append(f"random: {', '.join(drawn_parts)}")
    return Assembled(
        architecture, readers, drawn, _vocabulary_folders(root, places), tuple(notes), _shift(root, readers)
    )


def _drawn(cfg: TrainConfig, architecture: Architecture) -> Source:
    from difftrain.models.sd3.sources import RandomSource

    return RandomSource(architecture, cfg.training.seed or 0)


def _folder_faults(root: Path | None) -> list[Fault]:
    if root is None:
        return []
    if not root.is_dir():
        return [Fault(FLAG, f"there is no folder '{root}'", "give a diffusers folder of Stable Diffusion 3")]
    kind = read_json(root / "model_index.json").get("_class_name", "nothing")
    if str(kind).startswith("StableDiffusion3"):
        return []
    remedy = "a diffusers folder of SD3 has a model_index.json that says StableDiffusion3Pipeline"
    return [Fault(FLAG, f"{root} holds {kind}, not SD3", remedy)]


def _places(cfg: TrainConfig, root: Path | None) -> tuple[dict[str, Place], list[Fault]]:
    """Find the folder of every part: what is given for it (its own, or a whole model's), else the model's."""
    places = {part: Place(root / folder, FLAG) for part, folder in FOLDERS.items() if root is not None}
    faults = []
    for part, given in elsewhere(cfg).items():
        path, flag = Path(given).expanduser(), f"[model] {FIELDS[part]}"
        inside = path / FOLDERS[part]
        folder = inside if (inside / "config.json").is_file() else path
        if not path.is_dir():
            what = f"'{path}' is a file" if path.is_file() else f"there is no folder '{path}'"
            remedy = "give a folder as diffusers writes it: config.json beside the weights; or a whole model's"
            faults.append(Fault(flag, what, remedy))
        else:
            places[part] = Place(folder, flag)
    return places, faults


def _sizes(places: Mapping[str, Place], base: Mapping[str, Any], *, lost: bool) -> tuple[dict[str, Any], list[Fault]]:
    sizes: dict[str, Any] = {}
    faults: list[Fault] = []
    for key, part in SECTIONS.items():
        if part not in places:
            sizes |= {key: base[key]} if key in base else {}
            continue
        try:
            sizes[key] = read_part_config(places[part].folder, part, places[part].flag)
        except ConfigFault as error:
            faults += error.faults
    missing = [part for key, part in SECTIONS.items() if part not in places and key not in base]
    if missing and not lost:  # of a folder that is not what it should be, that is all there is to say
        remedy = f"give a whole model's folder, or [model] {', '.join(FIELDS[part] for part in missing)}"
        faults.append(Fault("[model]", f"no weights are named for {', '.join(missing)}", remedy))
    return sizes, faults


def _depth(
    cfg: TrainConfig, found: Architecture, stored: bool, light_folder: bool
) -> tuple[int, bool, list[str], list[Fault]]:
    """Choose the number of blocks, and say whether the stored ones are taken.

    SD3-Light begins with random weights of its own depth beside the parts of any SD3, or goes on from its own.
    """
    light, own = cfg.model.train_type == LIGHT, found.num_layers
    asked = cfg.model.num_layers or (LIGHT_LAYERS if light and stored and not light_folder else own)
    if not stored:
        return asked, False, [f"the transformer begins with random weights: {asked} joint blocks"], []
    if asked == own:
        taken = [f"the transformer's weights are taken as they are stored: {own} joint blocks"]
        return own, True, taken if light else [], []
    if light:
        note = f"the transformer begins with random weights: {asked} joint blocks of the stored width, of which there are {own}"
        return asked, False, [note], []
    what = f"is {asked}, the transformer has {own} joint blocks"
    remedy = "leave it out; train_type = 'sd3_light_pretrain' begins another depth with random weights"
    return own, True, [], [Fault("[model] num_layers", what, remedy)]


def _whole(stored: FolderPart, architecture: Architecture, cfg: TrainConfig) -> tuple[Part, str]:
    """Return the transformer with the last block's text branch: as it was trained where that lies beside an export."""
    full = stored.path.parent / FULL
    if stored.path.name == FOLDERS["transformer"] and (full / "config.json").is_file():
        reader = FolderPart(full, "transformer", stored.flag, mmap=not cfg.model.disable_mmap)
        return reader, f"the transformer is {full}: with the text branch of its last block"
    said = "the last block's text branch begins anew: diffusers' layout has none, and there is no transformer_full"
    return BranchlessPart(stored, architecture, cfg.training.seed or 0), said


def _vocabulary_folders(root: Path | None, places: Mapping[str, Place]) -> dict[int, Path]:
    """Find the folders of vocabularies: beside an encoder that comes from elsewhere, else the model's."""
    found = {}
    for i in (1, 2, 3):
        place = places.get(f"text_encoder_{i}")
        name = "tokenizer" if i == 1 else f"tokenizer_{i}"
        near = [place.folder.parent / name] if place else []
        near += [root / name] if root else []
        if (folder := next((path for path in near if path.is_dir()), None)) is not None:
            found[i] = folder
    return found


def _shift(root: Path | None, readers: Mapping[str, Part]) -> float | None:
    """Return how far the stored model's sampler shifts its times."""
    if root is None or "transformer" not in readers:
        return None
    found = read_json(root / "scheduler" / "scheduler_config.json").get("shift")
    return float(found) if isinstance(found, int | float) else None
