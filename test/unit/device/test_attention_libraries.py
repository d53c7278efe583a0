"""The one attention function inside diffusers' dispatcher and transformers' text encoders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from refusals import names
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from difftrain.device import attention_dispatch as ours
from difftrain.device import choose, counting, patches, use_attention
from difftrain.device.attention_dispatch import set_attention

MEMBER = AttentionBackendName._NATIVE_NPU
REGISTRY = attention_dispatch._AttentionBackendRegistry


def _flux() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    module = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 2, 2),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 9, 4),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor([0.1, 0.7]),
        "img_ids": torch.zeros(9, 3),
        "txt_ids": torch.zeros(5, 3),
    }
    return module, inputs


def _wan() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    module = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=16,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 2, 4, 4),
        "encoder_hidden_states": torch.randn(2, 5, 16),
        "timestep": torch.tensor([3, 700]),
    }
    return module, inputs


@pytest.mark.parametrize(("make", "attending"), [(_flux, 3), (_wan, 4)])
def test_models_of_the_dispatcher_compute_the_same(make: Any, attending: int) -> None:
    torch.manual_seed(0)
    module, inputs = make()
    theirs = module(**inputs).sample
    gradient = torch.autograd.grad(theirs.square().sum(), next(module.parameters()))[0]
    assert use_attention(module, choose("cpu")).endswith(f"in {attending} modules")
    with counting() as calls:
        out = module(**inputs).sample
    assert calls["sdpa (on cpu)"] == attending
    torch.testing.assert_close(out, theirs, rtol=1e-5, atol=1e-6)
    again = torch.autograd.grad(out.square().sum(), next(module.parameters()))[0]
    torch.testing.assert_close(again, gradient, rtol=1e-4, atol=1e-6)


def test_on_an_npu_with_sdpa_the_dispatcher_keeps_its_own() -> None:
    module, _ = _flux()

    class Npu:
        kind = "npu"

    for choice, named in (("auto", MEMBER), ("sdpa", None)):
        use_attention(module, Npu(), choice=choice)
        assert {each.attn.processor._attention_backend for each in module.single_transformer_blocks} == {named}


def test_elsewhere_the_dispatcher_keeps_its_own_where_that_is_not_replaced() -> None:
    torch.manual_seed(0)
    module, inputs = _flux()
    theirs = module(**inputs).sample
    with patches.without("native_npu"):  # as with a diffusers whose backend for NPUs has no fault any more
        use_attention(module, choose("cpu"))
        assert {each.attn.processor._attention_backend for each in module.single_transformer_blocks} == {None}
        torch.testing.assert_close(module(**inputs).sample, theirs)


def _qkv(b: int = 2, s: int = 5, t: int = 7, n: int = 4, d: int = 8, kv_heads: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((b, s, n, d), (b, t, kv_heads, d), (b, t, kv_heads, d))
    return [torch.randn(*shape, generator=generator, requires_grad=True) for shape in shapes]


BOOL = torch.rand(2, 7, generator=torch.Generator().manual_seed(1)) > 0.4
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "causal": {"is_causal": True},
    "padding of the keys": {"attn_mask": BOOL},
    "bool": {"attn_mask": BOOL[:, None, None, :]},
    "float": {"attn_mask": torch.randn(2, 1, 5, 7)},
    "minus 10000": {"attn_mask": torch.where(BOOL, 0.0, -10000.0)[:, None, None, :]},
    "fewer heads": {"enable_gqa": True},
}


@pytest.mark.parametrize("given", CALLS.values(), ids=CALLS.keys())
def test_the_backend_means_what_the_native_one_does(given: dict[str, Any]) -> None:
    patches.apply("diffusers")
    q, k, v = _qkv(kv_heads=2 if "enable_gqa" in given else 4)
    native = dispatch_attention_fn(q, k, v, **given, backend=AttentionBackendName.NATIVE)
    out = dispatch_attention_fn(q, k, v, **given, backend=MEMBER)
    torch.testing.assert_close(out, native)
    for a, b in zip(*(torch.autograd.grad(each.square().sum(), (q, k, v)) for each in (out, native))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_integers_keep_where_they_are_not_zero_and_dropout_drops() -> None:
    patches.apply("diffusers")
    q, k, v = _qkv()
    bools = dispatch_attention_fn(q, k, v, attn_mask=BOOL, backend=MEMBER)
    torch.testing.assert_close(dispatch_attention_fn(q, k, v, attn_mask=BOOL.long(), backend=MEMBER), bools)
    with counting() as calls:
        dropped = dispatch_attention_fn(q, k, v, attn_mask=BOOL, dropout_p=0.5, backend=MEMBER)
    ((kind, count),) = calls.items()
    assert names(kind, "sdpa", "dropout") and count == 1 and not torch.equal(dropped, bools)
    with pytest.raises(ValueError, match="Ulysses"):
        REGISTRY._backends[MEMBER](q, k, v, return_lse=True)


def test_the_patch_is_needed_and_can_be_taken_back() -> None:
    patches.apply("diffusers")
    row = next(each for each in patches.PATCHES if each.name == "native_npu")
    assert REGISTRY._backends[MEMBER] is ours.backend
    with patches.without("native_npu"):
        assert REGISTRY._backends[MEMBER] is attention_dispatch._native_npu_attention
        assert patches.faulty(row)
    assert REGISTRY._backends[MEMBER] is ours.backend
    assert REGISTRY._is_context_parallel_available(MEMBER)


@pytest.fixture
def alone() -> Any:
    """Be the only member of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _ulysses(group: Any, forward_op: Any, backward_op: Any, mask: torch.Tensor | None, *tensors: torch.Tensor) -> Any:
    mesh = SimpleNamespace(get_group=lambda: group)
    degrees = SimpleNamespace(ulysses_degree=1, ring_degree=1, _ulysses_mesh=mesh, _world_size=1)
    config = SimpleNamespace(context_parallel_config=degrees)
    apply = attention_dispatch.TemplatedUlyssesAttention.apply
    return apply(*tensors, mask, 0.0, False, None, False, False, forward_op, backward_op, config)


