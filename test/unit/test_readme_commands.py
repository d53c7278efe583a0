"""Every command of the README and the quick start is one that its script takes, and every link leads somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from launching import flags, machines, recipes
from launching.machines import Found

from difftrain.config.parse import parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "README.zh.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
PLACES = ("/models/sdxl-base-1.0", "/models/sdxl", "/data/laion", "/data/pictures")


def commands(page: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


LINES = [(page, line) for page in PAGES for line in commands(page) if "…" not in line]
LAUNCHES = [entry for entry in LINES if "pretrain_full_" in entry[1]]
DOORS = [entry for entry in LINES if re.search(r"sdxl_pretrain\.py\s+--", entry[1])]


def test_there_are_commands() -> None:
    assert len(LAUNCHES) >= 20 and DOORS


@pytest.mark.parametrize(("page", "line"), LAUNCHES)
def test_launchers_take_their_commands(page: str, line: str, tmp_path: Path) -> None:
    words = shlex.split(line, comments=True)
    script = words[words.index("bash") + 1]
    assert (ROOT / script).is_file()
    layout = re.search(r"pretrain_full_(\w+)_sdxl", script)[1]
    argv = [_here(word, tmp_path) for word in words[words.index("bash") + 2 :]]
    given = flags.read(argv, {})
    where = machines.where(layout, {"1m_1p": 1, "1m_8p": 8, "nm_np": None}[layout], given, Found("npu", 8), {})
    recipe = recipes.choose("sdxl", given, where)
    assert not [*given.faults, *where.faults, *recipe.faults]
    door = [*recipe.words, *flags.to_door(given), *given.rest, f"--output_dir={tmp_path / 'out'}"]
    assert recipes.door_faults(recipe.checkable(door)) == []


@pytest.mark.parametrize(("page", "line"), DOORS)
def test_the_script_takes_its_commands(page: str, line: str, tmp_path: Path) -> None:
    words = shlex.split(line, comments=True)
    at = next(number for number, word in enumerate(words) if word.endswith("sdxl_pretrain.py"))  # behind a launcher
    assert (ROOT / words[at]).is_file()
    parse([_here(word, tmp_path) for word in words[at + 1 :]])


def _here(word: str, folder: Path) -> str:
    if word.endswith("=/data/sets.toml"):
        file = folder / "sets.toml"
        file.write_text(f"[[datasets]]\nresolution = 1024\n[[datasets.subsets]]\nimage_dir = '{folder}'\n")
        return word.replace("/data/sets.toml", str(file))
    for place in PLACES:
        if word.endswith(f"={place}"):
            return word.replace(place, str(folder))
    return word


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


def test_both_readmes_have_the_same_commands_and_sections() -> None:
    english, chinese = ("\n".join(shlex.join(shlex.split(c, comments=True)) for c in commands(p)) for p in PAGES[:2])
    assert english == chinese
    heads = [re.findall(r"^## ", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE) for page in PAGES[:2]]
    assert len(heads[0]) == len(heads[1])


def test_the_readme_names_every_flag_of_the_launchers() -> None:
    for page in PAGES[:2]:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert [flag.names[0] for flag in flags.OWNED if f"--{flag.names[0]}" not in text] == []
