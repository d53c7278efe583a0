"""The device's kernels are the CPU's on the same memory: same values, same aliases, same errors, nothing of the host's."""

import pytest
import simulator
import torch
import torch.nn.functional as F

NPU = "npu:0"


def _random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


CASES = {
    "add broadcast": lambda a, b: a + b[:, :1],
    "matmul": lambda a, b: a @ b.mT,
    "batched matmul": lambda a, b: torch.matmul(a.expand(3, 4, 6), b.mT),
    "vector": lambda a, b: a @ b[0],
    "linear": lambda a, b: F.linear(a, b, b[:, 0]),
    "layer norm": lambda a, b: F.layer_norm(a, (6,), b[0], b[1]),
    "group norm": lambda a, b: F.group_norm(a.view(1, 4, 6), 2),
    "softmax": lambda a, b: (a * b).softmax(-1),
    "gelu": lambda a, b: F.gelu(a) + F.silu(b),
    "reduce": lambda a, b: a.mean(0) + b.var(0) + a.amax(0),
    "cat and split": lambda a, b: torch.cat([a, b], 1).chunk(3, 1)[1],
    "index": lambda a, b: a[torch.tensor([2, 0], device=a.device)] + b[1:3],
    "gather": lambda a, b: a.gather(1, (b.argsort(1))),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "clamp": lambda a, b: a.clamp(-0.5, 0.5) ** 2,
    "transposed": lambda a, b: (a.T + b.T).contiguous(),
    "expand": lambda a, b: a[:, None].expand(4, 2, 6).reshape(8, 6),
    "convolution": lambda a, b: F.conv2d(a.view(1, 1, 4, 6), b[:3, :3].reshape(1, 1, 3, 3)),
    "interpolate": lambda a, b: F.interpolate(a.view(1, 1, 4, 6), scale_factor=2, mode="nearest"),
    "pad": lambda a, b: F.pad(a, (1, 2, 0, 1)),
    "cumsum": lambda a, b: a.cumsum(1),
    "topk": lambda a, b: a.topk(2, 1).values,
    "norm": lambda a, b: torch.linalg.vector_norm(a) + torch.stack(torch._foreach_norm([a, b])).sum(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_cpu_s(name, dtype):
    function, a, b = CASES[name], _random(4, 6, dtype=dtype), _random(4, 6, seed=1, dtype=dtype)
    here, there = [], []
    for device, found in (("cpu", here), (NPU, there)):
        x, y = (each.clone().to(device).requires_grad_() for each in (a, b))
        out = function(x, y)
        assert out.device.type == device.split(":")[0]
        out.float().square().sum().backward()
        found += [out.detach(), x.grad, y.grad]
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for cpu, npu in zip(here, there):
        assert (cpu is None) == (npu is None)
        if cpu is not None:
            assert npu.device.type == "npu" and npu.dtype == cpu.dtype
            torch.testing.assert_close(npu.cpu(), cpu, rtol=tolerance, atol=tolerance)


def test_views_share_memory_and_in_place_writes_show():
    x = torch.arange(6.0, device=NPU)
    view = x.view(2, 3)
    view[1].mul_(10)
    x[:2].fill_(7)
    part = x.as_strided((2,), (3,), 1)
    part += 1
    assert x.tolist() == [7, 8, 2, 30, 41, 50]
    assert view.T.contiguous().tolist() == [[7, 30], [8, 41], [2, 50]]
    kept = x
    x += 1
    assert x is kept


def test_out_arguments_are_resized_and_filled():
    out = torch.empty(0, device=NPU)
    torch.add(torch.ones(3, device=NPU), 2, out=out)
    assert out.tolist() == [3, 3, 3]


def test_empty_tensors_and_scalars_on_the_host_pass():
    empty = torch.empty(0, 4, device=NPU)
    assert (empty @ torch.ones(4, 2, device=NPU)).shape == (0, 2)
    assert (torch.ones(2, device=NPU) * torch.tensor(3.0)).tolist() == [3, 3]


def test_what_is_returned_twice_is_one_tensor():
    parameter = torch.nn.Parameter(torch.ones(3, device=NPU))
    optimizer = torch.optim.AdamW([parameter], fused=True, lr=0.1)
    parameter.grad = torch.ones(3, device=NPU)
    before = parameter.data_ptr()
    optimizer.step()
    assert parameter.data_ptr() == before
    torch.testing.assert_close(parameter.detach().cpu(), torch.full((3,), 1 - 0.1 - 0.001))


def test_tensors_of_two_devices_are_not_mixed():
    one, other = torch.ones(2, device=NPU), torch.ones(2, device="npu:1")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        one + other
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        one + torch.ones(2)
    assert (one + other.to(NPU)).tolist() == [2, 2]


def test_draws_come_from_the_device_s_generator_and_leave_the_host_s_alone():
    torch.manual_seed(0)
    host = torch.rand(3)
    torch.npu.manual_seed(5)
    torch.manual_seed(0)
    torch.npu.manual_seed(5)
    first = [torch.randn(4, device=NPU), F.dropout(torch.ones(64, device=NPU), 0.5), torch.randperm(9, device=NPU)]
    torch.npu.manual_seed(5)
    again = [torch.randn(4, device=NPU), F.dropout(torch.ones(64, device=NPU), 0.5), torch.randperm(9, device=NPU)]
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, again))
    assert not torch.equal(torch.randn(4, device=NPU).cpu(), first[0].cpu())
    torch.manual_seed(0)
    torch.npu.manual_seed(5)
    torch.randn(4, device=NPU)
    assert torch.equal(torch.rand(3), host)


