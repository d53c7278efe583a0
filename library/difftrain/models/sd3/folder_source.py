"""SD3 weights in folders of diffusers: one part in its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.models.parts.fingerprints import of_files, of_tensors
from difftrain.models.parts.folder_export import plain_files
from difftrain.models.parts.places import Place
from difftrain.models.parts.stored_part import MODEL_STEMS, TEXT_STEMS, StoredPart, find_weights, read_json
from difftrain.models.parts.weight_files import Renamed, WeightFile, dtypes_of
from difftrain.models.sd3.architecture import SECTIONS, Architecture, known_keys
from difftrain.models.sd3.text_branch import unfolded

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FOLDERS = {part: folder for folder, part in SECTIONS.items()}
FULL = "transformer_full"  # beside an export: the transformer as it is trained, with the last block's text branch
FACTS = "difftrain.json"  # in a folder that difftrain wrote: what diffusers' own files cannot say
SHARED, TIED = "shared.weight", "encoder.embed_tokens.weight"  # both names of T5's one table of words
# what whole CLIP and T5 models have beside the encoder that is read here
_CLIP_BESIDE = ("vision_model.", "visual_projection.", "logit_scale")
_BESIDE = {
    "text_encoder_1": _CLIP_BESIDE,
    "text_encoder_2": _CLIP_BESIDE,
    "text_encoder_3": (TIED, "decoder.", "lm_head."),
}


class FolderPart(StoredPart):
    """One part in its folder: config.json beside weights in one file or in shards with an index."""

    def __init__(self, path: Path, part: str, flag: str, *, mmap: bool = True) -> None:
        super().__init__(path, flag, mmap)
        self.part = part

    def paths(self) -> list[Path]:
        stems = TEXT_STEMS if self.part.startswith("text_encoder") else MODEL_STEMS
        return find_weights(self.path, stems, self.flag)

    def _files(self) -> list[WeightFile]:
        files = super()._files()
        keys = {key for file in files for key in file.shapes()}
        return files if SHARED in keys or TIED not in keys else [Renamed(file, {TIED: SHARED}) for file in files]

    def _is_extra(self, key: str) -> bool:
        return super()._is_extra(key) or key.startswith(_BESIDE.get(self.part, ("loss.",)))

    def _places(self, module: nn.Module, keys: set[str]) -> dict[str, Place]:
        return {name: Place(name) for name in module.state_dict() if name != TIED}

    def as_it_lies(self, stem: str, dtype: torch.dtype | None) -> list[tuple[Path, str]] | None:
        """Name the files that readers of this part take as they are; None: something in them is not as it must be.

        stem: what readers call the file. dtype: that all tensors must have; None: any.
        """
        files = plain_files(self.paths(), stem)
        stored = [path for path, name in files or () if name.endswith(".safetensors")]
        if files is None or (dtype is not None and any(dtypes_of(path) != {dtype} for path in stored)):
            return None
        return None if any(self._is_extra(key) and key != TIED for key in self._located()) else files

    def fingerprint(self, part: str) -> str:
        """Hash the weights as they lie in the files."""
        located = self._located()
        stored = ((key, file.get(key)) for key, file in located.items() if not self._is_extra(key))
        return of_files(self.paths(), f"all of {part}", lambda: of_tensors(stored))


class BranchlessPart:
    """A transformer of diffusers' layout that is to have a whole last block: its text branch begins anew."""

    def __init__(self, stored: FolderPart, whole: Architecture, seed: int) -> None:
        self.stored, self.whole, self.seed = stored, whole, seed

    def faults(self, module: nn.Module) -> list[Fault]:
        return self.stored.faults(self._cut.build("transformer"))

    def weights(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        from difftrain.models.sd3.sources import fresh_text_branch

        fresh = fresh_text_branch(self.whole, self.seed, module)
        return unfolded(self.stored.weights(self._cut.build("transformer")), self.whole.num_layers, fresh)

    def fingerprint(self, part: str) -> str:
        return self.stored.fingerprint(part)

    @property
    def _cut(self) -> Architecture:
        return replace(self.whole, text_branch=False)


def read_part_config(folder: Path, part: str, flag: str) -> dict[str, Any]:
    """Read config.json of a part, without what its class does not take. Raises ConfigFault where it is missing."""
    content = read_json(folder / "config.json")
    if not content:
        what = f"{folder / 'config.json'} is missing or is not JSON"
        raise ConfigFault([Fault(flag, what, "give a folder as diffusers writes it: config.json beside the weights")])
    if part in ("text_encoder_1", "text_encoder_2") and isinstance(content.get("text_config"), dict):
        content = content["text_config"] | {key: content[key] for key in ("projection_dim",) if key in content}
    known = known_keys(part, content)
    return {key: value for key, value in content.items() if key in known}
