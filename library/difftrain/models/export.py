"""Any family's weights for inference: a diffusers folder, or one file of the original layout; streamed, whole or absent."""

from __future__ import annotations

import json
import logging
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
from difftrain.io.files import link_or_copy
from difftrain.models.base_weights import from_source
from difftrain.models.build import is_transformers
from difftrain.models.placeholder import MetaPlaceholder
from difftrain.models.weights.files import MODEL_STEMS, TEXT_STEMS
from difftrain.models.weights.fingerprints import Stamp, stamp
from difftrain.models.weights.folder_export import CARD, file_name, is_second_name, new_folder, second_names
from difftrain.models.weights.keys import KeyMap, KeyPiece
from difftrain.models.weights.part_files import FACTS, SIZES
from difftrain.models.weights.writers import Shapes, WeightWriter, safetensors_writer, torch_writer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.models.base import BaseFamily

log = logging.getLogger("difftrain")
Stream = Iterable[tuple[str, "Tensor"]]
HEADER = {"format": "pt"}
HALVABLE = 1_000_000_000  # bytes: what half precision would save has to be this much to be worth a word
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
    if layout not in family.row.layouts:
        what = f"{layout} is not built for {family.row.title}"
        raise ConfigFault([Fault(option("save.model_as"), what, f"one of {', '.join(family.row.layouts)}")])
    weights = chain(weights, from_source(family, parts))
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

    # --- what stands beside the weights: scheduler, sizes, facts
    beside = family.beside(parts)
    sizes = json.dumps({name: section for name, section in parts.config.items() if name not in family.beside_sizes})
    if not family.is_released and layout == "ckpt":  # which has no header
        beside[SIZES] = torch.tensor(list(sizes.encode()), dtype=torch.uint8)
    elif not family.is_released:
        metadata = metadata | {SIZES: sizes}
    if not family.writes_as_kohya:
        metadata = HEADER | metadata | {FACTS: json.dumps(_facts_of(family))}

    # --- every tensor with its shape, which the header needs first
    maps, stored = single_file_shapes(family, parts, dtype, beside)
    _tell_size(family, stored, dtype)
    copies = {original: key for key, original in family.copies().items()}
    opened = safetensors_writer(path, stored, metadata) if layout == "safetensors" else torch_writer(path, stored)

    # --- the tensors, as they come
    with opened as writer:
        for key, value in beside.items():
            writer.write(key, value)
        waiting: dict[str, dict[str, Tensor]] = {}
        stream = chain(weights, family.deferred_weights(parts, ()))
        for part, name, value in all_weights(family, stream, parts, set(family.parts)):
            names, prefix = maps[part], facts.prefixes[part]
            if part == family.denoiser and family.as_trained:
                if (folded := family.folded(name, value)) is None:
                    continue
                value = folded
            if (joined := names.collected(name, value, waiting.setdefault(part, {}))) is not None:
                key = prefix + names.pieces[name].key
                writer.write(key, joined)
                if key in copies:
                    writer.write(copies[key], joined)
                if key in facts.identity and not torch.equal(joined.float(), torch.eye(len(joined))):
                    _tell_once(family, f"{key} is not the identity, as other readers of single files assume")
    return path


def _facts_of(family: BaseFamily) -> dict[str, Any]:
    """Return what a single file cannot say in its tensors; warn where its readers draw otherwise than this model."""
    scheduler = {key: value for key, value in family.scheduler().config.items() if not key.startswith("_")}
    shift, readers_shift = scheduler.get("shift"), family.one_file.shift if family.one_file else None
    if readers_shift is not None and (scheduler.get("use_dynamic_shifting") or shift != readers_shift):
        own = "follows the size" if scheduler.get("use_dynamic_shifting") else f"is {shift:g}"
        what = f"readers of a single file shift the timesteps by {readers_shift:g}, and this model's shift {own}"
        _tell_once(family, f"{what}: set it when you sample")
    return family.facts() | {"scheduler": scheduler}


