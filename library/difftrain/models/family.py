"""Any family that is described by facts, as a Family: what a family adds is its facts and its pass.

1. `load` builds the parts: the denoiser in the root, the rest frozen (loading.py).
2. `encoders` describes what may be cached of a picture and its caption, and by which settings.
3. A step is BaseFamily's: `inputs`, `forward` through `enter`, `block` and `leave`, `loss_sums`.
4. `export`, `stream`, `drawer` and `flops_per_sample` follow from the same facts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from difftrain.contracts import (
    CAPTION,
    Bucket,
    Encoder,
    Feature,
    Group,
    Parts,
    RunFacts,
)
from difftrain.models import loading, passes, placeholder, vision
from difftrain.models.base import BaseFamily
from difftrain.models.drawer import FamilyDrawer
from difftrain.models.placeholder import DTYPES
from difftrain.models.text.encode import encode, features_of, inputs_of
from difftrain.models.text.tokenize import mask_name
from difftrain.models.vae.latents import latents_encoder

if TYPE_CHECKING:
    from torch import Tensor, nn


class ModelFamily(BaseFamily):
    """What a trainer asks of a family: each answer is a module of this room over BaseFamily."""

    def load(self, *, meta: bool = False, deferred: Collection[str] = ()) -> Parts:
        """Build root and frozen parts; names and shapes only where meta. Raises ConfigFault.

        deferred: frozen parts that a placeholder counts for until they are loaded, also beside others without weights; with
        "root" the denoiser's weights are read by Parts.load_root, once the encoders have filled the caches.
        """
        return loading.load(self, meta=meta, deferred=deferred)

    def encoders(self, parts: Parts) -> dict[str, Encoder]:
        """Describe what may be cached: "latents", every frozen text encoder, and an image encoder to align with."""
        raw = Feature(self.vae.raw_channels, self.vae.raw_factor, frames=self.vae.frames)
        fingerprint = partial(self.fingerprint, "vae")
        made = {"latents": latents_encoder(self.cfg, parts, raw, self.storage_dtype("vae"), fingerprint)}
        for place, text in enumerate(self.texts, start=1):
            if text.part not in self.in_root:
                made[text.part] = self._text_encoder(parts, place)
        if self.cfg.repa.encoder is not None:
            folder = vision.VisionFolder.at(self.cfg.repa.encoder)
            made[vision.PART] = vision.encoder(folder, parts.frozen, self.token, self.cfg.training.mixed_precision)
        return made

    def _text_encoder(self, parts: Parts, place: int) -> Encoder:
        """Describe one frozen text encoder; no module is looked at for it."""
        text = self.texts[place - 1]
        dtype = str(DTYPES[self.cfg.training.mixed_precision]).removeprefix("torch.")
        settings = self.text_settings(place)
        sizes = self.source.complete(text.part)
        features = features_of(self.texts, place, self.lengths[place - 1], sizes, dtype)
        return Encoder(
            source=CAPTION,
            features=features,
            modules=(text.part,),
            settings=settings,
            encode=lambda batch: encode(self.texts, place, parts.frozen[text.part], batch.features),
            fingerprint=partial(self.fingerprint, text.part, settings),
            inputs=inputs_of(self.texts, place),
            masks={name: mask_name(self.texts, place) for name, each in features.items() if each.maskable},
        )

    def units(self, parts: Parts) -> list[tuple[str, nn.Module]]:
        """List the blocks in the order in which they run."""
        return [
            (f"{self.denoiser}.{name}", block)
            for name, block in passes.blocks_of(self, parts.root.get_submodule(self.denoiser))
        ]

    def repeated(self, parts: Parts) -> list[nn.Module]:
        """List the blocks that recur, for regional compile."""
        return [block for _, block in self.units(parts)]

    def param_groups(self, root: nn.Module) -> list[Group]:
        """Group what is trained, part by part, under the names that root gives it; what is no part's goes with the first."""
        groups = {part: Group(part, [], rate) for part, rate in self.rates.items()}
        for name, each in root.named_parameters():
            if each.requires_grad:
                part = name.partition(".")[0]
                groups.get(part, groups.get(self.denoiser, next(iter(groups.values())))).named_params.append(
                    (name, each)
                )
        return list(groups.values())

    def flops_per_sample(self, parts: Parts, bucket: Bucket) -> float:
        """Count forward and backward of one sample (see flops.py)."""
        from difftrain.models.flops import flops_per_sample

        return flops_per_sample(self, bucket)

    def stream(self, parts: Parts) -> Iterator[tuple[str, Tensor]]:
        """Give every weight of the configured model straight from its source: parts may be without any."""
        frozen = {part: module for part, module in parts.frozen.items() if part in self.parts}
        yield from placeholder.source_weights(
            self.source, {part: parts.root.get_submodule(part) for part in self.in_root} | frozen
        )

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
        """Write weights for inference; what the stream lacks comes from parts, or from its source where it is deferred."""
        from difftrain.models.export import export

        return export(self, weights, parts, layout, path, dtype=dtype, metadata=metadata or {})

    def drawer(self, parts: Parts) -> FamilyDrawer:
        """Return what draws with the very modules of parts, as training sees captions and pictures (see drawer.py)."""
        return FamilyDrawer(self, parts)

    def metadata(self, title: str, saved_at: float, facts: RunFacts | None = None) -> dict[str, str]:
        """Return modelspec.* and, of a run, ss_* for the header of an export."""
        from difftrain.models.metadata import described, kohya_keys

        made = described(self.cfg, title, saved_at, self.header_facts())
        if facts is None:
            return made
        return made | kohya_keys(self.cfg, facts, saved_at, self.kohya_name or self.name, self.objective_facts())
