"""What a rectified flow cannot go with, and what one family has alone: refused by name, all of it at once."""

from __future__ import annotations

from typing import Any

import pytest
from refusals import is_about, names

from difftrain.config import TrainConfig
from difftrain.config.rules import objective
from difftrain.config.rules.finding import check
from difftrain.config.schema.families import why_not
from difftrain.config.schema.sections import NoiseSection

FLOW = {"model": {"family": "sd3"}}
SCHEDULED = ("schedule", "SDXL", "sd3")  # what is said of a setting of the noise schedule


def found(sections: dict[str, Any], *, sd3: bool = True) -> tuple[list[str], list[str]]:
    """Apply the rules to what is given; return faults and notes."""
    sections = {name: dict(fields) for name, fields in sections.items()}
    asked = {f"{section}.{field}" for section, fields in sections.items() for field in fields}
    if sd3:
        sections["model"] = {"family": "sd3"} | sections.get("model", {})
    faults, notes = check(TrainConfig.model_validate(sections), objective.FLOW_RULES, asked, set(), {})
    return [str(fault) for fault in faults], notes


FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"flow": {"min_t": 0.7, "max_t": 0.3}}, ["[flow] min_t", "0.7 >= 0.3"]),
    ({"flow": {"min_t": 0.5, "max_t": 0.5}}, ["[flow] min_t", "0.5 >= 0.5"]),
    ({"flow": {"shift": 3.0, "flux_shift": True}}, ["[flow] shift", "flux_shift", "3"]),
    ({"loss": {"type": "huber"}}, ["--loss_type", "huber", "SDXL's"]),
    ({"loss": {"type": "smooth_l1"}}, ["--loss_type", "smooth_l1", "SDXL's"]),
    ({"loss": {"text_recon_gamma": 0.1, "text_recon_target_layer": 16}, "model": {"num_layers": 15}},
     ["[loss] text_recon_target_layer", "16", "15"]),
    ({"loss": {"text_recon_gamma": 0.1, "text_recon_target_layer": 15}, "model": {"num_layers": 15}},
     ["[loss] text_recon_target_layer", "15", "itself"]),
    ({"model": {"fp8_frozen": "unet"}}, ["--fp8_base", "SDXL", "8"]),
    ({"noise": {"offset": 0.05}}, ["--noise_offset", *SCHEDULED]),
    ({"noise": {"zero_terminal_snr": True}}, ["--zero_terminal_snr", *SCHEDULED]),
    ({"noise": {"max_timestep": 500}}, ["--max_timestep", *SCHEDULED]),
    ({"model": {"prediction_type": "v_prediction"}}, ["--v_parameterization", *SCHEDULED]),
    ({"loss": {"min_snr_gamma": 5.0}}, ["--min_snr_gamma", *SCHEDULED]),
    ({"loss": {"debiased_estimation": True}}, ["--debiased_estimation_loss", *SCHEDULED]),
    ({"model": {"clip_skip": 1}}, ["--clip_skip", "sd3", "hidden_states[-2]", "CLIP"]),
    ({"model": {"max_token_length": 225}}, ["--max_token_length", "sd3's", "77"]),
    ({"model": {"train_text_encoder": True}}, ["--train_text_encoder", "sd3's", "frozen"]),
    ({"optimizer": {"block_lr": (1e-4,)}}, ["--block_lr", "UNet"]),
    ({"save": {"model_as": "ckpt"}}, ["--save_model_as", "ckpt", "sd3", "diffusers"]),
    ({"captions": {"weighted": True}}, ["--weighted_captions", "CLIP's"]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "facts"), FAULTS, ids=str)
def test_one_contradiction_is_one_fault(given: dict[str, Any], facts: list[str]) -> None:
    faults, notes = found(given)
    assert len(faults) == 1 and is_about(faults[0], *facts) and not notes, faults


def test_a_layer_beyond_the_depth_is_a_fault_without_gamma_too() -> None:
    (fault,), _ = found({"loss": {"text_recon_target_layer": 9}, "model": {"num_layers": 3}})
    assert is_about(fault, "[loss] text_recon_target_layer", "9", "3")


def test_all_are_named_at_once() -> None:
    every = {
        "noise": {"offset": 0.1, "min_timestep": 5},
        "flow": {"min_t": 0.9, "max_t": 0.2, "shift": 2.0, "flux_shift": True},
        "loss": {"type": "huber", "text_recon_gamma": 0.1, "text_recon_target_layer": 4, "v_pred_like": 0.5},
        "model": {"num_layers": 3, "train_text_encoder": True},
    }
    assert len(found(every)[0]) == 8


NOTES: list[tuple[dict[str, Any], list[str]]] = [
    ({"flow": {"sigmoid_scale": 2.0, "timestep_sample_method": "uniform"}},
     ["[flow] sigmoid_scale", "timestep_sample_method", "logit_normal"]),
    ({"flow": {"mode_scale": 1.0}}, ["[flow] mode_scale", "timestep_sample_method", "mode"]),
    ({"model": {"uncond_text_dropout_prob": 0.3}}, ["[model] uncond_text_dropout_prob", "enable_uncond_text_dropout"]),
    ({"loss": {"text_recon_target_layer": 2}}, ["[loss] text_recon_target_layer", "text_recon_gamma", "0"]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "facts"), NOTES, ids=str)
def test_what_has_no_effect_is_said(given: dict[str, Any], facts: list[str]) -> None:
    faults, notes = found(given)
    assert not faults and len(notes) == 1 and is_about(notes[0], *facts)


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
    ((section, fields),) = given.items()
    assert is_about(fault, f"[{section}] {next(iter(fields))}", "sd3's", "SDXL") and not notes


def test_what_is_left_at_its_default_says_nothing() -> None:
    assert found({"noise": {"offset": None, "zero_terminal_snr": False}}) == ([], [])
    assert found({"flow": {"min_t": 0.0, "shift": None}, "model": {"num_layers": None}}, sd3=False) == ([], [])


def test_every_field_of_the_noise_schedule_is_known() -> None:
    for field in NoiseSection.model_fields:
        assert names(why_not("sd3", f"noise.{field}")[0], *SCHEDULED)
