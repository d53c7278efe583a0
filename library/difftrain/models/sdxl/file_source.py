"""SDXL weights in one .safetensors or .ckpt file of the original layout."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from difftrain.contracts import ConfigFault, Fault
from difftrain.models.parts.fingerprints import Stamp, hashed, of_files, of_tensors, stamp
from difftrain.models.parts.recognise import Shapes, differences, looks_like
from difftrain.models.parts.stand_in import Source
from difftrain.models.parts.stored_part import opened
from difftrain.models.parts.weight_files import WeightFile
from difftrain.models.sdxl.architecture import Architecture, named
from difftrain.models.sdxl.convert import EXTRA_KEYS, LOGIT_SCALE, PREFIXES, canonical, original_places

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.models.sdxl.sources import Modules

FLAG = "--pretrained_model_name_or_path"
ARCHITECTURE_KEY = "difftrain.architecture"
# Tables and marks that trainers and mergers leave beside the weights; nothing here reads them.
_IGNORED = re.compile(
    r"^(betas|alphas_cumprod.*|sqrt_.*|log_one_minus_.*|posterior_.*|logvar|model_ema\..*|denoiser\.sigmas"
    r"|v_pred|ztsnr|edm_vpred\..*|edm_(mean|std)|difftrain\..*)$"
)


class SingleFileSource:
    """Read every part from one file; sizes from our header where we wrote it, else those of SDXL base."""

    tokenizer_dirs = None
    notes: tuple[str, ...] = ()

    def __init__(self, path: Path, *, mmap: bool = True) -> None:
        self.path, self._mmap = path, mmap

    @cached_property
    def _opened(self) -> tuple[Stamp, WeightFile]:
        if not self.path.is_file():
            raise ConfigFault([Fault(FLAG, f"there is no file {str(self.path)!r}")])
        return stamp(self.path), opened(self.path, FLAG, mmap=self._mmap)

    @property
    def _file(self) -> WeightFile:
        return self._opened[1]

    @cached_property
    def _shapes(self) -> Shapes:
        return {key: shape for key, shape in self._file.shapes().items() if not _IGNORED.match(key)}

    @cached_property
    def architecture(self) -> Architecture:
        text = self._file.metadata.get(ARCHITECTURE_KEY)
        if text is None and ARCHITECTURE_KEY in self._file.shapes():
            text = bytes(self._file.get(ARCHITECTURE_KEY).tolist()).decode()
        if text is None:
            return named("base")
        try:
            return Architecture.from_dict(json.loads(text), str(self.path))
        except ValueError:
            raise ConfigFault([Fault(FLAG, f"{self.path}: its {ARCHITECTURE_KEY} is not JSON")]) from None

    @property
    def prediction_type(self) -> str | None:
        if {"v_pred", "edm_vpred.sigma_max"} & set(self._file.shapes()):
            return "v_prediction"
        return {"v": "v_prediction", "epsilon": "epsilon"}.get(self._file.metadata.get("modelspec.prediction_type", ""))

    @property
    def logit_scale(self) -> Tensor | None:
        return self._file.get(LOGIT_SCALE) if LOGIT_SCALE in self._shapes else None

    def faults(self, modules: Modules) -> list[Fault]:
        """Compare keys and shapes with those of the parts that are to come from this file."""
        wanted: Shapes = {}
        for part, module in modules.items():
            tensors = module.state_dict()
            wanted |= {p.key: p.stored_shape(tensors[n].shape) for n, p in original_places(part, module).items()}
        prefixes = tuple(PREFIXES[part] for part in PREFIXES if part not in modules)
        found = {
            k: s for k, s in self._shapes.items() if k not in EXTRA_KEYS and not (prefixes and k.startswith(prefixes))
        }
        lines = differences(wanted, found)
        if not lines:
            return []
        remedy = (
            "SDXL's original layout has model.diffusion_model., first_stage_model. and conditioner.embedders.0 and 1"
        )
        kind = looks_like(self._shapes)
        return [Fault(FLAG, f"{self.path} looks like {kind}; tensors {'; '.join(lines)}", remedy)]

    def weights(self, part: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, place in original_places(part, module).items():
            yield name, place.restored(self._file.get(place.key))

    def fingerprint(self, part: str) -> str:
        return fingerprint([self.path], part, self.architecture, self, self._opened[0])


def fingerprint(
    files: Sequence[Path], part: str, architecture: Architecture, source: Source, since: Stamp | None = None
) -> str:
    """Hash the weights of a part in files, by names that depend neither on the layout nor on transformers' version.

    Its module is built only where the files are others than those that were read before. since: see of_files.
    Raises ConfigFault where they do not fit.
    """

    def read() -> str:
        module = architecture.build(part)
        if faults := source.faults({part: module}):
            raise ConfigFault(faults)
        return of_tensors((canonical(part, name), value) for name, value in source.weights(part, module))

    sizes = sorted(getattr(architecture, part).items())
    return of_files(files, hashed(part, sizes), read, since)
