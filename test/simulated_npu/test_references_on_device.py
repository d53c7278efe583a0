"""Fused operators called on the simulated device: schemas, the wheel's own autograd formulas, torch's operators on top."""

from __future__ import annotations

import importlib
import inspect
import os
import pathlib
import re
import sys

import pytest
import simulator
import torch
import torch.nn.functional as F
import torch_npu
import warm
from simulator import fused, policy
from simulator.errors import Refused

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = tuple(TOLERANCE)
MASKED = torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1)


def made(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.mark.parametrize("name", fused.REFERENCES)
def test_a_reference_has_the_wheels_run_time_schema(name):
    base, _, overload = name.removeprefix("npu::").partition(".")
    schema = getattr(getattr(torch.ops.npu, base), overload or "default")._schema
    module, _, attribute = fused.REFERENCES[name].partition(":")
    mine = inspect.signature(getattr(importlib.import_module(module), attribute)).parameters
    assert [each.name for each in schema.arguments] == list(mine)
    for each in schema.arguments:
        parameter = mine[each.name]
        assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) == each.kwarg_only, each.name
        if each.has_default_value():
            assert parameter.default == each.default_value, each.name
        else:
            assert parameter.default is inspect.Parameter.empty, each.name


def compare(operator, plain, *given, counts=(), check_grads=True):
    """Run on the device forward and backward, and compare with the plain formula in fp64 on the host.

    counts: operators that must have run on the device, none of them by falling back.
    """
    dtype = given[0].dtype
    leaves = [each.double().requires_grad_() if each.is_floating_point() else each for each in given]
    there = [each.to("npu").requires_grad_(each.is_floating_point()) for each in given]
    expected = plain(*leaves)
    dy = made(*expected.shape, dtype=dtype, seed=5)
    wanted = torch.autograd.grad(expected, [each for each in leaves if each.is_floating_point()], dy.double())
    with simulator.counting() as counted:
        found = operator(*there)
        found.backward(dy.to("npu"))
    assert found.device.type == "npu" and found.dtype == dtype
    limit = TOLERANCE[dtype] * max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(found.detach().cpu().double(), expected.detach(), rtol=0, atol=limit)
    if check_grads:
        for mine, exact in zip([each.grad for each in there if each.requires_grad], wanted):
            limit = 2 * TOLERANCE[dtype] * max(1.0, float(exact.abs().max()))
            torch.testing.assert_close(mine.cpu().double(), exact, rtol=0, atol=limit)
    assert not simulator.fallbacks(counted)
    for name in counts:
        assert counted[f"npu::{name}"] == 1, f"{name} ran {counted[f'npu::{name}']} times: {dict(counted)}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["none", "mask", "causal"])
def test_attention(kind, dtype):
    keep = torch.rand(2, 1, 9, 11, generator=torch.Generator().manual_seed(0)) < 0.6
    keep[..., 0] = True
    options, exact = {
        "none": ({}, {}),
        "mask": ({"atten_mask": (~keep).to("npu")}, {"attn_mask": keep}),
        "causal": ({"atten_mask": MASKED.to("npu"), "sparse_mode": 2}, {"is_causal": True}),
    }[kind]

    def operator(q, k, v):
        return torch_npu.npu_fusion_attention(q, k, v, 4, "BNSD", scale=0.3, **options)[0]

    def plain(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True, **exact)

    given = made(2, 4, 9, 16, dtype=dtype), made(2, 2, 11, 16, dtype=dtype), made(2, 2, 11, 16, dtype=dtype, seed=1)
    compare(operator, plain, *given, counts=("npu_fusion_attention", "npu_fusion_attention_grad"))


