"""The pages of docs/models/ say what the families' rows and facts say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from difftrain.config.schema.families import takes
from difftrain.config.schema.sections import TrainConfig
from difftrain.models.registry import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs" / "models"
LIST = (DOCS / "README.md").read_text(encoding="utf-8")
FLUX = (DOCS / "flux.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in LIST.splitlines()
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 7 and cells[0].startswith("`")
}
HEAD = "[model] type"


def test_the_table_has_every_family() -> None:
    assert [name for name in ROWS if name != HEAD] == list(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_the_registrys(name: str) -> None:
    row, (title, tasks, multiple, sizes, trains, _) = FAMILIES[name], ROWS[name]
    assert (title, tasks, int(multiple)) == (row.title, ", ".join(row.tasks), row.multiple)
    assert re.findall(r"`(\w+)`", sizes) == list(row.sizes)
    assert trains == (", ".join(row.trains) or "not yet")
    assert f"difftrain init {name} --size=" in LIST


def test_the_facts_of_flux_are_its_class() -> None:
    from difftrain.models.families.flux import Flux

    for part, kind in FAMILIES["flux"].parts.items():
        assert f"| `{part}` | `{kind.rpartition(':')[2]}` |" in FLUX
    clip, t5 = Flux.texts
    assert f"{clip.length} tokens; only `{clip.pooled}`" in FLUX and f"{t5.length} tokens (`t5_max_length`)" in FLUX
    assert Flux.shift.dynamic is not None
    first, last, low, high = Flux.shift.dynamic
    assert f"{low} at {first} and {high} at {last} |" in FLUX
    scales = Flux.vae_scales
    assert f"(z - {scales['shift_factor']}) x {scales['scaling_factor']}" in FLUX


def test_what_flux_is_said_to_refuse_is_refused() -> None:
    cfg = TrainConfig.model_validate({"model": {"family": "flux"}})
    for field in ("tread.share", "patch_masking.share", "model.t5_attention_mask", "model.num_layers", "model.clip_skip",
                  "model.fp8_frozen", "model.enable_uncond_text_dropout", "loss.text_recon_gamma"):  # fmt: skip
        assert not takes(cfg, field), field
    for field in ("model.guidance", "model.train_only", "repa.encoder", "flow.shift", "model.t5_max_length"):
        assert takes(cfg, field), field
