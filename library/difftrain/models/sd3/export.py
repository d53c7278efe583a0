"""SD3 as a diffusers folder: streamed, whole or absent; frozen parts that lie on disk as they must are not written again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain import __version__
from difftrain.contracts import ConfigFault, Fault, Parts
from difftrain.models.parts.fingerprints import Stamp, stamp
from difftrain.models.parts.folder_export import link_or_copy, new_folder
from difftrain.models.parts.stand_in import StandIn
from difftrain.models.parts.stored_part import MODEL_STEMS, TEXT_STEMS
from difftrain.models.parts.weight_writers import Shapes, WeightWriter, safetensors_writer
from difftrain.models.sd3.architecture import PARTS, TEXT_PARTS, Architecture
from difftrain.models.sd3.assembled import LIGHT
from difftrain.models.sd3.folder_source import FACTS, FOLDERS, FULL, TIED
from difftrain.models.sd3.model_card import card
from difftrain.models.sd3.schedule import make_scheduler
from difftrain.models.sd3.text_branch import folded

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.config import TrainConfig
    from difftrain.models.sd3.family import SD3Family

Stream = Iterable[tuple[str, "Tensor"]]
TRAINED = "transformer"
_HEADER = {"format": "pt"}
ZEROS, EMPTY_TEXT = "zeros", "encoded empty text"
_CLASSES = {
    "feature_extractor": [None, None],
    "image_encoder": [None, None],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_3": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "tokenizer_3": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "SD3Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def export(
    family: SD3Family, weights: Stream, parts: Parts, layout: str, path: Path, *, dtype: torch.dtype | None,
    metadata: dict[str, str],
) -> Path:  # fmt: skip
    """Write what StableDiffusion3Pipeline.from_pretrained loads; an older folder of that name is replaced.

    Whatever the layout: SD3 has no other here. dtype: of all weights; None: the trained ones as they are, frozen ones
    as they are stored. Raises ConfigFault for .ckpt.
    """
    if layout == "ckpt":
        raise ConfigFault(
            [Fault("--save_model_as", "ckpt is not built for SD3", "it is exported as a diffusers folder")]
        )
    with new_folder(path) as aside:
        linked = _as_they_lie(family, parts, aside, dtype)
        _write_weights(family, weights, parts, aside, dtype, metadata, linked)
        _write_configs(family, aside)
    for part in set(parts.frozen) & set(FOLDERS):
        if part not in linked:
            file = path / FOLDERS[part] / f"{_stem(part)}.safetensors"
            family.written[part, dtype or _own_dtype(parts, part)] = (file, stamp(file))
    return path


def unconditional(cfg: TrainConfig) -> str:
    """Say what a model of this training takes for no text."""
    return ZEROS if cfg.model.enable_uncond_text_dropout else EMPTY_TEXT


def facts(cfg: TrainConfig, architecture: Architecture) -> dict[str, Any]:
    """Return what diffusers' own files cannot say of a model."""
    return {
        "difftrain": __version__,
        "family": "sd3",
        "light": cfg.model.train_type == LIGHT,
        "num_layers": architecture.num_layers,
        "unconditional": unconditional(cfg),
        "t5_max_length": cfg.model.t5_max_length,
        "t5_attention_mask": cfg.model.t5_attention_mask,
        "text_recon_gamma": cfg.loss.text_recon_gamma,
        FULL: architecture.text_branch,
    }


