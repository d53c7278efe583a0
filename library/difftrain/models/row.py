"""What a family's row says, and what rows have in common.

A row is literal data that is read without torch. The maths stands where `target` says. This file imports nothing but
contracts and the standard library, so that configuration, which lies below the models, may read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from difftrain.contracts import ClipFacts, ReferenceArea

LAYOUTS = ("ckpt", "safetensors", "diffusers", "diffusers_safetensors")
FOLDER_LAYOUTS = ("diffusers", "diffusers_safetensors")
_TRAINED_BY = {"train_only": "model.train_only", "encoders": "model.train_text_encoder", "fp8": "model.fp8_frozen"}


@dataclass(frozen=True, kw_only=True)
class FamilyRow:
    """Say of a family what is known without its weights.

    title: what people call it; network: what logs and reports call it, by train_type where one has a name of its own.
    target: "module:Class". pipeline: its class, and pipeline_module: where that is imported from, which a release's own code is
    where diffusers has none. parts: name -> "library:Class", the denoiser first (where a folder
    of diffusers calls one otherwise, its class maps it in `folders`); encoders: the kinds of its text encoders, in their
    order. text_features: what frozen text encoders make of captions. multiple: pixels of which both sides are multiples.
    sizes: random models by name; sizes_multiple: of those whose multiple is smaller. layouts: those of exports.
    told_by: ("part.argument", value) in a folder's config.json, or ("model_index.argument", value), where families share a
    pipeline; True, False: whether it is there.

    takes: fields and whole sections, of those that not every family has, that mean something to this one; reasons: why
    another one means nothing, where config/schema/families.py has no sentence that fits. defaults: "section.field" -> value
    that differs from the field's own.
    """

    title: str
    network: str
    target: str
    pipeline: str
    parts: Mapping[str, str]
    encoders: tuple[str, ...]
    objective: Literal["ddpm", "flow"]
    multiple: int
    text_features: tuple[str, ...]
    tasks: tuple[str, ...] = ("text-to-image",)
    sizes: tuple[str, ...] = ()
    sizes_multiple: Mapping[str, int] = field(default_factory=dict)
    layouts: tuple[str, ...] = LAYOUTS
    clips: ClipFacts | None = None  # which it is trained on; None: images alone
    control: int = 0  # reference images that it is shown, at most; each has its image's size, or one of its own
    control_area: ReferenceArea | None = None  # which that is, where it may be: positions of references are their own
    shown_frames: int = 0  # of a clip, that the denoiser is shown: 1, the first; 2, the last, too
    control_least: int = 1  # of these, where it is shown any: 0 of a model that also draws from captions alone
    pipeline_module: str = "diffusers"
    told_by: tuple[tuple[str, Any], ...] = ()
    takes: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    networks_by_train_type: Mapping[str, str] = field(default_factory=dict)

    @property
    def denoiser(self) -> str:
        """Return the name of the part that is trained."""
        return next(iter(self.parts))

    @property
    def trains(self) -> tuple[str, ...]:
        """Name what can be trained: all of the denoiser, an adapter, and what there are fields for."""
        return ("full", "adapter", *(kind for kind, path in _TRAINED_BY.items() if self.has(path)))

    def has(self, path: str) -> bool:
        """Tell whether a field, or its whole section, is named in `takes`."""
        return path in self.takes or path.partition(".")[0] in self.takes


# what every rectified flow over a transformer has
FLOW_FIELDS = ("flow", "repa", "model.transformer")
# of those whose positions are added to tokens, so that blocks may see some of them; rotary ones hang on a token's place
ROUTED_FIELDS = ("tread", "patch_masking")
# of those that edit: images that they are shown
CONTROL_FIELDS = ("data.control_dirs", "data.num_control", "data.control_columns", "data.control_dropout")
# of those that make clips: which frames of a video they are trained on
CLIP_FIELDS = ("data.frame_buckets", "data.framerate")
# what pipelines bring references to, in their own shape: a million pixels, or one of Kontext's sizes
MILLION = ReferenceArea(1024 * 1024)
_TALL = ((1568, 672), (1504, 688), (1456, 720), (1392, 752), (1328, 800), (1248, 832), (1184, 880), (1104, 944))
KONTEXT_SIZES = ReferenceArea(1024 * 1024, 16, (*_TALL, (1024, 1024), *((width, height) for height, width in _TALL)))
# what every UNet over CLIP has
UNET_FIELDS = (
    "noise", "model.prediction_type", "model.fp8_frozen", "model.clip_skip", "model.max_token_length",
    "model.train_text_encoder", "model.tokenizer1", "loss.min_snr_gamma", "loss.min_snr_plus_one",
    "loss.scale_v_pred_like_noise_pred", "loss.v_pred_like", "loss.debiased_estimation", "loss.huber_schedule", "loss.huber_scale",
    "optimizer.learning_rate_te1", "optimizer.text_encoder_lr", "optimizer.unet_lr", "captions.weighted",
)  # fmt: skip
# layers that get an adapter, as kohya's scripts choose them: of a UNet's transformers, of CLIP
UNET_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2")
CLIP_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
ONE_ENCODER = {
    "optimizer.learning_rate_te2": "the model has one text encoder",
    "optimizer.block_lr": "is for the 23 blocks of SDXL's UNet",
}
FLOW_DEFAULTS: dict[str, Any] = {
    "cache.latents_to_disk": True,
    "cache.text_to_disk": True,
    "optimizer.learning_rate": 1e-4,
    "sample.sampler": "flow_euler",
    "save.model_as": "diffusers_safetensors",
}


def flow_row(*, takes: Iterable[str] = (), defaults: Mapping[str, Any] | None = None, **row: Any) -> FamilyRow:
    """Make the row of a rectified flow over a transformer: what such rows share, and each encoder's own fields."""
    kinds = row["encoders"]
    paths = {f"model.{name}{i}" for i in range(1, len(kinds) + 1) for name in ("text_encoder", "tokenizer")}
    lengths = {"model.t5_max_length"} if {"t5", "umt5"} & set(kinds) else set()
    lengths |= {"model.llm_max_length"} & {f"model.{kind}_max_length" for kind in kinds}
    shared = {
        "objective": "flow",
        "multiple": 16,
        "text_features": ("hidden_1",),
        "sizes": ("tiny",),
        "layouts": ("safetensors", *FOLDER_LAYOUTS),
    }
    clips: ClipFacts | None = row.get("clips")
    fields = frozenset({*FLOW_FIELDS, *paths, *lengths, *takes, *(CLIP_FIELDS if clips else ())})
    own = {"data.framerate": float(clips.fps)} if clips else {}
    return FamilyRow(**{**shared, **row}, takes=fields, defaults={**FLOW_DEFAULTS, **own, **(defaults or {})})
