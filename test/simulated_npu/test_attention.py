"""Fused attention on the simulated device: against fp64, in every kind of module, counted; and the mends switched off."""

import itertools
import math
from types import SimpleNamespace

import pytest
import simulator
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, FluxTransformer2DModel, SD3Transformer2DModel
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from difftrain.device import AttentionCalls, attention, choose, counting, patches, use_attention
from difftrain.device import attention_dispatch as ours

NPU = "npu:0"
MEMBER = AttentionBackendName._NATIVE_NPU
B, N, S, L, D = 2, 4, 37, 77, 24
EPS = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
MASKS = {
    "none": None,
    "SL": (S, L),
    "1L": (1, L),
    "11SL": (1, 1, S, L),
    "B11L": (B, 1, 1, L),
    "B1SL": (B, 1, S, L),
    "BN1L": (B, N, 1, L),
    "1NSL": (1, N, S, L),
    "BNSL": (B, N, S, L),
}


@pytest.fixture(autouse=True)
def device():
    found = choose("npu")
    patches.apply("diffusers")
    return found


def drawn(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def masked(shape, seed=1):
    return None if shape is None else torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4


def exact(q, k, v, mask, causal, scale=None):
    """Compute in fp64; a row that keeps nothing gives zeros."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    keep = torch.ones(scores.shape, dtype=torch.bool) if mask is None else mask.expand(scores.shape)
    if causal:
        keep = keep & (torch.arange(scores.shape[-1]) <= torch.arange(scores.shape[-2])[:, None])
    return scores.masked_fill(~keep, -math.inf).softmax(-1).nan_to_num(0.0) @ v


def compared(q, k, v, mask, causal, scale=None):
    """Compare output and gradients with fp64's, within what rounding q, k, v, the result and the sums may cost."""
    dtype, shape = q.dtype, (*q.shape[:-1], v.shape[-1])
    (gradient,) = drawn(shape, dtype=dtype, seed=9)
    there = [x.to(NPU).requires_grad_() for x in (q, k, v)]
    there_mask, there_gradient = None if mask is None else mask.to(NPU), gradient.to(NPU)
    with counting() as calls, simulator.counting() as ran:
        out = attention(*there, there_mask, causal, scale)
        gradients = torch.autograd.grad(out, there, there_gradient)
    assert calls == {"fused": 1}
    assert ran["npu::npu_fusion_attention"] == ran["npu::npu_fusion_attention_grad"] == 1
    assert not simulator.fallbacks(ran) and not simulator.host_syncs(ran)
    here = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = exact(*here, mask, causal, scale)
    assert out.shape == wanted.shape and out.dtype == dtype
    for found, right in zip((out, *gradients), (wanted, *torch.autograd.grad(wanted, here, gradient.double()))):
        error = (found.detach().cpu().double() - right).abs().max()
        assert error <= 4 * EPS[dtype] * right.abs().max(), f"{error:.2e} of {right.abs().max():.2e}"
    return out


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_equals_fp64_forward_and_backward(name, dtype):
    for causal in (False, True):
        tensors = drawn((B, N, S, D), (B, N, L, D), (B, N, L, D), dtype=dtype)
        compared(*tensors, masked(MASKS[name]), causal)


SIZES = {  # S, L, D, heads of q, heads of k and v
    "one of each": (1, 1, 1, 1, 1),
    "fewer heads": (37, 77, 24, 6, 2),
    "one head for all": (13, 13, 40, 5, 1),
    "more queries than keys": (70, 9, 16, 2, 2),
    "SDXL across": (64, 77, 64, 5, 5),
    "the VAE's": (49, 49, 512, 1, 1),
    "the largest head": (11, 5, 768, 1, 1),
    "odd": (101, 103, 7, 3, 3),
    "keys beyond 512": (5, 641, 16, 2, 2),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_sizes_that_are_a_multiple_of_nothing_equal_fp64(size, causal):
    s, t, d, heads, kv_heads = size
    for dtype, shape in itertools.product((torch.bfloat16, torch.float32), (None, (2, 1, 1, t))):
        tensors = drawn((2, heads, s, d), (2, kv_heads, t, d), (2, kv_heads, t, d), dtype=dtype)
        compared(*tensors, masked(shape), causal, scale=0.3 if shape else None)


def test_random_shapes_and_masks_equal_fp64():
    generator = torch.Generator().manual_seed(5)

    def pick(high):
        return int(torch.randint(1, high + 1, (), generator=generator))

    for case in range(40):
        b, kv, s, t, d = pick(3), pick(3), pick(90), pick(90), pick(72)
        shapes = [None, (s, t), (b, 1, 1, t), (b, 1, s, t), (b, 2 * kv, s, t)]
        dtype = list(EPS)[pick(3) - 1]
        tensors = drawn((b, 2 * kv, s, d), (b, kv, t, d), (b, kv, t, d), dtype=dtype, seed=case)
        compared(*tensors, masked(shapes[pick(5) - 1], case), pick(2) == 1)


def test_a_row_that_keeps_nothing_gives_zeros_which_the_operator_alone_does_not():
    tensors, mask = drawn((B, N, S, D), (B, N, L, D), (B, N, L, D)), masked((B, 1, S, L))
    mask[1, :, 5] = False
    assert not compared(*tensors, mask, False)[1, :, 5].any()
    q, k, v = (x.to(NPU) for x in tensors)
    alone = torch.ops.npu.npu_fusion_attention(q, k, v, N, "BNSD", atten_mask=mask.to(NPU).logical_not(), scale=1.0)[0]
    torch.testing.assert_close(alone[1, :, 5].cpu(), tensors[2][1].mean(-2))


def test_heads_split_from_a_projection_are_not_copied():
    q, k, v = (x.to(NPU).transpose(1, 2) for x in drawn((B, S, N, D), (B, L, N, D), (B, L, N, D)))
    with simulator.counting() as ran:
        out = attention(q, k, v)
    assert ran == {"npu::npu_fusion_attention": 1} and out.transpose(1, 2).is_contiguous()


def test_queries_normed_in_fp32_are_fused_under_autocast():
    q, k, v = (x.to(NPU) for x in drawn((B, N, S, D), (B, N, L, D), (B, N, L, D)))
    with torch.autocast("npu", dtype=torch.bfloat16), counting() as calls:
        out = attention(q, k, v.bfloat16())
    assert calls == {"fused": 1} and out.dtype == torch.bfloat16


@pytest.mark.parametrize("name", MASKS)
def test_torchs_own_on_an_npu_means_the_same(name):
    for causal in (False, True):
        tensors, mask = drawn((B, N, S, D), (B, N, L, D), (B, N, L, D)), masked(MASKS[name])
        if mask is not None:
            mask[..., 0] = True  # it knows nothing of rows that keep nothing
        with counting() as calls:
            out = attention(*(x.to(NPU) for x in tensors), None if mask is None else mask.to(NPU), causal, fused=False)
        assert calls == {"sdpa (as asked for)": 1}
        torch.testing.assert_close(out.cpu().double(), exact(*tensors, mask, causal), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------ modules


def same_on_the_device(module, inputs, device, fused, dtype=torch.float32):
    """Compare a module's output and a gradient on the device with the CPU's; return what was counted."""
    first = next(module.parameters())

    def run(**given):
        out = module(**given)[0]
        (gradient,) = torch.autograd.grad(out.float().square().sum(), first)
        return out.detach().cpu(), gradient.cpu()

    right = run(**inputs)
    module.to(NPU)
    first = next(module.parameters())
    assert use_attention(module, device).startswith("attention: npu_fusion_attention where ")
    there = {name: value.to(NPU) if torch.is_tensor(value) else value for name, value in inputs.items()}
    with counting() as calls:
        found = run(**there)
    assert AttentionCalls.of(calls).fused == fused and not AttentionCalls.of(calls).sdpa
    for a, b in zip(found, right):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


def test_a_vae(device):
    torch.manual_seed(0)
    vae = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    same_on_the_device(vae, {"sample": torch.randn(1, 3, 8, 8), "return_dict": False}, device, fused=2)


def test_sd3(device):
    torch.manual_seed(0)
    module = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=16,
        pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 7, 16),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor([3.0, 700.0]),
    }
    same_on_the_device(module, inputs | {"return_dict": False}, device, fused=3 + 1)


def test_a_model_of_the_dispatcher(device):
    torch.manual_seed(0)
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
    same_on_the_device(module, inputs | {"return_dict": False}, device, fused=3)


@pytest.mark.parametrize("padded", [False, True])
def test_a_text_encoder(device, padded):
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=60, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        projection_dim=16, bos_token_id=1, eos_token_id=59, pad_token_id=0,
    )  # fmt: skip
    model = CLIPTextModelWithProjection(config)
    keep = torch.ones(2, 77, dtype=torch.long)
    keep[1, 40:] = 0
    inputs = {"input_ids": torch.randint(2, 60, (2, 77)), "attention_mask": keep if padded else None}
    same_on_the_device(model, inputs | {"return_dict": False}, device, fused=3)
    there = {name: value if value is None else value.to(NPU) for name, value in inputs.items()}
    with simulator.counting() as ran:
        model(**there)
    assert not simulator.host_syncs(ran)
    if padded:
        model.set_attn_implementation("sdpa")
        with simulator.counting() as ran:
            model(**there)
        assert simulator.host_syncs(ran)  # transformers' own looks into the mask


