"""DeepSpeed's JSON, key by key: what each sets, what has no effect, what is refused, and what contradicts the run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest
from refusals import is_about

from difftrain.config import deepspeed_json, parse_flags, parse_keys
from difftrain.config.parse_flags import Parsed
from difftrain.config.rules.finding import value_of
from difftrain.config.spellings import deepspeed as tables
from difftrain.contracts import ConfigFault, Fault
from difftrain.testing.pictures import write_folder

TOML = """
output_dir = "out"
dataset = "dataset.toml"
max_steps = 20
[model]
type = "sdxl"
init_from_config = "tiny"
"""
FLAGS = ("--init_from_config=tiny", "--train_data_dir=data", "--resolution=64", "--output_dir=out", "--output_name=x")
Run = Callable[..., Parsed]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    write_folder(tmp_path / "data" / "1_pictures", [(64, 64)])
    Path("dataset.toml").write_text("resolutions = [64]\n[[directory]]\npath = 'data/1_pictures'\n")
    Path("run.toml").write_text(TOML)


def by_keys(told: Any, *argv: str, toml: str = "") -> Parsed:
    Path("ds.json").write_text(json.dumps(told, indent=1))
    Path("run.toml").write_text(TOML + toml)
    return parse_keys.parse(["--config=run.toml", "--deepspeed_config=ds.json", *argv])


def by_flags(told: Any, *argv: str) -> Parsed:
    Path("ds.json").write_text(json.dumps(told, indent=1))
    return parse_flags.parse([*FLAGS, "--deepspeed_config=ds.json", *argv])


@pytest.fixture(params=[by_keys, by_flags], ids=["keys", "flags"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param  # type: ignore[no-any-return]


def faults(run: Run, told: Any, *argv: str, **more: Any) -> list[Fault]:
    with pytest.raises(ConfigFault) as caught:
        run(told, *argv, **more)
    return caught.value.faults


def zero(**told: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **told}}


def adam(**told: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": told}}


def schedule(kind: str, **told: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": told}}


SETS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"train_micro_batch_size_per_gpu": 3}, {"training.batch_size": 3}),
    ({"gradient_accumulation_steps": 5}, {"training.accumulation": 5}),
    ({"gradient_clipping": 0.25}, {"training.max_grad_norm": 0.25}),
    ({"steps_per_print": 7}, {"logging.log_every": 7}),
    ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}, {"training.accumulation": 3}),
    ({"train_batch_size": 12, "gradient_accumulation_steps": 4}, {"training.batch_size": 3}),
    ({"train_batch_size": 6}, {"training.batch_size": 6, "training.accumulation": 1}),
    ({"fp16": {"enabled": True, "loss_scale": 0}}, {"training.mixed_precision": "fp16"}),
    ({"bf16": {"enabled": True}}, {"training.mixed_precision": "bf16"}),
    ({"bfloat16": {"enabled": True}}, {"training.mixed_precision": "bf16"}),
    ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}}, {"training.mixed_precision": "no"}),
    ({"zero_optimization": {"stage": 0}}, {"training.engine": "native", "deepspeed.enable": False}),
    ({}, {"training.engine": "native", "deepspeed.enable": False}),
    *(({"zero_optimization": {"stage": stage}},
       {"training.engine": "accelerate", "deepspeed.enable": True, "deepspeed.zero_stage": stage}) for stage in (1, 2, 3)),
    (zero(offload_optimizer={"device": "cpu", "pin_memory": True}), {"deepspeed.offload_optimizer_device": "cpu"}),
    (zero(offload_param={"device": "cpu"}), {"deepspeed.offload_param_device": "cpu"}),
    (zero(offload_param={"device": "none"}, offload_optimizer={"device": "none"}), {"deepspeed.offload_param_device": None}),
    (zero(offload_param={"device": "nvme", "nvme_path": "/fast"}),
     {"deepspeed.offload_param_device": "nvme", "deepspeed.offload_param_nvme_path": "/fast"}),
    (zero(stage3_gather_16bit_weights_on_model_save=True), {"deepspeed.zero3_save_16bit": True}),
    ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True},
      "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, {"deepspeed.fp16_master_weights": True}),
    (adam(lr=2e-4, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.1),
     {"optimizer.type": "AdamW", "optimizer.learning_rate": 2e-4,
      "optimizer.args": ("betas=(0.8, 0.9)", "eps=1e-06", "weight_decay=0.1")}),
    (adam(lr="auto", weight_decay="auto"), {"optimizer.learning_rate": None, "optimizer.args": ()}),
    (adam(), {"optimizer.learning_rate": 1e-3, "optimizer.args": ("weight_decay=0.0",)}),  # DeepSpeed's defaults
    (adam(lr=1e-4, torch_adam=True), {"optimizer.args": ()}),
    ({"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}, {"optimizer.type": "AdamW"}),
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, {"optimizer.type": "Adam"}),
    ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
     {"optimizer.type": "SGD", "optimizer.args": ("momentum=0.9",)}),
    (schedule("WarmupLR", warmup_num_steps=9, warmup_type="linear", warmup_max_lr=3e-4, warmup_min_lr=0),
     {"optimizer.scheduler": "constant_with_warmup", "optimizer.warmup_steps": 9, "optimizer.learning_rate": 3e-4,
      "optimizer.scheduler_args": ()}),
    (schedule("WarmupLR", warmup_num_steps=9), {"optimizer.scheduler_args": ("warmup_type='log'",)}),
    (schedule("WarmupLR", warmup_type="linear"), {"optimizer.warmup_steps": 1000}),
    (schedule("WarmupDecayLR", warmup_num_steps=2, warmup_type="linear", total_num_steps="auto"),
     {"optimizer.scheduler": "linear", "optimizer.warmup_steps": 2}),
    (schedule("WarmupCosineLR", warmup_num_steps=2, warmup_type="linear", total_num_steps="auto", cos_min_ratio=0.1),
     {"optimizer.scheduler": "cosine_with_min_lr", "optimizer.min_lr_ratio": 0.1}),
    ({"optimizer": "auto", "scheduler": "auto", "train_batch_size": "auto", "gradient_clipping": "auto",
      "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}}, {"deepspeed.zero_stage": 1}),
]  # fmt: skip


@pytest.mark.flags("deepspeed_config")
@pytest.mark.parametrize(("told", "values"), SETS, ids=lambda told: json.dumps(told)[:60])
def test_a_key_sets_its_field(run: Run, told: dict[str, Any], values: dict[str, Any]) -> None:
    cfg = run(told).config
    for path, value in values.items():
        if path == "optimizer.learning_rate" and value is None:  # the run's own
            value = value_of(run({}).config, path)
        assert value_of(cfg, path) == value, path


@pytest.mark.parametrize(
    ("told", "key"),
    [
        (zero(overlap_comm=True), "zero_optimization.overlap_comm"),
        (zero(stage3_prefetch_bucket_size=1e7), "zero_optimization.stage3_prefetch_bucket_size"),
        (zero(offload_optimizer={"device": "cpu", "buffer_count": 4}), "zero_optimization.offload_optimizer.buffer_count"),
        ({"fp16": {"enabled": True, "initial_scale_power": 8}}, "fp16.initial_scale_power"),
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown"), ({"tensorboard": {"enabled": True}}, "tensorboard"),
        ({"steps_per_print": math.inf}, "steps_per_print"), ({"aio": {"block_size": 1}}, "aio"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_named(run: Run, told: dict[str, Any], key: str) -> None:
    assert any(is_about(note, key, "no effect") for note in run(told).notes)


@pytest.mark.parametrize(
    "told",
    [
        {"amp": {"enabled": False}}, {"sparse_gradients": False}, {"prescale_gradients": False},
        {"gradient_predivide_factor": 1.0}, {"fp16": {"enabled": False, "loss_scale": 128}}, zero(zero_hpz_partition_size=1),
        zero(zero_quantized_weights=False), {"communication_data_type": "fp32"}, {"data_types": {"grad_accum_dtype": "fp32"}},
    ],
)  # fmt: skip
def test_what_asks_for_nothing_says_nothing(run: Run, told: dict[str, Any]) -> None:
    key = next(
        key for key in json.dumps(told).split('"') if key.islower() and key not in ("zero_optimization", "stage")
    )
    assert not any(key in note for note in run(told).notes)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"amp": {"enabled": True}}, "amp"), ({"prescale_gradients": True}, "prescale_gradients"),
    ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
    ({"communication_data_type": "fp16"}, "communication_data_type"), ({"sparse_gradients": True}, "sparse_gradients"),
    ({"compile": {"enabled": True}}, "compile"), ({"elasticity": {"enabled": True}}, "elasticity"),
    ({"curriculum_learning": {"enabled": True}}, "curriculum_learning"), ({"pipeline": {"stages": 2}}, "pipeline"),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel"), ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
    (zero(zero_hpz_partition_size=8), "zero_optimization.zero_hpz_partition_size"),
    (zero(zero_quantized_weights=True), "zero_optimization.zero_quantized_weights"),
    (zero(mics_shard_size=8), "zero_optimization.mics_shard_size"),
    (zero(offload_optimizer={"device": "cpu", "ratio": 0.5}), "zero_optimization.offload_optimizer.ratio"),
    (zero(offload_param={"device": "tape"}), "zero_optimization.offload_param.device"),
    (zero(cpu_offload=True), "zero_optimization.cpu_offload"),
    ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale"),
    ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
    ({"bf16": {"enabled": 2}}, "bf16.enabled"), ({"bf16": True}, "bf16"),
    ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type"), ({"optimizer": {"params": {}}}, "optimizer"),
    ({"optimizer": {"type": "Lamb"}}, "optimizer.type"), (adam(bias_correction=False), "optimizer.params.bias_correction"),
    (adam(lr="fast"), "optimizer.params.lr"), ({"optimizer": {"type": "AdamW", "legacy_fusion": True}}, "optimizer.legacy_fusion"),
    (schedule("OneCycle"), "scheduler.type"), (schedule("LRRangeTest"), "scheduler.type"),
    (schedule("WarmupLR", warmup_min_lr=1e-6), "scheduler.params.warmup_min_lr"),
    (schedule("WarmupLR", warmup_type="cubic"), "scheduler.params.warmup_type"),
    (schedule("WarmupLR", total_num_steps=5), "scheduler.params.total_num_steps"),
    (schedule("WarmupLR", warmup_steps=5), "scheduler.params.warmup_steps"),
    ({"train_batch_size": 0}, "train_batch_size"), ({"train_batch_size": "many"}, "train_batch_size"),
    ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "train_batch_size"),
    ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, "train_batch_size"),
    ({"gradient_clipping": -1}, "gradient_clipping"), ({"gradient_acumulation_steps": 2}, "gradient_acumulation_steps"),
    ({"zero_optimization": 3}, "zero_optimization"), ({"zero_optimization": {"stage": True}}, "zero_optimization.stage"),
]  # fmt: skip


@pytest.mark.parametrize(("told", "key"), REFUSED, ids=[f"{number}-{key}" for number, (_, key) in enumerate(REFUSED)])
def test_a_key_without_a_counterpart_is_refused_where_it_stands(run: Run, told: dict[str, Any], key: str) -> None:
    where = [fault.where for fault in faults(run, told)]
    assert any(re.fullmatch(rf"ds\.json(:\d+)? {re.escape(key)}", place) for place in where), where


CONTRADICTS: list[tuple[dict[str, Any], str, str]] = [
    ({"train_micro_batch_size_per_gpu": 4}, "--train_batch_size=2", "train_micro_batch_size_per_gpu"),
    ({"gradient_accumulation_steps": 4}, "--gradient_accumulation_steps=2", "gradient_accumulation_steps"),
    ({"gradient_clipping": 0.5}, "--max_grad_norm=1.5", "gradient_clipping"),
    ({"bf16": {"enabled": True}}, "--mixed_precision=fp16", "bf16.enabled"),
    ({"fp16": {"enabled": False}}, "--mixed_precision=fp16", "fp16.enabled"),
    ({"zero_optimization": {"stage": 2}}, "--deepspeed --zero_stage=3", "zero_optimization.stage"),
    ({"zero_optimization": {"stage": 0}}, "--deepspeed --zero_stage=3", "zero_optimization.stage"),
    (zero(offload_param={"device": "none"}), "--offload_param_device=cpu", "zero_optimization.offload_param.device"),
    (adam(lr=1e-3), "--learning_rate=1e-4", "optimizer.params.lr"),
    (adam(weight_decay=0.2), "--optimizer_args weight_decay=0.1", "optimizer.params.weight_decay"),
    (adam(), "--optimizer_type=Lion", "optimizer.type"),
    (schedule("WarmupLR", warmup_max_lr=1e-3), "--learning_rate=1e-4", "scheduler.params.warmup_max_lr"),
    (schedule("WarmupLR", warmup_num_steps=9), "--lr_warmup_steps=8", "scheduler.params.warmup_num_steps"),
    (schedule("WarmupLR"), "--lr_scheduler=cosine", "scheduler.type"),
    (schedule("WarmupDecayLR", total_num_steps=9), "--max_train_steps=8", "scheduler.params.total_num_steps"),
    (schedule("WarmupDecayLR", total_num_steps=9), "--max_train_epochs=1", "scheduler.params.total_num_steps"),
    ({"train_batch_size": 9}, "--train_batch_size=2 --gradient_accumulation_steps=2", "train_batch_size"),
]  # fmt: skip


@pytest.mark.parametrize(("told", "argv", "key"), CONTRADICTS, ids=[key for _, _, key in CONTRADICTS])
def test_what_says_something_else_than_a_flag_names_both(told: dict[str, Any], argv: str, key: str) -> None:
    (fault,) = [fault for fault in faults(by_flags, told, *argv.split()) if fault.where.endswith(f" {key}")]
    flag = re.findall(r"--(\w+)", argv)[-1]
    assert flag in str(fault) or key == "train_batch_size", fault
    assert fault.where.startswith("ds.json:")
    same = [word for word in argv.split() if word.startswith("--deepspeed")]
    with_nothing_else = {} if key.startswith("zero") else {name: "auto" for name in told}
    by_flags(with_nothing_else, *same)  # "auto" leaves it open


def test_keys_of_train_py_are_not_contradicted() -> None:
    told = {**adam(lr=1e-3, betas=[0.9, 0.99]), "gradient_clipping": 1.0}
    found = faults(
        by_keys, told, toml="[optimizer]\nlr = 1e-4\nbetas = [0.9, 0.95]\n[training]\ngradient_clipping = 2.0\n"
    )
    for key, there in (("lr", "lr"), ("betas", "betas"), ("gradient_clipping", "gradient_clipping")):
        assert any(fault.where.endswith(key) and "run.toml" in fault.what and there in fault.what for fault in found)
    cfg = by_keys(
        told, toml="[optimizer]\nlr = 1e-3\nbetas = [0.9, 0.99]\n[training]\ngradient_clipping = 1.0\n"
    ).config
    assert "betas=(0.9, 0.99)" in cfg.optimizer.args and cfg.optimizer.learning_rate == 1e-3


def test_what_deepspeed_takes_by_default_gives_way_to_the_run() -> None:
    cfg = by_keys(adam(), toml="[optimizer]\nlr = 1e-4\nweight_decay = 0.3\n").config
    assert cfg.optimizer.args == ("weight_decay=0.3",) and cfg.optimizer.learning_rate == 1e-4


def test_the_global_batch_counts_the_processes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "4")
    told = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}
    assert run(told).config.training.accumulation == 3
    monkeypatch.setenv("WORLD_SIZE", "5")
    (fault,) = faults(run, told)
    assert is_about(fault, "train_batch_size", "24", "5 processes")


def test_the_global_batch_counts_replicas_of_a_pipeline(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "4")
    told = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}
    stages = "--pipeline_stages=2" if run is by_flags else "--optimization.pipeline_stages=2"
    assert run(told, stages).config.training.accumulation == 6  # of two replicas


def test_it_may_stand_in_the_file_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "ds.json").write_text(json.dumps(zero()))
    (tmp_path / "conf" / "run.toml").write_text(TOML + '[deepspeed]\nconfig = "ds.json"\n')
    cfg = parse_keys.parse(["--config=conf/run.toml"]).config
    assert cfg.deepspeed.enable and cfg.deepspeed.zero_stage == 3
    (tmp_path / "conf" / "ds.json").unlink()
    with pytest.raises(ConfigFault) as caught:
        parse_keys.parse(["--config=conf/run.toml"])
    (fault,) = caught.value.faults
    assert fault.where == "conf/run.toml [deepspeed] config = ds.json" and "file" in fault.what


def test_lines_of_keys() -> None:
    text = '{\n "a": {"b": [1,\n {"c": "x: {"}],\n "d": 1},\n "e\\"": 2\n}'
    lines = deepspeed_json.lines_of(text)
    assert (lines["a"], lines["a.b"], lines["a.d"], lines['e"']) == (2, 2, 4, 5)


def test_every_key_of_the_installed_deepspeed_is_known() -> None:
    """Those of the ZeRO section and of its precision sections, as their dataclasses name them."""
    paths = {str(path): path for path in files("deepspeed") or []}
    known = Path(tables.__file__).read_text() + Path(deepspeed_json.__file__).read_text()
    for name in ("zero/config", "zero/offload_config", "precision_config"):
        source = paths[f"deepspeed/runtime/{name}.py"].read_text()
        fields = re.findall(r"^    ([a-z]\w+): ([^\n]*(?:\n {8,}[^\n]*)*)", source, re.MULTILINE)
        aliases = {field: re.search(r'alias="(\w+)"', rest) for field, rest in fields}
        names = {alias[1] if alias else field for field, alias in aliases.items()}
        assert names and not {key for key in names if f'"{key}"' not in known}, name
