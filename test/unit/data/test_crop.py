"""Where a use is cut: faces as kohya frames them, the middle, random places; and the colours it gets."""

import colorsys
import random
from collections import Counter

import numpy as np
import pytest

from difftrain.config import CaptionSection, DataSection
from difftrain.contracts import Draw, MediaRef, Record
from difftrain.data.media.crop import crop_window, face_of, recoloured, with_gamma, with_hue
from difftrain.data.plan.buckets import BucketTable
from difftrain.data.recipe import Recipe
from difftrain.diffusion.draws import Stream


def recipe(resolution=(512, 512), **settings):
    return Recipe(CaptionSection(), BucketTable.of(DataSection(resolution=resolution)), 1, **settings)


def places(made, name, size_wh, uses=400):
    record = Record(0, b"k" * 16, MediaRef(0, name), ("",), size_wh[::-1], name=f"folder/{name}")
    return [crop_window(made, record, Draw(0, record.key, use), 1) for use in range(uses)]


def test_a_face_is_read_from_the_end_of_the_name():
    assert face_of("folder/a_b_300_200_80_100.png") == (300, 200, 100)
    assert face_of("shard.tar!x/y_300_200_80_100.webp") == (300, 200, 100)
    for name in ("300_200_80_100.png", "a_0_200_80_100.png", "a_300_200_0_0.png", "a_b_c_d_e.png", "a_300_200_80.png"):
        assert face_of(f"folder/{name}") is None, name


@pytest.mark.flags("face_crop_aug_range")
def test_frames_are_as_many_times_the_face_as_the_range_says():
    found = places(recipe(face_crop_range=(1.5, 4.0)), "a_1000_600_200_150.png", (2000, 1500))
    scales = [place.fit.resized_wh[0] / 2000 for place in found]
    zooms = [512 / (200 * scale) for scale in scales]
    assert min(zooms) >= 2.55 and max(zooms) <= 4.01  # 512 / 200 at its own size: never enlarged to 1.5
    assert max(zooms) > 3.9 and min(zooms) < 2.6
    for place, scale in zip(found, scales, strict=True):
        left, top, width, height = place.crop
        assert (width, height) == (512, 512)
        middle = left + 256 - 1000 * scale, top + 256 - 600 * scale
        assert max(map(abs, middle)) <= 11.5  # a twentieth of the face either way, and roundings
        assert place.sizes == ((512, 512), (0, 0), (512, 512))
    assert len({place.crop[:2] for place in found}) > 200


def kohyas(width, height, face, least, most, target, use):
    """Frame a face by kohya's arithmetic, with the draws that ours made: scale, then top and left."""
    x, y, size = face
    side = min(target)
    lowest = max(target[1] / height, target[0] / width)
    lowest = min(1.0, max(lowest, side / (size * most)))
    highest = min(1.0, max(lowest, side / (size * least)))
    stream = Stream(1, b"k" * 16, use, "face")
    lot = stream.uniform()
    scale = lowest if lowest >= highest else lowest + (highest - lowest) * lot
    resized = int(width * scale + 0.5), int(height * scale + 0.5)
    starts = []
    for at, length, wanted in ((y, resized[1], target[1]), (x, resized[0], target[0])):
        start = int(at * scale + 0.5) - wanted // 2
        if least != most and size > side // 10 and size >= 40:
            low, high = -size // 20, size // 20
            start += low + stream.integer(high - low + 1)
        starts.append(max(0, min(start, length - wanted)))
    return resized, starts[1], starts[0]


@pytest.mark.flags("face_crop_aug_range")
def test_faces_are_framed_by_kohyas_arithmetic():
    rng = random.Random(0)
    for _ in range(200):
        width, height = rng.randrange(512, 3000), rng.randrange(640, 3000)
        face = rng.randrange(1, width), rng.randrange(1, height), rng.randrange(10, 500)
        least = rng.choice((0.5, 1.0, 2.0))
        made = recipe((512, 640), face_crop_range=(least, least + rng.choice((0.0, 3.0))))
        name = f"a_{face[0]}_{face[1]}_{face[2]}_{face[2]}.png"
        for use, place in enumerate(places(made, name, (width, height), uses=3)):
            expected = kohyas(width, height, face, *made.face_crop_range, (512, 640), use)
            assert (place.fit.resized_wh, place.left, place.top) == expected


