"""The sizes and weights of a model's parts: one tensor at a time, from files or from (seed, part, name)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.contracts import Fault
from difftrain.diffusion.keys import STREAM_VERSION
from difftrain.models import counts
from difftrain.models import sizes as known
from difftrain.models.build import build, possible
from difftrain.models.vae import shipped as vae_shipped
from difftrain.models.weights.fingerprints import hashed
from difftrain.models.weights.initial import DRAW_VERSION, Scale, by_fan_in, clip_scale, initial_weights, t5_scale
from difftrain.models.weights.part_files import PartFiles
from difftrain.models.weights.single_file import PartInFile, SingleFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


INITS = ("adaln_zero", "fan_in")
_T5 = ("transformers:T5EncoderModel", "transformers:UMT5EncoderModel")
_CLIP = ("transformers:CLIPTextModel", "transformers:CLIPTextModelWithProjection")


@dataclass(frozen=True)
class WeightSource:
    """The sizes and weights of every part. readers: of those that are stored; the others are drawn from the seed.

    kinds: part -> "library:Class". zero: pattern of the denoiser's parameters that begin as zeros (init adaln_zero).
    name: of the size. named_hashes: see Description. single_file: the file that holds several parts, where there is one.
    """

    kinds: Mapping[str, str]
    sizes: Mapping[str, Mapping[str, Any]]
    readers: Mapping[str, PartFiles]
    seed: int
    denoiser: str
    zero: str = ""
    init: str = "adaln_zero"
    tokenizer_dirs: Mapping[str, Path] = field(default_factory=dict)
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    name: str = "custom"
    named_hashes: bool = False
    single_file: SingleFile | None = None

    def build(self, part: str) -> Any:
        """Build a part whose parameters have no memory. Raises ConfigFault for impossible sizes."""
        return build(self.kinds[part], part, self.sizes[part])

    def complete(self, part: str) -> dict[str, Any]:
        """Return a part's arguments with its class's defaults."""
        return known.complete(self.kinds[part], self.sizes[part])

    def count(self, part: str) -> int:
        """Count a part's parameters, by formula or from the headers of its files where nothing has to be imported."""
        kind = self.kinds[part]
        with possible(part):
            if kind == "diffusers:AutoencoderKL":
                return counts.vae(self.complete(part))
            if kind in _CLIP:
                return counts.clip(self.sizes[part], projected=kind == _CLIP[1])
            if kind == _T5[0]:
                return counts.t5(self.sizes[part])
        if part in self.readers:
            return self.readers[part].count()
        return sum(each.numel() for each in self.build(part).parameters())

    def decisive(self, part: str) -> dict[str, Any]:
        """Return what decides, weights aside, what an encoder makes."""
        return known.decisive(self.kinds[part], self.sizes[part])

    def faults(self, modules: Mapping[str, Any]) -> list[Fault]:
        """Compare stored parts with modules of them."""
        stored = {part: reader for part, reader in self.readers.items() if part in modules}
        inside = {part: (reader, modules[part]) for part, reader in stored.items() if isinstance(reader, PartInFile)}
        problems = self.single_file.faults(inside) if self.single_file and inside else []
        return problems + [
            fault for part, reader in stored.items() if part not in inside for fault in reader.faults(modules[part])
        ]

    def weights(self, part: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Give a part's tensors one at a time, fixed tables included."""
        if part in self.readers:
            yield from self.readers[part].weights(module)
            return
        if part == "vae" and self.ships_vae:
            yield from vae_shipped.shipped_vae(module)
            return
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        yield from ((name, value) for name, value in module.state_dict().items() if name not in parameters)
        yield from initial_weights(module, part, self.seed, self._scale(part, module))

    @property
    def ships_vae(self) -> bool:
        """Tell whether the random VAE would be of the size whose trained weights are shipped; scales change no weight."""
        if self.kinds.get("vae") != "diffusers:AutoencoderKL":
            return False
        shipped = vae_shipped.shipped_sizes()
        if self.named_hashes:
            return bool(self.sizes["vae"] == shipped)
        ours = {key: value for key, value in self.sizes["vae"].items() if key not in ("scaling_factor", "shift_factor")}
        return known.decisive(self.kinds["vae"], ours) == known.decisive(self.kinds["vae"], shipped)

    def _scale(self, part: str, module: Any) -> Scale:
        kind, config = self.kinds[part], module.config
        if kind in _CLIP:
            return clip_scale(config.num_hidden_layers, config.hidden_size)
        if kind in _T5:
            return t5_scale(config.d_model, config.d_kv, config.num_heads, config.d_ff)
        zero = re.compile(self.zero) if part == self.denoiser and self.zero and self.init == INITS[0] else None
        return lambda name, shape: 0.0 if zero and zero.search(name) else by_fan_in(name, shape)

    def fingerprint(self, part: str) -> str:
        """Hash a part's weights, which are not loaded for it. Raises ConfigFault where they do not fit."""
        sizes = sorted(self.sizes[part].items())
        if part in self.readers and self.named_hashes:
            return self.readers[part].named_fingerprint(hashed(part, sizes), lambda: self.build(part))
        if part in self.readers:
            return self.readers[part].fingerprint(part)
        if part == "vae" and self.ships_vae:
            return (
                vae_shipped.shipped_fingerprint(lambda: self.build(part))
                if self.named_hashes
                else vae_shipped.shipped_digest()
            )
        return hashed("random", STREAM_VERSION, DRAW_VERSION, self.seed, part, sizes)

    def reusable_files(self, part: str, stem: str, dtype: torch.dtype | None) -> list[tuple[Path, str]] | None:
        """Name the files of a part that an export can have as they are; None: they must be written anew."""
        return self.readers[part].reusable_files(stem, dtype) if part in self.readers else None
