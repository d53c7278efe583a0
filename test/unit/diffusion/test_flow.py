"""Rectified flow: times against closed forms, shifts, cuts, quantiles; the path and its velocity; masks and means."""

from __future__ import annotations

import math
import pickle
from statistics import NormalDist
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from difftrain.contracts import Bucket, DrawSpec
from difftrain.data.samples import Draw, host_draws
from difftrain.diffusion import flow, losses
from difftrain.diffusion.flow import FlowTime
from difftrain.evaluation.losses import value_at

SMALL, LARGE = Bucket(256, 256), Bucket(1024, 1024)
SCALES = {
    "logit_normal": {"sigmoid_scale": 1.0},
    "uniform": {},
    "mode": {"mode_scale": 1.29},
    "cosmap": {},
}
WAYS: list[dict[str, Any]] = [{"method": name, **more} for name, more in SCALES.items()] + [
    {"method": "mode", "mode_scale": -1.0},
    {"method": "mode", "mode_scale": 1.75},
    {"method": "logit_normal", "sigmoid_scale": 2.5},
]


def grid(time: FlowTime, bucket: Bucket = SMALL, n: int = 20000) -> torch.Tensor:
    """Return the quantiles at the middles of n cells: sums over them are integrals."""
    return torch.tensor([time((i + 0.5) / n, bucket) for i in range(n)], dtype=torch.float64)


def density(way: dict[str, Any], t: float) -> float:
    """Return the densities as the paper writes them."""
    if way["method"] == "uniform":
        return 1.0
    if way["method"] == "cosmap":  # equation 22
        return 2.0 / (math.pi - 2.0 * math.pi * t + 2.0 * math.pi * t * t)
    s = way["sigmoid_scale"]  # equation 19, m = 0
    return math.exp(-(math.log(t / (1 - t)) ** 2) / (2 * s * s)) / (s * math.sqrt(2 * math.pi) * t * (1 - t))


@pytest.mark.parametrize("way", [way for way in WAYS if way["method"] != "mode"], ids=str)
def test_times_have_the_density_of_the_paper(way: dict[str, Any]) -> None:
    time, step = FlowTime(**way), 1e-6
    for u in (0.03, 0.2, 0.5, 0.77, 0.96):
        slope = (time(u + step, SMALL) - time(u - step, SMALL)) / (2 * step)
        assert slope == pytest.approx(1.0 / density(way, time(u, SMALL)), rel=1e-5)


@pytest.mark.parametrize("scale", [-1.0, 0.0, 0.8, 1.29, 1.75])
def test_mode_is_the_papers_of_one_minus_u(scale: float) -> None:
    for i in range(1, 100):
        u = 1 - i / 100
        papers = 1 - u - scale * (math.cos(math.pi / 2 * u) ** 2 - 1 + u)
        assert FlowTime("mode", mode_scale=scale)(i / 100, SMALL) == pytest.approx(papers, abs=1e-14)


def test_cosmap_is_the_papers() -> None:
    for i in range(1, 100):
        papers = 1 - 1 / (math.tan(math.pi / 2 * i / 100) + 1)
        assert FlowTime("cosmap")(i / 100, SMALL) == pytest.approx(papers, abs=1e-14)


def test_quantiles_of_a_logit_normal_are_sigmoids_of_normal_ones() -> None:
    for tenth in range(1, 10):
        x = 1.7 * NormalDist().inv_cdf(tenth / 10)
        spec = DrawSpec("uniform", through=FlowTime(sigmoid_scale=1.7))
        assert value_at(spec, tenth, SMALL) == pytest.approx(1 / (1 + math.exp(-x)), rel=1e-14)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("s", [None, 3.0, 0.4])
def test_times_grow_stay_inside_and_are_undone_by_the_distribution_function(
    way: dict[str, Any], s: float | None
) -> None:
    time = FlowTime(**way, shift=s)
    found = [time(u, SMALL) for u in (0.0, 1e-300, 1e-9, 0.1, 0.3, 0.5, 0.8, 1 - 1e-9, 1 - 2.0**-53, 1.0)]
    assert all(0.0 < t < 1.0 for t in found) and found == sorted(found)
    for u in (0.02, 0.31, 0.5, 0.93):
        assert time.share_below(time(u, SMALL), s or 1.0) == pytest.approx(u, abs=1e-10)


@pytest.mark.parametrize("s", [0.5, 1.0, 3.0])
def test_a_shift_is_that_of_the_noise_and_undone_by_its_inverse(s: float) -> None:
    for t in (0.01, 0.5, 0.9):
        there = FlowTime("uniform", shift=s)(t, SMALL)
        assert there == pytest.approx(s * t / (1 + (s - 1) * t), rel=1e-14)
        assert there / (1 - there) == pytest.approx(s * t / (1 - t), rel=1e-12)  # the noise against the signal
        assert flow.shifted(there, 1 / s) == pytest.approx(t, rel=1e-14)


