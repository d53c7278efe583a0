"""Where this user's caches lie when nothing else is asked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def user_cache() -> Path:
    """Return the user's cache folder of this program, as the system has it; it need not be there."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "difftrain"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "difftrain"
