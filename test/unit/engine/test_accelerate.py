"""The accelerate engine in one process: what reaches DeepSpeed's plugin, what a launcher asks for, one rank's losses."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import engines
import pytest
import torch
from engines import COUNTS, config, equal, run, saved, weights
from safetensors.torch import load_file

from difftrain.config.schema.sections import DeepSpeedSection, TrainConfig, TrainingSection
from difftrain.contracts import ConfigFault, DrawSpec, FeatureSpec, Parts
from difftrain.device import choose
from difftrain.distributed.ranks import Ranks
from difftrain.engine import ddp, make_engine
from difftrain.engine.accelerate import make_plugin
from difftrain.engine.accelerate_zero import as_evaluated
from difftrain.engine.accelerate_zero_state import LossScale
from difftrain.engine.base import BaseEngine
from difftrain.testing.family import TinyFamily, tiny_batch, tiny_step


@pytest.fixture(autouse=True)
def one_thread():
    """Leave the process as it was: ZeRO 3 puts a linear function of its own in torch's place, for good."""
    before, env, linear = torch.get_num_threads(), dict(os.environ), torch.nn.functional.linear
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.nn.functional.linear = linear
    for name in os.environ.keys() - env.keys():
        del os.environ[name]


class Frozen(TinyFamily):
    """The first layer rests."""

    def load(self, *, meta: bool = False) -> Parts:
        parts = super().load(meta=meta)
        parts.root.first.requires_grad_(False)
        return parts


def built(way: str, optimizer: str = "AdamW", family: TinyFamily | None = None, **training) -> BaseEngine:
    cfg = config({"engine": "native" if way == "native" else "accelerate", **training}, type=optimizer)
    if way.startswith("zero"):
        cfg = cfg.model_copy(update={"deepspeed": DeepSpeedSection(enable=True, zero_stage=int(way[4:]))})
    assert not make_engine(cfg, choose("cpu"), Ranks()).faults()
    return engines.built(cfg, family)


