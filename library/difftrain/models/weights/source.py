"""The sizes and weights of a model's parts: one tensor at a time, from files or from (seed, part, name)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.contracts import ConfigFault, Fault
from difftrain.device.quantised import Stored
from difftrain.diffusion.draws import STREAM_VERSION
from difftrain.models import build as known
from difftrain.models.build import build, possible
from difftrain.models.weights.fingerprints import hashed, of_files, of_tensors
from difftrain.models.weights.initial import DRAW_VERSION, Scale, by_fan_in, clip_scale, initial_weights, t5_scale
from difftrain.models.weights.part_files import PartFiles, PartInFile, SingleFile

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
    checked: set[str] = field(default_factory=set, compare=False)  # stored parts whose values were all finite

    def build(self, part: str) -> Any:
        """Build a part whose parameters have no memory. Raises ConfigFault for impossible sizes."""
        return build(self.kinds[part], part, self.sizes[part])

    def complete(self, part: str) -> dict[str, Any]:
        """Return a part's arguments with its class's defaults."""
        return known.complete(self.kinds[part], self.sizes[part])

    def count(self, part: str) -> int:
        """Count a part's parameters, by formula or from the headers of its files where nothing has to be imported."""
        with possible(part):
            if (count := counted(self.kinds[part], self.complete(part))) is not None:
                return count
        if part in self.readers:
            return self.readers[part].count()
        return sum(param.numel() for param in self.build(part).parameters())

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

    def weights(self, part: str, module: nn.Module) -> Iterator[tuple[str, Tensor | Stored]]:
        """Give a part's tensors one at a time, fixed tables included; matrices that a file has in fp8 as they are there.

        Raises ConfigFault behind the last of stored ones where some, the first time that they are read, are not finite.
        """
        if part in self.readers:
            reader, bad = self.readers[part], []
            for name, value in reader.weights(module):
                if part not in self.checked and not is_finite(value.codes if isinstance(value, Stored) else value):
                    bad.append(name)
                yield name, value
            if bad:
                more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
                what = f"{reader.path} holds values that are not finite (NaN, infinity) in {', '.join(bad[:3])}{more}"
                raise ConfigFault(
                    [Fault(reader.flag, what, "training with them gives nothing but NaN: fetch it again")]
                )
            self.checked.add(part)
            return
        if part == "vae" and self.ships_vae:
            yield from shipped_vae(module)
            return
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        yield from ((name, value) for name, value in module.state_dict().items() if name not in parameters)
        yield from initial_weights(module, part, self.seed, self._scale(part, module))

    @property
    def ships_vae(self) -> bool:
        """Tell whether the random VAE would be of the size whose trained weights are shipped; scales change no weight."""
        if self.kinds.get("vae") != "diffusers:AutoencoderKL":
            return False
        shipped = shipped_sizes()
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
            return shipped_fingerprint(lambda: self.build(part)) if self.named_hashes else shipped_digest()
        return hashed("random", STREAM_VERSION, DRAW_VERSION, self.seed, part, sizes)

    def reusable_files(self, part: str, stem: str, dtype: torch.dtype | None) -> list[tuple[Path, str]] | None:
        """Name the files of a part that an export can have as they are; None: they must be written anew."""
        return self.readers[part].reusable_files(stem, dtype) if part in self.readers else None


_CHUNK = 1 << 18  # numbers that stay in a core's cache between two operations


def is_finite(value: Tensor) -> bool:
    """Tell whether all values are finite, in about the memory's speed.

    Of 32 bits and more by their sum, which is finite only then (where it overflows, each value is asked); of fewer, whose
    sums are slow, by their bits: an exponent of ones is the largest number of those without the sign.
    """
    import torch

    if not value.is_floating_point():
        return True
    if value.dtype.itemsize > 2:
        return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())
    least = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float8_e5m2: 0x7C, torch.float8_e4m3fn: 0x7F}
    if value.dtype not in least:
        return bool(torch.isfinite(value.float()).all())
    wide = value.dtype.itemsize == 2
    bits = value.contiguous().view(torch.int16 if wide else torch.uint8).flatten()
    sign = 0x7FFF if wide else 0x7F
    return all(int(chunk.bitwise_and(sign).max()) < least[value.dtype] for chunk in bits.split(_CHUNK) if len(chunk))


# --- Parameters of encoders, counted from their sizes by formula: no class is imported for it, as none may be here


