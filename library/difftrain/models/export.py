"""Any family's weights for inference: a diffusers folder, or one file of the original layout; streamed, whole or absent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault, Parts
from difftrain.models.build import is_transformers
from difftrain.models.placeholder import MetaPlaceholder
from difftrain.models.weights.files import MODEL_STEMS, TEXT_STEMS
from difftrain.models.weights.fingerprints import Stamp, stamp
from difftrain.models.weights.folder_export import file_name, is_second_name, link_or_copy, new_folder
from difftrain.models.weights.keys import KeyMap, KeyPiece
from difftrain.models.weights.part_files import SIZES
from difftrain.models.weights.writers import Shapes, WeightWriter, safetensors_writer, torch_writer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.models.base import BaseFamily

Stream = Iterable[tuple[str, "Tensor"]]
FACTS = "difftrain.json"  # beside model_index.json: what diffusers' own files cannot say
HEADER = {"format": "pt"}
SUFFIXES = {"safetensors": ".safetensors", "ckpt": ".ckpt", "diffusers": "", "diffusers_safetensors": ""}


def export(
    family: BaseFamily, weights: Stream, parts: Parts, layout: str, path: Path, *, dtype: torch.dtype | None,
    metadata: dict[str, str],
) -> Path:  # fmt: skip
    """Write a layout and return what was written. path: without a suffix. dtype: of all weights; None: as they are.

    diffusers, diffusers_safetensors: a folder that the family's pipeline loads. safetensors, ckpt: one file of the
    original layout, with the denoiser, or with all parts where the family has such files. Raises ConfigFault for a layout
    that the family has not.
    """
    if layout not in family.row.layouts and not layout.startswith("diffusers"):
        if family.row.folder_only and layout == "safetensors":
            return write_folder(family, weights, parts, path, dtype, metadata)
        what = f"{layout} is not built for {family.row.title}"
        choices = f"one of {', '.join(family.row.layouts)}"
        remedy = "it is exported as a diffusers folder" if family.row.folder_only else choices
        raise ConfigFault([Fault(option("save.model_as"), what, remedy)])
    if layout.startswith("diffusers"):
        return write_folder(family, weights, parts, path, dtype, metadata, torch_files=_has_bin(family, layout))
    if family.one_file is not None:
        return write_single_file(family, weights, parts, path, layout, dtype, metadata)
    return write_file(family, weights, parts, path, dtype, metadata)


def _has_bin(family: BaseFamily, layout: str) -> bool:
    return layout == "diffusers" and family.writes_as_kohya


# ------------------------------------------------------------------ one file


def write_single_file(
    family: BaseFamily, weights: Stream, parts: Parts, path: Path, layout: str, dtype: torch.dtype | None,
    metadata: dict[str, str],
) -> Path:  # fmt: skip
    """Write all parts into one file. Sizes that are no release's go into it too, for its readers here."""
    facts = family.one_file
    assert facts is not None
    path = path.with_name(path.name + SUFFIXES[layout])
    beside, sizes = family.beside(parts), json.dumps(parts.config)
    if not family.is_released and layout == "ckpt":  # which has no header
        beside[SIZES] = torch.tensor(list(sizes.encode()), dtype=torch.uint8)
    elif not family.is_released:
        metadata = metadata | {SIZES: sizes}
    maps, stored = single_file_shapes(family, parts, dtype, beside)
    opened = safetensors_writer(path, stored, metadata) if layout == "safetensors" else torch_writer(path, stored)
    with opened as writer:
        for key, value in beside.items():
            writer.write(key, value)
        waiting: dict[str, dict[str, Tensor]] = {}
        stream = chain(weights, family.deferred_weights(parts, ()))
        for part, name, value in all_weights(family, stream, parts, set(family.parts)):
            names, prefix = maps[part], facts.prefixes[part]
            if (joined := names.collected(name, value, waiting.setdefault(part, {}))) is not None:
                writer.write(prefix + names.pieces[name].key, joined)
    return path


def single_file_shapes(
    family: BaseFamily, parts: Parts, dtype: torch.dtype | None, beside: Mapping[str, Tensor]
) -> tuple[dict[str, KeyMap], Shapes]:
    """Say where each tensor of a part goes in a file of all parts, and all that the file holds."""
    assert family.one_file is not None
    maps: dict[str, KeyMap] = {}
    stored: Shapes = {}
    for part, prefix in family.one_file.prefixes.items():
        maps[part] = key_map(family, part)
        kind = dtype or _own_dtype(parts, family, part)
        stored |= {prefix + key: (kind, shape) for key, shape in maps[part].stored.items()}
    for key, value in beside.items():
        stored[key] = (dtype if dtype and value.is_floating_point() else value.dtype, tuple(value.shape))
    return maps, stored


