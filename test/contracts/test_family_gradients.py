"""The first backward of every family that trains: no trained tensor gets a gradient of zeros that nothing explains."""

from __future__ import annotations

import pytest
import torch
from families import config, loaded, trained_once

from difftrain.engine.gradients import check_gradients, check_zeros, largest_of
from difftrain.models.registry import FAMILIES

WAYS = [(name, {}) for name in FAMILIES]
WAYS += [(name, {"train_text_encoder": True}) for name in FAMILIES if FAMILIES[name].has("model.train_text_encoder")]


@pytest.mark.parametrize(("name", "model"), WAYS)
def test_zeros_are_those_behind_layers_that_begin_as_zeros(name: str, model: dict[str, bool]) -> None:
    fresh, trained = loaded(config(name, **model)), trained_once(loaded(config(name, **model)))
    for tiny in (fresh, trained):
        weights = {n: each for n, each in tiny.parts.root.named_parameters() if each.requires_grad}
        starts, loss = largest_of(weights), tiny.loss()
        loss.backward()
        check_gradients([n for n, each in weights.items() if each.grad is None])
        zeros = check_zeros(largest_of({n: each.grad for n, each in weights.items()}), starts, loss, speaks=False)
        zeros = [n for n in zeros if n not in tiny.parts.silent]
        begins = any(not each.any() for each in starts.values())
        assert tiny.parts.silent <= weights.keys()
        assert not zeros or (tiny is fresh and begins), zeros[:5]
        assert all(torch.isfinite(each.grad).all() for each in weights.values() if each.grad is not None)
