"""FSDP as `accelerate launch` asks for it by variables: what each sets, what has no effect, what is refused by name."""

from __future__ import annotations

import re
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest
from refusals import is_about

from difftrain.config import accelerate_environment, parse_flags, parse_keys
from difftrain.config.accelerate_environment import fsdp_layer

ON = "ACCELERATE_USE_FSDP=true"
TWO = f"{ON} FSDP_VERSION=2"
PARALLEL = f"{TWO} ACCELERATE_USE_PARALLELISM_CONFIG=true"


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=") for word in text.split())


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        ("ACCELERATE_USE_FSDP=false FSDP_VERSION=2 FSDP_NONSENSE=1", {}),
        (ON, {"training.engine": "fsdp", "fsdp.shard": "full"}),
        (TWO, {"training.engine": "fsdp", "fsdp.shard": "full"}),
        (f"{ON} FSDP_SHARDING_STRATEGY=1", {"fsdp.shard": "full"}),
        (f"{ON} FSDP_SHARDING_STRATEGY=SHARD_GRAD_OP", {"fsdp.shard": "full", "fsdp.reshard_after_forward": "never"}),
        (f"{ON} FSDP_SHARDING_STRATEGY=NO_SHARD", {"training.engine": "native"}),
        (f"{ON} FSDP_SHARDING_STRATEGY=hybrid_shard", {"fsdp.shard": "hybrid"}),
        (f"{ON} FSDP_SHARDING_STRATEGY=5", {"fsdp.shard": "hybrid", "fsdp.reshard_after_forward": "never"}),
        (f"{ON} FSDP_RESHARD_AFTER_FORWARD=HYBRID_SHARD", {"fsdp.shard": "hybrid"}),
        (f"{TWO} FSDP_SHARDING_STRATEGY=HYBRID_SHARD", {"fsdp.shard": "full"}),  # which version 2 does not read
        (f"{TWO} FSDP_RESHARD_AFTER_FORWARD=false", {"fsdp.reshard_after_forward": "never"}),
        (f"{TWO} FSDP_RESHARD_AFTER_FORWARD=true", {"fsdp.shard": "full"}),
        (f"{TWO} FSDP_OFFLOAD_PARAMS=true", {"fsdp.cpu_offload": True}),
        (f"{TWO} FSDP_ACTIVATION_CHECKPOINTING=true", {"training.gradient_checkpointing": True}),
        (f"{TWO} FSDP_ACTIVATION_CHECKPOINTING=true FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD=true",
         {"training.cpu_offload_checkpointing": True}),
        (f"{PARALLEL} PARALLELISM_CONFIG_DP_REPLICATE_SIZE=2 PARALLELISM_CONFIG_DP_SHARD_SIZE=8",
         {"fsdp.shard": "hybrid", "fsdp.shard_size": 8}),
        (f"{PARALLEL} PARALLELISM_CONFIG_DP_REPLICATE_SIZE=1 PARALLELISM_CONFIG_DP_SHARD_SIZE=16", {"fsdp.shard": "full"}),
    ],
)  # fmt: skip
def test_variables_set_fields(text: str, values: dict[str, Any]) -> None:
    layer = fsdp_layer(variables(text))
    assert not layer.faults
    assert {path: layer.values.get(path) for path in values} == values
    for path in (
        "fsdp.reshard_after_forward",
        "fsdp.cpu_offload",
        "fsdp.shard_size",
        "training.gradient_checkpointing",
    ):
        assert path in values or (path not in layer.values or "CHECKPOINTING" in text), path
    assert bool(layer.values) == bool(values) and layer.values.keys() == layer.origins.keys()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"{ON} FSDP_VERSION=3", "FSDP_VERSION"),
        (f"{ON} FSDP_SHARDING_STRATEGY=HALF", "FSDP_SHARDING_STRATEGY"),
        (f"{ON} FSDP_SHARDING_STRATEGY=6", "FSDP_SHARDING_STRATEGY"),
        (f"{TWO} FSDP_RESHARD_AFTER_FORWARD=FULL_SHARD", "FSDP_RESHARD_AFTER_FORWARD"),
        (f"{TWO} FSDP_IGNORED_MODULES=vae", "FSDP_IGNORED_MODULES"),
        (f"{TWO} FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD=true", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"),
        (f"{TWO} FSDP_NONSENSE=1", "FSDP_NONSENSE"),
        (f"{PARALLEL} PARALLELISM_CONFIG_TP_SIZE=2", "PARALLELISM_CONFIG_TP_SIZE"),
        (f"{PARALLEL} PARALLELISM_CONFIG_CP_SIZE=4", "PARALLELISM_CONFIG_CP_SIZE"),
        (
            f"{PARALLEL} PARALLELISM_CONFIG_DP_SHARD_SIZE=none PARALLELISM_CONFIG_SP_SIZE=x",
            "PARALLELISM_CONFIG_SP_SIZE",
        ),
        ("ACCELERATE_USE_PARALLELISM_CONFIG=true", "ACCELERATE_USE_PARALLELISM_CONFIG"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(text: str, name: str) -> None:
    (fault,) = fsdp_layer(variables(text)).faults
    assert fault.where == name and fault.remedy + fault.what


def test_what_has_no_effect_is_said() -> None:
    text = f"{TWO} FSDP_AUTO_WRAP_POLICY=SIZE_BASED_WRAP FSDP_CPU_RAM_EFFICIENT_LOADING=true FSDP_USE_ORIG_PARAMS=false"
    notes = fsdp_layer(variables(text)).notes
    assert [note.partition(":")[0] for note in notes] == ["FSDP_AUTO_WRAP_POLICY", "FSDP_CPU_RAM_EFFICIENT_LOADING"]
    assert any(is_about(note, "ACCELERATE_USE_FSDP", "FSDP2") for note in fsdp_layer(variables(ON)).notes)


def test_every_variable_of_its_launcher_is_known() -> None:
    source = next(path for path in files("accelerate") or [] if str(path) == "accelerate/utils/launch.py").read_text()
    asked = set(re.findall(r'"(FSDP_[A-Z_]+)"', source))
    known = {*accelerate_environment._READ_FSDP, *accelerate_environment._IDLE_FSDP}
    assert len(asked) > 10 and asked <= known


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(f"{TWO} FSDP_RESHARD_AFTER_FORWARD=false").items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("launched")
def test_kohyas_flags_take_it() -> None:
    line = ["--init_from_config=tiny", "--train_data_dir=/tmp", "--output_dir=out", "--resolution=64"]
    cfg = parse_flags.parse(line).config
    assert cfg.training.engine == "fsdp" and cfg.fsdp.reshard_after_forward == "never"
    assert parse_flags.parse([*line, "--gradient_checkpointing"]).config.training.gradient_checkpointing


@pytest.mark.usefixtures("launched")
def test_keys_of_train_py_take_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        f'output_dir = "{tmp_path}"\ndataset = "{tmp_path}/data.toml"\nmax_steps = 1\n[model]\ntype = "sdxl"\ninit_from_config = "tiny"\n'
    )
    (tmp_path / "data.toml").write_text("resolutions = [64]\n[[directory]]\npath = '/tmp'\n")
    assert parse_keys.parse([f"--config={tmp_path}/run.toml"]).config.training.engine == "fsdp"
