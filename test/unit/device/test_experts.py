"""Experts in one grouped product, and all of them over all tokens, do what diffusers' loop over them does."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

from difftrain.device import experts, patches, quantised


@pytest.fixture(autouse=True)
def patched() -> None:
    patches.apply("diffusers")


def layer(chosen: int = 2, of: int = 4) -> MOEFeedForwardSwiGLU:
    torch.manual_seed(0)
    return MOEFeedForwardSwiGLU(8, 16, num_routed_experts=of, num_activated_experts=chosen)


def gradients(module: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    module(x).square().sum().backward()
    assert x.grad is not None
    return {
        "x": x.grad,
        **{name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen", [1, 2])
def test_these_are_the_bits_of_its_evaluation(chosen: int, dtype: torch.dtype) -> None:
    module, x = layer(chosen).eval(), torch.randn(2, 9, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        ours = module(x)
        with patches.without("routed_experts"):
            theirs = module(x)
    assert torch.equal(ours, theirs)


def test_gradients_are_the_bits_of_its_training() -> None:
    module, x = layer().train(), torch.randn(2, 9, 8)
    ours = gradients(module, x)
    with patches.without("routed_experts"):
        theirs = gradients(module, x)
    assert ours.keys() == theirs.keys() and all(torch.equal(each, theirs[name]) for name, each in ours.items())


@pytest.mark.parametrize("all_of_them", [True, False])
def test_experts_in_few_bits_compute_with_the_rounded_weights(all_of_them: bool) -> None:
    module, x = layer().train(), torch.randn(2, 9, 8)
    module.experts.requires_grad_(False)
    plain = copy.deepcopy(module)
    for name, each in list(module.experts.named_modules()):
        if isinstance(each, torch.nn.Linear) and (all_of_them or not name.startswith("0.")):
            weight = each.weight.detach()
            quantised.hollow([each], "fp8", torch.float32)
            each.take(weight)
            plain.experts.get_submodule(name).weight.data = each.wide(torch.float32)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        assert torch.equal(module(x.clone().requires_grad_()), plain(x))
    assert not all_of_them or not any(t.ndim == 3 and len(t) == 4 and t.dtype == torch.float32 for t in kept)
    ours, theirs = gradients(module, x), gradients(plain, x)
    assert ours.keys() == theirs.keys() and all(torch.equal(each, theirs[name]) for name, each in ours.items())


def test_its_evaluation_hands_no_gradient_back() -> None:
    module, x = layer().eval(), torch.randn(2, 9, 8)
    assert any(name.startswith("experts.") for name in gradients(module, x))
    with patches.without("routed_experts"):
        assert not any(name.startswith("experts.") for name in gradients(module, x)), "end the row's versions"


def test_an_expert_that_nobody_chose_gets_zeros() -> None:
    module, x = layer(1), torch.randn(1, 3, 8)
    with torch.no_grad():
        module.gate.weight.copy_(torch.tensor([[1.0], [0.0], [0.0], [0.0]]) * 9 * torch.ones(8))
    made = gradients(module, x.abs())
    assert made["experts.0.w1.weight"].any()
    for number in (1, 2, 3):
        assert not made[f"experts.{number}.w2.weight"].any()


def test_all_experts_over_all_tokens_make_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = layer(), torch.randn(2, 9, 8)
    ours, grouped = module(x), gradients(module, x)
    monkeypatch.setattr(experts, "_is_grouped", lambda x, dtype: False)
    torch.testing.assert_close(module(x), ours, rtol=1e-5, atol=1e-6)
    for name, grad in gradients(module, x).items():
        torch.testing.assert_close(grad, grouped[name], rtol=1e-4, atol=1e-6)
