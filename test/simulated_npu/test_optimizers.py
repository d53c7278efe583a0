"""Optimizers on the device: torch_npu's own AdamW beside torch's, and checkpoints from one to the other and to the CPU."""

import pytest
import simulator
import torch

from difftrain.config.schema.sections import OptimizerSection
from difftrain.contracts import ConfigFault, Group
from difftrain.device import choose, combined, patches
from difftrain.optim import make_optimizer
from difftrain.optim.state import NamedState

NPU = "npu:0"
KINDS = {"torch, cpu": ("AdamW", "cpu"), "torch, npu": ("AdamW", NPU), "torch_npu": ("NpuFusedAdamW", NPU)}


@pytest.fixture(autouse=True)
def device():
    choose("npu")


class Trained:
    """Three parameters in two groups, with gradients that are made anew for every update."""

    def __init__(self, kind, **section):
        name, device = KINDS[kind]
        generator = torch.Generator().manual_seed(0)
        shapes = {"a": (3, 4), "b": (5,), "c": (2, 3)}
        self.weights = {
            key: torch.nn.Parameter(torch.randn(*shape, generator=generator).to(device))
            for key, shape in shapes.items()
        }
        named = list(self.weights.items())
        groups = [Group("first", named[:2], 0.1), Group("second", named[2:], 0.05)]
        self.optimizer = make_optimizer(OptimizerSection(type=name, learning_rate=0.1, **section), groups)
        self.state = NamedState(self.optimizer, {id(each): key for key, each in named})

    def run(self, first, last):
        for step in range(first, last):
            for weight in self.weights.values():
                weight.grad = torch.sin(weight.detach().cpu() * (step + 1)).to(weight.device)
            self.optimizer.step()
            for weight in self.weights.values():
                weight.grad = None
        return self

    def values(self):
        return torch.cat([weight.detach().cpu().ravel() for weight in self.weights.values()])

    def saved(self):
        kept = {}
        states = self.state.parameters(self.weights, lambda name, tensor: kept.update({name: tensor.cpu().clone()}))
        return states, self.state.groups(lambda name, tensor: None), kept, self.values()

    def restored(self, saved):
        states, groups, kept, values = saved
        with torch.no_grad():
            for weight, piece in zip(self.weights.values(), values.split([w.numel() for w in self.weights.values()])):
                weight.copy_(piece.view(weight.shape))
        self.state.load(states, groups, kept.items())
        return self


def test_torch_npus_adamw_trains_as_torchs_and_goes_on_from_where_it_was():
    expected = Trained("torch, cpu").run(0, 6).values()
    ours = Trained("torch_npu").run(0, 6)
    assert type(ours.optimizer) is combined.load()
    torch.testing.assert_close(ours.values(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(
        Trained("torch_npu").restored(Trained("torch_npu").run(0, 3).saved()).run(3, 6).values(), ours.values()
    )


def test_without_the_mend_it_trains_on_the_first_gradients():
    expected = Trained("torch, cpu").run(0, 6).values()
    with patches.without("npu_fused_adamw"):
        theirs = Trained("torch_npu").run(0, 6).values()
    assert (theirs - expected).abs().max() > 0.01, "torch_npu takes new gradients now: drop the row and the copy"


@pytest.mark.parametrize("after", KINDS)
@pytest.mark.parametrize("before", KINDS)
def test_checkpoints_go_from_each_to_each(before, after):
    expected = Trained("torch, cpu").run(0, 6).values()
    saved = Trained(before).run(0, 3).saved()
    resumed = Trained(after)
    assert resumed.state.kind == Trained(before).state.kind == "torch.optim.adamw.AdamW"
    torch.testing.assert_close(resumed.restored(saved).run(3, 6).values(), expected, rtol=1e-5, atol=1e-6)


def test_ddps_buckets_keep_their_gradients():
    """What is combined are copies: a gradient may be a view of a bucket, which must stay where it is."""
    trained = Trained("torch_npu")
    bucket = torch.zeros(23, device=NPU)
    views = bucket.split([weight.numel() for weight in trained.weights.values()])
    for weight, view in zip(trained.weights.values(), views):
        weight.grad = view.view(weight.shape).fill_(1.0)
    trained.optimizer.step()
    assert bucket.cpu().tolist() == [1.0] * 23 and views[1].data_ptr() == bucket.data_ptr() + 12 * 4


def test_bf16_is_refused_by_name():
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16, device=NPU))
    with pytest.raises(ConfigFault, match="takes fp32 and fp16, not bfloat16"):
        make_optimizer(OptimizerSection(type="NpuFusedAdamW"), [Group("all", [("a", parameter)], 0.1)])


def test_only_torchs_decides_on_the_device():
    for kind, fused in (("torch, npu", True), ("torch_npu", False)):
        optimizer = Trained(kind).optimizer
        assert bool(getattr(optimizer, "_step_supports_amp_scaling", False)) is fused
    trained = Trained("torch, npu").run(0, 1)
    for weight in trained.weights.values():
        weight.grad = torch.ones_like(weight)
    with simulator.counting() as ran:
        trained.optimizer.step()
    assert not simulator.host_syncs(ran) and ran["aten::_fused_adamw_"] == 1 + 1
