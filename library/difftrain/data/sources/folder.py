"""Image folders: pictures at any depth, each with a caption file of the same stem."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from difftrain.contracts import DataFault, MediaRef
from difftrain.data.sources import captions as captions_file
from difftrain.data.sources.base import (
    VIDEO_SUFFIXES,
    BadItem,
    DataSource,
    FileRef,
    FramesRef,
    ListedFile,
    SourceItem,
    image_file,
    is_left_out,
    is_media,
    is_picture,
    media_suffixes,
    read_image,
    split_suffix,
)
from difftrain.data.sources.captions import BadCaption, all_lines, decode_text, first_line, one_line
from difftrain.data.sources.side_files import SUFFIX, SideFile, parse_side_file
from difftrain.io.files import open_regular, read_regular, refuse_irregular

MAX_CAPTION_BYTES = 1 << 20
FRAMES = ".frames"  # how the name of a folder ends whose pictures are the frames of a clip
_WITH_SIDE_FILES = {*VIDEO_SUFFIXES, FRAMES, ".gif", ".webp"}  # what may be a video


class FolderSource(DataSource):
    """A folder, or one `<repeats>_<class>` sub-folder of it (then info.prefix and info.words are set)."""

    sharded = False

    def listing(self) -> Iterator[ListedFile]:
        suffixes, frames = media_suffixes(self.info), FRAMES if self.info.frame_buckets else None
        for path, entry in walk(self.root, self.info.prefix, deep=not self.info.flat, hidden=True, leaf=frames):
            if path.rpartition("/")[2].startswith("."):
                if is_media(path, self.info):
                    yield ListedFile("hidden", path)
                continue
            if is_left_out(self.info, path, by_file=False):
                continue
            if frames and path.lower().endswith(frames) and entry.is_dir():
                yield ListedFile("media", path, *size_and_time_of_all(self.root / path))
                continue
            suffix = split_suffix(path)[1]
            role = "media" if suffix in suffixes else "caption" if suffix in self.info.suffixes else "other"
            if role == "other":
                yield ListedFile(role, path)
            else:
                yield ListedFile(role, path, *size_and_time(entry))

    def items(self, file: FileRef) -> Iterator[SourceItem | BadItem]:
        try:
            side = self._side_file(file.path)
            captions = side.captions or self._captions(file)
        except BadCaption as error:
            yield BadItem(None, str(error))
            return

        path, lacking = self.root / file.path, "" if captions else self._lacking(file)
        if file.path.lower().endswith(FRAMES) and path.is_dir():
            folder = FramesRef(path, side.fps or Fraction(self.info.fps))
            yield SourceItem(None, 0, 0, 0, captions, io.BytesIO, lacking, spans=side.spans, frames=folder)
            return
        size, opener = image_file(path)
        yield SourceItem(None, 0, 0, size, captions, opener, lacking, spans=side.spans)

    def _side_file(self, path: str) -> SideFile:
        """Read the JSON of a video; of an image its caption counts alone. Raises BadCaption, OSError."""
        stem, suffix = split_suffix(path)
        side = next(
            (stem + ending for ending in (SUFFIX, SUFFIX.upper()) if (self.root / (stem + ending)).is_file()), ""
        )
        if not side or not self.info.frame_buckets or suffix not in _WITH_SIDE_FILES:
            return SideFile()
        return parse_side_file(read_regular(self.root / side, MAX_CAPTION_BYTES), side, multi_line=self.info.multi_line)

    def _lacking(self, file: FileRef) -> str:
        if self.info.captions_file:
            return captions_file.lacking(self.info, file.path)
        if file.caption and not (self.info.frame_buckets and file.caption.lower().endswith(SUFFIX)):
            return f"empty caption: {file.caption} is empty"
        return f"no caption: no {' or '.join(self.info.suffixes)} file with its name next to it"

    def _captions(self, file: FileRef) -> tuple[str, ...]:
        if self.info.captions_file:
            return captions_file.captions_in(self.info, file.path)
        if file.caption is None:
            return (self.info.words,) if self.info.words else ()
        path = self.root / file.caption
        if self.info.frame_buckets and file.caption.lower().endswith(
            SUFFIX
        ):  # there is no text, and a video's was read
            if split_suffix(file.path)[1] in _WITH_SIDE_FILES:
                return (self.info.words,) if self.info.words else ()
            return parse_side_file(read_regular(path, MAX_CAPTION_BYTES), file.caption).captions
        with open_regular(path) as opened:
            size = os.fstat(opened.fileno()).st_size
            data = opened.read(min(size, MAX_CAPTION_BYTES))
        if size > MAX_CAPTION_BYTES:
            raise BadCaption(f"caption too long: {file.caption} has more than {MAX_CAPTION_BYTES} bytes")
        whole_text = decode_text(data, file.caption)
        shaped = all_lines if self.info.multi_line else one_line if self.info.whole_text else first_line
        text = shaped(whole_text)
        return (text,) if text else ()

    def read(self, media: MediaRef) -> bytes:
        return read_image(self.root / media.path)

    def open_media(self, media: MediaRef) -> Path | FramesRef:
        path = self.root / media.path
        if media.path.lower().endswith(FRAMES) and path.is_dir():
            try:
                rate = self._side_file(media.path).fps
            except BadCaption as error:
                raise OSError(errno.EINVAL, str(error), str(path)) from None
            return FramesRef(path, rate or Fraction(self.info.fps))
        refuse_irregular(path)
        return path


def walk(
    root: Path, below: str = "", *, deep: bool = True, hidden: bool = False, leaf: str | None = None
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Iterate over (relative path, entry) of the files of a folder, at any depth or its own only, in no order.

    leaf: a folder whose name ends so counts as a file.

    Linked folders are followed, each real folder once; what is no file (a pipe, a device, a link that leads nowhere) is
    an item that cannot be read. Hidden folders are left out, and hidden files unless they are asked for.
    Raises: OSError where a folder cannot be read.
    """
    waiting, seen = [below.rstrip("/")], set()
    while waiting:
        folder = waiting.pop()
        stat = (root / folder).stat()
        if (stat.st_dev, stat.st_ino) in seen:
            continue
        seen.add((stat.st_dev, stat.st_ino))
        with os.scandir(root / folder) as entries:
            for entry in entries:
                is_hidden = entry.name.startswith(".")
                if (is_hidden and not hidden) or entry.name == "__MACOSX":
                    continue
                path = f"{folder}/{entry.name}" if folder else entry.name
                if is_folder(entry) and not (leaf and path.lower().endswith(leaf) and not is_hidden):
                    if deep and not is_hidden:
                        waiting.append(path)
                else:
                    yield path, entry


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Tell a folder, or a link to one; a link that leads in a circle is none."""
    return not leads_nowhere(entry) and entry.is_dir()


def leads_nowhere(entry: os.DirEntry[str]) -> bool:
    """Tell a link whose end is not there, or that leads in a circle."""
    return entry.is_symlink() and not os.path.exists(entry.path)  # noqa: PTH110 - False in a circle too


def listing_digest(folders: Sequence[str]) -> str:
    """Hash names, sizes and times of all pictures below some folders: it changes as they do. Raises DataFault."""
    state = hashlib.blake2b(digest_size=8)
    for folder in folders:
        try:
            listed = sorted((path, *size_and_time(entry)) for path, entry in walk(Path(folder)) if is_picture(path))
        except OSError as error:
            raise DataFault(f"{error.filename or folder}: cannot be listed ({error.strerror})") from None
        state.update(repr(listed).encode("utf-8", "surrogatepass") + b"\n")
    return state.hexdigest()


def size_and_time_of_all(folder: Path) -> tuple[int, int]:
    """Return the bytes of a folder of frames, and a number that changes with its files and with the JSON beside it."""
    stats = sorted((name, *size_and_time(entry)) for name, entry in walk(folder, deep=False))
    for side in (folder.with_suffix(SUFFIX), folder.with_suffix(SUFFIX.upper())):
        if side.is_file():
            stats.append((side.name, side.stat().st_size, side.stat().st_mtime_ns))
    digest = hashlib.blake2b(repr(stats).encode("utf-8", "surrogatepass"), digest_size=7).digest()
    return sum(size for _, size, _ in stats), int.from_bytes(digest, "little")


def size_and_time(entry: os.DirEntry[str]) -> tuple[int, int]:
    """Return (size, mtime_ns) of a listed file, zeros for one that has gone or is a broken link."""
    try:
        stat = entry.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns
