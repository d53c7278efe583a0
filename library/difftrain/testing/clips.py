"""A made-up family of clips: latents with frames, a masked text encoder, one that looks at pictures, one that does both.

Nothing of it is any good at drawing. It has what families of pictures with CLIP's texts have not, and so shows what
data, cache and training take for granted. A clip is made of a picture, which moves by a pixel a frame.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from difftrain.contracts import (
    CAPTION,
    PAIR,
    PIXELS,
    Batch,
    Bucket,
    DrawSpec,
    Encoder,
    Feature,
    FeatureSpec,
    Inputs,
    Parts,
)
from difftrain.models.placeholder import fill
from difftrain.models.weights.fingerprints import hashed, of_tensors
from difftrain.testing.family import TinyFamily

CHANNELS, FACTOR, FRAMES = 6, 8, 4  # of a latent: pixels a side, and frames, to one of it
LENGTH, WIDTH, VOCABULARY = 24, 20, 97
STYLE, DEPTH_FACTOR = 7, 16
CELL = 28  # pixels of a side, of what is a row beside the words
FROZEN = ("video_vae", "t5", "vision", "reader")
_STEPS = 1000


class Words:
    """Turn captions into ids and the mask of those that are words; what is too long is cut. Picklable."""

    def __call__(self, captions: list[str]) -> dict[str, Tensor]:
        """Return {"t5_ids", "t5_mask"}, (B, L) int64 each; an end of text always counts."""
        ids = torch.zeros(len(captions), LENGTH, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, caption in enumerate(captions):
            words = [_number(word) for word in caption.split()[: LENGTH - 1]] + [1]
            ids[row, : len(words)], mask[row, : len(words)] = torch.tensor(words), 1
        return {"t5_ids": ids, "t5_mask": mask}


def _number(word: str) -> int:
    return 2 + int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "little") % (VOCABULARY - 2)


class VideoVae(nn.Module):
    """Mean and deviation of a latent clip: the first frame alone, then four by four."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv3d(3, 2 * CHANNELS, 1)

    def forward(self, pixels: Tensor, frames: int) -> Tensor:
        """Encode. Shapes: pixels (B, 3, H, W) uint8 -> (B, 2 C, (F - 1) // 4 + 1, H / 8, W / 8)."""
        picture = pixels.float() / 127.5 - 1
        clip = torch.stack([picture.roll(shift, -1) for shift in range(frames)], 2)
        first, remaining = clip[:, :, :1], clip[:, :, 1 : 1 + (frames - 1) // FRAMES * FRAMES]
        small = nn.functional.avg_pool3d(first, (1, FACTOR, FACTOR))
        if remaining.shape[2]:
            small = torch.cat([small, nn.functional.avg_pool3d(remaining, (FRAMES, FACTOR, FACTOR))], 2)
        mean, deviation = self.mix(small).chunk(2, 1)
        return torch.cat([mean, deviation.abs() + 0.1], 1)


class T5(nn.Module):
    """Attention over words, which sees none behind the mask and says nothing there."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Encode. Shapes: ids, mask (B, L) -> (B, L, D), zeros where the mask is."""
        x = self.words(ids) + self.places.weight
        x = x + self.attention(x, x, x, key_padding_mask=mask == 0, need_weights=False)[0]
        return x * mask.unsqueeze(-1)


class Vision(nn.Module):
    """A vector and a small map of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.style = nn.Linear(3, STYLE)
        self.depth = nn.Conv2d(3, 1, DEPTH_FACTOR, DEPTH_FACTOR)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Look. Shapes: pixels (B, 3, H, W) uint8 -> (B, S), (B, 1, H / 16, W / 16)."""
        x = pixels.float() / 127.5 - 1
        return self.style(x.mean((2, 3))), self.depth(x)


class Seeing(nn.Module):
    """Rows of a picture's cells, then of the words of its caption, each told by all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.cells = nn.Conv2d(3, WIDTH, CELL, CELL)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Read. Shapes: pixels (B, 3, H, W) uint8; ids, mask (B, L) -> (B, cells + L, D), their mask (B, cells + L)."""
        seen = self.cells(pixels.float() / 127.5 - 1).flatten(2).transpose(1, 2)
        rows = torch.cat([seen, self.words(ids)], 1)
        kept = torch.cat([torch.ones(seen.shape[:2], dtype=mask.dtype, device=mask.device), mask], 1)
        mean = (rows * kept.unsqueeze(-1)).sum(1, keepdim=True) / kept.sum(1)[:, None, None]
        return self.mix(rows * mean) * kept.unsqueeze(-1), kept.to(torch.uint8)


class ClipRoot(nn.Module):
    """The denoiser: one convolution over the clip, pushed about by what the encoders say."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv3d(CHANNELS + 1, CHANNELS, 3, padding=1)])
        self.text, self.style = nn.Linear(WIDTH, CHANNELS), nn.Linear(STYLE + 1, CHANNELS)
        self.seen = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x_t: Tensor, timestep: Tensor, conditions: dict[str, Tensor]) -> Tensor:
        """Predict. Shapes: x_t (B, C, F, h, w) -> the same."""
        kept = conditions["t5_mask"].sum(1, keepdim=True)
        text = self.text(conditions["t5_hidden"].float().sum(1) / kept)
        text = text + self.seen(conditions["seen"].float().sum(1) / conditions["seen_mask"].sum(1, keepdim=True))
        time = timestep[:, None].float() / _STEPS
        pushed = text + self.style(torch.cat([conditions["style"], time], 1))
        depth = nn.functional.interpolate(conditions["depth"].float(), x_t.shape[-2:])
        depth = depth[:, :, None].expand(-1, -1, x_t.shape[2], -1, -1)
        return self.blocks[0](torch.cat([x_t, depth], 1)) + pushed[:, :, None, None, None]


_CLASSES: dict[str, Callable[[], nn.Module]] = dict(zip(FROZEN, (VideoVae, T5, Vision, Seeing), strict=True))


class ClipFamily(TinyFamily):
    """Learn to undo noise on clips, told by a text, a vector and a map."""

    name = "clips"

    @property
    def features(self) -> FeatureSpec:
        """Ask for draws over the latent clip."""
        noise = DrawSpec("normal", CHANNELS, FACTOR, frames=FRAMES)
        draws = {"noise": noise, "moments": noise, "timestep": DrawSpec("integer", high=_STEPS)}
        return FeatureSpec({"latents": Feature(CHANNELS, FACTOR, frames=FRAMES)}, draws, size_multiple=DEPTH_FACTOR)

    def load(self, *, meta: bool = False, deferred: Collection[str] = ()) -> Parts:
        """Build everything from the seed; deferred parts when they are loaded."""
        with torch.device("meta"):
            root, *modules = ClipRoot(), *(module_class() for module_class in _CLASSES.values())
        parts = Parts(root, dict(zip(FROZEN, modules, strict=True)))
        fillers = {"root": partial(_fill, root, "root", self.seed)}
        fillers |= {name: partial(_fill, parts.frozen[name], name, self.seed) for name in FROZEN}
        for name, filler in fillers.items():
            if not meta and name not in deferred:
                filler()
        root.requires_grad_(True)
        parts.deferred = {name: fillers[name] for name in deferred if name in FROZEN}
        return parts

    def tokenizer(self, parts: Parts) -> Words:
        """Return what makes ids of words."""
        return Words()

    def encoders(self, parts: Parts) -> dict[str, Encoder]:
        """Describe all four."""
        # of pixels alone
        image_encoders: dict[str, tuple[dict[str, Feature], Callable[[Batch], dict[str, Tensor]]]] = {
            "video_latents": ({"moments": Feature(2 * CHANNELS, FACTOR, frames=FRAMES)}, partial(_moments, parts)),
            "vision": ({"style": Feature(STYLE), "depth": Feature(1, DEPTH_FACTOR)}, partial(_look, parts)),
        }
        built = {
            name: Encoder(PIXELS, features, (part,), "made up", encode, partial(self._fingerprint, part))
            for part, (name, (features, encode)) in zip(("video_vae", "vision"), image_encoders.items(), strict=True)
        }

        # of a picture with its caption
        rows = Feature(WIDTH, length=LENGTH, dtype="bfloat16", maskable=True, per_cell=CELL)
        built["reader"] = Encoder(
            source=PAIR,
            features={"seen": rows, "seen_mask": Feature(LENGTH, dtype="uint8", per_cell=CELL)},
            modules=("reader",),
            settings="made up",
            encode=partial(_see, parts),
            fingerprint=partial(self._fingerprint, "reader"),
            inputs=("t5_ids", "t5_mask"),
            masks={"seen": "seen_mask"},
        )

        # of captions alone
        hidden = Feature(WIDTH, length=LENGTH, dtype="bfloat16", maskable=True)
        built["t5"] = Encoder(
            source=CAPTION,
            features={"t5_hidden": hidden},
            modules=("t5",),
            settings="made up",
            encode=partial(_read, parts),
            fingerprint=partial(self._fingerprint, "t5"),
            inputs=("t5_ids", "t5_mask"),
            masks={"t5_hidden": "t5_mask"},
        )
        return built

    def _fingerprint(self, part: str) -> str:
        with torch.device("meta"):
            made = _CLASSES[part]()
        return hashed(part, of_tensors(_weights(made, part, self.seed)))

    def units(self, parts: Parts) -> list[tuple[str, nn.Module]]:
        """List the one block."""
        return [("blocks.0", parts.root.get_submodule("blocks.0"))]

    def latents(self, batch: Batch, parts: Parts) -> Tensor:
        """Sample the posterior, from the cache or encoded."""
        features = batch.features
        moments = features["moments"] if "moments" in features else _moments(parts, batch)["moments"]
        mean, deviation = moments.chunk(2, 1)
        return mean + deviation * batch.draws["moments"]

    def inputs(self, batch: Batch, parts: Parts) -> Inputs:
        """Mix clip and noise by the timestep; take conditions from the cache, or encode them."""
        x, noise, t = self.latents(batch, parts), batch.draws["noise"], batch.draws["timestep"]
        share = (t / _STEPS)[:, None, None, None, None]
        here = batch.features
        seen = here if "style" in here else _look(parts, batch)
        hidden = here if "t5_hidden" in here else _read(parts, batch)
        both = here if "seen" in here else _see(parts, batch)
        conditions = {
            "style": seen["style"],
            "depth": seen["depth"],
            "t5_hidden": hidden["t5_hidden"],
            "t5_mask": here["t5_mask"],
            "seen": both["seen"],
            "seen_mask": both["seen_mask"],
        }
        return Inputs((1 - share) * x + share * noise, t, conditions, x, torch.ones(len(t), device=x.device))

    def flops_per_sample(self, parts: Parts, bucket: Bucket) -> float:
        """Count the convolution."""
        places = 1
        for side in self.features.features["latents"].shape(bucket)[1:]:
            places *= side
        return 6.0 * places * sum(parameter.numel() for parameter in parts.root.get_submodule("blocks").parameters())


@torch.no_grad()
def _moments(parts: Parts, batch: Batch) -> dict[str, Tensor]:
    return {"moments": parts.frozen["video_vae"](batch.features["pixels"], batch.bucket.frames)}


@torch.no_grad()
def _look(parts: Parts, batch: Batch) -> dict[str, Tensor]:
    style, depth = parts.frozen["vision"](batch.features["pixels"])
    return {"style": style, "depth": depth}


@torch.no_grad()
def _read(parts: Parts, batch: Batch) -> dict[str, Tensor]:
    hidden = parts.frozen["t5"](batch.features["t5_ids"], batch.features["t5_mask"])
    return {"t5_hidden": hidden.bfloat16()}


@torch.no_grad()
def _see(parts: Parts, batch: Batch) -> dict[str, Tensor]:
    here = batch.features
    seen, mask = parts.frozen["reader"](here["pixels"], here["t5_ids"], here["t5_mask"])
    return {"seen": seen.bfloat16(), "seen_mask": mask}


def _weights(module: nn.Module, part: str, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Draw weights by name, alike wherever they are drawn."""
    for name, value in module.state_dict().items():
        number = int.from_bytes(hashlib.blake2b(f"{seed} {part} {name}".encode(), digest_size=7).digest(), "little")
        generator = torch.Generator().manual_seed(number)
        yield name, torch.randn(value.shape, generator=generator) * 0.3


def _fill(module: Any, part: str, seed: int) -> None:
    fill(module, _weights(module, part, seed), torch.float32)
    module.requires_grad_(False).eval()
