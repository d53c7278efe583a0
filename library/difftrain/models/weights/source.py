"""Where the weights of a family come from: a diffusers folder, a file or folder for a part, or a seed.

1. `source_of` finds the place of every part: what is given for it, else the model's folder, else a shipped size.
2. Sizes are read from config.json, from a file's shapes, or from the size that is drawn; misfits are named all at once.
3. `Source.weights` streams one tensor at a time, from files or from (seed, part, name).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.diffusion.keys import STREAM_VERSION
from difftrain.models import counts
from difftrain.models import sizes as known
from difftrain.models.build import build
from difftrain.models.facts import Agree, Bound
from difftrain.models.sizes_file import read_sizes
from difftrain.models.vae import shipped as vae_shipped
from difftrain.models.weights import infer
from difftrain.models.weights.file_names import is_second_name
from difftrain.models.weights.fingerprints import hashed
from difftrain.models.weights.initial import DRAW_VERSION, Scale, by_fan_in, clip_scale, initial_weights, t5_scale
from difftrain.models.weights.part_files import PartFiles
from difftrain.models.weights.stored_part import read_json
from difftrain.models.weights.whole_file import PartInFile, WholeFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from difftrain.config import TrainConfig
    from difftrain.models.description import Description

INITS = ("adaln_zero", "fan_in")
# sizes that change no tensor and differ between files of one release
_LOOSE = ("sample_size", "force_upcast", "bos_token_id", "eos_token_id", "pad_token_id")
_HEAD = ("family", "name", "init")  # of a file of sizes what is no part
_TITLES = {"vae": "the VAE"}
_T5 = ("transformers:T5EncoderModel", "transformers:UMT5EncoderModel")
_CLIP = ("transformers:CLIPTextModel", "transformers:CLIPTextModelWithProjection")


@dataclass(frozen=True)
class Source:
    """The sizes and weights of every part. readers: of those that are stored; the others are drawn from the seed.

    kinds: part -> "library:Class". zero: pattern of the denoiser's parameters that begin as zeros (init adaln_zero).
    name: of the size. named_hashes: see ModelFamily. whole: the file that holds several parts, where there is one.
    """

    kinds: Mapping[str, str]
    sizes: Mapping[str, Mapping[str, Any]]
    readers: Mapping[str, PartFiles]
    seed: int
    denoiser: str
    zero: str = ""
    init: str = "adaln_zero"
    tokenizer_dirs: Mapping[str, Path] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    name: str = "custom"
    named_hashes: bool = False
    whole: WholeFile | None = None

    @property
    def architecture(self) -> Source:
        """Build and count parts for stand_in.py."""
        return self

    def build(self, part: str) -> Any:
        """Build a part whose parameters have no memory. Raises ConfigFault for impossible sizes."""
        return build(self.kinds[part], part, self.sizes[part])

    def complete(self, part: str) -> dict[str, Any]:
        """Return a part's arguments with its class's defaults."""
        return known.complete(self.kinds[part], self.sizes[part])

    def count(self, part: str) -> int:
        """Count a part's parameters, by formula or from the headers of its files where nothing has to be imported."""
        kind = self.kinds[part]
        with known.possible(part):
            if kind == "diffusers:AutoencoderKL":
                return counts.vae(self.complete(part))
            if kind in _CLIP:
                return counts.clip(self.sizes[part], projected=kind == _CLIP[1])
            if kind == _T5[0]:
                return counts.t5(self.sizes[part])
        if part in self.readers:
            return self.readers[part].count()
        return sum(each.numel() for each in self.build(part).parameters())

    def decisive(self, part: str) -> dict[str, Any]:
        """Return what decides, weights aside, what an encoder makes."""
        return known.decisive(self.kinds[part], self.sizes[part])

    def faults(self, modules: Mapping[str, Any]) -> list[Fault]:
        """Compare stored parts with modules of them."""
        stored = {part: reader for part, reader in self.readers.items() if part in modules}
        inside = {part: (reader, modules[part]) for part, reader in stored.items() if isinstance(reader, PartInFile)}
        problems = self.whole.faults(inside) if self.whole and inside else []
        return problems + [
            fault for part, reader in stored.items() if part not in inside for fault in reader.faults(modules[part])
        ]

    def weights(self, part: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Give a part's tensors one at a time, fixed tables included."""
        if part in self.readers:
            yield from self.readers[part].weights(module)
            return
        if part == "vae" and self._ships_vae:
            yield from vae_shipped.shipped_vae(module)
            return
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        yield from ((name, value) for name, value in module.state_dict().items() if name not in parameters)
        yield from initial_weights(module, part, self.seed, self._scale(part, module))

    @property
    def _ships_vae(self) -> bool:
        """Tell whether the random VAE would be of the size whose trained weights are shipped; scales change no weight."""
        if self.kinds.get("vae") != "diffusers:AutoencoderKL":
            return False
        shipped = vae_shipped.shipped_sizes()
        if self.named_hashes:
            return bool(self.sizes["vae"] == shipped)
        ours = {key: value for key, value in self.sizes["vae"].items() if key not in ("scaling_factor", "shift_factor")}
        return known.decisive(self.kinds["vae"], ours) == known.decisive(self.kinds["vae"], shipped)

    def _scale(self, part: str, module: Any) -> Scale:
        kind, config = self.kinds[part], module.config
        if kind in _CLIP:
            return clip_scale(config.num_hidden_layers, config.hidden_size)
        if kind in _T5:
            return t5_scale(config.d_model, config.d_kv, config.num_heads, config.d_ff)
        zero = re.compile(self.zero) if part == self.denoiser and self.zero and self.init == INITS[0] else None
        return lambda name, shape: 0.0 if zero and zero.search(name) else by_fan_in(name, shape)

    def fingerprint(self, part: str) -> str:
        """Hash a part's weights, which are not loaded for it. Raises ConfigFault where they do not fit."""
        sizes = sorted(self.sizes[part].items())
        if part in self.readers and self.named_hashes:
            return self.readers[part].named_fingerprint(hashed(part, sizes), lambda: self.build(part))
        if part in self.readers:
            return self.readers[part].fingerprint(part)
        if part == "vae" and self._ships_vae:
            return (
                vae_shipped.shipped_fingerprint(lambda: self.build(part))
                if self.named_hashes
                else vae_shipped.shipped_digest()
            )
        return hashed("random", STREAM_VERSION, DRAW_VERSION, self.seed, part, sizes)

    def as_it_lies(self, part: str, stem: str, dtype: torch.dtype | None) -> list[tuple[Path, str]] | None:
        """Name the files of a part that an export can have as they are; None: they must be written anew."""
        return self.readers[part].as_it_lies(stem, dtype) if part in self.readers else None


# ------------------------------------------------------------------ finding it


def source_of(cfg: TrainConfig, family: Description) -> Source:
    """Find the weights that a configuration names. Raises ConfigFault with every fault that can be known by then."""
    model, where = cfg.model, family.where("pretrained")
    if model.pretrained and model.init_from_config:
        what = "contradicts --init_from_config: weights come from a file or from a seed"
        raise ConfigFault([Fault(where, what, "give one of the two")])

    # --- places: the model's folder or file, and parts from elsewhere
    root = Path(model.pretrained).expanduser() if model.pretrained else None
    base = family.drawn_sizes()
    readers: dict[str, PartFiles] = {}
    whole = None
    problems: list[Fault] = []
    if root is not None and root.is_file() and family.one_file:
        whole = WholeFile(root, where, family.one_file, mmap=not model.disable_mmap)
        content = whole.sizes()
        base = shipped_sizes(family, family.one_file.released) if content is None else content
        problems = [] if content is None else section_faults(family, content, str(root))
        if problems:
            raise ConfigFault(problems)
        readers = {part: PartInFile(whole, part, kind, rule=family.rule(part)) for part, kind in family.parts.items()}
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
    if absent := [part for part in family.parts if part not in sizes]:
        if not problems:
            problems.append(_nowhere(family, absent))
        raise ConfigFault(problems)
    problems += family.misfits(sizes, str(root or model.init_from_config or "[model]"))
    if problems:
        raise ConfigFault(problems)

    # --- what lies beside the weights
    drawn = [part for part in family.parts if part not in readers]
    elsewhere = [(_TITLES.get(part, part), readers[part].path) for part in parts_elsewhere(cfg, family)]
    source = Source(
        kinds=family.parts,
        sizes=sizes,
        readers=readers,
        seed=cfg.training.seed or 0,
        denoiser=family.denoiser,
        zero=family.zero,
        init=base.get("init", INITS[0]),
        tokenizer_dirs=_tokenizer_dirs(cfg, family, root, readers),
        scheduler=read_json(root / "scheduler" / "scheduler_config.json") if root else {},
        name=str(base.get("name", "custom")) if whole or set(readers) <= {"vae"} else "custom",
        named_hashes=family.named_hashes,
        whole=whole,
    )
    notes = [*_of_the_draw(drawn, family, source), *(f"{title} is {path}" for title, path in elsewhere)]
    return Source(**{**source.__dict__, "notes": tuple(notes)})


def _of_the_draw(drawn: list[str], family: Description, source: Source) -> list[str]:
    """Say which weights are random."""
    if not drawn:
        return []
    which = "all weights are random" if len(drawn) == len(family.parts) else f"random weights: {', '.join(drawn)}"
    if "vae" not in drawn:
        return [which]
    if source._ships_vae:
        return [f"{which} but the VAE's, which is a small one trained by us on synthetic pictures"]
    return [f"{which}, the VAE's too: it can only draw noise (--vae takes a trained one)"]


def parts_elsewhere(cfg: TrainConfig, family: Description) -> dict[str, tuple[str, str]]:
    """Return path and field of parts that do not come with the model: part -> (path, "[model] field")."""
    given = {part: (getattr(cfg.model, name, None), family.where(name)) for part, name in _fields(family).items()}
    return {part: (path, where) for part, (path, where) in given.items() if path}


def _fields(family: Description) -> dict[str, str]:
    """Map each part to the field of [model] that takes it from elsewhere."""
    fields = {family.denoiser: "transformer", "vae": "vae"}
    texts = [text.part for text in family.texts]
    fields |= {part: f"text_encoder{number}" for number, part in enumerate(dict.fromkeys(texts), start=1)}
    return {part: name for part, name in fields.items() if part in family.parts}


def part_path(given: str, folder: str, where: str) -> Path:
    """Return the folder or file of a part; of a whole model's folder the part's own. Raises ConfigFault."""
    path = Path(given).expanduser()
    if not path.exists():
        remedy = "give a folder as diffusers writes it (config.json beside the weights), a whole model's, or a file"
        raise ConfigFault([Fault(where, f"there is no file or folder '{path}'", remedy)])
    inside = path / folder
    return inside if (inside / "config.json").is_file() else path


def shipped_sizes(family: Description, choice: str, where: str = "--init_from_config") -> dict[str, Any]:
    """Return a size by name or of a JSON file: a section for each part, by its folder. Raises ConfigFault."""
    sections = [family.folder(part) for part in family.parts]
    if choice in family.row.sizes:
        text = (
            resources.files("difftrain.models")
            .joinpath("sizes_shipped", f"{family.name}.{choice}.json")
            .read_text("utf-8")
        )
        return json.loads(text)
    content = read_sizes(choice, where, family.row.sizes, sections)
    problems = section_faults(family, content, choice)
    if not problems:
        problems = family.misfits({part: content[family.folder(part)] for part in family.parts}, choice)
    if problems:
        raise ConfigFault(problems)
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
            place = f"{where} [{family.folder(part)}]"
            problems += [Fault(place, f"unknown key {key!r}") for key in sorted(set(section) - set(taken))]
            problems += _wrong_sizes(family, part, section, place)
    return problems


def _wrong_sizes(family: Description, part: str, section: Mapping[str, Any], place: str) -> list[Fault]:
    """Find sizes that have to be said and are not, and counts that are none."""
    needed = [*known.needed(family.parts[part]), *family.needed.get(part, ())]
    problems = [Fault(place, f"{key!r} is missing") for key in needed if section.get(key) is None]
    for key in needed:
        value = section.get(key)
        no_count = value is None or key in known.NO_COUNTS or key.endswith(("_type", "_types"))
        if not no_count and not isinstance(value, list | tuple) and (type(value) is not int or value < 1):
            problems.append(Fault(f"{place} {key}", f"is {value!r}, must be a positive whole number"))
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
    if root.is_file():
        what = f"'{root}' is a file, which holds the denoiser alone"
        remedy = "give it as transformer_path, and a folder with the other parts as diffusers_path"
        return [Fault(where, what, remedy)]
    if not root.is_dir() and family.one_file:
        remedy = "give a diffusers folder or a single .safetensors or .ckpt file that is on this machine"
        return [Fault(where, f"there is no file or folder '{root}'", remedy)]
    if not root.is_dir():
        return [Fault(where, f"there is no folder '{root}'", f"give a diffusers folder of {title}")]
    kind = str(read_json(root / "model_index.json").get("_class_name", "nothing"))
    if kind.startswith(pipeline.removesuffix("Pipeline")) and not _is_of_another(kind, family):
        return []
    from difftrain.models.registry import FAMILIES

    others = {row.pipeline: name for name, row in FAMILIES.items()}
    near = others.get(kind) or next(iter(others[each] for each in get_close_matches(kind, others, n=1)), None)
    nearest = (
        f"; type = {near!r} trains {kind}"
        if near and others.get(kind)
        else f"; the nearest is type = {near!r}"
        if near
        else ""
    )
    remedy = f"a diffusers folder of {title} has a model_index.json that says {pipeline}{nearest}"
    return [Fault(where, f"{root} holds {kind}, not {title}", remedy)]


def _is_of_another(kind: str, family: Description) -> bool:
    from difftrain.models.registry import FAMILIES

    return any(
        row.pipeline == kind
        for name, row in FAMILIES.items()
        if name != family.name and row.pipeline != family.row.pipeline
    )


def _nowhere(family: Description, absent: list[str]) -> Fault:
    where, choices = family.where("pretrained"), "|".join(family.row.sizes)
    if len(absent) == len(family.parts) or family.one_file:
        what = f"{where}=PATH" if where.startswith("--") else f"{where.removeprefix('[model] ')} = FOLDER"
        seed = (
            f"--init_from_config={choices}|FILE.json"
            if where.startswith("--")
            else f"init_from_config = {choices.replace('|', ', ')} or FILE.json"
        )
        return Fault("[model]", "no weights are named", f"give {what}, or {seed}")
    keys = dict.fromkeys(family.where(_fields(family)[part]) for part in absent if part in _fields(family))
    remedy = f"give a whole model's folder, or {', '.join(keys)}"
    return Fault("[model]", f"no weights are named for {', '.join(absent)}", remedy)


def misfits(family: Description, sizes: Mapping[str, Mapping[str, Any]], where: str) -> list[Fault]:
    """Name everything that does not fit together, before a weight is read."""
    problems = []
    for part, given in sizes.items():
        problems += _wrong_sizes(family, part, given, f"{where} [{family.folder(part)}]")
    if problems:
        return problems
    whole = {part: known.complete(family.parts[part], given) for part, given in sizes.items()}
    rows: tuple[Agree | Bound, ...] = family.agree
    for row in rows:
        with known.possible(row.where):
            misfit = row.misfit(whole)
        if misfit:
            part, _, argument = row.where.partition(".")
            problems.append(Fault(f"{where} [{family.folder(part)}] {argument}", *misfit[1:]))
    return problems


def _tokenizer_dirs(
    cfg: TrainConfig, family: Description, root: Path | None, readers: Mapping[str, PartFiles]
) -> dict[str, Path]:
    """Find the folders of vocabularies: given, beside an encoder that comes from elsewhere, else the model's."""
    found = {}
    for number, text in enumerate(family.texts, start=1):
        reader = readers.get(text.part)
        near = [reader.path.parent / text.tokenizer] if reader and not isinstance(reader, PartInFile) else []
        near += [root / text.tokenizer] if root else []
        given = getattr(cfg.model, f"tokenizer{number}", None)
        if given:
            found[text.tokenizer] = Path(given).expanduser()
        elif (folder := next((path for path in near if path.is_dir()), None)) is not None:
            found[text.tokenizer] = folder
    return found


__all__ = ["INITS", "Source", "is_second_name", "misfits", "parts_elsewhere", "shipped_sizes", "source_of"]
