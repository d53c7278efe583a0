"""What flags of noise and loss change in the tiny model's inputs and losses: from the command line to the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sdxl import batch_of

from difftrain.config.parse_flags import parse
from difftrain.contracts import Batch, Bucket, Draw, DrawSpec, Inputs, Parts
from difftrain.data.samples import host_draws
from difftrain.diffusion import ddpm, losses
from difftrain.evaluation.losses import value_at
from difftrain.models.families.sdxl import SDXLFamily
from difftrain.sampling.samplers import SAMPLERS, make_sampler

CAPTIONS = ["a red star", "two green circles", "a blue square", "nothing"]
KEYS = [bytes([i]) * 16 for i in range(4)]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return family(tmp_path_factory.mktemp("plain")).load()


def family(folder: Path, *flags: str) -> SDXLFamily:
    """Read a command line as the door does."""
    line = ["--init_from_config=tiny", f"--train_data_dir={folder}", f"--output_dir={folder}", "--resolution=64,64"]
    return SDXLFamily(parse([*line, "--seed=1", *flags]).config)


def batch_for(one: SDXLFamily, parts: Parts) -> Batch:
    """The same four samples, with the host draws that this family asks for."""
    batch = batch_of(one, parts, CAPTIONS)
    draws = [Draw(i, key, 0) for i, key in enumerate(KEYS)]
    batch.draws = {name: host_draws(name, spec, Bucket(64, 64), draws, 1) for name, spec in one.features.draws.items()}
    return batch


def inputs(one: SDXLFamily, parts: Parts) -> Inputs:
    return one.inputs(batch_for(one, parts), parts)


def low(x: torch.Tensor) -> float:
    """The deviation of the means of 4 x 4 blocks: 0.25 where noise is white."""
    return torch.nn.functional.avg_pool2d(x, 4).std().item()


@pytest.mark.flags("noise_offset", "noise_offset_random_strength")
def test_noise_offset(tmp_path: Path, parts: Parts) -> None:
    plain, shifted = inputs(family(tmp_path), parts), inputs(family(tmp_path, "--noise_offset=0.5"), parts)
    shift = shifted.target - plain.target
    assert torch.allclose(shift, shift[..., :1, :1].expand_as(shift), atol=1e-6) and 0.4 < shift.std() < 0.6
    assert torch.allclose(
        shifted.x_t - plain.x_t, shift * ddpm.tables().sigma[plain.timestep].view(-1, 1, 1, 1), atol=1e-5
    )
    drawn = (
        inputs(family(tmp_path, "--noise_offset=0.5", "--noise_offset_random_strength"), parts).target - plain.target
    )
    share = (drawn / shift)[:, 0, 0, 0]
    assert share.min() >= 0 and share.max() <= 1 and share.std() > 0.05  # one strength a sample
    off = inputs(family(tmp_path, "--noise_offset=0"), parts)
    assert off.target.equal(plain.target) and off.x_t.equal(plain.x_t)


@pytest.mark.flags("adaptive_noise_scale")
def test_adaptive_noise_scale(tmp_path: Path, parts: Parts) -> None:
    plain = family(tmp_path)
    latents = plain.latents(batch_for(plain, parts), parts)
    fixed = inputs(family(tmp_path, "--noise_offset=0.5"), parts).target
    noise = inputs(plain, parts).target
    for flags, scale in ((["--adaptive_noise_scale=0.25"], 0.25), (["--adaptive_noise_scale=-50"], -50)):
        found = inputs(family(tmp_path, "--noise_offset=0.5", *flags), parts).target - noise
        strength = (0.5 + scale * latents.mean((2, 3), keepdim=True).abs()).clamp(min=0)
        assert torch.allclose(found, strength * (fixed - noise) / 0.5, atol=1e-5)
    assert (strength == 0).any()  # kohya: a negative scale takes offset away, and no more than there is


@pytest.mark.flags("multires_noise_iterations", "multires_noise_discount")
def test_multires_noise(tmp_path: Path, parts: Parts) -> None:
    plain = inputs(family(tmp_path), parts).target
    weak, strong = (
        inputs(family(tmp_path, "--multires_noise_iterations=6", *more), parts).target
        for more in ([], ["--multires_noise_discount=0.8"])
    )
    assert low(plain) < low(weak) < low(strong)
    assert torch.allclose(strong.flatten(1).std(1), torch.ones(4), atol=1e-5)
    both = ["--multires_noise_iterations=6", "--noise_offset=0.5"]
    mixed = inputs(family(tmp_path, *both), parts).target
    adaptive = inputs(family(tmp_path, *both, "--adaptive_noise_scale=1e-9"), parts).target
    assert torch.allclose(mixed, adaptive, atol=1e-5)  # made here instead of on the host, the sum is the same


@pytest.mark.flags("ip_noise_gamma", "ip_noise_gamma_random_strength")
def test_input_perturbation(tmp_path: Path, parts: Parts) -> None:
    plain, found = inputs(family(tmp_path), parts), inputs(family(tmp_path, "--ip_noise_gamma=0.2"), parts)
    assert found.target.equal(plain.target)
    sigma = ddpm.tables().sigma[plain.timestep].view(-1, 1, 1, 1)
    more = (found.x_t - plain.x_t) / sigma
    assert more.std().item() == pytest.approx(0.2, rel=0.1)
    assert abs(torch.corrcoef(torch.stack([more.flatten(), plain.target.flatten()]))[0, 1]) < 0.05
    drawn = inputs(family(tmp_path, "--ip_noise_gamma=0.2", "--ip_noise_gamma_random_strength"), parts)
    share = ((drawn.x_t - plain.x_t) / sigma).flatten(1).std(1) / more.flatten(1).std(1)
    assert share.min() >= 0 and share.max() <= 1 and share.std() > 0.05


@pytest.mark.flags("min_timestep", "max_timestep")
def test_the_range_of_timesteps(tmp_path: Path, parts: Parts) -> None:
    one = family(tmp_path, "--min_timestep=200", "--max_timestep=210")
    draws = [Draw(i, bytes([i]) * 16, 0) for i in range(200)]
    spec = one.features.draws["timestep"]
    t = host_draws("timestep", spec, Bucket(64, 64), draws, 1)
    assert set(t.tolist()) == set(range(200, 210))  # the end is not one of them, as in kohya's
    assert inputs(one, parts).timestep.min() >= 200
    assert [value_at(spec, tenth) for tenth in (1, 5, 9)] == [201, 205, 209]  # quantiles lie in the range too
    assert one.metadata("x", 0.0)["modelspec.timestep_range"] == "200,210"
    assert "modelspec.timestep_range" not in family(tmp_path).metadata("x", 0.0)


LOSSES = {
    "l1": ["--loss_type=l1"],
    "huber": ["--loss_type=huber", "--huber_schedule=exponential", "--huber_c=0.2", "--huber_scale=3"],
    "smooth_l1": ["--loss_type=smooth_l1", "--huber_schedule=constant", "--huber_c=0.2", "--huber_scale=3"],
}


@pytest.mark.flags("loss_type", "huber_schedule", "huber_c", "huber_scale")
@pytest.mark.parametrize("kind", LOSSES)
def test_losses(tmp_path: Path, parts: Parts, kind: str) -> None:
    one = family(tmp_path, *LOSSES[kind])
    given = inputs(one, parts)
    guess = given.target + torch.linspace(-2, 2, given.target.numel()).view_as(given.target)
    error, t = (guess - given.target).abs().double(), given.timestep.double().view(-1, 1, 1, 1)
    c = 3 * 0.2 ** (t / 1000) if kind == "huber" else torch.full_like(t, 0.6)
    expected = {
        "l1": error,
        "huber": 2 * c * ((error**2 + c**2).sqrt() - c),
        "smooth_l1": 2 * ((error**2 + c**2).sqrt() - c),
    }[kind]
    found = one.loss_sums((guess,), given)["loss"]
    assert found.item() == pytest.approx(expected.mean((1, 2, 3)).sum().item(), rel=1e-5)


def test_the_default_threshold_follows_the_signal(tmp_path: Path, parts: Parts) -> None:
    """kohya's --huber_schedule is snr where none is given, and knows no --huber_scale."""
    found = []
    for more in ([], ["--huber_schedule=snr"], ["--huber_scale=7"], ["--huber_schedule=constant"]):
        one = family(tmp_path, "--loss_type=huber", *more)
        given = inputs(one, parts)
        found.append(one.loss_sums((given.target + 1,), given)["loss"].item())
    assert found[0] == found[1] == found[2] != found[3]