# ------------------------------------------------------------------ the dispatcher's own backend


def dispatched(*tensors, backend=MEMBER, **given):
    there = {name: value.to(NPU) if torch.is_tensor(value) else value for name, value in given.items()}
    return dispatch_attention_fn(*(x.to(NPU) for x in tensors), **there, backend=backend).cpu()


def test_diffusers_own_backend_turns_float_masks_round():
    tensors, keep = drawn((B, S, N, D), (B, L, N, D), (B, L, N, D), dtype=torch.bfloat16), masked((B, 1, 1, L))
    mask = torch.where(keep, 0.0, -10000.0).bfloat16()
    right = dispatch_attention_fn(*tensors, attn_mask=keep, backend=AttentionBackendName.NATIVE)
    torch.testing.assert_close(dispatched(*tensors, attn_mask=mask), right, rtol=2e-2, atol=2e-2)
    with patches.without("native_npu"):
        theirs = dispatched(*tensors, attn_mask=mask)
    wrong = dispatch_attention_fn(*tensors, attn_mask=~keep, backend=AttentionBackendName.NATIVE)
    torch.testing.assert_close(theirs, wrong, rtol=2e-2, atol=2e-2)


def test_diffusers_own_backend_attends_to_the_future():
    tensors = drawn((B, S, N, D), (B, S, N, D), (B, S, N, D), dtype=torch.bfloat16)
    right = dispatch_attention_fn(*tensors, is_causal=True, backend=AttentionBackendName.NATIVE)
    torch.testing.assert_close(dispatched(*tensors, is_causal=True), right, rtol=2e-2, atol=2e-2)
    with patches.without("native_npu"):
        theirs = dispatched(*tensors, is_causal=True)
    full = dispatch_attention_fn(*tensors, backend=AttentionBackendName.NATIVE)
    torch.testing.assert_close(theirs, full, rtol=2e-2, atol=2e-2)


