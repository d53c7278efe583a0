"""Rules of what is learnt: noises, losses, their weights, and averages of the weights."""

from __future__ import annotations

from collections.abc import Iterator

from difftrain.config.finding import Finding, Rule
from difftrain.config.rules import Need, lacking
from difftrain.config.sections import TrainConfig

_STEPS = 1000
_BENT = "acts on --loss_type=huber and smooth_l1 only"
_OFFSET = "has no effect without --noise_offset"

# kohya lets most of these pass in silence, so they are said and no fault
NEEDS: tuple[Need, ...] = (
    Need("noise.offset_random_strength", lambda c: c.noise.offset, _OFFSET, note=True),
    Need("noise.multires_discount", lambda c: c.noise.multires_iterations,
         "has no effect without --multires_noise_iterations", note=True),
    Need("noise.ip_gamma_random_strength", lambda c: c.noise.ip_gamma, "has no effect without --ip_noise_gamma", note=True),
    Need("noise.zero_terminal_snr", lambda c: c.model.prediction_type == "v_prediction",
         "is meant for --v_parameterization: where there is no signal, predicting the noise teaches nothing", note=True),
    Need("loss.huber_schedule", lambda c: _is_bent(c), _BENT, note=True),
    Need("loss.huber_c", lambda c: _is_bent(c), _BENT, note=True),
    Need("loss.huber_scale", lambda c: _is_bent(c), _BENT, note=True),
    Need("loss.huber_scale", lambda c: not _is_bent(c) or c.loss.huber_schedule != "snr",
         "has no effect with --huber_schedule=snr, as in kohya's", note=True),
    Need("loss.scale_v_pred_like_noise_pred", lambda c: c.model.prediction_type == "v_prediction", "needs --v_parameterization"),
    Need("ema.snapshot_precision", lambda c: c.ema.profiles, "needs --ema_profiles: there are no snapshots"),
)  # fmt: skip


def _is_bent(cfg: TrainConfig) -> bool:
    return cfg.loss.type in ("huber", "smooth_l1")


def companions(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking(NEEDS, cfg, asked)


def noise(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """An offset that follows the latents starts from one; the range of timesteps holds at least one."""
    section = cfg.noise
    if section.adaptive_scale and section.offset is None:
        yield Finding(("noise.adaptive_scale", "noise.offset"), "needs --noise_offset", "0.05 is usual")
    elif section.adaptive_scale and not section.offset:
        yield Finding(("noise.adaptive_scale",), "has no effect with --noise_offset=0", note=True)
    low = section.min_timestep or 0
    high = _STEPS if section.max_timestep is None else section.max_timestep
    if low >= high:
        about = ("noise.min_timestep", "noise.max_timestep")
        remedy = f"the end is not trained itself; --max_timestep={low + 1} trains {low} alone"
        yield Finding(about, f"is not below --max_timestep: {low} >= {high}", remedy)


def velocity(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """What makes an epsilon prediction's loss more like a velocity's is nothing for a velocity's."""
    if cfg.loss.v_pred_like and cfg.model.prediction_type == "v_prediction":
        about = ("loss.v_pred_like", "model.prediction_type")
        yield Finding(about, "contradicts --v_parameterization", "give one of them")


def profiles(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Widths differ; any other width needs two of them and snapshots along the way."""
    widths = cfg.ema.profiles
    if len(set(widths)) < len(widths):
        yield Finding(("ema.profiles",), f"has a width twice: {', '.join(map(str, widths))}", "give each once")
    if not widths:
        return
    if len(widths) == 1:
        what = "is one width: others can be made from two much better, such as 0.05,0.10"
        yield Finding(("ema.profiles",), what, note=True)
    save = cfg.save
    if not (save.every_n_steps or save.every_n_epochs or save.n_epoch_ratio):
        what = "stores snapshots with every export, and there is only the last: other widths need some along the way"
        yield Finding(("ema.profiles",), what, "give --save_every_n_steps or --save_every_n_epochs", note=True)


RULES: tuple[Rule, ...] = (companions, noise, velocity, profiles)
