"""The figures of docs/cached_features.md are those of SDXL's own sizes."""

from __future__ import annotations

import re
from pathlib import Path

from difftrain.contracts import Bucket, Feature
from difftrain.data.cache.layout import PART_ENTRIES, Entry
from difftrain.models.sdxl.architecture import named
from difftrain.models.sdxl.encoders import MOMENTS, OUTPUTS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cached_features.md").read_text(encoding="utf-8")
MIB = 1 << 20


def test_bytes_of_a_picture() -> None:
    base = named("base")
    channels = 2 * base.vae["latent_channels"]
    entries = [Entry({MOMENTS: Feature(channels, base.vae_factor)}, Bucket(1024, 1024), n) for n in (1, 2)]
    assert [entry.stride / MIB for entry in entries] == [0.5, 1.0]
    assert "twice with `--flip_aug` | 0.5 MiB, or 1 MiB |" in PAGE


def test_bytes_of_a_caption() -> None:
    base = named("base")
    first, second = base.text_encoder_1["hidden_size"], base.text_encoder_2["hidden_size"]
    pooled = base.text_encoder_2["projection_dim"]
    found = re.search(
        r"\| a caption \| \((\d+) × (\d+) \+ 77 × (\d+) \+ (\d+)\) × 4.* \| ([\d.]+) MiB, or ([\d.]+) MiB", PAGE
    )
    assert found is not None and tuple(map(int, found.groups()[:4])) == (77, first, second, pooled)
    for dtype, said in zip(("float32", "bfloat16"), found.groups()[4:], strict=True):
        widths = {"hidden_1": (first, 77), "hidden_2": (second, 77), "pooled": (pooled, 0)}
        assert set(widths) == {name for each in OUTPUTS.values() for name in each}
        features = {name: Feature(width, length=length, dtype=dtype) for name, (width, length) in widths.items()}
        assert f"{Entry(features, Bucket(0, 0)).stride / MIB:.2f}" == said


def test_what_a_file_holds_and_what_is_refused() -> None:
    from difftrain.config.finding import option
    from difftrain.config.rules_cache import _CAPTION, _PICTURE

    assert f"holds up to {PART_ENTRIES} pictures or captions" in PAGE
    refused = PAGE[PAGE.index("Refused by name") : PAGE.index("Masks are no features")]
    for field in (*(f"data.{each}" for each in _PICTURE), *(f"captions.{each}" for each in _CAPTION)):
        assert f"`{option(field)}`" in refused, field
