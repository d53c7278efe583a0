"""References of the other fused operators against plain formulas in fp64, forward and backward, and their limits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from simulator.errors import Refused
from simulator.fused import (
    activations,
    dropout,
    gradients,
    layouts,
    matrices,
    norms,
    optimizers,
    randomness,
    rotary,
    softmaxes,
    status,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = tuple(TOLERANCE)


def made(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def close(found, expected, dtype=None):
    """Compare with fp64: within the dtype's error, of the dtype."""
    dtype = dtype or found.dtype
    assert found.dtype == dtype
    limit = TOLERANCE[dtype] * max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(found.double(), expected.detach().double(), rtol=0, atol=limit)


def compare(forward, backward, plain, *given):
    """Compare forward and backward with the plain formula and its gradient in fp64.

    forward(*given) -> result; backward(dy, result, *given) -> gradients of the floating given, in order.
    """
    leaves = [each.detach().double().requires_grad_() if each.is_floating_point() else each for each in given]
    result = forward(*given)
    first = result[0] if isinstance(result, tuple) else result
    expected = plain(*leaves)
    close(first, expected, given[0].dtype)
    dy = made(*expected.shape, dtype=given[0].dtype, seed=5)
    wanted = torch.autograd.grad(expected, [each for each in leaves if each.is_floating_point()], dy.double())
    found = backward(dy, result, *given)
    found = found if isinstance(found, tuple) else (found,)
    assert len(found) == len(wanted)
    for mine, exact in zip(found, wanted):
        assert mine.shape == exact.shape
        # a sum over many half-precision terms is held to the dtype of what went into it
        limit = TOLERANCE[given[0].dtype] * max(1.0, float(exact.abs().max()))
        torch.testing.assert_close(mine.double(), exact, rtol=0, atol=2 * limit)
    return result


# ------------------------------------------------------------------ normalisation


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "gamma"), [((3, 16), (16,)), ((2, 5, 7), (7,)), ((2, 3, 4, 6), (4, 6)), ((4, 3), (4, 3))]
)
def test_rms_norm(shape, gamma, dtype):
    dims = tuple(range(-len(gamma), 0))

    def plain(x, g):
        return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + 1e-3) * g

    given = made(*shape, dtype=dtype), made(*gamma, dtype=dtype, seed=1)
    _, rstd = compare(
        lambda x, g: norms.npu_rms_norm(x, g, 1e-3),
        lambda dy, out, x, g: norms.npu_rms_norm_backward(dy, x, g, out[1]),
        plain,
        *given,
    )
    assert rstd.dtype == torch.float32 and rstd.shape == (*shape[: len(shape) - len(gamma)], *[1] * len(gamma))


def test_rms_norm_is_torchs_own():
    x, gamma = made(4, 9), made(9, seed=1)
    torch.testing.assert_close(norms.npu_rms_norm(x, gamma)[0], F.rms_norm(x, (9,), gamma, 1e-6))


def test_add_rms_norm_and_layer_norm_eval():
    x1, x2, gamma = (made(3, 8, dtype=torch.bfloat16, seed=n) for n in range(3))
    y, rstd, total = norms.npu_add_rms_norm(x1, x2, gamma[0])
    exact = x1.double() + x2.double()
    close(total, exact, torch.bfloat16)
    close(y, F.rms_norm(exact, (8,), gamma[0].double(), 1e-6), torch.bfloat16)
    assert rstd.shape == (3, 1)
    x, weight, bias = made(2, 3, 8), made(8), made(8, seed=1)
    close(
        norms.npu_layer_norm_eval(x, [8], weight, bias), F.layer_norm(x.double(), (8,), weight.double(), bias.double())
    )


# ------------------------------------------------------------------ activations


def swiglu(x, dim=-1):
    a, b = x.chunk(2, dim)
    return F.silu(a) * b


def geglu(x, dim, approximate, left):
    a, b = x.chunk(2, dim)
    value, gate = (b, a) if left else (a, b)
    return value * F.gelu(gate, approximate="tanh" if approximate else "none")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), [((8,), -1), ((3, 10), -1), ((4, 3, 2), 0), ((2, 6, 5), 1)])