def test_attention_of_packed_sequences_and_version_three():
    ends = [3, 9]

    def plain(q, k, v):
        parts = [each.split([3, 6]) for each in (q, k, v)]
        outs = [
            F.scaled_dot_product_attention(*(each.transpose(0, 1)[None] for each in part), scale=0.3)
            for part in zip(*parts)
        ]
        return torch.cat([each[0].transpose(0, 1) for each in outs])

    def packed(q, k, v):
        return torch_npu.npu_fusion_attention(
            q, k, v, 2, "TND", scale=0.3, actual_seq_qlen=ends, actual_seq_kvlen=ends
        )[0]

    given = [made(9, 2, 8, seed=n) for n in range(3)]
    compare(packed, plain, *given, counts=("npu_fusion_attention", "npu_fusion_attention_grad"))

    def third(q, k, v):
        return torch_npu.npu_fusion_attention_v3(q, k, v, 2, "BNSD", scale=0.3)[0]

    compare(
        third,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
        *(made(1, 2, 5, 8, seed=n) for n in range(3)),
        counts=("npu_fusion_attention_v3", "npu_fusion_attention_grad_v3"),
    )


def test_dropout_of_attention_follows_the_devices_generator():
    q = made(1, 2, 32, 8, dtype=torch.float16).to("npu").requires_grad_()

    def run():
        return torch_npu.npu_fusion_attention(q, q, q, 2, "BNSD", keep_prob=0.5)

    torch.npu.manual_seed(3)
    first, second = run(), run()
    state = torch.npu.get_rng_state()
    third = run()
    torch.npu.manual_seed(3)
    again = run()
    torch.npu.set_rng_state(state)
    assert torch.equal(first[0], again[0]) and first[4:] == again[4:]
    assert not torch.equal(first[0], second[0]) and torch.equal(third[0], run()[0])
    first[0].sum().backward()
    assert q.grad.isfinite().all() and q.grad.abs().sum() > 0


def rms(x, gamma):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gamma


def halves(x, act):
    a, b = x.chunk(2, -1)
    return act(a, b)


def turned(x, r1, r2):
    a, b = x.chunk(2, -1)
    return x * r1 + torch.cat((-b, a), -1) * r2


