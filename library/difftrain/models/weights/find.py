"""Finding the weights that a configuration names: a diffusers folder, a file or folder for a part, or a seed.

1. `source_of` finds every part: what is given for it, else the model's folder, else a shipped size.
2. Sizes are read from config.json, from a file's shapes, or from the size that is drawn; misfits are named all at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault
from difftrain.io.files import read_regular
from difftrain.models import build as known
from difftrain.models.registry import FAMILIES
from difftrain.models.weights import infer
from difftrain.models.weights.bounds import count_fault
from difftrain.models.weights.files import read_json
from difftrain.models.weights.identify import is_told
from difftrain.models.weights.part_files import PartFiles, PartInFile, SingleFile
from difftrain.models.weights.source import INITS, WeightSource, counted

if TYPE_CHECKING:
    from difftrain.config import TrainConfig
    from difftrain.models.description import Description

# sizes that change no tensor and differ between files of one release
_LOOSE = ("sample_size", "force_upcast", "bos_token_id", "eos_token_id", "pad_token_id")
_HEAD = ("family", "name", "init")  # of a file of sizes what is no part
_TITLES = {"vae": "the VAE"}


def source_of(cfg: TrainConfig, family: Description, drawn_sizes: Callable[[], dict[str, Any]]) -> WeightSource:
    """Find the weights that a configuration names; drawn_sizes: of parts that may be stored nowhere.

    Raises ConfigFault with every fault that can be known by then.
    """
    model, where = cfg.model, family.where("pretrained")
    if model.pretrained and model.init_from_config:
        what = f"contradicts {option('model.init_from_config')}: weights come from a file or are random, not both"
        raise ConfigFault([Fault(where, what, "give one of the two")])

    # --- places: the model's folder or file, and parts from elsewhere
    root = Path(model.pretrained).expanduser() if model.pretrained else None
    base = drawn_sizes()
    readers: dict[str, PartFiles] = {}
    file = None
    problems: list[Fault] = []
    if root is not None and root.is_file() and family.one_file:
        file = SingleFile(root, where, family.one_file, mmap=not model.disable_mmap)
        content = file.sizes()
        base = _sizes_by_keys(file, family) if content is None else content
        problems = _file_faults(file, content, family)
        if content is not None and not problems:
            problems = section_faults(family, content, str(root))
        if problems:
            raise ConfigFault(problems)
        readers = {
            part: PartInFile(file, part, kind, rule=family.rule(part))
            for part, kind in family.parts.items()
            if part not in family.one_file.optional or file.has(part)
        }
    elif root is not None:
        problems = _folder_faults(root, family)
        if not problems:
            readers = {part: _reader(cfg, family, part, root / family.folder(part), where) for part in family.parts}
    own_vae = readers.get("vae")
    for part, (path, flag) in parts_elsewhere(cfg, family).items():
        try:
            readers[part] = _reader(cfg, family, part, part_path(path, family.folder(part), flag), flag)
        except ConfigFault as fault:
            problems += fault.faults

    # --- sizes: of files, or of what is drawn
    sizes: dict[str, Mapping[str, Any]] = {}
    lone = readers.get("vae")
    # a file of nothing but a VAE says little of its sizes: such a one has those of the model that it is for
    borrows = family.vae_scales is None and lone is not None and lone is not own_vae and lone.path.is_file()
    for part in family.parts:
        reader = own_vae if part == "vae" and borrows else readers.get(part)
        section = base.get(family.folder(part))
        try:
            if reader is not None and not isinstance(reader, PartInFile):
                sizes[part] = reader.sizes()
            elif section is not None:
                sizes[part] = section
        except ConfigFault as fault:
            problems += fault.faults
    if absent := [part for part in family.parts if part not in sizes or (file and part not in readers)]:
        if not problems:
            problems.append(_nowhere(family, absent))
        raise ConfigFault(problems)
    origin = str(root or model.init_from_config or "[model]")
    problems += family.misfits(sizes, origin)
    for part, reader in readers.items() if not problems else ():
        if not reader.path.is_dir():
            continue  # sizes that are read off the tensors have no more of them
        with known.possible(part):
            count = counted(family.parts[part], known.complete(family.parts[part], sizes[part]))
        if count is not None:
            problems += count_fault(part, count, reader.num_bytes(), f"{origin} [{family.folder(part)}]")
    if problems:
        raise ConfigFault(problems)

    # --- what lies beside the weights
    drawn = [part for part in family.parts if part not in readers]
    elsewhere = [(_TITLES.get(part, part), readers[part].path) for part in parts_elsewhere(cfg, family)]
    source = WeightSource(
        kinds=family.parts,
        sizes=sizes,
        readers=readers,
        seed=cfg.training.seed or 0,
        denoiser=family.denoiser,
        zero=family.zero,
        init=base.get("init", INITS[0]),
        tokenizer_dirs=_tokenizer_dirs(cfg, family, root, readers),
        scheduler=_scheduler_of(root, file),
        name=str(base.get("name", "custom")) if file or set(readers) <= {"vae"} else "custom",
        named_hashes=family.named_hashes,
        single_file=file,
    )
    notes = [*_of_the_draw(drawn, family, source), *(f"{title} is {path}" for title, path in elsewhere)]
    return WeightSource(**{**source.__dict__, "notes": tuple(notes)})


def _sizes_by_keys(file: SingleFile, family: Description) -> dict[str, Any]:
    """Return the sizes of a release, with those of the denoiser that its keys and shapes tell. Raises ConfigFault."""
    assert family.one_file is not None
    released = shipped_sizes(family, family.one_file.released)
    if family.infer is None or not file.has(family.denoiser):
        return released
    prefix, section = family.one_file.prefixes[family.denoiser], family.folder(family.denoiser)
    bare = {key.removeprefix(prefix): shape for key, shape in file.shapes.items() if key.startswith(prefix)}
    try:
        own = family.infer(bare)
    except (KeyError, ValueError, IndexError, ZeroDivisionError):
        return released  # what is wrong with its keys is said where they are compared
    is_release = all(own.get(key) == value for key, value in released[section].items())
    return released | {section: own} | ({} if is_release else {"name": "custom"})


def _scheduler_of(root: Path | None, file: SingleFile | None) -> dict[str, Any]:
    """Return the scheduler's settings that came with the weights: a folder's, an export's, or what all readers take."""
    if file is None:
        return read_json(root / "scheduler" / "scheduler_config.json") if root else {}
    scheduler_config = file.stored_facts().get("scheduler")
    if isinstance(scheduler_config, dict):
        return scheduler_config
    return {} if file.facts.shift is None else {"shift": file.facts.shift}


