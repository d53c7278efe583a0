"""Samplers of flows: they solve the flow's equation, follow the training's shift, and start guidance from its zeros."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from PIL import Image
from sd3 import config, loaded

from difftrain.cache.build import on_device
from difftrain.config import TrainConfig
from difftrain.config.rules import optimizer
from difftrain.contracts import ConfigFault, Parts
from difftrain.device import choose
from difftrain.models.placeholder import MetaPlaceholder
from difftrain.sampling import FLOW_SAMPLERS, Prompt, draw_grid, draw_pictures, make_sampler, read_prompts
from difftrain.sampling.draw import drawn_size
from difftrain.train.drawing import sampler_of

PLAIN = {"num_train_timesteps": 1000, "shift": 1.0}
FLUX = PLAIN | {
    "use_dynamic_shifting": True, "base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5,
    "max_shift": 1.15,
}  # fmt: skip


@cache
def model(zeros: bool = True) -> Any:
    family, parts = loaded(config({"flow": {"shift": 2.0}}, enable_uncond_text_dropout=zeros))
    return family.drawer(parts)


def solved(name: str, steps: int, spread: float, tuning: dict[str, Any]) -> float:
    """Follow the flow of N(0, spread^2), whose velocity is known, from x = 1; its end is at x = spread."""
    sampler = make_sampler(name, tuning)
    sampler.set_timesteps(steps)
    x = torch.ones(1, dtype=torch.float64)
    for time in sampler.timesteps:
        t = float(time) / 1000
        variance = (1 - t) ** 2 * spread**2 + t**2
        x = sampler.step(x * (t - (1 - t) * spread**2) / variance, time, x, return_dict=False)[0]
    return float(x)


@pytest.mark.parametrize("tuning", [PLAIN, PLAIN | {"shift": 3.0}], ids=["even", "shifted"])
def test_both_solve_the_equation_and_heun_in_fewer_steps(tuning: dict[str, Any]) -> None:
    spread = 0.3
    assert abs(solved("flow_euler", 400, spread, tuning) - spread) < 0.01
    coarse = {name: abs(solved(name, 20, spread, tuning) - spread) for name in FLOW_SAMPLERS}
    assert coarse["flow_heun"] < coarse["flow_euler"] / 3


KARRAS = PLAIN | {"use_karras_sigmas": True, "sigma_max": 80.0, "sigma_min": 0.002}


def through_levels(name: str, steps: int, spread: float, first: int = 0) -> tuple[float, int]:
    """Follow N(0, spread^2) from x = 1 at a level; return how far off x ends, and how often the denoiser is asked."""
    sampler = make_sampler(name, KARRAS)
    sampler.set_timesteps(steps)
    sampler.set_begin_index(first * sampler.order)
    x, times = torch.ones(1, dtype=torch.float64), sampler.timesteps[first * sampler.order :]
    for time in times:
        t = float(time) / 1000
        variance = (1 - t) ** 2 * spread**2 + t**2
        x_t = sampler.scale_model_input(x, time)
        x = sampler.step(x_t * (t - (1 - t) * spread**2) / variance, time, x, return_dict=False)[0]
    start = float(times[0]) / 1000
    sigma = start / (1 - start)
    return abs(float(x) - math.sqrt((spread**2 + 0.002**2) / (spread**2 + sigma**2))), len(times)


@pytest.mark.parametrize(("name", "order"), [("flow_euler", 1), ("flow_heun", 2)])
@pytest.mark.parametrize("share", [0, 2], ids=["noise", "picture"])
def test_the_levels_of_karras_are_walked_by_euler_and_heun(name: str, order: int, share: int) -> None:
    """With half the steps' length the error is a half, or a quarter."""
    (far, asked), (near, _) = (through_levels(name, n, 0.3, share * (n - 1) // 4) for n in (81, 161))
    assert asked == order * (80 - 20 * share) + 1
    assert far / near == pytest.approx(2**order, rel=0.05)


def test_a_picture_begins_at_the_level_of_its_time() -> None:
    sampler = make_sampler("flow_euler", KARRAS)
    sampler.set_timesteps(20)
    assert sampler.init_noise_sigma == pytest.approx(float(sampler.sigmas[0])) == 80.0
    latents, noise = torch.full((1, 2, 1, 3, 3), 5.0), torch.full((1, 2, 1, 3, 3), 2.0)
    for number in (0, 9, 19):
        begun = sampler.scale_noise(latents, sampler.timesteps[number : number + 1], noise)
        torch.testing.assert_close(begun, latents + sampler.sigmas[number] * noise, rtol=1e-4, atol=1e-6)


def test_a_shift_of_a_prompt_takes_the_place_of_levels() -> None:
    sampler = make_sampler("flow_euler", KARRAS, shift=3.0)
    assert isinstance(sampler, FlowMatchEulerDiscreteScheduler) and not sampler.config.use_karras_sigmas


def test_the_shift_is_the_trainings() -> None:
    assert model().scheduler.config.shift == 2.0
    for name in FLOW_SAMPLERS:
        sampler = make_sampler(name, model().scheduler.config)
        sampler.set_timesteps(5)
        assert sampler.config.shift == 2.0 and sampler.timesteps[0] == 1000
    for tokens, mu in ((256, 0.5), (4096, 1.15), (1024, 0.63)):
        assert make_sampler("flow_heun", FLUX, tokens).config.shift == pytest.approx(math.exp(mu), rel=1e-2)


@pytest.mark.parametrize("tokens", [64, 256, 1024, 4096])
@pytest.mark.parametrize("steps", [20, 50])
def test_a_flux_shift_walks_the_times_of_the_exported_scheduler(steps: int, tokens: int) -> None:
    exported = FlowMatchEulerDiscreteScheduler(**FLUX)
    exported.set_timesteps(steps, mu=calculate_shift(tokens))
    euler, heun = (make_sampler(name, exported.config, tokens) for name in FLOW_SAMPLERS)
    euler.set_timesteps(steps)
    assert euler.sigmas.equal(exported.sigmas) and euler.timesteps.equal(exported.timesteps)
    euler.set_timesteps(steps, mu=0.0)  # as the pipeline does, which counts the tokens itself
    assert euler.sigmas[-2] == pytest.approx(0.001)
    heun.set_timesteps(steps)
    once = torch.cat([heun.sigmas[:1], heun.sigmas[1:-1:2], heun.sigmas[-1:]])  # each but the first stands there twice
    torch.testing.assert_close(once, exported.sigmas, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("tuning", [PLAIN | {"shift": 3.0}, FLUX], ids=["static", "by size"])
def test_a_prompt_may_have_a_shift_of_its_own(tuning: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a red star --fs 5.5\n")
    file = read_prompts(path, "flow_euler", flow=True)
    assert file.prompts == (Prompt("a red star", flow_shift=5.5),) and not file.notes
    for name, kind in zip(FLOW_SAMPLERS, (FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler)):
        ours, theirs = make_sampler(name, tuning, 4096, shift=file.prompts[0].flow_shift), kind(shift=5.5)
        for sampler in (ours, theirs):
            sampler.set_timesteps(20)
        assert ours.sigmas.equal(theirs.sigmas) and ours.timesteps.equal(theirs.timesteps)


def test_the_shift_of_a_prompt_changes_its_picture_only() -> None:
    asked = {"sample_steps": 4, "width": 64, "height": 64, "seed": 3}
    prompts = [Prompt("a", **asked), Prompt("a", flow_shift=2.0, **asked), Prompt("a", flow_shift=9.0, **asked)]
    plain, same, other = (np.asarray(p.image) for p in draw_pictures(model(), prompts, sampler="flow_euler", seed=0))
    assert np.array_equal(plain, same) and not np.array_equal(plain, other)  # 2 is what the training has


@pytest.mark.parametrize("value", ["0", "-3", "nan", "inf", "three"])
def test_a_shift_that_is_none_is_named_with_its_line(value: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(f"a\nb --fs {value}\n")
    told = rf"line 2: --fs \(flow_shift\): .* above 0, got '{value}'"
    with pytest.raises(ConfigFault, match=told):
        read_prompts(path, "flow_euler", flow=True)
    (note,) = read_prompts(path).notes  # SDXL draws without it, as in kohya's script
    assert "--fs (flow_shift) has no " in note


@pytest.mark.parametrize("shift", [3, "3"])
def test_a_table_of_prompts_has_the_shift_too(shift: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts.toml"
    path.write_text(f"[prompt]\nflow_shift = {shift!r}\n[[prompt.subset]]\nprompt = 'a'\n")
    assert read_prompts(path, "flow_heun", flow=True).prompts == (Prompt("a", flow_shift=3.0),)


def test_no_text_is_what_the_training_took_for_it() -> None:
    size = (64, 64)
    told = model().conditions(["a", "b"], size)
    none = model().unconditional(["", ""], told, size)
    assert all(value.any() for value in told.values()) and not any(value.any() for value in none.values())
    asked = model().unconditional(["blurry", ""], told, size)
    assert all(value.any() and value.shape == told[name].shape for name, value in asked.items())
    encoded = model(zeros=False).unconditional([""], told, size)
    assert all(torch.equal(value, encoded[name]) for name, value in model(zeros=False).conditions([""], size).items())
    assert encoded["tokens"].any()


def test_sizes_are_the_trainings_and_multiples_of_a_token() -> None:
    assert drawn_size(model(), Prompt("a")) == (128, 128)
    assert drawn_size(model(), Prompt("a", width=79, height=8)) == (16, 64)
    family, parts = loaded(config({"data": {"resolution": (96, 64)}}))
    assert drawn_size(family.drawer(parts), Prompt("a")) == (64, 96)


def test_modules_stay_as_they_are(tmp_path: Path) -> None:
    family, parts = loaded(
        config({"training": {"seed": 1, "mixed_precision": "bf16"}}, enable_uncond_text_dropout=True)
    )
    parts.root.train()
    before = {name: value.clone() for name, value in parts.root.state_dict().items()}
    prompt = Prompt("a", sample_steps=2, width=64, height=64)
    with torch.autocast("cpu", torch.bfloat16):
        grid = draw_grid(family.drawer(parts), [prompt], tmp_path, "N", "000001", sampler="flow_heun", seed=1)
    assert Image.open(grid).size == (64, 64)
    assert all(module.training for module in parts.root.modules())
    assert all(parts.root.state_dict()[name].equal(value) for name, value in before.items())


def test_sleeping_encoders_wake_for_pictures_only() -> None:
    """A run with a whole cache builds none of them until it draws, and gives their memory back."""
    family, awake_parts = loaded(config(enable_uncond_text_dropout=True))
    lazy = [name for name in awake_parts.frozen]
    parts = family.load(deferred=lazy)
    parts.offloaded |= set(lazy)
    assert all(isinstance(part, MetaPlaceholder) for part in parts.frozen.values())
    prompt = Prompt("a red star", sample_steps=2, width=64, height=64, seed=3)

    def drawn(held: Parts) -> np.ndarray:
        (picture,) = draw_pictures(family.drawer(held), [prompt], sampler="flow_euler", seed=0)
        return np.asarray(picture.image)

    with on_device(parts, choose("cpu")):
        found = drawn(parts)
    assert all(not parts.is_loaded(name) for name in lazy)
    assert np.array_equal(found, drawn(awake_parts))


def test_samplers_of_the_other_kind_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a red star --ss ddim\nb --ss flow_heun\nc --ss flow_hoin\n")
    with pytest.raises(ConfigFault) as found:
        read_prompts(path, "flow_euler", flow=True)
    told = str(found.value)
    assert "line 1: ddim is" in told and "line 3" in told and "line 2" not in told
    path.write_text("b --ss flow_heun\n")
    assert read_prompts(path, "flow_euler", flow=True).prompts[0].sample_sampler == "flow_heun"
    with pytest.raises(ConfigFault, match=r"line 1: flow_heun .*no flow"):
        read_prompts(path)


def test_a_flow_has_a_sampler_of_its_own() -> None:
    assert sampler_of(config()) == "flow_euler" and sampler_of(TrainConfig()) == "ddim"
    assert sampler_of(config({"sample": {"sampler": "flow_heun"}})) == "flow_heun"


def test_the_configuration_knows_whose_sampler_is_whose() -> None:
    flow, other = (
        config({"sample": {"sampler": "ddim"}}),
        TrainConfig.model_validate({"sample": {"sampler": "flow_heun"}}),
    )
    for cfg, says in (
        (flow, "'ddim' is no"),
        (other, "'flow_heun' is no"),
    ):
        (finding,) = optimizer.sampler(cfg, {"sample.sampler"})
        assert says in finding.what
    assert not [*optimizer.sampler(config(), set())]  # SDXL's default, which nobody asked for
    assert not [*optimizer.sampler(config({"sample": {"sampler": "flow_heun"}}), {"sample.sampler"})]