def test_a_generator_of_the_device_gives_the_same_again():
    draws = [torch.randn(5, device=NPU, generator=torch.Generator(NPU).manual_seed(3)).cpu() for _ in range(2)]
    assert torch.equal(*draws)


def test_autocast_is_the_wheel_s():
    layer = torch.nn.Linear(4, 4, device=NPU)
    with torch.autocast("npu", dtype=torch.bfloat16):
        out = layer(torch.ones(2, 4, device=NPU))
        assert out.dtype == torch.bfloat16
        assert out.softmax(-1).dtype == torch.float32


def test_operators_are_counted():
    with simulator.counting() as counted:
        x = torch.ones(2, 2, device=NPU)
        x @ x
    assert counted["aten::matmul"] + counted["aten::mm"] >= 1


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).all()),
        lambda x: torch.npu.synchronize(),
        lambda x: torch.ones(2).to(NPU),
    ],
)
def test_every_wait_of_the_host_is_counted(wait):
    x = torch.ones(3, device=NPU)
    with simulator.counting() as quiet:
        x * 2 + x.sum()
    assert not simulator.host_syncs(quiet)
    with simulator.counting() as counted:
        wait(x)
    assert simulator.host_syncs(counted)


def test_an_operator_that_the_device_lacks_is_refused_or_counted():
    x = torch.ones(3, device=NPU)
    with pytest.raises(RuntimeError, match=r"aten::huber_loss has .*kernel on the device"):
        F.huber_loss(x, x + 2)
    with simulator.lenient(), simulator.counting() as counted:
        assert F.huber_loss(x, x + 2).item() == pytest.approx(1.5)
    assert simulator.fallbacks(counted) == {"aten::huber_loss": 1}


@pytest.mark.parametrize("form", ["none", "causal", "keys", "full"])
def test_torch_s_attention_goes_to_the_fused_operator(form):
    q, k, v = (_random(2, 4, 9, 16, seed=i) for i in range(3))
    mask = {"keys": (torch.arange(9) < 7).view(1, 1, 1, 9), "full": _random(2, 4, 9, 9) > -1}.get(form)
    options = {"attn_mask": mask, "is_causal": form == "causal"}
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    options["attn_mask"] = None if mask is None else mask.to(NPU)
    with simulator.counting() as counted:
        found = F.scaled_dot_product_attention(*(each.to(NPU) for each in (q, k, v)), **options)
    assert counted["npu::npu_fusion_attention"] == 1
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
