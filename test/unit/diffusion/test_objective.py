"""Losses, their weights and the zero-terminal-SNR process against kohya's figures and the algebra of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler

from difftrain.config import LossSection
from difftrain.diffusion import ddpm, losses

KOHYA = json.loads((Path(__file__).parents[1] / "files" / "kohya_objective.json").read_text())
T = torch.tensor(KOHYA["loss_weights"]["timesteps"])
PLAIN, ZERO = ddpm.tables(), ddpm.tables("cpu", zero_terminal_snr=True)


def weight(name: str) -> torch.Tensor:
    snr, kind = PLAIN.snr[T], "v_prediction" if name.endswith("v=True") else "epsilon"
    value = float(name.partition("=")[2].split()[0]) if "=" in name and not name.startswith("debiased") else 0.0
    if name.startswith("min_snr_gamma"):
        return losses.min_snr(snr, value, kind)
    if name.startswith("debiased"):
        return losses.debiased(snr, kind)
    if name.startswith("v_pred_like_loss"):
        return losses.plus_like_velocity(snr, value)
    assert name == "scale_v_pred_loss_like_noise_pred"
    return losses.like_noise_prediction(snr)


@pytest.mark.parametrize("name", KOHYA["loss_weights"]["weight_of_unit_loss"])
def test_weights_are_kohyas(name: str) -> None:
    expected = torch.tensor(KOHYA["loss_weights"]["weight_of_unit_loss"][name])
    torch.testing.assert_close(weight(name), expected, rtol=1e-5, atol=0)


def test_the_highest_snr_is_held_at_1000() -> None:
    assert PLAIN.snr[0] > 1000
    snr = PLAIN.snr[:1]
    assert losses.debiased(snr, "epsilon").item() == pytest.approx(1000**-0.5)
    assert losses.like_noise_prediction(snr).item() == pytest.approx(1000 / 1001)


def test_a_prediction_of_neither_kind_is_refused() -> None:
    for wrong in (lambda: losses.min_snr(PLAIN.snr, 5.0, "sample"), lambda: losses.debiased(PLAIN.snr, "sample")):
        with pytest.raises(ValueError, match="got 'sample'"):
            wrong()


ROWS = KOHYA["losses"]


def name_of(row: dict[str, Any]) -> str:
    return f"{row['loss_type']} {row['huber_schedule']} {row['huber_c']} {row['huber_scale']}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_losses_and_thresholds_are_kohyas(row: dict[str, Any]) -> None:
    """Also that huber_scale changes nothing with the schedule snr."""
    t, c = torch.tensor(row["timesteps"]), None
    if row["threshold"] is not None:
        c = losses.threshold(PLAIN, t, row["huber_schedule"], row["huber_c"], row["huber_scale"])
        torch.testing.assert_close(c, torch.tensor(row["threshold"]), rtol=1e-5, atol=0)
    prediction, target = (torch.tensor(row[name]).view(len(t), -1) for name in ("pred", "target"))
    found = losses.elementwise(prediction, target, row["loss_type"], c)
    torch.testing.assert_close(found.flatten(), torch.tensor(row["loss"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bend", [0.3, 1.0, 2.5])
def test_torchs_own_losses_bend_where_they_do(bend: float) -> None:
    prediction, target = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).double().split(1)
    c = torch.tensor([bend], dtype=torch.float64)
    found = [losses.elementwise(prediction, target, kind, c) for kind in ("huber_delta", "smooth_l1_beta")]
    wanted = [
        torch.nn.functional.huber_loss(prediction, target, reduction="none", delta=bend),
        torch.nn.functional.smooth_l1_loss(prediction, target, reduction="none", beta=bend),
    ]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    section = LossSection(type="huber_delta", bend=bend)
    assert losses.fixed_threshold(section) == bend and losses.fixed_threshold(LossSection(type="smooth_l1_beta")) == 1.0
    assert losses.fixed_threshold(LossSection()) is None


def test_wrong_names_of_losses_are_refused() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="got 'l3'"):
        losses.elementwise(one, one, "l3")
    with pytest.raises(ValueError, match="threshold; got 'huber'"):
        losses.elementwise(one, one, "huber")
    with pytest.raises(ValueError, match="got 'linear'"):
        losses.threshold(PLAIN, T, "linear", 0.1, 1.0)


def test_zero_terminal_snr_is_kohyas() -> None:
    figures = KOHYA["zero_terminal_snr"]
    t = torch.tensor(figures["timesteps"])
    betas = torch.from_numpy(ddpm.betas(ddpm.kept(zero_terminal_snr=True))).float()
    for found, name in (
        (ZERO.alphas_cumprod[t], "alphas_cumprod"),
        (betas[t], "betas"),
        (PLAIN.alphas_cumprod[t], "plain_alphas_cumprod"),
    ):
        torch.testing.assert_close(found, torch.tensor(figures[name]), rtol=1e-5, atol=1e-6)
    assert ZERO.alphas_cumprod[-1] == 0 and ZERO.snr[-1] == 0 and ZERO.alphas_cumprod[0] == PLAIN.alphas_cumprod[0]


def test_zero_terminal_snr_is_that_of_diffusers_and_ends_in_pure_noise() -> None:
    theirs = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", rescale_betas_zero_snr=True
    )
    torch.testing.assert_close(ZERO.alphas_cumprod, theirs.alphas_cumprod, rtol=1e-5, atol=1e-6)
    x_0, noise = torch.randn(2, 1, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    last = torch.tensor([999])
    assert torch.equal(ddpm.add_noise(ZERO, x_0, noise, last), noise)
    assert torch.equal(ddpm.velocity(ZERO, x_0, noise, last), -x_0)
    bent = losses.threshold(ZERO, last, "snr", 0.1, 1.0)  # no division by the signal that is not there
    assert bent.item() == pytest.approx(0.1)


def test_a_sample_is_the_mean_over_its_own_mask() -> None:
    loss = torch.arange(24.0).view(2, 3, 2, 2)
    mask = torch.tensor([[[[1.0, 0.0], [0.5, 0.0]]], [[[0.0, 0.0], [0.0, 0.0]]]])
    found = losses.per_sample(loss, mask)
    by_hand = (loss[0, :, 0, 0].mean() + 0.5 * loss[0, :, 1, 0].mean()) / 1.5
    assert found[0].item() == pytest.approx(by_hand.item()) and found[1] == 0
    torch.testing.assert_close(losses.per_sample(loss, torch.ones(2, 1, 2, 2)), losses.per_sample(loss))


def test_a_mask_is_brought_to_the_latents_size_by_area() -> None:
    mask = torch.zeros(1, 1, 16, 24)
    mask[..., :4, :8] = 1.0  # half of the first cell of 8 x 8
    assert losses.mask_at(mask, (2, 3)).flatten().tolist() == [0.5, 0, 0, 0, 0, 0]
