"""Every setting is read by code: by its name outside config/, where a table of names is read in a test, or in rates."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from families import config, made
from parsed import parsed

from difftrain.config.reads import LATER, recorded
from difftrain.config.schema.rates import part_rates, second_factor_ratio
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import fields
from difftrain.models.metadata import described
from difftrain.models.registry import FAMILIES
from difftrain.models.weights.find import _tokenizer_dirs, parts_elsewhere

LIBRARY = Path(__file__).parents[2] / "library" / "difftrain"


def attributes(path: Path) -> set[str]:
    return {node.attr for node in ast.walk(parsed(path)) if isinstance(node, ast.Attribute)}


READ = {
    path.relative_to(LIBRARY).as_posix(): attributes(path)
    for path in LIBRARY.rglob("*.py")
    if not path.relative_to(LIBRARY).as_posix().startswith(("config/", "testing/"))
}

# they write down what was set, which alone does nothing for the user who set it, but for settings of what is written
WRITERS = ("report/", "models/metadata.py", "train/estimate/dry_run.py")
OF_WRITING = ("logging.", "metadata.", "training.performance")


def read_by_name() -> set[str]:
    """Return the fields that are read through tables of names: by doing so."""
    cfg = TrainConfig.model_validate({"model": {"train_text_encoder": True}})
    with recorded() as written:
        described(cfg, "title", 0.0, {})
    with recorded() as reads:
        part_rates(cfg)
        adapted = TrainConfig.model_validate({"adapter": {"type": "lora"}})
        for part in ("unet", "text_encoder_1"):
            second_factor_ratio(adapted, part)
        for name in FAMILIES:
            family = made(config(name))
            parts_elsewhere(family.cfg, family)
            _tokenizer_dirs(family.cfg, family, None, {})
    return reads | {path for path in written if path.startswith(OF_WRITING)}


def test_every_setting_is_read_by_code() -> None:
    anywhere = set().union(*READ.values())
    acted_on = set().union(*(names for file, names in READ.items() if not file.startswith(WRITERS)))
    left = {
        path
        for path in fields()
        if path.partition(".")[2] not in (anywhere if path.startswith(OF_WRITING) else acted_on)
    } - read_by_name()
    assert not left, sorted(left)


@pytest.mark.parametrize("path", LATER)
def test_what_is_read_later_is_read_where_the_table_says(path: str) -> None:
    section, _, field = path.partition(".")
    names = {field} if field else {each.partition(".")[2] for each in fields() if each.startswith(f"{section}.")}
    assert names, "no such section or field"
    for file in LATER[path].split(", "):
        assert READ[file] & names, f"{file} reads none of {path}"
