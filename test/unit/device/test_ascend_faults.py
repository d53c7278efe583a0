"""What breaks for Ascend users of other trainers: for each fault the tests that fail on its form here, or why there are none."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from parsed import parsed

ROOT = Path(__file__).parents[3]
SOURCES = [
    *(ROOT / "library").rglob("*.py"),
    *(ROOT / "third_patch").rglob("*.py"),
    *(ROOT / "sd_scripts_xl").glob("*.py"),
]
SIMULATED, UNIT, HERE = "test/simulated_npu", "test/unit/device", "test/unit/device/test_ascend_faults.py"


@dataclass(frozen=True)
class FaultElsewhere:
    """fault: what broke. threads: where it was reported. tests: path::name. here: why it is not met, in a sentence."""

    fault: str
    threads: str
    tests: tuple[str, ...]
    here: str


FAULTS = (
    FaultElsewhere("additive masks are read the wrong way round", "diffusers 14397, 14396", (
        f"{SIMULATED}/test_attention.py::test_diffusers_own_backend_turns_float_masks_round",
        f"{SIMULATED}/test_attention.py::test_every_mask_equals_fp64_forward_and_backward",
        f"{UNIT}/test_attention.py::test_float_masks_are_refused",
    ), "masks are bool, True = keep; float ones are refused, and diffusers' backend is patched"),
    FaultElsewhere("RMSNorm without gamma; masks [B, N, 1, S] and masks that are broadcast", "diffusers 14380, 14288, 13490, 13451", (
        f"{UNIT}/test_kernels.py::test_rms_norm_without_a_weight",
        f"{SIMULATED}/test_references_attention.py::test_each_limit_is_refused_with_its_source",
        f"{SIMULATED}/test_attention.py::test_every_mask_equals_fp64_forward_and_backward",
    ), "without gamma the plain formula runs; masks are expanded before the operator, which refuses others"),
    FaultElsewhere("rotary embeddings of complex numbers", "diffusers 12979, 13689; vllm-omni 4911; DiffSynth 1191; SimpleTuner", (
        f"{SIMULATED}/test_policy.py::test_a_rule_refuses_its_example_and_says_why",
        f"{SIMULATED}/test_counters.py::test_no_step_waits_or_falls_back",
        f"{UNIT}/test_kernels.py::test_rotary_is_that_of_diffusers",
    ), "steps of trained families use real tables; complex operands are refused by the simulated device"),
    FaultElsewhere("context parallelism without a backward pass; ring attention lacks the lse", "diffusers 12919; xDiT 613", (
        f"{SIMULATED}/test_attention.py::test_diffusers_own_backend_cannot_be_trained_with_context_parallelism",
        f"{UNIT}/test_attention_libraries.py::test_context_parallelism_can_be_trained",
    ), "no engine splits a sequence; diffusers' backend is patched so that it can be trained"),
    FaultElsewhere("FSDP2 writes cuda into its code", "accelerate 3790", (
        "test/house/test_layers.py::test_only_the_device_room_names_devices",
        f"{SIMULATED}/test_fsdp2.py::test_fsdp2_casts_in_any_order_and_sums_before_it_divides",
    ), "device names stand in `device/` alone; accelerate's FSDP2 is not used"),
    FaultElsewhere("a cast after FSDP2 has no sharding rule", "ms-swift 7870, 7871", (
        f"{SIMULATED}/test_fsdp2.py::test_fsdp2_casts_in_any_order_and_sums_before_it_divides",
    ), "weights have their dtype before they are wrapped"),
    FaultElsewhere("a distributed save that is wrong now and then", "VeOmni 919", (
        "test/unit/checkpoint/test_commit.py::test_every_rank_writes_and_one_seals",
    ), "no HSDP and no saver of Hugging Face's: each rank's files have size and checksum in a manifest that one rank writes last"),
    FaultElsewhere("operators for inference ignore masks beyond 512 keys, or average", "vllm-ascend 15503, 13699, 12623", (
        f"{HERE}::test_operators_for_inference_are_not_called",
        f"{SIMULATED}/test_attention.py::test_sizes_that_are_a_multiple_of_nothing_equal_fp64",
    ), "the operator for training is the only one that is called; masks beyond 512 keys are compared with fp64"),
    FaultElsewhere("the mask of a vision encoder is dropped; NPU and GPU differ", "sglang 31948, 18481; Ascend/sglang 521; vllm-omni 675", (
        f"{SIMULATED}/test_attention.py::test_a_text_encoder",
        f"{UNIT}/test_attention_libraries.py::test_clip_computes_what_eager_attention_does",
        f"{SIMULATED}/test_training.py::test_losses_are_the_cpu_s",
    ), "encoders with padding are compared with eager attention; `difftrain compare --trace` names the first module that differs"),
    FaultElsewhere("operators fall back to the CPU silently (aten::isin); slower than expected", "LlamaFactory 4836; Ascend/pytorch 91", (
        f"{SIMULATED}/test_counters.py::test_no_step_waits_or_falls_back",
        f"{SIMULATED}/test_kernels_on_host.py::test_an_operator_that_the_device_lacks_is_refused_or_counted",
    ), "a step of each family is run where every fallback is counted; speed is for hardware to tell"),
    FaultElsewhere("pinned memory; PREMUL_SUM; strides with recomputation", "VeOmni 677, 263, 793", (
        f"{SIMULATED}/test_copies_and_memory.py::test_a_copy_that_does_not_wait_needs_pinned_memory",
        f"{SIMULATED}/test_device.py::test_batches_come_through_pinned_memory_without_a_wait",
        f"{SIMULATED}/test_policy.py::test_collectives_that_hccl_lacks",
        f"{SIMULATED}/test_upstream_faults.py::test_gradients_of_ddp_are_laid_out_as_their_parameters",
    ), "batches go through pinned memory, sums are divided afterwards, gradients lie as their parameters do"),
    FaultElsewhere("HCCL runs out of ports", "VeOmni's npu_e2e_test.yml", (
        f"{SIMULATED}/test_process_groups.py::test_two_ranks_on_one_device_are_refused",
    ), "meets several processes on one device, which are refused; where other jobs share a device, "
       "HCCL_HOST_SOCKET_PORT_RANGE and HCCL_NPU_SOCKET_PORT_RANGE are yours to set"),
    FaultElsewhere("“two accelerators” where torch_npu is imported twice or beside CUDA", "open-instruct 1781", (
        f"{HERE}::test_torch_npu_is_imported_where_an_npu_is_used_and_torch_accelerator_is_not_asked",
        f"{UNIT}/test_choice.py::test_auto_takes_the_cpu_and_says_why",
    ), "torch_npu is imported in `device/` alone, where an NPU is used; torch.accelerator, which raises this, is not asked"),
    FaultElsewhere("diffusers' processor for NPUs raises where it is deprecated", "xDiT 567", (
        f"{HERE}::test_the_processor_for_npus_of_diffusers_is_not_made",
        f"{UNIT}/test_attention_modules.py::test_the_processor_equals_diffusers",
    ), "processors are our own; that one is only recognised, and replaced"),
    FaultElsewhere("replicate padding in bf16; Triton kernels are missing", "Helios 71", (
        f"{SIMULATED}/test_upstream_faults.py::test_models_call_nothing_that_some_cann_lack_in_bf16",
        f"{SIMULATED}/test_device.py::test_compile_is_off_and_says_why",
        f"{HERE}::test_nothing_needs_triton",
    ), "trained models call neither; torch.compile is off"),
    FaultElsewhere("DDP's find_unused_parameters; a pin of pyarrow", "ms-swift 2669; MindSpeed-MM", (
        f"{HERE}::test_ddp_does_not_look_for_unused_parameters",
        f"{HERE}::test_both_lists_of_packages_ask_for_the_same_versions",
    ), "parameters that no gradient reaches are found once, before the first update; both lists of packages agree"),
    FaultElsewhere("pages with an install line that does not work", "DiffSynth 1081, 1129", (
        f"{HERE}::test_install_lines_name_one_version_of_torch_and_torch_npu",
    ), "install lines are compared with requirements.txt"),
)  # fmt: skip


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row.fault)
def test_each_fault_has_a_test_that_is_there_and_a_line_on_the_page(row: FaultElsewhere) -> None:
    assert row.tests
    for name in row.tests:
        path, _, function = name.partition("::")
        assert function in functions(ROOT / path), f"{name} is not there"
    line = f"| {row.fault} | {row.threads} | {row.here} |"
    assert line in (ROOT / "docs" / "npu.md").read_text(encoding="utf-8"), f"docs/npu.md lacks: {line}"


def test_the_page_counts_them() -> None:
    page = (ROOT / "docs" / "npu.md").read_text(encoding="utf-8")
    assert len(FAULTS) == 17 and f"{len(FAULTS)} faults" in page
    assert f"{len(FAULTS)} 条" in (ROOT / "docs" / "zh" / "npu.md").read_text(encoding="utf-8")


# ------------------------------------------------------------------ static checks; each finds its faulty form first


def words(tree: ast.Module) -> Iterator[str]:
    """Yield what code names: attributes with what they are of, names, imports, keywords, strings that are names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"import {node.module}"
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.keyword) and node.arg:
            yield f"{node.arg}={ast.unparse(node.value)}"


