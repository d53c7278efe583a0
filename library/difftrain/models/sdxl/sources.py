"""Where the weights of an SDXL model come from: a random draw, a diffusers folder, or one file of the original layout.

Every source hands out (name, tensor) of a part one at a time, so that a model is never in memory twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from difftrain.contracts import ConfigFault, Fault
from difftrain.diffusion.keys import STREAM_VERSION
from difftrain.models.parts.fingerprints import hashed
from difftrain.models.parts.initial import DRAW_VERSION, Scale, by_fan_in, clip_scale, initial_weights
from difftrain.models.parts.small_vae import shipped_fingerprint, shipped_vae
from difftrain.models.sdxl.architecture import Architecture, named, read_architecture

if TYPE_CHECKING:
    from torch import Tensor

    from difftrain.config import TrainConfig

Modules = Mapping[str, Any]


class Source(Protocol):
    """Give the architecture, and the weights of one part by the names of its module."""

    @property
    def architecture(self) -> Architecture: ...
    @property
    def tokenizer_dirs(self) -> tuple[Path, Path] | None: ...
    @property
    def prediction_type(self) -> str | None: ...  # what the weights say they predict, where they say it
    @property
    def notes(self) -> Sequence[str]: ...
    def faults(self, modules: Modules) -> list[Fault]: ...
    def weights(self, part: str, module: Any) -> Iterator[tuple[str, Tensor]]: ...
    def fingerprint(self, part: str) -> str: ...  # of a part's weights, which are not loaded for it


def source_of(cfg: TrainConfig) -> Source:
    """Choose the source that the configuration names; --vae takes the VAE from elsewhere. Raises ConfigFault."""
    model = cfg.model
    source: Source
    if model.pretrained and model.init_from_config:
        text = "contradicts --init_from_config: weights come from a file or from a seed"
        raise ConfigFault([Fault("--pretrained_model_name_or_path", text, "give one of the two")])
    if model.pretrained:
        source = _pretrained(model.pretrained, mmap=not model.disable_mmap)
    elif model.init_from_config:
        source = RandomSource(read_architecture(model.init_from_config), cfg.training.seed or 0)
    else:
        remedy = "give --pretrained_model_name_or_path=PATH, or --init_from_config=base|tiny|demo|FILE.json"
        raise ConfigFault([Fault("[model]", "no weights are named", remedy)])
    return WithVae(source, model.vae, mmap=not model.disable_mmap) if model.vae else source


def _pretrained(name: str, *, mmap: bool) -> Source:
    from difftrain.models.sdxl.file_source import SingleFileSource
    from difftrain.models.sdxl.folder_source import FolderSource

    path = Path(name).expanduser()
    if path.is_dir():
        return FolderSource(path, mmap=mmap)
    if path.is_file():
        return SingleFileSource(path, mmap=mmap)
    remedy = "give a diffusers folder or a single .safetensors or .ckpt file that is on this machine"
    raise ConfigFault([Fault("--pretrained_model_name_or_path", f"there is no file or folder {name!r}", remedy)])


@dataclass(frozen=True)
class RandomSource:
    """Draw every weight from (seed, part, name): the same model on every machine."""

    architecture: Architecture
    seed: int
    tokenizer_dirs: tuple[Path, Path] | None = None
    prediction_type: str | None = None

    @property
    def notes(self) -> list[str]:
        if self._ships_vae:
            return ["all weights are random but the VAE's, which is a small one trained by us on synthetic pictures"]
        return ["all weights are random, the VAE's too: it can only draw noise (--vae takes a trained one)"]

    @property
    def _ships_vae(self) -> bool:
        return self.architecture.vae == named("tiny").vae

    def faults(self, modules: Modules) -> list[Fault]:
        return []

    def weights(self, part: str, module: Any) -> Iterator[tuple[str, Tensor]]:
        if part == "vae" and self._ships_vae:
            yield from shipped_vae(module)
            return
        scale: Scale = by_fan_in
        if part.startswith("text_encoder"):
            scale = clip_scale(module.config.num_hidden_layers, module.config.hidden_size)
        yield from initial_weights(module, part, self.seed, scale)

    def fingerprint(self, part: str) -> str:
        if part == "vae" and self._ships_vae:
            return shipped_fingerprint(lambda: self.architecture.build(part))
        sizes = sorted(getattr(self.architecture, part).items())
        return hashed("random", STREAM_VERSION, DRAW_VERSION, self.seed, part, sizes)


@dataclass(frozen=True)
class WithVae:
    """Take the VAE from another place than the rest: a diffusers folder, or a file of either layout."""

    base: Source
    path: str
    mmap: bool = True

    @cached_property
    def vae(self) -> Source:
        from difftrain.models.sdxl.folder_source import VaeSource

        return VaeSource(Path(self.path).expanduser(), self.base.architecture, mmap=self.mmap)

    @cached_property
    def architecture(self) -> Architecture:
        return replace(self.base.architecture, vae=self.vae.architecture.vae)

    @property
    def tokenizer_dirs(self) -> tuple[Path, Path] | None:
        return self.base.tokenizer_dirs

    @property
    def prediction_type(self) -> str | None:
        return self.base.prediction_type

    @property
    def notes(self) -> list[str]:
        return [*self.base.notes, f"the VAE is {self.path}"]

    def faults(self, modules: Modules) -> list[Fault]:
        others = {part: module for part, module in modules.items() if part != "vae"}
        alone = {part: module for part, module in modules.items() if part == "vae"}
        return [*self.base.faults(others), *self.vae.faults(alone)]

    def weights(self, part: str, module: Any) -> Iterator[tuple[str, Tensor]]:
        return self._of(part).weights(part, module)

    def fingerprint(self, part: str) -> str:
        return self._of(part).fingerprint(part)

    def _of(self, part: str) -> Source:
        return self.vae if part == "vae" else self.base
