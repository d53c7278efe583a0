"""What configuration knows of the families, from their rows: who takes which field, and why another does not.

Rooms beside models/ ask here, too; the rows themselves stand in models/registry.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftrain.config.paths import expanded, is_folder
from difftrain.models.registry import FAMILIES
from difftrain.models.row import FamilyRow

if TYPE_CHECKING:
    from difftrain.config.schema.sections import TrainConfig

_LEAST = 8  # of sizes that tell nothing: others say what is wrong with them
_DIFFUSION = "belongs to the noise schedule of SDXL, and {name} learns a rectified flow"
_ENCODERS = "{name}'s text encoders are frozen: only the transformer is trained"
_ALONE = "is {owner}'s: {title} has nothing like it"
_NO_CONTROL = "is for models that edit images: {name} is shown no reference images"
_OR_TYPE = 'leave it out, or say type = "{owner}"'
# field or section that not every family takes -> why it means nothing to another, and what does the same there.
# {name} and {title} are of the family that does not take it, {owner} is the name of the first that does.
FIELDS: dict[str, tuple[str, str]] = {
    "noise": (_DIFFUSION, ""),
    "noise.min_timestep": (_DIFFUSION, "min_t = 0.0 to 1.0"),
    "noise.max_timestep": (_DIFFUSION, "max_t = 0.0 to 1.0"),
    "model.prediction_type": (_DIFFUSION, "leave it out: the velocity is predicted"),
    "loss.min_snr_gamma": (_DIFFUSION, "timestep_sample_method weighs the times"),
    "loss.min_snr_plus_one": (_DIFFUSION, ""),
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
    "training.sequence_parallel": (
        "shares tokens where blocks attend over them apart from text, and those of {name} do not",
        "leave it out; fsdp and pipeline_stages divide the model",
    ),
    **dict.fromkeys(("flow", "repa", "tread", "patch_masking"), (_ALONE, _OR_TYPE)),
    **dict.fromkeys(
        (f"model.{field}" for field in (
            "train_type", "num_layers", "transformer", "tokenizer1", "tokenizer2", "tokenizer3", "tokenizer4",
            "text_encoder1", "text_encoder2", "text_encoder3", "text_encoder4", "t5_max_length", "llm_max_length",
            "t5_attention_mask", "enable_uncond_text_dropout", "uncond_text_dropout_prob", "guidance", "train_only",
            "first_frame_conditioning_p", "expert",
        )), (_ALONE, _OR_TYPE)),
    **dict.fromkeys(("loss.text_recon_gamma", "loss.text_recon_target_layer"), (_ALONE, _OR_TYPE)),
    **dict.fromkeys(("data.frame_buckets", "data.framerate"),
                    ("is for models of clips: {name} makes images", "leave it out, and videos are not read")),
    **dict.fromkeys(("data.control_dirs", "data.num_control", "data.control_columns", "data.control_dropout",
                     "data.control_size"),
                    (_NO_CONTROL, _OR_TYPE)),
}  # fmt: skip


def row_of(cfg: TrainConfig) -> FamilyRow:
    """Return the row of a run's family."""
    return FAMILIES[cfg.model.family]


def learns_flow(cfg: TrainConfig) -> bool:
    """Tell whether a run's family learns a rectified flow, and has samplers of its own."""
    return row_of(cfg).objective == "flow"


def drawn_frames(cfg: TrainConfig, asked: int | None = None) -> int:
    """Return how many frames are drawn of a prompt: as many as are asked for, else as the longest clips of the training.

    A family takes some numbers of frames: it is the next one below. 1: pictures.
    """
    facts, data = row_of(cfg).clips, cfg.data
    if facts is None:
        return 1
    longest = max(data.frame_buckets + tuple(frames for one in data.datasets for frames in one.frame_buckets))
    return facts.frames(asked or longest)


def drawn_fps(cfg: TrainConfig) -> float:
    """Return how many frames of a clip that is drawn are shown a second: as many as in training."""
    facts = row_of(cfg).clips
    return cfg.data.framerate or (facts.fps if facts is not None else 1.0)


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
    """Return the pixels of which both sides of an image are multiples: the architecture's own, where it is told.

    A file of sizes and a folder of weights tell it without a tensor being read; of other weights it is the family's.
    """
    size, row = cfg.model.init_from_config, row_of(cfg)
    if size is not None and size in row.sizes:
        return row.sizes_multiple.get(size, row.multiple)
    if size is not None:
        content = _json(Path(expanded(size)))
        return _of_architecture(row, content.get(row.denoiser), content.get("vae")) or _LEAST
    if cfg.model.pretrained and is_folder(folder := expanded(cfg.model.pretrained)):
        denoiser, vae = (_json(Path(folder) / part / "config.json") for part in (row.denoiser, "vae"))
        return _of_architecture(row, denoiser, vae) or row.multiple
    return row.multiple


def _of_architecture(row: FamilyRow, denoiser: Any, vae: Any) -> int | None:
    """Return the multiple by the levels of the VAE and of a UNet, or the patch of a transformer; None: not told."""
    if not isinstance(denoiser, dict) or not isinstance(vae, dict):
        return None
    ratio, sides = vae.get("spatial_compression_ratio"), denoiser.get("patch_size")
    side = sides[-1] if isinstance(sides, list) and sides else sides
    if isinstance(ratio, int) and isinstance(side, int):
        return ratio * side
    halved = vae.get("spatio_temporal_scaling")
    if isinstance(halved, list):  # pixels are packed before they are halved
        packed, own = vae.get("patch_size", 4), denoiser.get("patch_size", 1)
        return (
            packed * 2 ** sum(step is True for step in halved) * own
            if isinstance(packed, int) and isinstance(own, int)
            else None
        )
    levels, unet_levels = vae.get("block_out_channels"), denoiser.get("block_out_channels")
    patch = denoiser.get("patch_size", 2) if row.denoiser != "unet" else None
    if not isinstance(levels, list) or not levels or (row.denoiser == "unet" and not isinstance(unet_levels, list)):
        return None
    inner = 2 ** (len(unet_levels) - 1) if isinstance(unet_levels, list) and unet_levels else patch
    factor = 2 ** (len(levels) - 1)
    if not isinstance(inner, int):
        return None
    # positions of a packed transformer have a patch of 1 in its file: its tokens are two latent pixels wide
    return factor * (inner if row.denoiser == "unet" else max(2, inner))


def _json(path: Path) -> dict[str, Any]:
    """Read a file that others judge: nothing where it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None  # a pipe would be waited for
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


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
