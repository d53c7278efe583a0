"""The size of a reference that is not its image's: that of the family's pipeline, cut where its image is."""

from __future__ import annotations

import pytest

from difftrain.contracts import Bucket, Draw, MediaRef, Record, ReferenceArea
from difftrain.data.media.control import scaled_cut
from difftrain.data.media.crop import CropWindow, crop_window
from difftrain.data.plan.buckets import BucketTable
from difftrain.data.recipe import Recipe
from difftrain.models.registry import FAMILIES

SHAPES = ((64, 64), (512, 768), (768, 512), (100, 333), (1000, 990), (2000, 300), (900, 1600))


@pytest.mark.parametrize("name", ["qwen_image_edit", "qwen_image_edit_plus"])
def test_qwen_brings_references_to_a_million_pixels(name: str) -> None:
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import VAE_IMAGE_SIZE, calculate_dimensions

    area = FAMILIES[name].control_area
    assert area is not None and area.area == VAE_IMAGE_SIZE
    for height, width in SHAPES:
        assert area.size_hw((height, width)) == calculate_dimensions(VAE_IMAGE_SIZE, width / height)[::-1]


def test_kontext_brings_references_to_the_nearest_of_its_sizes() -> None:
    from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS as sizes

    area = FAMILIES["flux_kontext"].control_area
    assert area is not None
    for height, width in SHAPES:
        _, across, down = min((abs(width / height - w / h), w, h) for w, h in sizes)
        assert area.size_hw((height, width)) == (down, across)


def window_of(size_wh: tuple[int, int], *, random: bool = False, use: int = 0) -> CropWindow:
    """Cut an image for a bucket of 64 x 96 px."""
    table = BucketTable(((96, 64),), 96 * 64, 32, False, ())
    recipe = Recipe(None, table, 1, random_crop=random)  # type: ignore[arg-type]
    record = Record(0, b"key", MediaRef(0, ""), (), (size_wh[1], size_wh[0]))
    return crop_window(recipe, record, Draw(0, b"key", use), 0)


@pytest.mark.parametrize("size_wh", [(200, 100), (96, 64), (300, 301), (97, 640)])
def test_a_larger_reference_is_cut_where_its_image_is(size_wh: tuple[int, int]) -> None:
    area = ReferenceArea(1024 * 1024)
    for use in range(5):
        window = window_of(size_wh, random=use > 0, use=use)
        (wide, high), (left, top, width, height) = scaled_cut(window, area)
        assert (height, width) == area.size_hw((64, 96)) == tuple(area.bucket(Bucket(64, 96)))[:2]
        assert 0 <= left <= wide - width and 0 <= top <= high - height
        # the same part, to a pixel of the image
        (own_wide, own_high), (own_left, own_top, *_) = window.fit.resized_wh, window.crop
        assert (
            abs(left / wide - own_left / own_wide) < 1 / own_wide and abs(width / wide - 96 / own_wide) < 1 / own_wide
        )
        assert abs(top / high - own_top / own_high) < 1 / own_high and abs(height / high - 64 / own_high) < 1 / own_high
    assert scaled_cut(window, None) == (window.fit.resized_wh, window.crop)
