"""Public test pictures, fetched by package name when a test first asks, and kept in the user's cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
import zipfile
from pathlib import Path

import pytest
from archives import unpack_tar

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "difftrain" / "test-data"
TIMEOUT_S = 400
_UNREACHABLE = (
    "No matching distribution",
    "Max retries exceeded",
    "Connection",
    "timed out",
    "Name or service not known",
)


def pillow_images() -> Path:
    """Return the folder of Pillow's own test pictures: odd, broken and hostile ones (its source package, 47 MB)."""
    return _kept("pillow==13.0.0", ("--no-binary", "pillow"), "/Tests/images/")


def photographs() -> list[Path]:
    """Return a few photographs that come with scikit-learn and scikit-image."""
    learn = _kept("scikit-learn", ("--only-binary", ":all:"), "sklearn/datasets/images/")
    image = _kept("scikit-image", ("--only-binary", ":all:"), "skimage/data/")
    names = {
        "china.jpg",
        "flower.jpg",
        "astronaut.png",
        "coffee.png",
        "chelsea.png",
        "rocket.jpg",
        "hubble_deep_field.jpg",
    }
    return sorted(path for root in (learn, image) for path in root.rglob("*") if path.name in names)


def clip_bpe() -> Path:
    """Return CLIP's own file of merges, as OpenCLIP ships it; no other file of that package is looked at."""
    folder = _kept("open_clip_torch", ("--only-binary", ":all:"), "bpe_simple_vocab_16e6.txt.gz")
    return next(folder.rglob("bpe_simple_vocab_16e6.txt.gz"))


def lycoris() -> Path:
    """Return the folder of LyCORIS, to be imported from: it reads and writes adapters of its own kinds."""
    return _kept("lycoris-lora==4.1.3", ("--only-binary", ":all:"), "lycoris/")


def t5_tokenizer() -> Path:
    """Return T5's tokenizer.json: stable-diffusion.cpp has it as an array of bytes in its source (20 MB)."""
    package = "stable-diffusion-cpp-python"
    folder = _kept(f"{package}==0.4.7", ("--no-binary", package), "/tokenizers/vocab/clip_t5.hpp")
    path = folder / "tokenizer.json"
    if not path.is_file():
        text = next(folder.rglob("clip_t5.hpp")).read_text(encoding="latin-1")
        numbers = text.split("t5_tokenizer_json_str[] = {", 1)[1].split("}", 1)[0]
        aside = folder / f"tmp-{uuid.uuid4().hex}"
        aside.write_bytes(bytes(int(number, 16) for number in numbers.split(",") if number.strip()))
        aside.rename(path)
    return path


def _kept(package: str, options: tuple[str, ...], below: str) -> Path:
    """Return the folder with the files of a package below a path, fetching it where it isn't there yet."""
    target = CACHE / package.replace("==", "-")
    if target.is_dir():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    temporary = CACHE / f"tmp-{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        archive = _download(package, options, temporary)
        _unpack(archive, temporary / "files", below)
        (temporary / "files").rename(target)
    except FileExistsError:
        pass
    except OSError:
        if not target.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _download(package: str, options: tuple[str, ...], folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--retries=1",
        "--no-deps",
        *options,
        "--dest",
        str(folder),
        package,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"the package registry did not hand out {package} within {TIMEOUT_S} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if not any(sign in done.stderr for sign in _UNREACHABLE):
            raise RuntimeError(f"pip cannot fetch {package}: {last}")
        pytest.skip(f"the package registry cannot be reached for {package}: {last}")
    (archive,) = (path for path in folder.iterdir() if path.is_file())
    return archive


def _unpack(archive: Path, target: Path, below: str) -> None:
    target.mkdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as zipped:
            zipped.extractall(target, [name for name in zipped.namelist() if below in name])
        return
    unpack_tar(archive, target, below)
