"""What a source is: it lists its files, takes the items out of each, and reads pictures in place."""

from __future__ import annotations

import io
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, NamedTuple

from difftrain.config.datasets import clips
from difftrain.config.hub_ids import name_of
from difftrain.contracts import MediaRef, Record
from difftrain.io.files import open_regular, read_regular, refuse_irregular

MAX_IMAGE_BYTES = 1 << 30  # more than the most pixels that are decoded have, stored plainly with 16 bits a channel
VIDEO_SUFFIXES = frozenset(clips.VIDEO_SUFFIXES)
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"})


class FramesRef(NamedTuple):
    """A folder of pictures that are the frames of a clip, so many a second."""

    folder: Path
    fps: Fraction


class ClipSettings(NamedTuple):
    """Say which clips a video becomes: of how many frames, how many a second (a fraction as text), and where they begin."""

    frame_buckets: tuple[int, ...]
    fps: str
    mode: str


class Span(NamedTuple):
    """A part of a video that is used. end_ms: None: to its end. captions: its own; none: those of the video."""

    start_ms: int = 0
    end_ms: int | None = None
    captions: tuple[str, ...] = ()


@dataclass(frozen=True)
class SourceInfo:
    """Name a source and say how to open it again. A configured folder of kohya's layout becomes several."""

    ordinal: int
    name: str  # what stands in the keys: the configured folder's ordinal, so that a copy elsewhere draws the same
    kind: str  # a name of the registry
    root: str  # absolute; paths are relative to it
    repeats: int | float = 1
    prefix: str = ""  # only what lies in this sub-folder of root: "10_cat/"
    words: str = ""  # caption where there is no caption file
    only: str = ""  # a single tar, parquet or metadata file of root; what a class is made with
    suffixes: tuple[str, ...] = ()  # of caption files, in the order they are tried
    multi_line: bool = False  # keep the lines of a caption apart, of which one is drawn
    masks: str = ""  # folder where every picture has a mask of its name
    image_column: str = ""
    caption_column: str = ""
    dataset: int = 0  # of several [[datasets]], and of its subsets
    subset: int = 0
    is_reg: bool = False
    flat: bool = False  # nothing of its sub-folders
    separator: str = ""  # between caption and tags of a metadata file
    share: float = 1.0  # of its records that are used
    allow_empty: bool = False  # a picture without a caption has an empty one
    whole_text: bool = False  # of a caption file all lines count, as one
    captions_file: str = ""  # JSON of captions by file name, in place of caption files; relative to root
    default_mask: str = ""  # of pictures without a mask of their own
    masks_optional: bool = False  # a picture without a mask counts as a whole
    split: str = ""  # of train, validation and test, the one that is read; "": everything
    num_control: int = 0  # reference images that each picture has
    control: tuple[str, ...] = ()  # folders where they lie by the pictures' names; none: with them in the shard
    control_columns: tuple[str, ...] = ()  # of parquet files
    frame_buckets: tuple[int, ...] = ()  # frames of clips, ascending; none: videos are not read
    fps: str = ""  # of clips, a fraction as text
    clip_mode: str = ""  # which clips of a video

    @property
    def clips(self) -> ClipSettings | None:
        """Return which clips are made of videos; None: videos are not read."""
        return ClipSettings(self.frame_buckets, self.fps, self.clip_mode) if self.frame_buckets else None

    @property
    def label(self) -> str:
        """Return what messages call the root."""
        return name_of(self.root) or self.root

    @property
    def reading(self) -> SourceInfo:
        """Return what decides the items of a source: they are the same of two with one reading, save for their keys."""
        return replace(self, ordinal=0, name="", repeats=1, dataset=0, subset=0, is_reg=False, share=1.0)


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file that a listing came upon. role: media (holds items), caption, hidden (an image with a dot before its name), other."""

    role: str
    path: str  # relative to the root, forward slashes
    size: int = 0
    mtime_ns: int = 0


@dataclass(frozen=True, slots=True)
class FileRef:
    """One media file to take items out of."""

    path: str
    caption: str | None = None  # path of its caption file, where the source has such


@dataclass(frozen=True, slots=True)
class ControlImage:
    """One reference image before anyone has looked at it. path, offset, length: as MediaRef has them; `size` bytes. name: in messages."""

    path: str
    offset: int
    length: int
    size: int
    open: Callable[[], BinaryIO]
    name: str


@dataclass(frozen=True, slots=True)
class SourceItem:
    """One picture before anyone has looked at it. `open` gives a seekable file of its bytes, `length` of them."""

    member: str | None  # name inside the file, for keys and messages
    offset: int
    length: int  # as MediaRef has it
    size: int  # bytes of the picture
    captions: tuple[str, ...]
    open: Callable[[], BinaryIO]
    lacking: str = "no caption"  # the reason to give where captions is empty
    path: str | None = None  # where the bytes lie in another file than the one that was listed
    size_wh: tuple[int, int] | None = None  # where it is known without reading them
    key: str | None = None  # what stands for it in its key, where that is not file and member
    control: tuple[ControlImage, ...] = ()  # its reference images, where they lie with it in the shard
    spans: tuple[Span, ...] = ()  # of a video, those that are used; none: all of it
    frames: FramesRef | None = None  # in place of a file


@dataclass(frozen=True, slots=True)
class BadItem:
    """An item that cannot be used, known without looking at its picture."""

    member: str | None
    reason: str


class DataSource(ABC):
    """One kind of data. Made from its SourceInfo in every process that needs it."""

    sharded = True  # a listed file holds many items and counts as a shard

    def __init__(self, info: SourceInfo) -> None:
        self.info = info
        self.root = Path(info.root)

    @abstractmethod
    def listing(self) -> Iterator[ListedFile]:
        """Iterate over the files below the root, in any order, without holding them all."""

    @abstractmethod
    def items(self, file: FileRef) -> Iterator[SourceItem | BadItem]:
        """Take the items out of one file, always in the same order.

        Raises: OSError, DataFault.
        """

    def count(self, path: str, enough: int) -> int:
        """Count the items of a file from its headers, stopping at `enough`.

        Raises: OSError.
        """
        return 1

    def check(self, path: str) -> str:
        """Look at one file before any is read; return a sentence worth printing, or "".

        Raises: DataFault where this source cannot be read as it is configured.
        """
        return ""

    @abstractmethod
    def read(self, media: MediaRef) -> bytes:
        """Read the bytes of one picture.

        Raises: OSError where there are fewer than there were.
        """

    def open_media(self, media: MediaRef) -> BinaryIO | Path | FramesRef:
        """Return a picture or video to be read in place, as a seekable file, a path or a folder of frames: a video is never read whole.

        Raises: OSError.
        """
        return io.BytesIO(self.read(media))


def split_suffix(path: str) -> tuple[str, str]:
    """Return (path without its last suffix, the suffix in lower case with its dot; "" where there is none)."""
    dot = path.rfind(".")
    return (path[:dot], path[dot:].lower()) if dot > path.rfind("/") + 1 else (path, "")


# what folders and shards are named for -> the split that they belong to. Source: Hugging Face's datasets, data_files.py
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_WORDS = re.compile(r"[-._ 0-9]+")


def split_of(path: str, *, by_file: bool) -> str:
    """Return the split that a path is named for, by the nearest folder that tells, else by_file by its own name, or ""."""
    *folders, file = path.lower().split("/")
    for name in (*reversed(folders), *([file] if by_file else [])):
        for word in _WORDS.split(name):
            if word in _SPLITS:
                return _SPLITS[word]
    return ""


def is_left_out(info: SourceInfo, path: str, *, by_file: bool) -> bool:
    """Tell a file of another split than the one that a source reads."""
    return bool(info.split) and split_of(path, by_file=by_file) not in ("", info.split)


def printable(name: str) -> str:
    """Return a name as it can be written down: bytes that are not UTF-8 become escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def is_picture(path: str) -> bool:
    """Tell by the suffix."""
    return split_suffix(path)[1] in IMAGE_SUFFIXES


