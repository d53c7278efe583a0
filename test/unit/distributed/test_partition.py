"""How a model is cut into the stages of a pipeline, what that costs, and what is refused before a device is touched."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from refusals import is_about, names

from difftrain.config.parse_flags import parse
from difftrain.config.rules.pipeline import waiting_share
from difftrain.config.schema.sections import TrainConfig, TrainingSection
from difftrain.contracts import ConfigFault, Fault
from difftrain.distributed.partition import Cut, Unit, cut
from difftrain.testing.family import TinyChain, TinyFamily

PICTURES = "."


def units(*parameters: int, kinds: str = "") -> list[Unit]:
    return [Unit(f"blocks.{i}", f"Block{kinds[i : i + 1]}", size) for i, size in enumerate(parameters)]


def sizes(runs: list[range]) -> list[int]:
    return [len(run) for run in runs]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_heaviest_stage_is_as_light_as_any_cut_makes_it(stages: int) -> None:
    weights, entering, leaving = [5, 1, 9, 2, 2, 7, 3, 4], 6, 2
    runs = cut(units(*weights), stages, "parameters", (), entering=entering, leaving=leaving)
    assert [number for run in runs for number in run] == list(range(8)) and len(runs) == stages

    def heaviest(ends: tuple[int, ...]) -> int:
        held = [entering + weights[0], *weights[1:-1], weights[-1] + leaving]
        return max(sum(held[a:b]) for a, b in itertools.pairwise((0, *ends, 8)))

    every = [heaviest(ends) for ends in itertools.combinations(range(1, 8), stages - 1)]
    assert heaviest(tuple(run.start for run in runs[1:])) == min(every)


@pytest.mark.flags("partition_method", "partition_split")
def test_every_method_cuts_in_its_own_way() -> None:
    blocks = units(100, 1, 1, 1, 1, 1, kinds="AABBBB")
    assert sizes(cut(blocks, 2, "parameters", ())) == [1, 5]
    assert sizes(cut(blocks, 2, "uniform", ())) == [3, 3]
    assert sizes(cut(blocks, 2, "type:blockb", ())) == [4, 2]
    assert cut(blocks, 3, "manual", (2, 6)) == [range(1), range(1, 5), range(5, 6)]


@pytest.mark.parametrize(
    ("stages", "method", "split", "facts"),
    [
        (7, "parameters", (), ("7 stages", "6 blocks", "at most 6")),
        (2, "type:Nothing", (), ("'type:Nothing'", "0 of 6", "BlockA", "BlockB")),
        (2, "manual", (), ("0 numbers", "2 stages")),
        (2, "manual", (7,), ("[7]", "1 to 6")),
        (3, "manual", (4, 4), ("[4, 4]", "2 to 6")),
    ],
)
def test_a_cut_that_is_none_is_named(stages: int, method: str, split: tuple[int, ...], facts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigFault) as caught:
        cut(units(*[1] * 6, kinds="AABBBB"), stages, method, split)
    (fault,) = caught.value.faults
    assert names(f"{fault.where}: {fault.what} ({fault.remedy})", *facts)


@pytest.mark.flags("pipeline_stages")
def test_a_model_is_cut_by_its_own_weights_and_that_is_said() -> None:
    training = TrainingSection(pipeline_stages=2, accumulation=4)
    cfg, root = TrainConfig(training=training), TinyFamily(blocks=6).load().root
    chain: Any = TinyChain(root)
    made = Cut.of(cfg, chain, root)
    assert sizes(made.runs) == [3, 3]
    own = [[name for name, run in made.run_of.items() if run == stage] for stage in (0, 1)]
    assert "first.weight" in own[0] and "blocks.2.1.weight" in own[0] and "last.bias" in own[1]
    held = [sum(root.get_parameter(name).numel() for name in names_of) for names_of in own]
    lines = made.lines(cfg)
    for stage, (first, last) in enumerate((("blocks.0", "blocks.2"), ("blocks.3", "blocks.5"))):
        assert names(lines[stage], f"stage {stage + 1} of 2", first, last, f"{held[stage]:,} parameters")
    assert names(lines[-1], "1f1b", "4 micro batches", "20 %")


def test_waiting_is_that_of_the_papers() -> None:
    assert waiting_share(4, 12, "1f1b") == pytest.approx(3 / 15)
    assert waiting_share(4, 12, "interleaved") == pytest.approx(1.5 / 13.5)


# ---------------------------------------------------------------- the configuration


def faults(*argv: str) -> list[Fault]:
    base = ["--init_from_config=tiny", f"--train_data_dir={PICTURES}", "--output_dir=out", "--resolution=64"]
    with pytest.raises(ConfigFault) as caught:
        parse([*base, *argv])
    return list(caught.value.faults)


def notes(*argv: str) -> list[str]:
    base = ["--init_from_config=tiny", f"--train_data_dir={PICTURES}", "--output_dir=out", "--resolution=64"]
    return parse([*base, *argv]).notes


@pytest.mark.parametrize(
    ("flags", "about", "facts"),
    [
        (["--engine=accelerate"], "--engine", ["--pipeline_stages=2"]),
        (["--fused_backward_pass", "--optimizer_type=Adafactor"], "--fused_backward_pass", ["--pipeline_stages=2"]),
        (["--optimizer_type=oss"], "--optimizer_type", ["oss", "AdamW"]),
        (["--partition_method=halves"], "--partition_method", ["'halves'", "parameters", "manual"]),
        (["--partition_method=type:("], "--partition_method", ["'type:('"]),
        (["--partition_method=manual"], "--partition_split", ["0 numbers", "1 places"]),
        (["--partition_method=manual", "--partition_split=1"], "--partition_split", ["[1]", "2"]),
        (["--partition_split=3"], "--partition_split", ["--partition_method=manual"]),
        (["--pipeline_schedule=never"], "--pipeline_schedule", ["never", "1f1b", "zb"]),
    ],
)
def test_what_stages_cannot_go_with_is_refused_by_name(flags: list[str], about: str, facts: list[str]) -> None:
    found = faults("--pipeline_stages=2", "--gradient_accumulation_steps=4", *flags)
    assert any(is_about(fault, about, *facts) for fault in found), found


def test_interleaved_stages_are_cut_at_more_places() -> None:
    flags = ["--pipeline_stages=2", "--gradient_accumulation_steps=8", "--partition_method=manual"]
    (fault,) = faults(*flags, "--partition_split=2", "--pipeline_schedule=interleaved")
    assert is_about(fault, "--partition_split", "1 numbers", "3 places")


def test_few_micro_batches_are_said_to_cost() -> None:
    said = [note for note in notes("--pipeline_stages=4") if "--pipeline_stages" in note]
    assert len(said) == 1 and names(said[0], "1 micro batch", "75 %", "--gradient_accumulation_steps=16")
    assert not [n for n in notes("--pipeline_stages=4", "--gradient_accumulation_steps=4") if "--pipeline_stages" in n]


def test_how_to_cut_means_nothing_where_nothing_is_cut() -> None:
    assert any(names(note, "--partition_method", "--pipeline_stages=1") for note in notes("--partition_method=uniform"))


@pytest.mark.parametrize("world", ["3", "4"])
def test_stages_divide_the_processes(monkeypatch: pytest.MonkeyPatch, world: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    line = ["--pipeline_stages=2", "--gradient_accumulation_steps=4"]
    if world == "4":
        assert not [note for note in notes(*line) if "processes" in note]
        return
    (fault,) = faults(*line)
    assert is_about(fault, "--pipeline_stages", "2 stages", "3 processes", "1, 3")


def test_deepspeed_with_stages_runs_the_native_pipeline() -> None:
    base = ["--init_from_config=tiny", f"--train_data_dir={PICTURES}", "--output_dir=out", "--resolution=64"]
    parsed = parse([*base, "--deepspeed", "--pipeline_stages=2", "--gradient_accumulation_steps=4"])
    assert parsed.config.training.engine == "native" and not parsed.config.deepspeed.enable
    assert [note for note in parsed.notes if names(note, "--deepspeed", "--pipeline_stages=2", "native")]