def test_swiglu(shape, dim, dtype):
    compare(
        lambda x: activations.npu_swiglu(x, dim),
        lambda dy, _, x: activations.npu_swiglu_backward(dy, x, dim),
        lambda x: swiglu(x, dim),
        made(*shape, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", [0, 1])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("dim", [-1, 0])
def test_geglu(dim, left, approximate, dtype):
    how = (dim, approximate, left)
    _, activated = compare(
        lambda x: activations.npu_geglu(x, *how),
        lambda dy, out, x: activations.npu_geglu_grad(dy, x, out[1], *how),
        lambda x: geglu(x, *how),
        made(4, 6, dtype=dtype),
    )
    gate = made(4, 6, dtype=dtype).chunk(2, dim)[0 if left else 1].double()
    close(activated, F.gelu(gate, approximate="tanh" if approximate else "none"), dtype)


def test_geglus_gates_differ_where_they_should():
    """What diffusers takes on an NPU is the tanh form: 6.6e-4 off the exact one, at most."""
    x = torch.cat((torch.ones(1, 2001), torch.linspace(-6, 6, 2001)[None]), -1)
    apart = (activations.npu_geglu(x, -1, 1)[0] - activations.npu_geglu(x, -1, 0)[0]).abs().max()
    assert 4e-4 < apart < 7e-4


@pytest.mark.parametrize(
    ("forward", "backward", "plain", "dtypes"),
    [
        (activations.npu_fast_gelu, activations.npu_fast_gelu_backward, lambda x: x * torch.sigmoid(1.702 * x), DTYPES),
        (activations.fast_gelu, activations.npu_fast_gelu_backward, lambda x: x * torch.sigmoid(1.702 * x), DTYPES[:2]),
        (activations.npu_gelu, activations.npu_gelu_backward, F.gelu, DTYPES),
    ],
)
def test_gelus(forward, backward, plain, dtypes):
    for dtype in dtypes:
        compare(forward, lambda dy, _, x: backward(dy, x), plain, made(5, 7, dtype=dtype))


def test_gelu_by_tanh_and_silu():
    tanh = {"approximate": "tanh"}
    x = made(5, 7)
    compare(
        lambda x: activations.npu_gelu(x, **tanh),
        lambda dy, _, x: activations.npu_gelu_backward(dy, x, **tanh),
        lambda x: F.gelu(x, **tanh),
        x,
    )
    compare(activations.npu_silu, lambda dy, out, x: activations.npu_silu_backward(dy, x, out), F.silu, x)
    expected = F.silu(x)
    assert activations.npu_silu_(x) is x
    torch.testing.assert_close(x, expected)


# ------------------------------------------------------------------ rotary


def rotated(x, r1, r2, mode):
    """Rotate by complex numbers, where each pair turns by one angle."""
    if mode == "half":
        pair = torch.complex(*x.chunk(2, -1))
        turn = torch.complex(r1.chunk(2, -1)[0], r2.chunk(2, -1)[0])
        out = pair * turn
        return torch.cat((out.real, out.imag), -1)
    pair = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    out = pair * torch.complex(r1[..., ::2].contiguous(), r2[..., ::2].contiguous())
    return torch.view_as_real(out).flatten(-2)


def plain_rotary(x, r1, r2, mode):
    if mode == "half":
        a, b = x.chunk(2, -1)
        return x * r1 + torch.cat((-b, a), -1) * r2
    return x * r1 + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * r2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        *(("half", s) for s in [(1, 1, 5, 8), (2, 1, 5, 8), (2, 3, 5, 8), (1, 3, 1, 8), (2, 3, 1, 8), (2, 1, 1, 8)]),
        *(("interleave", s) for s in [(1, 1, 5, 8), (1, 3, 1, 8), (2, 1, 1, 8)]),
    ],
)
def test_rotary_mul(mode, shape, dtype):
    compare(
        lambda *given: rotary.npu_rotary_mul(*given, mode),
        lambda dy, _, *given: rotary.npu_rotary_mul_backward(dy, *given, mode),
        lambda *given: plain_rotary(*given, mode),
        made(2, 3, 5, 8, dtype=dtype),
        made(*shape, dtype=dtype, seed=1),
        made(*shape, dtype=dtype, seed=2),
    )


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_turns_as_complex_numbers_do(mode):
    x, angle = made(2, 3, 5, 8), made(1, 1, 5, 4)
    angle = torch.cat((angle, angle), -1) if mode == "half" else angle.repeat_interleave(2, -1)
    found = rotary.npu_rotary_mul(x, angle.cos(), angle.sin(), mode)
    torch.testing.assert_close(found, rotated(x, angle.cos(), angle.sin(), mode))
    matrix = torch.stack([rotary.turn(row, mode) for row in torch.eye(8)])
    torch.testing.assert_close(rotary.npu_rotary_mul(x, angle.cos(), angle.sin(), mode, matrix), found)