V = "--v_parameterization"
WEIGHTS = {
    "min_snr_gamma": (["--min_snr_gamma=5"], lambda snr: snr.clamp(max=5) / snr),
    "min_snr_gamma v": (["--min_snr_gamma=5", V], lambda snr: snr.clamp(max=5) / (snr + 1)),
    "debiased": (["--debiased_estimation_loss"], lambda snr: snr**-0.5),
    "debiased v": (["--debiased_estimation_loss", V], lambda snr: 1 / (snr + 1)),
    "scaled v": (["--scale_v_pred_loss_like_noise_pred", V], lambda snr: snr / (snr + 1)),
    "v like": (["--v_pred_like_loss=0.5"], lambda snr: 1 + 0.5 * (snr + 1) / snr),
    "two": (["--v_pred_like_loss=0.5", "--min_snr_gamma=5"], lambda snr: (1.5 + 0.5 / snr) * snr.clamp(max=5) / snr),
    "off": (["--v_pred_like_loss=0", "--min_snr_gamma=0"], lambda snr: torch.ones_like(snr)),
    "zero": (["--min_snr_gamma=5", V, "--zero_terminal_snr"], lambda snr: snr.clamp(max=5) / (snr + 1)),
}


@pytest.mark.flags("min_snr_gamma", "debiased_estimation_loss", "scale_v_pred_loss_like_noise_pred", "v_pred_like_loss")
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(tmp_path: Path, parts: Parts, name: str) -> None:
    """Always of the plain schedule's ratio, also where the schedule is not (kohya)."""
    flags, formula = WEIGHTS[name]
    given = inputs(family(tmp_path, *flags), parts)
    assert torch.allclose(given.weight, formula(ddpm.tables().snr[given.timestep]), rtol=1e-5)