def _tell_size(
    family: BaseFamily, stored: Mapping[Any, tuple[torch.dtype, tuple[int, ...]]], dtype: torch.dtype | None
) -> None:
    """Say at the first export of a run how much it writes, and how it would be less where nobody has chosen a precision."""
    if "size" in family.exports_told:
        return
    family.exports_told.add("size")
    numbers: dict[torch.dtype, int] = {}
    for kind, shape in stored.values():
        numbers[kind] = numbers.get(kind, 0) + torch.Size(shape).numel()
    size = sum(kind.itemsize * count for kind, count in numbers.items())
    saved = 2 * numbers.get(torch.float32, 0)
    dtypes = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in numbers if kind.is_floating_point))
    less = f"; {option('save.precision', 'bf16')} writes {gigabytes(size - saved)}" if saved > HALVABLE else ""
    log.info("an export takes %s in %s%s", gigabytes(size), dtypes, "" if dtype else less)


def gigabytes(size: int) -> str:
    """Write a number of bytes as people say the size of a file."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _tell_once(family: BaseFamily, message: str) -> None:
    """Say a thing at the first export of a run alone."""
    if message not in family.exports_told:
        family.exports_told.add(message)
        log.warning(message)


def single_file_shapes(
    family: BaseFamily, parts: Parts, dtype: torch.dtype | None, beside: Mapping[str, Tensor]
) -> tuple[dict[str, KeyMap], Shapes]:
    """Say where each tensor of a part goes in a file of all parts, and all that the file holds."""
    assert family.one_file is not None
    maps: dict[str, KeyMap] = {}
    stored: Shapes = {}
    for part, prefix in family.one_file.prefixes.items():
        maps[part] = key_map(family, part)
        kind = dtype or _kept_dtype(parts, family, part)
        stored |= {prefix + key: (kind, shape) for key, shape in maps[part].stored.items()}
    stored |= {key: stored[original] for key, original in family.copies().items()}
    for key, value in beside.items():
        stored[key] = (dtype if dtype and value.is_floating_point() else value.dtype, tuple(value.shape))
    return maps, stored


def key_map(family: BaseFamily, part: str) -> KeyMap:
    """Say where each tensor of a part goes in the original layout; where there is no rule it keeps its name."""
    if part not in family.key_maps:  # every save of a run asks, and its answer needs a module to be built
        module, kind = family.exported(part), family.parts[part]
        rule = family.rule(part)
        tensors = module.state_dict().items()
        second = second_names(kind, module)
        shapes = {name: tuple(value.shape) for name, value in tensors if name not in second}
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
    _tell_size(family, stored, dtype)
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
        shapes = {
            part: _shapes(family, parts, part, family.exported(part), dtype)
            for part in family.parts
            if part not in linked
        }
        _tell_size(family, {(part, key): kind for part in shapes for key, kind in shapes[part].items()}, dtype)
        _write_weights(family, weights, parts, aside, shapes, metadata, torch_files=torch_files)
        write_configs(family, aside, dtype)
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
    family: BaseFamily, weights: Stream, parts: Parts, folder: Path, shapes: Mapping[str, Shapes],
    metadata: dict[str, str], *, torch_files: bool = False,
) -> None:  # fmt: skip
    """Write the files of several parts at once, as the stream goes through them in any order. shapes: of each part."""
    with ExitStack() as stack:
        # --- a file for each part, and one more for a denoiser that is trained as another module
        writers: dict[str, WeightWriter] = {}
        for part, own_shapes in shapes.items():
            folder_of_part = folder / family.folder(part)
            folder_of_part.mkdir(exist_ok=True)
            header = HEADER | metadata if part == family.denoiser or family.writes_as_kohya else HEADER
            stem = TEXT_STEMS[1] if torch_files and is_transformers(family.parts[part]) else stem_of(family, part)
            opened: AbstractContextManager[WeightWriter] = (
                torch_writer(folder_of_part / f"{stem}.bin", own_shapes)
                if torch_files
                else safetensors_writer(folder_of_part / f"{stem}.safetensors", own_shapes, header)
            )
            writers[part] = stack.enter_context(opened)
        trained = family.denoiser
        as_trained: WeightWriter | None = None
        if family.as_trained:
            (folder / family.as_trained).mkdir(exist_ok=True)
            file = folder / family.as_trained / f"{stem_of(family, trained)}.safetensors"
            all_shapes = _shapes(family, parts, trained, family.source.build(trained), None)
            as_trained = stack.enter_context(safetensors_writer(file, all_shapes, HEADER | metadata))

        # --- one pass over the weights
        stream = chain(weights, family.deferred_weights(parts, family.parts.keys() - shapes.keys()))
        for part, name, value in all_weights(family, stream, parts, set(writers)):
            key = file_name(family.parts[part], name)
            if part == trained and as_trained is not None:
                as_trained.write(key, value)
                if (folded := family.folded(name, value)) is not None:
                    writers[part].write(key, folded)
            else:
                writers[part].write(key, value)


def all_weights(
    family: BaseFamily, weights: Stream, parts: Parts, part_names: set[str]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (part, name, tensor) of what is to be written: the stream's, then what it lacks from the modules at hand."""
    seen: set[tuple[str, str]] = set()
    for full, value in weights:
        part, _, name = full.partition(".")
        if part in part_names and not is_second_name(family.parts[part], name) and (part, name) not in seen:
            seen.add((part, name))
            yield part, name, value
    inside = {part: parts.root.get_submodule(part) for part in family.in_root}
    modules: Mapping[str, nn.Module] = {**inside, **parts.frozen}
    for part, module in modules.items():
        if part in part_names and not isinstance(module, MetaPlaceholder):
            second = second_names(family.parts[part], module)
            for name, value in module.state_dict().items():
                if name not in second and (part, name) not in seen:
                    yield part, name, value


