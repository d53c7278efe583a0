"""Figures of releases: a family that trains has them, and they are what its sizes give when they are counted again."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from families import FAMILIES, ORACLES

from difftrain.config.render.model_pages import ENGLISH, pages_of, releases_of
from difftrain.models.build import build

ROOT = Path(__file__).resolve().parents[2]
MODELS, ADDING = ROOT / "docs" / "models", ROOT / "docs" / "adding" / "family.md"
COUNTED_AGAIN = (("sd1", "1.5"),)  # all that is counted; of larger ones it takes ten seconds and more


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Load benchmarks/releases.py."""
    spec = importlib.util.spec_from_file_location("releases", ROOT / "benchmarks" / "releases.py")
    assert spec and spec.loader
    module, before = importlib.util.module_from_spec(spec), list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_a_family_has_figures(name: str) -> None:
    releases = releases_of(name).get("releases", {})
    assert releases, f"say what was released in models/releases/{name}.json, as its neighbours do"
    lacking = [key for key, release in releases.items() if "counted" not in release]
    assert not lacking, f"python benchmarks/releases.py {name}"


def test_a_family_has_a_recipe_and_a_page(name: str) -> None:
    assert (ROOT / "configs" / name / "tiny.toml").is_file()
    pages = pages_of(name)
    assert pages and all((ROOT / "docs" / page).is_file() for page in pages), f"docs/models/{name}.md"


@pytest.mark.parametrize("index", ["docs/README.md", "docs/zh/README.md"])
def test_both_indexes_link_every_page_of_a_model(index: str) -> None:
    text = (ROOT / index).read_text(encoding="utf-8")
    names = [page.name for page in MODELS.glob("*.md") if page != ROOT / "docs" / ENGLISH.page]
    assert [name for name in names if f"models/{name})" not in text] == []


def test_every_page_of_a_model_is_some_familys() -> None:
    pages = {f"models/{page.name}" for page in (ROOT / "docs" / "models").glob("*.md")} - {ENGLISH.page}
    assert pages == {page for name in FAMILIES for page in pages_of(name) if page.startswith("models/")}


@pytest.mark.parametrize(
    "page", sorted({*MODELS.glob("*.md")} - {ROOT / "docs" / ENGLISH.page}), ids=lambda page: page.stem
)
def test_pages_of_models_have_the_same_headings_in_the_same_order(page: Path) -> None:
    found = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    listed = re.search(
        r"headings of its neighbours in their order \((.+?);", ADDING.read_text(encoding="utf-8"), re.DOTALL
    )
    assert listed, "the page on adding a family lists them"
    headings = re.split(r",\s+", listed[1])
    shared = [heading for heading in found if heading in headings]
    assert shared == sorted(shared, key=headings.index) and {headings[0], headings[1], headings[-1], "Memory"} <= {
        *shared
    }


def test_what_was_compared_is_what_its_oracle_compares(name: str, script: ModuleType) -> None:
    content = releases_of(name)
    if "compared" not in content:
        pytest.skip("nothing is counted of it")
    assert content["compared"] == script.compared(name), f"python benchmarks/releases.py {name}"


@pytest.mark.usefixtures("no_positions")
def test_parameters_are_those_of_the_denoiser(name: str, script: ModuleType) -> None:
    row, oracle = FAMILIES[name], ORACLES[name]
    for key, release in releases_of(name).get("releases", {}).items():
        sizes = script.sizes_of(name, release)[row.denoiser]
        net = build(row.parts[row.denoiser], row.denoiser, sizes)
        if "counted" in release:
            assert sum(weight.numel() for weight in net.parameters()) == release["counted"]["parameters"], key
        if key in oracle.released:
            theirs = build(row.parts[row.denoiser], row.denoiser, oracle.released[key][0])
            shapes = [{name: value.shape for name, value in each.named_parameters()} for each in (net, theirs)]
            assert shapes[0] == shapes[1], key


@pytest.mark.parametrize(("family", "key"), COUNTED_AGAIN)
def test_figures_are_counted_again(family: str, key: str, script: ModuleType, tmp_path: Path) -> None:
    release = releases_of(family)["releases"][key]
    found, written = script.counted(family, release, tmp_path), release["counted"]
    assert {name: found[name] for name in ("parameters", "flops")} == {
        name: written[name] for name in ("parameters", "flops")
    }
    assert found["standing"] == written["standing"]
    for key in ("step", *script.LORA):
        assert found[key] == pytest.approx(written[key], rel=0.02), key
