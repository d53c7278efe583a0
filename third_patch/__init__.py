"""Run-time patches of other people's packages, each guarded by the upstream version it mends, with its reason.

cli/train.py calls apply_for(engine, optimizer) before anything is built; nobody else in library/ imports this package. It
is `third_patch` in a checkout and `difftrain.third_patch` where it is installed, so its own imports are relative. The
engines native and fsdp need none: their rows in the registry are empty. An engine that needs patches has a folder here and a row that
names its functions; files of other packages are never touched.
"""

from __future__ import annotations

from importlib import import_module

# engine -> "module:function", a leading dot of this package; a function patches if the installed version needs it, and returns what it did or ""
PATCHES: dict[str, tuple[str, ...]] = {
    "native": (),
    "fsdp": (),
    "accelerate": (".accelerate_patch:apply",),
}
# the same for what an optimizer needs beside that, by (engine, optimizer)
FOR_OPTIMIZER: dict[tuple[str, str], tuple[str, ...]] = {
    ("accelerate", "oss"): (".fairscale_patch:apply",),
}


def apply_for(engine: str, optimizer: str = "") -> list[str]:
    """Apply the patches that an engine needs with an optimizer, and return a sentence for each that was applied."""
    done = []
    for place in (*FOR_OPTIMIZER.get((engine, optimizer.lower()), ()), *PATCHES[engine]):
        module, _, function = place.partition(":")
        if sentence := getattr(import_module(module, __name__), function)():
            done.append(sentence)
    return done
