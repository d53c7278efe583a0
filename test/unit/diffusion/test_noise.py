"""Noise that is not white: its statistics, torch's own stretching, and that it is each sample's own."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from difftrain.contracts import Bucket, Draw, DrawSpec, NoiseMix
from difftrain.data.samples import host_draws
from difftrain.diffusion import draws
from difftrain.diffusion.draws import normal

SHAPE = (4, 24, 32)


def key(i: int) -> bytes:
    return hashlib.blake2b(bytes([i % 256, i // 256]), digest_size=16).digest()


def many(mix: NoiseMix, count: int = 300, shape: tuple[int, int, int] = SHAPE) -> np.ndarray:
    return np.stack([draws.mixed(7, key(i), 0, "noise", shape, mix) for i in range(count)])


def white(count: int = 300, shape: tuple[int, int, int] = SHAPE) -> np.ndarray:
    return np.stack([normal(7, key(i), 0, "noise", shape) for i in range(count)])


def test_an_offset_shifts_each_channel_by_a_normal_of_its_strength() -> None:
    shift = many(NoiseMix(offset=0.5)) - white()
    assert np.ptp(shift, axis=(2, 3)).max() < 2e-6  # one value a channel
    shift = shift[:, :, 0, 0]
    assert shift.std() == pytest.approx(0.5, rel=0.05) and abs(shift.mean()) < 0.05
    assert np.abs(np.corrcoef(shift.T) - np.eye(4)).max() < 0.2  # channels go their own ways


def test_a_drawn_strength_is_uniform_below_the_offset() -> None:
    fixed, drawn = (many(NoiseMix(offset=0.5, offset_random=on), 200) - white(200) for on in (False, True))
    share = drawn[:, 0, 0, 0] / fixed[:, 0, 0, 0]
    assert 0 <= share.min() < 0.05 and 0.95 < share.max() <= 1.001
    assert share.mean() == pytest.approx(0.5, abs=0.06) and share.std() == pytest.approx(12**-0.5, abs=0.03)


def test_levels_bring_low_frequencies_and_unit_deviation() -> None:
    found = many(NoiseMix(iterations=6, discount=0.6), 60)
    assert found.std(axis=(1, 2, 3), ddof=1) == pytest.approx(np.ones(60), abs=1e-5)
    quarters = found.reshape(60, 4, 4, 6, 4, 8).mean(axis=(3, 5))  # means of 48: deviation 0.144 where white
    assert quarters.std() > 2 * white(60).reshape(60, 4, 4, 6, 4, 8).mean(axis=(3, 5)).std()
    weaker = many(NoiseMix(iterations=6, discount=0.3), 60).reshape(60, 4, 4, 6, 4, 8).mean(axis=(3, 5))
    assert weaker.std() < quarters.std()
    only_first = many(NoiseMix(iterations=1, discount=0.6), 60)  # level 0 is as fine as the noise itself
    assert only_first.reshape(60, 4, 4, 6, 4, 8).mean(axis=(3, 5)).std() == pytest.approx(48**-0.5, rel=0.1)


def test_levels_are_kohyas_sum() -> None:
    """Level i has discount^i of the strength and 1 / r^i of the sides, and the first of one pixel is the last."""
    mix, seen = NoiseMix(iterations=20, discount=0.5, normalise=False), []
    real = draws.stretch
    try:
        draws.stretch = lambda image, size: seen.append(image.shape[1:]) or real(image, size)  # type: ignore[assignment]
        found = draws.mixed(7, key(1), 0, "noise", SHAPE, mix)
    finally:
        draws.stretch = real
    assert seen[0] == (24, 32) and 1 in seen[-1] and not any(1 in size for size in seen[:-1])
    assert all(32 / 4**i - 1 <= size[1] <= 32 / 2**i for i, size in enumerate(seen))
    total = normal(7, key(1), 0, "noise", SHAPE).astype(np.float64)
    for i, size in enumerate(seen):
        level = torch.from_numpy(normal(7, key(1), 0, f"noise_multires_{i}", (4, *size)))
        total += 0.5**i * torch.nn.functional.interpolate(level[None], SHAPE[1:], mode="bilinear")[0].numpy()
    assert np.abs(found - total).max() < 1e-5
    whole = draws.mixed(7, key(1), 0, "noise", SHAPE, NoiseMix(iterations=20, discount=0.5))
    assert np.abs(whole - total / total.std(ddof=1)).max() < 1e-5


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (7, 16), (24, 32)])
def test_stretching_is_torchs(size: tuple[int, int]) -> None:
    image = normal(1, key(0), 0, "x", (2, *size))
    theirs = torch.nn.functional.interpolate(torch.from_numpy(image)[None], (24, 32), mode="bilinear")[0].numpy()
    assert np.abs(draws.stretch(image, (24, 32)) - theirs).max() < 1e-6


def test_the_deviation_does_not_depend_on_the_order_of_sums() -> None:
    x = many(NoiseMix(offset=3.0), 1)[0]
    assert draws.deviation(x) == draws.deviation(x[::-1, ::-1, ::-1].copy())
    exact = x.astype(np.float64).std(ddof=1)
    assert draws.deviation(x) == pytest.approx(exact, rel=1e-6)  # its squares are of values on a grid


def test_noise_is_the_same_bits_for_ever_and_everywhere() -> None:
    found = draws.mixed(3, key(5), 2, "noise", (4, 16, 16), NoiseMix(0.1, True, 6, 0.3))
    digest = hashlib.sha256(found.astype("<f4").tobytes()).hexdigest()
    assert digest == "e6691a65aad44d52c7691047d53909e62a90abe97b1664b844e663ff0171c515"


def test_host_draws_of_a_sample_do_not_know_the_batch() -> None:
    draws = [Draw(i, key(i), i) for i in range(5)]
    spec = DrawSpec("normal", channels=4, factor=8, mix=NoiseMix(0.1, True, 6, 0.3))
    together = host_draws("noise", spec, Bucket(64, 96), draws, 1)
    assert together.shape == (5, 4, 8, 12)
    for i in (0, 3):
        assert host_draws("noise", spec, Bucket(64, 96), draws[i : i + 1], 1)[0].equal(together[i])
    plain = host_draws("noise", DrawSpec("normal", channels=4, factor=8), Bucket(64, 96), draws, 1)
    assert not plain.equal(together) and plain[2].numpy().tolist() == normal(1, key(2), 2, "noise", (4, 8, 12)).tolist()


def test_draws_of_other_shapes_and_ranges() -> None:
    draws = [Draw(i, key(i), 0) for i in range(400)]
    a_channel = host_draws("noise_offset", DrawSpec("normal", channels=4, factor=0), Bucket(64, 64), draws, 1)
    assert a_channel.shape == (400, 4, 1, 1) and a_channel.std().item() == pytest.approx(1, abs=0.1)
    t = host_draws("timestep", DrawSpec("integer", low=900, high=920), Bucket(64, 64), draws, 1)
    assert (int(t.min()), int(t.max())) == (900, 919)
    same = host_draws("timestep", DrawSpec("integer", low=0, high=1000), Bucket(64, 64), draws, 1)
    assert same.equal(host_draws("timestep", DrawSpec("integer", high=1000), Bucket(64, 64), draws, 1))
