"""What the device refuses of torch's operators and of collectives: rules over tables, each with its source.

`check` is asked once for each new combination of operator, dtypes and numbers of dimensions (the kernels keep the
answer), so it is a pure function of its arguments. To add a rule: a `Rule` in RULES with an example that it refuses;
README.md's table and test_policy.py follow RULES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from simulator import dtypes as tables
from simulator.errors import Refused

Dtypes = tuple[torch.dtype | str, ...]
Cann = tuple[int, ...]

_SINCE_BF16 = (8, 0)  # the CANN whose tables have bf16 for what 7.0 lacked
_FP8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}


@dataclass(frozen=True)
class Operands:
    """What a rule looks at: the operator's base name, and dtypes and numbers of dimensions of its tensors on the device."""

    name: str
    dtypes: Dtypes
    cann: Cann
    dims: tuple[int, ...] = ()

    def has(self, *dtypes: torch.dtype) -> bool:
        return any(each in dtypes for each in self.dtypes)


@dataclass(frozen=True)
class Rule:
    """One thing that hardware refuses, or in strict mode what it does slowly: when, why, who says so, and an example."""

    name: str
    applies: Callable[[Operands], bool]
    why: str
    source: str
    example: Operands
    strict_only: bool = False


@dataclass(frozen=True)
class Limit:
    """A refusal that is not decided by dtypes, with the place that makes it."""

    name: str
    why: str
    source: str
    made_in: str


def check(op: str, dtypes: Dtypes, *, cann: Cann, strict: bool, dims: tuple[int, ...] = ()) -> None:
    """Say whether the device takes an operator with operands of these dtypes and numbers of dimensions.

    Raises: Refused, naming rule and source.
    """
    seen = Operands(base_name(op), dtypes, cann, dims)
    for rule in RULES:
        if (strict or not rule.strict_only) and rule.applies(seen):
            words = ", ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise Refused(f"{op} of ({words}): {rule.why}. Rule: {rule.name}. Source: {rule.source}")


def base_name(op: str) -> str:
    """Return an operator's name without namespace, overload and the mark of in-place forms: aten::add_.Tensor is add."""
    name = op.rpartition("::")[2].partition(".")[0]
    return name.rstrip("_") or name


def check_collective(dtype: torch.dtype, reduction: str = "", *, strict: bool) -> None:
    """Say whether HCCL takes a dtype and a reduction ("SUM", "AVG" …).

    Raises: Refused.
    """
    if dtype not in tables.HCCL:
        raise Refused(f"HCCL of {dtype}: {COLLECTIVE_DTYPES.why}. Source: {COLLECTIVE_DTYPES.source}")
    if strict and reduction in tables.NOT_HCCL_REDUCTIONS:
        raise Refused(
            f"HCCL reduction {reduction}: {COLLECTIVE_REDUCTIONS.why}. Source: {COLLECTIVE_REDUCTIONS.source}"
        )


def _fp64_unknown(seen: Operands) -> bool:
    return seen.has(torch.float64) and seen.name not in tables.MOVES | tables.FP64_DOCUMENTED | tables.FP64_OF_A_STEP


def _fp64_slow(seen: Operands) -> bool:
    return seen.has(torch.float64) and seen.name in tables.FP64_DOCUMENTED - tables.FP64_OF_A_STEP


def _matmul_wide(seen: Operands) -> bool:
    return seen.name in tables.MATMULS and seen.has(torch.float64, *tables.COMPLEX)


def _complex_unknown(seen: Operands) -> bool:
    small = seen.has(torch.complex64) and seen.name not in tables.MOVES | tables.COMPLEX64_DOCUMENTED
    large = seen.has(torch.complex128) and seen.name not in tables.MOVES | tables.COMPLEX128_DOCUMENTED
    return small or large


def _complex_slow(seen: Operands) -> bool:
    if not seen.has(torch.complex64, torch.complex128) or seen.name in tables.MOVES:
        return False
    return seen.has(torch.complex128) or seen.name not in tables.COMPLEX64_ON_AI_CORE


def _fp8(seen: Operands) -> bool:
    mixed = len(set(seen.dtypes)) > 1  # a copy between dtypes is a cast
    return any(each in _FP8 for each in seen.dtypes) and (seen.name not in tables.MOVES or mixed)


def _old_bf16(*names: str, dims: int | None = None) -> Callable[[Operands], bool]:
    """Refuse bf16 on a CANN before 8.0 for these operators, of tensors with that many dimensions."""

    def applies(seen: Operands) -> bool:
        if seen.cann >= _SINCE_BF16 or seen.name not in names or not seen.has(torch.bfloat16):
            return False
        return dims is None or dims in seen.dims

    return applies


NEW, OLD = (8, 5, 0), (7, 0, 0)
_NATIVE_APIS = "torch_npu's list of supported APIs (Ascend/pytorch, docs/zh/native_apis/pytorch_2-10-0/torch.md)"
_AI_CPU = "op_host/op_api/mul.cpp and reciprocal.cpp of hicann/ops-math: AICORE_DTYPE_SUPPORT_LIST has neither"