def test_context_parallelism_can_be_trained(alone: Any) -> None:
    tensors, mask = _qkv(t=5), BOOL[:, None, None, :5]
    wanted = ours.backend(*tensors, attn_mask=mask)
    out = _ulysses(alone, ours._forward, ours._backward, mask, *tensors)
    torch.testing.assert_close(out, wanted)
    for a, b in zip(*(torch.autograd.grad(each.square().sum(), tensors) for each in (out, wanted))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    broken = _ulysses(alone, ours._forward, attention_dispatch._npu_attention_backward_op, mask, *tensors)
    with pytest.raises(NotImplementedError, match="Npu Fusion Attention"):  # diffusers' own
        broken.sum().backward()


def _clip(kind: Any) -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3}
    ends = {"bos_token_id": 1, "eos_token_id": 59, "pad_token_id": 0}
    config = CLIPTextConfig(num_attention_heads=4, max_position_embeddings=77, projection_dim=16, **size, **ends)
    return kind(config).eval()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", [CLIPTextModel, CLIPTextModelWithProjection])
def test_clip_computes_what_eager_attention_does(kind: Any, padded: bool) -> None:
    model = _clip(kind)
    ids = torch.randint(2, 59, (2, 77))
    ids[:, -1] = 59
    keep = torch.ones(2, 77, dtype=torch.long)
    keep[1, 40:] = 0
    given = {"input_ids": ids, "attention_mask": keep if padded else None, "output_hidden_states": True}
    model.set_attn_implementation("eager")
    eager = model(**given)
    assert use_attention(torch.nn.ModuleList([model]), choose("cpu")).endswith("in 3 modules")
    with counting() as calls:
        out = model(**given)
    assert calls["sdpa (on cpu)"] == 3
    for a, b in zip(out.hidden_states, eager.hidden_states):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_clip_hands_on_a_flag_and_no_mask_and_keeps_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, bool]] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def spy(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, **rest: Any) -> torch.Tensor:
        seen.append((mask, causal))
        return sdpa(q, k, v, mask, dropout, causal, **rest)

    model = _clip(CLIPTextModel)
    before = model.config.to_dict()
    assert set_attention(model, fused=True) == 3
    assert model.config.to_dict() == before
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    model(torch.randint(2, 59, (2, 77)))
    assert seen == [(None, True)] * 3


def test_clip_with_dropout_and_t5_keep_what_the_fused_operator_has_not() -> None:
    model = _clip(CLIPTextModel).train()
    set_attention(model, fused=True)
    for layer in model.encoder.layers:
        layer.self_attn.dropout = 0.5
    with counting() as calls:
        model(torch.randint(2, 59, (2, 77)))
    ((kind, count),) = calls.items()
    assert names(kind, "sdpa", "dropout") and count == 3

    torch.manual_seed(0)
    t5 = T5EncoderModel(T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)).eval()
    ids, keep = torch.randint(2, 59, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    keep[1, 5:] = 0
    theirs = t5(ids, attention_mask=keep).last_hidden_state
    use_attention(t5, choose("cpu"))
    with counting() as calls:
        out = t5(ids, attention_mask=keep).last_hidden_state
    assert calls == {"sdpa (a position bias)": 2}
    torch.testing.assert_close(out[0], theirs[0], rtol=1e-4, atol=1e-5)
