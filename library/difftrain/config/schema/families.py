"""What configuration knows of the families, from their rows: who takes which field, and why another does not.

Rooms beside models/ ask here, too; the rows themselves stand in models/registry.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from difftrain.models.registry import FAMILIES, FamilyRow

if TYPE_CHECKING:
    from difftrain.config.schema.sections import TrainConfig

_DIFFUSION = "belongs to the noise schedule of SDXL, and {name} learns a rectified flow"
_ENCODERS = "{name}'s text encoders are frozen: only the transformer is trained"
_ALONE = "is {owner}'s: {title} has nothing like it"
_OR_TYPE = 'leave it out, or say type = "{owner}"'
# field or section that not every family takes -> why it means nothing to another, and what does the same there.
# {name} and {title} are of the family that does not take it, {owner} is the name of the first that does.
FIELDS: dict[str, tuple[str, str]] = {
    "noise": (_DIFFUSION, ""),
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
    "model.clip_skip": ("chooses a layer of CLIP, and {name} has one way of reading it", "leave it out"),
    "model.max_token_length": ("counts tokens of CLIP, and {name} reads as many as it has learnt",
                               "t5_max_length says how far T5 reads"),
    "model.train_text_encoder": (_ENCODERS, "leave it out"),
    "optimizer.learning_rate_te1": (_ENCODERS, "leave it out"),
    "optimizer.learning_rate_te2": (_ENCODERS, "leave it out"),
    "optimizer.text_encoder_lr": (_ENCODERS, "leave it out"),
    "optimizer.unet_lr": ("{name} has no UNet", "the learning rate itself is the transformer's"),
    "optimizer.block_lr": ("names blocks of a UNet, and {name} has none", "one learning rate for all blocks"),
    "captions.weighted": ("weighs tokens of CLIP's chunks, which {name} has not", "leave it out"),
    **dict.fromkeys(("flow", "repa", "tread", "patch_masking"), (_ALONE, _OR_TYPE)),
    **dict.fromkeys(
        (f"model.{field}" for field in (
            "train_type", "num_layers", "transformer", "tokenizer1", "tokenizer2", "tokenizer3", "text_encoder1",
            "text_encoder2", "text_encoder3", "t5_max_length", "t5_attention_mask", "enable_uncond_text_dropout",
            "uncond_text_dropout_prob", "guidance", "train_only",
        )), (_ALONE, _OR_TYPE)),
    **dict.fromkeys(("loss.text_recon_gamma", "loss.text_recon_target_layer"), (_ALONE, _OR_TYPE)),
}  # fmt: skip


def row_of(cfg: TrainConfig) -> FamilyRow:
    """Return the row of a run's family."""
    return FAMILIES[cfg.model.family]


def learns_flow(cfg: TrainConfig) -> bool:
    """Tell whether a run's family learns a rectified flow, and has samplers of its own."""
    return row_of(cfg).objective == "flow"


def takes(cfg: TrainConfig, path: str) -> bool:
    """Tell whether a field means something to a run's family."""
    return _sentences(path) is None or row_of(cfg).has(path)


def why_not(name: str, path: str) -> tuple[str, str]:
    """Say why a field means nothing to a family, and what would be right."""
    row, (what, remedy) = FAMILIES[name], _sentences(path) or (_ALONE, "leave it out")
    owner = next((other for other in FAMILIES if FAMILIES[other].has(path)), "")
    words = {"name": name, "title": row.title, "owner": owner}
    return row.reasons.get(path) or what.format(**words), remedy.format(**words)


def multiple_of(cfg: TrainConfig) -> int:
    """Return the pixels of which both sides of a picture are multiples; of sizes in a file the model knows more."""
    size, row = cfg.model.init_from_config, row_of(cfg)
    if size is not None and size not in row.sizes:
        return 8
    return row.sizes_multiple.get(size or "", row.multiple)


def family_titled(title: str) -> str:
    """Return the name of the family that people call so, or nothing."""
    return next((name for name, row in FAMILIES.items() if row.title == title), "")


def encoder_fields(row: FamilyRow, kind: str) -> tuple[str, ...]:
    """Return the fields that name the text encoders of a kind: "clip" is any of CLIP's, in their order."""
    numbers = [number for number, own in enumerate(row.encoders, 1) if kind in (own, own.partition("_")[0])]
    return tuple(f"model.text_encoder{number}" for number in numbers)


def sizes_listed(names: Iterable[str]) -> str:
    """Return the sizes of random models of these families."""
    return "; ".join(f"{name}: {', '.join(FAMILIES[name].sizes)}" for name in names)


def _sentences(path: str) -> tuple[str, str] | None:
    return FIELDS.get(path) or FIELDS.get(path.partition(".")[0])
