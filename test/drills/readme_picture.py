"""Make docs/report_and_samples.webp from a run: its report.html in a browser, and its samples beside it.

    PYTHONPATH=test/support:library python test/drills/readme_picture.py RUN sample/GRID.png

RUN is the folder of a finished run, GRID a picture in it (or a path). The browser is the one that the tests use.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from browser import browser
from PIL import Image

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "report_and_samples.webp"
PAGE_WH = (1100, 860)
SAMPLES_WIDTH = 520
MARGIN = 16
BACKGROUND = (228, 231, 236)
MOST_BYTES = 200_000


def screenshot(report: Path) -> Image.Image:
    """Return the top of the page as a window of PAGE_WH shows it."""
    with tempfile.TemporaryDirectory() as folder, browser() as program:
        page = program.open(report, PAGE_WH[0])
        page.resize(*PAGE_WH)
        page.picture(Path(folder) / "page.png")
        assert not page.errors and not [url for url in page.requests if not url.startswith(("file:", "data:"))]
        with Image.open(Path(folder) / "page.png") as image:
            return image.convert("RGB")


def samples(grid: Path, height: int) -> Image.Image:
    """Return as much of a grid of samples as a column of SAMPLES_WIDTH holds; the halves of a wide one stand one above the other."""
    with Image.open(grid) as image:
        rgb = image.convert("RGB")
    while rgb.width > 1.5 * rgb.height:
        half, whole = rgb.width // 2, rgb
        rgb = Image.new("RGB", (half, 2 * whole.height))
        rgb.paste(whole.crop((0, 0, half, whole.height)), (0, 0))
        rgb.paste(whole.crop((half, 0, 2 * half, whole.height)), (0, whole.height))
    scaled = rgb.resize((SAMPLES_WIDTH, round(rgb.height * SAMPLES_WIDTH / rgb.width)), Image.Resampling.LANCZOS)
    return scaled.crop((0, 0, SAMPLES_WIDTH, min(scaled.height, height)))


def main(argv: list[str]) -> int:
    """Write the picture; return the exit code."""
    if len(argv) != 2:
        print(__doc__)
        return 2
    run = Path(argv[0])
    left = screenshot(run / "report.html")
    right = samples(run / argv[1], left.height)
    whole = Image.new("RGB", (left.width + right.width + 3 * MARGIN, left.height + 2 * MARGIN), BACKGROUND)
    whole.paste(left, (MARGIN, MARGIN))
    whole.paste(right, (left.width + 2 * MARGIN, MARGIN + (left.height - right.height) // 2))
    for quality in range(90, 40, -5):
        whole.save(OUTPUT, quality=quality, method=6)
        if OUTPUT.stat().st_size <= MOST_BYTES:
            print(f"{OUTPUT}: {whole.width} x {whole.height}, {OUTPUT.stat().st_size} bytes, quality {quality}")
            return 0
    print(f"{OUTPUT}: above {MOST_BYTES} bytes at every quality")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
