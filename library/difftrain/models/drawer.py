"""Pictures and clips from weights, by a family's own conditions and pass: training, samples and measures draw alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import Batch, Bucket, Inputs, Parts
from difftrain.models.vae.adapters import decode

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.models.base import BaseFamily


LARGEST = 512  # px, where neither prompt nor training says a size (kohya)


class FamilyDrawer:
    """Draw with the modules of parts (see contracts.Drawer)."""

    def __init__(self, family: BaseFamily, parts: Parts) -> None:
        self.family, self.parts = family, parts
        self.scheduler: Any = family.scheduler()
        self.unit, self.walks = family.drawn_unit, family.shift.walks

    @property
    def modules(self) -> list[nn.Module]:
        """List what takes part: the root, and frozen parts that drawing needs."""
        frozen = [part for name, part in self.parts.frozen.items() if name not in self.parts.training_only]
        return [self.parts.root, *frozen]

    @property
    def native_size(self) -> tuple[int, int]:
        """Return (height, width) of the training, where prompts follow it, else the model's own as its sizes say it."""
        data = self.family.cfg.data
        size = data.resolution or next((each.resolution for each in data.datasets if each.resolution), None)
        if size and self.family.draws_trained_size:
            return size[1], size[0]
        side = self.family.source.complete(self.family.denoiser).get("sample_size")
        return (min(LARGEST, side * self.family.vae.factor) if isinstance(side, int) else LARGEST,) * 2

    def latent_shape(self, size_hw: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of one picture's noise."""
        return self.family.features.draws["noise"].shape(Bucket(*size_hw))

    def tokens(self, size_hw: tuple[int, int]) -> int:
        """Count the tokens of a picture, for shifts that follow them."""
        token = self.family.token
        return (size_hw[0] // token) * (size_hw[1] // token)

    @torch.no_grad()
    def conditions(
        self, prompts: list[str], size_hw: tuple[int, int], guidance: float | None = None
    ) -> dict[str, Tensor]:
        """Encode prompts as training encodes captions, by encoders that are trained too. guidance: embedded, where the model is told one."""
        device = next(self.parts.root.parameters()).device
        features = self.family.tokenizer(self.parts)(prompts) | self.family.size_features(size_hw, len(prompts))
        rows = torch.arange(len(prompts))
        batch = Batch(Bucket(*size_hw), rows, rows, {name: value.to(device) for name, value in features.items()}, {})
        root: Any = self.parts.root
        return self.family.guided(root.text(self.family.text(batch, self.parts)), guidance)

    def unconditional(
        self,
        negatives: list[str],
        conditions: dict[str, Tensor],
        size_hw: tuple[int, int],
        guidance: float | None = None,
    ) -> dict[str, Tensor]:
        """Encode negative prompts, one for each of the conditions; no text is what the training took for it."""
        without = None if any(negatives) else self.family.without_text(conditions)
        return self.conditions(negatives, size_hw, guidance) if without is None else without

    def predict(self, x: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Call the denoiser. Shapes: x (B, C, [F,] h, w), t () or (B,)."""
        times = (t.float() if t.dtype == torch.float64 else t).to(x.device)  # there are devices without fp64
        times = times.expand(len(x)) if t.ndim == 0 else times
        inputs = Inputs(x, times, conditions, target=x, weight=torch.ones(len(x), device=x.device))
        return self.family.forward(self.parts.root, inputs)[0].float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents, in 0..1; one frame of a clip is a picture."""
        pixels = decode(self.parts.frozen["vae"], self.family.vae, latents)
        return (pixels / 2 + 0.5).clamp(0, 1)
