"""Speed-ups that contradict each other, lack what they need, or belong to another family: faults, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import is_about

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


# the settings that are refused, each with what is named beside it
BAD = {
    "no folder": (("--repa.encoder=nowhere",), ["repa.encoder folder 'nowhere'"]),
    "no weight": (("--repa.encoder={here}", "--repa.weight=0"), ["repa.weight 0 repa.encoder"]),
    "no encoder": (("--repa.layer=3", "--repa.hidden=9"), ["repa.layer repa.encoder", "repa.hidden repa.encoder"]),
    "no routes": (("--tread.start=3", "--tread.end=4"), ["tread.start tread.share 0", "tread.end tread.share 0"]),
    "no masks": (("--patch_masking.until_step=3",), ["patch_masking.until_step patch_masking.share 0"]),
    "both": (("--tread.share=0.5", "--patch_masking.share=0.5"), ["tread.share contradicts patch_masking.share"]),
    "an end before the start": (("--tread.share=0.5", "--tread.start=3", "--tread.end=2"), ["tread.end 2 tread.start 3"]),
    "a share of all": (("--tread.share=1.0", "--patch_masking.share=2"), ["tread.share 1", "patch_masking.share 1 2"]),
}  # fmt: skip


@pytest.mark.parametrize(("options", "facts"), BAD.values(), ids=BAD)
def test_what_does_not_go_together_is_named(options: tuple[str, ...], facts: list[str], tmp_path: Path) -> None:
    found = told(tmp_path, *(option.format(here=tmp_path) for option in options)).splitlines()
    assert len(found) == len(facts)
    for each in facts:
        where, *beside = each.split()
        assert any(is_about(fault, f"--{where}", *beside) for fault in found), (each, found)


@pytest.mark.parametrize("option", ["--tread.share=0.5", "--patch_masking.share=0.5", "--repa.encoder={here}"])
def test_sdxl_has_none_of_them(option: str, tmp_path: Path) -> None:
    assert "is sd3's" in told(tmp_path, option.format(here=tmp_path), family="sdxl")
