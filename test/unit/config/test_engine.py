"""Engines in the configuration: what --deepspeed takes, and what does not go with it, before anything is imported."""

from __future__ import annotations

from typing import Any

import pytest
from refusals import is_about, names

from difftrain.config.digest import digest
from difftrain.config.parse_flags import parse
from difftrain.config.rules.adapter import adapter
from difftrain.config.rules.engine import _BY_ROWS, _ELEMENTWISE, accelerate, deepspeed, fsdp
from difftrain.config.rules.finding import check
from difftrain.config.rules.optimizer import base, patterns
from difftrain.config.rules.pipeline import pipeline
from difftrain.config.schema.sections import TrainConfig
from difftrain.contracts import ConfigFault

LINE = ["--init_from_config=tiny", "--train_data_dir=/tmp", "--output_dir=out", "--resolution=64", "--seed=1"]
ZERO = "--deepspeed"
FSDP = "--engine=fsdp"


def said(words: str) -> list[str]:
    with pytest.raises(ConfigFault) as caught:
        parse([*LINE, *words.split()])
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.flags("deepspeed", "engine")
def test_deepspeed_takes_the_engine_that_runs_it_and_says_so():
    parsed = parse([*LINE, ZERO])
    assert parsed.config.training.engine == "accelerate" and parsed.config.deepspeed.zero_stage == 2
    (note,) = [note for note in parsed.notes if "--engine=accelerate" in note]
    assert note.startswith("--deepspeed:")
    parsed = parse([*LINE, ZERO, "--engine=accelerate"])
    assert parsed.config.training.engine == "accelerate" and not parsed.notes
    assert parse(LINE).config.training.engine == "native"


def test_a_run_is_the_same_on_every_engine():
    assert digest(parse([*LINE, ZERO, "--zero_stage=3"]).config) == digest(parse(LINE).config)
    assert len(digest(TrainConfig())) == 32


