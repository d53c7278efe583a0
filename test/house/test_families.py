"""A family is one row and one file or folder: nobody outside models/ spells its name, or imports what is its own."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine_kind import processor_s
from parsed import parsed
from refusals import names

from difftrain.config import TrainConfig
from difftrain.config.schema.families import FIELDS, encoder_fields, family_titled, multiple_of, takes, why_not
from difftrain.config.schema.names import FLOW_SAMPLERS
from difftrain.config.schema.validate import build, choices_of, fields
from difftrain.models.registry import DEFAULT, FAMILIES, LATER, make_family
from difftrain.models.row import LAYOUTS

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "library"
MODELS = LIBRARY / "difftrain" / "models"
NAMES = {*FAMILIES, *LATER}
SCANNED = sorted(
    path for root in (LIBRARY, ROOT / "sd_scripts_xl", ROOT / "third_patch") for path in root.rglob("*.py")
    if not path.is_relative_to(MODELS)
)  # fmt: skip
# files that still name a family -> why. A file that no longer does must leave this list.
STILL = {
    "library/difftrain/cli/__init__.py": "commands whose names say which family they are for",
    "library/difftrain/cli/train.py": "commands whose names say which family they are for",
    "library/difftrain/launch/recipes.py": "kohya's recipe, by the name of its launcher script",
}


def mentions(tree: ast.AST) -> Iterator[str]:
    """Yield what of a file names a family: strings but docstrings, and imports of its modules."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body and isinstance(node.body[0], ast.Expr)
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            if node.value in NAMES or of_family(node.value.partition(":")[0]):
                yield f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Import):
            yield from (f"line {node.lineno}: import {each.name}" for each in node.names if of_family(each.name))
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                if of_family(f"{node.module}.{each.name}"):
                    yield f"line {node.lineno}: from {node.module} import {each.name}"
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in FAMILIES:
                yield f"line {node.lineno}: {name}"


def of_family(module: str) -> bool:
    """Tell whether a module is a family's own."""
    return module.startswith("difftrain.models.families.") and module.split(".")[3] in NAMES


def test_the_rule_itself_bites() -> None:
    found = list(mentions(ast.parse(
        '"""sd3"""\nfrom difftrain.models.families.sd3 import text\nfrom difftrain.models.families import flux\nimport difftrain.models.families.sdxl\n'
        'a = "sd3"\nb = "SD3 is fine"\nc = wan.load\nd = "difftrain.models.families.flux:Flux"\nfrom difftrain.models import vision\n'
    )))  # fmt: skip
    assert [int(each.split()[1].strip(":")) for each in sorted(found)] == [2, 3, 4, 5, 7, 8]


def test_no_family_is_named_outside_models() -> None:
    wrong = []
    for path in SCANNED:
        name, found = str(path.relative_to(ROOT)), list(mentions(parsed(path)))
        if name not in STILL:
            wrong += [f"{name}: {mention}" for mention in found]
        elif not found:
            wrong.append(f"{name} names no family any more: take it off the list")
    assert not wrong, "ask the family's row (config/schema/families.py) or the family itself:\n" + "\n".join(wrong)


def test_what_still_names_a_family_is_there() -> None:
    assert set(STILL) <= {str(path.relative_to(ROOT)) for path in SCANNED}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_sound(name: str) -> None:
    row = FAMILIES[name]
    module, _, attribute = row.target.partition(":")
    assert of_family(module) and module.split(".")[3] == name and attribute.isidentifier()
    assert family_titled(row.title) == name and name not in LATER
    homes = {kind.partition(":")[0] for kind in row.parts.values()}
    assert homes <= {"diffusers", "transformers", f"difftrain.models.networks.{name}"}
    assert len(row.encoders) == sum(part.startswith("text_encoder") for part in row.parts)
    assert set(row.layouts) <= set(LAYOUTS) and set(row.sizes_multiple) <= set(row.sizes) and row.multiple % 8 == 0
    for path in (*row.takes, *row.reasons):
        known = {*fields(), *(each.partition(".")[0] for each in fields())}
        assert path in known and (path in FIELDS or path.partition(".")[0] in FIELDS), path
    assert not any(row.has(path) for path in row.reasons)
    values: dict[str, dict[str, object]] = {}
    for path, value in row.defaults.items():
        section, _, field = path.partition(".")
        values.setdefault(section, {})[field] = value
        assert path not in FIELDS or row.has(path), path
    assert not build(values)[1]
    assert (row.objective == "flow") == (row.defaults.get("sample.sampler") in FLOW_SAMPLERS)


