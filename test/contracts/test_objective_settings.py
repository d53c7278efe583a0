"""Every setting of loss, noise and time that a family takes changes the loss of a step: none parses and does nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import Tiny, config, loaded

from difftrain.config import TrainConfig
from difftrain.config.schema.families import takes

SECTIONS = ("loss", "noise", "flow")
ELSEWHERE = {
    "loss.masked",
    "loss.prior_weight",
}  # which masks are read, and a record's weight: data/recipe.py and its tests
V = {"model": {"prediction_type": "v_prediction"}}
# a field -> a value that is not its default, and what gives it a meaning
SETTINGS: dict[str, tuple[Any, dict[str, dict[str, Any]]]] = {
    "loss.type": ("l1", {}),
    "loss.pseudo_huber_c": (0.3, {"loss": {"type": "pseudo_huber"}}),
    "loss.bend": (0.2, {"loss": {"type": "huber_delta"}}),
    "loss.mask_mean": ("all", {}),
    "loss.text_recon_gamma": (0.5, {}),
    "loss.text_recon_target_layer": (1, {"loss": {"text_recon_gamma": 0.5}}),
    "loss.huber_schedule": ("constant", {"loss": {"type": "huber"}}),
    "loss.huber_c": (0.4, {"loss": {"type": "pseudo_huber"}}),
    "loss.huber_scale": (0.5, {"loss": {"type": "huber", "huber_schedule": "constant"}}),
    "loss.min_snr_gamma": (0.5, {}),
    "loss.min_snr_plus_one": (True, {"loss": {"min_snr_gamma": 1e4}, **V}),
    "loss.scale_v_pred_like_noise_pred": (True, V),
    "loss.v_pred_like": (0.3, {}),
    "loss.debiased_estimation": (True, {}),
    "noise.offset": (0.1, {}),
    "noise.offset_random_strength": (True, {"noise": {"offset": 0.1}}),
    "noise.adaptive_scale": (0.5, {"noise": {"offset": 0.1}}),
    "noise.multires_iterations": (4, {}),
    "noise.multires_discount": (0.8, {"noise": {"multires_iterations": 4}}),
    "noise.ip_gamma": (0.2, {}),
    "noise.ip_gamma_random_strength": (True, {"noise": {"ip_gamma": 0.2}}),
    "noise.zero_terminal_snr": (True, V),
    "noise.min_timestep": (700, {}),
    "noise.max_timestep": (200, {}),
    "flow.timestep_sample_method": ("mode", {}),
    "flow.sigmoid_scale": (2.0, {}),
    "flow.mode_scale": (0.3, {"flow": {"timestep_sample_method": "mode"}}),
    "flow.shift": (7.0, {}),
    "flow.flux_shift": (True, {"flow": {"shift": None}}),
    "flow.min_t": (0.7, {}),
    "flow.max_t": (0.3, {}),
}
OF_DDPM, OF_FLOW = "sdxl", "sd3"  # one family of each objective: models/objective/ is the same code for the others


def taken(family: str) -> list[str]:
    """Return what a family takes of the three sections."""
    cfg = config(family)
    paths = [f"{name}.{field}" for name in SECTIONS for field in TrainConfig.model_fields[name].annotation.model_fields]
    return [path for path in paths if takes(cfg, path) and path not in ELSEWHERE]


def loss_of(family: str, sections: dict[str, dict[str, Any]]) -> torch.Tensor:
    """Return the loss of a step of the tiny model, half of every image masked."""
    rest = {name: table for name, table in sections.items() if name != "model"}
    tiny: Tiny = loaded(config(family, rest, **sections.get("model", {})))
    mask = torch.zeros(len(tiny.batch.record_id), 1, tiny.batch.bucket.height, tiny.batch.bucket.width)
    mask[..., : tiny.batch.bucket.height // 2, :] = 1
    tiny.batch = replace(tiny.batch, loss_mask=mask)
    with torch.no_grad():
        sums = tiny.family.loss_sums(tiny.family.forward(tiny.parts.root, inputs := tiny.inputs()), inputs)
    return sum(value for name, value in sums.items() if "/" not in name)  # type: ignore[return-value]


def test_every_field_is_here() -> None:
    assert set(SETTINGS) == {*taken(OF_DDPM), *taken(OF_FLOW)}


@pytest.mark.parametrize(
    ("family", "path"), [(family, path) for family in (OF_DDPM, OF_FLOW) for path in taken(family)]
)
def test_it_changes_the_loss(family: str, path: str) -> None:
    (section, field), (value, companions) = path.split("."), SETTINGS[path]
    without = loss_of(family, companions)
    assert torch.equal(loss_of(family, companions), without)
    given = companions | {section: companions.get(section, {}) | {field: value}}
    assert not torch.equal(loss_of(family, given), without), path
