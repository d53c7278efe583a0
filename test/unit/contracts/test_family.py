"""What a family says of its features, and how its frozen parts are loaded and offloaded."""

from __future__ import annotations

import pytest
import torch

from difftrain.contracts import Bucket, Feature, Parts


@pytest.mark.parametrize(
    ("feature", "bucket", "shape"),
    [
        (Feature(4, 8), Bucket(64, 96), (4, 8, 12)),
        (Feature(16, 8, frames=4), Bucket(64, 96, 1), (16, 1, 8, 12)),
        (Feature(16, 8, frames=4), Bucket(64, 96, 17), (16, 5, 8, 12)),
        (Feature(16, 8, frames=1), Bucket(64, 96, 17), (16, 17, 8, 12)),
        (Feature(32, length=77), Bucket(64, 96, 17), (77, 32)),
        (Feature(32), Bucket(64, 96), (32,)),
    ],
)
def test_the_shape_of_a_feature_follows_picture_and_clip(
    feature: Feature, bucket: Bucket, shape: tuple[int, ...]
) -> None:
    assert feature.shape(bucket) == shape


def linear(device: str) -> torch.nn.Module:
    return torch.nn.Linear(2, 2, device=device)


def test_a_lazy_part_is_filled_once_when_it_is_woken_and_emptied_when_it_rests() -> None:
    parts = Parts(torch.nn.Module(), {"deferred": linear("meta"), "loaded": linear("cpu")})
    filled: list[str] = []

    def fill() -> None:
        filled.append("deferred")
        parts.frozen["deferred"].to_empty(device="cpu")

    parts.deferred["deferred"] = fill
    assert not parts.is_loaded("deferred") and parts.is_loaded("loaded")
    for name in ("deferred", "loaded", "deferred"):
        parts.load(name)
    assert filled == ["deferred"] and parts.is_loaded("deferred")
    kept = parts.frozen["loaded"].weight
    for name in parts.frozen:
        parts.offload(name)
    assert not parts.is_loaded("deferred") and parts.frozen["loaded"].weight is kept and not kept.is_meta
    parts.load("deferred")
    assert len(filled) == 2