def is_media(path: str, info: SourceInfo) -> bool:
    """Tell what a source's samples are made of by the suffix: pictures, and videos where it reads them."""
    return split_suffix(path)[1] in media_suffixes(info)


def media_suffixes(info: SourceInfo) -> frozenset[str]:
    """Return the suffixes of what a source's samples are made of."""
    return IMAGE_SUFFIXES | VIDEO_SUFFIXES if info.frame_buckets else IMAGE_SUFFIXES


def picture_name(record: Record) -> str:
    """Return what a picture is called: the member of a shard, else the path in its source."""
    if not record.media.length:
        return record.media.path
    name = record.name.partition(f"{record.media.path}!")[2]
    return name.removesuffix(record.clip.part) if record.clip else name


def can_be_path(name: str) -> bool:
    """Tell a text that a file may be called: without a zero byte and without half of a surrogate pair."""
    return "\0" not in name and printable(name) == name


def image_file(path: Path) -> tuple[int, Callable[[], BinaryIO]]:
    """Return the bytes of an image's file and what opens it; a file of no bytes is not opened: a kernel's may never end.

    Raises: OSError where there is none, or what is there is no regular file.
    """
    size = refuse_irregular(path)
    return size, (lambda: open_regular(path)) if size else io.BytesIO  # type: ignore[return-value]


def read_image(path: Path) -> bytes:
    """Read an image's file. Raises: OSError where it is gone, too large, or no regular file."""
    return read_regular(path, MAX_IMAGE_BYTES)


def key_path(file: str, member: str | None) -> str:
    """Return what stands for an item in its key: its relative path, inside a shard "shard/member"."""
    return file if member is None else f"{file}/{member}"