@pytest.mark.flags("face_crop_aug_range", "random_crop")
def test_random_crops_around_a_face_favour_the_middle():
    made = recipe((256, 256), face_crop_range=(2.0, 2.0), random_crop=True)
    found = places(made, "a_500_500_128_128.png", (1000, 1000), uses=2000)
    lefts = np.array([place.left for place in found])
    assert {place.fit.resized_wh for place in found} == {(1000, 1000)}  # 256 / (128 * 2): its own size
    assert lefts.min() == 0 and lefts.max() == 744 and abs(lefts.mean() - 372) < 15
    near = np.mean(np.abs(lefts - 372) < 93)
    assert near > 0.3  # a uniform crop would be there in a quarter of the uses


@pytest.mark.flags("face_crop_aug_range")
def test_without_a_face_or_a_range_the_crop_is_the_usual_one():
    plain = places(recipe(), "a_300_200_80_100.png", (900, 600), uses=1)
    assert places(recipe(face_crop_range=(1.0, 2.0)), "a.png", (900, 600), uses=1) == plain
    small = places(recipe(face_crop_range=(1.0, 2.0)), "a_90_60_50_50.png", (200, 100), uses=1)[0]
    assert small.fit.resized_wh == (1024, 512)  # enlarged only to fill the frame


@pytest.mark.flags("random_crop")
def test_random_crops_are_uniform_and_not_in_the_sizes():
    found = places(recipe((64, 64), random_crop=True), "a.png", (128, 64), uses=6500)
    counts = Counter(place.left for place in found)
    assert set(counts) == set(range(65)) and all(60 < count < 145 for count in counts.values())
    assert {place.sizes for place in found} == {
        place.sizes for place in places(recipe((64, 64)), "a.png", (128, 64), 1)
    }


@pytest.mark.flags("flip_aug")
def test_half_of_the_uses_are_mirrored():
    flips = [place.flip for place in places(recipe(flip=True), "a.png", (64, 64), uses=2000)]
    assert 900 < sum(flips) < 1100 and not any(p.flip for p in places(recipe(), "a.png", (64, 64)))


def noise(size=16):
    return np.random.default_rng(0).integers(0, 256, (3, size, size), dtype=np.uint8)


@pytest.mark.flags("color_aug")
def test_a_third_of_the_uses_get_another_hue_or_gamma():
    pixels = noise()
    looks = [recoloured(pixels, Stream(1, b"k" * 16, use, "colour")) for use in range(3000)]
    changed = [look for look in looks if not (look == pixels).all()]
    assert 0.29 < len(changed) / 3000 < 0.36
    by_value = [look for look in changed if (look.max(axis=0) != pixels.max(axis=0)).any()]
    assert 0.4 < len(by_value) / len(changed) < 0.6  # a hue leaves the largest channel's value, a gamma does not
    again = [recoloured(pixels, Stream(1, b"k" * 16, use, "colour")) for use in range(50)]
    assert all((a == b).all() for a, b in zip(looks, again))


@pytest.mark.flags("color_aug")
@pytest.mark.parametrize("degrees", [-16.0, -3.3, 0.0, 8.0, 16.0, 120.0])
def test_hues_turn_as_in_hsv(degrees):
    pixels = noise()
    found = with_hue(pixels, degrees).reshape(3, -1).T
    for rgb, turned in zip(pixels.reshape(3, -1).T, found, strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(int(part) / 255 for part in rgb))
        expected = np.array(colorsys.hsv_to_rgb((hue + degrees / 360) % 1, saturation, value)) * 255
        assert np.abs(turned - expected).max() <= 0.501
    assert (with_hue(pixels, 0.0) == pixels).all()


@pytest.mark.flags("color_aug")
def test_gamma_is_kohyas_power_of_the_values():
    pixels = noise()
    for gamma in (0.95, 0.97, 1.0, 1.02, 1.05):
        assert (with_gamma(pixels, gamma) == np.clip(pixels.astype(np.float64) ** gamma, 0, 255).astype(np.uint8)).all()
