"""Rules about noise, targets and losses of diffusion, and about flows."""

from __future__ import annotations

from collections.abc import Iterator

from difftrain.config.rules.finding import Finding, Rule, value_of
from difftrain.config.rules.run import Companion, lacking
from difftrain.config.schema.families import learns_flow, row_of, takes, why_not
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.schema.validate import default_of
from difftrain.config.spellings.spelling import option

_STEPS = 1000
_BENT = "acts on {loss.type}=huber and smooth_l1 only"
_OFFSET = "has no effect without {noise.offset}"

# kohya lets most of these pass in silence, so they are said and no fault
DIFFUSION_NEEDS: tuple[Companion, ...] = (
    Companion("noise.offset_random_strength", lambda c: c.noise.offset, _OFFSET, note=True),
    Companion("noise.multires_discount", lambda c: c.noise.multires_iterations,
         "has no effect without {noise.multires_iterations}", note=True),
    Companion("noise.ip_gamma_random_strength", lambda c: c.noise.ip_gamma, "has no effect without {noise.ip_gamma}", note=True),
    Companion("noise.zero_terminal_snr", lambda c: c.model.prediction_type == "v_prediction",
         "is meant for {model.prediction_type=v_prediction}: without signal, predicting the noise teaches nothing", note=True),
    Companion("loss.huber_schedule", lambda c: _is_bent(c), _BENT, passes_there=True),
    Companion("loss.huber_c", lambda c: _is_bent(c), _BENT, passes_there=True),
    Companion("loss.huber_scale", lambda c: _is_bent(c), _BENT, passes_there=True),
    Companion("loss.huber_scale", lambda c: not _is_bent(c) or c.loss.huber_schedule != "snr",
         "has no effect with {loss.huber_schedule}=snr, as in kohya's", note=True),
    Companion("loss.scale_v_pred_like_noise_pred", lambda c: c.model.prediction_type == "v_prediction", "needs {model.prediction_type=v_prediction}"),
    Companion("ema.snapshot_precision", lambda c: c.ema.profiles, "needs {ema.profiles}: there are no snapshots"),
)  # fmt: skip


def _is_bent(cfg: TrainConfig) -> bool:
    return cfg.loss.type in ("huber", "smooth_l1")


