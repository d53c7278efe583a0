"""CONTRIBUTING.md, CHANGELOG.md and the commit hooks say what the tests, the version and the lint tier are."""

from __future__ import annotations

import re
from pathlib import Path

import difftrain

ROOT = Path(__file__).resolve().parents[3]
TIERS = (ROOT / "test" / "run_tests.sh").read_text(encoding="utf-8")
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_table_names_the_tiers_with_their_budgets() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|$", PAGE, re.MULTILINE)
    (names,) = re.findall(r'^TIERS="(.*)"$', TIERS, re.MULTILINE)
    (arms,) = re.findall(r"^ +case .* in (.*) esac$", TIERS, re.MULTILINE)[:1]
    budgets = dict(re.findall(r"([\w*]+)\) echo (\d+)", arms))
    assert rows == [(name, budgets.get(name, budgets["*"])) for name in names.split()]


def test_the_golden_folders_that_are_named_hold_files() -> None:
    folders = re.findall(r"`(test/[\w/]*golden[\w/]*)`", PAGE)
    assert folders and all(list((ROOT / folder).glob("*.json")) for folder in folders)


def test_the_newest_entry_of_the_changelog_is_this_version() -> None:
    heads = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heads == ["Unreleased", "0.5.0", "0.4.0", "0.3.0", "0.2.0", "0.1.0"]
    assert difftrain.__version__ == heads[1]


def test_the_commit_hooks_are_local_and_those_of_the_lint_tier() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"^ *- repo: (\w+)$", hooks, re.MULTILINE) == ["local"]
    entries = re.findall(r"^ *entry: ([a-z ]*[a-z])", hooks, re.MULTILINE)
    assert entries == ["ruff check", "ruff format", "mypy"]
    assert all(f"-m {entry}" in TIERS for entry in entries)