def _as_they_lie(family: SD3Family, parts: Parts, folder: Path, dtype: torch.dtype | None) -> set[str]:
    """Give frozen parts' files a second name in the folder where they are as they must be; return those parts.

    Those of the source, or those of an earlier export of this run that are still what was written.
    """
    done = set()
    for part in set(parts.frozen) & set(FOLDERS):
        files = family.source.as_it_lies(part, _stem(part), dtype)
        earlier, stamped = family.written.get((part, dtype or _own_dtype(parts, part)), (None, None))
        if files is None and earlier is not None and earlier.is_file() and _alike(earlier, stamped):
            files = [(earlier, earlier.name)]
        for source, name in files or ():
            target = folder / FOLDERS[part] / name
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
    family: SD3Family, weights: Stream, parts: Parts, folder: Path, dtype: torch.dtype | None,
    metadata: dict[str, str], linked: set[str],
) -> None:  # fmt: skip
    """Write the files of all other parts at once, as the stream goes through them in any order."""
    architecture = family.source.architecture
    depth = architecture.num_layers
    with ExitStack() as stack:
        writers: dict[str, WeightWriter] = {}
        for part in PARTS:
            if part not in linked:
                shapes = _shapes(replace(architecture, text_branch=False), part, dtype or _own_dtype(parts, part))
                file = _file(folder / FOLDERS[part], part)
                told = _HEADER | metadata if part == TRAINED else _HEADER
                writers[part] = stack.enter_context(safetensors_writer(file, shapes, told))
        full: WeightWriter | None = None
        if architecture.text_branch:
            shapes = _shapes(architecture, TRAINED, _own_dtype(parts, TRAINED))
            full = stack.enter_context(safetensors_writer(_file(folder / FULL, TRAINED), shapes, _HEADER | metadata))
        for part, name, value in _all_weights(chain(weights, family.asleep(parts, linked)), parts, linked):
            if part == TRAINED and full is not None:
                full.write(name, value)
                cut = folded(name, value, depth)
                if cut is not None:
                    writers[part].write(name, cut)
            else:
                writers[part].write(name, value)


def _all_weights(weights: Stream, parts: Parts, linked: set[str]) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (part, name, tensor) of what is to be written: the stream's, then what it lacks from the modules at hand.

    What only training has beside the transformer is left out, and the second name of T5's table of words.
    """
    wanted = set(PARTS) - linked
    seen: set[tuple[str, str]] = set()
    for full_name, value in weights:
        part, _, name = full_name.partition(".")
        if part in wanted and name != TIED and (part, name) not in seen:
            seen.add((part, name))
            yield part, name, value
    held: dict[str, nn.Module] = {TRAINED: parts.root.get_submodule(TRAINED), **parts.frozen}
    for part, module in held.items():
        if part in wanted and not isinstance(module, StandIn):
            for name, value in module.state_dict().items():
                if name != TIED and (part, name) not in seen:
                    yield part, name, value


def _shapes(architecture: Architecture, part: str, dtype: torch.dtype) -> Shapes:
    tensors = architecture.build(part).state_dict()
    return {name: (dtype, tuple(value.shape)) for name, value in tensors.items() if name != TIED}


def _own_dtype(parts: Parts, part: str) -> torch.dtype:
    module = parts.root.get_submodule(TRAINED) if part == TRAINED else parts.frozen[part]
    return next(module.parameters()).dtype


def _file(folder: Path, part: str) -> Path:
    folder.mkdir(exist_ok=True)
    return folder / f"{_stem(part)}.safetensors"


def _stem(part: str) -> str:
    return (TEXT_STEMS if part in TEXT_PARTS else MODEL_STEMS)[0]


def _write_configs(family: SD3Family, folder: Path) -> None:
    """Write what lies beside the weights, by the classes themselves, so that every version reads it."""
    import diffusers

    cfg, source = family.cfg, family.source
    architecture = replace(source.architecture, text_branch=False)
    for part in PARTS:
        model: Any = architecture.build(part)
        place = folder / FOLDERS[part]
        model.config.save_pretrained(place) if part in TEXT_PARTS else model.save_config(place)
        if part == TRAINED and source.architecture.text_branch:
            model.save_config(folder / FULL)
    make_scheduler(cfg, source).save_pretrained(folder / "scheduler")
    three = family.vocabularies
    three.first.save(folder / "tokenizer")
    three.second.save(folder / "tokenizer_2")
    three.third.save(folder / "tokenizer_3")
    index = {"_class_name": "StableDiffusion3Pipeline", "_diffusers_version": diffusers.__version__, **_CLASSES}
    told = facts(cfg, source.architecture)
    for name, content in (("model_index.json", index), (FACTS, told)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card(told), encoding="utf-8")
