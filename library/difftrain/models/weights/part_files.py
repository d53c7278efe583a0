"""One part of a model in the files that hold it: a folder of diffusers' layout, or one file in either layout."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import ConfigFault, Fault
from difftrain.device.quantised import FP8, Stored, widened
from difftrain.models import build as known
from difftrain.models.build import is_transformers
from difftrain.models.facts import OneFile
from difftrain.models.weights.files import (
    MODEL_STEMS,
    SCALES,
    TEXT_STEMS,
    WeightFile,
    dtypes_of,
    find_weights,
    is_extra,
    is_of_fp8,
    opened,
    read_json,
)
from difftrain.models.weights.fingerprints import Stamp, of_files, of_tensors, stamp
from difftrain.models.weights.folder_export import (
    file_name,
    is_second_name,
    plain_files,
    second_names,
    stored_name,
    tied,
)
from difftrain.models.weights.infer import differences, looks_like
from difftrain.models.weights.keys import KeyMap, KeyPiece, Rule

if TYPE_CHECKING:
    from torch import Tensor, nn


Shapes = dict[str, tuple[int, ...]]
Infer = Callable[[Mapping[str, tuple[int, ...]]], dict[str, Any]]  # shapes of the original layout -> sizes
# what files of whole models have before a denoiser's and a VAE's names
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.")
VAE_PREFIXES = ("first_stage_model.", "vae.")
# what files hold beside the part that is read here
_CLIP_BESIDE = ("vision_model.", "visual_projection.", "logit_scale")
_BESIDE = {
    "CLIPTextModel": (*_CLIP_BESIDE, "text_projection."),
    "CLIPTextModelWithProjection": _CLIP_BESIDE,
    "T5EncoderModel": ("encoder.embed_tokens.weight", "decoder.", "lm_head.", "spiece_model"),
    "Qwen3Model": ("lm_head.",),
    "UMT5EncoderModel": ("encoder.embed_tokens.weight", "decoder.", "lm_head.", "spiece_model"),
    "Qwen2_5_VLForConditionalGeneration": (),
    "CosmosTransformer3DModel": ("accum_", "pos_embedder."),
    "Lumina2Transformer2DModel": ("norm_final.", "loss.", "model_ema."),
}


class PartFiles:
    """The files of one part. path: its folder, with config.json next to the weights, or a single file.

    rule: of the original layout, for a module of the part; infer: its sizes from a single file's shapes.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        flag: str,
        *,
        mmap: bool = True,
        rule: Callable[[nn.Module], Rule] | None = None,
        infer: Infer | None = None,
    ) -> None:
        self.path, self.kind, self.flag = path, kind, flag
        self._mmap, self._rule, self._infer = mmap, rule, infer

    # ------------------------------------------------------------------ what lies there

    def paths(self) -> list[Path]:
        """List the files. Raises ConfigFault where a folder has none."""
        if self.path.is_file():
            return [self.path]
        return find_weights(self.path, TEXT_STEMS if is_transformers(self.kind) else MODEL_STEMS, self.flag)

    @cached_property
    def _opened(self) -> list[tuple[Stamp, WeightFile]]:
        """Open the files, each with what it was then."""
        return [
            (stamp(path) if path.exists() else [], opened(path, self.flag, mmap=self._mmap)) for path in self.paths()
        ]

    @cached_property
    def _located(self) -> dict[str, tuple[WeightFile, str]]:
        """Map every tensor, without the prefix of a whole model, to its file and its key there."""
        keys = {key: file for _, file in self._opened for key in file.shapes()}
        known = VAE_PREFIXES if "Autoencoder" in self.kind else PREFIXES
        prefix = next((prefix for prefix in known if any(key.startswith(prefix) for key in keys)), "")
        prefix = "" if self.path.is_dir() else prefix
        located = {key[len(prefix) :]: (file, key) for key, file in keys.items() if key.startswith(prefix)}
        for second, first in tied(self.kind):  # some files hold a table under nothing but its second name
            if second in located and first not in located:
                located[first] = located.pop(second)
        return located

    @cached_property
    def shapes(self) -> Shapes:
        """Give the shapes of the part's tensors, without what lies beside it."""
        shapes = {id(file): file.shapes() for _, file in self._opened}
        return {name: shapes[id(file)][key] for name, (file, key) in self._located.items() if not self._is_beside(name)}

    def _is_beside(self, name: str) -> bool:
        return is_extra(name) or name.startswith(_BESIDE.get(self.kind.partition(":")[2], ("loss.", "model_ema.")))

    def _get(self, name: str) -> Tensor:
        file, key = self._located[name]
        return file.get(key)

    def _scale_of(self, name: str) -> str | None:
        """Name the scale that stands beside a weight of fp8."""
        owner, dot, leaf = name.rpartition(".")
        scales = (f"{owner}{dot}{scale}" for scale in SCALES) if leaf == "weight" else ()
        return next((scale for scale in scales if scale in self._located), None)

    def _restored(self, key_map: KeyMap, name: str) -> Tensor | Stored:
        """Read a tensor of a module; a matrix of fp8 with its scale, which is 1 where none is stored. Raises ConfigFault."""
        key = key_map.pieces[name].key
        value, scaled = self._get(key), self._scale_of(key)
        restored = key_map.restored(name, value)
        if scaled is None:
            return Stored(restored, torch.ones(())) if value.dtype == FP8 and value.ndim > 1 else restored
        scale = self._get(scaled).float()
        if wrong := _scale_fault(value, scale):
            remedy = "float8_e4m3fn with one scale, or one for each row; or weights in bf16, fp16 or fp32"
            raise ConfigFault([Fault(self.flag, f"{self.path}: {scaled} {wrong}", remedy)])
        if scale.numel() == 1:
            return Stored(restored, scale.reshape(()))
        return Stored(restored, key_map.restored_rows(name, scale.reshape(-1, 1)))

    def key_map(self, module: nn.Module) -> KeyMap:
        """Say where each tensor of a module lies: by its own name, else by the table of the original layout."""
        tensors = module.state_dict()
        second = second_names(self.kind, module)
        expected = {name: tuple(v.shape) for name, v in tensors.items() if name not in second}
        keys = self._located.keys()
        own = {name: stored_name(self.kind, name, keys) for name in expected}
        plain = KeyMap(expected, lambda name: KeyPiece(own[name]))
        if self._rule is None or self.path.is_dir() or plain.stored.keys() <= keys:
            return plain
        # layouts may call many tensors alike: the one of which more is there
        table = KeyMap(expected, self._rule(module))
        plain_share, table_share = (sum(key in keys for key in m.stored) / len(m.stored) for m in (plain, table))
        return plain if plain_share > table_share else table

    # ------------------------------------------------------------------ reading

    def sizes(self) -> dict[str, Any]:
        """Read the sizes: of a folder's config.json what the class takes, of a file what its shapes say."""
        if not self.path.is_file():
            content = read_json(self.path / "config.json")
            if content:
                return known.accepted(self.kind, content)
            what = f"{self.path / 'config.json'} is missing or is not JSON"
            remedy = "give a folder as diffusers writes it: config.json next to the weights"
            raise ConfigFault([Fault(self.flag, what, remedy)])
        if self._infer is None:
            what = f"{self.path}: sizes of {self.kind.partition(':')[2]} cannot be determined from a single file"
            raise ConfigFault([Fault(self.flag, what, "give a folder with config.json next to the weights")])
        try:
            return self._infer(self.shapes)
        except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
            what = f"{self.path} looks like {looks_like(self.shapes)}, not {self.kind.partition(':')[2]} (no {error})"
            raise ConfigFault([Fault(self.flag, what, "a file of that part in its original layout")]) from None

    def faults(self, module: nn.Module) -> list[Fault]:
        """Compare names and shapes with those of a module."""
        try:
            second = {file_name(self.kind, name) for name in second_names(self.kind, module)}
            own = {name: shape for name, shape in self.shapes.items() if name not in second}
            lines = differences(self.key_map(module).stored, own)
        except KeyError as error:
            lines = [str(error)]
        if not lines:
            return []
        text = f"{self.path} looks like {looks_like(self.shapes)}; tensors {'; '.join(lines)}"
        if any(_OTHER_CODES.search(name) for name in self._located):
            remedy = "weights that others have quantised are read as ComfyUI's fp8 alone: give those of bf16"
            return [Fault(self.flag, text, remedy)]
        return [Fault(self.flag, text, "weights and config.json must belong together")]

    def weights(self, module: nn.Module) -> Iterator[tuple[str, Tensor | Stored]]:
        """Give a module's tensors one at a time, those of fp8 as they are. Raises ConfigFault for scales that are none."""
        key_map = self.key_map(module)
        yield from ((name, self._restored(key_map, name)) for name in key_map.pieces)

    def tensor(self, name: str) -> Tensor:
        """Give one tensor by the name that it has in files: statistics that lie among a VAE's weights."""
        return self._get(name)

    def count(self) -> int:
        """Count the numbers of the part, from the headers of its files."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def num_bytes(self) -> int:
        """Return the bytes of its files, which are more than the numbers in them. Raises ConfigFault."""
        return sum(path.stat().st_size for path in self.paths() if path.exists())

    def fingerprint(self, part: str) -> str:
        """Hash the weights as they lie in the files."""
        scales = [name for name in self._located if is_of_fp8(name)]
        stored = ((name, self._get(name)) for name in (*self.shapes, *scales))
        return of_files(self.paths(), f"all of {part}", lambda: of_tensors(stored), self._since)

    def named_fingerprint(self, what: str, build: Callable[[], nn.Module]) -> str:
        """Hash the weights by their names in a diffusers folder: equal in every layout.

        what: names them among those of the files. build: makes the module, where the files are others than those that
        were read before. Raises ConfigFault where they do not fit it.
        """

        def read() -> str:
            module = build()
            if problems := self.faults(module):
                raise ConfigFault(problems)
            return of_tensors((file_name(self.kind, name), value) for name, value in widened(self.weights(module)))

        return of_files(self.paths(), what, read, self._since)

    @property
    def _since(self) -> list[Stamp] | None:
        """Return what the files were when they were opened, where they are open."""
        return [known for known, _ in self._opened] if "_opened" in self.__dict__ else None

    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes in its files; nothing where they are not safetensors."""
        paths = self.paths()
        return set().union(*map(dtypes_of, paths)) if all(path.suffix == ".safetensors" for path in paths) else set()

    def reusable_files(self, stem: str, dtype: torch.dtype | None) -> list[tuple[Path, str]] | None:
        """Name the files that readers of a folder take as they are; None: something in them is not as it must be.

        stem: what readers call the file. dtype: that all tensors must have; None: any.
        """
        if self.path.is_file():
            return None
        files = plain_files(self.paths(), stem)
        stored = [path for path, name in files or () if name.endswith(".safetensors")]
        if files is None or (dtype is not None and any(dtypes_of(path) != {dtype} for path in stored)):
            return None
        beside = [name for name in self._located if self._is_beside(name) and not is_second_name(self.kind, name)]
        return None if beside else files


