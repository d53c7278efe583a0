"""Buckets: every figure that kohya's code gave, and what holds for any picture."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difftrain.config import DataSection
from difftrain.contracts import Bucket, ConfigFault
from difftrain.data.plan.buckets import BucketTable

FIGURES = json.loads((Path(__file__).parents[1] / "files" / "kohya_buckets.json").read_text())["buckets"]


def table(**settings):
    return BucketTable.of(DataSection(**({"resolution": (1024, 1024), "enable_bucket": True} | settings)))


def table_of(case):
    return table(
        resolution=tuple(case["max_reso"]),
        min_bucket_reso=case["min"],
        max_bucket_reso=case["max"],
        bucket_reso_steps=case["steps"],
        bucket_no_upscale=case["no_upscale"],
    )


@pytest.mark.flags(
    "resolution", "enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale"
)
@pytest.mark.parametrize("case", FIGURES, ids=lambda case: f"{case['max_reso']}-{case['steps']}-{case['no_upscale']}")
def test_kohyas_figures(case):
    buckets = table_of(case)
    assert [list(size) for size in buckets.sizes] == case["predefined"]
    for row in case["selected"]:
        fit = buckets.select(tuple(row["image"]))
        assert [fit.bucket.width, fit.bucket.height] == row["bucket"]
        assert list(fit.resized_wh) == row["resized"]
        assert fit.original_ltrb == pytest.approx(row["original_crop_ltrb"], abs=0, rel=0)
    sizes = np.array([row["image"] for row in case["selected"]])
    found, ordinals = buckets.select_many(sizes[:, 0], sizes[:, 1])
    assert [[found[i].width, found[i].height] for i in ordinals] == [row["bucket"] for row in case["selected"]]


SIDES = st.integers(1, 20_000)


@settings(max_examples=200, deadline=None)
@given(width=SIDES, height=SIDES, case=st.sampled_from(FIGURES), flipped=st.booleans())
def test_what_holds_for_any_picture(width, height, case, flipped):
    buckets = table_of(case)
    found, (ordinal,) = buckets.select_many(np.array([width]), np.array([height]))
    if not buckets.fits((width, height)):
        assert ordinal == -1 and not found
        with pytest.raises(ValueError, match="without enlarging"):
            buckets.select((width, height))
        return
    fit = buckets.select((width, height))
    assert found[ordinal] == fit.bucket
    (resized_w, resized_h), (left, top), bucket = fit.resized_wh, fit.crop, fit.bucket
    assert 0 <= left <= resized_w - bucket.width and 0 <= top <= resized_h - bucket.height
    assert bucket.width % case["steps"] == 0 == bucket.height % case["steps"] and min(bucket[:2]) > 0
    assert case["no_upscale"] or resized_w == bucket.width or resized_h == bucket.height
    if case["no_upscale"]:
        assert resized_w <= width and resized_h <= height
        assert resized_w - bucket.width < case["steps"] and resized_h - bucket.height < case["steps"]
    crop_top, crop_left = fit.top_left(flipped)
    assert 0 <= crop_left <= bucket.width and 0 <= crop_top <= bucket.height
    assert (fit.original_hw, fit.target_hw) == ((height, width), (bucket.height, bucket.width))


def test_many_at_once_are_chosen_as_one_by_one():
    rng = np.random.default_rng(3)
    widths, heights = rng.integers(16, 4000, (2, 40_000)).astype(np.uint32)
    for buckets in (table(), table(bucket_no_upscale=True), table(enable_bucket=False)):
        found, ordinals = buckets.select_many(widths, heights)
        assert ordinals.dtype == np.int32 and len(ordinals) == len(widths)
        for i in range(0, len(widths), 97):
            size = int(widths[i]), int(heights[i])
            want = buckets.select(size).bucket if buckets.fits(size) else None
            assert (found[ordinals[i]] if ordinals[i] >= 0 else None) == want


def test_a_picture_of_a_buckets_size_goes_there():
    """1472 x 640 is nearer in shape to other buckets of equal ratio only by rounding; its own size decides."""
    for size in table(min_bucket_reso=512, max_bucket_reso=2048).sizes:
        fit = table(min_bucket_reso=512, max_bucket_reso=2048).select(size)
        assert (fit.bucket.width, fit.bucket.height) == size == fit.resized_wh and fit.crop == (0, 0)


def test_the_order_of_pictures_does_not_name_buckets():
    sizes = np.array([(700, 900), (1500, 800), (300, 300)])
    buckets = table(bucket_no_upscale=True)
    found, ordinals = buckets.select_many(sizes[:, 0], sizes[:, 1])
    again, reversed_ = buckets.select_many(sizes[::-1, 0], sizes[::-1, 1])
    assert found == again and ordinals.tolist() == reversed_.tolist()[::-1]


def test_without_buckets_there_is_one():
    buckets = table(enable_bucket=False, resolution=(512, 768))
    fit = buckets.select((1000, 1000))
    assert (fit.bucket, fit.resized_wh, fit.crop) == (Bucket(768, 512), (768, 768), (128, 0))
    assert buckets.select((100, 300)).resized_wh == (512, 1536)
    found, ordinals = buckets.select_many(np.array([5, 900]), np.array([9, 30]))
    assert found == [Bucket(768, 512)] and ordinals.tolist() == [0, 0]


def test_limits_are_rounded_to_steps_and_it_is_said():
    buckets = table(min_bucket_reso=300, max_bucket_reso=1500)
    assert min(min(size) for size in buckets.sizes) == 256 and max(max(size) for size in buckets.sizes) == 1536
    assert len(buckets.notes) == 2 and "256 is used" in buckets.notes[0] and "1536 is used" in buckets.notes[1]
    assert "no effect" in table(bucket_no_upscale=True).notes[0]


def test_a_least_side_below_one_step_is_taken_as_it_is():
    """kohya would round it down to 0 and fail."""
    buckets = table(resolution=(64, 64), min_bucket_reso=32, max_bucket_reso=128)
    assert buckets.sizes == ((32, 128), (64, 64), (128, 32))


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"resolution": None}, "--resolution"),
        ({"min_bucket_reso": 1088, "max_bucket_reso": 2048}, "--min_bucket_reso"),
        ({"max_bucket_reso": 512}, "--max_bucket_reso"),
        ({"resolution": (32, 32), "min_bucket_reso": 64, "max_bucket_reso": 64}, "--bucket_reso_steps"),
    ],
)
def test_contradictions_are_named(settings, flag):
    with pytest.raises(ConfigFault, match=flag):
        table(**settings)


def test_it_is_picklable():
    buckets = table()
    buckets.select((100, 200))
    assert pickle.loads(pickle.dumps(buckets)).select((700, 300)) == buckets.select((700, 300))
