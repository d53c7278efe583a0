"""What a rectified flow cannot go with, and what one family has alone: refused by name, all of it at once."""

from __future__ import annotations

from typing import Any

import pytest

from difftrain.config import TrainConfig
from difftrain.config.rules import objective
from difftrain.config.rules.finding import check
from difftrain.config.schema.families import why_not
from difftrain.config.schema.sections import NoiseSection

FLOW = {"model": {"family": "sd3"}}


def found(sections: dict[str, Any], *, sd3: bool = True) -> tuple[list[str], list[str]]:
    """Apply the rules to what is given; return faults and notes."""
    sections = {name: dict(fields) for name, fields in sections.items()}
    asked = {f"{section}.{field}" for section, fields in sections.items() for field in fields}
    if sd3:
        sections["model"] = {"family": "sd3"} | sections.get("model", {})
    faults, notes = check(TrainConfig.model_validate(sections), objective.FLOW_RULES, asked, set(), {})
    return [str(fault) for fault in faults], notes


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"flow": {"min_t": 0.7, "max_t": 0.3}}, "[flow] min_t: leaves no time to train on: 0.7 >= 0.3"),
    ({"flow": {"min_t": 0.5, "max_t": 0.5}}, "leaves no time to train on: 0.5 >= 0.5"),
    ({"flow": {"shift": 3.0, "flux_shift": True}}, "[flow] shift: contradicts flux_shift: the shift is 3"),
    ({"loss": {"type": "huber"}}, "--loss_type: huber bends where SDXL's noise schedule says"),
    ({"loss": {"type": "smooth_l1"}}, "smooth_l1 bends"),
    ({"loss": {"text_recon_gamma": 0.1, "text_recon_target_layer": 16}, "model": {"num_layers": 15}},
     "[loss] text_recon_target_layer: is 16, the transformer has 15 blocks"),
    ({"loss": {"text_recon_gamma": 0.1, "text_recon_target_layer": 15}, "model": {"num_layers": 15}},
     "the last one's text would be compared with itself"),
    ({"model": {"fp8_frozen": "unet"}}, "--fp8_base: holds weights of SDXL in 8 bits"),
    ({"save": {"model_as": "safetensors"}}, "safetensors is not built for sd3, which is exported as a diffusers folder"),
    ({"noise": {"offset": 0.05}}, "--noise_offset: belongs to the noise schedule of SDXL, and sd3 learns a rectified flow"),
    ({"noise": {"zero_terminal_snr": True}}, "--zero_terminal_snr: belongs to the noise schedule"),
    ({"noise": {"max_timestep": 500}}, "--max_timestep: belongs to the noise schedule"),
    ({"model": {"prediction_type": "v_prediction"}}, "--v_parameterization: belongs to the noise schedule"),
    ({"loss": {"min_snr_gamma": 5.0}}, "--min_snr_gamma: belongs to the noise schedule"),
    ({"loss": {"debiased_estimation": True}}, "belongs to the noise schedule"),
    ({"model": {"clip_skip": 1}}, "--clip_skip: sd3 reads hidden_states[-2] of CLIP"),
    ({"model": {"max_token_length": 225}}, "--max_token_length: sd3's CLIP encoders read 77 tokens"),
    ({"model": {"train_text_encoder": True}}, "--train_text_encoder: sd3's text encoders are frozen"),
    ({"optimizer": {"block_lr": (1e-4,)}}, "--block_lr: names blocks of a UNet"),
    ({"save": {"model_as": "ckpt"}}, "--save_model_as: ckpt is not built for sd3, which is exported as a diffusers folder"),
    ({"captions": {"weighted": True}}, "--weighted_captions: weighs tokens of CLIP's chunks"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "says"), FAULTS, ids=[says for _, says in FAULTS])
def test_one_contradiction_is_one_fault(given: dict[str, Any], says: str) -> None:
    faults, notes = found(given)
    assert len(faults) == 1 and says in faults[0] and not notes, faults


