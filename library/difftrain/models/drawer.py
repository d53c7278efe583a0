"""Pictures and clips from weights, by a family's own conditions and pass: training, samples and measures draw alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from difftrain.config.schema.families import drawn_fps, drawn_frames
from difftrain.contracts import CONTROL, Batch, Bucket, Inputs, Parts, image_feature
from difftrain.models import shown_frames
from difftrain.models.vae.latents import decode, posterior

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.models.base import BaseFamily


LARGEST = 512  # px, where neither prompt nor training says a size (kohya)


class FamilyDrawer:
    """Draw with the modules of parts (see contracts.Drawer)."""

    def __init__(self, family: BaseFamily, parts: Parts, predict: Callable[[Inputs], Tensor] | None = None) -> None:
        self.family, self.parts, self._predict = family, parts, predict
        self.scheduler: Any = family.scheduler()
        self.unit, self.walks, self.mu = family.drawn_unit, family.shift.walks, family.shift.mu
        self.references = family.num_control or family.row.shown_frames
        self.fps = drawn_fps(family.cfg)

    @property
    def modules(self) -> list[nn.Module]:
        """List what takes part: the root, and frozen parts that drawing needs."""
        frozen = [part for name, part in self.parts.frozen.items() if name not in self.parts.training_only]
        return [self.parts.root, *frozen]

    @property
    def native_size(self) -> tuple[int, int]:
        """Return (height, width) of the training, where prompts follow it, else the model's own as its sizes say it."""
        data = self.family.cfg.data
        size = data.resolution or next((dataset.resolution for dataset in data.datasets if dataset.resolution), None)
        if size and self.family.draws_trained_size:
            return size[1], size[0]
        side = self.family.source.complete(self.family.denoiser).get("sample_size")
        return (min(LARGEST, side * self.family.vae.factor) if isinstance(side, int) else LARGEST,) * 2

    def frames_of(self, asked: int | None) -> int:
        """Return how many frames are drawn: 1 of pictures."""
        return drawn_frames(self.family.cfg, asked)

    def latent_shape(self, size_hw: tuple[int, int], frames: int = 1) -> tuple[int, ...]:
        """Return the shape of the noise of one picture or clip."""
        return self.family.features.draws["noise"].shape(Bucket(*size_hw, frames))

    def reference_size(self, size_hw: tuple[int, int], shape_hw: tuple[int, int]) -> tuple[int, int]:
        """Return the size that a reference of a shape is brought to, where a picture of size_hw is drawn."""
        area = self.family.control_area
        return size_hw if area is None else area.size_hw(shape_hw)

    def tokens(self, size_hw: tuple[int, int], frames: int = 1) -> int:
        """Count the tokens of a picture or clip, for shifts that follow them."""
        token, every = self.family.token, self.family.vae.frames
        layers = (frames - 1) // every + 1 if every else 1
        return layers * (size_hw[0] // token) * (size_hw[1] // token)

    @torch.no_grad()
    def conditions(
        self,
        prompts: list[str],
        size_hw: tuple[int, int],
        guidance: float | None = None,
        references: Sequence[Tensor] = (),
        frames: int = 1,
    ) -> dict[str, Tensor]:
        """Encode prompts as training encodes captions, by encoders that are trained too, and references as it encodes them.

        guidance: embedded, where the model is told one. references: images that it is shown, (B, 3, H, W) uint8 each, or
        those that stand for frames of a clip of so many frames.
        """
        return self._encoded(self.family.tokenizer(self.parts)(prompts), size_hw, guidance, references, frames)

    def _encoded(
        self,
        tokens: dict[str, Tensor],
        size_hw: tuple[int, int],
        guidance: float | None,
        references: Sequence[Tensor] = (),
        frames: int = 1,
    ) -> dict[str, Tensor]:
        """Encode what a tokenizer made, and references."""
        device, count = next(self.parts.root.parameters()).device, len(next(iter(tokens.values())))
        features = tokens | self.family.size_features(size_hw, count)
        rows = torch.arange(count)
        shown = {image_feature(CONTROL, number): pixels.to(device) for number, pixels in enumerate(references)}
        if self.family.row.shown_frames and shown:
            shown = {"pixels": shown_frames.clip_of(list(shown.values()), frames)}
        features = {name: value.to(device) for name, value in features.items()} | shown
        batch = Batch(Bucket(*size_hw, frames), rows, rows, features, {})
        root: Any = self.parts.root
        made = self.family.guided(root.text(self.family.text(batch, self.parts)), guidance)
        if shown:
            made = made | self.family.references(batch, self.parts) | self.family.frames(batch, self.parts)
        return made

    def unconditional(
        self,
        negatives: list[str],
        conditions: dict[str, Tensor],
        size_hw: tuple[int, int],
        guidance: float | None = None,
        references: Sequence[Tensor] = (),
    ) -> dict[str, Tensor]:
        """Encode negative prompts, one for each of the conditions; no text is what the training took for it.

        references: as of the conditions, for encoders that see them too; their latents are those of the conditions.
        """
        without = None if any(negatives) else self.family.without_text(conditions)
        with torch.no_grad():
            made = (
                self._encoded(
                    self.family.negatives(self.parts)(negatives),
                    size_hw,
                    guidance,
                    references if any(self.family.sights) else (),
                )
                if without is None
                else without
            )
        names = conditions.keys() - made.keys() if self.references else set()
        return made | self.family.without_references({name: conditions[name] for name in names})

    def predict(self, x: Tensor, t: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Call the denoiser. Shapes: x (B, C, [F,] h, w), t () or (B,)."""
        times = (t.float() if t.dtype == torch.float64 else t).to(x.device)  # there are devices without fp64
        times = times.expand(len(x)) if t.ndim == 0 else times
        inputs = Inputs(x, times, conditions, target=x, weight=torch.ones(len(x), device=x.device))
        if self._predict is not None:
            return self._predict(inputs)
        return self.family.forward(self.parts.root, inputs)[0].float()

    def with_guidance(self, without: Tensor, with_text: Tensor, scale: float) -> Tensor:
        """Make one prediction of those without and with text, as the family's pipeline does."""
        return self.family.with_guidance(without, with_text, scale)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents, in 0..1; one frame of a clip is a picture."""
        pixels = decode(self.parts.frozen["vae"], self.family.vae, latents)
        return (pixels / 2 + 0.5).clamp(0, 1)

    @torch.no_grad()
    def encode(self, pixels: Tensor, generator: torch.Generator) -> Tensor:
        """Encode pictures, drawing from the posterior on the host. Shapes: (B, 3, H, W) uint8 -> (B, C, h, w) fp32."""
        vae: Any = self.parts.frozen["vae"]
        parameter = next(vae.parameters())
        # in the dtype that it is held in: it is fp32 wherever half would overflow (storage_dtype)
        mean, std = posterior(vae, pixels.to(parameter.device), fp32=parameter.dtype == torch.float32, batch_size=None)
        drawn = torch.randn(mean.shape, generator=generator).to(mean.device)
        return self.family.vae.scaled(mean + std * drawn)
