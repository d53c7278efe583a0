"""Kernels: the plain versions are diffusers' bit by bit, forward and backward; the choice is the tensor's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rotary_forms
import torch
from diffusers.models import activations, embeddings, normalization
from diffusers.models.transformers import transformer_flux

from difftrain.device import counters as tally
from difftrain.device import fused_layers, patches, versions

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Grads = list[torch.Tensor]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both_ways(function: Any, *inputs: torch.Tensor) -> Grads:
    """Return output and gradients of all inputs that want one."""
    leaves = [each.clone().requires_grad_(each.is_floating_point()) for each in inputs]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def assert_equal(ours: Grads, theirs: Grads) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


# ------------------------------------------------------------------ against diffusers as it came


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_is_that_of_diffusers(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight = drawn(2, 3, 16, dtype=dtype), 1 + 0.1 * drawn(16, dtype=weight_dtype, seed=1)
    norm = normalization.RMSNorm(16, eps=1e-5)

    def theirs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        del norm._parameters["weight"]
        norm.weight = weight
        out = norm(x)
        norm._parameters["weight"] = None
        return out

    with patches.without("rms_norm"):
        expected = both_ways(theirs, x, weight)
    assert_equal(both_ways(lambda x, w: fused_layers.rms_norm(x, w, 1e-5), x, weight), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_without_a_weight(dtype: torch.dtype) -> None:
    norm = normalization.RMSNorm(16, eps=1e-6, elementwise_affine=False)
    x = drawn(4, 16, dtype=dtype)
    with patches.without("rms_norm"):
        expected = both_ways(norm, x)
    assert_equal(both_ways(lambda x: fused_layers.rms_norm(x, None, 1e-6), x), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sequence_dim", [1, 2])
@pytest.mark.parametrize("unbind_dim", [-1, -2])
def test_rotary_is_that_of_diffusers(unbind_dim: int, sequence_dim: int, dtype: torch.dtype) -> None:
    x = drawn(2, 3, 5, 8, dtype=dtype)
    angles = drawn(x.shape[sequence_dim], 8, seed=1)
    tables = angles.cos(), angles.sin()
    with patches.without("rotary"):
        upstream = embeddings.apply_rotary_emb
        expected = both_ways(lambda x: upstream(x, tables, True, unbind_dim, sequence_dim), x)
    where = (None, None) if sequence_dim == 2 else (None, slice(None), None)
    cos, sin = (table[where] for table in tables)
    assert_equal(both_ways(lambda x: fused_layers.rotary(x, cos, sin, interleaved=unbind_dim == -1), x), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", rotary_forms.FORMS)
def test_real_tables_rotate_as_the_complex_ones_that_they_are_made_of(name: str, dtype: torch.dtype) -> None:
    form = rotary_forms.FORMS[name]
    x, freqs = drawn(2, 5, 3, 32, dtype=dtype), rotary_forms.complex_tables(2, 5, 32)[form.where]
    with patches.without(form.patch):
        expected = both_ways(lambda x: form.rotate(x, freqs), x)
    patches.apply("diffusers")
    assert_equal(both_ways(lambda x: form.rotate(x, freqs), x), expected)
    tables = fused_layers.real_tables(freqs)
    with tally.counting() as counted:
        assert_equal(both_ways(lambda x: form.rotate(x, tables), x), expected)
    assert counted["rotary plain"] == form.calls


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_units_are_those_of_diffusers(dtype: torch.dtype) -> None:
    x = drawn(2, 3, 16, dtype=dtype)
    geglu, swiglu = activations.GEGLU(4, 8), activations.SwiGLU(4, 8)
    geglu.proj = swiglu.proj = torch.nn.Identity()  # type: ignore[assignment]
    with patches.without("geglu"):
        expected = both_ways(geglu, x)
    assert_equal(both_ways(fused_layers.geglu, x), expected)
    assert_equal(both_ways(lambda x: fused_layers.swiglu(x.roll(8, -1)), x), both_ways(swiglu, x))


def test_gelu_is_the_exact_one() -> None:
    gate = torch.linspace(-4, 4, 201, dtype=torch.float64)
    exact = gate * 0.5 * (1 + torch.erf(gate / 2**0.5))
    x = torch.stack([torch.ones_like(gate), gate], -1).float()
    torch.testing.assert_close(fused_layers.geglu(x)[:, 0].double(), exact, rtol=0, atol=1e-6)


# ------------------------------------------------------------------ which one runs


class Elsewhere(torch.Tensor):
    """A tensor that says it is on an NPU."""

    @property
    def device(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(type="npu")


def test_the_tensor_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = fused_layers.REGISTRY["geglu"]._replace(fused=lambda x: "fused")
    monkeypatch.setitem(fused_layers.REGISTRY, "geglu", fused)
    x = drawn(2, 4)
    with tally.counting() as counted:
        assert fused_layers.geglu(x.as_subclass(Elsewhere)) == "fused"
        assert torch.equal(fused_layers.geglu(x), fused_layers.plain_geglu(x))
        assert fused_layers.geglu(x.double().as_subclass(Elsewhere)).dtype == torch.float64
    assert counted == {"geglu fused": 1, "geglu plain": 2}


half, four = drawn(2, 3, dtype=torch.float16), drawn(2, 3, 5, 8)


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("geglu", (drawn(2, 3),), "even"),
        ("geglu", (drawn(2, 4).double(),), "float64"),
        ("swiglu", (torch.empty(0, 4),), "no elements"),
        ("rms_norm", (drawn(2, 4), None, 1e-6), "weight"),
        ("rms_norm", (drawn(4), drawn(4), 1e-6), "dimensions"),
        ("rms_norm", (drawn(2, 4), drawn(3), 1e-6), "shapes"),
        ("rms_norm", (drawn(2, 4), drawn(4).double(), 1e-6), "float64"),
        ("rotary", (drawn(2, 3, 5), *[drawn(1, 1, 5, 8)] * 2, False), "four dimensions"),
        ("rotary", (four, *[drawn(1, 1, 5, 8).requires_grad_()] * 2, False), "trained"),
        ("rotary", (drawn(2, 3, 5, 6), *[drawn(1, 1, 5, 6)] * 2, False), "head size 6"),
        ("rotary", (drawn(1, 1, 1, 896), *[drawn(1, 1, 1, 896)] * 2, False), "below 896"),
        ("rotary", (four, *[drawn(2, 1, 5, 8)] * 2, True), "(2, 1, 5, 8)"),
        ("rotary", (four, *[drawn(1, 3, 5, 8)] * 2, False), "(1, 3, 5, 8)"),
        ("rotary", (drawn(125, 8, 2, 8), *[drawn(1, 1, 2, 8)] * 2, True), "batch 125"),
        ("adamw", ([drawn(2).double()],), "float64"),
    ],
)
def test_limits_of_the_operators_are_kept(name: str, given: Any, reason: str) -> None:
    found = fused_layers.REGISTRY[name].why_not(*given)
    assert found is not None and reason in found


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("geglu", (half.repeat(1, 2),)),
        ("swiglu", (drawn(4),)),
        ("rms_norm", (half, drawn(3), 1e-6)),
        ("rotary", (four, *[drawn(1, 1, 5, 8)] * 2, True)),
        ("rotary", (four, *[drawn(1, 3, 1, 8)] * 2, True)),
        ("rotary", (four, *[drawn(2, 1, 5, 8)] * 2, False)),
        ("rotary", (four, *[drawn(2, 3, 1, 8)] * 2, False)),
        ("rotary", (drawn(125, 8, 2, 8), *[drawn(1, 1, 2, 8)] * 2, False)),
        ("adamw", ([half, drawn(2)],)),
    ],
)
def test_what_they_take_they_get(name: str, given: Any) -> None:
    assert fused_layers.REGISTRY[name].why_not(*given) is None


# ------------------------------------------------------------------ in the place of diffusers'


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let diffusers believe in an NPU whose operators take no tensor of the CPU."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Expected all tensors to be on the NPU")

    npu = SimpleNamespace(npu_geglu=refuse, npu_rms_norm=refuse, __spec__=None)
    monkeypatch.setitem(sys.modules, "torch_npu", npu)
    monkeypatch.setattr(activations, "torch_npu", npu, raising=False)
    for module in (activations, normalization):
        monkeypatch.setattr(module, "is_torch_npu_available", lambda: True)


def modules() -> dict[str, tuple[torch.nn.Module, torch.Tensor]]:
    torch.manual_seed(0)
    return {
        "geglu": (activations.GEGLU(8, 16), drawn(2, 8)),
        "rms_norm": (normalization.RMSNorm(8, eps=1e-6, bias=True), drawn(2, 8)),
    }


@pytest.mark.parametrize("name", ["geglu", "rms_norm"])
def test_modules_of_the_cpu_run_where_torch_npu_can_be_imported(name: str, importable: None) -> None:
    module, x = modules()[name]
    patches.apply("diffusers")
    with patches.without(name), pytest.raises(RuntimeError, match="on the NPU"):
        module(x)
    assert module(x).shape


@pytest.mark.parametrize("name", ["geglu", "rms_norm"])
def test_mended_modules_compute_the_same_and_keep_their_names(name: str) -> None:
    module, x = modules()[name]
    with patches.without(name):
        names, expected = list(module.state_dict()), both_ways(module, x)
    patches.apply("diffusers")
    assert list(module.state_dict()) == names and len(names) >= 2
    assert_equal(both_ways(module, x), expected)


def test_rotary_is_replaced_wherever_it_was_imported_and_put_back() -> None:
    patches.apply("diffusers")
    ours = embeddings.apply_rotary_emb
    assert ours.__module__ == "difftrain.device.fused_layers" and transformer_flux.apply_rotary_emb is ours
    angles = drawn(5, 8)
    with tally.counting() as counted:
        mended = ours(four, (angles.cos(), angles.sin()))
        complex_form = ours(four.transpose(1, 2), torch.polar(torch.ones(1, 5, 4), drawn(1, 5, 4)), use_real=False)
    assert counted == {"rotary plain": 1} and complex_form.shape == (2, 5, 3, 8)
    with patches.without("rotary"):
        assert embeddings.apply_rotary_emb is transformer_flux.apply_rotary_emb is not ours
        assert torch.equal(embeddings.apply_rotary_emb(four, (angles.cos(), angles.sin())), mended)
    assert embeddings.apply_rotary_emb is transformer_flux.apply_rotary_emb is ours


# ------------------------------------------------------------------ the table


PATCHED = [row for row in patches.rows("diffusers") if row.patch]


@pytest.mark.parametrize("row", PATCHED, ids=lambda row: row.name)
def test_the_faults_are_still_there_in_the_version_at_hand(row: patches.Patch) -> None:
    with patches.without(row.name):
        assert patches.faulty(row), f"{row.name} is fixed upstream: drop the row, or end its versions"


def test_a_version_not_known_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    there = {"answer": True}
    done = []
    patch = patches.PatchHook(lambda: asked.append(1) or there["answer"], lambda: done.append(1) or done.clear)
    row = patches.Patch("probe", "diffusers", ("0.1", "0.2"), "none", "a fault", "nowhere:at_all")
    monkeypatch.setattr(patches, "PATCHES", (row,))
    monkeypatch.setattr(patches, "_hook", lambda row: patch)
    there["answer"] = False
    patches.apply("diffusers")
    assert asked == [1] and not done
    there["answer"] = True
    patches.apply("diffusers")
    patches.apply("diffusers")
    assert asked == [1, 1] and done == [1]
    with patches.without("probe"):
        assert not done
    assert done == [1]
    patches._applied.pop("probe")


def test_a_mend_of_our_own_code_is_for_runs_that_load_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_installed", lambda package: (2, 13, 0))
    for module, on in ((None, False), (SimpleNamespace(), True)):  # None: hidden, as on another device
        monkeypatch.setitem(sys.modules, "torch_npu", module)
        assert patches.on("ddp_strides") is on


def test_counting_makes_no_second_graph() -> None:
    compiled = torch.compile(fused_layers.geglu, backend="eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    with tally.counting() as counted:
        compiled(half)
    compiled(half)
    assert not counted and torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_names_versions_and_packages_of_the_table() -> None:
    names = [row.name for row in patches.PATCHES]
    assert len(set(names)) == len(names)
    for row in patches.PATCHES:
        first, beyond = (versions.numbers(each) for each in row.versions)
        assert first < beyond and row.issue and row.fault
    with pytest.raises(AssertionError, match=r"\['nothing'\]"), patches.without("nothing"):
        pass


# ------------------------------------------------------------------ AdamW


SETTINGS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}


@pytest.fixture
def flagless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play torch_npu's operator, which looks at neither the flag nor the scale."""
    kernel = torch.ops.aten._fused_adamw_

    def ignore(*tensors: Any, grad_scale: Any = None, found_inf: Any = None, **settings: Any) -> None:
        kernel(*tensors, **settings)

    monkeypatch.setattr(fused_layers, "upstream", ignore)


