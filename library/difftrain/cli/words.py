"""Command lines of commands that take no flags."""

from __future__ import annotations

from difftrain.contracts.errors import ConfigFault, Fault


def exactly(command: str, argv: list[str], *wanted: str) -> list[str]:
    """Return the words of a command that takes exactly these.

    Raises: ConfigFault that names every word too many and every one that is missing.
    """
    faults = [Fault(repr(word), f"difftrain {command} takes no such flag") for word in argv if word.startswith("-")]
    words = [word for word in argv if not word.startswith("-")]
    faults += [Fault(name, "is missing", f"difftrain {command} {' '.join(wanted)}") for name in wanted[len(words) :]]
    faults += [Fault(repr(word), f"is a word too many for difftrain {command}") for word in words[len(wanted) :]]
    if faults:
        raise ConfigFault(faults)
    return words