PARTS = (
    "npu",
    "NPU",
    "accelerator",
    "triton",
    "find_unused_parameters",
)  # one of them is in each name that is looked for


@cache
def words_of(path: Path) -> frozenset[str]:
    """Return the words of a file that has any of the parts at all; parsing takes longest."""
    if not any(part in path.read_text(encoding="utf-8") for part in PARTS):
        return frozenset()
    return frozenset(words(parsed(path)))


def using(pattern: str, *, faulty: str, but: str = "") -> list[str]:
    """Return the files that name something. faulty: code that must be found, or the search finds nothing. but: a folder."""
    search = re.compile(pattern)
    assert any(part in pattern for part in PARTS), f"files with {pattern} are not read: name a part of it"
    assert any(search.fullmatch(word) for word in words(ast.parse(faulty))), faulty
    places = [path for path in SOURCES if not but or but not in path.as_posix()]
    assert len(places) > 100
    return [str(path) for path in places if any(search.fullmatch(word) for word in words_of(path))]


def test_operators_for_inference_are_not_called() -> None:
    faulty = "import torch_npu\ntorch_npu.npu_fused_infer_attention_score(q, k, v, atten_mask=mask)"
    assert (
        using(r"npu_(fused_infer_attention\w*|prompt_flash\w*|incre_flash\w*|fusion_attention_v[23])", faulty=faulty)
        == []
    )


