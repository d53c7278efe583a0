"""Rules of how samples are made: crops, masks, captions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from difftrain.config.finding import Finding, Rule
from difftrain.config.rules import Need, lacking
from difftrain.config.sections import TrainConfig

NEEDS: tuple[Need, ...] = (
    Need("captions.token_warmup_min", lambda c: c.captions.token_warmup_step,
         "has no effect without --token_warmup_step", note=True),
    Need("data.face_crop_range", lambda c: not c.data.enable_bucket,
         "has no effect with --enable_bucket, as in kohya's: buckets are cut in the middle, or by --random_crop", note=True),
    Need("data.conditioning_dir", lambda c: c.loss.masked, "needs --masked_loss: it holds masks, and nothing would use them"),
)  # fmt: skip


def companions(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking(NEEDS, cfg, asked)


def faces(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """A range goes up."""
    given = cfg.data.face_crop_range
    if given is not None and given[0] > given[1]:
        what = f"must be LOW,HIGH, got {given[0]:g},{given[1]:g}"
        yield Finding(("data.face_crop_range",), what, "1.0,4.0: from the face alone to a frame four times as large")


def masks(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Masks come from somewhere, and their folder is there."""
    folder = cfg.data.conditioning_dir
    if folder and not Path(folder).expanduser().is_dir():
        remedy = "give the folder of the masks, each named as its picture"
        yield Finding(("data.conditioning_dir",), f"no such folder: {folder!r}", remedy)
    if folder and cfg.data.alpha_mask:
        about = ("data.alpha_mask", "data.conditioning_dir")
        yield Finding(about, "has no effect: --conditioning_data_dir wins", note=True)


RULES: tuple[Rule, ...] = (companions, faces, masks)
