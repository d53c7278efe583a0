"""Every command of the README and the quick start is one that its script takes, and every link leads somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from difftrain.config.layers import Layer, read_file
from difftrain.config.parse_flags import parse
from difftrain.config.parse_keys import scan
from difftrain.launch import flags, machines, main
from difftrain.launch.machines import Devices

ROOT = Path(__file__).resolve().parents[3]
PAGES = ["README.md", "README.zh.md", *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
PLACES = ("/models/sdxl-base-1.0", "/models/sdxl", "/models/sd3_light", "/data/laion", "/data/pictures")


def commands(page: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


LINES = [(page, line) for page in PAGES for line in commands(page) if "…" not in line]
SCRIPT = re.compile(r"(pretrain_full|cache)_(1m_1p|1m_8p|1m_np|nm_np)_(\w+)\.sh")
LAUNCHES = [entry for entry in LINES if SCRIPT.search(entry[1])]
TRAIN = [entry for entry in LINES if re.search(r"(?<!\w)(train|sd3_light_pretrain)\.py\s+--", entry[1])]
DOORS = [entry for entry in LINES if re.search(r"sdxl_pretrain\.py\s+--", entry[1])]


def test_there_are_commands() -> None:
    assert len(LAUNCHES) >= 20 and DOORS


@pytest.mark.parametrize(("page", "line"), LAUNCHES)
def test_launchers_take_their_commands(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = shlex.split(line, comments=True)
    script = words[words.index("bash") + 1]
    assert (ROOT / script).is_file()
    stage, layout, name = SCRIPT.search(script).groups()
    argv = [_here(word, tmp_path) for word in words[words.index("bash") + 2 :]]
    given = flags.read(argv, {})
    where = machines.where(layout, main.LAYOUTS[layout], given, Devices("npu", 8), {})
    recipe = main.choose(name if stage == "pretrain_full" else f"{name}_cache", given, where)
    assert not [*given.faults, *where.faults, *recipe.faults]
    door = recipe.line(given, tmp_path / "out")
    assert recipe.door_faults(recipe.checkable(door)) == []


@pytest.mark.parametrize(("page", "line"), DOORS)
def test_the_script_takes_its_commands(page: str, line: str, tmp_path: Path) -> None:
    words = shlex.split(line, comments=True)
    at = next(number for number, word in enumerate(words) if word.endswith("sdxl_pretrain.py"))  # behind a launcher
    assert (ROOT / words[at]).is_file()
    parse([_here(word, tmp_path) for word in words[at + 1 :]])


@pytest.mark.parametrize(("page", "line"), TRAIN)
def test_the_toml_door_knows_its_commands(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    at = next(number for number, word in enumerate(words) if word.endswith(".py"))
    said = Layer()
    options, keys = scan(words[at + 1 :], said)
    said.take(keys)
    assert not said.faults and (ROOT / words[at]).is_file()
    recipe = ROOT / options["config"]
    assert not recipe.is_relative_to(ROOT / "configs") or not read_file(recipe).faults


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