def test_torch_npu_is_imported_where_an_npu_is_used_and_torch_accelerator_is_not_asked() -> None:
    assert using(r"import torch_npu(\..*)?", faulty="import torch_npu", but="library/difftrain/device/") == []
    on_top = [
        path for path in SOURCES for node in parsed(path).body
        if isinstance(node, ast.Import) and any(alias.name == "torch_npu" for alias in node.names)
    ]  # fmt: skip
    assert on_top == []
    # fairscale's scaler asks on a run's one device, which is chosen by then
    asked = using(
        r"torch\.accelerator", faulty="torch.accelerator.current_accelerator()", but="fairscale_patch/scaler.py"
    )
    assert asked == []


def test_the_processor_for_npus_of_diffusers_is_not_made() -> None:
    assert using(r"AttnProcessorNPU", faulty="from diffusers.models.attention_processor import AttnProcessorNPU") == []


def test_nothing_needs_triton() -> None:
    assert using(r"import triton(\..*)?", faulty="import triton.language") == []


def test_ddp_does_not_look_for_unused_parameters() -> None:
    assert using(r"find_unused_parameters=True", faulty="DDP(model, find_unused_parameters=True)") == []


def requirements(name: str) -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    found = (re.fullmatch(r"([A-Za-z0-9_.\[\]-]+)\s*([=<>~!].*)?", line) for line in lines if line)
    return {match[1].lower(): match[2] or "" for match in found if match}


def test_both_lists_of_packages_ask_for_the_same_versions() -> None:
    all_, npu = requirements("requirements.txt"), requirements("requirements-npu.txt")
    assert "pyarrow" in npu and len(npu) > 5
    assert {name: wanted for name, wanted in npu.items() if all_.get(name) != wanted} == {}


def test_install_lines_name_one_version_of_torch_and_torch_npu() -> None:
    wanted = requirements("requirements.txt")["torch"].removeprefix("==")
    lines = [
        line for page in [ROOT / "README.md", ROOT / "README.zh.md", *(ROOT / "docs").rglob("*.md")]
        for line in page.read_text(encoding="utf-8").splitlines() if re.search(r"pip install .*torch_npu==", line)
    ]  # fmt: skip
    assert len(lines) >= 2
    for line in lines:
        assert f"torch=={wanted} " in line and re.search(rf"torch_npu=={re.escape(wanted)}\b", line), line
