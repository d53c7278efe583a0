"""What makes two configurations one run, and what makes them two."""

from __future__ import annotations

import json
from typing import Any

import pytest

from difftrain.config.digest import FREE, NAMED, differences, digest, identity, without_empty
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import fields


def config(**changes: dict[str, Any]) -> TrainConfig:
    """Return a configuration with some fields changed: section -> field -> value."""
    values: dict[str, dict[str, Any]] = {
        "model": {"init_from_config": "tiny"},
        "data": {"dirs": ("/mnt/a/stars", "/mnt/a/moons"), "resolution": (64, 64)},
        "training": {"batch_size": 4, "seed": 1},
        "save": {"output_dir": "out"},
    }
    for section, table in changes.items():
        values.setdefault(section, {}).update(table)
    return TrainConfig.model_validate(values)


SAME = [
    {"data": {"workers": 0}},
    {"data": {"epoch_batches": "every"}},  # the plan's digest says so
    {"captions": {"allow_empty": True}},  # of which records there are it says so too
    {"data": {"dirs": ("/elsewhere/stars", "/elsewhere/moons/")}},
    {"data": {"cache_dir": "x", "verify": "full", "workers": 3}},
    {"training": {"batch_size": 2, "accumulation": 2}},
    {"training": {"gradient_checkpointing": True, "compile": True, "threads": 3, "performance": True}},
    {"training": {"ddp_timeout_min": 3, "fused_attention": True, "attention": "sdpa"}},
    {"save": {"output_dir": "other", "every_n_steps": 7, "state": True, "resume": "auto"}},
    {"sample": {"prompts": "p.txt", "every_n_steps": 1}},
    {"logging": {"log_every": 10}},
    {"metadata": {"title": "x"}},
    {"validation": {"every_n_steps": 3}},
    {"cache": {"latents_to_disk": True, "text": True, "trust": True, "preload": True, "segment_gib": 0.5}},
    {"cache": {"skip_check": True, "only": True, "regenerate": True, "batch_size": 3, "workers": 0, "copy_gib": 1}},
    {"cache": {"latents_dtype": "fp8", "text_dtype": "fp8", "dtypes": {"pooled": "fp16"}}},  # of nothing that is cached
    {"cache": {"shuffle_num": 3}},  # of captions that are drawn nowhere
]


@pytest.mark.parametrize("changes", SAME, ids=str)
def test_what_may_change_between_two_starts(changes: dict[str, dict[str, Any]]) -> None:
    assert digest(config(**changes)) == digest(config())


OTHER = [
    ({"training": {"seed": 2}}, "training.seed"),
    ({"training": {"batch_size": 3}}, "global batch"),
    ({"training": {"max_steps": 13}}, "training.max_steps"),
    ({"training": {"max_epochs": 13}}, "training.max_epochs"),
    ({"training": {"mixed_precision": "bf16"}}, "training.mixed_precision"),
    ({"optimizer": {"learning_rate": 3e-4}}, "optimizer.learning_rate"),
    ({"optimizer": {"args": ("eps=1e-6",)}}, "optimizer.args"),
    ({"model": {"init_from_config": "base"}}, "model.init_from_config"),
    ({"data": {"dirs": ("/mnt/a/stars", "/mnt/a/suns")}}, "data.dirs"),
    ({"data": {"dirs": ("/mnt/a/moons", "/mnt/a/stars")}}, "data.dirs"),
    ({"data": {"repeats": (2,)}}, "data.repeats"),
    ({"captions": {"shuffle": True}}, "captions.shuffle"),
    ({"loss": {"min_snr_gamma": 5}}, "loss.min_snr_gamma"),
    ({"ema": {"enable": True}}, "ema.enable"),
    ({"validation": {"split": 0.1}}, "validation.split"),
    ({"cache": {"latents_as": "mean"}}, "cache.latents_as"),
    ({"cache": {"latents": True, "latents_dtype": "bf16"}}, "cache.latents_dtype"),
    ({"cache": {"text_to_disk": True, "text_dtype": "fp8"}}, "cache.text_dtype"),
    ({"cache": {"text": True, "dtypes": {"pooled": "fp16"}}}, "cache.dtypes"),
    ({"cache": {"latents": True, "dtypes": {"moments": "fp16", "pooled": "fp16"}}}, "cache.dtypes"),
    ({"cache": {"shuffle_num": 3}, "captions": {"shuffle": True}}, "cache.shuffle_num"),
]


@pytest.mark.parametrize(("changes", "path"), OTHER, ids=lambda value: str(value))
def test_what_makes_another_run_is_named(changes: dict[str, dict[str, Any]], path: str) -> None:
    old, new = identity(config()), identity(config(**changes))
    assert digest(config(**changes)) != digest(config())
    stored = json.loads(json.dumps(old))  # as a checkpoint keeps it
    said = differences(stored, new)
    assert any(line.startswith(f"{path}: ") for line in said), said


def test_the_global_batch_counts_not_its_split() -> None:
    assert digest(config(training={"batch_size": 1}), dp_size=4) == digest(config())
    assert digest(config(training={"batch_size": 1}), dp_size=2) != digest(config())


@pytest.mark.flags("max_train_epoch")
def test_epochs_win_so_steps_do_not_count_beside_them() -> None:
    one, two = ({"max_epochs": 3, "max_steps": steps} for steps in (10, 20))
    assert digest(config(training=one)) == digest(config(training=two))


def test_a_run_of_datasets_is_known_though_empty_captions_count_now() -> None:
    def with_subset(**captions: Any) -> TrainConfig:
        subset = {"image_dir": "/mnt/a/stars", "captions": captions}
        return config(data={"dirs": (), "datasets": [{"resolution": (64, 64), "subsets": [subset]}]})

    before, now = with_subset(), with_subset(allow_empty=True)
    assert digest(before) == digest(now)
    # what a version wrote that had it in a run's identity
    written = json.loads(json.dumps(identity(before)))
    written["data set 1, subset 1: captions"]["allow_empty"] = True
    assert not differences(without_empty(written), identity(before))
    # where a caption is a file's whole text it counts as ever
    pipe = {"dialect": "diffusion_pipe"}
    assert digest(with_subset(**pipe)) != digest(with_subset(**pipe, allow_empty=True))


def test_every_name_in_the_lists_exists() -> None:
    paths = set(fields())
    sections = {path.split(".")[0] for path in paths}
    assert paths | sections >= FREE and paths >= NAMED


def test_a_digest_is_the_same_on_every_machine() -> None:
    assert digest(TrainConfig()) == digest(TrainConfig()) and len(digest(TrainConfig())) == 32


def test_parts_from_elsewhere_are_known_by_their_last_names() -> None:
    for part in ("transformer", "text_encoder1", "text_encoder2", "text_encoder3"):
        here, there = (config(model={"family": "sd3", part: f"{path}/part"}) for path in ("/a", "/b"))
        assert digest(here) == digest(there) != digest(config(model={"family": "sd3"}))
