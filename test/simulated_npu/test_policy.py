"""The policy: every rule refuses its example and names its source; what hardware takes passes; the README lists them."""

from __future__ import annotations

import inspect
import pathlib

import pytest
import torch
from simulator import policy
from simulator.errors import Refused
from simulator.policy import NEW, OLD, Operands

HALVES = (torch.float16, torch.bfloat16)
README = pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8")


def ask(name, *dtypes, cann=NEW, strict=True, dims=()):
    policy.check(f"aten::{name}", dtypes, cann=cann, strict=strict, dims=dims)


@pytest.mark.parametrize("rule", policy.RULES, ids=lambda rule: rule.name)
def test_a_rule_refuses_its_example_and_says_why(rule):
    seen = rule.example
    with pytest.raises(Refused) as caught:
        policy.check(seen.name, seen.dtypes, cann=seen.cann, strict=True, dims=seen.dims)
    text = str(caught.value)
    assert f"Rule: {rule.name}." in text and rule.why in text and text.endswith(f"Source: {rule.source}")
    assert rule.applies(seen) and len(rule.source) > 10


@pytest.mark.parametrize("rule", [each for each in policy.RULES if each.strict_only], ids=lambda rule: rule.name)
def test_what_is_only_slow_passes_when_lenient(rule):
    seen = rule.example
    policy.check(seen.name, seen.dtypes, cann=seen.cann, strict=False, dims=seen.dims)


@pytest.mark.parametrize(
    "rule", [each for each in policy.RULES if each.example.cann == OLD], ids=lambda rule: rule.name
)
def test_a_rule_of_an_older_cann_ends_with_it(rule):
    seen = rule.example
    policy.check(seen.name, seen.dtypes, cann=NEW, strict=True, dims=seen.dims)
    policy.check(seen.name, (torch.float16,), cann=OLD, strict=True, dims=seen.dims)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES, torch.int64, torch.bool])
@pytest.mark.parametrize("name", ["mm", "add_.Tensor", "convolution", "copy_", "index.Tensor", "native_layer_norm"])
def test_what_a_training_step_uses_passes(name, dtype):
    for cann in (NEW, OLD):
        ask(name, dtype, dtype, cann=cann, dims=(4, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128, torch.complex32])
def test_anything_is_made_moved_viewed_and_filled(dtype):
    for name in ("zeros", "empty.memory_format", "fill_.Scalar", "copy_", "_to_copy", "view", "slice.Tensor", "clone"):
        ask(name, dtype)


@pytest.mark.parametrize("name", ["matmul", "mm", "mm.out", "bmm", "addmm", "addmm_", "linear", "convolution_backward"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize("strict", [True, False])
def test_matrix_products_are_known_by_each_of_their_names(name, dtype, strict):
    with pytest.raises(Refused, match="matmul of fp64 or complex"):
        ask(name, torch.float32, dtype, strict=strict)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_an_unknown_operator_is_denied(dtype):
    with pytest.raises(Refused, match="not listed"):
        ask("some_operator_of_tomorrow", dtype, strict=False)


def test_conv3d_is_told_from_conv2d_by_its_dimensions():
    ask("convolution", *HALVES[1:] * 2, cann=OLD, dims=(4, 4))
    with pytest.raises(Refused, match="conv3d"):
        ask("convolution", *HALVES[1:] * 2, cann=OLD, dims=(5, 5))


def test_fp8_is_stored_and_moved_but_not_cast():
    ask("copy_", torch.float8_e4m3fn, torch.float8_e4m3fn)
    for name, dtypes in (("copy_", (torch.float8_e5m2, torch.float32)), ("mul.Tensor", (torch.float8_e4m3fn,) * 2)):
        with pytest.raises(Refused, match="fp8"):
            ask(name, *dtypes)


@pytest.mark.parametrize(
    ("name", "base"),
    [("aten::add_.Tensor", "add"), ("aten::mm.out", "mm"), ("npu::npu_silu_", "npu_silu"), ("_foreach_add_.List", "_foreach_add")],
)  # fmt: skip
def test_base_names(name, base):
    assert policy.base_name(name) == base


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.uint8, torch.bfloat16, torch.int16])
@pytest.mark.parametrize("reduction", ["", "SUM", "PRODUCT", "MAX", "MIN"])
def test_collectives_that_hccl_has(dtype, reduction):
    policy.check_collective(dtype, reduction, strict=True)


def test_collectives_that_hccl_lacks():
    for dtype in (torch.complex64, torch.float8_e4m3fn, torch.uint16):
        with pytest.raises(Refused, match="HCCLUtils"):
            policy.check_collective(dtype, "SUM", strict=False)
    for reduction in ("AVG", "PREMUL_SUM"):
        policy.check_collective(torch.float32, reduction, strict=False)
        with pytest.raises(Refused, match="HcclReduceOp"):
            policy.check_collective(torch.float32, reduction, strict=True)


def test_rules_are_pure_and_have_names_of_their_own():
    names = [each.name for each in (*policy.RULES, *policy.LIMITS)]
    assert len(set(names)) == len(names)
    for rule in policy.RULES:
        assert all(not rule.applies(Operands("add", (torch.float32,), cann)) for cann in (NEW, OLD)), rule.name
    assert "environ" not in inspect.getsource(policy) and "random" not in inspect.getsource(policy)


@pytest.mark.parametrize("row", [*policy.RULES, *policy.LIMITS], ids=lambda row: row.name)
def test_the_readme_lists_each_rule_with_its_source(row):
    assert f"| {row.name} |" in README and row.source in README
