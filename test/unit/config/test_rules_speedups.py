"""Speed-ups that contradict each other, lack what they need, or belong to another family: faults, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from difftrain.config.parse_keys import parse
from difftrain.contracts import ConfigFault

TOML = """
[model]
type = "{family}"
init_from_config = "tiny"
[data]
dirs = ["{here}"]
resolution = [64, 64]
[training]
max_steps = 4
[output]
output_dir = "{here}/out"
"""


def told(tmp_path: Path, *options: str, family: str = "sd3") -> str:
    """Return all faults of a command line, "" where there is none."""
    file = tmp_path / "run.toml"
    file.write_text(TOML.format(family=family, here=tmp_path))
    try:
        parse(["--config", str(file), *options])
    except ConfigFault as fault:
        return str(fault)
    return ""


GOOD = {
    "alignment": ("--repa.encoder={here}", "--repa.layer=2", "--repa.until_step=100"),
    "routes": ("--tread.share=0.5", "--tread.start=2", "--tread.end=2"),
    "masks": ("--patch_masking.share=0.75", "--patch_masking.mixer_layers=1", "--patch_masking.until_step=100"),
    "alignment and routes": ("--repa.encoder={here}", "--tread.share=0.5"),
}


@pytest.mark.parametrize("options", GOOD.values(), ids=GOOD)
def test_what_goes_together(options: tuple[str, ...], tmp_path: Path) -> None:
    assert told(tmp_path, *(option.format(here=tmp_path) for option in options)) == ""


BAD = {
    "no folder": (("--repa.encoder=nowhere",), ["repa.encoder", "no such folder: 'nowhere'"]),
    "no weight": (("--repa.encoder={here}", "--repa.weight=0"), ["repa.weight", "is 0: nothing would be aligned"]),
    "no encoder": (("--repa.layer=3", "--repa.hidden=9"), ["repa.layer", "repa.hidden", "names no folder"]),
    "no routes": (("--tread.start=3", "--tread.end=4"), ["tread.start", "tread.end", "no token is routed"]),
    "no masks": (("--patch_masking.until_step=3",), ["patch_masking.until_step", "no patch is masked"]),
    "both": (("--tread.share=0.5", "--patch_masking.share=0.5"), ["tread.share", "contradicts"]),
    "an end before the start": (("--tread.share=0.5", "--tread.start=3", "--tread.end=2"), ["is block 2, before"]),
    "a share of all": (("--tread.share=1.0", "--patch_masking.share=2"), ["tread.share", "patch_masking.share", "below 1"]),
}  # fmt: skip


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD)
def test_what_does_not_go_together_is_named(options: tuple[str, ...], words: list[str], tmp_path: Path) -> None:
    found = told(tmp_path, *(option.format(here=tmp_path) for option in options))
    assert all(word in found for word in words), found


@pytest.mark.parametrize("option", ["--tread.share=0.5", "--patch_masking.share=0.5", "--repa.encoder={here}"])
def test_sdxl_has_none_of_them(option: str, tmp_path: Path) -> None:
    assert "is sd3's" in told(tmp_path, option.format(here=tmp_path), family="sdxl")