@pytest.mark.flags("v_parameterization")
def test_v_parameterization(tmp_path: Path, parts: Parts) -> None:
    one = family(tmp_path, V)
    batch = batch_for(one, parts)
    given, latents = one.inputs(batch, parts), one.latents(batch, parts)
    table = ddpm.tables()
    alpha, sigma = (column[given.timestep].view(-1, 1, 1, 1) for column in (table.alpha, table.sigma))
    assert torch.allclose(given.target, alpha * batch.draws["noise"] - sigma * latents, atol=1e-5)
    assert one.metadata("x", 0.0)["modelspec.prediction_type"] == "v"


@pytest.mark.flags("zero_terminal_snr")
def test_zero_terminal_snr(tmp_path: Path, parts: Parts) -> None:
    one = family(tmp_path, V, "--zero_terminal_snr")
    batch = batch_for(one, parts)
    batch.draws["timestep"][:] = 999
    given = one.inputs(batch, parts)
    assert given.x_t.equal(batch.draws["noise"]) and torch.allclose(given.target, -one.latents(batch, parts))
    plain = family(tmp_path, V)
    assert not plain.inputs(batch, parts).x_t.equal(batch.draws["noise"])
    exported = one.scheduler().config
    assert exported["rescale_betas_zero_snr"] is True and exported["timestep_spacing"] == "trailing"
    usual = plain.scheduler().config
    assert usual["rescale_betas_zero_snr"] is False and usual["timestep_spacing"] == "leading"


@pytest.mark.parametrize("name", sorted(set(SAMPLERS) - {"lms", "k_lms"}))
def test_every_sampler_starts_from_pure_noise_and_finds_the_picture(tmp_path: Path, name: str) -> None:
    """An ideal predictor of velocity is led back to its picture, by samplers that know zero terminal SNR or not."""
    config = family(tmp_path, V, "--zero_terminal_snr").scheduler().config
    sampler = make_sampler(name, config)
    assert float(sampler.alphas_cumprod[-1]) <= 1e-7
    sampler.set_timesteps(30)
    assert float(sampler.timesteps[0]) >= 998
    generator = torch.Generator().manual_seed(0)
    picture, noise = torch.randn(2, 1, 4, 8, 8, generator=generator)
    kept = sampler.alphas_cumprod
    x = noise * sampler.init_noise_sigma
    for t in sampler.timesteps:
        seen = sampler.scale_model_input(x, t)
        at = float(kept[int(t)])
        left = (seen - at**0.5 * picture) / (1 - at) ** 0.5
        v = at**0.5 * left - (1 - at) ** 0.5 * picture
        x = sampler.step(v, t, x, return_dict=False)[0]
    assert (x - picture).abs().max() < 0.15, (x - picture).abs().max()


