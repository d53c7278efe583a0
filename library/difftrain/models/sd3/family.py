"""Stable Diffusion 3 as a Family: its maths, and nothing of ranks, devices or optimizers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Batch, Bucket, Encoder, FeatureSpec, Group, Inputs, Parts, RunFacts
from difftrain.diffusion import flow
from difftrain.models.parts import stand_in, vision
from difftrain.models.parts.fingerprints import Stamp
from difftrain.models.parts.latents import raw_latents
from difftrain.models.sd3 import encoders, objective, repa, speedups
from difftrain.models.sd3.groups import param_groups
from difftrain.models.sd3.load import load_parts, storage_dtype
from difftrain.models.sd3.text import joined
from difftrain.models.sd3.tokens import SD3Tokenize, Vocabularies, comes_without, vocabularies

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.config import TrainConfig
    from difftrain.models.sd3.sources import Source


# part, dtype -> the file, and what it was when it was written
Written = dict[tuple[str, torch.dtype], tuple[Path, Stamp]]


class SD3Family:
    """Stable Diffusion 3 (Esser et al. 2024) and SD3-Light: a joint transformer that learns a rectified flow."""

    name = "sd3"

    def __init__(self, cfg: TrainConfig) -> None:
        self.cfg = cfg
        self.written: Written = {}  # what exports of this run wrote of frozen parts

    @cached_property
    def source(self) -> Source:
        """Find the weights that the configuration names."""
        from difftrain.models.sd3.sources import source_of

        return source_of(self.cfg)

    @property
    def features(self) -> FeatureSpec:
        architecture = self.source.architecture
        found, patch = architecture.features, architecture.transformer["patch_size"]
        latents = found.features["latents"]
        return replace(found, draws=objective.draws(self.cfg, latents.channels, latents.factor, patch))

    def load(self, *, meta: bool = False, lazy: Collection[str] = ()) -> Parts:
        """Build root and frozen parts, with their tokenizers; names and shapes only where meta. Raises ConfigFault.

        lazy: frozen parts that something stands in for until they are woken, also beside others without weights (meta).
        """
        return load_parts(self.cfg, self.source, None if meta else self.vocabularies, meta=meta, lazy=lazy)

    @cached_property
    def vocabularies(self) -> Vocabularies:
        """Read all three. Raises ConfigFault."""
        return vocabularies(self.cfg, self.source)

    def comes_without(self) -> dict[str, str]:
        """Return what the weights lack and a hub has: its field -> its id. Raises ConfigFault."""
        return comes_without(self.cfg, self.source)

    def tokenizer(self, parts: Parts) -> SD3Tokenize:
        """Return the picklable function from captions to token ids. Raises ConfigFault."""
        model = self.cfg.model
        return SD3Tokenize(self.vocabularies, model.t5_max_length, masked=model.t5_attention_mask)

    def encoders(self, parts: Parts) -> dict[str, Encoder]:
        """Describe what may be cached: "latents", and the three text encoders by name."""
        return encoders.encoders(self.cfg, parts, self.source, self.vocabularies)

    def units(self, parts: Parts) -> list[tuple[str, nn.Module]]:
        """List the blocks in the order in which they run."""
        blocks = parts.root.get_submodule("transformer.transformer_blocks")
        return [(f"transformer.transformer_blocks.{name}", block) for name, block in blocks.named_children()]

    def repeated(self, parts: Parts) -> list[nn.Module]:
        """List the blocks that recur; a last one without a text branch is compiled by itself."""
        return [block for _, block in self.units(parts)]

    @torch.no_grad()
    def inputs(self, batch: Batch, parts: Parts) -> Inputs:
        """Encode, noise and weigh one micro batch, in fp32."""
        t, noise = batch.draws["timestep"].float(), batch.draws["noise"].float()
        latents = self.latents(batch, parts)
        found = Inputs(
            x_t=flow.add_noise(latents, noise, t),
            timestep=flow.SCALE * t,
            conditions=self.text(batch, parts),
            target=flow.target(latents, noise),
            weight=objective.weight_of(batch, len(t), latents.device),
            mask=objective.mask_of(batch, latents),
        )
        return speedups.applied(self.cfg, self.source.architecture, batch, parts, found)

    def latents(self, batch: Batch, parts: Parts) -> Tensor:
        """Sample the VAE's posterior with the draw "moments", or take its mean; shifted and scaled."""
        vae = self.source.architecture.vae
        return (raw_latents(self.cfg, batch, parts) - (vae.get("shift_factor") or 0.0)) * vae["scaling_factor"]

    def text(self, batch: Batch, parts: Parts) -> dict[str, Tensor]:
        """Return conditions: tokens (B, 77 + L, J) and pooled (B, P), without what the draws drop of each encoder."""
        width = self.source.architecture.transformer["joint_attention_dim"]
        probability = self.cfg.model.uncond_text_dropout_prob
        keep = [objective.kept(batch, number, probability) for number in range(1, objective.NUM_TEXTS + 1)]
        tokens, pooled = joined(encoders.words(batch, parts), keep, width)
        return {"tokens": tokens, "pooled": pooled}

    def forward(self, root: nn.Module, inputs: Inputs) -> tuple[Tensor, ...]:
        """Predict the velocity, (B, C, H, W) as x_t; where text is reconstructed its tokens and their target too."""
        return root(inputs.x_t, inputs.timestep, inputs.conditions, align=repa.TERM in inputs.aims)

    def loss_sums(self, outputs: tuple[Tensor, ...], inputs: Inputs) -> dict[str, Tensor]:
        """Sum over samples of weight times the sample's own mean loss, in fp32, a term each."""
        if self.cfg.repa.encoder is None:
            return objective.sums(self.cfg.loss, outputs, inputs)
        found = objective.sums(self.cfg.loss, outputs[:-1], inputs)
        return repa.with_term(found, outputs[-1], inputs, self.cfg.repa.weight)

    def param_groups(self, root: nn.Module) -> list[Group]:
        """Group what is trained."""
        return param_groups(root, self.cfg)

    def export(
        self,
        weights: Iterable[tuple[str, Tensor]],
        parts: Parts,
        layout: str,
        path: Path,
        *,
        dtype: torch.dtype | None = None,
        metadata: dict[str, str] | None = None,
    ) -> Path:
        """Write weights for inference; what the stream lacks comes from parts, or from its source where a part sleeps."""
        from difftrain.models.sd3.export import export

        return export(self, weights, parts, layout, path, dtype=dtype, metadata=metadata or {})

    def stream(self, parts: Parts) -> Iterator[tuple[str, Tensor]]:
        """Give every weight of the configured model straight from its source: parts may be on the meta device."""
        frozen = {part: module for part, module in parts.frozen.items() if part != vision.PART}
        yield from stand_in.stored(self.source, {"transformer": parts.root.get_submodule("transformer"), **frozen})

    def asleep(self, parts: Parts, without: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Give the weights of lazy parts as they would be if they were awake; without: of which they are not wanted."""
        return stand_in.asleep(self.source, parts, partial(storage_dtype, self.cfg), {vision.PART, *without})

    def pipeline(self, parts: Parts) -> Any:
        """Return a StableDiffusion3Pipeline over the very modules of parts."""
        from difftrain.models.sd3.pipeline import make_pipeline

        return make_pipeline(self, parts)

    def flops_per_sample(self, parts: Parts, bucket: Bucket) -> float:
        """Count forward and backward of one sample (see flops.py)."""
        return speedups.flops(self.cfg, self.source.architecture, bucket)

    def metadata(self, title: str, saved_at: float, facts: RunFacts | None = None) -> dict[str, str]:
        """Return what an export says of itself (see metadata.py)."""
        from difftrain.models.sd3.metadata import header

        return header(self.cfg, self.source.architecture, title, saved_at, facts)