FAULTS = [
    ("--zero_stage=2", "--zero_stage --deepspeed"),
    ("--offload_optimizer_device=cpu", "--offload_optimizer_device --deepspeed"),
    ("--zero3_init_flag", "--zero3_init_flag --deepspeed"),
    (f"{ZERO} --engine=native", "--deepspeed --engine=native"),
    (f"{ZERO} --zero_stage=0", "--zero_stage 0 1"),
    (f"{ZERO} --zero_stage=4", "--zero_stage 0 1 2 3 4"),
    (f"{ZERO} --offload_param_device=cpu", "--offload_param_device --zero_stage=3"),
    (f"{ZERO} --zero_stage=1 --offload_optimizer_device=cpu", "--offload_optimizer_device --zero_stage=2 3"),
    (f"{ZERO} --zero_stage=3 --offload_optimizer_device=nvme", "--offload_optimizer_device nvme --offload_optimizer_nvme_path"),
    (f"{ZERO} --offload_optimizer_device=nvme --offload_optimizer_nvme_path=/x", "--offload_optimizer_device nvme --zero_stage=3"),
    (f"{ZERO} --offload_optimizer_nvme_path=/x", "--offload_optimizer_nvme_path --offload_optimizer_device=nvme"),
    (f"{ZERO} --zero_stage=3 --offload_param_nvme_path=/x", "--offload_param_nvme_path --offload_param_device=nvme"),
    (f"{ZERO} --zero3_init_flag", "--zero3_init_flag --zero_stage=3"),
    (f"{ZERO} --zero3_save_16bit_model", "--zero3_save_16bit_model --zero_stage=3"),
    (f"{ZERO} --fp16_master_weights_and_gradients", "--fp16_master_weights_and_gradients --zero_stage=2"),
    (f"{ZERO} --optimizer_type=oss", "--optimizer_type oss --deepspeed"),
    (f"{ZERO} --optimizer_type=Adafactor", "--optimizer_type Adafactor tensors --deepspeed"),
    (f"{ZERO} --optimizer_type=AdamW8bit", "--optimizer_type AdamW8bit tensors --deepspeed"),
    (f"{ZERO} --optimizer_type=Prodigy --learning_rate=1", "--optimizer_type Prodigy tensors --deepspeed"),
    (f"{ZERO} --optimizer_type=Lion --offload_optimizer_device=cpu", "--optimizer_type Lion kernel"),
    (f"{ZERO} --optimizer_type=Muon", "--optimizer_type Muon tensors --deepspeed"),
    (f"{ZERO} --optimizer_schedulefree_wrapper", "--optimizer_schedulefree_wrapper --deepspeed"),
    (f"{ZERO} --fp8_base", "--fp8_base --deepspeed"),
    (f"{ZERO} --zero_stage=3 --torch_compile", "--torch_compile --zero_stage=3"),
    ("--engine=accelerate --fused_backward_pass", "--fused_backward_pass --engine=accelerate"),
    ("--engine=accelerate --fused_optimizer_groups=4", "--fused_optimizer_groups --engine=accelerate"),
    ("--engine=accelerate --full_bf16 --mixed_precision=bf16", "--full_bf16 --engine=accelerate"),
    ("--engine=accelerate --optimizer_type=oss --fp8_base_unet", "--fp8_base_unet oss"),
    ("--shard=hybrid", "--shard --engine=fsdp"),
    ("--shard_size=2 --engine=accelerate", "--shard_size --engine=fsdp"),
    ("--fsdp_cpu_offload", "--fsdp_cpu_offload --engine=fsdp"),
    (f"{FSDP} --shard=full --shard_size=2", "--shard_size 2 --shard=full --shard=hybrid"),
    (f"{FSDP} --shard=zero", "--shard full hybrid"),
    (f"{FSDP} --shard_size=0", "--shard_size 0"),
    (f"{FSDP} --fsdp_reshard_after_forward=maybe", "--fsdp_reshard_after_forward always never"),
    (f"{FSDP} --fsdp_reduce=first", "--fsdp_reduce last each"),
    (f"{FSDP} --fsdp_cpu_offload --device=cpu", "--fsdp_cpu_offload --device=cpu"),
    (f"{FSDP} --fused_backward_pass", "--fused_backward_pass --engine=fsdp --engine=native"),
    (f"{FSDP} --fused_optimizer_groups=4", "--fused_optimizer_groups --engine=fsdp"),
    (f"{FSDP} --full_bf16 --mixed_precision=bf16", "--full_bf16 --engine=fsdp"),
    (f"{FSDP} --torch_compile", "--torch_compile --engine=fsdp"),
    (f"{FSDP} --fp8_base_unet", "--fp8_base_unet --engine=fsdp"),
    (f"{FSDP} --optimizer_type=oss", "--optimizer_type oss --engine=fsdp AdamW"),
    (f"{FSDP} --optimizer_type=AdamW8bit", "--optimizer_type AdamW8bit tensors --engine=fsdp"),
    (f"{FSDP} --optimizer_type=PagedAdamW", "--optimizer_type PagedAdamW tensors --engine=fsdp"),
    (f"{FSDP} --optimizer_type=Adafactor", "--optimizer_type Adafactor tensors Muon"),
    (f"{FSDP} --optimizer_type=Prodigy --learning_rate=1", "--optimizer_type Prodigy tensors --engine=fsdp"),
    (f"{FSDP} --optimizer_type=torch.optim.Adafactor", "--optimizer_type torch.optim.Adafactor tensors"),
    (f"{FSDP} {ZERO}", "--deepspeed --engine=fsdp --engine=accelerate"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "facts"), FAULTS, ids=[words for words, _ in FAULTS])
def test_what_does_not_go_together(words: str, facts: str):
    (found,) = said(words)
    assert is_about(found, *facts.split())


def test_faults_come_together():
    found = said(
        f"{ZERO} --zero_stage=0 --optimizer_type=Adafactor --full_fp16 --mixed_precision=fp16 --fused_backward_pass"
    )
    assert len(found) >= 4


def test_what_is_to_be_trained_is_named_by_regular_expressions():
    given = {"model": {"family": "flux", "train_only": ["attn", "(", r"\.to_[qk]\."]}}
    (fault,), _ = check(TrainConfig.model_validate(given), (patterns,), {"model.train_only"}, set(), {})
    assert is_about(fault, "[model] train_only", "'('")


ENGINES = ({}, {"engine": "accelerate"}, {"engine": "fsdp"}, {"pipeline_stages": 2, "accumulation": 8})


@pytest.mark.parametrize("engine", ENGINES)
def test_few_bits_and_adapters_go_with_every_engine(engine: dict[str, Any]):
    rules = (base, accelerate, fsdp, pipeline, adapter)
    given: dict[str, Any] = {"model": {"family": "flux", "base_dtype": "int8"}, "training": engine}
    adapted = {"adapter": {"type": "lora", "scale_weight_norms": 1.0}}
    for more in (adapted, {"model": given["model"] | {"train_only": ["attn"]}}):
        assert check(TrainConfig.model_validate(given | more), rules, set(), set(), {})[0] == []
    (fault,), _ = check(TrainConfig.model_validate(given), rules, {"model.base_dtype"}, set(), {})
    assert is_about(fault, "[model] base_dtype") and fault.remedy


