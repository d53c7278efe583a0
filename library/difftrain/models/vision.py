"""A frozen image encoder from a folder of transformers': its patch tokens, laid over a picture's own tokens.

Pictures are resized so that the encoder's patches are the model's tokens; where that were many times more than it was
made for, it gets as many as it may and its tokens are interpolated.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.config.paths import expanded
from difftrain.contracts import PIXELS, Batch, ConfigFault, Encoder, Fault, Feature
from difftrain.models.build import own_arguments, possible, quiet_imports
from difftrain.models.weights.bounds import size_faults
from difftrain.models.weights.files import TEXT_STEMS, find_weights, opened, read_json
from difftrain.models.weights.fingerprints import hashed, of_files, of_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn


PART = FEATURE = "vision"
FLAG = "--repa.encoder"
# model_type -> (class of transformers, what it takes beside the folder, weights that no token hangs on)
KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "dinov2": ("Dinov2Model", {}, ()),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", {}, ()),
    "dinov3_vit": ("DINOv3ViTModel", {}, ()),
    "vit": ("ViTModel", {"add_pooling_layer": False}, ("pooler",)),
    "clip": ("CLIPVisionModel", {}, ()),
    "clip_vision_model": ("CLIPVisionModel", {}, ()),
    "siglip": ("SiglipVisionModel", {}, ("head", "vision_model.head")),
    "siglip_vision_model": ("SiglipVisionModel", {}, ("head", "vision_model.head")),
}
_COUNTS = ("num_hidden_layers", "num_attention_heads", "intermediate_size", "num_register_tokens", "num_channels")
MOST = 4  # times the patches that an encoder was made for
VERSION = 1  # raise it where equal weights, settings and pictures come to be encoded otherwise


@dataclass(frozen=True)
class VisionFolder:
    """Read what a folder says of its encoder; nothing of transformers is imported for it."""

    path: Path

    @classmethod
    def at(cls, text: str) -> VisionFolder:
        """Find the folder that a configuration names."""
        return cls(Path(expanded(text)))

    @cached_property
    def contents(self) -> dict[str, Any]:
        return read_json(self.path / "config.json")

    @property
    def config(self) -> dict[str, Any]:
        """Return the sizes; a folder of pictures and texts has them one level down."""
        nested = self.contents.get("vision_config")
        return nested if isinstance(nested, dict) else self.contents

    @cached_property
    def scaling(self) -> dict[str, Any]:
        return read_json(self.path / "preprocessor_config.json")

    def faults(self) -> list[Fault]:
        """Say what the folder lacks."""
        kind, sizes = self.contents.get("model_type"), ("hidden_size", "patch_size", "image_size")
        if not self.contents:
            return [Fault(FLAG, f"{self.path} has no config.json", "give the folder of a transformers vision model")]
        if kind not in KINDS:
            return [Fault(FLAG, f"{self.path} holds a model of type {kind!r}", f"one of {', '.join(KINDS)}")]
        problems: list[Fault] = []
        known = {"hidden_act": "gelu", "model_type": "vit"} | dict.fromkeys((*sizes, *_COUNTS), 1)
        sized = {key: value for key, value in self.config.items() if key in known}
        problems += size_faults(sized, known, f"{FLAG} {self.path}/config.json")
        if wrong := [name for name in sizes if type(self.config.get(name)) is not int or self.config[name] < 1]:
            problems.append(
                Fault(FLAG, f"{self.path}/config.json does not say its {', '.join(wrong)} in whole numbers")
            )
        if wrong := [name for name in ("image_mean", "image_std") if not _are_three(self.scaling.get(name))]:
            what = (
                f"{self.path}/preprocessor_config.json does not say {', '.join(wrong)}: how pixel values are normalised"
            )
            problems.append(Fault(FLAG, what, "the file that came with the weights"))
        try:
            self.files()
        except ConfigFault as fault:
            problems += fault.faults
        return problems

    @property
    def width(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def patch(self) -> int:
        return int(self.config["patch_size"])

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the patches that the encoder gets of a picture of so many tokens: as many, up to a bound."""
        most = MOST * (int(self.config["image_size"]) // self.patch) ** 2
        shrink = min(1.0, math.sqrt(most / (height * width)))
        return max(1, round(height * shrink)), max(1, round(width * shrink))

    def files(self) -> list[Path]:
        """List the files with weights. Raises ConfigFault."""
        return find_weights(self.path, TEXT_STEMS, FLAG)

    def count(self) -> int:
        """Count the numbers in the files."""
        return sum(math.prod(shape) for file in self.files() for shape in opened(file, FLAG).shapes().values())

    def fingerprint(self, settings: str) -> str:
        """Hash what decides the features: settings, sizes, scaling of colours, weights."""
        scaling = [self.scaling[name] for name in ("image_mean", "image_std")]
        weights = of_files(self.files(), PART, lambda: of_tensors(self._stored()))
        return hashed(VERSION, settings, sorted(self.config.items(), key=str), scaling, weights)

    def _stored(self) -> Iterator[tuple[str, Tensor]]:
        for file in self.files():
            stored = opened(file, FLAG)
            yield from ((name, stored.get(name)) for name in stored.shapes())

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Load the encoder on the host. Raises ConfigFault where weights are missing."""
        import transformers

        name, more, unused = KINDS[self.contents["model_type"]]
        made_from = getattr(transformers, name)
        with possible(PART), quiet_imports(), _no_bars():
            # sizes and tensors alone: a config.json may also ask for kernels of a hub, for code or for another folder
            sizes = own_arguments(made_from.config_class)
            config = made_from.config_class(**{key: value for key, value in self.config.items() if key in sizes})
            module, info = made_from.from_pretrained(
                None, config=config, state_dict=dict(self._stored()), dtype=dtype, output_loading_info=True, **more
            )
        missing = sorted(missing_key for missing_key in info["missing_keys"] if not missing_key.startswith(unused))
        if missing:
            what = f"{self.path} lacks {len(missing)} weights of a {name}: {', '.join(missing[:3])}"
            raise ConfigFault([Fault(FLAG, what, "weights and config.json must belong together")])
        return module.requires_grad_(False).eval()


def _are_three(numbers: Any) -> bool:
    """Tell three finite numbers, a channel each."""
    return (
        isinstance(numbers, list)
        and len(numbers) == 3
        and all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
    )


@contextmanager
def _no_bars() -> Iterator[None]:
    """Hold back transformers' bars of progress."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def tokens_of(folder: VisionFolder, module: nn.Module, pixels: Tensor, factor: int) -> Tensor:
    """Encode pictures. Shapes: pixels (B, 3, H, W) uint8 -> (B, E, H / factor, W / factor) bf16."""
    size = pixels.shape[-2] // factor, pixels.shape[-1] // factor
    rows, columns = folder.grid(*size)
    mean, std = (_on_device(tuple(folder.scaling[name]), pixels.device) for name in ("image_mean", "image_std"))
    picture = (pixels.float() / 255.0 - mean[:, None, None]) / std[:, None, None]
    size_hw = rows * folder.patch, columns * folder.patch
    if tuple(picture.shape[-2:]) != size_hw:
        picture = torch.nn.functional.interpolate(picture, size=size_hw, mode="bicubic", align_corners=False)
    options = {"interpolate_pos_encoding": True} if _interpolates(module) else {}
    tokens = module(picture.to(next(module.parameters()).dtype), **options).last_hidden_state.float()
    laid = tokens[:, tokens.shape[1] - rows * columns :].transpose(1, 2).unflatten(2, (rows, columns))
    if (rows, columns) != size:
        laid = torch.nn.functional.interpolate(laid, size=size, mode="bilinear", align_corners=False)
    return laid.to(torch.bfloat16)


@functools.lru_cache(maxsize=16)
def _on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Bring numbers to a device once: the host waits for each such copy."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def _interpolates(module: nn.Module) -> bool:
    return "interpolate_pos_encoding" in inspect.signature(module.forward).parameters


def encoder(folder: VisionFolder, frozen: dict[str, nn.Module], factor: int, precision: str) -> Encoder:
    """Describe the encoder as what can be cached. frozen: of the parts, where it stands. factor: pixels a token.

    Raises ConfigFault where the folder holds no such encoder.
    """
    if problems := folder.faults():
        raise ConfigFault(problems)
    settings = f"tokens of {factor} px, at most {MOST} times its own patches, precision {precision}"

    @torch.no_grad()
    def encode(batch: Batch) -> dict[str, Tensor]:
        return {FEATURE: tokens_of(folder, frozen[PART], batch.features["pixels"], factor)}

    return Encoder(
        source=PIXELS,
        features={FEATURE: Feature(folder.width, factor, dtype="bfloat16")},
        modules=(PART,),
        settings=settings,
        encode=encode,
        fingerprint=lambda: folder.fingerprint(settings),
    )
