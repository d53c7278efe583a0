"""A family's row and its class say the same, and what they name exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import diffusers
import pytest
from families import FAMILIES, NOT_ON_THE_KIT, ON_KIT, ORACLES, Tiny, config, made, needs_blocks

from difftrain.config.schema.validate import default_of
from difftrain.models import build, passes
from difftrain.models.export import key_map
from difftrain.models.text.encode import features_of
from difftrain.models.weights import detect


def test_the_list_of_those_that_are_not_on_the_kit_is_right() -> None:
    assert set(FAMILIES) - set(ON_KIT) == NOT_ON_THE_KIT


def test_diffusers_own_forward_is_known_of_every_family() -> None:
    assert set(ON_KIT) <= set(ORACLES), "say in test/support/family_oracles/ how diffusers runs it"


@pytest.mark.parametrize(
    "module", ["difftrain.models.registry", "difftrain.models.facts", "difftrain.config.schema.families"]
)
def test_rows_and_facts_are_read_without_torch(module: str) -> None:
    code = f"import sys, {module}; assert not {{'torch', 'diffusers', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2] / "library")


def test_row_and_class_name_the_same(name: str, tiny: Tiny) -> None:
    row, family = FAMILIES[name], tiny.family
    assert family.name == name and family.row is row
    assert set(tiny.parts.frozen) | {row.denoiser} == set(row.parts)
    assert [text.part for text in family.texts] == [part for part in row.parts if part.startswith("text_encoder")]
    assert len(row.encoders) == len(family.texts)
    assert {text.part for text in family.texts} <= set(row.parts)
    described = [
        features_of(family.texts, place, 1, family.source.complete(text.part), "float32")
        for place, text in enumerate(family.texts, start=1)
    ]
    # masks are kept as they are: the row has what may be stored in another dtype
    stored = tuple(name for each in described for name, feature in each.items() if feature.dtype == "float32")
    assert stored == row.text_features
    assert family.token == row.sizes_multiple.get("tiny", row.multiple)
    if family.blocks:  # else there are no tokens: a network says itself of what sizes are multiples
        assert family.token == family.vae.factor * family.patch
    assert all(build.class_of(kind) is not None for kind in row.parts.values())
    in_diffusers = hasattr(diffusers, row.pipeline)
    assert in_diffusers == (row.pipeline_module == "diffusers") == (ORACLES[name].pipeline is None)


@pytest.mark.usefixtures("no_positions")
def test_every_size_builds_and_agrees(name: str) -> None:
    for size in FAMILIES[name].sizes:
        shipped = resources.files("difftrain.models").joinpath("sizes_shipped", f"{name}.{size}.json")
        assert shipped.is_file(), f"the row of {name} lists the size {size}, which no file describes"
        content = json.loads(shipped.read_text("utf-8"))
        assert content["family"] == name and content["name"] == size
        family = made(config(name, init_from_config=size))
        for part in family.parts:
            assert sum(each.numel() for each in family.source.build(part).parameters()) == family.source.count(part)


def test_rows_of_agreement_name_arguments_that_exist(tiny: Tiny) -> None:
    for row in tiny.family.agree:
        part, _, argument = row.where.partition(".")
        assert argument in tiny.family.source.complete(part), row.where
        assert row.misfit({each: tiny.family.source.complete(each) for each in tiny.family.parts}) is None


def test_options_name_fields_that_exist(name: str, tiny: Tiny) -> None:
    for option in tiny.family.options:
        default_of(option.field)  # raises where there is none
        assert option.meaning and FAMILIES[name].has(option.field)


def test_adapters_have_layers_to_go_to(tiny: Tiny) -> None:
    needs_blocks(tiny)
    linear = [
        f"{place}.{name}"
        for place, block in passes.blocks_of(tiny.family, tiny.net)
        for name, module in block.named_modules()
        if type(module).__name__ == "Linear"
    ]
    for target in tiny.family.lora.targets:
        assert any(each.endswith(f".{target}") for each in linear), target


def test_patterns_find_parameters(tiny: Tiny) -> None:
    names = [name for name, _ in tiny.net.named_parameters()]
    last = max(0, sum(1 for _ in passes.blocks_of(tiny.family, tiny.net)) - 1)
    for pattern in filter(None, (tiny.family.zero, tiny.family.unread.replace("{last}", str(last)))):
        assert any(re.search(pattern, name) for name in names), pattern


def test_the_table_of_keys_names_every_tensor_once(tiny: Tiny) -> None:
    tables = [part for part in tiny.family.parts if tiny.family.rule(part) is not None]
    if not tables:
        pytest.skip("its tensors are called alike in every layout")
    for part in tables:
        shapes = {name: tuple(value.shape) for name, value in tiny.family.source.build(part).state_dict().items()}
        places = key_map(tiny.family, part)
        lengths = {name: (shape or (1,))[0] for name, shape in shapes.items()}
        for key, names in places.members.items():
            rows = [places.pieces[name].start for name in names]
            assert rows == [sum(lengths[each] for each in names[:i]) for i in range(len(names))], key
        assert sum(len(names) for names in places.members.values()) == len(shapes), part


def test_blocks_are_all_lists_that_recur(tiny: Tiny) -> None:
    needs_blocks(tiny)
    units = tiny.family.units(tiny.parts)
    assert len(units) == len({id(block) for _, block in units}) >= 2
    for place, block in units:
        assert tiny.parts.root.get_submodule(place) is block


def test_a_file_of_its_denoiser_alone_is_of_no_other_network(name: str, tiny: Tiny) -> None:
    if tiny.family.infer is None:
        pytest.skip("no file of its denoiser alone tells its sizes")
    shapes = {key: tuple(value.shape) for key, value in tiny.net.state_dict().items()}
    stored = key_map(tiny.family, tiny.family.denoiser).stored if tiny.family.keys else shapes
    kinds = {FAMILIES[each.name].parts[FAMILIES[each.name].denoiser] for each in detect._fitting(stored)}
    assert kinds <= {FAMILIES[name].parts[tiny.family.denoiser]}, "a network of another class has these names too"
