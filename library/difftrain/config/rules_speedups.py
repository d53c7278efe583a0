"""Rules of what makes training cheaper: alignment with an image encoder, routed tokens, masked patches."""

from __future__ import annotations

from collections.abc import Iterator

from difftrain.config.families import takes
from difftrain.config.finding import Finding, Rule
from difftrain.config.rules import Need, lacking
from difftrain.config.sections import TrainConfig
from difftrain.config.there import expanded, is_folder

_ALIGNS = "has no effect: repa.encoder names no folder"
_ROUTES = "has no effect: tread.share is 0, no token is routed"
_MASKS = "has no effect: patch_masking.share is 0, no patch is masked"

NEEDS: tuple[Need, ...] = (
    *(Need(f"repa.{field}", lambda c: c.repa.encoder, _ALIGNS) for field in ("weight", "layer", "hidden", "until_step")),
    *(Need(f"tread.{field}", lambda c: c.tread.share, _ROUTES) for field in ("start", "end")),
    *(Need(f"patch_masking.{field}", lambda c: c.patch_masking.share, _MASKS) for field in ("mixer_layers", "until_step")),
)  # fmt: skip


def companions(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking((need for need in NEEDS if takes(cfg, need.field)), cfg, asked)


def encoder(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """The image encoder is a folder of this machine, and counts for something."""
    folder = cfg.repa.encoder
    if folder is None:
        return
    if not is_folder(expanded(folder)):
        remedy = "give the folder of a transformers vision model: DINOv2, CLIP, SigLIP, ViT"
        yield Finding(("repa.encoder",), f"no such folder: {folder!r}", remedy)
    if not cfg.repa.weight:
        yield Finding(
            ("repa.weight", "repa.encoder"), "is 0: nothing would be aligned", "leave repa.encoder out, or 0.5"
        )


def tokens(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Tokens are routed, or patches masked; the route ends behind its start. The depth is looked at by the family."""
    tread = cfg.tread
    if tread.share and cfg.patch_masking.share:
        what = "contradicts patch_masking.share: each leaves out tokens of its own"
        yield Finding(("tread.share", "patch_masking.share"), what, "give one of them")
    if tread.share and tread.end is not None and tread.end < tread.start:
        what = f"is block {tread.end}, before tread.start, {tread.start}: no block would be passed by"
        yield Finding(("tread.end", "tread.start"), what, "the last block that routed tokens pass by")


RULES: tuple[Rule, ...] = (companions, encoder, tokens)
