"""The demo's pairs: two styles joined on their codes, edited both ways, some held out with references of their own and others."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from emoji_packages import FEWER, write_packages
from PIL import Image

from difftrain.demo import pairs


@pytest.fixture(scope="module")
def npm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("npm")
    write_packages(folder)
    return folder


def read(folder: Path) -> list[tuple[str, int, int]]:
    """Return of each sample its caption, and which emoji its image and its reference show."""
    samples: dict[str, dict[str, bytes]] = {}
    with tarfile.open(folder / "00000.tar") as tar:
        for member in tar:
            key, _, suffix = member.name.partition(".")
            stream = tar.extractfile(member)
            assert stream is not None
            samples.setdefault(key, {})[suffix.split(".")[0].replace("webp", "image").replace("png", "image")] = (
                stream.read()
            )
    shown = []
    for sample in samples.values():
        numbers = []
        for name in ("image", "reference"):
            with Image.open(io.BytesIO(sample[name])) as image:
                numbers.append(image.convert("RGB").getpixel((4, 4)))
        assert {colour[1] for colour in numbers} == {0, 255}, "one of each style"
        caption = sample["txt"].decode()
        assert (caption == pairs.DRAWN) == (numbers[0][1] == 255)
        shown.append((caption, numbers[0][0], numbers[1][0]))
    return shown


def test_unseen_emoji_come_with_their_own_references_and_with_others(npm: Path, tmp_path: Path) -> None:
    counts = pairs.write(tmp_path, npm)
    train, unseen, mismatched = (read(tmp_path / name) for name in ("train", "unseen", "mismatched"))
    assert counts == {"train": len(train), "unseen": len(unseen), "mismatched": len(mismatched)}
    assert len(train) + len(unseen) == 2 * len(FEWER) and len(unseen) == 2 * 4
    assert all(image == reference for _, image, reference in train + unseen)
    assert not {image for _, image, _ in train} & {image for _, image, _ in unseen}
    assert [(caption, image) for caption, image, _ in mismatched] == [(caption, image) for caption, image, _ in unseen]
    assert all(image != reference for _, image, reference in mismatched)


def test_prompts_name_the_references_of_unseen_emoji(npm: Path, tmp_path: Path) -> None:
    pairs.write(tmp_path, npm)
    lines = pairs.prompts(tmp_path / "shown")
    assert len(lines) == 6 and {line.split(" --ci ")[0] for line in lines} == {pairs.SOLID, pairs.DRAWN}
    unseen = {image for _, image, _ in read(tmp_path / "unseen")}
    for line in lines:
        with Image.open(line.split(" --ci ")[1]) as image:
            assert image.convert("RGB").getpixel((4, 4))[0] in unseen