def _of_the_draw(drawn: list[str], family: Description, source: WeightSource) -> list[str]:
    """Say which weights are random."""
    if not drawn:
        return []
    which = "all weights are random" if len(drawn) == len(family.parts) else f"random weights: {', '.join(drawn)}"
    if "vae" not in drawn:
        return [which]
    if source.ships_vae:
        return [f"{which} except the VAE's, which is a small one trained on synthetic images"]
    return [f"{which}, the VAE's too: it can only generate noise ({option('model.vae')} takes a trained one)"]


def parts_elsewhere(cfg: TrainConfig, family: Description) -> dict[str, tuple[str, str]]:
    """Return path and field of parts that do not come with the model: part -> (path, "[model] field")."""
    fields = {part: (getattr(cfg.model, name, None), family.where(name)) for part, name in _fields(family).items()}
    return {part: (path, where) for part, (path, where) in fields.items() if path}


def _fields(family: Description) -> dict[str, str]:
    """Map each part to the field of [model] that takes it from elsewhere."""
    fields = {family.denoiser: "transformer", "vae": "vae"}
    texts = [text.part for text in family.texts]
    fields |= {part: f"text_encoder{number}" for number, part in enumerate(dict.fromkeys(texts), start=1)}
    return {part: name for part, name in fields.items() if part in family.parts}


def part_path(text: str, folder: str, where: str) -> Path:
    """Return the folder or file of a part; of a whole model's folder the part's own. Raises ConfigFault."""
    path = Path(text).expanduser()
    if not path.exists():
        remedy = "give a folder as diffusers writes it (config.json next to the weights), the folder of a complete model, or a file"
        raise ConfigFault([Fault(where, f"no such file or folder: '{path}'", remedy)])
    inside = path / folder
    return inside if (inside / "config.json").is_file() else path


def shipped_sizes(family: Description, choice: str, where: str = "") -> dict[str, Any]:
    """Return a size by name or of a JSON file: a section for each part, by its folder. Raises ConfigFault."""
    sections = [family.folder(part) for part in family.parts]
    if choice in family.row.sizes:
        text = (
            resources.files("difftrain.models")
            .joinpath("sizes_shipped", f"{family.name}.{choice}.json")
            .read_text("utf-8")
        )
        content = json.loads(text)
        if family.denoiser in content:  # one of several experts has another folder
            content[family.folder(family.denoiser)] = content.pop(family.denoiser)
        return content
    content = _read_sizes(choice, where or option("model.init_from_config"), family.row.sizes, sections)
    problems = section_faults(family, content, choice)
    if not problems:
        problems = family.misfits({part: content[family.folder(part)] for part in family.parts}, choice)
    if problems:
        raise ConfigFault(problems)
    return content


