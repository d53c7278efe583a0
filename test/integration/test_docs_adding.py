"""docs/adding/: the blocks of each page, applied to a copy of the repository, make what the page promises.

The copy holds the changes of all pages at once, so that one process runs their tests. docs/adding/family.md has a test of
its own, test/contracts/test_docs_adding.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("library", "third_patch", "sd_scripts_xl", "configs", "docs", "schemas", "test")
PAGES = {
    name: (ROOT / "docs" / "adding" / f"{name}.md").read_text("utf-8")
    for name in ("flag", "source", "optimizer", "engine")
}
BLOCK = re.compile(r"^```(diff|python|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`([\w/]+\.py)`")
# of the repository's own: those that notice a row that was left out
NOTICE = (
    "test/unit/config/test_flags.py::test_names_are_frozen",
    "test/unit/config/test_flags.py::test_the_page_of_flags_is_current",
    "test/unit/config/test_train_docs.py::test_the_page_is_current",
    "test/unit/config/test_text_to_image.py::test_every_flag_leads_to_a_field_or_says_what_it_does",
    "test/house/test_flags.py",
    "test/house/test_layers.py::test_every_field_of_the_configuration_is_read_by_somebody",
    "test/house/test_packages.py::test_the_wheel_ships_the_patches_and_every_engine_has_a_row",
    "test/golden/test_messages.py::test_the_page_has_every_sentence_as_it_is",
    "test/golden/test_schemas.py",
)
# what is generated of the library, and the command of a page that does it
COMMANDS = {
    "docs/flags.md": "python -m difftrain.config.render.docs flags > docs/flags.md",
    "docs/train_toml.md": "python -m difftrain.config.render.docs keys > docs/train_toml.md",
    "docs/text_to_image.md": "python -m difftrain.config.render.docs text_to_image > docs/text_to_image.md",
    "schemas": "pytest test/golden/test_schemas.py --update-golden",
    "test/golden/data/messages.txt": "pytest test/golden/test_messages.py --update-golden",
}
STALE = """
import sys
from pathlib import Path
from difftrain.cli.documents import schema_text
from difftrain.config.render import docs
from difftrain.config.render.schema import SCHEMAS
sys.path.append("test/golden")
import test_messages
now = {
    "docs/flags.md": docs.flags_page(), "docs/train_toml.md": docs.keys_page(),
    "docs/text_to_image.md": docs.text_to_image_page(), "test/golden/data/messages.txt": test_messages.page(),
    **{f"schemas/{name}.json": schema_text(name) for name in SCHEMAS},
}
for name, text in now.items():
    if Path(name).read_text(encoding="utf-8") != text:
        print("schemas" if name.startswith("schemas/") else name)
"""
# the contract suites, which run over the registries: of every page the entry that it adds
SUITES = {"source": "jsonl", "optimizer": "SignSGD", "engine": "single"}


def blocks(page: str) -> list[tuple[str, str, str]]:
    """Return (kind, file, content) of a page's blocks. The file is the first that the nearest paragraph to name one names."""
    found, end, file = [], 0, ""
    for match in BLOCK.finditer(page):
        named = [paths for part in page[end : match.start()].split("\n\n") if (paths := FILE.findall(part))]
        file = named[-1][0] if named else file
        found.append((match[1], file, match[2]))
        end = match.end()
    return found


def apply(diff: str, path: Path) -> None:
    """Apply a diff whose lines of context stand exactly once in the file."""
    lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if line[0] in " -") + "\n"
    after = "\n".join(line[1:] for line in lines if line[0] in " +") + "\n"
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, (
        f"{path.name}: the page shows lines that stand in it {text.count(before)} times:\n{before}"
    )
    path.write_text(text.replace(before, after), encoding="utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a copy with every page's blocks applied, and the test files that they add."""
    root, added = tmp_path_factory.mktemp("copy"), []
    for name in COPIED:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "output"))
    for path in (*ROOT.glob("*.txt"), *ROOT.glob("*.md"), ROOT / "pyproject.toml"):
        shutil.copy(path, root)
    commands: list[str] = []
    for page in PAGES.values():
        for kind, name, content in blocks(page):
            if kind == "bash":
                commands += [line for line in content.splitlines() if line not in commands]
            elif kind == "diff":
                apply(content, root / name)
            else:
                assert not (root / name).exists(), name
                (root / name).write_text(content, encoding="utf-8")
                added += [name] if name.startswith("test/") else []
    for command in commands:
        assert command in COMMANDS.values(), command
        words = command.replace("python", sys.executable, 1).replace("pytest", f"{sys.executable} -m pytest", 1)
        subprocess.run(words, shell=True, cwd=root, env={**os.environ, "PYTHONPATH": str(root / "library")}, check=True)
    return root, added


def test_every_page_adds_a_file_and_a_test() -> None:
    for name, page in PAGES.items():
        kinds = [kind for kind, _, _ in blocks(page)]
        assert kinds.count("diff") >= 2 and "python" in kinds, name
        assert blocks(page)[-1][1].startswith("test/unit/"), f"{name}: a page ends with its test"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly) if name in ("source", "optimizer") else name for name in PAGES],
)
def test_a_page_generates_what_it_changes_and_nothing_else(name: str, tmp_path: Path) -> None:
    """All pages together would hide a command that one of them has left out."""
    for part in ("library", "docs", "schemas", "test/golden"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    commands = []
    for kind, file, content in blocks(PAGES[name]):
        if kind == "bash":
            commands += content.splitlines()
        elif kind == "diff" and file.startswith("library/"):
            apply(content, tmp_path / file)
        elif file.startswith("library/"):
            (tmp_path / file).write_text(content, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", STALE], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "library")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert sorted(commands) == sorted({COMMANDS[stale] for stale in done.stdout.split()})


def test_what_the_pages_add_works_and_the_repositorys_own_tests_agree(copy: tuple[Path, list[str]]) -> None:
    root, added = copy
    assert len(added) == len(PAGES)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=short", *added, *NOTICE],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root / "library")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.nightly
def test_what_the_pages_add_is_tested_by_the_contract_suites(copy: tuple[Path, list[str]]) -> None:
    root, _ = copy
    suites = [f"test/contracts/test_{name}.py" for name in SUITES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-vv", "--tb=short", "-k", " or ".join(SUITES.values()), *suites],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root / "library")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    for entry in SUITES.values():
        assert len(re.findall(rf"\[[^]]*\b{entry}\b[^]]*\] PASSED", done.stdout)) > 8, done.stdout[-3000:]


def test_what_the_pages_add_is_formatted(copy: tuple[Path, list[str]]) -> None:
    root, _ = copy
    files = [name for page in PAGES.values() for kind, name, _ in blocks(page) if kind != "bash"]
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", *dict.fromkeys(files)],
            cwd=root, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
