"""docs/adding/family.md: its blocks, put where it says, make a family that trains and says what diffusers says."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from families import FAMILIES, Tiny, config

from difftrain.models import flops, registry

NAME = "auraflow"
TEXT = (Path(__file__).parents[2] / "docs" / "adding" / "family.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|json)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Put the blocks of the page in their places, for the tests of this file."""
    (_, code), (_, row), (_, sizes), (_, oracle) = BLOCKS
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, NAME, eval(f"{{{row}}}", vars(registry))[NAME])
        module = types.ModuleType(f"difftrain.models.families.{NAME}")
        patch.setitem(sys.modules, module.__name__, module)
        exec(compile(code, "family.md", "exec", dont_inherit=True), module.__dict__)
        known = types.ModuleType(f"family_oracles.{NAME}")
        exec(compile(oracle, "family.md", "exec", dont_inherit=True), known.__dict__)
        patch.setitem(families.ORACLES, NAME, known.ORACLE)
        file = tmp_path_factory.mktemp(NAME) / "tiny.json"
        file.write_text(sizes)
        flux = config(
            "flux", init_from_config=str(file)
        )  # the names that a configuration takes were read at its import
        yield flux.model_copy(update={"model": flux.model.model_copy(update={"family": NAME})})


@pytest.fixture(scope="module")
def tiny(example: Any) -> Tiny:
    """The page's tiny model."""
    return families.trained_once(families.loaded(example))


def test_the_page_has_the_blocks_that_it_speaks_of() -> None:
    assert [kind for kind, _ in BLOCKS] == ["python", "python", "json", "python"]
    assert NAME in registry.LATER, "it is a family by now: the page needs another example"
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    there = {path.stem for path in Path(__file__).parent.glob("test_family_*.py")}
    assert named == there, "the table names every file of the suite"


def test_its_row_and_class_agree(tiny: Tiny) -> None:
    row, content = FAMILIES[NAME], json.loads(BLOCKS[2][1])
    assert set(row.parts) | {"family", "name", "init"} == set(content)
    assert tiny.family.token == row.multiple
    assert [text.part for text in tiny.family.texts] == [part for part in row.parts if part.startswith("text_encoder")]


@pytest.mark.parametrize("captions", [("a cat on a red table", "two dogs"), ("", "a cat, " * 90)])
def test_its_pass_is_diffusers_forward(tiny: Tiny, captions: tuple[str, ...]) -> None:
    inputs = tiny.family.inputs(families.batch_of(tiny.family, families.bucket_of(NAME), captions), tiny.parts)
    with torch.no_grad():
        velocity = families.own_pass(tiny, inputs)
        assert torch.equal(velocity, families.diffusers_forward(tiny, inputs))
        chain = tiny.family.chain(tiny.parts.root)
        carry, layout = chain.enter(inputs)
        for number in range(len(chain.units)):
            carry = chain.unit(number, carry, layout)
        assert torch.equal(chain.leave(carry, layout)[0], velocity)


def test_it_trains(example: Any) -> None:
    tiny = families.loaded(example)
    (group,) = tiny.family.param_groups(tiny.parts.root)
    optimizer = torch.optim.AdamW([each for _, each in group.named_params], lr=group.lr)
    losses = []
    for _ in range(3):
        loss = tiny.loss()
        optimizer.zero_grad()
        loss.backward()
        assert [name for name, each in group.named_params if each.grad is None or not each.grad.any()] == []
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[1] < losses[0]


def test_its_export_is_a_pipeline_with_the_same_texts(tiny: Tiny, tmp_path: Path) -> None:
    pipe = families.pipeline_of(families.exported(tiny, tmp_path / "folder"), NAME)
    assert type(pipe).__name__ == FAMILIES[NAME].pipeline
    weights = pipe.transformer.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in tiny.net.state_dict().items())
    captions = ("", "a cat " * 40, 'a sign that says "open"')
    prompts = families.ORACLES[NAME].prompts
    assert prompts is not None
    with torch.no_grad():
        theirs = prompts(pipe, list(captions), families.T5_LENGTH)["tokens"]
    ours = tiny.family.text(families.batch_of(tiny.family, families.bucket_of(NAME), captions), tiny.parts)["tokens"]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_its_adapters_and_its_flops(tiny: Tiny) -> None:
    names = [name for name, each in tiny.net.named_modules() if type(each).__name__ == "Linear"]
    assert all(any(name.endswith(f".{target}") for name in names) for target in tiny.family.lora.targets)
    flops._known.clear()
    assert tiny.family.flops_per_sample(tiny.parts, families.bucket_of(NAME)) > 0
