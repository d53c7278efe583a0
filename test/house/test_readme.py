"""Every command of the README and the quick start is one that its script takes, and every link leads somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from difftrain.config.layers import Layer, read_file
from difftrain.config.parse_flags import parse
from difftrain.config.parse_keys import scan
from difftrain.config.parse_text_to_image import WeightsIdentity
from difftrain.config.parse_text_to_image import parse as parse_example
from difftrain.launch import flags, machines, main
from difftrain.launch.machines import Devices

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "README.zh.md", *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
PLACES = ("/models/sdxl-base-1.0", "/models/sdxl", "/models/sd3_light", "/data/laion", "/data/images")


def commands(page: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


LINES = [(page, line) for page in PAGES for line in commands(page) if "…" not in line]
SCRIPT = re.compile(r"(pretrain_full|train_full|cache)_(1m_1p|1m_8p|1m_np|nm_np)_([\w-]+)\.sh")
LAUNCHES = [entry for entry in LINES if SCRIPT.search(entry[1])]
TRAIN = [entry for entry in LINES if re.search(r"(?<!\w)(train|sd3_light_pretrain)\.py\s+--", entry[1])]
EXAMPLE = [entry for entry in LINES if re.search(r"train_text_to_image\.py\s+--", entry[1])]
DOORS = [entry for entry in LINES if re.search(r"sdxl_pretrain\.py\s+--", entry[1])]


def test_there_are_commands() -> None:
    assert len(LAUNCHES) >= 20 and DOORS and EXAMPLE


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
    recipe = main.choose(f"{name}_cache" if stage == "cache" else name, given, where)
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


@pytest.mark.parametrize(("page", "line"), EXAMPLE)
def test_the_script_of_diffusers_flags_takes_its_commands(page: str, line: str, tmp_path: Path) -> None:
    words = shlex.split(line, comments=True)
    at = next(number for number, word in enumerate(words) if word.endswith("train_text_to_image.py"))
    assert (ROOT / words[at]).is_file()
    parse_example([_here(word, tmp_path) for word in words[at + 1 :]], lambda text: WeightsIdentity("sd1", "epsilon"))


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
    for target in LINK.findall(text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


def test_both_readmes_have_the_same_commands_and_sections() -> None:
    english, chinese = ("\n".join(shlex.join(shlex.split(c, comments=True)) for c in commands(p)) for p in PAGES[:2])
    assert english == chinese
    heads = [re.findall(r"^## ", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE) for page in PAGES[:2]]
    assert len(heads[0]) == len(heads[1])


@pytest.mark.parametrize("page", ["docs/launch_scripts.md", "docs/zh/launch_scripts.md"])
def test_the_page_of_the_launch_scripts_names_every_flag_of_theirs(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [flag.names[0] for flag in flags.OWNED if f"--{flag.names[0]}" not in text] == []


def test_the_two_commands_that_set_up_everything_open_both_readmes() -> None:
    for page in PAGES[:2]:
        first = [shlex.split(line, comments=True) for line in commands(page)[:2]]
        assert first == [["bash", "test/pretrain_full_1m_1p_sdxl.sh"], ["bash", "test/run_tests.sh"]], page


@pytest.mark.parametrize("folder", ["docs", "docs/zh"])
def test_every_page_is_reached_from_its_index(folder: str) -> None:
    index = ROOT / folder / "README.md"
    linked = {(index.parent / target).resolve() for target in LINK.findall(index.read_text(encoding="utf-8"))}
    nested = [index.parent / "zh"] if folder == "docs" else []
    pages = [page for page in index.parent.rglob("*.md") if not any(page.is_relative_to(each) for each in nested)]
    assert len(pages) > 5 and sorted(page.name for page in {*pages} - linked - {index}) == []