# what other tools' quantised weights have beside them: bitsandbytes, GPTQ, AWQ
_OTHER_CODES = re.compile(r"\.(absmax|quant_map|nested_absmax|quant_state\..*|qweight|qzeros|g_idx|SCB)$")


def _scale_fault(value: Tensor, scale: Tensor) -> str:
    """Say what is wrong with the scale of a weight; nothing where it is one."""
    if value.dtype != FP8:
        return f"stands beside a weight of {str(value.dtype).removeprefix('torch.')}"
    if scale.numel() not in (1, len(value)):
        return f"has {scale.numel()} numbers for {len(value)} rows"
    return "" if bool((torch.isfinite(scale) & (scale > 0)).all()) else "is not finite, or not above 0"


# --- One file that holds all parts of a model in their original layout: its sizes, what is wrong with it, and its parts


SIZES = "difftrain.architecture"  # where a file of ours says its sizes: in its header, in a .ckpt as a tensor of bytes
_MOST_SIZES = 1 << 24  # bytes
FACTS = "difftrain.json"  # what an export cannot say otherwise: beside model_index.json, or in a single file's header


def _object(text: str) -> dict[str, Any] | None:
    """Read a JSON object of a header; None where it is something else, or of too many levels."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _text(tensor: Tensor) -> str:
    """Read a tensor of bytes as text; what is none is no JSON either."""
    if tensor.dtype != torch.uint8 or tensor.numel() > _MOST_SIZES:
        return ""
    return bytes(tensor.flatten().tolist()).decode("utf-8", "replace")


class SingleFile:
    """A file of safetensors or of torch, opened once. flag: what it was given by. facts: what such a file is like."""

    def __init__(self, path: Path, flag: str, facts: OneFile, *, mmap: bool = True) -> None:
        self.path, self.flag, self.facts, self.mmap = path, flag, facts, mmap

    @cached_property
    def opened(self) -> tuple[Stamp, WeightFile]:
        """Open it, with what it was then. Raises ConfigFault."""
        return stamp(self.path), opened(self.path, self.flag, mmap=self.mmap)

    @property
    def header(self) -> dict[str, str]:
        """Return its metadata; a .ckpt has none."""
        return self.opened[1].metadata

    @cached_property
    def marks(self) -> frozenset[str]:
        """Name all that is in it, what no part reads too."""
        return frozenset(self.opened[1].shapes())

    @cached_property
    def shapes(self) -> Shapes:
        """Give the shapes of its weights, and of what readers expect beside them."""
        ignored = re.compile(self.facts.ignored)
        shapes = self.opened[1].shapes().items()
        return {key: shape for key, shape in shapes if not ignored.match(key) and not is_of_fp8(key)}

    def get(self, key: str) -> Tensor:
        """Give a tensor by its key."""
        return self.opened[1].get(key)

    def sizes(self) -> dict[str, Any] | None:
        """Return the sizes that it says; None where it is a release's. Raises ConfigFault."""
        text = self.header.get(SIZES)
        if text is None and SIZES in self.marks:
            text = _text(self.get(SIZES))
        if text is None:
            return None
        content = _object(text)
        if content is None:
            raise ConfigFault([Fault(self.flag, f"{self.path}: its {SIZES} is not a JSON object")])
        return content

    def stored_facts(self) -> dict[str, Any]:
        """Return what an export of ours says of itself beside its sizes; nothing where it is no such file."""
        return _object(self.header.get(FACTS, "{}")) or {}

    def has(self, part: str) -> bool:
        """Tell whether anything of a part is in it."""
        return any(key.startswith(self.facts.prefixes[part]) for key in self.shapes)

    def faults(self, parts: Mapping[str, tuple[PartInFile, nn.Module]]) -> list[Fault]:
        """Compare keys and shapes with those of the parts that are to come from it, all at once."""
        expected = {
            reader.prefix + key: shape
            for reader, module in parts.values()
            for key, shape in reader.key_map(module).stored.items()
            if reader.prefix + key not in self.facts.identity or reader.prefix + key in self.shapes
        }
        foreign = tuple(prefix for part, prefix in self.facts.prefixes.items() if part not in parts)
        spare = self._spare(expected)
        actual = {
            key: shape
            for key, shape in self.shapes.items()
            if key not in self.facts.beside and not (foreign and key.startswith(foreign)) and key not in spare
        }
        lines = differences(expected, actual)
        if not lines:
            return []
        what = f"{self.path} looks like {looks_like(self.shapes)}; tensors {'; '.join(lines)}"
        return [Fault(self.flag, what, self.facts.layout)]

    def _spare(self, expected: Shapes) -> frozenset[str]:
        """Name the tensors of the one block more that such files have than the model."""
        if not self.facts.spare:
            return frozenset()
        numbers = [int(match[1]) for key in expected if (match := re.match(self.facts.spare, key))]
        following = 1 + max(numbers, default=-1)
        matches = {key: re.match(self.facts.spare, key) for key in self.shapes}
        return frozenset(key for key, match in matches.items() if match and int(match[1]) == following)