def key_map(family: BaseFamily, part: str) -> KeyMap:
    """Say where each tensor of a part goes in the original layout; where there is no rule it keeps its name."""
    if part not in family.key_maps:  # every save of a run asks, and its answer needs a module to be built
        module, kind = family.source.build(part), family.parts[part]
        rule = family.rule(part)
        shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        family.key_maps[part] = KeyMap(shapes, rule(module) if rule else lambda name: KeyPiece(file_name(kind, name)))
    return family.key_maps[part]


def write_file(
    family: BaseFamily, weights: Stream, parts: Parts, path: Path, dtype: torch.dtype | None, metadata: dict[str, str]
) -> Path:
    """Write the denoiser in its original layout: what diffusers' from_single_file and ComfyUI read."""
    part = family.denoiser
    names = key_map(family, part)
    own = _own_dtypes(parts, family, part, names.shapes)
    path = path.with_name(f"{path.name}.safetensors")
    stored: Shapes = {
        key: (dtype or reduce(torch.promote_types, (own[name] for name in names.members[key])), shape)
        for key, shape in names.stored.items()
    }
    waiting: dict[str, Tensor] = {}
    with safetensors_writer(path, stored, HEADER | metadata) as writer:
        for name, value in _of_part(weights, parts, family, part):
            if (joined := names.collected(name, value, waiting)) is not None:
                writer.write(names.pieces[name].key, joined)
    return path


def _of_part(weights: Stream, parts: Parts, family: BaseFamily, part: str) -> Iterator[tuple[str, Tensor]]:
    seen = set()
    for full, value in weights:
        owner, _, name = full.partition(".")
        if owner == part and name not in seen:
            seen.add(name)
            yield name, value
    for name, value in parts.root.get_submodule(part).state_dict().items():
        if name not in seen:
            yield name, value


# ------------------------------------------------------------------ a folder


def write_folder(
    family: BaseFamily, weights: Stream, parts: Parts, path: Path, dtype: torch.dtype | None, metadata: dict[str, str],
    *, torch_files: bool = False,
) -> Path:  # fmt: skip
    """Write what the family's pipeline loads; an older folder of that name is replaced.

    Frozen parts that lie on disk as they must be get a second name there, and are not written again.
    torch_files: weights are torch's .bin.
    """
    with new_folder(path) as aside:
        linked = set() if family.writes_as_kohya else _linked(family, parts, aside, dtype)
        _write_weights(family, weights, parts, aside, dtype, metadata, linked, torch_files=torch_files)
        write_configs(family, aside)
    for part in set(parts.frozen) & set(family.parts):
        if part not in linked and not family.writes_as_kohya:
            file = path / family.folder(part) / f"{stem_of(family, part)}.safetensors"
            family.written[part, dtype or _own_dtype(parts, family, part)] = (file, stamp(file))
    return path


def stem_of(family: BaseFamily, part: str) -> str:
    """Return what a part's file of weights is called, without its ending."""
    return (TEXT_STEMS if is_transformers(family.parts[part]) else MODEL_STEMS)[0]


def _linked(family: BaseFamily, parts: Parts, folder: Path, dtype: torch.dtype | None) -> set[str]:
    """Give frozen parts' files a second name where they are as they must be; return those parts.

    Those of the source, or those of an earlier export of this run that are still what was written.
    """
    done = set()
    for part in set(parts.frozen) & set(family.parts):
        files = family.source.reusable_files(part, stem_of(family, part), dtype)
        earlier, stamped = family.written.get((part, dtype or _own_dtype(parts, family, part)), (None, None))
        if files is None and earlier is not None and earlier.is_file() and _alike(earlier, stamped):
            files = [(earlier, earlier.name)]
        for source, name in files or ():
            target = folder / family.folder(part) / name
            if name.endswith(".json"):
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(source, target)
            else:
                link_or_copy(source, target)
        done |= {part} if files else set()
    return done


def _alike(file: Path, stamped: Stamp | None) -> bool:
    """Tell whether a file is what was written: its change time moves with every second name, size and date do not."""
    return stamped is not None and stamp(file)[:2] == stamped[:2]


