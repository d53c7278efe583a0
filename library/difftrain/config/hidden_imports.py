"""What a process leaves out while it starts: packages that others import wherever they find them, and garbage collection.

diffusers and transformers import an installed bitsandbytes, which takes 2 to 3 s of every process (it decorates its
operators with torch.compile) and warns about kernels of 4-bit inference; and an installed peft, of which diffusers only
asks whether it is there, and which takes 0.2 to 0.8 s: it imports a dozen of transformers' language models. scipy takes
0.8 s: diffusers' schedulers have it for noise levels along a beta distribution, transformers for losses of object detection.

Collecting garbage while a million objects are imported, none of which ever goes, takes a sixth of a start.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

WITHHELD = ("bitsandbytes", "peft")
_IMPORTERS = ("diffusers", "transformers")  # each counts once, as it is imported, what is installed
_hidden: set[str] = set()
_paused = False


def hold_back() -> None:
    """Let these packages look as if they were missing, in this process, where they are not imported yet.

    Does nothing where one of those that import them has begun: it would look for what it has counted as there.
    """
    if any(name in sys.modules for name in _IMPORTERS):
        return
    for name in WITHHELD:
        if name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]  # what the import system takes for "not there"
            _hidden.add(name)


def let_in(module: str) -> None:
    """Let the package of a module be found again, before it is imported."""
    name = module.partition(".")[0]
    if name in _hidden:
        _hidden.discard(name)
        del sys.modules[name]


def is_installed(module: str) -> bool:
    """Say whether a package is there, held back or not; it is not imported."""
    return module in _hidden or find_spec(module) is not None


# ------------------------------------------------------------------ scipy

_OF_SCHEDULERS = ("integrate", "stats")


class _DeferredModule(ModuleType):
    """A module that is imported, and its fellows with it, by the first use of anything in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by the import system itself
            raise AttributeError(name)
        deferred = {key: module for key, module in sys.modules.items() if isinstance(module, _DeferredModule)}
        for key in deferred:
            del sys.modules[key]
        for key, module in deferred.items():
            loaded = import_module(key)
            for submodule, value in vars(module).items():
                if isinstance(value, ModuleType) and not hasattr(loaded, submodule):
                    setattr(loaded, submodule, value)
        return getattr(import_module(self.__name__), name)


def defer_scipy() -> None:
    """Let scipy be imported where something in it is called; before a class of diffusers or transformers is imported.

    Does nothing in a process that is not one of our commands (hold_back), or has it already.
    """
    if not _hidden or "scipy" in sys.modules or (spec := find_spec("scipy")) is None:
        return
    sys.modules["scipy"] = None  # type: ignore[assignment]
    try:
        from transformers.utils import is_scipy_available  # whoever asks first decides: it keeps its answer

        is_scipy_available.cache_clear()
        is_scipy_available()
    finally:
        del sys.modules["scipy"]
    for name in _OF_SCHEDULERS:
        module = _DeferredModule(f"scipy.{name}")
        module.__path__ = [str(Path(folder, name)) for folder in spec.submodule_search_locations or ()]
        sys.modules[module.__name__] = module


# ------------------------------------------------------------------ garbage


def pause_collection() -> None:
    """Collect no garbage from here on, until collect_again."""
    global _paused
    if gc.isenabled():
        gc.disable()
        _paused = True


def collect_again() -> None:
    """Collect garbage again where pause_collection has stopped it, and never look through what is here already."""
    global _paused
    if _paused:
        gc.freeze()
        gc.enable()
        _paused = False
