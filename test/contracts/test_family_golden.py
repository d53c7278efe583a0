"""Ten fp32 losses of each family's tiny size, to 1e-5 of the committed figures.

`pytest test/contracts/test_family_golden.py --update-golden` writes them anew, which a commit has to explain.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, ON_KIT, batch_of, bucket_of, nightly_siblings

STEPS = 10
FIGURES = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", nightly_siblings(ON_KIT), indirect=True)
def test_ten_losses(name: str, fresh: Any, update_golden: bool) -> None:
    tiny = fresh()
    optimizer = torch.optim.AdamW([each for each in tiny.parts.root.parameters() if each.requires_grad], lr=1e-3)
    losses = []
    for step in range(STEPS):
        tiny.batch = batch_of(tiny.family, bucket_of(name), seed=step, parts=tiny.parts)
        loss = tiny.loss()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    path = FIGURES / f"{name}.json"
    if update_golden:
        path.write_text(json.dumps({"losses": losses}, indent=1) + "\n")
    assert losses == pytest.approx(json.loads(path.read_text())["losses"], rel=1e-5)
    assert len(set(losses)) == STEPS


def test_no_figures_are_left_of_families_that_are_gone() -> None:
    assert {path.stem for path in FIGURES.glob("*.json")} <= set(FAMILIES)
