"""Reference images as a language model sees them (Qwen2.5-VL): their size, their patches, and their rows among tokens.

Each stands in the template as one mark, so that a tokenizer need not know how large it is. Before the encoder reads, that
mark is widened to a row for each cell of patches. Images are resized on the host, by Pillow, so that every device sees
the same. Sources: transformers, models/qwen2_vl/image_processing_pil_qwen2_vl.py; diffusers, pipelines/qwenimage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from difftrain.contracts import Bucket, ReferenceArea
from difftrain.io.files import read_json_object

if TYPE_CHECKING:
    from torch import Tensor

UNIT = 32  # pixels that both sides are multiples of when an image is brought to its area
_LONGEST = 200  # times as long as wide: more is not read
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's
PROCESSOR = "preprocessor_config.json"
IMAGE = "<|image_pad|>"  # the token that stands for one


def processor_of(folder: Path) -> Mapping[str, Any]:
    """Return what a folder says of images: a file of its own, or since transformers 5 a section of the processor's; none: nothing."""
    both = read_json_object(folder / "processor_config.json") or {}
    stored = read_json_object(folder / PROCESSOR) or both.get("image_processor")
    return stored if isinstance(stored, dict) else {}


@dataclass(frozen=True)
class Sight:
    """How images get into an encoder of captions. Picklable; as Feature.seen it says how many rows they add.

    area: pixels that an image is brought to, in its own shape. count: images beside a caption. mark: id of the token that
    stands for one. patch: pixels of a side of a patch; merge: patches of a side of a cell, which is a row; frames: how
    often an image is repeated in a patch. fewest, most: pixels that the encoder takes. own: which size images have that is
    not their bucket's.
    """

    area: int
    count: int
    mark: int
    patch: int = 14
    merge: int = 2
    frames: int = 2
    fewest: int = 56 * 56
    most: int = 28 * 28 * 16384
    mean: tuple[float, ...] = _MEAN
    std: tuple[float, ...] = _STD
    own: ReferenceArea | None = None

    @classmethod
    def of(cls, area: int, count: int, sizes: Mapping[str, Any], stored: Mapping[str, Any]) -> Sight:
        """Read it off an encoder's sizes, complete ones, and off what lies beside it for images (PROCESSOR).

        Raises ValueError where the two do not fit.
        """
        vision, size = sizes["vision_config"], stored.get("size") or {}
        names = {
            "patch_size": "patch_size",
            "merge_size": "spatial_merge_size",
            "temporal_patch_size": "temporal_patch_size",
        }
        for theirs, ours in names.items():
            if stored.get(theirs, vision[ours]) != vision[ours]:
                raise ValueError(f"{theirs} is {stored[theirs]}, the encoder's {ours} {vision[ours]}")
        return cls(
            area,
            count,
            sizes["image_token_id"],
            vision["patch_size"],
            vision["spatial_merge_size"],
            vision["temporal_patch_size"],
            stored.get("min_pixels") or size.get("shortest_edge") or cls.fewest,
            stored.get("max_pixels") or size.get("longest_edge") or cls.most,
            tuple(stored.get("image_mean") or _MEAN),
            tuple(stored.get("image_std") or _STD),
        )

    def stored(self) -> dict[str, Any]:
        """Return what a folder says of it, for transformers."""
        return {
            "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor",
            "min_pixels": self.fewest, "max_pixels": self.most,
            "size": {"shortest_edge": self.fewest, "longest_edge": self.most},
            "patch_size": self.patch, "merge_size": self.merge, "temporal_patch_size": self.frames,
            "image_mean": list(self.mean), "image_std": list(self.std), "rescale_factor": 1 / 255, "resample": 3,
            "do_convert_rgb": True, "do_resize": True, "do_rescale": True, "do_normalize": True,
        }  # fmt: skip

    def describe(self) -> str:
        """Return what decides, beside an image's pixels, what of it is seen."""
        what = f"{self.count} of {self.area} px in {self.fewest} to {self.most} px, patches {self.patch} x {self.merge}"
        return f"sees {what} x {self.frames}, normalised by {self.mean}, {self.std}"

    # ------------------------------------------------------------------ sizes

    def sizes(self, size_hw: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the size that an image is brought to, and that which is cut into patches. Shapes: (height, width)."""
        height, width = size_hw
        if max(size_hw) > _LONGEST * min(size_hw):
            raise ValueError(f"an image of {width} x {height} px is more than {_LONGEST} times as long as wide")
        across = math.sqrt(self.area * (width / height))
        own = round(across / (width / height) / UNIT) * UNIT, round(across / UNIT) * UNIT
        own = max(UNIT, own[0]), max(UNIT, own[1])
        cell = self.patch * self.merge
        sides = [round(side / cell) * cell for side in own]
        pixels = own[0] * own[1]
        if sides[0] * sides[1] > self.most:
            scale = math.sqrt(pixels / self.most)
            sides = [max(cell, math.floor(side / scale / cell) * cell) for side in own]
        elif sides[0] * sides[1] < self.fewest:
            scale = math.sqrt(self.fewest / pixels)
            sides = [math.ceil(side * scale / cell) * cell for side in own]
        return own, (sides[0], sides[1])

    def rows(self, size_hw: tuple[int, int]) -> int:
        """Return the rows of one image."""
        height, width = self.sizes(size_hw)[1]
        return (height // (self.patch * self.merge)) * (width // (self.patch * self.merge))

    def __call__(self, bucket: Bucket) -> int:
        """Return the rows that images of a bucket add to tokens, whose marks count already."""
        shown = bucket if self.own is None else self.own.bucket(bucket)
        return self.count * (self.rows((shown.height, shown.width)) - 1)

    # ------------------------------------------------------------------ pixels

    def patches(self, pixels: Tensor) -> Tensor:
        """Resize, normalise and cut images. Shapes: (B, 3, H, W) uint8 -> (B, h w, 3 frames patch^2) fp32 on the same device.

        Patches of a cell are neighbours, h and w patches along the sides.
        """
        own, (height, width) = self.sizes((pixels.shape[-2], pixels.shape[-1]))
        made = [self._cut(image, own, (height, width)) for image in pixels.cpu().numpy()]
        return torch.from_numpy(np.stack(made)).to(pixels.device)

    def _cut(self, image: np.ndarray, own: tuple[int, int], size_hw: tuple[int, int]) -> np.ndarray:
        from PIL import Image
        from PIL.Image import Resampling

        resized = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
        resized = resized.resize(own[::-1], Resampling.LANCZOS).resize(size_hw[::-1], Resampling.BICUBIC)
        # every value that a channel can have, normalised: looked up, it is computed 256 times in place of a million
        table: Any = (np.arange(256).astype(np.float64) * (1 / 255)).astype(np.float32)[:, None]
        table = (table - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        values: Any = np.stack([table[:, channel][np.asarray(resized)[..., channel]] for channel in range(3)], axis=-1)

        # (h, m, p, w, m, p, C) -> (h, w, m, m, C, frames, p, p)
        (height, width), patch, merge = size_hw, self.patch, self.merge
        cells = values.reshape(height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, 3)
        cells = cells.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
        cells = np.broadcast_to(cells, (*cells.shape[:5], self.frames, patch, patch))
        return cells.reshape(height // patch * (width // patch), -1)

    # ------------------------------------------------------------------ what the encoder is given

    def widened(self, tokens: Tensor, rows: int, *, marks: Tensor) -> Tensor:
        """Repeat each mark of an image for its rows. marks: places of all, the same in every text. Shapes: (B, L) -> (B, L')."""
        repeats = torch.ones(tokens.shape[1], dtype=torch.int64)
        repeats[marks] = rows
        return tokens.repeat_interleave(repeats.to(tokens.device), dim=1)

    def inputs(
        self, ids: Tensor, mask: Tensor, images: Sequence[Tensor], kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return ids and mask with a row for each cell of images, and what else the encoder takes.

        kept: of which samples the images are seen; of others patches are zeros. Shapes: ids, mask (B, L); images (B, 3, H, W)
        uint8 each; kept (B,).
        """
        marks = (ids[0] == self.mark).nonzero().flatten().cpu()
        assert len(marks) == len(images) == self.count, f"{len(marks)} marks in a text with {len(images)} images"
        size_hw = (images[0].shape[-2], images[0].shape[-1])
        height, width = self.sizes(size_hw)[1]
        rows = self.rows(size_hw)
        made = [self.patches(one) for one in images]
        patches = made[0] if len(made) == 1 else torch.cat(made, dim=1)
        if kept is not None:
            patches = patches * kept.to(patches).view(-1, 1, 1)
        ids, mask = (self.widened(tokens, rows, marks=marks) for tokens in (ids, mask))
        grid = torch.tensor([[1, height // self.patch, width // self.patch]], device=ids.device)
        more = {
            "pixel_values": patches.flatten(0, 1),
            "image_grid_thw": grid.expand(len(ids) * self.count, 3),
            "mm_token_type_ids": (ids == self.mark).int(),  # else positions of rows and columns are not made
        }
        return ids, mask, more
