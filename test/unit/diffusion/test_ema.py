"""The moving average against its closed form, its state, and its complaints."""

from __future__ import annotations

import pytest
import torch
from refusals import names

from difftrain.diffusion.ema import Ema, start_share


def _named(value: float, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((2, 3), value, dtype=dtype)), ("b", torch.full((4,), -value, dtype=dtype))]


def test_average_follows_its_closed_form() -> None:
    ema = Ema(_named(1.0), decay=0.9)
    for k in range(1, 6):
        ema.update(_named(1.0 + k))
    expected = 0.9**5 * 1.0 + sum(0.1 * 0.9 ** (5 - k) * (1.0 + k) for k in range(1, 6))
    torch.testing.assert_close(ema.weights["a"], torch.full((2, 3), expected))
    torch.testing.assert_close(ema.weights["b"], torch.full((4,), -expected))


def test_average_equals_torch_averaged_model() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 4)
    oracle = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    oracle.update_parameters(model)  # its first update copies
    ema = Ema(model.named_parameters(), decay=0.99)
    for _ in range(10):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        oracle.update_parameters(model)
        ema.update(model.named_parameters())
    for name, p in oracle.module.named_parameters():
        torch.testing.assert_close(ema.weights[name], p.detach())


def test_half_precision_weights_are_averaged_in_fp32() -> None:
    ema = Ema(_named(1.0, torch.bfloat16), decay=0.9999)
    for _ in range(100):  # a bf16 average would never move: 1e-4 is below its resolution
        ema.update(_named(2.0, torch.bfloat16))
    assert all(w.dtype == torch.float32 for w in ema.weights.values())
    torch.testing.assert_close(ema.weights["a"], torch.full((2, 3), 2 - 0.9999**100))


def test_average_is_a_copy_without_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    ema = Ema([("w", weight)], decay=0.5)
    with torch.no_grad():
        weight.fill_(9.0)
    assert ema.weights["w"].tolist() == [1.0, 1.0, 1.0] and not ema.weights["w"].requires_grad
    ema.update([("w", weight)])
    assert weight.tolist() == [9.0, 9.0, 9.0]


def test_state_comes_back_bit_by_bit() -> None:
    torch.manual_seed(0)
    ema = Ema([("w", torch.randn(7))], decay=0.9)
    held = ema.weights["w"]
    saved = {name: tensor.clone() for name, tensor in ema.state_dict().items()}
    ema.update([("w", torch.randn(7))])
    assert not torch.equal(held, saved["w"])
    ema.load_state_dict(saved)
    assert torch.equal(held, saved["w"]) and ema.weights["w"] is held


def test_wrong_names_shapes_and_decays_are_refused() -> None:
    ema = Ema(_named(1.0), decay=0.9)
    with pytest.raises(KeyError, match=r"missing \['b'\], unknown \['c'\]"):
        ema.load_state_dict({"a": torch.zeros(2, 3), "c": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"\bb\b.*\b5\b"):
        ema.load_state_dict({"a": torch.zeros(2, 3), "b": torch.zeros(5)})
    with pytest.raises(ValueError, match="holds 2 tensors, but 1"):
        ema.update(_named(1.0)[:1])
    with pytest.raises(KeyError):
        ema.update([("x", torch.zeros(1)), *_named(1.0)])
    for decay in (0.0, 1.0, -0.5):
        with pytest.raises(ValueError) as caught:
            Ema(_named(1.0), decay)
        assert names(caught.value, "decay", decay)


@pytest.mark.parametrize("decay", [0.9999, 0.3])
def test_a_ramp_is_diffusers_ema_model(decay: float) -> None:
    from diffusers.training_utils import EMAModel

    torch.manual_seed(0)
    model = torch.nn.Linear(5, 4)
    oracle, ema = EMAModel(model.parameters(), decay=decay), Ema(model.named_parameters(), decay, ramp=True)
    assert ema.start_share == 1.0
    for _ in range(12):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        oracle.step(model.parameters())
        ema.update(model.named_parameters())
        for theirs, ours in zip(oracle.shadow_params, ema.weights.values(), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert ema.start_share == start_share(decay, ema.updates, ramp=True) == 0.0
    assert start_share(0.5, 2, ramp=False) == 0.25 and start_share(0.5, 0, ramp=True) == 1.0
