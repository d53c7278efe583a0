"""Folders of tars, as img2dataset and WebDataset write them: which files belong together, and where each lies."""

from __future__ import annotations

import errno
import io
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from difftrain.contracts import MediaRef
from difftrain.data.sources import captions as captions_file
from difftrain.data.sources.base import (
    VIDEO_SUFFIXES,
    BadItem,
    ControlImage,
    DataSource,
    FileRef,
    ListedFile,
    SourceInfo,
    SourceItem,
    is_left_out,
    is_media,
    is_picture,
    media_suffixes,
    printable,
    split_suffix,
)
from difftrain.data.sources.captions import BadCaption, caption_of_json, captions_of
from difftrain.data.sources.folder import MAX_CAPTION_BYTES, size_and_time, walk
from difftrain.data.sources.side_files import SideFile, parse_side_file
from difftrain.data.sources.tar_headers import Member, TarDamage, read_members

_OPEN_FILES = 32
_REFERENCE = re.compile(r"(.+)\.(?:control|reference)(?:_(\d))?")  # of a name without its suffix: key.reference_1


class Descriptors:
    """Keep the last files open. A descriptor in use by another thread is never closed under it."""

    def __init__(self, limit: int = _OPEN_FILES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open_files: OrderedDict[Path, io.FileIO] = OrderedDict()

    def get(self, path: Path) -> io.FileIO:
        """Return an unbuffered open file; it closes when nobody holds it any more."""
        with self._lock:
            file = self._open_files.pop(path, None)
            if file is None:
                file = io.FileIO(path)
            self._open_files[path] = file
            while len(self._open_files) > self._limit:
                self._open_files.popitem(last=False)
            return file

    def __reduce__(self) -> tuple[Any, ...]:
        return Descriptors, (self._limit,)


def read_span(file: io.FileIO, offset: int, length: int) -> bytes:
    """Read exactly `length` bytes at `offset`.

    Raises: OSError where the file ends before.
    """
    parts = []
    while length:
        part = os.pread(file.fileno(), length, offset)
        if not part:
            raise OSError(
                errno.EIO, f"the file ends {length} bytes too early; it has changed since it was indexed", file.name
            )
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class ByteSpan(io.RawIOBase):
    """A part of a file as a seekable file of its own, read only where it is asked for."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        needed = min(len(buffer), max(0, self._length - self._at))
        part = os.pread(self._file.fileno(), needed, self._offset + self._at) if needed else b""
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def open_span(file: io.FileIO, offset: int, length: int) -> io.BufferedReader:
    """Open a part of a file for reading in small steps."""
    return io.BufferedReader(ByteSpan(file, offset, length), buffer_size=16384)


@dataclass
class _Shard:
    """The members of one tar that matter, by name without suffix. references: of a picture's name, with their numbers."""

    pictures: list[Member] = field(default_factory=list)
    references: dict[str, list[tuple[int, Member]]] = field(default_factory=dict)
    texts: dict[str, Member] = field(default_factory=dict)
    sidecars: dict[str, Member] = field(default_factory=dict)
    bad: list[BadItem] = field(default_factory=list)


class TarSource(DataSource):
    """Every *.tar below the root, or one of them."""

    def __init__(self, info: SourceInfo) -> None:
        super().__init__(info)
        self._files = Descriptors()

    def listing(self) -> Iterator[ListedFile]:
        yield from list_shards(self, ".tar")

    def items(self, file: FileRef) -> Iterator[SourceItem | BadItem]:
        shard = _read_shard(read_members(self.root / file.path), self.info, paired=self._paired)
        stems = {split_suffix(picture.name)[0] for picture in shard.pictures}
        opened = self._files.get(self.root / file.path)
        for picture in shard.pictures:
            yield _item(file.path, opened, picture, shard, self.info)
        yield from shard.bad
        for stem, references in shard.references.items():
            for _, member in references if stem not in stems else ():
                yield BadItem(member.name, "no image: the tar has no image that this reference belongs to")
        for stem, sidecar in shard.sidecars.items():
            if stem not in stems:
                yield BadItem(sidecar.name, "no image: the tar has no image with this name")
        for stem, text in shard.texts.items():  # any other .txt is none of ours
            if stem not in stems and stem not in shard.sidecars and stem.rpartition("/")[2].isdigit():
                yield BadItem(text.name, "no image: the tar has no image with this name")

    def count(self, path: str, enough: int) -> int:
        count = 0
        for member in read_members(self.root / path):
            count += (
                isinstance(member, Member) and is_media(member.name, self.info) and not self._is_reference(member.name)
            )
            if count >= enough:
                break
        return count

    @property
    def _paired(self) -> bool:
        """Tell whether reference images lie in the tars."""
        return bool(self.info.num_control and not self.info.control)

    def _is_reference(self, name: str) -> bool:
        return self._paired and _REFERENCE.fullmatch(split_suffix(name)[0]) is not None

    def read(self, media: MediaRef) -> bytes:
        return read_span(self._files.get(self.root / media.path), media.offset, media.length)

    def open_media(self, media: MediaRef) -> BinaryIO:
        return open_span(self._files.get(self.root / media.path), media.offset, media.length)


def list_shards(source: DataSource, suffix: str) -> Iterator[ListedFile]:
    """List the files of a suffix below a source's root as media, everything else as other."""
    if source.info.only:
        stat = (source.root / source.info.only).stat()
        yield ListedFile("media", source.info.only, stat.st_size, stat.st_mtime_ns)
        return
    for path, entry in walk(source.root, deep=not source.info.flat):
        if is_left_out(source.info, path, by_file=True):
            continue
        if path.lower().endswith(suffix):
            yield ListedFile("media", path, *size_and_time(entry))
        else:
            yield ListedFile("other", path)


def _read_shard(members: Iterator[Member | TarDamage], info: SourceInfo, *, paired: bool) -> _Shard:
    suffixes = media_suffixes(info)
    shard = _Shard()
    seen: dict[str, Member] = {}
    for member in members:
        if isinstance(member, TarDamage):
            shard.bad.append(BadItem(None, member.reason))
            continue
        name = _clean(member.name)
        suffix = split_suffix(name)[1]
        hidden = name.rpartition("/")[2].startswith("._")  # macOS leaves such a twin of every file
        if hidden or (suffix not in suffixes and suffix not in (".txt", ".json")):
            continue
        reason = _refuse(member, suffix)
        if reason:
            shard.bad.append(BadItem(printable(name), reason))
            continue
        if name in seen:
            shard.bad.append(BadItem(name, "same name twice: a later member of the tar has it and is used"))
        seen[name] = member._replace(name=name)
    for name, member in seen.items():
        match = _REFERENCE.fullmatch(split_suffix(name)[0]) if paired and is_picture(name) else None
        if match is not None:
            shard.references.setdefault(match[1], []).append((int(match[2] or 0), member))
        elif is_media(name, info):
            shard.pictures.append(member)
        else:
            (shard.texts if name.lower().endswith(".txt") else shard.sidecars)[split_suffix(name)[0]] = member
    return shard


def _refuse(member: Member, suffix: str) -> str:
    """Return why a member that could matter is not used, "" where it is."""
    if printable(member.name) != member.name:
        return "name not UTF-8: the member's name cannot be recorded"
    if member.name.startswith("/") or ".." in member.name.split("/") or "\\" in member.name:
        return "outside its folder: the member's name leads out of the tar"
    if member.kind != "a file" or member.fault:
        return member.fault
    if not member.size and suffix not in (".txt", ".json"):
        return "empty: 0 bytes"
    return ""


def _item(file: str, opened: io.FileIO, picture: Member, shard: _Shard, info: SourceInfo) -> SourceItem | BadItem:
    stem, side = split_suffix(picture.name)[0], SideFile()
    try:
        if info.frame_buckets and stem in shard.sidecars and split_suffix(picture.name)[1] in VIDEO_SUFFIXES:
            member = shard.sidecars[stem]
            side = parse_side_file(_text(opened, member), member.name, multi_line=info.multi_line)
        if info.captions_file:
            captions = captions_file.captions_in(info, picture.name)
        else:
            sidecar = shard.sidecars.get(stem)
            captions = side.captions or _captions(opened, shard.texts.get(stem), sidecar, info.multi_line)
    except BadCaption as error:
        return BadItem(picture.name, str(error))
    if info.captions_file:
        lacking = "" if captions else captions_file.lacking(info, picture.name)
    elif stem in shard.texts:
        lacking = f"empty caption: {shard.texts[stem].name} is empty"
    elif stem in shard.sidecars:
        lacking = f"empty caption: {shard.sidecars[stem].name} has no caption"
    else:
        lacking = "no caption: no .txt or .json with its name in the tar"
    members = [member for _, member in sorted(shard.references.get(stem, ()), key=lambda pair: (pair[0], pair[1].name))]
    return SourceItem(
        picture.name,
        picture.offset,
        picture.size,
        picture.size,
        captions,
        _opener(opened, picture),
        lacking,
        control=tuple(ControlImage(file, m.offset, m.size, m.size, _opener(opened, m), m.name) for m in members),
        spans=side.spans,
    )


def _opener(opened: io.FileIO, member: Member) -> Callable[[], BinaryIO]:
    return lambda: open_span(opened, member.offset, member.size)


def _captions(opened: io.FileIO, text: Member | None, sidecar: Member | None, multi_line: bool) -> tuple[str, ...]:
    """Return the text's caption; without a text, the sidecar's."""
    chosen = text or sidecar
    if chosen is None:
        return ()
    data = _text(opened, chosen)
    read = captions_of if text is not None else caption_of_json
    return read(data, chosen.name, multi_line=multi_line)


def _text(opened: io.FileIO, member: Member) -> bytes:
    """Read a text or sidecar. Raises BadCaption where it is too long."""
    if member.size > MAX_CAPTION_BYTES:
        raise BadCaption(
            f"caption too long: {member.name} has {member.size} bytes, at most {MAX_CAPTION_BYTES} are read"
        )
    return read_span(opened, member.offset, member.size)


def _clean(name: str) -> str:
    while name.startswith("./"):
        name = name[2:]
    return name