def _read_sizes(choice: str, where: str, flavors: Iterable[str], sections: Iterable[str]) -> dict[str, Any]:
    """Read a file; flavors and sections are what would be right. Raises ConfigFault where it is none."""
    path = Path(choice)
    remedy = f"give {', '.join(flavors)} or a JSON file with the sections {', '.join(sections)}"
    if not path.is_file():
        raise ConfigFault([Fault(where, f"no such file: {choice!r}", remedy)])
    try:
        content = json.loads(read_regular(path, 1 << 26))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigFault([Fault(where, f"{choice} is not JSON: {error}", remedy)]) from None
    if not isinstance(content, dict):
        raise ConfigFault([Fault(where, f"{choice} holds a {type(content).__name__}, not an object", remedy)])
    return content


def is_released(family: Description, size: str) -> bool:
    """Tell whether a family's sizes are those of a shipped size, but for what changes no tensor."""
    released = shipped_sizes(family, size)
    return all(
        family.source.sizes[part].get(key) == value
        for part in family.parts
        for key, value in released[family.folder(part)].items()
        if key not in _LOOSE
    )


def section_faults(family: Description, content: Mapping[str, Any], where: str) -> list[Fault]:
    """Name what of a file of sizes is missing or unknown."""
    sections = [family.folder(part) for part in family.parts]
    unknown = sorted(set(content) - set(sections) - {*_HEAD, *family.beside_sizes})
    problems = [Fault(where, f"unknown section {key!r}", f"known: {', '.join(sections)}") for key in unknown]
    problems += [Fault(where, f"has no section {key!r}") for key in sections if not isinstance(content.get(key), dict)]
    if content.get("init", INITS[0]) not in INITS:
        problems.append(Fault(f"{where} init", f"is {content['init']!r}", f"one of: {', '.join(INITS)}"))
    for part in family.parts:
        section = content.get(family.folder(part))
        if isinstance(section, dict):
            taken = known.accepted(family.parts[part], section)
            table = f"{where} [{family.folder(part)}]"
            problems += [Fault(table, f"unknown key {key!r}") for key in sorted(set(section) - set(taken))]
            problems += family.wrong_sizes(part, section, table)
    return problems


def _reader(cfg: TrainConfig, family: Description, part: str, path: Path, where: str) -> PartFiles:
    kind = family.parts[part]
    size_reader: Any = infer.BY_CLASS.get(kind)
    if part == family.denoiser:
        size_reader = family.infer
    elif kind == "diffusers:AutoencoderKL":
        scales = family.vae_scales or {}
        size_reader = lambda shapes: infer.autoencoder_kl(shapes) | dict(scales)  # noqa: E731
    return PartFiles(path, kind, where, mmap=not cfg.model.disable_mmap, rule=family.rule(part), infer=size_reader)


def _folder_faults(root: Path, family: Description) -> list[Fault]:
    """Say why a folder is no model of the family: which it is, by its model_index.json."""
    title, pipeline, where = family.row.title, family.row.pipeline, family.where("pretrained")

    # --- no folder
    if root.is_file():
        what = f"'{root}' is a file, which contains only the denoiser"
        remedy = "give it as transformer_path, and a folder with the other parts as diffusers_path"
        return [Fault(where, what, remedy)]
    if not root.is_dir() and family.one_file:
        remedy = "give a diffusers folder or a single .safetensors or .ckpt file that is on this machine"
        return [Fault(where, f"no such file or folder: '{root}'", remedy)]
    if not root.is_dir():
        return [Fault(where, f"no such folder: '{root}'", f"give a diffusers folder of {title}")]

    # --- of another family: name it, or the nearest
    kind = str(read_json(root / "model_index.json").get("_class_name", "nothing"))
    if kind.startswith(_stem(pipeline)) and not _is_of_another(kind, family):
        return _sibling_faults(root, family)
    families: dict[str, list[str]] = {}
    for name, row in FAMILIES.items():
        families.setdefault(row.pipeline, []).append(name)
    near = families.get(kind) or next((families[match] for match in get_close_matches(kind, families, n=1)), [])
    types = " or ".join(f"type = {name!r}" for name in near)
    nearest = f"; {types} trains {kind}" if kind in families else f"; the nearest is {types}" if near else ""
    remedy = f"a diffusers folder of {title} has a model_index.json that says {pipeline}{nearest}"
    return [Fault(where, f"{root} holds {kind}, not {title}", remedy)]