def test_every_row_of_the_table_of_fields_is_somebodys() -> None:
    every = {*fields(), *(each.partition(".")[0] for each in fields())}
    for path in FIELDS:
        assert path in every and any(row.has(path) for row in FAMILIES.values()), path


def test_choices_are_the_rows() -> None:
    assert choices_of("model.family") == tuple(FAMILIES) and TrainConfig().model.family == DEFAULT == next(
        iter(FAMILIES)
    )
    for name in FAMILIES:
        assert TrainConfig.model_validate({"model": {"family": name}}).model.family == name


def test_what_a_family_takes() -> None:
    sdxl, flux = (TrainConfig.model_validate({"model": {"family": name}}) for name in ("sdxl", "flux"))
    assert takes(sdxl, "noise.offset") and not takes(sdxl, "flow.shift") and takes(sdxl, "save.output_dir")
    assert takes(flux, "flow.shift") and takes(flux, "model.guidance") and not takes(flux, "model.num_layers")
    what, remedy = why_not("flux", "model.num_layers")
    assert names(what, "sd3", "Flux.1") and 'type = "sd3"' in remedy
    assert names(why_not("sd3", "model.guidance")[0], "flux", "SD3")
    assert names(why_not("flux", "noise.offset")[0], "SDXL", "flux")


@pytest.mark.parametrize(("family", "size", "multiple"), [
    ("sdxl", None, 32), ("sdxl", "tiny", 32), ("sdxl", "demo", 16), ("sdxl", "own.json", 8), ("sd3", None, 16),
    ("sd3", "demo", 8), ("flux", "tiny", 16),
])  # fmt: skip
def test_multiples_are_those_of_the_sizes(family: str, size: str | None, multiple: int) -> None:
    cfg = TrainConfig.model_validate({"model": {"family": family, "init_from_config": size}})
    assert multiple_of(cfg) == multiple


def test_the_models_have_these_multiples() -> None:
    for name in ("sdxl", "sd3"):
        row = FAMILIES[name]
        for size in row.sizes:
            cfg = TrainConfig.model_validate({"model": {"family": name, "init_from_config": size}})
            assert make_family(cfg).features.size_multiple == row.sizes_multiple.get(size, row.multiple), size


def test_text_encoders_by_their_kind() -> None:
    assert encoder_fields(FAMILIES["flux"], "t5") == ("model.text_encoder2",)
    assert encoder_fields(FAMILIES["sd3"], "t5") == ("model.text_encoder3",)
    assert encoder_fields(FAMILIES["flux"], "clip") == ("model.text_encoder1",)
    assert encoder_fields(FAMILIES["sd3"], "clip") == ("model.text_encoder1", "model.text_encoder2")
    assert encoder_fields(FAMILIES["qwen_image"], "llm") == ("model.text_encoder1",)
    assert encoder_fields(FAMILIES["sdxl"], "t5") == ()


def test_the_command_lists_them_without_torch(tmp_path: Path) -> None:
    probe = "import sys, atexit; from difftrain.cli import main; atexit.register(lambda: print('TORCH', 'torch' in sys.modules))"
    line = [sys.executable, "-c", f"{probe}\nsys.exit(main(['families', '--json']))"]
    seconds, printed = processor_s(line, cwd=LIBRARY)
    text, _, last = printed.rstrip().rpartition("\n")
    assert last == "TORCH False"
    found = {each["name"]: each for each in json.loads(text)}
    assert list(found) == list(FAMILIES)
    assert all(
        {"name", "title", "parts", "tasks", "multiple", "sizes", "trains"} <= set(each) for each in found.values()
    )
    assert found["sdxl"]["multiple"] == 32 and found["sdxl"]["trains"] == ["full", "adapter", "encoders", "fp8"]
    assert seconds < 0.5


def test_people_read_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    from difftrain.cli import main

    assert main(["families"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name}: {row.title}" in text for name, row in FAMILIES.items()) and all(each in text for each in LATER)
    assert main(["families", "x"]) == 2
