"""A data set class of the user's own, by its dotted name: `--dataset_class=package.module.Class`.

The class is made in every process, without arguments or with the folder of --train_data_dir, and is asked for

    len(dataset)            how many pictures there are
    dataset[i]              (picture, caption), (picture, caption, (width, height)), or a mapping of image, caption, size
    dataset.name(i)         optional: what the picture is called, the same for ever: all its draws hang on it; else str(i)
    dataset.fingerprint     optional: a text; while it stays as it is, pictures that are known are not looked at again

A picture is bytes of a picture file, a path of one, a PIL image, or an array (h, w), (h, w, 3) or (h, w, 4) of uint8. A
caption is a text, or a list of which one is drawn at each use; it is taken once, when the index is made.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault, MediaRef
from difftrain.data.sources.base import BadItem, DataSource, FileRef, ListedFile, SourceItem, printable, read_image
from difftrain.data.sources.captions import BadCaption, captions_of


class ClassSource(DataSource):
    """The items of one class. info.root is its dotted name, info.only what it is made with; an item's path is its name."""

    sharded = False

    @cached_property
    def _dataset(self) -> Any:
        return make(self.info.root, self.info.only)

    @cached_property
    def _numbers(self) -> dict[str, int] | None:
        """Return the number of each name, None where names are numbers."""
        if not hasattr(self._dataset, "name"):
            return None
        return {name: number for number, name in enumerate(self._names())}

    def _names(self) -> Iterator[str]:
        count = _call_user(f"len({self.info.root})", lambda: len(self._dataset))
        if not hasattr(self._dataset, "name"):
            yield from map(str, range(count))
            return
        seen: dict[str, int] = {}
        for i in range(count):
            name = _call_user(f"{self.info.root}.name({i})", lambda i=i: self._dataset.name(i))  # type: ignore[misc]
            if not isinstance(name, str) or not name or printable(name) != name:
                raise _fault(f"{self.info.root}.name({i}) is {name!r}, not a text", "names must never change")
            if seen.setdefault(name, i) != i:
                raise _fault(f"{self.info.root} calls items {seen[name]} and {i} both {name!r}", "names must be unique")
            yield name

    def listing(self) -> Iterator[ListedFile]:
        print_ = getattr(self._dataset, "fingerprint", None)
        if print_ is not None and not isinstance(print_, str):
            raise _fault(f"{self.info.root}.fingerprint is {print_!r}, not a text", "leave it out, or return text")
        # without one nothing says that the pictures are the same as before
        stamp = time.time_ns() if print_ is None else _number(print_)
        for name in self._names():
            yield ListedFile("media", name, 0, stamp)

    def items(self, file: FileRef) -> Iterator[SourceItem | BadItem]:
        try:
            picture, caption, size_wh = self._parts(file.path)
            captions = captions_of(caption, "its caption", multi_line=self.info.multi_line)
            content = encoder(picture)
        except BadCaption as error:
            yield BadItem(None, str(error))
        except Exception as error:  # whatever a user's class raises is a fault of that item
            yield BadItem(None, f"broken item: {type(error).__name__}: {error}")
        else:

            def open_() -> BinaryIO:
                return io.BytesIO(content())

            lacking = "no caption: the class returns none"
            yield SourceItem(None, 0, 0, 0, captions, open_, lacking, size_wh=size_wh or size_of(picture))

    def _parts(self, name: str) -> tuple[Any, Any, tuple[int, int] | None]:
        item = self._dataset[int(name) if self._numbers is None else self._numbers[name]]
        if isinstance(item, Mapping):
            item = (item["image"], item.get("caption"), item.get("size"))
        if not isinstance(item, tuple | list) or len(item) not in (2, 3):
            raise TypeError(f"an item is (image, caption), not {type(item).__name__}")
        picture, caption, *more = item
        size = more[0] if more else None
        return picture, caption, None if size is None else (int(size[0]), int(size[1]))

    def read(self, media: MediaRef) -> bytes:
        try:
            return encoder(self._parts(media.path)[0])()
        except Exception as error:  # the item is left out and named, as a file that is gone
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", f"{self.info.root} {media.path}") from error


def make(dotted: str, argument: str = "") -> Any:
    """Import a class and make its object. Raises ConfigFault that says what is wrong with it."""
    module_name, _, name = dotted.rpartition(".")
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))  # the folder that the user started from; torchrun and the doors leave it out
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code
        remedy = "add the module to PYTHONPATH, or start in its folder"
        raise _fault(f"{module_name} cannot be imported: {type(error).__name__}: {error}", remedy) from None
    if not hasattr(module, name):
        raise _fault(f"{module_name} has no {name}", f"it has {', '.join(_classes(module)) or 'no class'}")
    made = _call_user(f"{dotted}({argument!r})" if argument else f"{dotted}()", lambda: _call(module, name, argument))
    for needed in ("__len__", "__getitem__"):
        if not hasattr(type(made), needed):
            raise _fault(f"{dotted} has no {needed}", "a dataset has __len__ and __getitem__: docs/data_sets.md")
    return made


def _call(module: Any, name: str, argument: str) -> Any:
    return getattr(module, name)(*([argument] if argument else []))


def _classes(module: Any) -> list[str]:
    return sorted(n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__)


def _call_user(what: str, action: Callable[[], Any]) -> Any:
    """Run a user's code; whatever it raises is a fault of the configuration."""
    try:
        return action()
    except ConfigFault:
        raise
    except Exception as error:
        raise _fault(f"{what} fails: {type(error).__name__}: {error}") from error


def _fault(what: str, remedy: str = "") -> ConfigFault:
    return ConfigFault([Fault(option("data.dataset_class"), what, remedy)])


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def size_of(picture: Any) -> tuple[int, int] | None:
    """Return (width, height) where a picture is already decoded."""
    if isinstance(picture, np.ndarray):
        return picture.shape[1], picture.shape[0]
    return picture.size if isinstance(picture, Image.Image) else None


def encoder(picture: Any) -> Callable[[], bytes]:
    """Return what gives the bytes of a picture file. Raises TypeError for what is no picture."""
    if isinstance(picture, bytes):
        return lambda: picture
    if isinstance(picture, str | Path):
        return lambda: read_image(Path(picture))
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim not in (2, 3) or picture.shape[2:] not in ((), (3,), (4,)):
            raise TypeError(f"an array of {picture.dtype} and shape {picture.shape} is not an 8-bit image")
        picture = Image.fromarray(picture)
    if not isinstance(picture, Image.Image):
        raise TypeError(
            f"{type(picture).__name__} is not an image: expected bytes, a path, a PIL image or an array of uint8"
        )
    return lambda: _png(picture)


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=0)  # exact; packing it would only cost time
    return out.getvalue()
