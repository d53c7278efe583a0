"""SDXL as files for inference: one file of the original layout, or a diffusers folder; streamed, whole or absent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Parts
from difftrain.models.parts.folder_export import new_folder
from difftrain.models.parts.places import Place
from difftrain.models.parts.stand_in import StandIn
from difftrain.models.parts.weight_writers import Shapes, WeightWriter, safetensors_writer, torch_writer
from difftrain.models.sdxl.architecture import PARTS, Architecture
from difftrain.models.sdxl.convert import LOGIT_SCALE, POSITION_IDS, diffusers_places, original_places
from difftrain.models.sdxl.file_source import ARCHITECTURE_KEY
from difftrain.models.sdxl.folder_source import SUBFOLDERS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.models.sdxl.schedule import SchedulerConfig

SUFFIXES = {"safetensors": ".safetensors", "ckpt": ".ckpt", "diffusers": "", "diffusers_safetensors": ""}
_FOLDER_FILES = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model"}
_CLASSES = {
    "scheduler": ["diffusers", "EulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "feature_extractor": [None, None],
    "image_encoder": [None, None],
}
Stream = Iterable[tuple[str, "Tensor"]]
Places = dict[str, dict[str, Place]]


def target(path: Path, layout: str) -> Path:
    """Return what a layout writes for a name without suffix (which may itself hold dots)."""
    if layout not in SUFFIXES:
        raise ValueError(f"layout is one of {', '.join(SUFFIXES)}, got {layout!r}")
    return path.with_name(path.name + SUFFIXES[layout])


def all_weights(weights: Stream, parts: Parts) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (part, name, tensor) of the whole model: the stream's, then what it lacks from the modules at hand."""
    seen: set[str] = set()
    for full in weights:
        seen.add(full[0])
        yield (*full[0].split(".", 1), full[1])  # type: ignore[misc]
    held = {**dict(parts.root.named_children()), **parts.frozen}
    for part, module in held.items():
        for name, value in module.state_dict().items() if not isinstance(module, StandIn) else ():
            if f"{part}.{name}" not in seen:
                yield part, name, value


def file_shapes(parts: Parts, dtype: torch.dtype | None, extras: dict[str, Tensor]) -> tuple[Shapes, Places]:
    """Say what a file of the original layout holds, and where each tensor of a part goes."""
    architecture = Architecture.from_dict(parts.config, "the model's configuration")
    places = {part: original_places(part, architecture.build(part)) for part in PARTS}
    shapes = _shapes(places, architecture, dtype, parts)
    shapes |= {key: (_cast(value, dtype), tuple(value.shape)) for key, value in extras.items()}
    return shapes, places


def export_file(
    weights: Stream, parts: Parts, path: Path, layout: str, dtype: torch.dtype | None, metadata: dict[str, str],
    logit_scale: Tensor | None = None,
) -> Path:  # fmt: skip
    """Write one file of the original layout. A size other than base's goes into the header, for --pretrained to read."""
    extras = extra_tensors(parts, layout, logit_scale)
    shapes, places = file_shapes(parts, dtype, extras)
    if not Architecture.from_dict(parts.config, "the model's configuration").is_base:
        metadata = metadata | {ARCHITECTURE_KEY: json.dumps(parts.config)}
    path = target(path, layout)
    opened = safetensors_writer(path, shapes, metadata) if layout == "safetensors" else torch_writer(path, shapes)
    with opened as writer:
        for key, value in extras.items():
            writer.write(key, value)
        for part, name, value in all_weights(weights, parts):
            _put(writer, places[part][name], value)
    return path


def export_folder(
    weights: Stream, parts: Parts, path: Path, layout: str, dtype: torch.dtype | None, metadata: dict[str, str],
    scheduler: SchedulerConfig,
) -> Path:  # fmt: skip
    """Write a diffusers folder: safetensors, or torch's .bin as kohya's plain `diffusers`. An older one is replaced."""
    path = target(path, layout)
    with new_folder(path) as aside:
        _write_folder(weights, parts, aside, layout, dtype, metadata)
        _write_configs(parts, aside, scheduler)
    return path


