"""SDXL as a Family: its maths, and nothing of ranks, devices or optimizers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Batch, Bucket, Encoder, FeatureSpec, Group, Inputs, Parts, RunFacts
from difftrain.diffusion import ddpm
from difftrain.models.parts import stand_in
from difftrain.models.parts.latents import raw_latents
from difftrain.models.sdxl import encoders, objective
from difftrain.models.sdxl.export import export_file, export_folder
from difftrain.models.sdxl.flops import flops_per_sample
from difftrain.models.sdxl.groups import param_groups
from difftrain.models.sdxl.load import by_name, clip_skip_of, learning_rates, load_parts, storage_dtype
from difftrain.models.sdxl.metadata import header
from difftrain.models.sdxl.schedule import SchedulerConfig
from difftrain.models.sdxl.tokens import SDXLTokenize, chunks_of, comes_without, vocabularies

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.config import TrainConfig
    from difftrain.models.parts.clip_vocabulary import ClipVocabulary
    from difftrain.models.sdxl.sources import Source


class SDXLFamily:
    """Stable Diffusion XL (Podell et al. 2023), epsilon or v-prediction over 1000 scaled-linear steps."""

    name = "sdxl"

    def __init__(self, cfg: TrainConfig) -> None:
        self.cfg = cfg

    @cached_property
    def source(self) -> Source:
        """Find the weights that the configuration names."""
        from difftrain.models.sdxl.sources import source_of

        return source_of(self.cfg)

    @property
    def features(self) -> FeatureSpec:
        found = self.source.architecture.features
        draws = objective.noise_draws(self.cfg.noise, found.draws)
        if self.cfg.cache.latents_as != "moments":
            del draws["moments"]
        return replace(found, draws=draws)

    def load(self, *, meta: bool = False, lazy: Collection[str] = ()) -> Parts:
        """Build root and frozen parts, with their tokenizers; names and shapes only where meta. Raises ConfigFault.

        lazy: frozen parts that something stands in for until they are woken, also beside others without weights (meta).
        """
        return load_parts(self.cfg, self.source, None if meta else self.vocabularies, meta=meta, lazy=lazy)

    @cached_property
    def vocabularies(self) -> tuple[ClipVocabulary, ClipVocabulary]:
        """Read both; a conversion to a single file needs neither. Raises ConfigFault."""
        return vocabularies(self.cfg, self.source)

    def comes_without(self) -> dict[str, str]:
        """Return what the weights lack and a hub has: its field -> its id. Raises ConfigFault."""
        return comes_without(self.cfg, self.source)

    def tokenizer(self, parts: Parts) -> SDXLTokenize:
        """Return the picklable function from captions to token ids. Raises ConfigFault."""
        return SDXLTokenize(self.vocabularies, self.cfg.model.max_token_length, weighted=self.cfg.captions.weighted)

    def encoders(self, parts: Parts) -> dict[str, Encoder]:
        """Describe what may be cached: "latents", and each text encoder that is frozen, by its name."""
        num_chunks = self.tokenizer(parts).num_chunks
        return encoders.encoders(self.cfg, parts, self.source, self.vocabularies, num_chunks)

    def units(self, parts: Parts) -> list[tuple[str, nn.Module]]:
        """List the blocks in the order in which they run."""
        found = [(name, m) for name, m in parts.root.named_modules() if type(m).__name__ == "CLIPEncoderLayer"]
        unet: Any = parts.root.unet
        blocks = [f"down_blocks.{i}" for i in range(len(unet.down_blocks))] + ["mid_block"]
        blocks += [f"up_blocks.{i}" for i in range(len(unet.up_blocks))]
        return found + [(f"unet.{name}", unet.get_submodule(name)) for name in blocks]

    def repeated(self, parts: Parts) -> list[nn.Module]:
        """List the blocks that recur, each compiled once a width; whole UNet blocks would unroll dozens of them."""
        kinds = ("BasicTransformerBlock", "ResnetBlock2D", "CLIPEncoderLayer")
        return [module for module in parts.root.modules() if type(module).__name__ in kinds]

    @torch.no_grad()
    def inputs(self, batch: Batch, parts: Parts) -> Inputs:
        """Encode, noise and weigh one micro batch; trained encoders get their ids, in root."""
        section, t = self.cfg.noise, batch.draws["timestep"].long()
        latents = self.latents(batch, parts)
        noise = objective.noise_of(section, batch, latents)
        table = objective.table_of(section, latents.device)
        target = ddpm.target(table, latents, noise, t, self.cfg.model.prediction_type)
        x_t = ddpm.add_noise(table, latents, objective.perturbed(section, batch, noise), t)
        weight, mask = objective.weight_of(self.cfg, batch, t), objective.mask_of(batch, latents)
        return Inputs(x_t, t, self.text(batch, parts), target, weight, mask)

    def latents(self, batch: Batch, parts: Parts) -> Tensor:
        """Sample the VAE's posterior with the draw "moments", or take its mean, scaled to the UNet's range."""
        return raw_latents(self.cfg, batch, parts) * self.source.architecture.vae["scaling_factor"]

    def text(self, batch: Batch, parts: Parts) -> dict[str, Tensor]:
        """Return conditions: size ids, and of each text encoder its output where frozen, else the ids for it."""
        sizes = [batch.features[name] for name in ("original_size", "crop_top_left", "target_size")]
        return {"time_ids": torch.cat(sizes, dim=1).float(), **encoders.words(self.cfg, batch, parts)}

    def forward(self, root: nn.Module, inputs: Inputs) -> tuple[Tensor, ...]:
        """Predict noise or velocity. Shapes: (B, C, H, W) as x_t."""
        return (root(inputs.x_t, inputs.timestep, inputs.conditions),)

    def loss_sums(self, outputs: tuple[Tensor, ...], inputs: Inputs) -> dict[str, Tensor]:
        """Sum over samples of weight times the sample's own mean loss, in fp32."""
        table = objective.table_of(self.cfg.noise, inputs.timestep.device)
        found = objective.sample_losses(self.cfg.loss, table, outputs[0], inputs)
        return {"loss": (inputs.weight * found).sum()}

    def param_groups(self, root: nn.Module) -> list[Group]:
        """Group parameters by part, and by the UNet's blocks where they have rates of their own."""
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
        dtype_of = partial(storage_dtype, self.cfg)
        metadata, weights = metadata or {}, chain(weights, stand_in.asleep(self.source, parts, dtype_of))
        if layout.startswith("diffusers"):
            parts = replace(parts, tokenizers=by_name(self.vocabularies))
            return export_folder(weights, parts, path, layout, dtype, metadata, self.schedule)
        scale = getattr(self.source, "logit_scale", None)
        return export_file(weights, parts, path, layout, dtype, metadata, scale)

    @property
    def schedule(self) -> SchedulerConfig:
        return SchedulerConfig(self.cfg.model.prediction_type, self.cfg.noise.zero_terminal_snr)

    def stream(self, parts: Parts) -> Iterator[tuple[str, Tensor]]:
        """Give every weight of the configured model straight from its source: parts may be on the meta device."""
        yield from stand_in.stored(self.source, {**dict(parts.root.named_children()), **parts.frozen})

    def pipeline(self, parts: Parts) -> Any:
        """Return a StableDiffusionXLPipeline over the very modules of parts."""
        from difftrain.models.sdxl.pipeline import make_pipeline

        return make_pipeline(parts, self.tokenizer(parts), self.schedule, clip_skip_of(self.cfg))

    def flops_per_sample(self, parts: Parts, bucket: Bucket) -> float:
        """Count forward and backward of one sample (see flops.py)."""
        chunks = chunks_of(self.cfg.model.max_token_length)
        trained = frozenset(learning_rates(self.cfg))
        return flops_per_sample(self.source.architecture, bucket, num_chunks=chunks, trained=trained)

    def metadata(self, title: str, saved_at: float, facts: RunFacts | None = None) -> dict[str, str]:
        """Return modelspec.* and, of a run, ss_* for the header of an export (see metadata.py)."""
        return header(self.cfg, self.source.architecture, title, saved_at, facts)
