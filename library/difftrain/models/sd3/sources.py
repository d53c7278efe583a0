"""Where the weights of an SD3 model come from: a random draw, or a diffusers folder; a part may come from elsewhere.

Every source hands out (name, tensor) of a part one at a time, so that a model is never in memory twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from difftrain.contracts import ConfigFault, Fault
from difftrain.diffusion.keys import STREAM_VERSION
from difftrain.models.parts.fingerprints import hashed
from difftrain.models.parts.initial import DRAW_VERSION, Scale, by_fan_in, clip_scale, initial_weights, t5_scale
from difftrain.models.parts.small_vae import shipped_digest, shipped_vae
from difftrain.models.sd3.architecture import Architecture, named, of_depth, read_architecture
from difftrain.models.sd3.text_branch import cut

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from difftrain.config import TrainConfig

Modules = Mapping[str, Any]


class Source(Protocol):
    """Give the architecture, and the weights of one part by the names of its module."""

    @property
    def architecture(self) -> Architecture: ...
    @property
    def tokenizer_dirs(
        self,
    ) -> Mapping[int, Path]: ...  # encoder 1, 2, 3 -> the folder of its vocabulary, where there is one
    @property
    def notes(self) -> Sequence[str]: ...
    @property
    def shift(self) -> float | None: ...  # of the times of the sampler that came with the transformer
    def faults(self, modules: Modules) -> list[Fault]: ...
    def weights(self, part: str, module: Any) -> Iterator[tuple[str, Tensor]]: ...
    def fingerprint(self, part: str) -> str: ...  # of a part's weights, which are not loaded for it
    def as_it_lies(self, part: str, stem: str, dtype: torch.dtype | None) -> list[tuple[Path, str]] | None: ...


def source_of(cfg: TrainConfig) -> Source:
    """Choose the source that the configuration names; parts may come from elsewhere. Raises ConfigFault."""
    from difftrain.models.sd3.assembled import FLAG, LIGHT, assembled, elsewhere

    model = cfg.model
    if model.pretrained and model.init_from_config:
        text = "contradicts init_from_config: weights come from a folder or from a seed"
        raise ConfigFault([Fault(FLAG, text, "give one of the two")])
    if model.init_from_config:
        base = read_architecture(model.init_from_config)
        base = of_depth(base, model.num_layers or base.num_layers)
        if elsewhere(cfg):
            return assembled(cfg, base.to_dict())
        return RandomSource(replace(base, text_branch=cfg.loss.text_recon_gamma > 0), cfg.training.seed or 0)
    if model.pretrained or elsewhere(cfg):
        # of SD3-Light only the frozen parts have to be stored
        bare = model.train_type == LIGHT and not model.pretrained and not model.transformer
        return assembled(cfg, {"transformer": named("light").transformer} if bare else {})
    remedy = "give diffusers_path = FOLDER, or init_from_config = light, medium, tiny or FILE.json"
    raise ConfigFault([Fault("[model]", "no weights are named", remedy)])


def begun(cfg: TrainConfig) -> Source:
    """Return a model to begin with: a random transformer of the size's depth, the rest from the folder if there is one.

    With a folder its widths count: the transformer must fit its encoders. Raises ConfigFault.
    """
    from difftrain.models.sd3.assembled import assembled

    size = read_architecture(cfg.model.init_from_config or "light", "--size")
    if not cfg.model.pretrained:
        return RandomSource(size, cfg.training.seed or 0)
    model = cfg.model.model_copy(update={"init_from_config": None, "num_layers": size.num_layers})
    found = assembled(cfg.model_copy(update={"model": model}), {})
    parts = {name: part for name, part in found.parts.items() if name != "transformer"}
    note = f"the transformer begins with random weights: {size.num_layers} joint blocks as wide as the folder's"
    return replace(found, parts=parts, notes=(note,), shift=None)


@dataclass(frozen=True)
class RandomSource:
    """Draw every weight from (seed, part, name): the same model on every machine."""

    architecture: Architecture
    seed: int
    tokenizer_dirs: Mapping[int, Path] = field(default_factory=dict)
    shift: float | None = None

    @property
    def notes(self) -> list[str]:
        if self._ships_vae:
            return ["all weights are random but the VAE's, which is a small one trained by us on synthetic pictures"]
        return ["all weights are random, the VAE's too: it can only draw noise"]

    @property
    def _ships_vae(self) -> bool:
        return _weight_sizes(self.architecture) == _weight_sizes(named("tiny"))

    def faults(self, modules: Modules) -> list[Fault]:
        return []

    def weights(self, part: str, module: Any) -> Iterator[tuple[str, Tensor]]:
        if part == "vae" and self._ships_vae:
            yield from shipped_vae(module)
        elif part == "transformer":
            yield from random_transformer(self.architecture, self.seed, module)
        else:
            yield from initial_weights(module, part, self.seed, _scale(part, module))

    def fingerprint(self, part: str) -> str:
        if part == "vae" and self._ships_vae:
            return shipped_digest()
        sizes = sorted(getattr(self.architecture, part).items())
        return hashed("random", STREAM_VERSION, DRAW_VERSION, self.seed, part, sizes)

    def as_it_lies(self, part: str, stem: str, dtype: torch.dtype | None) -> list[tuple[Path, str]] | None:
        return None


def _weight_sizes(architecture: Architecture) -> dict[str, Any]:
    """Return what a VAE's weights hang on: how latents are shifted and scaled does not change them."""
    return {key: value for key, value in architecture.vae.items() if key not in ("scaling_factor", "shift_factor")}


def _scale(part: str, module: Any) -> Scale:
    if part in ("text_encoder_1", "text_encoder_2"):
        return clip_scale(module.config.num_hidden_layers, module.config.hidden_size)
    if part == "text_encoder_3":
        config = module.config
        return t5_scale(config.d_model, config.d_kv, config.num_heads, config.d_ff)
    return by_fan_in


def random_transformer(architecture: Architecture, seed: int, module: Any) -> Iterator[tuple[str, Tensor]]:
    """Draw a transformer's weights; its positions are fixed sines and cosines.

    adaln_zero: every block begins as the identity and the velocity as zero (Peebles & Xie 2023): modulations and the
    last layer are zeros. fan_in: as diffusers' constructor has it, by torch's default for each layer.
    """
    yield from initial_weights(module, "transformer", seed, _transformer_scale(architecture))
    yield "pos_embed.pos_embed", positions(architecture)


def fresh_text_branch(architecture: Architecture, seed: int, module: Any) -> dict[str, Tensor]:
    """Draw what a whole last block has and diffusers' has not, by name: as in a transformer that is random as a whole."""
    depth = architecture.num_layers
    scale = _transformer_scale(architecture)
    return dict(initial_weights(module, "transformer", seed, scale, only=lambda name: cut(name, depth)))


def _transformer_scale(architecture: Architecture) -> Scale:
    zero = architecture.init == "adaln_zero"
    return lambda name, shape: 0.0 if zero and _ZERO.search(name) else by_fan_in(name, shape)


_ZERO = re.compile(r"(norm1|norm1_context|norm_out)\.linear\.|^proj_out\.")


def positions(architecture: Architecture) -> Tensor:
    """Return the table of positions as diffusers makes it: (1, N, D) fp32."""
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    sizes = architecture.transformer
    width = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    base = sizes["sample_size"] // sizes["patch_size"]
    table = get_2d_sincos_pos_embed(width, sizes["pos_embed_max_size"], base_size=base, output_type="pt")
    return table.float().unsqueeze(0)
