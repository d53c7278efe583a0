"""Images that look nearly the same are found, and only those."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from difftrain.train.inspect.similar import CLOSE, grouped, hash_bits


def photo(seed: int) -> Image.Image:
    """Make something with light and dark areas, as photographs have."""
    noise = np.random.default_rng(seed).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((360, 480), Image.Resampling.BICUBIC)


def recompressed(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


def test_copies_that_were_changed_a_little_are_grouped() -> None:
    images = {i: photo(i) for i in range(12)}
    images[20] = recompressed(photo(3), 40)
    images[21] = photo(3).resize((200, 260))
    images[22] = photo(3).crop((4, 5, 356, 476))
    images[23] = recompressed(photo(7).resize((90, 120)), 75)
    known = {i: bits for i, image in images.items() if (bits := hash_bits(image)) is not None}
    assert grouped(known) == [[3, 20, 21, 22], [7, 23]]


def test_flat_images_are_told_from_nothing() -> None:
    assert hash_bits(Image.new("RGB", (64, 64), "white")) is None
    assert grouped({}) == []


def test_groups_join_what_is_close_to_a_member() -> None:
    bits = np.zeros(128, bool)
    chain = {i: bits.copy() for i in range(3)}
    chain[1][:CLOSE] = True
    chain[2][: 2 * CLOSE] = True  # close to 1, not to 0
    assert grouped(chain) == [[0, 1, 2]]
    chain[2][: 2 * CLOSE + 1] = True
    assert grouped(chain) == [[0, 1]]
