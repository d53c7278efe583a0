"""Image folders: pictures at any depth, each with a caption file of the same stem."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from difftrain.contracts import DataFault, MediaRef
from difftrain.data.sources import captions as captions_file
from difftrain.data.sources.base import (
    IMAGE_SUFFIXES,
    BadItem,
    DataSource,
    FileRef,
    ListedFile,
    SourceItem,
    image_file,
    is_left_out,
    is_picture,
    read_image,
    split_suffix,
)
from difftrain.data.sources.captions import BadCaption, all_lines, decode_text, first_line, one_line
from difftrain.io.files import open_regular

MAX_CAPTION_BYTES = 1 << 20


class FolderSource(DataSource):
    """A folder, or one `<repeats>_<class>` sub-folder of it (then info.prefix and info.words are set)."""

    sharded = False

    def listing(self) -> Iterator[ListedFile]:
        for path, entry in walk(self.root, self.info.prefix, deep=not self.info.flat, hidden=True):
            if path.rpartition("/")[2].startswith("."):
                if is_picture(path):
                    yield ListedFile("hidden", path)
                continue
            if is_left_out(self.info, path, by_file=False):
                continue
            suffix = split_suffix(path)[1]
            role = "media" if suffix in IMAGE_SUFFIXES else "caption" if suffix in self.info.suffixes else "other"
            if role == "other":
                yield ListedFile(role, path)
            else:
                yield ListedFile(role, path, *size_and_time(entry))

    def items(self, file: FileRef) -> Iterator[SourceItem | BadItem]:
        size, opener = image_file(self.root / file.path)
        try:
            captions = self._captions(file)
        except BadCaption as error:
            yield BadItem(None, str(error))
            return

        yield SourceItem(None, 0, 0, size, captions, opener, "" if captions else self._lacking(file))

    def _lacking(self, file: FileRef) -> str:
        if self.info.captions_file:
            return captions_file.lacking(self.info, file.path)
        if file.caption:
            return f"empty caption: {file.caption} is empty"
        return f"no caption: no {' or '.join(self.info.suffixes)} file with its name next to it"

    def _captions(self, file: FileRef) -> tuple[str, ...]:
        if self.info.captions_file:
            return captions_file.captions_in(self.info, file.path)
        if file.caption is None:
            return (self.info.words,) if self.info.words else ()
        path = self.root / file.caption
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


def walk(
    root: Path, below: str = "", *, deep: bool = True, hidden: bool = False
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Iterate over (relative path, entry) of the files of a folder, at any depth or its own only, in no order.

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
                if is_folder(entry):
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


def size_and_time(entry: os.DirEntry[str]) -> tuple[int, int]:
    """Return (size, mtime_ns) of a listed file, zeros for one that has gone or is a broken link."""
    try:
        stat = entry.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns
