"""Sample grids of a run as small data addresses, so that one file holds them."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image

FOLDER = "sample"  # kohya's name for it, in the output folder
LONGEST_SIDE = 1400
ENOUGH_BYTES = 400_000


def sample_pictures(run_dir: Path, most: int = 4) -> list[Path]:
    """Return the newest sample pictures, oldest first, with the very first one among them to see the progress.

    Where a step has a grid of all prompts, only grids are taken.
    """
    found = sorted((run_dir / FOLDER).glob("*.png"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    grids = [path for path in found if path.stem.endswith("_grid")]
    found = grids or found
    return found if len(found) <= most else [found[0], *found[1 - most :]]


def data_address(path: Path) -> str:
    """Return a picture as a data address: the PNG itself where it is small, else a JPEG of bounded size."""
    raw = path.read_bytes()
    with Image.open(io.BytesIO(raw)) as picture:
        if len(raw) <= ENOUGH_BYTES and max(picture.size) <= LONGEST_SIDE:
            return "data:image/png;base64," + base64.b64encode(raw).decode()
        small = picture.convert("RGB")
        small.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    for quality in (88, 75, 60):
        buffer = io.BytesIO()
        small.save(buffer, "JPEG", quality=quality, optimize=True)
        if buffer.tell() <= ENOUGH_BYTES:
            break
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