class PartInFile(PartFiles):
    """One part of such a file."""

    def __init__(
        self, source: SingleFile, part: str, kind: str, *, rule: Callable[[nn.Module], Rule] | None = None
    ) -> None:
        super().__init__(source.path, kind, source.flag, mmap=source.mmap, rule=rule)
        self.single_file, self.part, self.prefix = source, part, source.facts.prefixes[part]

    @cached_property
    def _opened(self) -> list[tuple[Stamp, WeightFile]]:
        return [self.single_file.opened]

    def paths(self) -> list[Path]:
        """List the file, whether or not it is still there: it was opened at the start."""
        return [self.path]

    @cached_property
    def _located(self) -> dict[str, tuple[WeightFile, str]]:
        file = self.single_file.opened[1]
        beside = self.single_file.facts.beside
        keys = (*self.single_file.shapes, *filter(is_of_fp8, self.single_file.marks))
        inside = [key for key in keys if key.startswith(self.prefix) and key not in beside]
        return {key.removeprefix(self.prefix): (file, key) for key in inside}

    def weights(self, module: nn.Module) -> Iterator[tuple[str, Tensor | Stored]]:
        """Give a module's tensors one at a time; a matrix that such files may leave out is the identity."""
        key_map = self.key_map(module)
        for name, piece in key_map.pieces.items():
            if piece.key not in self._located and self.prefix + piece.key in self.single_file.facts.identity:
                yield name, torch.eye(*key_map.shapes[name])
            else:
                yield name, self._restored(key_map, name)

    def faults(self, module: nn.Module) -> list[Fault]:
        """Compare names and shapes with those of a module."""
        return self.single_file.faults({self.part: (self, module)})