OPERATORS = {
    "rms_norm": (
        lambda x, g: torch_npu.npu_rms_norm(x, g)[0], rms, [(3, 5, 16), (16,)], ("npu_rms_norm", "npu_rms_norm_backward"),
    ),
    "rotary": (
        torch_npu.npu_rotary_mul, turned, [(2, 3, 5, 8), (1, 1, 5, 8), (1, 1, 5, 8)],
        ("npu_rotary_mul", "npu_rotary_mul_backward"),
    ),
    "swiglu": (
        torch_npu.npu_swiglu, lambda x: halves(x, lambda a, b: F.silu(a) * b), [(3, 10)],
        ("npu_swiglu", "npu_swiglu_backward"),
    ),
    "exact geglu": (
        lambda x: torch_npu.npu_geglu(x, -1, 0)[0], lambda x: halves(x, lambda a, b: a * F.gelu(b)), [(3, 10)],
        ("npu_geglu", "npu_geglu_grad"),
    ),
    "tanh geglu, left": (
        lambda x: torch_npu.npu_geglu(x, -1, 1, True)[0],
        lambda x: halves(x, lambda a, b: F.gelu(a, approximate="tanh") * b), [(3, 10)], ("npu_geglu", "npu_geglu_grad"),
    ),
    "gelu": (torch_npu.npu_gelu, F.gelu, [(3, 7)], ("npu_gelu", "npu_gelu_backward")),
    "fast gelu": (
        torch_npu.npu_fast_gelu, lambda x: x * torch.sigmoid(1.702 * x), [(3, 7)],
        ("npu_fast_gelu", "npu_fast_gelu_backward"),
    ),
    "format cast": (lambda x: torch_npu.npu_format_cast(x * 1, 29), lambda x: x * 1, [(3, 16)], ("_npu_format_cast",)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_with_the_wheels_autograd(name, dtype):
    operator, plain, shapes, counts = OPERATORS[name]
    compare(operator, plain, *(made(*each, dtype=dtype, seed=n) for n, each in enumerate(shapes)), counts=counts)


OLDER = {
    "silu": (torch_npu.npu_silu, F.silu, [(3, 7)], ("npu_silu", "npu_silu_backward")),
    "linear": (torch_npu.npu_linear, F.linear, [(5, 8), (4, 8), (4,)], ("npu_linear", "npu_linear_backward")),
    "bmm": (
        lambda a, b: torch_npu.npu_bmmV2(a, b, []), torch.bmm, [(2, 5, 8), (2, 8, 4)],
        ("npu_bmmV2", "npu_bmm_v2_mat1_backward", "npu_bmm_v2_mat2_backward"),
    ),
    "l1_loss": (F.l1_loss, F.l1_loss, [(3, 7), (3, 7)], ()),
    "kl_div": (F.kl_div, F.kl_div, [(3, 7), (3, 7)], ("kl_div_backward",)),
    "cross entropy of logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x) / 3),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x) / 3), [(3, 7)],
        ("npu_binary_cross_entropy_with_logits_backward",),
    ),
    "repeat_interleave": (
        lambda x: x.repeat_interleave(3, 1), lambda x: x.repeat_interleave(3, 1), [(3, 7)],
        ("repeat_interleave_backward_int",),
    ),
    "gather": (
        lambda x: x.gather(1, torch.tensor([[0, 0, 2]], device=x.device)),
        lambda x: x.gather(1, torch.tensor([[0, 0, 2]])), [(1, 7)], ("npu_gather_backward",),
    ),
    "cast": (
        lambda x: torch_npu.npu_dtype_cast(torch_npu.npu_dtype_cast(x * 2, torch.bfloat16), torch.float32),
        lambda x: (x * 2).float().bfloat16().double(), [(3, 7)], (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER)
def test_older_operators_and_those_under_torchs_own(name):
    operator, plain, shapes, counts = OLDER[name]
    given = [made(*each, seed=n).abs() if name == "kl_div" else made(*each, seed=n) for n, each in enumerate(shapes)]
    compare(operator, plain, *given, counts=counts, check_grads=name != "cast")


def test_what_autograd_is_told_not_to_differentiate():
    x = made(2, 8).to("npu").requires_grad_()
    y, rstd = torch_npu.npu_rms_norm(x, torch.ones(8, device="npu"))
    assert y.requires_grad and not rstd.requires_grad


def test_second_derivatives_of_a_product():
    def twice(x, w):
        first = torch.autograd.grad((x @ w).square().sum(), x, create_graph=True)[0]
        return first.square().sum() * torch.ones(1, dtype=x.dtype, device=x.device)

    compare(twice, twice, made(3, 5) / 4, made(5, 4) / 4)


def test_the_fused_adamw_of_the_wheel_is_torchs():
    torch.manual_seed(0)
    mine, theirs = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    mine.load_state_dict(theirs.state_dict())
    mine.to("npu")
    optimizers = (
        torch_npu.optim.NpuFusedAdamW(mine.parameters(), lr=1e-2),
        torch.optim.AdamW(theirs.parameters(), lr=1e-2),
    )
    x = made(4, 5)
    for _ in range(3):
        for net, given, optimizer in zip((mine, theirs), (x.to("npu"), x), optimizers):
            optimizer.zero_grad()
            net(given).square().sum().backward()
            optimizer.step()
    for a, b in zip(mine.parameters(), theirs.parameters()):
        torch.testing.assert_close(a.detach().cpu(), b.detach())


def test_adam_w_writes_where_it_was_told():
    var, grad = made(4, 5), made(4, 5, seed=1)
    state = [each.to("npu") for each in (var, torch.zeros(4, 5), torch.zeros(4, 5))]
    out = torch_npu.npu_apply_adam_w(
        1.0, 1.0, 1e-2, 0.1, 0.9, 0.99, 1e-8, grad.to("npu"), None, False, False, out=tuple(state)
    )
    param = torch.nn.Parameter(var.clone())
    param.grad = grad
    torch.optim.AdamW([param], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1).step()
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(out, state))
    torch.testing.assert_close(state[0].cpu(), param.detach())


def test_a_refusal_reaches_the_caller_with_its_source():
    with pytest.raises(Refused, match=r"D is 1 to 768.*Source: npu_fusion_attention in torch_npu"):
        torch_npu.npu_fusion_attention(*[torch.zeros(1, 1, 2, 769, device="npu")] * 3, 1, "BNSD")
    with pytest.raises(RuntimeError, match="same device"):
        torch_npu.npu_rms_norm(torch.zeros(2, 8, device="npu"), torch.zeros(2, 8).to("npu")[0].cpu())


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: torch.ones(3, 3, dtype=torch.float64, device="npu") @ torch.ones(3, 3, dtype=torch.float64, device="npu"), "matmul of fp64 or complex"),
        (lambda: F.linear(*[torch.ones(3, 3, dtype=torch.float64, device="npu")] * 2), "matmul of fp64 or complex"),
        (lambda: torch.ones(3, dtype=torch.float64, device="npu") + 1, "fp64 on the AI CPU"),
        (lambda: torch.addcdiv(*[torch.ones(3, dtype=torch.float64, device="npu")] * 3), "fp64 where it is not listed"),
        (lambda: torch.ones(3, dtype=torch.float64, device="npu").repeat_interleave(2), "repeat_interleave of fp64"),
        (lambda: torch.ones(3, dtype=torch.complex64, device="npu") + 1, "complex where it is not listed"),
        (lambda: torch.ones(3, dtype=torch.complex64, device="npu")[torch.tensor([0], device="npu")], "index of complex"),
        (lambda: torch.ones(3, device="npu").to(torch.float8_e4m3fn), "fp8"),
    ],
)  # fmt: skip
def test_the_policy_is_asked(call, rule):
    with pytest.raises(Refused, match=re.escape(f"Rule: {rule}.")):
        call()


