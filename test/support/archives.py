"""Unpacking of archives that tests fetch or made themselves."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Python has had it since 3.11.4; Debian 12 ships 3.11.2
_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def unpack_tar(archive: Path, folder: Path, below: str = "") -> None:
    """Unpack the members of a tar, of any compression, that have a text in their names."""
    with tarfile.open(archive) as packed:
        members: Iterable[tarfile.TarInfo] = [member for member in packed if below in member.name]
        packed.extractall(folder, members, **_FILTER)
