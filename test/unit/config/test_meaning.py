"""What a setting means stands once, at its field, and every door says it in its own spelling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from difftrain.config.render.schema import schema_of_files, schema_of_sections
from difftrain.config.schema.validate import choices_of, default_of, description_of, fields
from difftrain.config.spellings.flags import FLAGS
from difftrain.config.spellings.keys import KEYS, OPTIONS
from difftrain.config.spellings.row import Row
from difftrain.config.spellings.spelling import FIELD, field_meaning, fill_in, meaning
from difftrain.config.spellings.text_to_image import FLAGS as TEXT_TO_IMAGE

ROWS = (*FLAGS.values(), *TEXT_TO_IMAGE.values(), *KEYS, *OPTIONS.values())
OF_A_FIELD = [row for row in ROWS if row.to in set(fields())]


def descriptions(node: Any) -> Iterator[str]:
    """Yield every description of a schema."""
    for key, inner in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key == "description" and isinstance(inner, str):
            yield inner
        else:
            yield from descriptions(inner)


def test_every_field_says_what_it_means() -> None:
    for schema in (schema_of_sections(), schema_of_files()):
        bare = {
            f"{name}.{field}"
            for name, section in schema["$defs"].items()
            for field, told in section["properties"].items()
            if not told.get("description")
        }
        assert not bare and not [text for text in descriptions(schema) if FIELD.search(text)]


def test_every_key_of_the_schema_says_what_it_means() -> None:
    properties = schema_of_files()["properties"]
    assert not [name for name, told in properties.items() if "anyOf" not in told and not told.get("description")]
    inner = [
        (table, name, key) for table in properties for name, key in properties[table].get("properties", {}).items()
    ]
    assert len(inner) > 300 and not [(table, name) for table, name, key in inner if not key.get("description")]


def test_what_a_meaning_names_is_a_field_and_a_value_of_it() -> None:
    texts = [*(description_of(path) for path in fields()), *(row.help for row in ROWS)]
    named = [found.groups() for text in texts for found in FIELD.finditer(text)]
    assert len(named) > 50
    for path, value in named:
        assert path in set(fields()), path
        switched = isinstance(default_of(path), bool) and value in ("true", "false")
        assert value is None or switched or value in map(str, choices_of(path)), (path, value)


@pytest.mark.parametrize("row", OF_A_FIELD, ids=lambda row: f"{row.home}.{row.name}")
def test_a_row_with_a_help_of_its_own_says_something_else_than_its_field(row: Row) -> None:
    for door in ("kohya", "train"):
        assert not row.help or meaning(row, door) != field_meaning(row.to, door)


def test_a_meaning_is_spelt_as_the_door_spells_it() -> None:
    assert meaning(FLAGS["token_warmup_min"], "kohya").endswith("that --token_warmup_step begins with")
    assert field_meaning("captions.token_warmup_min", "train").endswith("that --captions.token_warmup_step begins with")
    assert meaning(FLAGS["cache_workers"], "kohya").endswith("unset: --max_data_loader_n_workers")
    text = "{model.prediction_type=v_prediction}, {training.full_precision=bf16}, {deepspeed.zero_stage=2}, {a|b} {{x}}"
    kohya = fill_in(text, lambda path, value: f"<{path} {value}>")
    assert kohya == (
        "<model.prediction_type v_prediction>, <training.full_precision bf16>, <deepspeed.zero_stage 2>, {a|b} {{x}}"
    )
    assert fill_in("{cache.latents=true} {model.vae_fp32=false}", lambda path, value: repr(value)) == "True False"
    zero = field_meaning("noise.zero_terminal_snr", "kohya"), field_meaning("noise.zero_terminal_snr", "train")
    assert [text.rpartition(" ")[2] for text in zero] == ["--v_parameterization", "--model.v_pred=true"]
