"""Stable Diffusion 1 and 2 against lists that others made: names and shapes of whole files of the released sizes."""

from __future__ import annotations

import re

import pytest
import torch
from families import ORACLES, config, made
from packages import wheel

from difftrain.models.export import single_file_shapes
from difftrain.models.families.sd1 import POSITION_IDS
from difftrain.models.families.sd2 import LAYERS
from difftrain.models.weights.folder_export import file_name

ROW = re.compile(r"\s+(\S+): \{shape: \[(.*?)\], dtype: (\w+)")
# kohya's loss keeps tables that no reader of weights wants
TABLES = ("alphas_", "betas", "log_one_", "posterior_", "sqrt_")


def stored(name: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of an export in the original layout, without writing it."""
    family = made(config(name, init_from_config="base"))
    parts = family.load(meta=True)
    assert family.is_released
    _, shapes = single_file_shapes(family, parts, torch.float16, family.beside(parts))
    return {key: shape for key, (_, shape) in shapes.items()}


def test_a_file_of_version_1_is_sd_mechas() -> None:
    with wheel("sd_mecha==1.1.8") as package:
        text = package.read("sd_mecha/extensions/builtin/model_configs/sd1-ldm.yaml").decode()
    rows = {m[1]: tuple(int(n) for n in m[2].split(",") if n.strip()) for m in map(ROW.match, text.splitlines()) if m}
    released = {key: shape for key, shape in rows.items() if not key.startswith((*TABLES, "model_ema."))}
    assert POSITION_IDS in released and len(released) > 1100
    assert stored("sd1") == released


@pytest.mark.parametrize("name", ["sd1", "sd2"])
def test_diffusers_finds_every_tensor_of_a_file_at_full_size(name: str) -> None:
    family = made(config(name, init_from_config="base"))
    assert family.one_file is not None
    given = {key: torch.empty(shape, device="meta") for key, shape in stored(name).items()}
    assert any(key.startswith(f"{LAYERS}23.") for key in given) == (name == "sd2")
    for part, convert in ORACLES[name].whole.items():
        module, kind = family.source.build(part), family.parts[part]
        ours = {file_name(kind, key): tuple(value.shape) for key, value in module.state_dict().items()}
        theirs = convert(given, module, family.one_file.prefixes[part])
        theirs.pop("text_model.embeddings.position_ids", None)
        assert {key: tuple(value.shape) for key, value in theirs.items()} == ours, part