def _write_folder(
    weights: Stream, parts: Parts, folder: Path, layout: str, dtype: torch.dtype | None, metadata: dict[str, str]
) -> None:
    """Write the four weight files at once, as the stream goes through the parts in any order."""
    architecture = Architecture.from_dict(parts.config, "the model's configuration")
    places = {part: diffusers_places(part, architecture.build(part)) for part in PARTS}
    with ExitStack() as stack:
        writers: dict[str, WeightWriter] = {}
        for part in PARTS:
            shapes = _shapes({part: places[part]}, architecture, dtype, parts)
            opened = _folder_writer(folder / SUBFOLDERS[part], part, layout, shapes, metadata)
            writers[part] = stack.enter_context(opened)
        for part, name, value in all_weights(weights, parts):
            _put(writers[part], places[part][name], value)


def _folder_writer(
    folder: Path, part: str, layout: str, shapes: Shapes, metadata: dict[str, str]
) -> AbstractContextManager[WeightWriter]:
    safe = layout == "diffusers_safetensors"
    stem = _FOLDER_FILES.get(part, "model" if safe else "pytorch_model")
    if safe:
        return safetensors_writer(folder / f"{stem}.safetensors", shapes, {"format": "pt"} | metadata)
    return torch_writer(folder / f"{stem}.bin", shapes)


def _write_configs(parts: Parts, folder: Path, scheduler: SchedulerConfig) -> None:
    """Write what lies beside the weights, by the classes themselves, so that every version reads it."""
    import diffusers

    architecture = Architecture.from_dict(parts.config, "the model's configuration")
    for part in PARTS:
        model: Any = architecture.build(part)
        config = model.config if part.startswith("text_encoder") else model
        (config.save_pretrained if part.startswith("text_encoder") else config.save_config)(folder / SUBFOLDERS[part])
    scheduler.make("EulerDiscreteScheduler").save_pretrained(folder / "scheduler")
    for i, name in ((1, "tokenizer"), (2, "tokenizer_2")):
        parts.tokenizers[f"tokenizer_{i}"].save(folder / name)
    index = {"_class_name": "StableDiffusionXLPipeline", "_diffusers_version": diffusers.__version__, **_CLASSES}
    # dropped captions are trained as the encoded empty text (kohya), so that is what "no prompt" means here, not zeros
    index |= {"force_zeros_for_empty_prompt": False}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _put(writer: WeightWriter, place: Place, value: Tensor) -> None:
    writer.write(place.key, place.stored(value), place.index, place.count)


def _shapes(places: Places, architecture: Architecture, dtype: torch.dtype | None, parts: Parts) -> Shapes:
    """Say what a file will hold. Without a dtype every part keeps its own."""
    shapes: Shapes = {}
    for part, by_name in places.items():
        tensors = architecture.build(part).state_dict()
        own = _own_dtype(part, parts)
        for name, place in by_name.items():
            shapes[place.key] = (dtype or own, place.stored_shape(tensors[name].shape))
    return shapes


def _own_dtype(part: str, parts: Parts) -> torch.dtype:
    module: nn.Module | None = parts.frozen.get(part, getattr(parts.root, part, None))
    return torch.float32 if module is None else next(module.parameters()).dtype


def extra_tensors(parts: Parts, layout: str, logit_scale: Tensor | None = None) -> dict[str, Tensor]:
    """Give the tensors of a file that are no weights here: two that the released file has, and sizes in a .ckpt.

    logit_scale is the contrastive temperature: the loaded file's, else OpenCLIP's initial value.
    """
    architecture = Architecture.from_dict(parts.config, "the model's configuration")
    length = architecture.text_encoder_1["max_position_embeddings"]
    scale = torch.tensor(math.log(1 / 0.07)) if logit_scale is None else logit_scale
    extras = {POSITION_IDS: torch.arange(length)[None], LOGIT_SCALE: scale}
    if layout == "ckpt" and not architecture.is_base:  # which has no header
        extras[ARCHITECTURE_KEY] = torch.tensor(list(json.dumps(parts.config).encode()), dtype=torch.uint8)
    return extras


def _cast(value: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and value.is_floating_point() else value.dtype