# ------------------------------------------------------------------ optimizers, status


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
def test_apply_adam_w_is_torchs_over_steps(amsgrad, maximize):
    rate, decay, betas, eps = 3e-2, 0.1, (0.9, 0.95), 1e-6
    param = torch.nn.Parameter(made(6, 5).double())
    optimizer = torch.optim.AdamW([param], rate, betas, eps, decay, amsgrad=amsgrad, maximize=maximize)
    var, m, v, highest = made(6, 5), torch.zeros(6, 5), torch.zeros(6, 5), torch.zeros(6, 5)
    for step in range(5):
        grad = made(6, 5, seed=step)
        param.grad = grad.double()
        optimizer.step()
        powers = betas[0] ** step, betas[1] ** step
        out = optimizers.npu_apply_adam_w_out(
            *powers, rate, decay, *betas, eps, grad, highest if amsgrad else None, amsgrad, maximize, out=[var, m, v]
        )
        assert out == (var, m, v)
        close(var, param)


@pytest.mark.parametrize("nesterov", [False, True])
def test_apply_adam_over_steps(nesterov):
    rate, betas, eps = 3e-2, (0.9, 0.99), 1e-8
    param = torch.nn.Parameter(made(6, 5).double())
    optimizer = torch.optim.Adam([param], rate, betas, eps)
    var, m, v = made(6, 5), torch.zeros(6, 5), torch.zeros(6, 5)
    for step in range(1, 4):
        grad = made(6, 5, seed=step)
        before, first = var.double(), betas[0] * m.double() + (1 - betas[0]) * grad.double()
        param.grad = grad.double()
        optimizer.step()
        powers = betas[0] ** step, betas[1] ** step
        optimizers.npu_apply_adam_out(*powers, rate, *betas, eps, grad, False, nesterov, out=[var, m, v])
        if nesterov:
            direction = betas[0] * first + (1 - betas[0]) * grad
            wanted = before - rate * math.sqrt(1 - powers[1]) / (1 - powers[0]) * direction / (v.double().sqrt() + eps)
            close(var, wanted)
        else:
            torch.testing.assert_close(var.double(), param.detach(), rtol=1e-4, atol=1e-5)


def test_non_finite_gradients_and_the_status_register():
    good, bad = made(3), torch.tensor([1.0, float("inf")])
    assert not optimizers._amp_foreach_non_finite_check([good, good])
    assert optimizers._amp_foreach_non_finite_check([good, bad])
    assert optimizers._amp_foreach_non_finite_check([torch.tensor([float("nan")])])
    register = status.npu_alloc_float_status(good)
    assert register.shape == (8,) and not register.any()
    assert not status.npu_clear_float_status(register).any()
    assert not status.npu_get_float_status(register).any()


# ------------------------------------------------------------------ dropout


def test_bits_are_packed_in_blocks_of_128():
    bits = torch.rand(300, generator=torch.Generator().manual_seed(1)) < 0.5
    packed = randomness.pack(bits)
    assert packed.numel() == 3 * 16 and torch.equal(randomness.unpack(packed, 300), bits)
    assert randomness.pack(torch.tensor([True, False, True]))[0] == 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_by_bits(dtype):
    x = made(50, 41, dtype=dtype)
    torch.manual_seed(0)
    out, mask = dropout._npu_dropout(x, 0.3)
    kept = out != 0
    assert abs(float(kept.double().mean()) - 0.7) < 0.03
    close(out[kept], x[kept].double() / 0.7, dtype)
    dy = torch.ones_like(x)
    assert torch.equal(dropout.npu_dropout_backward(dy, mask, 0.3) != 0, kept)
    assert torch.equal(dropout.npu_dropout_do_mask(x, mask, 0.3)[0], out)
    assert not torch.equal(mask, dropout._npu_dropout(x, 0.3)[1])


def test_dropout_by_bytes_and_masks_from_a_seed():
    x = made(50, 41)
    torch.manual_seed(0)
    out, mask = dropout._dropout_with_byte_mask(x, 0.6)
    assert torch.equal(mask.view(x.shape).bool(), out != 0)
    close(dropout._dropout_with_byte_mask_backward(x, mask, 0.6), out.double())
    first, second, third = (dropout._npu_dropout_gen_mask(x, [50, 41], 0.5, *at) for at in ((7, 0), (7, 0), (7, 12)))
    assert torch.equal(first, second) and not torch.equal(first, third)
    assert dropout._npu_dropout(x, 1.0)[0].abs().max() == 0


