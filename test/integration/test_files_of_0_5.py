"""What version 0.5 wrote goes on: its run directories, checkpoints, caches and indexes, to the bits that it would have had.

test/drills/files_of_0_5.py had 0.5 write the archives in files_of_0_5/. They stand here and not among the golden files,
since no flag may ever renew them.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from archives import unpack_tar
from doors import ROOT, Door, losses, wait_for
from machine_kind import machine_kind
from safetensors.torch import load_file

ARCHIVES = Path(__file__).parent / "files_of_0_5"
PLACE = Path("/var/tmp/difftrain-files-of-0.5")  # where 0.5 wrote them: an index is named by a hash of its data's path
ABANDONED_S = 600.0
# the checkpoint to resume is at step 3, the end at step 6
ENDS = {"sd3": "runs/*/global_step6", "sdxl": "runs/model-state"}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that 0.5 wrote in, empty, for one test of this machine at a time, and as the working directory."""
    wait_for(_made, 300.0, f"{PLACE} belongs to another run of this test")
    monkeypatch.chdir(PLACE)
    yield PLACE
    shutil.rmtree(PLACE)


def _made() -> bool:
    try:
        PLACE.mkdir(mode=0o700)
    except FileExistsError:
        if time.time() - PLACE.stat().st_ctime > ABANDONED_S:  # left behind by a test that was killed
            shutil.rmtree(PLACE, ignore_errors=True)
        return False
    return True


@pytest.mark.parametrize("family", ENDS)
def test_a_run_of_0_5_goes_on(family: str, place: Path) -> None:
    for archive in (f"{family}-data.tar.xz", f"{family}-run.tar.xz"):
        unpack_tar(ARCHIVES / archive, place)
    expected = json.loads((place / "expected" / "run.json").read_text())
    index, cache = contents(place / "cache" / "index"), contents(place / "cache" / "segments")
    (metrics,) = place.glob("runs/**/metrics.jsonl")
    first_lines = metrics.read_text()
    script, *words = expected["command"]
    door = Door(place / "pictures", place / "home")
    printed = door.run_words([sys.executable, str(ROOT / Path(script).relative_to("code")), *words])

    (end,) = place.glob(ENDS[family])
    assert metrics.read_text().startswith(first_lines), f"it began anew:\n{printed}"
    alike = expected["machine"] == machine_kind()
    rtol = 0.0 if alike else 1e-5
    assert losses(end.parent) == pytest.approx(expected["losses"], rel=rtol, abs=0.0), printed
    for name in ("weights", "ema"):
        found, wanted = (
            load_file(end / f"{name}-00000.safetensors"),
            load_file(place / "expected" / f"{name}.safetensors"),
        )
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol, msg=lambda text, name=name: f"{name}: {text}")
    now = contents(place / "cache" / "index")
    assert index.items() <= now.items(), "the index was made anew"
    # captions are mended before they are tokenized: lists of them are written again, and find the entries of 0.5
    assert not [name for name in now.keys() - index.keys() if "/wanted-" not in name]
    assert contents(place / "cache" / "segments") == cache, "something was encoded anew"


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return every file below a folder: when it was written, and what is in it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