@pytest.mark.flags("masked_loss")
def test_masked_loss_is_the_same_however_the_batch_is_split(tmp_path: Path, parts: Parts) -> None:
    one = family(tmp_path)
    batch = batch_for(one, parts)
    batch.loss_mask = torch.rand(4, 1, 64, 64, generator=torch.Generator().manual_seed(0)) ** 4
    batch.loss_mask[1, :, :32] = 0
    batch.loss_mask[2] = 0  # nothing of it is to be learnt
    whole = one.inputs(batch, parts)
    guess = torch.zeros_like(whole.target).requires_grad_()
    total = one.loss_sums((guess,), whole)["loss"]
    parted = [
        one.loss_sums((guess[i : i + n],), one.inputs(cut(batch, i, n), parts))["loss"] for i, n in ((0, 1), (1, 3))
    ]
    assert total.item() == pytest.approx(sum(parted).item(), rel=1e-6)
    small = losses.mask_at(batch.loss_mask, (8, 8)).double()
    squares = whole.target.double().square().mean(1, keepdim=True)
    means = (squares * small).sum((1, 2, 3)) / small.sum((1, 2, 3)).clamp(min=1e-9)
    assert total.item() == pytest.approx(means.sum().item(), rel=1e-5) and means[2] == 0
    (gradient,) = torch.autograd.grad(total, guess)
    assert gradient[2].abs().max() == 0 and gradient[1, :, :4].abs().max() == 0 < gradient[1, :, 4:].abs().max()


def cut(batch: Batch, start: int, count: int) -> Batch:
    part = slice(start, start + count)
    assert batch.loss_mask is not None
    return Batch(
        batch.bucket,
        batch.record_id[part],
        batch.occurrence[part],
        {name: value[part] for name, value in batch.features.items()},
        {name: value[part] for name, value in batch.draws.items()},
        batch.loss_mask[part],
    )


def test_the_weight_of_a_source_multiplies_the_others(tmp_path: Path, parts: Parts) -> None:
    one = family(tmp_path, "--min_snr_gamma=5")
    batch = batch_for(one, parts)
    before = one.inputs(batch, parts).weight
    batch.features["loss_weight"] = torch.tensor([1.0, 0.5, 0.0, 2.0])
    assert one.inputs(batch, parts).weight.equal(before * torch.tensor([1.0, 0.5, 0.0, 2.0]))


def test_without_these_flags_draws_are_as_ever(tmp_path: Path) -> None:
    one = family(tmp_path)
    assert set(one.features.draws) == {"noise", "moments", "timestep"}
    latent = DrawSpec("normal", channels=16, factor=8)
    steps = DrawSpec("integer", high=1000)
    assert one.features.draws == {"noise": latent, "moments": latent, "timestep": steps}


def test_the_header_of_an_export_names_what_was_set(tmp_path: Path) -> None:
    from difftrain.contracts import RunFacts

    flags = ["--noise_offset=0.1", "--loss_type=huber", "--huber_c=0.2", "--ip_noise_gamma=0.05", "--min_snr_gamma=5"]
    found = family(tmp_path, *flags, V, "--zero_terminal_snr").metadata("x", 0.0, RunFacts(1, 1, 2, 1, 2, 0.0))
    expected = {"noise_offset": "0.1", "loss_type": "huber", "huber_c": "0.2", "huber_schedule": "snr",
                "ip_noise_gamma": "0.05", "zero_terminal_snr": "True", "debiased_estimation": "False",
                "multires_noise_discount": "0.3", "min_snr_gamma": "5.0"}  # fmt: skip
    assert {name: found[f"ss_{name}"] for name in expected} == expected


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_min_snr_as_diffusers_examples_have_it(prediction: str) -> None:
    from diffusers import DDPMScheduler
    from diffusers.training_utils import compute_snr

    from difftrain.diffusion import ddpm, losses

    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    snr = compute_snr(scheduler, torch.arange(1000))
    plus = snr + 1 if prediction == "v_prediction" else snr
    ours = losses.min_snr(ddpm.tables().snr, 5.0, prediction, plus_one=True)
    torch.testing.assert_close(ours, plus.clamp(max=5.0) / plus, rtol=1e-4, atol=1e-7)
    other = losses.min_snr(ddpm.tables().snr, 5.0, prediction)
    assert torch.equal(ours, other) == (prediction == "epsilon")