def test_the_shift_by_size_is_linear_in_mu() -> None:
    assert flow.flux_shift(256) == pytest.approx(math.exp(0.5)) and flow.flux_shift(4096) == pytest.approx(
        math.exp(1.15)
    )
    assert math.log(flow.flux_shift(2176)) == pytest.approx((0.5 + 1.15) / 2)
    time = FlowTime("uniform", flux_shift=True)
    for bucket, mu in ((SMALL, 0.5), (LARGE, 1.15), (Bucket(256, 512), 0.5 + 256 * 0.65 / 3840)):
        for t in (0.2, 0.7):
            assert time(t, bucket) == pytest.approx(math.exp(mu) / (math.exp(mu) + (1 / t - 1)), rel=1e-13)
    assert FlowTime("uniform", flux_shift=True, token=8)(0.5, Bucket(128, 128)) == time(0.5, SMALL)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shift", [{}, {"shift": 3.0}, {"flux_shift": True}], ids=str)
def test_a_cut_keeps_proportions_and_piles_nothing_up(way: dict[str, Any], shift: dict[str, Any]) -> None:
    """The truncated distribution is the whole one's part within, made up to 1."""
    whole, cut = (grid(FlowTime(**way, **shift, **ends), LARGE) for ends in ({}, {"min_t": 0.2, "max_t": 0.85}))
    inside = whole[(whole >= 0.2) & (whole <= 0.85)]
    assert 0.2 <= cut.min() < 0.201 and 0.849 < cut.max() <= 0.85
    at = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    torch.testing.assert_close(torch.quantile(cut, at), torch.quantile(inside, at), rtol=0, atol=5e-4)


@given(
    u=st.floats(0, 1),
    low=st.floats(0, 0.98),
    width=st.floats(0.001, 1),
    way=st.sampled_from(WAYS),
    s=st.floats(0.01, 100),
)
def test_times_keep_to_their_cut(u: float, low: float, width: float, way: dict[str, Any], s: float) -> None:
    high = min(1.0, low + width)
    t = FlowTime(**way, shift=s, min_t=low, max_t=high)(u, SMALL)
    assert low - 1e-9 <= t <= high + 1e-9 and 0 <= t <= 1


def test_they_go_to_workers_and_are_rounded_once() -> None:
    time = FlowTime(shift=3.0, min_t=0.1)
    again = pickle.loads(pickle.dumps(time))
    assert again == time and again(0.3, SMALL) == time(0.3, SMALL)
    draws = [Draw(i, bytes([i] * 16), 0) for i in range(4)]
    plain = host_draws("timestep", DrawSpec("uniform"), SMALL, draws, 7)
    found = host_draws("timestep", DrawSpec("uniform", through=time), SMALL, draws, 7)
    assert found.dtype == torch.float32 and found.shape == (4,)
    for u, t in zip(plain.tolist(), found.tolist(), strict=True):
        assert t == pytest.approx(time(u, SMALL), rel=1e-6)


def test_the_path_is_straight_and_its_derivative_is_the_target() -> None:
    x0, noise = torch.randn(2, 3, 4, 4, dtype=torch.float64), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    t = torch.tensor([0.25, 0.75], dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(flow.add_noise(x0, noise, torch.zeros(2)), x0)
    torch.testing.assert_close(flow.add_noise(x0, noise, torch.ones(2)), noise)
    whole = torch.autograd.functional.jacobian(lambda at: flow.add_noise(x0, noise, at).flatten(1).sum(1), t)
    torch.testing.assert_close(torch.diagonal(whole), flow.target(x0, noise).flatten(1).sum(1))


def test_means_over_the_mask_and_over_all() -> None:
    loss = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]], [[[1.0, 1.0], [1.0, 1.0]]]])
    mask = torch.tensor([[[[1.0, 0.0], [0.5, 0.0]]], [[[0.0, 0.0], [0.0, 0.0]]]])
    torch.testing.assert_close(losses.per_sample(loss, mask), torch.tensor([2.5 / 1.5, 0.0]))
    torch.testing.assert_close(losses.per_sample(loss, mask, "all"), torch.tensor([2.5 / 4, 0.0]))
    torch.testing.assert_close(losses.per_sample(loss, None, "all"), torch.tensor([2.5, 1.0]))


def test_a_mask_goes_to_the_latent_grid_by_the_middle_of_each_cell() -> None:
    mask = torch.zeros(1, 1, 16, 16)
    mask[..., 4, 4] = 1.0  # the pixel that nearest-exact looks at, of a cell of 8
    assert losses.mask_nearest(mask, (2, 2)).flatten().tolist() == [1.0, 0.0, 0.0, 0.0]
    assert losses.mask_nearest(mask.bool(), (2, 2)).dtype == torch.float32


def test_the_charbonnier_loss() -> None:
    found = losses.elementwise(torch.tensor([[3.0]]), torch.tensor([[-1.0]]), "pseudo_huber", torch.tensor([3.0]))
    assert found.item() == pytest.approx(5.0 - 3.0)


def test_frames_may_have_times_of_their_own() -> None:
    x0, noise = torch.randn(2, 3, 4, 5, 5), torch.randn(2, 3, 4, 5, 5)
    t = torch.rand(2, 4)
    found = flow.add_noise(x0, noise, t)
    for frame in range(4):
        torch.testing.assert_close(found[:, :, frame], flow.add_noise(x0[:, :, frame], noise[:, :, frame], t[:, frame]))
    torch.testing.assert_close(flow.add_noise(x0, noise, t[:, :1].expand(2, 4)), flow.add_noise(x0, noise, t[:, 0]))