@pytest.mark.parametrize(
    ("way", "optimizer"), [("ddp", "AdamW"), ("zero2", "AdamW"), ("zero2", "Lion"), ("zero2", "SGDNesterov")]
)
def test_one_rank_trains_as_the_native_engine(way: str, optimizer: str, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")  # of its launcher: hidden, and put back
    threads = torch.get_num_threads()
    engine, native = built(way, optimizer), built("native", optimizer)
    assert [name for name in os.environ if name.startswith("ACCELERATE_")] == ["ACCELERATE_MIXED_PRECISION"]
    assert torch.get_num_threads() == threads
    assert run(engine, 0, 4, accumulation=2) == pytest.approx(run(native, 0, 4, accumulation=2), rel=1e-6)
    state = saved(engine, tmp_path / "state")
    other, back = built(way, optimizer), built("native", optimizer)
    other.restore(state)
    back.restore(state)
    straight = run(engine, 4, 7)
    assert run(other, 4, 7) == straight and equal(weights(other), weights(engine))
    assert run(back, 4, 7) == pytest.approx(straight, rel=1e-6)


@pytest.mark.parametrize("way", ["zero1", "zero3"])
def test_a_state_from_before_the_first_step_is_taken_up(way: str, tmp_path):
    state = saved(built("native"), tmp_path / "state")
    engine, native = built(way), built("native")
    engine.restore(state)
    assert run(engine, 0, 3) == pytest.approx(run(native, 0, 3), rel=1e-6)


@pytest.mark.parametrize("way", ["zero2", "zero3"])
def test_frozen_parameters_are_kept_and_come_back(way: str, tmp_path):
    engine, native = built(way, family=Frozen()), built("native", family=Frozen())
    with torch.no_grad():
        engine.restore(saved(native, tmp_path / "before"))
    run(engine, 0, 3)
    run(native, 0, 3)
    state, there = saved(engine, tmp_path / "state"), saved(native, tmp_path / "there")
    found, expected = ({path.name for path in folder.iterdir()} for folder in (state, there))
    assert found == expected
    kept, same = (load_file(folder / "weights-00000.safetensors") for folder in (state, there))
    assert kept.keys() == same.keys() and torch.equal(kept["first.weight"], same["first.weight"])
    other = built(way, family=Frozen(seed=1))  # other weights, the frozen ones too
    other.restore(state)
    assert equal(weights(other), weights(engine)) and run(other, 3, 5) == run(engine, 3, 5)


def test_transformers_cuts_no_model_that_is_made_later():
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    built("zero3")
    assert not is_deepspeed_zero3_enabled()


def test_a_parameter_without_a_gradient_is_named():
    engine = built("zero2")
    forward, frozen = engine.root.forward, engine.root.last.bias
    engine.root.forward = lambda *args: forward(*args).detach() + engine.root.first.weight.sum() * 0
    with pytest.raises(ConfigFault, match=r": [\w.]+, .* and \d+ more"):
        engine.step(tiny_step(0, 8), COUNTS)
    assert frozen.requires_grad


CONFIG = [
    ({}, {"stage": 2, "offload_optimizer.device": "none", "offload_param.device": "none"}),
    ({"zero_stage": 1}, {"stage": 1}),
    ({"offload_optimizer_device": "cpu"}, {"offload_optimizer.device": "cpu"}),
    (
        {"zero_stage": 3, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/fast"},
        {"stage": 3, "offload_optimizer.device": "nvme", "offload_optimizer.nvme_path": "/fast"},
    ),
    ({"zero_stage": 3, "offload_param_device": "cpu"}, {"offload_param.device": "cpu"}),
    (
        {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/quick"},
        {"offload_param.device": "nvme", "offload_param.nvme_path": "/quick"},
    ),
    ({"zero_stage": 3, "zero3_save_16bit": True}, {"stage3_gather_16bit_weights_on_model_save": True}),
]


@pytest.mark.flags("zero_stage", "offload_optimizer_device", "offload_optimizer_nvme_path")
@pytest.mark.flags("offload_param_device", "offload_param_nvme_path")
@pytest.mark.parametrize(("section", "expected"), CONFIG)
def test_flags_reach_deepspeeds_configuration(section: dict, expected: dict, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "/nowhere.json")  # what an accelerate file says is not read
    cfg = TrainConfig(deepspeed=DeepSpeedSection(enable=True, **section), training=TrainingSection(batch_size=3))
    found = make_plugin(cfg, 4, 1000, 1.0).deepspeed_config
    for path, value in expected.items():
        place = found["zero_optimization"]
        for word in path.split("."):
            place = place[word]
        assert place == value
    assert (found["train_batch_size"], found["gradient_accumulation_steps"]) == (12, 1)
    assert found["gradient_clipping"] == 1.0 and found["zero_optimization"]["reduce_bucket_size"] == 1000


@pytest.mark.flags("fp16_master_weights_and_gradients")
def test_the_loss_scale_begins_where_the_device_says_and_masters_may_be_fp16():
    half = TrainingSection(mixed_precision="fp16")
    for masters in (False, True):
        section = DeepSpeedSection(enable=True, offload_optimizer_device="cpu", fp16_master_weights=masters)
        found = make_plugin(TrainConfig(deepspeed=section, training=half), 2, 10, 128.0).deepspeed_config["fp16"]
        assert 2 ** found["initial_scale_power"] == 128 and found["hysteresis"] == 1 and not found["auto_cast"]
        assert found["fp16_master_weights_and_grads"] is masters


def test_the_loss_scale_is_saved_as_torchs():
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    def scaler():
        return DynamicLossScaler(128.0, 4, 1, 1, False)

    theirs, ours = scaler(), torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=4)
    ours.scale(torch.ones(()))
    for step, overflow in enumerate([False, True, False, False, False]):
        theirs.update_scale(overflow)
        torch._amp_update_scale_(ours._scale, ours._growth_tracker, torch.tensor(float(overflow)), 2.0, 0.5, 4)
        assert ours.state_dict().items() <= LossScale(theirs).state_dict().items(), step
    for _ in range(6):  # DeepSpeed's grows in the second of these
        again = scaler()
        LossScale(again).load_state_dict(LossScale(theirs).state_dict())
        for each in (theirs, again):
            each.update_scale(False)
        assert LossScale(again).state_dict() == LossScale(theirs).state_dict()
    assert theirs.cur_scale == 256.0
    LossScale(again).load_state_dict(ours.state_dict())
    assert LossScale(again).get_scale() == ours.get_scale() == 64.0
    ours.load_state_dict(LossScale(theirs).state_dict())
    assert ours.get_scale() == 256.0


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("ACCELERATE_USE_FSDP", "FSDP"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "parallelism"),
        ("ACCELERATE_USE_DEEPSPEED", "--deepspeed"),
    ],
)
def test_what_accelerates_launcher_asks_for_is_not_passed_over(name: str, word: str, monkeypatch):
    monkeypatch.setenv(name, "true")
    engine = make_engine(config({"engine": "accelerate"}), choose("cpu"), Ranks())
    (found,) = engine.faults()
    assert name in found and word in found
    assert make_engine(config(), choose("cpu"), Ranks()).faults() == []


def test_deepspeed_says_what_this_machine_lacks(monkeypatch):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: False)
    nothing = SimpleNamespace(is_compatible=lambda: False)
    monkeypatch.setattr(type(get_accelerator()), "create_op_builder", lambda self, name: nothing)
    section = DeepSpeedSection(enable=True, zero_stage=3, offload_param_device="nvme", offload_param_nvme_path="/quick")
    cfg = config({"engine": "accelerate", "mixed_precision": "fp16"}).model_copy(update={"deepspeed": section})
    precision, disk = make_engine(cfg, choose("cpu"), Ranks()).faults()
    assert "no fp16 on this cpu" in precision and "--mixed_precision=bf16" in precision and "libaio" in disk


def test_fairscale_without_its_patch_is_refused():
    engine = make_engine(config({"engine": "accelerate"}, type="oss"), choose("cpu"), Ranks(size=2))
    (found,) = engine.faults()
    assert 'third_patch.apply_for("accelerate", "oss")' in found


def test_a_rank_goes_along_with_an_evaluation_by_a_batch_that_is_none_of_training():
    batch = replace(tiny_batch(range(2)), step=7)
    batch.draws["keep"] = torch.ones(2)
    spec = TinyFamily().features
    plain = as_evaluated(batch, FeatureSpec({}, {**spec.draws, "keep": DrawSpec("uniform", trains=True)}))
    assert plain.step is None and plain.draws.keys() == {"noise", "timestep"} and "keep" in batch.draws


def test_constants_are_not_sent_and_torch_is_told_so_in_its_own_word() -> None:
    constants, statistics = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
    constants.register_buffer("table", torch.zeros(1), persistent=False)
    assert ddp.buffers(constants) == {"forward_sync_buffers": False} and ddp.buffers(statistics) == {}
