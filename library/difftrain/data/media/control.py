"""ControlImage images: what an editing model is shown of a sample, beside the image that it learns to make.

They lie in other folders, by the images' names, or with their image in a tar or a parquet row. Each is cut, resized and
mirrored as its image is, so that a pixel of one is where that of the other is; or is as large as a family's pipeline shows
it, cut in the same places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from difftrain.config.spellings.spelling import option
from difftrain.contracts import Record, ReferenceArea
from difftrain.data.media.crop import CropWindow
from difftrain.data.media.decoders import HOST
from difftrain.data.media.masks import picture_at, stems_of
from difftrain.data.media.media import Unusable, check_size, decode, decode_for, fit, probe
from difftrain.data.sources.base import MAX_IMAGE_BYTES, ControlImage, image_file, split_suffix

NO_REFERENCE = "no reference"  # kinds of reasons
TOO_MANY = "too many references"
OTHER_SHAPE = "other shape"
_SAME_SHAPE = 0.01  # how far the aspect ratio of a reference may be off its image's
_NUMBERS = range(10)  # stem_0 to stem_9


@dataclass(frozen=True)
class ControlFolders:
    """Where the references of a source lie, by the names of its images. number: how many an image has.

    One folder for each reference; or one for all of them: stem, stem_0, stem_1, ... of what is there, in this order.
    """

    folders: tuple[str, ...]
    number: int

    def references(self, name: str) -> list[ControlImage]:
        """Find the references of an item. Raises: Unusable where there are fewer or more of them; OSError."""
        folders = [Path(folder).expanduser() for folder in self.folders]
        if len(folders) > 1:
            paths = [_one(folder, name) for folder in folders]
        else:
            paths = [_one(folders[0], name)] if self.number == 1 else _series(folders[0], name)
        refuse_other_count(paths, self.number, f"{folders[0]}: {split_suffix(name)[0]}")
        return [ControlImage(str(path), 0, 0, *image_file(path), str(path)) for path in paths]


def refuse_other_count(references: Sequence[object], number: int, what: str) -> None:
    """Refuse an image with fewer or more references than are wanted. Raises Unusable."""
    if len(references) == number:
        return
    kind = NO_REFERENCE if len(references) < number else TOO_MANY
    raise Unusable(kind, f"{what} has {len(references)}, {option('data.num_control')} is {number}")


def _one(folder: Path, name: str) -> Path:
    """Return the single reference of an item in a folder: of its name, or numbered without a second one."""
    for stem in stems_of(name):
        if (path := picture_at(folder, stem)) is not None:
            return path
    paths = _numbered(folder, name)
    if len(paths) > 1:
        listed = ", ".join(path.name for path in paths)
        raise Unusable(TOO_MANY, f"{folder} holds {listed}, and one is wanted")
    if not paths:
        raise Unusable(NO_REFERENCE, f"{folder} holds no image named {split_suffix(name)[0]}")
    return paths[0]


def _series(folder: Path, name: str) -> list[Path]:
    """Return all references of an item in a folder: of its name, then the numbered ones."""
    named = next((path for stem in stems_of(name) if (path := picture_at(folder, stem)) is not None), None)
    return [*([named] if named else []), *_numbered(folder, name)]


def _numbered(folder: Path, name: str) -> list[Path]:
    for stem in stems_of(name):
        paths = [path for number in _NUMBERS if (path := picture_at(folder, f"{stem}_{number}")) is not None]
        if paths:
            return paths
    return []


# --- looking at them once, and making them ready


def look_at(reference: ControlImage, size_wh: tuple[int, int], *, full: bool) -> None:
    """See whether a reference can be used. size_wh: of its image, whose shape it must have. Raises: Unusable, OSError."""
    with naming(reference.name):
        if reference.size > MAX_IMAGE_BYTES:
            raise Unusable("too large", f"{reference.size:,} bytes, at most {MAX_IMAGE_BYTES:,} are read")
        with reference.open() as file:
            header = None if full else probe(file)
            if header is not None and header.is_complete:
                width, height = header.size_wh
            else:
                file.seek(0)
                height, width = decode(file.read(reference.size or MAX_IMAGE_BYTES)).shape[:2]
        check_size(width, height)
        _check_shape((width, height), size_wh)


def fit_reference(
    record: Record,
    number: int,
    data: bytes,
    window: CropWindow,
    interpolation: str | None,
    decoder: str = HOST,
    area: ReferenceArea | None = None,
) -> np.ndarray:
    """Decode a reference, and resize, cut and mirror it as its image is. Shape: (3, H, W) uint8. Raises Unusable.

    area: it is shown larger or smaller than its image, the same part of it.
    """
    resized_wh, crop = scaled_cut(window, area)
    with naming(record.control[number].path):
        rgb, size_wh = decode_for(data, resized_wh, interpolation, decoder=decoder)
        _check_shape(size_wh, (record.size_hw[1], record.size_hw[0]))
        return fit(rgb, resized_wh, crop, window.flip, interpolation)


def scaled_cut(window: CropWindow, area: ReferenceArea | None) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """Return what a reference is resized to, (width, height), and where it is cut: (left, top, width, height) in that."""
    if area is None:
        return window.fit.resized_wh, window.crop
    bucket = window.fit.bucket
    height, width = area.size_hw((bucket.height, bucket.width))
    across, down = width / bucket.width, height / bucket.height
    resized_wh = round(window.fit.resized_wh[0] * across), round(window.fit.resized_wh[1] * down)
    left = min(round(window.left * across), resized_wh[0] - width)
    top = min(round(window.top * down), resized_wh[1] - height)
    return resized_wh, (left, top, width, height)


def _check_shape(own_wh: tuple[int, int], size_wh: tuple[int, int]) -> None:
    (own_w, own_h), (width, height) = own_wh, size_wh
    if abs(own_w * height / (own_h * width) - 1) > _SAME_SHAPE:
        raise Unusable(OTHER_SHAPE, f"{own_w} x {own_h} px, its image {width} x {height}")


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Say in an error that it is of a reference, and of which."""
    try:
        yield
    except Unusable as error:
        detail = str(error).removeprefix(f"{error.kind}: ")
        raise Unusable(error.kind, f"the reference {name}: {detail}") from None
