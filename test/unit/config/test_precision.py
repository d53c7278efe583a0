"""What flags of precision and memory may stand together, and what they set."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import is_about

from difftrain.config.digest import digest
from difftrain.config.parse_flags import parse
from difftrain.contracts import ConfigFault

LINE = [
    "--init_from_config=tiny",
    f"--train_data_dir={Path(__file__).parent}",
    "--output_dir=/out",
    "--resolution=64,64",
]


def faults(*flags: str) -> list[str]:
    with pytest.raises(ConfigFault) as caught:
        parse([*LINE, *flags])
    return [str(fault) for fault in caught.value.faults]


def parsed(*flags: str):
    return parse([*LINE, *flags])


@pytest.mark.flags("full_fp16", "full_bf16", "master_weights", "fp8_base", "fp8_base_unet", "fused_optimizer_groups")
def test_flags_set_their_fields():
    training = parsed("--full_bf16", "--mixed_precision=bf16").config.training
    assert (training.full_precision, training.master_weights) == ("bf16", None)
    training = parsed("--full_fp16", "--mixed_precision=fp16", "--master_weights=fp32").config.training
    assert (training.full_precision, training.master_weights) == ("fp16", "fp32")
    assert [parsed(flag).config.model.fp8_frozen for flag in ("--fp8_base", "--fp8_base_unet")] == ["all", "unet"]
    section = parsed("--fused_optimizer_groups=10", "--gradient_accumulation_steps=4").config.optimizer
    assert (section.fused_groups, section.fused_backward) == (10, False)


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (["--full_bf16"], "--full_bf16 bf16 --mixed_precision no"),
        (["--full_fp16", "--mixed_precision=bf16"], "--full_fp16 bf16 --mixed_precision=fp16"),
        (["--master_weights=none"], "--master_weights --full_bf16 --full_fp16"),
        (["--master_weights=kahan", "--mixed_precision=bf16"], "--master_weights kahan --full_bf16 fp32"),
        (["--master_weights=stochastic", "--full_fp16", "--mixed_precision=fp16"], "--master_weights stochastic fp16 fp32"),
        (["--master_weights=bf16"], "--master_weights fp32 kahan stochastic none 'bf16'"),
        (["--fused_backward_pass", "--gradient_accumulation_steps=2"], "--fused_backward_pass --gradient_accumulation_steps=2"),
        (["--fused_backward_pass", "--fused_optimizer_groups=4"], "--fused_optimizer_groups contradicts --fused_backward_pass"),
        (["--fused_optimizer_groups=4", "--mixed_precision=fp16"], "--fused_optimizer_groups fp16"),
        (["--fused_backward_pass", "--optimizer_type=OSS"], "--fused_backward_pass oss"),
        (["--fused_backward_pass", "--optimizer_type=Prodigy"], "--fused_backward_pass optimizer --optimizer_type=AdamW"),
        (["--fused_optimizer_groups=2", "--optimizer_type=AdamWScheduleFree"], "--fused_optimizer_groups --optimizer_type=AdamW"),
        (["--fused_optimizer_groups=-1"], "--fused_optimizer_groups 1 -1"),
        (["--cpu_offload_checkpointing"], "--cpu_offload_checkpointing --gradient_checkpointing"),
        (["--fp8_base", "--fp8_base_unet"], "--fp8_base_unet contradicts --fp8_base"),
        (["--full_fp16", "--full_bf16", "--mixed_precision=bf16"], "--full_bf16 contradicts --full_fp16"),
    ],
)  # fmt: skip
def test_what_cannot_stand_together_is_named(flags, facts):
    found = faults(*flags)
    assert any(is_about(fault, *facts.split()) for fault in found), found


def test_all_contradictions_are_said_at_once():
    found = faults(
        "--full_bf16", "--master_weights=none", "--fused_backward_pass", "--gradient_accumulation_steps=2",
        "--optimizer_type=oss", "--cpu_offload_checkpointing",
    )  # fmt: skip
    assert len(found) == 4, found


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), True),
        (("--optimizer_args", "eps=1e-4"), False),
        (("--master_weights=fp32",), False),
        (("--optimizer_type=Lion",), False),
        (("--optimizer_type=adamwschedulefree",), True),
        (("--optimizer_type=torch.optim.RMSprop",), True),
        (("--optimizer_type=torch.optim.RMSprop", "--optimizer_args", "eps=1e-4"), False),
    ],
)
def test_full_fp16_warns_of_what_vanishes_where_squares_are_divided_by(flags, said):
    notes = parsed("--full_fp16", "--mixed_precision=fp16", *flags).notes
    assert any(is_about(note, "--full_fp16", "1e-8", "--master_weights=fp32") for note in notes) == said


@pytest.mark.parametrize("name", ["Prodigy", "DAdaptAdam"])
def test_what_estimates_the_rate_moves_nothing_in_fp16(name):
    flags = ("--full_fp16", "--mixed_precision=fp16", f"--optimizer_type={name}", "--learning_rate=1")
    (fault,) = faults(*flags)
    assert is_about(fault, "--full_fp16", f"{name}'s", "1e-6", "--master_weights=fp32")
    for more in (("--master_weights=fp32",), ("--optimizer_args", "d0=1e-3")):
        parsed(*flags, *more)
    parsed("--full_bf16", "--master_weights=none", "--mixed_precision=bf16", f"--optimizer_type={name}")


def test_what_changes_the_weights_is_part_of_a_runs_identity():
    base = digest(parsed("--mixed_precision=bf16", "--gradient_checkpointing").config)
    same = [("--cpu_offload_checkpointing", "--gradient_checkpointing")]
    other = [("--full_bf16",), ("--fused_backward_pass",), ("--fused_optimizer_groups=2",), ("--fp8_base",)]
    for flags in same:
        assert digest(parsed("--mixed_precision=bf16", *flags).config) == base
    for flags in other:
        assert digest(parsed("--mixed_precision=bf16", *flags).config) != base
