"""Run-time patches of other people's packages, each guarded by the upstream version it mends, with its reason and issue.

The doors and the command line call apply_for(engine) before anything is built; nobody in library/ imports this package.
The native engine needs none: its row in the registry is empty. An engine that needs patches gets a folder here
(accelerate_patch/, fairscale_patch/) and a row that names its functions.
"""

from __future__ import annotations

from importlib import import_module

# engine -> "module:function"; a function patches if the installed version needs it, and returns what it did or ""
PATCHES: dict[str, tuple[str, ...]] = {"native": ()}


def apply_for(engine: str) -> list[str]:
    """Apply the patches that an engine needs, and return a sentence for each that was applied."""
    done = []
    for place in PATCHES[engine]:
        module, _, function = place.partition(":")
        if sentence := getattr(import_module(module), function)():
            done.append(sentence)
    return done
