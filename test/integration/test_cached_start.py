"""A start from a whole cache, as the doors have it: what it imports."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest
from doors import ROOT, Door

from difftrain.testing.imports import imported
from difftrain.testing.pictures import write_folder

TOML = """
[output]
output_dir = "{here}/out"
dataset = "{here}/data.toml"
[model]
type = "{family}"
init_from_config = "tiny"
dtype = "float32"
[training]
device = "cpu"
max_steps = 1
seed = 1
[optimizer]
type = "adamw"
lr = 1e-4
[cache]
latents_to_disk = true
text_to_disk = true
[data]
workers = 0
cache_dir = "{here}/cache"
"""
ASLEEP = {
    "sd3": "text_encoder_1, text_encoder_2, text_encoder_3, vae; ",
    "sdxl": "text_encoder_1, text_encoder_2, vae; ",
}


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["sd3", "sdxl"])
def test_a_start_from_a_whole_cache_imports_no_encoder(family: str, tmp_path: Path) -> None:
    """Nor takes the whole run long: a machine may be busy here; benchmarks/sd3_step.py holds a start to ten seconds."""
    write_folder(tmp_path / "pictures", [(64, 64), (96, 40)])
    (tmp_path / "data.toml").write_text(f'resolutions = [64]\n[[directory]]\npath = "{tmp_path / "pictures"}"\n')
    file = tmp_path / "run.toml"
    file.write_text(TOML.format(here=tmp_path, family=family))
    door = Door(tmp_path / "pictures", tmp_path / "user")
    words = [sys.executable, "-m", "difftrain.testing.imports", str(ROOT / "sd_scripts_xl" / "train.py")]
    library = {"PYTHONPATH": str(ROOT / "library")}
    built = door.run_words([*words, f"--config={file}", "--cache_only"], **library)
    assert any(name.endswith("modeling_clip") for name in imported(built))  # what is looked for below can be seen
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = door.run_words([*words, f"--config={file}"], **library)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 30
    assert ASLEEP[family] in told and "bitsandbytes" not in told and "gemm_4bit" not in told
    start, step, _ = told.partition("step=1")
    assert step and not imported(start), os.linesep.join(imported(start))
    assert any((tmp_path / "out").rglob("*.safetensors"))
