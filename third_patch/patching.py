"""What every patch does the same way: look at the version, replace attributes once, and put them back."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

from difftrain.contracts import ConfigFault, Fault

log = logging.getLogger("difftrain")
Version = tuple[int, ...]
Change = tuple[Any, str, Any]  # owner, attribute, what takes its place
_MISSING = object()


class Patch:
    """Replace attributes of one package, while it is imported. Applying twice is applying once.

    least, below: the versions whose code was read; another one is refused, since a patch of code that nobody has looked
    at may do harm in silence. changes: called when the patch is applied, so that nothing is imported before.
    """

    def __init__(self, package: str, least: str, below: str, why: str, changes: Callable[[], Iterable[Change]]) -> None:
        self.package, self.least, self.below, self.why = package, least, below, why
        self._changes = changes
        self._before: list[Change] = []

    @property
    def applied(self) -> bool:
        """Tell whether the package is patched now."""
        return bool(self._before)

    def apply(self) -> str:
        """Patch, and return a sentence about it; nothing where it is done already, or the package is not installed.

        Raises ConfigFault for a version that this patch was not written for.
        """
        if self.applied:
            return ""
        try:
            version = importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return ""
        if not _numbers(self.least) <= _numbers(version) < _numbers(self.below):
            what = f"{self.package} {version} is installed, and the patches it needs are for {self.least} to below {self.below}"
            remedy = f'pip install "{self.package}>={self.least},<{self.below}", or --engine=native'
            raise ConfigFault([Fault("third_patch", what, remedy)])
        for owner, name, new in self._changes():
            self._before.append((owner, name, vars(owner).get(name, _MISSING)))
            setattr(owner, name, new)
        sentence = f"{self.package} {version} is patched in this process: {self.why}"
        log.info("%s", sentence)
        return sentence

    def revert(self) -> None:
        """Put everything back as it was before."""
        for owner, name, old in reversed(self._before):
            if old is _MISSING:  # it was inherited
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        self._before.clear()


def _numbers(version: str) -> Version:
    """Return the numbers that a version begins with: 1.15.0.dev0 is (1, 15, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