# ------------------------------------------------------------------ products, casts, softmax


def test_linear_and_bmm():
    def linear_backward(dy, _, x, w, b):
        return (*matrices.npu_linear_backward(dy, x, w), dy.sum(0))

    compare(matrices.npu_linear, linear_backward, F.linear, made(5, 8), made(4, 8), made(4))

    def bmm_backward(dy, _, a, b):
        return (
            matrices.npu_bmm_v2_mat1_backward(dy, a, b, a.shape),
            matrices.npu_bmm_v2_mat2_backward(dy, a, b, b.shape),
        )

    compare(lambda a, b: matrices.npu_bmmV2(a, b, []), bmm_backward, torch.matmul, made(3, 5, 8), made(1, 8, 4))


def test_the_second_derivative_of_a_product():
    x, w = made(2, 3, 5).double().requires_grad_(), made(5, 4).double().requires_grad_()
    g = made(2, 3, 4).double().requires_grad_()
    first = torch.autograd.grad(x @ w, (x, w), g, create_graph=True)
    given = [made(*each.shape, seed=7).double() for each in first]
    wanted = torch.autograd.grad(first, (g, x, w), given)
    found = matrices.matmul_double_backward(
        *(each.float() for each in (*given, g.detach(), x.detach(), w.detach())), [True] * 3
    )
    for mine, exact in zip(found, wanted):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)
    assert matrices.matmul_double_backward(None, None, g, x, w, [True, False, True])[1] is None


def test_casts_formats_and_transposes():
    x = made(3, 4, 5)
    half = layouts.npu_dtype_cast(x, 5)
    assert half.dtype == torch.float16 and torch.equal(half, x.half())
    assert layouts._npu_dtype_cast(x, torch.bfloat16).dtype == torch.bfloat16
    assert layouts.npu_dtype_cast_backward(half, torch.float32).dtype == torch.float32
    into = torch.empty_like(half)
    assert layouts.npu_dtype_cast_(into, x) is into and torch.equal(into, half)
    assert layouts.npu_dtype_cast(x, 6).data_ptr() != x.data_ptr()
    other = layouts._npu_format_cast(x, 29)
    assert torch.equal(other, x) and other.data_ptr() != x.data_ptr()
    assert layouts.npu_format_cast__acl_format(x, 29) is x
    turned = layouts.npu_transpose(x, (2, 0, -2))
    assert turned.is_contiguous() and torch.equal(turned, x.permute(2, 0, 1))
    assert torch.equal(layouts.npu_transpose_out(x, (2, 0, 1), out=torch.empty(5, 3, 4)), turned)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("triangle", [False, True])
def test_scaled_masked_softmax(triangle, dtype):
    mask = torch.rand(2, 1, 32, 64, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., 0] = False
    used = torch.ones(32, 64, dtype=torch.bool).triu(1) if triangle else mask
    compare(
        lambda x: softmaxes.npu_scaled_masked_softmax(x, mask, 0.5, triangle),
        lambda dy, y, x: softmaxes.npu_scaled_masked_softmax_backward(dy, y, mask, 0.5, triangle),
        lambda x: (x * 0.5).masked_fill(used, -math.inf).softmax(-1),
        made(2, 3, 32, 64, dtype=dtype),
    )


# ------------------------------------------------------------------ backward operators of torch's own


@pytest.mark.parametrize(("words", "reduction"), [("none", 0), ("mean", 1), ("sum", 2)])
def test_losses(words, reduction):
    x, t = made(4, 6), made(4, 6, seed=1)
    p, logs = t.softmax(-1), x.log_softmax(-1)
    weight, positive = made(4, 6, seed=2).abs(), made(6, seed=3).abs()
    cases = (
        (lambda dy, _, a, b: (gradients.l1_loss_backward(dy, a, b, reduction),
                              -gradients.l1_loss_backward(dy, a, b, reduction)),
         lambda a, b: F.l1_loss(a, b, reduction=words), x, t),
        (lambda dy, _, a, b: (gradients.kl_div_backward(dy, a, b, reduction),
                              gradients.kl_div_target_backward(dy, a, b, reduction)),
         lambda a, b: F.kl_div(a, b, reduction=words), logs, p),
        (lambda dy, _, a, b: (gradients.kl_div_backward(dy, a, b, reduction, log_target=True),
                              gradients.kl_div_target_backward(dy, a, b, reduction, log_target=True)),
         lambda a, b: F.kl_div(a, b, reduction=words, log_target=True), logs, t),
        (lambda dy, _, a: gradients.npu_binary_cross_entropy_with_logits_backward(dy, a, p, None, None, reduction),
         lambda a: F.binary_cross_entropy_with_logits(a, p.to(a.dtype), reduction=words), x),
        (lambda dy, _, a: gradients.npu_binary_cross_entropy_with_logits_backward(dy, a, p, weight, positive, reduction),
         lambda a: F.binary_cross_entropy_with_logits(
             a, p.to(a.dtype), weight.to(a.dtype), pos_weight=positive.to(a.dtype), reduction=words), x),
    )  # fmt: skip
    for backward, plain, *given in cases:
        compare(plain, backward, plain, *given)