def _write_weights(
    family: BaseFamily, weights: Stream, parts: Parts, folder: Path, dtype: torch.dtype | None,
    metadata: dict[str, str], linked: set[str], *, torch_files: bool = False,
) -> None:  # fmt: skip
    """Write the files of all other parts at once, as the stream goes through them in any order."""
    with ExitStack() as stack:
        # --- a file for each part, and one more for a denoiser that is trained as another module
        writers: dict[str, WeightWriter] = {}
        for part in family.parts:
            if part not in linked:
                folder_of_part = folder / family.folder(part)
                folder_of_part.mkdir(exist_ok=True)
                shapes = _shapes(family, parts, part, family.exported(part), dtype)
                header = HEADER | metadata if part == family.denoiser or family.writes_as_kohya else HEADER
                stem = TEXT_STEMS[1] if torch_files and is_transformers(family.parts[part]) else stem_of(family, part)
                opened: AbstractContextManager[WeightWriter] = (
                    torch_writer(folder_of_part / f"{stem}.bin", shapes)
                    if torch_files
                    else safetensors_writer(folder_of_part / f"{stem}.safetensors", shapes, header)
                )
                writers[part] = stack.enter_context(opened)
        trained = family.denoiser
        as_trained: WeightWriter | None = None
        if family.as_trained:
            (folder / family.as_trained).mkdir(exist_ok=True)
            file = folder / family.as_trained / f"{stem_of(family, trained)}.safetensors"
            shapes = _shapes(family, parts, trained, family.source.build(trained), None)
            as_trained = stack.enter_context(safetensors_writer(file, shapes, HEADER | metadata))

        # --- one pass over the weights
        stream = chain(weights, family.deferred_weights(parts, linked))
        for part, name, value in all_weights(family, stream, parts, set(writers)):
            key = file_name(family.parts[part], name)
            if part == trained and as_trained is not None:
                as_trained.write(key, value)
                if (folded := family.folded(name, value)) is not None:
                    writers[part].write(key, folded)
            else:
                writers[part].write(key, value)


def all_weights(
    family: BaseFamily, weights: Stream, parts: Parts, wanted: set[str]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (part, name, tensor) of what is to be written: the stream's, then what it lacks from the modules at hand."""
    seen: set[tuple[str, str]] = set()
    for full, value in weights:
        part, _, name = full.partition(".")
        if part in wanted and not is_second_name(family.parts[part], name) and (part, name) not in seen:
            seen.add((part, name))
            yield part, name, value
    inside = {part: parts.root.get_submodule(part) for part in family.in_root}
    modules: Mapping[str, nn.Module] = {**inside, **parts.frozen}
    for part, module in modules.items():
        if part in wanted and not isinstance(module, MetaPlaceholder):
            for name, value in module.state_dict().items():
                if not is_second_name(family.parts[part], name) and (part, name) not in seen:
                    yield part, name, value


def _shapes(family: BaseFamily, parts: Parts, part: str, module: nn.Module, dtype: torch.dtype | None) -> Shapes:
    kind, tensors = family.parts[part], module.state_dict()
    own = _own_dtypes(parts, family, part, tensors)
    return {
        file_name(kind, name): ((dtype or own[name]) if value.is_floating_point() else value.dtype, tuple(value.shape))
        for name, value in tensors.items()
        if not is_second_name(kind, name)
    }


def _own_dtypes(parts: Parts, family: BaseFamily, part: str, names: Iterable[str]) -> dict[str, torch.dtype]:
    """Return the dtype in which each tensor of a part is kept: trained weights may be wider than those that are held.

    A frozen part is of one dtype, whether it is loaded or not: that a T5 in fp16 computes some layers wider is no export's.
    """
    own = _own_dtype(parts, family, part)
    if part != family.denoiser:
        return dict.fromkeys(names, own)
    kept = {name: value.dtype for name, value in parts.root.get_submodule(part).state_dict().items()}
    return {name: kept.get(name, own) for name in names}


def _own_dtype(parts: Parts, family: BaseFamily, part: str) -> torch.dtype:
    module = parts.root.get_submodule(part) if part in family.in_root else parts.frozen[part]
    return next(module.parameters()).dtype


def write_configs(family: BaseFamily, folder: Path) -> None:
    """Write what lies beside the weights, by the classes themselves, so that every version reads it."""
    import diffusers

    classes: dict[str, list[Any]] = {}
    for part, kind in family.parts.items():
        model: Any = family.exported(part)
        folder_of_part = folder / family.folder(part)
        model.config.save_pretrained(folder_of_part) if is_transformers(kind) else model.save_config(folder_of_part)
        if part == family.denoiser and family.as_trained:
            model.save_config(folder / family.as_trained)
        classes[family.folder(part)] = kind.split(":")
    for text, vocabulary in zip(family.texts, family.vocabularies, strict=True):
        vocabulary.save(folder / text.tokenizer)
        classes[text.tokenizer] = ["transformers", family.tokenizer_classes[text.kind]]
    scheduler = family.scheduler()
    scheduler.save_pretrained(folder / "scheduler")
    classes["scheduler"] = ["diffusers", type(scheduler).__name__]
    index = {"_class_name": family.row.pipeline, "_diffusers_version": diffusers.__version__}
    index |= family.model_index(classes)
    beside = () if family.writes_as_kohya else ((FACTS, family.facts()),)
    for name, content in (("model_index.json", index), *beside):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if not family.writes_as_kohya:
        (folder / "README.md").write_text(family.card(), encoding="utf-8")
