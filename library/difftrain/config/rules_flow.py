"""Rules of rectified flows and of what one family has alone: times, dropped texts, reconstructed text."""

from __future__ import annotations

from collections.abc import Iterator

from difftrain.config.finding import Finding, Rule, value_of
from difftrain.config.names import FOLDER_EXPORTS
from difftrain.config.rules import Need, lacking
from difftrain.config.sections import TrainConfig
from difftrain.config.validate import default_of, section_class

_DIFFUSION = "belongs to the noise schedule of SDXL, and sd3 learns a rectified flow"
_ENCODERS = "sd3's text encoders are frozen: only the transformer is trained"
# field -> why it means nothing to sd3, and what does the same there
SDXL_ALONE: dict[str, tuple[str, str]] = {
    **{f"noise.{field}": (_DIFFUSION, "") for field in section_class("noise").model_fields},
    "noise.min_timestep": (_DIFFUSION, "min_t = 0.0 to 1.0"),
    "noise.max_timestep": (_DIFFUSION, "max_t = 0.0 to 1.0"),
    "model.prediction_type": (_DIFFUSION, "leave it out: the velocity is predicted"),
    "loss.min_snr_gamma": (_DIFFUSION, "timestep_sample_method weighs the times"),
    "loss.scale_v_pred_like_noise_pred": (_DIFFUSION, ""),
    "loss.v_pred_like": (_DIFFUSION, ""),
    "loss.debiased_estimation": (_DIFFUSION, "timestep_sample_method weighs the times"),
    "loss.huber_schedule": (_DIFFUSION, "pseudo_huber_c is the same at all times"),
    "loss.huber_scale": (_DIFFUSION, "pseudo_huber_c is the same at all times"),
    "model.fp8_frozen": ("holds weights of SDXL in 8 bits", "leave it out"),
    "model.clip_skip": ("sd3 reads hidden_states[-2] of CLIP", "leave it out"),
    "model.max_token_length": ("sd3's CLIP encoders read 77 tokens", "t5_max_length says how far T5 reads"),
    "model.train_text_encoder": (_ENCODERS, "leave it out"),
    "optimizer.learning_rate_te1": (_ENCODERS, "leave it out"),
    "optimizer.learning_rate_te2": (_ENCODERS, "leave it out"),
    "optimizer.text_encoder_lr": (_ENCODERS, "leave it out"),
    "optimizer.unet_lr": ("sd3 has no UNet", "the learning rate itself is the transformer's"),
    "optimizer.block_lr": ("names blocks of a UNet, and sd3 has none", "one learning rate for all blocks"),
    "captions.weighted": ("weighs tokens of CLIP's chunks, which sd3 has not", "leave it out"),
}
_SD3_SECTIONS = ("flow", "repa", "tread", "patch_masking")
_SD3_FIELDS = (
    "model.train_type", "model.num_layers", "model.transformer", "model.tokenizer3", "model.text_encoder1",
    "model.text_encoder2", "model.text_encoder3", "model.t5_max_length", "model.t5_attention_mask",
    "model.enable_uncond_text_dropout", "model.uncond_text_dropout_prob", "loss.text_recon_gamma",
    "loss.text_recon_target_layer",
)  # fmt: skip
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
    return lacking(NEEDS, cfg, asked) if cfg.model.family == "sd3" else iter(())


def other_family(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """What one family has alone is refused for the other, by name; what is left at its default says nothing."""
    for path in sorted(asked):
        section, _, _ = path.partition(".")
        if _unsaid(cfg, path):
            continue
        if cfg.model.family == "sd3" and path in SDXL_ALONE:
            yield Finding((path,), *SDXL_ALONE[path])
        elif cfg.model.family == "sdxl" and (section in _SD3_SECTIONS or path in _SD3_FIELDS):
            yield Finding((path,), "is sd3's: SDXL has nothing like it", 'leave it out, or say type = "sd3"')


def layout(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """A family without a layout in one file is exported as a folder; one that runs code when read is not made of it."""
    if cfg.model.family in FOLDER_EXPORTS and cfg.save.model_as in ("ckpt", "safetensors"):
        what = f"{cfg.save.model_as} is not built for {cfg.model.family}, which is exported as a diffusers folder"
        yield Finding(("save.model_as",), what, "leave it out")


def _unsaid(cfg: TrainConfig, path: str) -> bool:
    try:
        value = value_of(cfg, path)
    except AttributeError:  # of a section or field that another door has
        return True
    return value in (None, (), False) or value == default_of(path)


def loss_type(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Two of kohya's losses bend where the noise schedule says."""
    if cfg.model.family == "sd3" and cfg.loss.type in ("huber", "smooth_l1"):
        what = f"{cfg.loss.type} bends where SDXL's noise schedule says, and sd3 has none"
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
    if cfg.model.family != "sd3" or depth is None or layer < depth:
        return
    what = f"is {layer}, the transformer has {depth} blocks"
    if layer == depth:
        what += ": the last one's text would be compared with itself"
    remedy = f"0 for what enters the first block, or 1 to {depth - 1}" if depth > 1 else "0"
    yield Finding(("loss.text_recon_target_layer",), what, remedy)


RULES: tuple[Rule, ...] = (companions, other_family, layout, loss_type, times, target_layer)
