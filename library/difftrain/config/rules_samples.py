"""Rules of how samples are made: crops, masks, captions; of the flags, and of every subset of a data set TOML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from difftrain.config.datasets import subsets_of
from difftrain.config.finding import Finding, Rule
from difftrain.config.rules import Need, lacking
from difftrain.config.sections import CaptionSection, PictureSection, TrainConfig
from difftrain.config.there import expanded, is_folder

_UNBUCKETED = "has no effect with enable_bucket, as in kohya's: buckets are cut in the middle, or at random"

NEEDS: tuple[Need, ...] = (
    Need("loss.masked", lambda c: any(each.alpha_mask or each.conditioning_dir or each.default_mask for each in subsets_of(c)),
         "has no effect: there are no masks (--conditioning_data_dir, --alpha_mask)", note=True),
)  # fmt: skip


def companions(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Find fields that were given without what gives them a meaning."""
    return lacking(NEEDS, cfg, asked)


class _Place(NamedTuple):
    """Where settings of pictures and captions stand: in flags, or in a subset of the data set TOML."""

    name: str  # "" for the flags
    picture: PictureSection
    captions: CaptionSection
    bucketed: bool

    def finding(self, path: str, what: str, remedy: str = "", *, note: bool = False) -> Finding:
        """Name a field, or the subset and its field."""
        if not self.name:
            return Finding((path,), what, remedy, note)
        field = path.partition(".")[2]
        return Finding(("data.dataset_config", path), f"{self.name}: {field} {what}", remedy, note)


def _places(cfg: TrainConfig) -> Iterator[_Place]:
    if not cfg.data.datasets:
        yield _Place("", cfg.data, cfg.captions, cfg.data.enable_bucket)
    for dataset in cfg.data.datasets:
        for subset in dataset.subsets:
            name = subset.image_dir or subset.metadata_file or "a subset"
            yield _Place(name, subset, subset.captions, dataset.enable_bucket)


def samples(cfg: TrainConfig, asked: set[str]) -> Iterator[Finding]:
    """Judge the settings of every source."""
    found: dict[Finding, None] = {}
    for place in _places(cfg):
        found |= dict.fromkeys((*_faces(place), *_masks(place, cfg.loss.masked), *_growth(place)))
    yield from found


def _faces(place: _Place) -> Iterator[Finding]:
    given = place.picture.face_crop_range
    if given is None:
        return
    if given[0] > given[1]:
        remedy = "1.0,4.0: from the face alone to a frame four times as large"
        yield place.finding("data.face_crop_range", f"must be LOW,HIGH, got {given[0]:g},{given[1]:g}", remedy)
    if place.bucketed:
        yield place.finding("data.face_crop_range", _UNBUCKETED, note=True)


def _masks(place: _Place, masked: bool) -> Iterator[Finding]:
    folder = place.picture.conditioning_dir
    if place.picture.alpha_mask and (folder or getattr(place.picture, "default_mask", None)):
        yield place.finding("data.alpha_mask", "has no effect: the masks of files win", note=True)
    if not folder:
        return
    if not masked:
        yield place.finding("data.conditioning_dir", "needs --masked_loss: it holds masks, and nothing would use them")
    if not place.name and not is_folder(expanded(folder)):  # those of a TOML are looked for with its folders
        remedy = "give the folder of the masks, each named as its picture"
        yield place.finding("data.conditioning_dir", f"no such folder: {folder!r}", remedy)


def _growth(place: _Place) -> Iterator[Finding]:
    if place.captions.token_warmup_min != 1 and not place.captions.token_warmup_step:
        yield place.finding("captions.token_warmup_min", "has no effect without token_warmup_step", note=True)


RULES: tuple[Rule, ...] = (companions, samples)
