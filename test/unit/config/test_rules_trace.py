"""Which steps may be traced, and with what."""

from __future__ import annotations

from pathlib import Path

import pytest

from difftrain.config import parse_flags, parse_keys
from difftrain.contracts import ConfigFault


@pytest.fixture
def line(tmp_path: Path) -> list[str]:
    return [
        "--init_from_config=tiny",
        f"--train_data_dir={tmp_path}",
        f"--output_dir={tmp_path / 'out'}",
        "--resolution=64",
    ]


def faults(words: list[str]) -> list[str]:
    with pytest.raises(ConfigFault) as caught:
        parse_flags.parse(words)
    return [each.where for each in caught.value.faults]


@pytest.mark.flags("trace")
def test_both_doors_take_steps(line: list[str], tmp_path: Path) -> None:
    assert parse_flags.parse([*line, "--trace=1,3-5"]).config.logging.trace == "1,3-5"
    assert parse_flags.parse(line).config.logging.trace is None
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"[output]\noutput_dir = '{tmp_path / 'out'}'\n[model]\ntype = 'sdxl'\ninit_from_config = 'tiny'\n"
        f"[training]\nmax_steps = 4\n[data]\ndirs = ['{tmp_path}']\nresolution = [64, 64]\n[logging]\ntrace = '2,4'\n"
    )
    assert parse_keys.parse([f"--config={recipe}"]).config.logging.trace == "2,4"
    for word in ("--logging.trace=7", "--trace=7"):
        assert parse_keys.parse([f"--config={recipe}", word]).config.logging.trace == "7"


@pytest.mark.parametrize("steps", ["0", "5-3", "one", "1;2", "-4", "3-", ","])
def test_what_names_no_steps_is_a_fault(line: list[str], steps: str) -> None:
    assert faults([*line, f"--trace={steps}"]) == ["--trace"]


@pytest.mark.parametrize("with_it", ["--torch_compile", "--engine=accelerate"])
def test_what_a_trace_cannot_look_into_is_refused(line: list[str], with_it: str) -> None:
    assert faults([*line, "--trace=1", with_it]) == ["--trace"]
    assert parse_flags.parse([*line, with_it]).config.logging.trace is None


def test_what_a_trace_then_lacks_is_said(line: list[str]) -> None:
    parsed = parse_flags.parse([*line, "--trace=1", "--fused_backward_pass", "--optimizer_type=Adafactor"])
    assert [note.split(":")[0] for note in parsed.notes if "--trace" in note] == ["--trace"]