def noise_companions(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking(DIFFUSION_NEEDS, cfg, requested)


def noise(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """An offset that follows the latents starts from one; the range of timesteps holds at least one."""
    section = cfg.noise
    if section.adaptive_scale and section.offset is None:
        yield Finding(("noise.adaptive_scale", "noise.offset"), f"needs {option('noise.offset')}", "0.05 is usual")
    elif section.adaptive_scale and not section.offset:
        yield Finding(("noise.adaptive_scale",), f"has no effect with {option('noise.offset')}=0", note=True)
    low = section.min_timestep or 0
    high = _STEPS if section.max_timestep is None else section.max_timestep
    if low >= high:
        about = ("noise.min_timestep", "noise.max_timestep")
        remedy = f"the upper end itself is not trained; {option('noise.max_timestep')}={low + 1} trains {low} alone"
        yield Finding(about, f"is not below {option('noise.max_timestep')}: {low} >= {high}", remedy)


def velocity(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What makes an epsilon prediction's loss more like a velocity's is nothing for a velocity's."""
    if cfg.loss.v_pred_like and cfg.model.prediction_type == "v_prediction":
        about = ("loss.v_pred_like", "model.prediction_type")
        yield Finding(about, f"contradicts {option('model.prediction_type', 'v_prediction')}", "give one of them")


def profiles(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Widths differ; any other width needs two of them and snapshots along the way."""
    widths = cfg.ema.profiles
    if len(set(widths)) < len(widths):
        yield Finding(("ema.profiles",), f"has a width twice: {', '.join(map(str, widths))}", "give each once")
    if not widths:
        return
    if len(widths) == 1:
        what = "is a single width: other widths can be reconstructed much better from two, such as 0.05,0.10"
        yield Finding(("ema.profiles",), what, note=True)
    save = cfg.save
    if not (save.every_n_steps or save.every_n_epochs or save.n_epoch_ratio):
        what = "stores snapshots with every export, and there is only the last one: other widths need several during the run"
        yield Finding(
            ("ema.profiles",),
            what,
            f"give {option('save.every_n_steps')} or {option('save.every_n_epochs')}",
            note=True,
        )


DIFFUSION_RULES: tuple[Rule, ...] = (noise_companions, noise, velocity, profiles)


_RECON = "has no effect: text_recon_gamma is 0"

FLOW_NEEDS: tuple[Companion, ...] = (
    Companion("flow.sigmoid_scale", lambda c: c.flow.timestep_sample_method == "logit_normal",
         "has no effect: timestep_sample_method is not logit_normal", note=True),
    Companion("flow.mode_scale", lambda c: c.flow.timestep_sample_method == "mode",
         "has no effect: timestep_sample_method is not mode", note=True),
    Companion("model.uncond_text_dropout_prob", lambda c: c.model.enable_uncond_text_dropout,
         "has no effect without enable_uncond_text_dropout", note=True),
    Companion("loss.text_recon_target_layer", lambda c: c.loss.text_recon_gamma, _RECON, note=True),
)  # fmt: skip


def flow_companions(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Find fields of a flow that were given without what gives them a meaning."""
    return lacking((need for need in FLOW_NEEDS if takes(cfg, need.field)), cfg, requested)


def other_family(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """What a family does not take is refused by name; what is left at its default says nothing."""
    for path in sorted(requested):
        if not _unsaid(cfg, path) and not takes(cfg, path):
            yield Finding((path,), *why_not(cfg.model.family, path))


def layout(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Not every family has every layout; one that runs code when read is not made of all."""
    row, asks = row_of(cfg), cfg.save.model_as
    if asks is not None and asks not in row.layouts:
        what = f"{asks} is not built for {cfg.model.family}, which is exported as {', '.join(row.layouts)}"
        yield Finding(("save.model_as",), what, "leave it out")


def _unsaid(cfg: TrainConfig, path: str) -> bool:
    try:
        value = value_of(cfg, path)
    except AttributeError:  # of a section or field that another door has
        return True
    return value in (None, (), False) or value == default_of(path)


def loss_type(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Two of kohya's losses bend where the noise schedule says."""
    if learns_flow(cfg) and cfg.loss.type in ("huber", "smooth_l1"):
        what = f"{cfg.loss.type} takes its threshold from SDXL's noise schedule, and {cfg.model.family} has none"
        yield Finding(("loss.type",), what, "pseudo_huber, with pseudo_huber_c")


def times(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Some times are left to train on, and one shift at most."""
    flow = cfg.flow
    if flow.min_t >= flow.max_t:
        what = f"leaves no time to train on: {flow.min_t:g} >= {flow.max_t:g}"
        yield Finding(("flow.min_t", "flow.max_t"), what, "min_t below max_t, both within 0 and 1")
    if flow.shift is not None and flow.flux_shift:
        what = f"contradicts flux_shift: the shift is {flow.shift:g}, or it follows the size"
        yield Finding(("flow.shift", "flow.flux_shift"), what, "give one of them")


def target_layer(cfg: TrainConfig, requested: set[str]) -> Iterator[Finding]:
    """Text is reconstructed from before the last block; a depth that only the weights tell is looked at by the family."""
    layer, depth = cfg.loss.text_recon_target_layer, cfg.model.num_layers
    if not takes(cfg, "loss.text_recon_target_layer") or depth is None or layer < depth:
        return
    what = f"is {layer}, the transformer has {depth} blocks"
    if layer == depth:
        what += ": the text of the last block would be compared with itself"
    remedy = f"0: what enters the first block, or 1 to {depth - 1}" if depth > 1 else "0"
    yield Finding(("loss.text_recon_target_layer",), what, remedy)


FLOW_RULES: tuple[Rule, ...] = (flow_companions, other_family, layout, loss_type, times, target_layer)
