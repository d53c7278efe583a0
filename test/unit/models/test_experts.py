"""A model of two experts: a run trains one, at its times, and what it writes lies in that one's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from families import config, exported, loaded, made
from refusals import is_about

from difftrain.config.parse_keys import parse
from difftrain.contracts import Bucket, ConfigFault

BUCKET = Bucket(64, 96, 5)


@pytest.mark.parametrize(
    ("name", "expert", "low", "high"),
    [("wan_2_2", "high", 0.875, 1), ("wan_2_2", "low", 0, 0.875), ("wan_2_2_i2v", "high", 0.9, 1), ("wan", None, 0, 1)],
)
def test_times_are_those_of_the_expert(name: str, expert: str | None, low: float, high: float) -> None:
    family = made(config(name, **({} if expert is None else {"expert": expert})))
    through: Any = family.features.draws["timestep"].through
    times = [through((number + 0.5) / 64, BUCKET) for number in range(64)]
    assert times == sorted(times) and low <= times[0] and times[-1] <= high
    assert times[-1] - times[0] > 0.6 * (high - low)
    assert bool(family.remarks()) == (expert is not None)


def test_an_expert_is_written_to_its_folder_and_read_from_there(tmp_path: Path) -> None:
    low = loaded(config("wan_2_2", expert="low"))
    folder = exported(low, tmp_path / "low")
    index = json.loads((folder / "model_index.json").read_text())
    assert (folder / "transformer_2").is_dir() and not (folder / "transformer").exists()
    assert index["boundary_ratio"] == 0.875 and index["transformer_2"][1] == "WanTransformer3DModel"
    again = loaded(config("wan_2_2", expert="low", pretrained=str(folder)))
    assert all(value.equal(again.weights()[key]) for key, value in low.weights().items())
    with pytest.raises(ConfigFault, match="transformer"):
        made(config("wan_2_2", pretrained=str(folder))).load(meta=True)


def test_the_pairs_folder_is_no_other_wans(tmp_path: Path) -> None:
    folders = {name: exported(loaded(config(name)), tmp_path / name) for name in ("wan", "wan_2_2", "wan_2_2_5b")}
    for name, folder in folders.items():
        for other in folders.keys() - {name}:
            with pytest.raises(ConfigFault) as caught:
                made(config(other, pretrained=str(folder))).load(meta=True)
            assert any(f"'{name}'" in str(fault) for fault in caught.value.faults)
        made(config(name, pretrained=str(folder))).load(meta=True)


def test_both_experts_at_once_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f"[output]\noutput_dir = '{tmp_path}'\ndataset = '{tmp_path}/data.toml'\n"
        "[model]\ntype = 'wan_2_2'\nexpert = 'both'\ninit_from_config = 'tiny'\n"
    )
    with pytest.raises(ConfigFault) as caught:
        parse([f"--config={file}"])
    assert any(is_about(fault, "[model] expert", "both", "high", "low") for fault in caught.value.faults)