def test_diffusers_own_backend_makes_the_host_wait():
    tensors = [x.to(NPU) for x in drawn((B, S, N, D), (B, L, N, D), (B, L, N, D), dtype=torch.bfloat16)]
    mask = masked((B, 1, 1, L)).to(NPU)
    waits = {}
    for own in (False, True):
        with patches.without(*(["native_npu"] if own else [])), simulator.counting() as ran:
            dispatch_attention_fn(*tensors, attn_mask=mask, backend=MEMBER)
        waits[own] = simulator.host_syncs(ran).total()
    assert waits == {False: 0, True: 1}


def test_diffusers_own_backend_cannot_be_trained_with_context_parallelism():
    dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = SimpleNamespace(get_group=lambda: dist.group.WORLD)
        degrees = SimpleNamespace(ulysses_degree=1, ring_degree=1, _ulysses_mesh=mesh, _world_size=1)
        config = SimpleNamespace(context_parallel_config=degrees)
        apply = attention_dispatch.TemplatedUlyssesAttention.apply
        tensors = [x.to(NPU).requires_grad_() for x in drawn(*[(B, S, N, D)] * 3)]
        tail = (None, 0.0, False, None, False, False)
        out = apply(*tensors, *tail, ours._forward, ours._backward, config)
        right = ours.backend(*tensors)
        for a, b in zip(*(torch.autograd.grad(each.square().sum(), tensors) for each in (out, right))):
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-4, atol=1e-4)
        own = (attention_dispatch._npu_attention_forward_op, attention_dispatch._npu_attention_backward_op)
        with pytest.raises(NotImplementedError, match="Npu Fusion Attention"):
            apply(*tensors, *tail, *own, config).sum().backward()
    finally:
        dist.destroy_process_group()
