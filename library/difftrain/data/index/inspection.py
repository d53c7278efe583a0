"""Looking at every item once, in worker processes: is the picture whole, how large is it, has it a caption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from difftrain.contracts import Clip
from difftrain.data.index.clips import clip_json, clips_of
from difftrain.data.index.worker_pool import Heartbeat, PoolJob
from difftrain.data.media.clips import FramesFolder, decode_clip, is_clip, probe_clip
from difftrain.data.media.control import NO_REFERENCE, ControlFolders, look_at, refuse_other_count
from difftrain.data.media.masks import NO_MASK, Masks
from difftrain.data.media.media import Decoded, Unusable, check_size, decode, probe
from difftrain.data.sources import SourceInfo, open_source
from difftrain.data.sources.base import (
    MAX_IMAGE_BYTES,
    VIDEO_SUFFIXES,
    BadItem,
    ControlImage,
    DataSource,
    FileRef,
    SourceItem,
    Span,
    key_path,
    split_suffix,
)
from difftrain.io.files import open_regular

if TYPE_CHECKING:
    from difftrain.data.media.clips import MediaFile

QUICK, FULL, FRAMES = 1, 2, 3  # the header and the end of the file | every pixel of images | and every frame of clips
# kinds that are looked at again next time
PASSING = ("cannot be read", "too slow", "crashed", "out of memory", NO_MASK, NO_REFERENCE)
CAPTIONLESS = ("no caption", "empty caption")  # kinds that an index which takes empty captions has not
_HASHED = 1 << 20
_HEAD = 1 << 16  # bytes that tell a video, or a picture that moves
_STRIDE = 64  # items that one part of a divided shard takes at a time


def content_of(data: bytes) -> bytes:
    """Hash the bytes of a picture file, as the index does when it reads all of them."""
    return hashlib.blake2b(data, digest_size=16).digest()


def content_of_file(file: MediaFile) -> tuple[bytes, int]:
    """Hash the bytes of a file as `content_of` does, without holding them; also return how many there are.

    Of a folder of frames: how many are shown a second, and the bytes of all. Raises OSError, Unusable.
    """
    state, size = hashlib.blake2b(digest_size=16), 0
    files: Sequence[BinaryIO | Path] = file.paths if isinstance(file, FramesFolder) else (file,)
    if isinstance(file, FramesFolder):
        state.update(f"{file.fps};".encode())
    for one in files:
        with open_regular(one) if isinstance(one, Path) else one as opened:
            while chunk := opened.read(_HASHED):
                state.update(chunk)
                size += len(chunk)
    return state.digest(), size


@dataclass(frozen=True)
class FileBatch:
    """The payload of a job: some files of one source. Of parts > 1, only every parts-th run of items is looked at."""

    source: SourceInfo
    files: tuple[tuple[int, FileRef], ...]  # row in the index, file
    level: int
    part: int = 0
    parts: int = 1


class Accepted(NamedTuple):
    """A row of the index, without its number. content: blake2b-128 of the picture's bytes where all were read.

    control: [path, offset, length] of each reference image, as JSON; None where there is none. clip: as index/clips.py writes it.
    """

    file: int
    path: str | None
    member: str | None
    offset: int
    length: int
    width: int
    height: int
    captions: str
    content: bytes | None
    key: bytes
    control: str | None = None
    clip: str | None = None


class Refused(NamedTuple):
    """An item that is not trained on."""

    file: int | None
    path: str
    reason: str


def record_key(source: str, path: str) -> bytes:
    """Return blake2b-128 of a source's name and a relative path: the same wherever the data is mounted."""
    name = source.encode()
    return hashlib.blake2b(
        b"%d:%s:%s" % (len(name), name, path.encode()), digest_size=16, person=b"difftrain.record"
    ).digest()


