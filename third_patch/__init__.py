"""Run-time patches of other people's packages, each guarded by the upstream version it mends, with its reason.

The doors and the command line call apply_for(engine, optimizer) before anything is built; nobody in library/ imports
this package. The native engine needs none: its row in the registry is empty. An engine that needs patches has a folder
here and a row that names its functions; files of other packages are never touched.
"""

from __future__ import annotations

from importlib import import_module

# engine -> "module:function"; a function patches if the installed version needs it, and returns what it did or ""
PATCHES: dict[str, tuple[str, ...]] = {
    "native": (),
    "accelerate": ("third_patch.accelerate_patch:apply",),
}
# the same for what an optimizer needs beside that, by (engine, optimizer)
FOR_OPTIMIZER: dict[tuple[str, str], tuple[str, ...]] = {
    ("accelerate", "oss"): ("third_patch.fairscale_patch:apply",),
}


def apply_for(engine: str, optimizer: str = "") -> list[str]:
    """Apply the patches that an engine needs with an optimizer, and return a sentence for each that was applied."""
    done = []
    for place in (*FOR_OPTIMIZER.get((engine, optimizer.lower()), ()), *PATCHES[engine]):
        module, _, function = place.partition(":")
        if sentence := getattr(import_module(module), function)():
            done.append(sentence)
    return done
