"""Names that other trainers use are answered with ours; a name of ours is never among those that are looked up."""

from __future__ import annotations

from pathlib import Path

import pytest

from difftrain.config.layers import keys_of
from difftrain.config.parse_flags import parse
from difftrain.config.parse_keys import parse as parse_keys
from difftrain.config.schema.names import nearest
from difftrain.config.schema.validate import fields
from difftrain.config.spellings.keys import TABLES
from difftrain.config.spellings.other_names import NAMES, meant, meant_key
from difftrain.contracts import ConfigFault


def test_every_name_means_one_field_that_there_is() -> None:
    names = [name for each in NAMES.values() for name in each]
    assert len(names) == len(set(names))
    assert set(NAMES) <= set(fields())


@pytest.mark.parametrize("path", NAMES)
def test_what_is_named_is_taken(path: str) -> None:
    """The key that is suggested stands in the table that is suggested with it."""
    for name in NAMES[path]:
        assert meant(name).split()[-1]
        table, _, key = meant_key(name).removeprefix("here it is ").rpartition("] ")
        assert key in keys_of(table.removeprefix("[")), name
        assert table.removeprefix("[") in ("", *TABLES)


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("--batch_size=4", "--train_batch_size"),
        ("--lr=1e-5", "--learning_rate"),
        ("--checkpointing-steps=10", "--save_every_n_steps"),
        ("--train_bach_size=4", "--train_batch_size"),  # a slip is still guessed at
    ],
)
def test_the_flag_that_is_meant_is_named(given: str, right: str) -> None:
    with pytest.raises(ConfigFault) as caught:
        parse([given])
    fault = next(each for each in caught.value.faults if each.where == given.partition("=")[0])
    assert right in fault.remedy


def test_the_key_that_is_meant_is_named_with_its_table(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[training]\nlearning_rate = 1e-4\n")
    with pytest.raises(ConfigFault) as caught:
        parse_keys(["--config", str(file)])
    fault = next(each for each in caught.value.faults if each.where == f"{file} [training] learning_rate")
    assert "[optimizer] lr" in fault.remedy


@pytest.mark.parametrize(
    ("word", "names", "found"),
    [
        ("AdamW8", ("AdamW", "AdamW8bit", "Lion"), "AdamW8bit"),
        ("adamv", ("AdamW", "AdamW8bit"), "AdamW"),
        ("Adam", ("AdamW", "AdamW8bit"), "AdamW"),  # two begin so
        ("zzz", ("AdamW",), ""),
    ],
)
def test_a_name_that_was_begun_is_meant_first(word: str, names: tuple[str, ...], found: str) -> None:
    assert nearest(word, names) == found