def inspect(job: PoolJob, beat: Heartbeat) -> Iterator[tuple[int, Accepted | Refused]]:
    """Look at the items of a job's files, from job.start on (a handler of pool.run_jobs)."""
    work: FileBatch = job.payload
    source = open_source(work.source)
    position = -1
    for number, file in work.files:
        for item in _items(source, file):
            position += 1
            if position < job.start or (position // _STRIDE) % work.parts != work.part:
                continue
            name = str(Path(work.source.root) / file.path) + (f"!{item.member}" if item.member is not None else "")
            try:
                if position in job.bad:
                    yield position, Refused(number, name, job.bad[position])
                else:
                    for row in _accept(work, number, file, item, position, beat, name):
                        yield position, row
            except Unusable as reason:
                yield position, Refused(number, name, str(reason))
            except OSError as error:
                yield position, Refused(number, name, f"cannot be read: {error.strerror or error}")


def _items(source: DataSource, file: FileRef) -> Iterator[SourceItem | BadItem]:
    try:
        yield from source.items(file)
    except OSError as error:
        yield BadItem(None, f"cannot be read: {error.strerror or error}")


def _accept(
    work: FileBatch,
    number: int,
    file: FileRef,
    item: SourceItem | BadItem,
    position: int,
    beat: Heartbeat,
    called: str,
) -> Sequence[Accepted | Refused]:
    """Look at an item and return its rows: one of an image, one for each clip of a video, or each part that is none.

    called: the item, in messages. Raises: Unusable, OSError.
    """
    if isinstance(item, BadItem):
        kind, _, detail = item.reason.partition(": ")
        raise Unusable(kind, detail)

    # a picture without a caption is trained on only where that is allowed
    source, captions = work.source, item.captions
    moves = source.clips is not None and _moves(item)
    if not captions and source.allow_empty:
        captions = ("",)
    if not captions and not (moves and item.spans):
        kind, _, detail = item.lacking.partition(": ")
        raise Unusable(kind, detail)

    # the mask and the references where such are due
    masks = Masks(source.masks, source.default_mask, source.masks_optional)
    name = item.path or item.member or file.path  # as base.picture_name
    masks.find(name)
    if moves:
        return _accept_clips(work, number, file, item, captions, position, beat, called)
    if split_suffix(name)[1] in VIDEO_SUFFIXES:
        raise Unusable("no video", "the file is called a video, and its content is none")
    if item.size > MAX_IMAGE_BYTES:
        raise Unusable("too large", f"{item.size:,} bytes, at most {MAX_IMAGE_BYTES:,} are read")
    references = _references(source, item, name)

    # the picture, looked at as closely as asked for
    full = work.level >= FULL
    (width, height), content = _full(item, position, beat) if full else _quick(item, position, beat)
    check_size(width, height)
    for reference in references:
        with beat.item(position):
            look_at(reference, (width, height), full=full)

    # what the index keeps of it
    row = Accepted(
        number,
        item.path,
        item.member,
        item.offset,
        item.length,
        width,
        height,
        json.dumps(captions, ensure_ascii=False),
        content,
        record_key(work.source.name, item.key or key_path(file.path, item.member)),
        json.dumps([[one.path, one.offset, one.length] for one in references]) if references else None,
    )
    return [row]


def _moves(item: SourceItem) -> bool:
    """Tell a video, or a picture that moves, by its first bytes."""
    if item.frames is not None:
        return True
    with item.open() as file:
        head = file.read(_HEAD)
        if head[:4] == b"GIF8" and is_clip(head):  # one picture may have a delay, too
            file.seek(0)
            return probe_clip(file).frames > 1
        return is_clip(head)


@contextmanager
def _opened(item: SourceItem) -> Iterator[BinaryIO | FramesFolder]:
    """Open an item, which may be a folder of frames."""
    if item.frames is not None:
        yield FramesFolder(*item.frames)
        return
    with item.open() as file:
        yield file


def _accept_clips(
    work: FileBatch,
    number: int,
    file: FileRef,
    item: SourceItem,
    captions: tuple[str, ...],
    position: int,
    beat: Heartbeat,
    called: str,
) -> list[Accepted | Refused]:
    """Return the rows of a video's clips, and of parts that are none. Its packets are read, and frames where every one is
    asked for. Raises: Unusable, OSError.
    """
    source, settings = work.source, work.source.clips
    assert settings is not None
    if source.num_control:
        raise Unusable("a video", "it has no reference images")
    with _opened(item) as opened:
        with beat.item(position):
            header = probe_clip(opened)
            check_size(*header.size_wh)

        # each part by itself: one that cannot be used takes nothing from the others
        made: dict[str, tuple[Clip, tuple[str, ...]]] = {}
        refused: list[Refused] = []
        for span in item.spans or (Span(),):
            try:
                if not (own := span.captions or captions):
                    raise Unusable("no caption", "neither the part nor its video has one")
                for clip in clips_of(header.duration_ms, span, settings, parted=bool(item.spans)):
                    if clip.part in made:
                        raise Unusable("same part twice", "another part of the video begins and ends there")
                    if work.level >= FRAMES:
                        with beat.item(position):
                            decode_clip(opened, first=clip.first, frames=clip.frames, fps=Fraction(clip.fps),
                                        start_ms=clip.start_ms, cut=_forget)  # fmt: skip
                    made[clip.part] = clip, own
            except Unusable as reason:
                if not item.spans:
                    raise
                refused.append(Refused(number, f"{called}#{span.start_ms}-{span.end_ms or ''}", str(reason)))

    rows = []
    for clip, own in made.values():
        member = f"{item.member or ''}{clip.part}" or None
        key = record_key(source.name, f"{item.key}{clip.part}" if item.key else key_path(file.path, member))
        words, (width, height) = json.dumps(own, ensure_ascii=False), header.size_wh
        located = (number, item.path, member, item.offset, item.length, width, height)
        rows.append(Accepted(*located, words, None, key, clip=clip_json(clip)))
    return [*rows, *refused]


def _forget(frame: Decoded) -> np.ndarray:
    """Keep of a frame that could be decoded a single pixel."""
    return frame.pixels[:1, :1]


def _references(source: SourceInfo, item: SourceItem, name: str) -> Sequence[ControlImage]:
    """Find the references of an item: in folders of their own, else beside it in its shard. Raises: Unusable, OSError."""
    if not source.num_control:
        return ()
    if source.control:
        return ControlFolders(source.control, source.num_control).references(name)
    refuse_other_count(item.control, source.num_control, name)
    return item.control


def _full(item: SourceItem, position: int, beat: Heartbeat) -> tuple[tuple[int, int], bytes]:
    with beat.item(position):
        with item.open() as file:
            data = file.read(item.size or MAX_IMAGE_BYTES)  # a class does not say how many bytes there are
        if len(data) < item.size:
            raise Unusable("truncated", f"{len(data)} of {item.size} bytes are there")
        height, width = decode(data).shape[:2]
    return (width, height), content_of(data)


def _quick(item: SourceItem, position: int, beat: Heartbeat) -> tuple[tuple[int, int], None]:
    if item.size_wh is not None:
        return item.size_wh, None
    with beat.item(position), item.open() as file:
        header = probe(file)
        if header.is_complete:
            return header.size_wh, None
        file.seek(0)
        height, width = decode(file.read(item.size or MAX_IMAGE_BYTES)).shape[:2]
    return (width, height), None
