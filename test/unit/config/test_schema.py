"""Schemas of the files beside a run's own agree with what reads them, and name what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from json_schema import misfits

from difftrain.config.datasets.keys import KEYS_OF
from difftrain.config.datasets.reader import misfit
from difftrain.config.render.schema import SCHEMAS, schema
from difftrain.config.render.schema_other import KINDS

VALUES = [
    True, False, 0, 1, 2, -1, 0.5, 0.0, 1.5, 20000, "", "text", "single_middle", "multiple_overlapping", [], [512], [0],
    [0.5], [-1], [512, 768], [[512, 768]], [[512, 768, 1]], [[512]], ["a"], [[0.5, 2]], {}, {"a": 1},
]  # fmt: skip
PLACES = {"kohya": ("dataset_kohya", "[general]"), "diffusion_pipe": ("dataset", "")}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: repr(kind("?") if callable(kind) else kind)[:40])
def test_a_kind_of_value_is_judged_alike(kind: Any) -> None:
    differing = [value for value in VALUES if bool(kind(value)) != bool(list(misfits(KINDS[kind], value)))]
    assert differing == []


@pytest.mark.parametrize("file", PLACES)
def test_keys_above_all_datasets_are_judged_alike(file: Any) -> None:
    name, place = PLACES[file]
    top = schema(name)
    own = top["properties"]["general"]["properties"] if place else top["properties"]
    known = {key for key, row in KEYS_OF[file].items() if place in row.tables}
    assert known <= own.keys() and len(known) > 15
    for key in known:
        refused = KEYS_OF[file][key].status == "refused"
        for value in (each for each in VALUES if each != "" and not (refused and each == 1)):
            taken = misfit(file, place, key, value) is None
            assert not taken or not list(misfits(own[key], value)), (key, value)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("run", {"trainig": {}}, ".trainig additionalProperties"),
    ("run", {"model": {"type": "sdx"}}, ".model.type enum"),
    ("run", {"training": {"epochs": "four"}}, ".training.epochs anyOf"),
    ("sections", {"training": {"batchsize": 1}}, ".training.batchsize additionalProperties"),
    ("arguments", {"any": {"train_batchsize": 1}}, ".any.train_batchsize additionalProperties"),
    ("arguments", {"sdpa": "yes"}, ".sdpa type"),
    ("dataset", {"directory": [{"mask_path": "masks"}]}, ".directory[0] anyOf"),
    ("dataset", {"resolutions": [512]}, " anyOf"),
    ("dataset_kohya", {"datasets": [{"resolution": 512}]}, ".datasets[0].subsets required"),
    ("dataset_kohya", {"general": {"keep_tokens": -1}, "datasets": []}, ".general.keep_tokens minimum"),
]
RIGHT: list[tuple[str, dict[str, Any]]] = [
    (
        "run",
        {"output_dir": "out", "dataset": "data.toml", "epochs": 4, "model": {"type": "sdxl", "diffusers_path": "m"}},
    ),
    ("run", {"output": {"output_dir": "out"}, "optimizer": {"type": "adamw", "lr": 1e-4, "some_argument_of_it": [1]}}),
    ("arguments", {"pretrained_model_name_or_path": "m", "more": {"train_batch_size": 4, "optimizer_args": ["a=1"]}}),
    ("dataset", {"datasets": [{"root": "pictures", "num_repeats": 0.5}], "resolutions": [512, [1280, 720]]}),
    ("dataset_kohya", {"datasets": [{"resolution": [512, 768], "subsets": [{"image_dir": "a", "num_repeats": 2}]}]}),
]


@pytest.mark.parametrize(("name", "value", "where"), WRONG)
def test_what_is_wrong_is_found(name: str, value: dict[str, Any], where: str) -> None:
    assert where in list(misfits(schema(name), value))


@pytest.mark.parametrize(("name", "value"), RIGHT)
def test_what_is_right_is_taken(name: str, value: dict[str, Any]) -> None:
    assert list(misfits(schema(name), value)) == []


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_says_what_it_is(name: str) -> None:
    made = schema(name)
    assert made["$id"].endswith(f":{name}") and "draft-07" in made["$schema"] and made["title"]
    assert "prefixItems" not in repr(made)


def test_families_are_named_in_full() -> None:
    kind = schema("run")["properties"]["model"]["properties"]["type"]
    assert dict(zip(kind["enum"], kind["x-taplo"]["docs"]["enumValues"], strict=True))["sd3"] == "SD3"