def _shapes(family: BaseFamily, parts: Parts, part: str, module: nn.Module, dtype: torch.dtype | None) -> Shapes:
    kind, tensors = family.parts[part], module.state_dict()
    second = second_names(kind, module)
    own = _own_dtypes(parts, family, part, tensors)
    return {
        file_name(kind, name): ((dtype or own[name]) if value.is_floating_point() else value.dtype, tuple(value.shape))
        for name, value in tensors.items()
        if name not in second
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


def _kept_dtype(parts: Parts, family: BaseFamily, part: str) -> torch.dtype:
    """Return a part's dtype in a single file: of a frozen part that its source has in half, that half, which is exact."""
    own, reader = _own_dtype(parts, family, part), family.source.readers.get(part)
    if family.writes_as_kohya or part not in parts.frozen or reader is None or own != torch.float32:
        return own
    stored = reader.dtypes()
    return next(iter(stored)) if len(stored) == 1 and stored <= {torch.float16, torch.bfloat16} else own


def _own_dtype(parts: Parts, family: BaseFamily, part: str) -> torch.dtype:
    module = parts.root.get_submodule(part) if part in family.in_root else parts.frozen[part]
    return next(module.parameters()).dtype


def write_configs(family: BaseFamily, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write what lies beside the weights, by the classes themselves, so that every version reads it.

    dtype: of the weights, for the page that says how to draw; None: they are of several, and are read as fp32.
    """
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
        classes[text.tokenizer] = ["transformers", family.tokenizer_class(text, vocabulary)]
    scheduler = family.scheduler()
    scheduler.save_pretrained(folder / "scheduler")
    classes["scheduler"] = ["diffusers", type(scheduler).__name__]
    classes |= family.write_beside(folder)
    index = {"_class_name": family.row.pipeline, "_diffusers_version": diffusers.__version__}
    index |= family.model_index(classes)
    beside = () if family.writes_as_kohya else ((FACTS, family.facts()),)
    for name, content in (("model_index.json", index), *beside):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / CARD).write_text(family.card(str(dtype or torch.float32)), encoding="utf-8")