def _stem(pipeline: str) -> str:
    return pipeline.removesuffix("Pipeline")


def _is_of_another(kind: str, family: Description) -> bool:
    """Tell whether a pipeline's name begins with that of a family whose name is longer."""
    own = _stem(family.row.pipeline)
    return any(
        kind.startswith(stem) and len(stem) > len(own) for stem in (_stem(r.pipeline) for r in FAMILIES.values())
    )


def _sibling_faults(root: Path, family: Description) -> list[Fault]:
    """Say where a folder is of another family of the same pipeline."""
    row = family.row

    def read(name: str) -> Mapping[str, Any]:
        return read_json(root / name)

    has_configs = all(
        read(f"{folder}/config.json")
        for folder in {part.partition(".")[0] for part, _ in row.told_by} - {"model_index"}
    )
    if is_told(row, read) or not has_configs:
        return []
    differs = ", ".join(
        f"{path.partition('.')[2]} {'present' if value is True else value or 'absent'}" for path, value in row.told_by
    )
    return [
        Fault(
            family.where("pretrained"),
            f"{root} holds {other.title}, not {row.title}",
            f"type = {name!r} trains it; a folder of {row.title} has {differs}",
        )
        for name, other in FAMILIES.items()
        if other.pipeline == row.pipeline and name != family.name and is_told(other, read)
    ]


def _file_faults(file: SingleFile, content: Mapping[str, Any] | None, family: Description) -> list[Fault]:
    """Say where a file is another family's, by what it says of itself or by its keys, or lacks parts that it must have."""
    title = infer.looks_like(file.shapes)
    name = str((content or {}).get("family", "")) or next((n for n, row in FAMILIES.items() if row.title == title), "")
    if name in FAMILIES and name != family.name:
        what = f"{file.path} holds {FAMILIES[name].title}, not {family.row.title}"
        return [Fault(file.flag, what, f"type = {name!r} trains it; {file.facts.layout}")]
    lacking = [part for part in family.parts if part not in file.facts.optional and not file.has(part)]
    if lacking:
        what = f"{file.path} looks like {title}; nothing of {', '.join(lacking)} is in it"
        return [Fault(file.flag, what, file.facts.layout)]
    return []


def _nowhere(family: Description, absent: list[str]) -> Fault:
    where, choices = family.where("pretrained"), "|".join(family.row.sizes)
    if len(absent) == len(family.parts) or not {"model.transformer", "model.text_encoder1"} & family.row.takes:
        what = f"{where}=PATH" if where.startswith("--") else f"{where.removeprefix('[model] ')} = FOLDER"
        seed = (
            f"{option('model.init_from_config')}={choices}|FILE.json"
            if where.startswith("--")
            else f"init_from_config = {choices.replace('|', ', ')} or FILE.json"
        )
        return Fault("[model]", "no weights are given", f"give {what}, or {seed}")
    keys = dict.fromkeys(family.where(_fields(family)[part]) for part in absent if part in _fields(family))
    remedy = f"give the folder of a complete model, or {', '.join(keys)}"
    return Fault("[model]", f"no weights are given for {', '.join(absent)}", remedy)


def _tokenizer_dirs(
    cfg: TrainConfig, family: Description, root: Path | None, readers: Mapping[str, PartFiles]
) -> dict[str, Path]:
    """Find the folders of vocabularies: given, beside an encoder that comes from elsewhere, else the model's."""
    folders = {}
    for number, text in enumerate(family.texts, start=1):
        reader = readers.get(text.part)
        near = [reader.path.parent / text.tokenizer] if reader and not isinstance(reader, PartInFile) else []
        # a language model's own repository has its tokenizer beside its weights
        near += [reader.path] if near and reader and (reader.path / "tokenizer.json").is_file() else []
        near += [root / text.tokenizer] if root else []
        own_folder = getattr(cfg.model, f"tokenizer{number}", None)
        if own_folder:
            folders[text.tokenizer] = Path(own_folder).expanduser()
        elif (folder := next((path for path in near if path.is_dir()), None)) is not None:
            folders[text.tokenizer] = folder
    return folders