Config = Mapping[str, Any]


def counted(kind: str, complete: Config) -> int | None:
    """Count a part by the formula of its class; None where there is none. complete: its sizes, defaults included."""
    if kind == "diffusers:AutoencoderKL":
        return vae(complete)
    if kind in _CLIP:
        return clip(complete, projected=kind == _CLIP[1])
    return t5(complete) if kind == _T5[0] else None


def clip(config: Config, *, projected: bool = True) -> int:
    """Count a CLIP text encoder, with its projection or without."""
    d, inner = config["hidden_size"], config["intermediate_size"]
    layer = 4 * _linear(d, d) + _linear(d, inner) + _linear(inner, d) + 4 * d
    tables = (config["vocab_size"] + config.get("max_position_embeddings", 77)) * d
    return tables + config["num_hidden_layers"] * layer + 2 * d + (d * config["projection_dim"] if projected else 0)


def t5(config: Config) -> int:
    """Count T5's encoder: no biases, positions in the first layer alone."""
    d, attention = config["d_model"], config["num_heads"] * config["d_kv"]
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    layer = 4 * d * attention + (3 if gated else 2) * d * config["d_ff"] + 2 * d
    tables = config["vocab_size"] * d + config.get("relative_attention_num_buckets", 32) * config["num_heads"]
    return tables + config["num_layers"] * layer + d


def vae(config: Config) -> int:
    """Count AutoencoderKL with attention in the middle, encoder and decoder."""
    widths, layers, latents = config["block_out_channels"], config["layers_per_block"], config["latent_channels"]
    middle = 2 * _resnet(widths[-1], widths[-1])
    if config.get("mid_block_add_attention", True):
        middle += 2 * widths[-1] + 4 * _linear(widths[-1], widths[-1])
    total = 2 * middle
    for side, repeats in ((list(widths), layers), (list(reversed(widths)), layers + 1)):
        entering = side[0]
        for i, width in enumerate(side):
            total += _resnet(entering, width) + (repeats - 1) * _resnet(width, width)
            entering = width
            total += _conv(width, width, 3) if i < len(side) - 1 else 0
    total += _conv(config.get("in_channels", 3), widths[0], 3) + 2 * widths[-1] + _conv(widths[-1], 2 * latents, 3)
    total += _conv(latents, widths[-1], 3) + 2 * widths[0] + _conv(widths[0], config.get("out_channels", 3), 3)
    total += _conv(2 * latents, 2 * latents, 1) if config.get("use_quant_conv", True) else 0
    return total + (_conv(latents, latents, 1) if config.get("use_post_quant_conv", True) else 0)


def _linear(entering: int, leaving: int) -> int:
    return entering * leaving + leaving


def _conv(entering: int, leaving: int, kernel: int) -> int:
    return entering * leaving * kernel**2 + leaving


def _resnet(entering: int, leaving: int) -> int:
    shortcut = _conv(entering, leaving, 1) if entering != leaving else 0
    return 2 * entering + _conv(entering, leaving, 3) + 2 * leaving + _conv(leaving, leaving, 3) + shortcut


# --- The VAE of the tiny sizes: trained by us (models/vae/fit.py), shipped beside SDXL's tiny


def shipped_sizes() -> dict[str, Any]:
    """Return the sizes that the weights are for."""
    return dict(json.loads(resources.files("difftrain.models.vae").joinpath("tiny_vae.json").read_text("utf-8")))


def shipped_vae(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Give the weights of the tiny VAE. Absent tensors are zeros."""
    import torch
    from safetensors.torch import load

    stored = load(_file().read_bytes())
    for name, param in module.state_dict().items():
        yield name, stored[name].float() if name in stored else torch.zeros(param.shape)


def shipped_digest() -> str:
    """Hash the file: what the weights are, without a module that they are for."""
    return hashlib.blake2b(_file().read_bytes(), digest_size=16).hexdigest()


def shipped_fingerprint(make: Callable[[], Any]) -> str:
    """Hash the weights one by one, zeros too. make: builds the module, where the user's cache folder has no such hash."""
    with resources.as_file(_file()) as path:
        return of_files([path], "the tiny VAE", lambda: of_tensors(shipped_vae(make())))


def _file() -> Traversable:
    return resources.files("difftrain.models.vae").joinpath("tiny_vae.safetensors")