def test_what_is_slow_is_taken_when_lenient_and_refused_again_after():
    x = torch.ones(3, dtype=torch.float64, device="npu")
    with simulator.lenient():
        assert (x + 1).sum().item() == 6
        with pytest.raises(Refused):
            torch.addcdiv(x, x, x)
    with pytest.raises(Refused):
        x + 1


def test_what_a_step_may_do_in_fp64_is_taken():
    scale = torch.full((1,), 128.0, device="npu")
    assert scale.double().reciprocal().float().item() == 1 / 128
    assert torch.zeros(3, dtype=torch.float64, device="npu").fill_(2).cpu().sum() == 6


def test_kernels_that_only_ask_the_cpu_are_fallbacks():
    x = torch.rand(3, device="npu")
    with pytest.raises(RuntimeError, match=r"falls .*to the CPU"):
        torch.logit(x)
    with simulator.lenient(), simulator.counting() as counted:
        torch.logit(x)
    assert simulator.fallbacks(counted) == {"aten::logit": 1}


SATURATED = """
import torch, torch_npu
register = torch.zeros(8, device="npu")
large = torch.full((3,), 60000.0, device="npu", dtype=torch.float16)
assert not torch_npu.npu_get_float_status(register).any()
assert (large * 2).tolist() == [65504.0] * 3
assert torch_npu.npu_get_float_status(register)[0] != 0
torch_npu.npu_clear_float_status(register)
large + 1
assert not torch_npu.npu_get_float_status(register).any()
"""


def test_a_saturated_overflow_is_in_the_status_register():
    done = warm.completed([sys.executable, "-c", SATURATED], env={**os.environ, "SIMULATED_NPU_SATURATE": "1"})
    assert done.returncode == 0, done.stderr


def test_the_kernels_dtypes_of_hccl_are_the_policys():
    text = pathlib.Path(simulator.__file__ or "").with_name("native").joinpath("hccl.cpp").read_text(encoding="utf-8")
    words = {"Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Bool": "bool",
             "Half": "float16", "Float": "float32", "Double": "float64", "BFloat16": "bfloat16"}  # fmt: skip
    table = re.search(r"taken = \{(.*?)\}", text, re.S)
    assert table is not None
    named = {getattr(torch, words[each]) for each in re.findall(r"at::k(\w+)", table.group(1))}
    assert named == policy.tables.HCCL