def test_gather():
    x = made(3, 4, 5)
    index = torch.randint(4, (3, 6, 5), generator=torch.Generator().manual_seed(0))
    compare(
        lambda x: x.gather(1, index),
        lambda dy, _, x: gradients.npu_gather_backward(dy, x.shape, 1, index, False),
        lambda x: x.gather(1, index),
        x,
    )


@pytest.mark.parametrize("dim", [None, 0, 1, -1])
@pytest.mark.parametrize("each", [False, True])
def test_repeat_interleave(each, dim):
    x = made(3, 4, 5)
    numbers = torch.randint(
        3, (x.numel() if dim is None else x.shape[dim],), generator=torch.Generator().manual_seed(1)
    )
    repeats = numbers if each else 3
    backward = gradients.repeat_interleave_backward_tensor if each else gradients.repeat_interleave_backward_int

    def plain(x):
        return x.repeat_interleave(repeats, dim)

    compare(plain, lambda dy, _, x: backward(dy, x, repeats, dim), plain, x)


# ------------------------------------------------------------------ limits


F64 = torch.float64
X4 = (2, 3, 5, 8)
REFUSED = {
    "rms_norm without a second dimension": (lambda: norms.npu_rms_norm(made(8), made(8)), "npu_rms_norm", "2 to 8"),
    "rms_norm of fp64": (lambda: norms.npu_rms_norm(made(2, 8, dtype=F64), made(8, dtype=F64)), "npu_rms_norm", "one of"),
    "gamma of another dtype": (lambda: norms.npu_rms_norm(made(2, 8), made(8).half()), "npu_rms_norm", "one dtype"),
    "gamma of two numbers": (lambda: norms.npu_rms_norm(made(2, 8), made(2)), "npu_rms_norm", "last dimensions"),
    "another rstd": (
        lambda: norms.npu_rms_norm_backward(made(2, 8), made(2, 8), made(8), made(2)), "npu_rms_norm", "forward's",
    ),
    "add_rms_norm of two shapes": (
        lambda: norms.npu_add_rms_norm(made(2, 8), made(1, 8), made(8)), "npu_add_rms_norm", "one shape",
    ),
    "swiglu of an odd size": (lambda: activations.npu_swiglu(made(2, 5)), "npu_swiglu", "even"),
    "swiglu of integers": (lambda: activations.npu_swiglu(torch.ones(4, dtype=torch.int32)), "npu_swiglu", "one of"),
    "swiglu of no dimension": (lambda: activations.npu_swiglu(made(1).view(())), "npu_swiglu", "1 to 8"),
    "swiglu along no dimension": (lambda: activations.npu_swiglu(made(4), 1), "npu_swiglu", "one of the input's"),
    "geglu of an odd size": (lambda: activations.npu_geglu(made(2, 5)), "npu_geglu", "even"),
    "geglu, approximate 2": (lambda: activations.npu_geglu(made(2, 4), -1, 2), "npu_geglu", "1 is tanh"),
    "geglu of fp64": (lambda: activations.npu_geglu(made(2, 4, dtype=F64)), "npu_geglu", "one of"),
    "old gelu of bf16": (lambda: activations.fast_gelu(made(2).bfloat16()), "fast_gelu", "one of float16, float32"),
    "silu of bf16": (lambda: activations.npu_silu(made(2).bfloat16()), "npu_silu", "one of float16, float32"),
    "gelu by another name": (lambda: activations.npu_gelu(made(2), approximate="erf"), "npu_gelu_mul", "none or tanh"),
    "rotary of three dimensions": (lambda: rotary.npu_rotary_mul(*[made(3, 5, 8)] * 3), "npu_rotary_mul", "has 4"),
    "rotary, D odd": (lambda: rotary.npu_rotary_mul(*[made(1, 1, 2, 7)] * 3), "npu_rotary_mul", "even"),
    "rotary, D 896": (lambda: rotary.npu_rotary_mul(*[made(1, 1, 2, 896)] * 3), "npu_rotary_mul", "below 896"),
    "rotary, mode": (lambda: rotary.npu_rotary_mul(*[made(*X4)] * 3, "quarter"), "npu_rotary_mul", "interleave"),
    "rotary, two dtypes": (
        lambda: rotary.npu_rotary_mul(made(*X4).half(), made(1, 1, 5, 8), made(1, 1, 5, 8)), "npu_rotary_mul", "one dtype",
    ),
    "rotary, cosines of heads only": (
        lambda: rotary.npu_rotary_mul(made(2, 3, 5, 8), *[made(1, 1, 3, 8)] * 2), "npu_rotary_mul", "11SD",
    ),
    "interleaved rotary, cosines of each batch": (
        lambda: rotary.npu_rotary_mul(made(*X4), *[made(2, 1, 5, 8)] * 2, "interleave"), "npu_rotary_mul", "11SD",
    ),
    "rotary of 1000 heads": (
        lambda: rotary.npu_rotary_mul(made(1, 1000, 3, 2), *[made(1, 1, 3, 2)] * 2), "npu_rotary_mul", "< 1000",
    ),
    "adam_w without out": (
        lambda: optimizers.npu_apply_adam_w(*[0.9] * 7, made(3), None, False, False), "npu_apply_adam_w", "as out",
    ),
    "adam_w of two shapes": (
        lambda: optimizers.npu_apply_adam_w_out(
            *[0.9] * 7, made(3), None, False, False, out=[made(3), made(3), made(4)]), "npu_apply_adam_w", "one shape",
    ),
    "adam_w of two dtypes": (
        lambda: optimizers.npu_apply_adam_w_out(
            *[0.9] * 7, made(3).half(), None, False, False, out=[made(3)] * 3), "npu_apply_adam_w", "one dtype",
    ),
    "amsgrad without its maximum": (
        lambda: optimizers.npu_apply_adam_w_out(*[0.9] * 7, made(3), None, True, False, out=[made(3)] * 3),
        "npu_apply_adam_w", "wants max_grad_norm",
    ),
    "dropout, p": (lambda: dropout._npu_dropout(made(3), 1.5), "_npu_dropout", "probability"),
    "dropout, a short mask": (
        lambda: dropout.npu_dropout_backward(made(200), torch.zeros(16, dtype=torch.uint8), 0.5), "_meta_registrations",
        "32 bytes",
    ),
    "linear of three dimensions": (lambda: matrices.npu_linear(made(2, 3, 4), made(5, 4)), "npu_linear", "a matrix"),
    "linear of bf16": (lambda: matrices.npu_linear(*[made(4, 4).bfloat16()] * 2), "npu_linear", "one of"),
    "bmm of a vector": (lambda: matrices.npu_bmmV2(made(4), made(4, 4), []), "npu_bmmV2", "at least 2"),
    "cast to fp4": (lambda: layouts.npu_dtype_cast(made(2), 296), "_meta_registrations", "one of"),
    "transpose twice by one dimension": (lambda: layouts.npu_transpose(made(2, 3), (0, 0)), "npu_transpose", "once"),
    "softmax of 30 columns": (
        lambda: softmaxes.npu_scaled_masked_softmax(made(1, 1, 32, 30), torch.zeros(1, dtype=torch.bool)),
        "npu_scaled_masked_softmax", "multiples of 32",
    ),
    "softmax with a float mask": (
        lambda: softmaxes.npu_scaled_masked_softmax(made(1, 1, 32, 32), made(32, 32)), "npu_scaled_masked_softmax", "bool",
    ),
    "softmax, mask of two dimensions": (
        lambda: softmaxes.npu_scaled_masked_softmax(made(1, 1, 32, 32), torch.zeros(2, 32, dtype=torch.bool)),
        "npu_scaled_masked_softmax", "broadcasts",
    ),
    "status of another size": (lambda: status.npu_get_float_status(made(3)), "npu_get_float_status", "eight"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_each_limit_is_refused_with_its_source(case):
    call, page, words = REFUSED[case]
    with pytest.raises(Refused) as caught:
        call()
    rule, _, source = str(caught.value).partition("Source: ")
    assert "Rule: " in rule and words in rule
    assert page in source and "torch_npu 2.13.0" in source