# The first that applies speaks, so what a user's report names comes before what the tables leave out.
RULES: tuple[Rule, ...] = (
    Rule(
        "matmul of fp64 or complex",
        _matmul_wide,
        "matrix products and convolutions exist for fp16, bf16 and fp32",
        f"{_NATIVE_APIS}: torch.mm, bmm, matmul; torch-nn-functional.md: linear, conv2d",
        Operands("matmul", (torch.float64, torch.float64), NEW),
    ),
    Rule(
        "repeat_interleave of fp64",
        lambda seen: seen.name == "repeat_interleave" and seen.has(torch.float64),
        "aclnnRepeatInterleaveInt: self not implemented for DT_DOUBLE",
        "diffusers issue 10428; mended upstream by diffusers pull request 10123",
        Operands("repeat_interleave", (torch.float64,), NEW),
    ),
    Rule(
        "expm1 of fp64",
        lambda seen: seen.name == "expm1" and seen.has(torch.float64),
        "aclnnExpm1: self not implemented for DT_DOUBLE",
        "sglang pull request 29011",
        Operands("expm1", (torch.float64,), NEW),
    ),
    Rule(
        "index of complex",
        lambda seen: seen.name == "index" and seen.has(*tables.COMPLEX),
        "aclnnIndex does not take DT_COMPLEX64",
        "vllm-omni issue 4911",
        Operands("index", (torch.complex64, torch.int64), NEW),
    ),
    Rule(
        "complex32",
        lambda seen: seen.has(torch.complex32) and seen.name not in tables.MOVES,
        "no kernel takes DT_COMPLEX32",
        "FlagGems issue 3267; math/cast/README.md of hicann/ops-math",
        Operands("add", (torch.complex32,), NEW),
    ),
    Rule(
        "fp64 where it is not listed",
        _fp64_unknown,
        "fp64 is taken by the operators listed for it, and this is none of them",
        _NATIVE_APIS,
        Operands("addcdiv", (torch.float64,), NEW),
    ),
    Rule(
        "complex where it is not listed",
        _complex_unknown,
        "complex dtypes are taken by the operators listed for them, and this is none of them",
        _NATIVE_APIS,
        Operands("add", (torch.complex64,), NEW),
    ),
    Rule(
        "fp64 on the AI CPU",
        _fp64_slow,
        "the AI cores have no fp64: it is computed on the device's own CPU, many times slower",
        _AI_CPU,
        Operands("add", (torch.float64,), NEW),
        strict_only=True,
    ),
    Rule(
        "complex on the AI CPU",
        _complex_slow,
        "the AI cores have of complex operators the product of complex64 and little else: the rest is many times slower",
        f"{_AI_CPU} (COMPLEX64 for Mul); DiffSynth-Studio pull request 1191",
        Operands("exp", (torch.complex64,), NEW),
        strict_only=True,
    ),
    Rule(
        "fp8",
        _fp8,
        "the A2 and A3 series have no fp8: it can be stored and moved, neither cast nor computed with",
        "math/cast/README.md of hicann/ops-math",
        Operands("copy", (torch.bfloat16, torch.float8_e4m3fn), NEW),
    ),
    Rule(
        "logsumexp of bf16, CANN before 8.0",
        _old_bf16("logsumexp"),
        "ReduceLogSumExp had no bf16",
        f"{_NATIVE_APIS}: torch.logsumexp; aclnnLogSumExp.md of hicann/ops-math has it since",
        Operands("logsumexp", (torch.bfloat16,), OLD),
    ),
    Rule(
        "conv3d of bf16, CANN before 8.0",
        _old_bf16("convolution", "convolution_backward", "convolution_overrideable", "slow_conv3d_forward", dims=5),
        "Conv3D had no bf16",
        "PaddleCustomDevice pull requests 1537 and 1696 (bf16 for conv3d on NPU, 2025)",
        Operands("convolution", (torch.bfloat16,), OLD, (5, 5)),
    ),
    Rule(
        "padding by edge or mirror of bf16, CANN before 8.0",
        _old_bf16(*(f"{kind}_pad{n}d{end}" for kind in ("replication", "reflection") for n in (1, 2, 3)
                    for end in ("", "_backward"))),
        "pad modes other than constant took fp16, fp32 and fp64",
        "torch-nn-functional.md of the same list: pad; aclnnReplicationPad2d.md of hicann/ops-math has bf16 since",
        Operands("replication_pad2d", (torch.bfloat16,), OLD),
    ),
)  # fmt: skip

COLLECTIVE_DTYPES = Limit(
    "dtypes of HCCL",
    "HCCL moves int8, 16, 32, 64, uint8, bool, fp16, fp32, fp64 and bf16",
    "kScalarTypeToHcclDataType in torch_npu/csrc/distributed/HCCLUtils.cpp (its fp8 is of Ascend 950)",
    "native/hccl.cpp",
)
COLLECTIVE_REDUCTIONS = Limit(
    "reductions of HCCL",
    "HcclReduceOp has SUM, PROD, MAX and MIN: sum, then divide",
    "hccl_types.h in the wheel; VeOmni issue 241 for PREMUL_SUM",
    "native/hccl.cpp",
)
LIMITS: tuple[Limit, ...] = (
    COLLECTIVE_DTYPES,
    COLLECTIVE_REDUCTIONS,
    Limit(
        "fallback to the CPU",
        "torch_npu has no kernel for the operator and computes it on the host, both copies waiting",
        "the dispatcher's own table of the wheel, and what its kernels say of themselves (FALLS_BACK)",
        "install.py, native/kernels.cpp",
    ),
    Limit(
        "mixed devices",
        "operands are on one device; a CPU tensor of no dimensions may stand among them",
        "device checks of torch_npu's generated kernels",
        "native/kernels.cpp",
    ),
    Limit(
        "copies that must wait",
        "a non-blocking copy to or from pageable memory is a blocking one, or reads what is not there yet",
        "acl_rt.h of the wheel: aclrtMemcpyAsyncWithCondition is synchronous for memory that ACL did not allocate",
        "native/kernels.cpp",
    ),
)
