"""The module that made the first value that is no number, found by running a skipped step once more."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from engines import config, one_thread, spoilt  # noqa: F401 (a fixture)
from traced import Stepped, stepped

from difftrain.testing.family import TinyFamily, tiny_step
from difftrain.train.diagnosis.non_finite import EVERY, NonFinite

NAN = math.nan


def tiny(training: dict[str, Any] | None = None, micro: Any = None, **options: Any) -> Stepped:
    return stepped(config(training), TinyFamily(**options), lambda _: micro or tiny_step(0, 8, accumulation=2))


def origin(made: Stepped, step: int = 1, *, skipped: int = 1, updated: int = 0) -> str:
    search = NonFinite(made.model, made.ranks, lambda _: made.micro, lambda _: 8)
    return search(step, skipped=skipped, updated=updated)


def skips(made: Stepped) -> bool:
    return bool(made.engine.step(made.micro, {"samples": 8.0}).skipped)


def named(sentence: str) -> list[str]:
    """Return the modules of the tiny family that a sentence names."""
    return re.findall(r"\b(?:first|last|statistics|root|blocks\.\d(?:\.\d)?)\b(?! module| to read)", sentence)


def poison(made: Stepped, module: str) -> None:
    made.parts.root.get_submodule(module).register_forward_hook(
        lambda _, __, out: out.index_fill(0, torch.tensor([1]), NAN)
    )


def test_an_output_of_a_block(  # a NaN planted
) -> None:
    made = tiny()
    poison(made, "blocks.1")
    assert skips(made)
    assert named(origin(made))[0] == "blocks.1" and "TinyBlock" in origin(made)


def test_a_weight_that_is_infinite_is_named_with_its_module() -> None:
    made = tiny()
    with torch.no_grad():
        made.parts.root.get_parameter("blocks.2.4.weight")[0, 0] = math.inf
    assert skips(made)
    found = origin(made)
    assert named(found)[0] == "blocks.2.4" and "blocks.2.4.weight" in found and "Linear" in found


@pytest.mark.flags("mixed_precision")
def test_an_overflow_of_fp16_is_where_the_forward_leaves_its_range() -> None:
    made = tiny({"mixed_precision": "fp16"})
    with torch.no_grad():
        made.parts.root.get_parameter("blocks.1.1.weight").mul_(1e6)
    assert skips(made)
    assert named(origin(made))[0] == "blocks.1.1" and "weights" not in origin(made)


def test_an_overflow_of_scaled_gradients_is_found_at_the_scale_of_that_time() -> None:
    """The scaler has halved its scale since; forward, all is finite."""
    made = tiny({"mixed_precision": "fp16"})
    scaler: Any = made.engine._scaler  # type: ignore[attr-defined]
    made.step()
    scaler.update(2.0**24)
    assert skips(made) and scaler.get_scale() == 2.0**23
    assert skips(made) and scaler.get_scale() == 2.0**22
    found = origin(made, skipped=2)
    assert f"{2.0**24:g}" in found and named(found) == ["root"]


def test_a_gradient_that_is_no_number_is_named_with_the_module_that_hands_it_back() -> None:
    made = tiny()
    layer = made.parts.root.get_submodule("blocks.1.4")
    layer.register_full_backward_hook(lambda _, given, __: tuple(each * NAN for each in given))
    assert skips(made)
    assert named(origin(made))[:2] == ["blocks.1.4", "blocks.1.2"]  # dropout of nothing hands on what it is given


def test_what_the_network_is_given_is_not_blamed_on_a_module() -> None:
    made = tiny(micro=spoilt(0, NAN))
    assert skips(made)
    assert "x_t" in origin(made) and not named(origin(made))


def test_what_the_loss_compares_with() -> None:
    made = tiny()
    inputs: Any = made.family.inputs

    def wrong(*args: Any) -> Any:
        right = inputs(*args)
        right.target = right.target * NAN
        return right

    made.family.inputs = wrong  # type: ignore[method-assign]
    assert skips(made) and "target" in origin(made)


def test_a_step_that_is_finite_now_says_so() -> None:
    assert not named(origin(tiny())) and "3" in origin(tiny(), updated=3)


def test_it_leaves_no_trace() -> None:
    """Weights, gradients, running statistics, the next steps: as if nobody had looked."""
    options: dict[str, Any] = {"dropout": 0.2, "statistics": True}
    looked, other = tiny(**options), tiny(**options)
    losses = []
    for made in (looked, other):
        made.step()
        if made is looked:
            origin(made)
        assert all(each.grad is None for each in made.parts.root.parameters())
        losses.append([made.step(), made.step()])
    assert losses[0] == losses[1]
    assert all(not module._forward_hooks for module in looked.parts.root.modules())


def test_dropout_is_drawn_as_in_the_step() -> None:
    """A layer behind dropout fails where one element was kept: the search meets the same draw."""
    made = tiny(dropout=0.5)
    kept: list[torch.Tensor] = []
    made.parts.root.get_submodule("blocks.0.3").register_forward_hook(lambda _, __, out: kept.append(out == 0))
    made.step()
    origin(made)
    assert torch.equal(kept[0], kept[2]) and torch.equal(kept[1], kept[3]) and not torch.equal(kept[0], kept[1])


def test_it_searches_once_in_so_many_steps() -> None:
    made = tiny()
    asked: list[int] = []

    def batches(step: int) -> Any:
        asked.append(step)
        return made.micro

    search = NonFinite(made.model, made.ranks, batches, lambda _: 8)
    for step in (5, 6, 5 + EVERY - 1, 5 + EVERY):
        assert bool(search(step, skipped=1, updated=0)) == (step in asked)
    assert asked == [5, 5 + EVERY]


def test_a_search_that_fails_stops_no_run() -> None:
    made = tiny()

    def gone(_: int) -> Any:
        raise OSError(2, "no such thing")

    assert "no such thing" in NonFinite(made.model, made.ranks, gone, lambda _: 8)(1, skipped=1, updated=0)
