"""Resizing, cropping, mirroring."""

import re

import numpy as np
import pytest
from PIL import Image

from difftrain.data.media.crop import fit, resize

RNG = np.random.default_rng(1)


def natural(height, width):
    """A picture with the spectrum of photographs: amplitudes fall with frequency."""
    f_y, f_x = np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None]
    falling = 1 / np.maximum(np.hypot(f_y, f_x), 1 / max(height, width))
    waves = np.fft.ifft2(np.fft.fft2(RNG.standard_normal((3, height, width))) * falling).real
    low, high = waves.min(), waves.max()
    return ((waves - low) / (high - low) * 255).astype(np.uint8).transpose(1, 2, 0)


def covered(n_in, n_out):
    """Weights (n_out, n_in) of averaging over the covered length."""
    edges = np.arange(n_out + 1) * (n_in / n_out)
    overlap = np.minimum(edges[1:, None], np.arange(1, n_in + 1)) - np.maximum(edges[:-1, None], np.arange(n_in))
    weights = np.maximum(overlap, 0)
    return weights / weights.sum(axis=1, keepdims=True)


def by_area(rgb, size_wh):
    rows, columns = covered(rgb.shape[0], size_wh[1]), covered(rgb.shape[1], size_wh[0])
    return np.einsum("ih,hwc,jw->ijc", rows, rgb.astype(float), columns, optimize=True)


def psnr(a, b):
    return 10 * np.log10(255**2 / np.mean((a - b) ** 2))


@pytest.mark.parametrize("scale", [1.02, 1.1, 1.3, 1.5, 1.9, 2.0, 2.7, 3.0, 5.3])
def test_shrinking_averages_over_the_area(scale):
    rgb = natural(240, 320)
    size = (round(320 / scale), round(240 / scale))
    assert psnr(resize(rgb, size), by_area(rgb, size)) > 42


def test_whole_factors_are_exact():
    rgb = natural(64, 96)
    want = rgb.reshape(32, 2, 48, 2, 3).mean(axis=(1, 3))
    assert np.abs(resize(rgb, (48, 32)) - want).max() <= 0.5


def test_enlarging_is_lanczos_and_names_are_kept():
    rgb = natural(20, 30)
    pillow = Image.fromarray(rgb)
    assert (resize(rgb, (45, 30)) == np.asarray(pillow.resize((45, 30), Image.Resampling.LANCZOS))).all()
    # one side smaller, one larger: kohya enlarges
    assert (resize(rgb, (15, 40)) == np.asarray(pillow.resize((15, 40), Image.Resampling.LANCZOS))).all()
    for name, pillows in (("nearest", "NEAREST"), ("linear", "BILINEAR"), ("bilinear", "BILINEAR"), ("cubic", "BICUBIC"),
                          ("bicubic", "BICUBIC"), ("lanczos", "LANCZOS")):  # fmt: skip
        want = np.asarray(pillow.resize((13, 11), getattr(Image.Resampling, pillows)))
        assert (resize(rgb, (13, 11), name) == want).all(), name
    assert resize(rgb, (60, 40), "area").shape == (40, 60, 3)


def test_the_same_size_is_the_same_picture():
    rgb = natural(20, 30)
    assert resize(rgb, (30, 20), "lanczos") is rgb


def test_fit_cuts_and_mirrors():
    rgb = natural(40, 50)
    want = rgb[5:29, 7:39].transpose(2, 0, 1)
    got = fit(rgb, (50, 40), (7, 5, 32, 24))
    assert got.shape == (3, 24, 32) and got.dtype == np.uint8 and got.flags.c_contiguous and got.flags.writeable
    assert (got == want).all()
    assert (fit(rgb, (50, 40), (7, 5, 32, 24), flip=True) == want[:, :, ::-1]).all()


@pytest.mark.parametrize("crop", [(-1, 0, 8, 8), (0, 0, 51, 8), (43, 0, 8, 8), (0, 33, 8, 8)])
def test_a_crop_that_leaves_the_picture_is_our_fault(crop):
    with pytest.raises(ValueError, match=re.escape(str(crop))):
        fit(natural(40, 50), (50, 40), crop)
