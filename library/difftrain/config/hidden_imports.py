"""Packages that other packages import wherever they find them, kept out until somebody asks for one.

diffusers and transformers import an installed bitsandbytes, which takes 2 to 3 s of every process (it decorates its
operators with torch.compile) and warns about kernels of 4-bit inference; and an installed peft, of which diffusers only
asks whether it is there, and which takes 0.2 to 0.8 s: it imports a dozen of transformers' language models.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

WITHHELD = ("bitsandbytes", "peft")
_IMPORTERS = ("diffusers", "transformers")  # each counts once, as it is imported, what is installed
_hidden: set[str] = set()


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
