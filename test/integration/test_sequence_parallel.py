"""Ranks that share the tokens of a sample: every family that can, pass by pass; and runs, whose losses are one process's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import sequence_ranks
from doors import Door, losses
from run_dirs import TRAIN, only, tensors

from difftrain.config.parse_keys import parse
from difftrain.contracts import ConfigFault
from difftrain.testing.spawn import run_ranks


def test_passes_with_shared_tokens_are_those_of_one_rank(tmp_path: Path) -> None:
    ended = run_ranks(2, f"{sequence_ranks.__file__}::passes_of_all", tmp_path)
    for rank in ended:
        measured = json.loads(rank.out.splitlines()[-1])
        assert measured.keys() == set(sequence_ranks.ABLE) >= {"wan", "wan_2_2", "wan_2_2_5b", "ltx_video"}
        for name, differences in measured.items():
            assert differences["output"] < 1e-6 and differences["gradients"] < 1e-6, (name, differences)


UNREAD_BY = Path(sequence_ranks.__file__).with_name("unread_by.py")
FILE = """
[output]
output_dir = "{out}"
[training]
seed = 1
max_steps = 6
micro_batch_size_per_gpu = {batch}
gradient_accumulation_steps = 2
[model]
type = "wan"
init_from_config = "tiny"
dtype = "float32"
t5_max_length = 8
[optimizer]
type = "adamw"
lr = 1e-4
[data]
dirs = ["{pictures}"]
resolution = [48, 48]
workers = 0
[validation]
split = 0.25
every_n_steps = 3
[optimization]
activation_checkpointing = true
[ema]
enable = true
decay = 0.9
[save]
save_every_n_steps = 6
checkpoint_every_n_minutes = 1e-6
"""


def run_of(
    place: Path, pictures: Path, name: str, *words: str, batch: int, ranks: int = 1, script: tuple[str, ...] = ()
) -> Path:
    path = place / f"{name}.toml"
    path.write_text(FILE.format(out=place / name, batch=batch, pictures=pictures))
    launch = [
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={ranks}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    line = [sys.executable, *(launch if ranks > 1 else []), *script, str(TRAIN), f"--config={path}", *words]
    Door(pictures, place / "cache").run_words(line)
    return only(place / name)


def validated(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "validation.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("words", "ranks"), [((), 4), (("--engine=fsdp",), 2)])
def test_runs_whose_ranks_share_tokens_are_those_of_one_process(
    words: tuple[str, ...], ranks: int, alone: tuple[Path, Path], tmp_path: Path
) -> None:
    pictures, single = alone
    run = run_of(tmp_path, pictures, "shared", "--sequence_parallel=2", *words, batch=4 // ranks, ranks=ranks)
    assert losses(run) == pytest.approx(losses(single), rel=1e-6) and len(losses(run)) == 6
    assert validated(run) == pytest.approx(validated(single), rel=1e-6) and validated(run)
    for name in ("step6", "step6-ema"):
        ours, theirs = tensors(run / name), tensors(single / name)
        assert ours.keys() == theirs.keys()
        assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) <= 1e-4  # one learning rate


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_file_that_one_of_them_cannot_read_is_the_same_for_all(
    rank: int, alone: tuple[Path, Path], tmp_path: Path
) -> None:
    """They train on what the first of them has: the file where that can read it, else what is in its place there."""
    pictures, single = alone

    def run(name: str, unread_by: str) -> Path:
        script = (str(UNREAD_BY), unread_by, "003.png")
        return run_of(tmp_path, pictures, name, "--sequence_parallel=2", batch=2, ranks=2, script=script)

    one = run("one", str(rank))
    wanted = single if rank else run("both", "0,1")
    assert losses(one) == pytest.approx(losses(wanted), rel=1e-6) and len(losses(one)) == 6
    (reject,) = map(json.loads, (one / "rejected.jsonl").read_text().splitlines())
    assert reject["path"].endswith("003.png") and "gone on this machine" in reject["reason"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from doors import write_pictures

    place = tmp_path_factory.mktemp("alone")
    pictures = write_pictures(place / "pictures", 16)
    return pictures, run_of(place, pictures, "single", batch=2)


def about(faults: list[str], *facts: str) -> bool:
    """Return whether one of several faults names all facts."""
    return any(all(fact in fault for fact in facts) for fault in faults)


def refused(place: Path, *words: str) -> list[str]:
    path = place / "run.toml"
    path.write_text(FILE.format(out=place / "out", batch=1, pictures=place))
    with pytest.raises(ConfigFault) as caught:
        parse([f"--config={path}", *words])
    return [str(fault) for fault in caught.value.faults]


def test_what_cannot_share_tokens_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    two = "--sequence_parallel=2"
    assert about(refused(tmp_path, "--model.type=flux", two), "sequence_parallel", "flux")
    assert about(refused(tmp_path, "--model.type=wan", two, "--engine=accelerate"), "sequence_parallel", "engine")
    assert about(
        refused(tmp_path, "--model.type=wan", two, "--optimization.pipeline_stages=2"),
        "pipeline_stages",
        "sequence_parallel",
    )
    assert about(
        refused(tmp_path, "--model.type=wan", two, "--optimization.compile=true"), "compile", "sequence_parallel"
    )
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert about(refused(tmp_path, "--model.type=wan", two), "sequence_parallel", "3", "2")
