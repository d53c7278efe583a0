"""Rules of rectified flows and of what some families have alone: times, dropped texts, reconstructed text."""

from __future__ import annotations

from collections.abc import Iterator

from difftrain.config.families import learns_flow, row_of, takes, why_not
from difftrain.config.finding import Finding, Rule, value_of
from difftrain.config.rules import Need, lacking
from difftrain.config.sections import TrainConfig
from difftrain.config.validate import default_of
from difftrain.models.registry import TRAINED

_RECON = "has no effect: text_recon_gamma is 0"

NEEDS: tuple[Need, ...] = (
    Need("flow.sigmoid_scale", lambda c: c.flow.timestep_sample_method == "logit_normal",
         "has no effect: timestep_sample_method is not logit_normal", note=True),
    Need("flow.mode_scale", lambda c: c.flow.timestep_sample_method == "mode",
         "has no effect: timestep_sample_method is not mode", note=True),
    Need("model.uncond_text_dropout_prob", lambda c: c.model.enable_uncond_text_dropout,
         "has no effect without enable_uncond_text_dropout", note=True),
    Need("loss.text_recon_target_layer", lambda c: c.loss.text_recon_gamma, _RECON, note=True),
)  # fmt: skip


def companions(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Find fields of a flow that were given without what gives them a meaning."""
    return lacking((need for need in NEEDS if takes(cfg, need.field)), cfg, asked)


def trained(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """A family may be known as a form only: it is built and exported, and not trained yet."""
    if not row_of(cfg).trains:
        what = f"{cfg.model.family!r} is known, its training is not built yet"
        yield Finding(("model.family",), what, f"trained are {', '.join(TRAINED)}")


def other_family(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """What a family does not take is refused by name; what is left at its default says nothing."""
    for path in sorted(asked):
        if not _unsaid(cfg, path) and not takes(cfg, path):
            yield Finding((path,), *why_not(cfg.model.family, path))


def layout(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """A family without a layout in one file is exported as a folder; one that runs code when read is not made of it."""
    row, asks = row_of(cfg), cfg.save.model_as
    if asks is not None and asks not in row.layouts:
        what = f"{asks} is not built for {cfg.model.family}, which is exported as "
        what += "a diffusers folder" if row.folder_only else ", ".join(row.layouts)
        yield Finding(("save.model_as",), what, "leave it out")


def _unsaid(cfg: TrainConfig, path: str) -> bool:
    try:
        value = value_of(cfg, path)
    except AttributeError:  # of a section or field that another door has
        return True
    return value in (None, (), False) or value == default_of(path)


def loss_type(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Two of kohya's losses bend where the noise schedule says."""
    if learns_flow(cfg) and cfg.loss.type in ("huber", "smooth_l1"):
        what = f"{cfg.loss.type} bends where SDXL's noise schedule says, and {cfg.model.family} has none"
        yield Finding(("loss.type",), what, "pseudo_huber, with pseudo_huber_c")


def times(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Some times are left to train on, and one shift at most."""
    flow = cfg.flow
    if flow.min_t >= flow.max_t:
        what = f"leaves no time to train on: {flow.min_t:g} >= {flow.max_t:g}"
        yield Finding(("flow.min_t", "flow.max_t"), what, "min_t below max_t, both within 0 and 1")
    if flow.shift is not None and flow.flux_shift:
        what = f"contradicts flux_shift: the shift is {flow.shift:g}, or it follows the size"
        yield Finding(("flow.shift", "flow.flux_shift"), what, "give one of them")


def target_layer(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Text is reconstructed from before the last block; a depth that only the weights tell is looked at by the family."""
    layer, depth = cfg.loss.text_recon_target_layer, cfg.model.num_layers
    if not takes(cfg, "loss.text_recon_target_layer") or depth is None or layer < depth:
        return
    what = f"is {layer}, the transformer has {depth} blocks"
    if layer == depth:
        what += ": the last one's text would be compared with itself"
    remedy = f"0 for what enters the first block, or 1 to {depth - 1}" if depth > 1 else "0"
    yield Finding(("loss.text_recon_target_layer",), what, remedy)


RULES: tuple[Rule, ...] = (trained, companions, other_family, layout, loss_type, times, target_layer)