def test_adapters_of_text_encoders_are_not_cut_into_pieces():
    given: dict[str, Any] = {"model": {"family": "sdxl", "train_text_encoder": True}, "training": {"engine": "accelerate"},
                             "deepspeed": {"enable": True, "zero_stage": 3}}  # fmt: skip
    assert check(TrainConfig.model_validate(given), (deepspeed,), set(), set(), {})[0] == []
    given["adapter"] = {"type": "lora"}
    (fault,), _ = check(TrainConfig.model_validate(given), (deepspeed,), set(), set(), {})
    assert is_about(fault, "--train_text_encoder", "--zero_stage") and "--zero_stage=2" in fault.remedy


@pytest.mark.parametrize("package", ["accelerate", "deepspeed", "fairscale"])
def test_a_missing_package_is_named_with_what_installs_it(package: str, monkeypatch):
    monkeypatch.setattr("difftrain.config.rules.engine.is_installed", lambda name: name != package)
    words = {
        "accelerate": "--engine=accelerate",
        "deepspeed": ZERO,
        "fairscale": "--engine=accelerate --optimizer_type=OSS",
    }
    (found,) = said(words[package])
    assert names(found, f"package {package}", "pip install")
    assert parse(LINE).config.training.engine == "native"


def test_flags_of_ddp_are_said_to_do_nothing_with_other_wrappers():
    for words in (ZERO, "--engine=accelerate --optimizer_type=oss"):
        notes = parse([*LINE, *words.split(), "--ddp_static_graph"]).notes
        assert any(is_about(note, "--ddp_static_graph", "DistributedDataParallel") for note in notes)
    assert not parse([*LINE, "--engine=accelerate", "--ddp_static_graph"]).notes
    notes = parse([*LINE, FSDP, "--ddp_static_graph"]).notes
    assert any(is_about(note, "--ddp_static_graph", "DistributedDataParallel") for note in notes)


def test_groups_of_ranks_divide_the_world(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    (found,) = said(f"{FSDP} --shard_size=4")
    assert is_about(found, "--shard_size", "4", "6")
    for size, shard in ((2, "hybrid"), (3, None), (6, "full")):
        words = [FSDP, f"--shard_size={size}", *([f"--shard={shard}"] if shard else [])]
        assert parse([*LINE, *words]).config.fsdp.shard_size == size


def test_when_to_reduce_is_no_matter_of_one_micro_batch():
    (note,) = parse([*LINE, FSDP, "--fsdp_reduce=each"]).notes
    assert is_about(note, "--fsdp_reduce")
    assert not parse([*LINE, FSDP, "--fsdp_reduce=each", "--gradient_accumulation_steps=2"]).notes


def test_the_elementwise_optimizers_are_known():
    from difftrain.config.schema.names import OPTIMIZERS, TORCH_OPTIMIZERS

    assert set(_ELEMENTWISE) <= {*OPTIMIZERS, *TORCH_OPTIMIZERS}
    assert set(_ELEMENTWISE) < set(_BY_ROWS) <= {*OPTIMIZERS, *TORCH_OPTIMIZERS}
    for name in _BY_ROWS:
        assert parse([*LINE, FSDP, f"--optimizer_type={name}"]).config.optimizer.type == name
    for name in _ELEMENTWISE:
        assert parse([*LINE, ZERO, f"--optimizer_type={name}"]).config.optimizer.type == name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_pictures_want_whole_weights_and_losses_do_not(stage: int):
    sets = ({"name": "held", "config": "held.toml"},)
    asked = {"eval": {"sets": sets, "kid": True}, "demo": {"score": True}, "sample": {"prompts": "prompts.txt"}}
    told = asked | {"validation": {"split": 0.1}, "deepspeed": {"enable": True, "zero_stage": stage}}
    faults, _ = check(TrainConfig.model_validate(told), (deepspeed,), set(), set(), {})
    refused = [fault.where for fault in faults if names(fault.what, "--zero_stage=3")]
    assert refused == (["--sample_prompts", "[eval] kid", "--demo_score"] if stage == 3 else [])


def test_measures_whose_ranks_draw_by_themselves_are_refused_and_samples_are_not():
    sets = ({"name": "held", "config": "held.toml"},)
    asked = {"eval": {"sets": sets, "kid": True}, "demo": {"score": True}, "sample": {"prompts": "prompts.txt"}}
    faults, _ = check(TrainConfig.model_validate(asked | {"training": {"engine": "fsdp"}}), (fsdp,), set(), set(), {})
    assert [fault.where for fault in faults] == ["[eval] kid", "--demo_score"]
