"""The demo's real pictures: fetched through npm, joined on their codes; a registry and its client stand in as files."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from difftrain.contracts import DataFault
from difftrain.demo import datasets

LABELS = [
    {"hexcode": "2764-FE0F", "label": "red heart", "tags": ["love", "heart"]},
    {"hexcode": "1F600", "label": "grinning face"},
    {"hexcode": "0023-FE0F-20E3", "label": "keycap: #", "tags": ["keycap"]},
    {"hexcode": "1F44B", "label": "waving hand", "skins": [{"hexcode": "1F44B-1F3FB", "label": "light"}]},
]
FILES = ["2764-fe0f", "1f600", "23-fe0f-20e3", "0023-fe0f-20e3", "1f44b", "1f44b-1f3fb", "1f9ff"]


def package(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def webp() -> bytes:
    stream = io.BytesIO()
    Image.new("RGBA", (32, 32), (200, 0, 0, 128)).save(stream, "WEBP", lossless=True)
    return stream.getvalue()


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    """Two packages as npm packs them, and an npm that hands them out."""
    folder = tmp_path / "registry"
    package(folder / "lobehub-fluent-emoji-3d-1.1.0.tgz", {f"assets/{name}.webp": webp() for name in FILES})
    package(folder / "emojibase-data-17.0.0.tgz", {"en/data.json": json.dumps(LABELS).encode()})
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/calls\n'
        'case "$2" in @lobehub*) name=lobehub-fluent-emoji-3d-1.1.0.tgz ;; *) name=emojibase-data-17.0.0.tgz ;; esac\n'
        f'cp {folder}/$name "$6"\n'
    )
    npm.chmod(0o755)
    return tmp_path


def test_pictures_join_their_labels_once_and_without_skin_tones(
    registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{registry / 'bin'}{os.pathsep}{os.environ['PATH']}")
    found = list(datasets.emoji_pictures(registry / "cache"))
    assert [picture.caption for picture in found] == [
        "keycap: #, keycap", "waving hand", "grinning face", "red heart, love, heart",
    ]  # fmt: skip
    assert {(picture.suffix, picture.width) for picture in found} == {("webp", 32)}
    with Image.open(io.BytesIO(found[0].content)) as image:
        assert image.mode == "RGBA"  # the reader composites it


def test_packages_are_fetched_once(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{registry / 'bin'}{os.pathsep}{os.environ['PATH']}")
    first = list(datasets.emoji_pictures(registry / "cache"))
    assert list(datasets.emoji_pictures(registry / "cache")) == first
    assert len((registry / "calls").read_text().splitlines()) == 2
    assert sorted(p.name for p in (registry / "cache").iterdir()) == [
        "emojibase-data-17.0.0.tgz", "lobehub-fluent-emoji-3d-1.1.0.tgz",
    ]  # fmt: skip


def test_without_npm_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataFault, match=r"\bnpm\b.*Node\.js") as fault:
        list(datasets.emoji_pictures(tmp_path / "cache"))
    assert "emojibase-data@17.0.0" in str(fault.value) and fault.value.exit_code == 2


def test_a_failing_npm_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'network is unreachable' >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(DataFault, match="network is unreachable"):
        list(datasets.emoji_pictures(tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("*.tgz"))
