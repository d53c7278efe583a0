"""Fused kernels on the device: equal to the plain versions, forward and backward, and run where they should."""

import pytest
import simulator
import torch
from diffusers.models import activations, embeddings, normalization

from difftrain.device import counters, fused_layers, patches

NPU = "npu:0"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# one rounding of the result, where the plain version rounds after each of its operations
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both_ways(function, inputs, device):
    leaves = [each.to(device).requires_grad_() for each in inputs]
    out = function(*leaves)
    grads = torch.autograd.grad(out.float().square().mean(), leaves)
    return [out.dtype, *[each.cpu().double() for each in (out.detach(), *grads)]]


def assert_alike(function, inputs, dtype, name):
    """Compare with the plain version in fp64; the fused one must have run on the device, and in no other form."""
    with simulator.counting() as ran, counters.counting() as counted:
        found = both_ways(function, inputs, NPU)
    assert counted == {f"{name} fused": 1} and not simulator.fallbacks(ran)
    plain = both_ways(function, inputs, "cpu")
    exact = both_ways(function, [each.double() for each in inputs], "cpu")
    assert found[0] == plain[0]
    for ours, theirs in zip(found[1:], exact[1:], strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * theirs.abs().max().item()
        )
    return ran


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_geglu_is_exact(dtype):
    ran = assert_alike(fused_layers.geglu, [drawn(2, 5, 64, dtype=dtype)], dtype, "geglu")
    assert ran["npu::npu_geglu"] == ran["npu::npu_geglu_grad"] == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(dtype):
    ran = assert_alike(fused_layers.swiglu, [drawn(2, 5, 64, dtype=dtype)], dtype, "swiglu")
    assert ran["npu::npu_swiglu"] == ran["npu::npu_swiglu_backward"] == 1


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_any_pair_of_dtypes(dtype, weight_dtype):
    inputs = [drawn(2, 5, 32, dtype=dtype), 1 + 0.1 * drawn(32, dtype=weight_dtype, seed=1)]
    coarse = max(dtype, weight_dtype, key=TOLERANCE.__getitem__)
    ran = assert_alike(lambda x, w: fused_layers.rms_norm(x, w, 1e-5), inputs, coarse, "rms_norm")
    assert ran["npu::npu_rms_norm"] == ran["npu::npu_rms_norm_backward"] == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 7, 16), (1, 3, 1, 16)], ids=["BNSD", "BSND"])
def test_rotary(shape, interleaved, dtype):
    angles = drawn(*shape, seed=1)

    def function(x):
        cos, sin = (table.to(x.device) for table in (angles.cos(), angles.sin()))
        return fused_layers.rotary(x, cos, sin, interleaved=interleaved)

    ran = assert_alike(function, [drawn(2, 3, 7, 16, dtype=dtype)], dtype, "rotary")
    assert ran["npu::npu_rotary_mul"] == ran["npu::npu_rotary_mul_backward"] == 1


def test_nothing_waits_for_the_host():
    x, angles = drawn(2, 3, 8, 16).to(NPU), drawn(1, 1, 8, 16, seed=1).to(NPU)
    weight = torch.ones(16, device=NPU)
    with simulator.counting() as ran:
        fused_layers.geglu(x), fused_layers.swiglu(x), fused_layers.rms_norm(x, weight)
        fused_layers.rotary(x, angles.cos(), angles.sin(), interleaved=True)
    assert not simulator.host_syncs(ran)


def test_modules_of_diffusers_take_them_by_where_their_tensors_are():
    patches.apply("diffusers")
    parts = [activations.GEGLU(16, 32), normalization.RMSNorm(16, eps=1e-6)]
    x, angles = drawn(2, 7, 16), drawn(7, 16, seed=1)
    heads = drawn(2, 3, 7, 16)

    def run(device):
        with counters.counting() as counted, torch.no_grad():
            out = [part.to(device)(x.to(device)).cpu() for part in parts]
            tables = angles.cos().to(device), angles.sin().to(device)
            out.append(embeddings.apply_rotary_emb(heads.to(device), tables).cpu())
        return out, counted

    there, fused = run(NPU)
    here, plain = run("cpu")
    assert fused == {"geglu fused": 1, "rms_norm fused": 1, "rotary fused": 1}
    assert plain == {"geglu plain": 1, "rms_norm plain": 1, "rotary plain": 1}
    for ours, theirs in zip(there, here, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_limits_are_those_that_the_device_refuses():
    """What `why_not` lets through the strict references take; what it keeps back they refuse."""
    import torch_npu

    x, tables = drawn(125, 8, 2, 8).to(NPU), [drawn(1, 1, 2, 8).to(NPU)] * 2
    for call in (
        lambda: torch_npu.npu_geglu(drawn(2, 3).to(NPU), -1, 0),
        lambda: torch_npu.npu_rms_norm(drawn(2, 4).half().to(NPU), drawn(4).to(NPU)),
        lambda: torch_npu.npu_rotary_mul(x, *tables, "interleave"),
    ):
        with pytest.raises(simulator.Refused):
            call()
    assert fused_layers.rotary(x, *tables, interleaved=True).shape == x.shape
