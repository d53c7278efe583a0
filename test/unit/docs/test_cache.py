"""The figures, flags and names of docs/cached_features.md are those of the code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from sdxl import sizes

from difftrain.cache.store.storage import CHOICES, stored
from difftrain.config.parse_flags import SHUFFLE_NUM
from difftrain.config.rules.data import _CAPTION, _PICTURE
from difftrain.config.schema.validate import default_of, fields
from difftrain.config.spellings.flags import flag_of
from difftrain.config.spellings.spelling import option
from difftrain.models.registry import FAMILIES

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "cached_features.md").read_text(encoding="utf-8")
COLUMNS = ("fp32", "bf16", "fp8")


def kib(*features: tuple[Sequence[int], int | None]) -> list[str]:
    """Return the KiB of features in each dtype of the table. features: (shape, rows that are kept)."""
    found = []
    for dtype in COLUMNS:
        entries = [stored("x", torch.zeros(*shape), CHOICES[dtype], rows) for shape, rows in features]
        scales = sum(0 if each.scales is None else each.scales.nbytes for each in entries)
        found.append(f"{(sum(each.data.nbytes for each in entries) + scales) / 1024:.1f}")
    return found


def row(beginning: str) -> list[str]:
    (line,) = re.findall(rf"^\| {re.escape(beginning)}[^|]*\|(.*)\|$", PAGE, re.MULTILINE)
    return [cell.strip() for cell in line.split("|")]


def sdxl_text() -> dict[str, tuple[int, ...]]:
    first, second = (sizes("base")[section] for section in ("text_encoder", "text_encoder_2"))
    hidden = {"hidden_1": (77, first["hidden_size"]), "hidden_2": (77, second["hidden_size"])}
    return {**hidden, "pooled": (second["projection_dim"],)}


def test_bytes_of_a_picture() -> None:
    channels, side = sizes("base")["vae"]["latent_channels"], 1024 // 8
    assert row("SDXL at 1024 px, moments") == kib(((2 * channels, side, side), None))
    assert row("mean, or sample") == kib(((channels, side, side), None))


@pytest.mark.parametrize("name", ["hidden_1", "hidden_2", "pooled"])
def test_bytes_of_a_caption(name: str) -> None:
    assert set(FAMILIES["sdxl"].text_features) == set(sdxl_text())
    assert row(f"`{name}`") == kib((sdxl_text()[name], None))


@pytest.mark.parametrize(("line", "rows"), [("SD3-Light's features at 256 px", None), ("the same, T5 masked", 25)])
def test_bytes_of_three_encoders(line: str, rows: int | None) -> None:
    whole: list[tuple[Sequence[int], int | None]] = [
        ((16, 32, 32), None), ((77, 768), None), ((768,), None), ((77, 1280), None), ((1280,), None),
    ]  # fmt: skip
    assert row(line) == kib(*whole, ((256, 4096), rows))


def test_masked_rows_and_eight_bits_save_what_they_should() -> None:
    whole, masked = row("SD3-Light's features at 256 px"), row("the same, T5 masked")
    assert float(whole[2]) <= 0.52 * float(whole[1]) and float(masked[1]) <= 0.25 * float(whole[1])


def test_every_flag_of_the_cache_is_explained() -> None:
    named = [
        option(path, door="kohya" if flag_of(path) else "train")
        for path in fields()
        if path.startswith("cache.") or path == "data.cache_dir"
    ]
    more = (Path(__file__).resolve().parents[3] / "docs" / "cache_remote_and_export.md").read_text(encoding="utf-8")
    assert not [each for each in named if each not in PAGE + more]


def test_defaults_are_the_ones_that_are_named() -> None:
    assert f"`--cache_shuffle_num` captions ({SHUFFLE_NUM}, unless" in PAGE
    assert f"`--cache_segment_gib` each ({default_of('cache.segment_gib'):g})" in PAGE
    assert f"`--cache_batch_size` captions ({default_of('cache.batch_size')})" in PAGE
    assert f"`{default_of('cache.latents_as')}` (default)" in PAGE
    assert f"`--cache_latents_dtype` | `{default_of('cache.latents_dtype')}` (default)" in PAGE
    assert f"`--cache_text_dtype` | `{default_of('cache.text_dtype')}` (default)" in PAGE


def test_what_is_refused_is_named() -> None:
    refused = PAGE[PAGE.index("Refused ") :]
    for field in (*(f"data.{each}" for each in _PICTURE), *(f"captions.{each}" for each in _CAPTION)):
        assert f"`{option(field)}`" in refused, field
