"""What the data room hands on: records, draws, batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Bucket(NamedTuple):
    """Name the one shape that all samples of a step share."""

    height: int
    width: int
    frames: int = 1

    def __str__(self) -> str:
        return f"{self.width}x{self.height}" + (f"x{self.frames}" if self.frames > 1 else "")


@dataclass(frozen=True)
class ReferenceArea:
    """Say to which size a family's pipeline brings a reference image, by its shape. Sizes are (height, width) in pixels.

    area: of it, sides in multiples of `multiple`; listed: the one of these whose shape is nearest counts instead.
    """

    area: int
    multiple: int = 32
    listed: tuple[tuple[int, int], ...] = ()

    def size_hw(self, shape_hw: tuple[int, int]) -> tuple[int, int]:
        """Return the size of a reference that is shaped like this."""
        ratio = shape_hw[1] / shape_hw[0]
        if self.listed:
            return min(self.listed, key=lambda size: abs(ratio - size[1] / size[0]))
        width = (self.area * ratio) ** 0.5
        height, width = (max(1, round(side / self.multiple)) * self.multiple for side in (width / ratio, width))
        return height, width

    def bucket(self, bucket: Bucket) -> Bucket:
        """Return what references lie over whose images are of a bucket."""
        return Bucket(*self.size_hw((bucket.height, bucket.width)))


@dataclass(frozen=True)
class ClipFacts:
    """Say which clips a family takes: `fps` frames a second, `every` * n + 1 of them."""

    fps: float
    every: int

    def frames(self, at_most: int) -> int:
        """Return the most frames that a clip of at most so many may have."""
        return (max(at_most, 1) - 1) // self.every * self.every + 1


class Clip(NamedTuple):
    """A window of a video: `frames` frames at `fps` a second, from the one numbered `first` on.

    They are counted from start_ms of the video on; available: how many there are at this rate to the end of that part.
    fps: a fraction as text, such as "24" or "30000/1001". part: what tells several windows of one video apart, "" of one.
    """

    start_ms: int
    first: int
    frames: int
    available: int
    fps: str
    part: str = ""


@dataclass(frozen=True, slots=True)
class MediaRef:
    """Locate media bytes: a file of a source, or a part of one.

    path is relative to the source's root, with forward slashes; a reference image's may be absolute. length 0 means the
    whole file; for a parquet shard, offset is the row and length is -1, or -2, -3, ... for its columns of references.
    """

    source: int  # ordinal in the index
    path: str
    offset: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """One sample of an index.

    id is its row in THIS index and means nothing elsewhere; key = blake2b-128(source name, relative path or
    member) is the same on every machine.
    """

    id: int
    key: bytes
    media: MediaRef
    captions: tuple[str, ...]
    size_hw: tuple[int, int]  # after EXIF rotation
    content: bytes | None = None  # blake2b-128 of the media bytes, to find duplicates; never seeds a draw
    name: str = ""  # what messages call it: "folder/000.tar!0001.jpg"
    control: tuple[MediaRef, ...] = ()  # its reference images, in order
    clip: Clip | None = None  # None: an image

    @property
    def frames(self) -> int:
        """Return how many frames it has as a sample, 1 of an image."""
        return self.clip.frames if self.clip is not None else 1


class Draw(NamedTuple):
    """One use of a record. occurrence counts every use for ever, repeats and passes included."""

    record_id: int
    key: bytes
    occurrence: int


@dataclass(frozen=True, slots=True)
class Reject:
    """Name an item that is not trained on, and why."""

    path: str
    reason: str


@dataclass
class Batch:
    """One micro batch of one shape, on the host.

    Shapes: record_id, occurrence (B,) int64; features and draws (B, ...).
    counts: this rank's host-known share of each normaliser, here the number of samples under "samples".
    step: the update that it is for, counted from 0; None: none, as in evaluation.
    idle: it is another rank's, and counts nothing: forward and backward take all ranks, and this one had nothing to do.
    """

    bucket: Bucket
    record_id: Tensor
    occurrence: Tensor
    features: dict[str, Tensor]
    draws: dict[str, Tensor]
    loss_mask: Tensor | None = None
    counts: dict[str, float] = field(default_factory=dict)
    keys: tuple[bytes, ...] = ()
    rejects: tuple[Reject, ...] = ()  # items that failed only when they were decoded, and were replaced
    step: int | None = None
    idle: bool = False

    @property
    def uses(self) -> tuple[list[int], list[int]]:
        """Say which uses of which records it is made of."""
        return self.record_id.tolist(), self.occurrence.tolist()

    def on_host(self) -> Batch:
        """Return it with its tensors on the CPU."""
        mask = None if self.loss_mask is None else self.loss_mask.cpu()
        features, draws = (
            {name: value.cpu() for name, value in table.items()} for table in (self.features, self.draws)
        )
        return replace(self, features=features, draws=draws, loss_mask=mask)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor under one flat name, for pinning and moving."""
        flat = {f"features.{k}": v for k, v in self.features.items()}
        flat |= {f"draws.{k}": v for k, v in self.draws.items()}
        if self.loss_mask is not None:
            flat["loss_mask"] = self.loss_mask
        return flat