def state(amsgrad: bool) -> list[list[torch.Tensor]]:
    """Return parameters, gradients, both moments, the highest second ones and steps."""
    made = [[drawn(3, 4, seed=10 * kind + i).abs() for i in range(2)] for kind in range(5)]
    return [*made[:4], made[4] if amsgrad else [], [torch.tensor(3.0), torch.tensor(3.0)]]


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw_with_a_flag_that_is_not_set_is_torchs(flagless: None, amsgrad: bool) -> None:
    ours, theirs, flag = state(amsgrad), state(amsgrad), torch.zeros(())
    fused_layers.npu_adamw(*ours, found_inf=flag, amsgrad=amsgrad, **SETTINGS)
    torch.ops.aten._fused_adamw_(*theirs, amsgrad=amsgrad, **SETTINGS)
    assert all(torch.equal(a, b) for left, right in zip(ours, theirs) for a, b in zip(left, right))


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw_with_the_flag_set_changes_nothing(flagless: None, amsgrad: bool) -> None:
    ours, before = state(amsgrad), state(amsgrad)
    ours[1][0].fill_(float("nan"))
    fused_layers.npu_adamw(*ours, found_inf=torch.ones(1), amsgrad=amsgrad, **SETTINGS)
    for place in (0, 2, 3, 4):
        assert all(torch.equal(a, b) for a, b in zip(ours[place], before[place]))


def test_adamw_takes_the_scale_off(flagless: None) -> None:
    ours, theirs, scale = state(False), state(False), torch.tensor(1024.0)
    torch._foreach_mul_(ours[1], scale)
    fused_layers.npu_adamw(*ours, grad_scale=scale, found_inf=torch.zeros(()), amsgrad=False, **SETTINGS)
    torch.ops.aten._fused_adamw_(*theirs, amsgrad=False, **SETTINGS)
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0]))


def test_torchs_optimizer_goes_through_the_registry_while_the_patch_is_on() -> None:
    parameter = torch.nn.Parameter(drawn(4))
    parameter.grad = drawn(4, seed=1)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    undo = fused_layers.FUSED_ADAMW.put()
    try:
        with tally.counting() as counted:
            optimizer.step()
    finally:
        undo()
    assert counted == {"adamw plain": 1} and torch._fused_adamw_ is fused_layers.upstream


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "npu.md").read_text(encoding="utf-8")
    for row in patches.PATCHES:
        first, beyond = row.versions
        line = f"| `{row.name}` | {row.package} {first} to {beyond} | {row.fault} | {row.issue} |"
        assert line in page, f"docs/npu.md lacks: {line}"