def test_a_layer_beyond_the_depth_is_a_fault_without_gamma_too() -> None:
    (fault,), _ = found({"loss": {"text_recon_target_layer": 9}, "model": {"num_layers": 3}})
    assert "is 9, the transformer has 3 blocks" in fault


def test_all_are_named_at_once() -> None:
    every = {
        "noise": {"offset": 0.1, "min_timestep": 5},
        "flow": {"min_t": 0.9, "max_t": 0.2, "shift": 2.0, "flux_shift": True},
        "loss": {"type": "huber", "text_recon_gamma": 0.1, "text_recon_target_layer": 4, "v_pred_like": 0.5},
        "model": {"num_layers": 3, "train_text_encoder": True},
    }
    assert len(found(every)[0]) == 8


NOTES: list[tuple[dict[str, Any], str]] = [
    ({"flow": {"sigmoid_scale": 2.0, "timestep_sample_method": "uniform"}}, "[flow] sigmoid_scale: has no effect"),
    ({"flow": {"mode_scale": 1.0}}, "[flow] mode_scale: has no effect: timestep_sample_method is not mode"),
    ({"model": {"uncond_text_dropout_prob": 0.3}}, "has no effect without enable_uncond_text_dropout"),
    ({"loss": {"text_recon_target_layer": 2}}, "[loss] text_recon_target_layer: has no effect: text_recon_gamma is 0"),
]


@pytest.mark.parametrize(("given", "says"), NOTES, ids=[says for _, says in NOTES])
def test_what_has_no_effect_is_said(given: dict[str, Any], says: str) -> None:
    faults, notes = found(given)
    assert not faults and len(notes) == 1 and says in notes[0]


FINE: list[dict[str, Any]] = [
    {"flow": {"timestep_sample_method": "mode", "mode_scale": 0.8, "min_t": 0.1, "max_t": 0.9, "shift": 3.0}},
    {"flow": {"timestep_sample_method": "cosmap", "flux_shift": True}},
    {"loss": {"text_recon_gamma": 0.25, "text_recon_target_layer": 14}, "model": {"num_layers": 15}},
    {"loss": {"text_recon_gamma": 0.25, "text_recon_target_layer": 20}},  # the weights tell, and the family looks
    {"loss": {"type": "pseudo_huber", "pseudo_huber_c": 0.1}},
    {"model": {"enable_uncond_text_dropout": True, "uncond_text_dropout_prob": 0.1, "prediction_type": "epsilon"}},
]


@pytest.mark.parametrize("given", FINE, ids=str)
def test_what_is_meant_is_no_fault(given: dict[str, Any]) -> None:
    assert found(given) == ([], [])


@pytest.mark.parametrize(
    "given",
    [
        {"flow": {"shift": 3.0}},
        {"flow": {"timestep_sample_method": "cosmap"}},
        {"model": {"t5_attention_mask": True}},
        {"model": {"enable_uncond_text_dropout": True}},
        {"loss": {"text_recon_gamma": 0.1}},
        {"repa": {"weight": 0.1}},
        {"tread": {"share": 0.5}},
    ],
    ids=str,
)
def test_sdxl_has_none_of_it(given: dict[str, Any]) -> None:
    (fault,), notes = found(given, sd3=False)
    assert "is sd3's: SDXL has nothing like it" in fault and not notes


def test_what_is_left_at_its_default_says_nothing() -> None:
    assert found({"noise": {"offset": None, "zero_terminal_snr": False}}) == ([], [])
    assert found({"flow": {"min_t": 0.0, "shift": None}, "model": {"num_layers": None}}, sd3=False) == ([], [])


def test_every_field_of_the_noise_schedule_is_known() -> None:
    for field in NoiseSection.model_fields:
        assert "belongs to the noise schedule of SDXL, and sd3 learns" in why_not("sd3", f"noise.{field}")[0]
