"""SDXL weights in a diffusers folder, and VAEs on their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.models.parts.places import Place
from difftrain.models.parts.stored_part import MODEL_STEMS, TEXT_STEMS, StoredPart, find_weights, read_json
from difftrain.models.parts.weight_files import WeightFile
from difftrain.models.sdxl.architecture import Architecture, known_keys
from difftrain.models.sdxl.convert import diffusers_places, original_places
from difftrain.models.sdxl.file_source import FLAG, fingerprint

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.models.sdxl.sources import Modules

SUBFOLDERS = {"unet": "unet", "vae": "vae", "text_encoder_1": "text_encoder", "text_encoder_2": "text_encoder_2"}
STEMS = {"unet": MODEL_STEMS, "vae": MODEL_STEMS}
# AutoencoderKL's attention before diffusers 0.17
_OLD_VAE_NAMES = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}


class FolderSource:
    """Read every part from its subfolder: config.json beside the weights."""

    notes: tuple[str, ...] = ()

    def __init__(self, path: Path, *, mmap: bool = True) -> None:
        self.path, self._mmap = path, mmap

    @cached_property
    def architecture(self) -> Architecture:
        kind = read_json(self.path / "model_index.json").get("_class_name", "nothing")
        if not kind.startswith("StableDiffusionXL"):
            remedy = "a diffusers folder of SDXL has a model_index.json that says StableDiffusionXLPipeline"
            raise ConfigFault([Fault(FLAG, f"{self.path} holds {kind}, not SDXL", remedy)])
        sections = {part: read_config(self.path / folder, part, FLAG) for part, folder in SUBFOLDERS.items()}
        sections["text_encoder"] = sections.pop("text_encoder_1")
        return Architecture.from_dict({"name": "custom"} | sections, str(self.path))

    @property
    def tokenizer_dirs(self) -> tuple[Path, Path] | None:
        pair = (self.path / "tokenizer", self.path / "tokenizer_2")
        return pair if all(folder.is_dir() for folder in pair) else None

    @property
    def prediction_type(self) -> str | None:
        return read_json(self.path / "scheduler" / "scheduler_config.json").get("prediction_type")

    def faults(self, modules: Modules) -> list[Fault]:
        return [f for part, module in modules.items() for f in self._reader(part).faults(module)]

    def weights(self, part: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        return self._reader(part).weights(module)

    def fingerprint(self, part: str) -> str:
        return fingerprint(self._reader(part).paths(), part, self.architecture, self)

    def _reader(self, part: str) -> StoredPart:
        return _Folder(self.path / SUBFOLDERS[part], part, FLAG, self._mmap)


class VaeSource:
    """Read a VAE of a folder (its own, or a whole model's) or of a file in diffusers' or the original layout."""

    tokenizer_dirs = None
    prediction_type = None
    notes: tuple[str, ...] = ()

    def __init__(self, path: Path, base: Architecture, *, mmap: bool = True) -> None:
        self.path, self.base, self._mmap = path, base, mmap
        if not path.exists():
            remedy = "give a diffusers folder or a file of VAE weights that is on this machine"
            raise ConfigFault([Fault("--vae", f"there is no file or folder '{path}'", remedy)])

    @property
    def _folder(self) -> Path | None:
        if self.path.is_file():
            return None
        return self.path / "vae" if (self.path / "vae").is_dir() else self.path

    @cached_property
    def architecture(self) -> Architecture:
        if self._folder is None:
            return self.base
        return replace(self.base, vae=read_config(self._folder, "vae", "--vae"))

    def faults(self, modules: Modules) -> list[Fault]:
        latents, taken = self.architecture.vae["latent_channels"], self.base.unet["in_channels"]
        if latents != taken:
            return [Fault("--vae", f"{self.path} makes {latents} latent channels, the UNet takes {taken}")]
        return self._reader.faults(modules["vae"]) if "vae" in modules else []

    def weights(self, part: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        return self._reader.weights(module)

    def fingerprint(self, part: str) -> str:
        return fingerprint(self._reader.paths(), part, self.architecture, self)

    @property
    def _reader(self) -> StoredPart:
        if self._folder is not None:
            return _Folder(self._folder, "vae", "--vae", self._mmap)
        return _VaeFile(self.path, "--vae", self._mmap)


class _Folder(StoredPart):
    """One part's folder: a single file or shards with an index, safetensors before torch's."""

    def __init__(self, path: Path, part: str, flag: str, mmap: bool) -> None:
        super().__init__(path, flag, mmap)
        self.part = part

    def paths(self) -> list[Path]:
        return find_weights(self.path, STEMS.get(self.part, TEXT_STEMS), self.flag)

    def _places(self, module: nn.Module, keys: set[str]) -> dict[str, Place]:
        places = diffusers_places(self.part, module)
        if self.part == "vae" and any(".query." in key for key in keys):
            places = {name: Place(_old_vae_name(place.key)) for name, place in places.items()}
        if self.part == "text_encoder_1" and not any(key.startswith("text_model.") for key in keys):
            places = {name: Place(name.removeprefix("text_model.")) for name in places}
        return places


class _VaeFile(StoredPart):
    """A VAE in one file: diffusers' names, or the original's with or without first_stage_model."""

    def paths(self) -> list[Path]:
        return [self.path]

    def _files(self) -> list[WeightFile]:
        return [_OnlyVae(file) for file in super()._files()]

    def _places(self, module: nn.Module, keys: set[str]) -> dict[str, Place]:
        if any(".down_blocks." in key for key in keys):
            places = diffusers_places("vae", module)
            if any(".query." in key for key in keys):
                places = {name: Place(_old_vae_name(place.key)) for name, place in places.items()}
            return places
        places = original_places("vae", module)
        if any(key.startswith("first_stage_model.") for key in keys):
            return places
        return {n: replace(p, key=p.key.removeprefix("first_stage_model.")) for n, p in places.items()}


class _OnlyVae:
    """Hide what is not the VAE in a file of a whole model."""

    def __init__(self, file: WeightFile) -> None:
        self._file, self.metadata = file, file.metadata

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = self._file.shapes()
        inside = {key: shape for key, shape in shapes.items() if key.startswith("first_stage_model.")}
        return inside or shapes

    def get(self, key: str) -> Tensor:
        return self._file.get(key)


def _old_vae_name(name: str) -> str:
    for new, old in _OLD_VAE_NAMES.items():
        name = name.replace(new, old)
    return name


def read_config(folder: Path, part: str, flag: str) -> dict[str, Any]:
    """Read config.json of a part, without what its class does not take. Raises ConfigFault where it is missing."""
    content = read_json(folder / "config.json")
    if not content:
        raise ConfigFault(
            [Fault(flag, f"{folder / 'config.json'} is missing or is not JSON", "give a diffusers folder")]
        )
    known = known_keys(part, content)
    return {key: value for key, value in content.items() if key in known}
