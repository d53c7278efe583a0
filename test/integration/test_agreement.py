"""Machines that run other code, another configuration or other data than the first: found at start, and named."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from difftrain.testing.spawn import free_port, rank_environment, run_ranks

HERE = __file__


def three_machines(folder: str) -> None:
    """Be a machine each; print what comes of machines that are alike, and of each kind of difference."""
    from difftrain.config.schema.sections import TrainConfig
    from difftrain.contracts import ConfigFault
    from difftrain.device import choose
    from difftrain.distributed.launch import Launch
    from difftrain.distributed.ranks import Ranks
    from difftrain.train import agreement

    said: dict[str, list[tuple[str, str]]] = {}

    def noted(name: str, action: Any) -> None:
        try:
            action()
            said[name] = []
        except ConfigFault as fault:
            said[name] = [(fault.where, fault.what) for fault in fault.faults]

    def config(**save: Any) -> TrainConfig:
        return TrainConfig.model_validate({"save": save})

    launch = Launch.from_environment()
    with Ranks.open(launch, choose("cpu", launch.local_rank, launch.local_size), timeout_min=1) as ranks:
        alike = config(output_dir=f"node{ranks.rank}", every_n_steps=4)
        noted("one machine", lambda: agreement.agree_on_start(alike, ranks))
        machine = dataclasses.replace(ranks, local_rank=0, local_size=1)
        noted("three machines", lambda: agreement.agree_on_start(alike, machine))
        other = config(every_n_steps=4 + (ranks.rank == 2))
        noted("configuration", lambda: agreement.agree_on_start(other, machine))

        # another file in the package of the second, and another version of a package on the third
        tree = agreement.sources(Path(folder, "changed" if ranks.rank == 1 else "same"))
        noted("code", lambda: agreement.agree(machine, "code", "", tree, agreement.differing_files))
        found = agreement.packages() | ({"torch": "0.1"} if ranks.rank == 2 else {})
        noted("packages", lambda: agreement.agree(machine, "package", "", found, agreement.differing))
        noted("model", lambda: agreement.agree_on_model({"layers": 2 + min(ranks.rank, 1)}, machine))
    print(json.dumps(said))


def test_what_differs_is_named_with_its_machine(tmp_path: Path) -> None:
    for name in ("same", "changed"):
        (tmp_path / name / "room").mkdir(parents=True)
        (tmp_path / name / "room" / "kept.py").write_text("x = 1\n")
        (tmp_path / name / "room" / "mended.py").write_text(f"x = {len(name)}\n")
    (tmp_path / "changed" / "new.py").write_text("")
    ended = run_ranks(3, f"{HERE}::three_machines", tmp_path)
    (said,) = {rank.out.splitlines()[-1] for rank in ended}  # all say the same
    found = json.loads(said)
    assert found["one machine"] == found["three machines"] == []

    ((_, configuration),) = found["configuration"]
    assert "rank 2, on machine 2" in configuration and "--save_every_n_steps 4 and 5" in configuration
    ((_, code),) = found["code"]
    assert "rank 1, on machine 1" in code and "room/mended.py" in code and "new.py (only there)" in code
    assert "kept.py" not in code
    ((_, packages),) = found["packages"]
    assert "machine 2" in packages and "torch " in packages and "0.1" in packages
    assert [what.split(", on")[1][:10] for _, what in found["model"]] == [" machine 0"] * 2  # both others are named
    assert "layers 2 and 3" in found["model"][0][1]


def test_a_job_of_two_command_lines_does_not_start(tmp_path: Path) -> None:
    from doors import Door, write_pictures  # of the tests: ranks, which run this file too, do not have it

    door = Door(write_pictures(tmp_path / "pictures"), tmp_path / "cache")
    port = free_port()
    lines = (door.flags(tmp_path / "out0"), door.flags(tmp_path / "out1", "--save_every_n_steps=3"))
    of_a_machine = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    started = [
        door.start(
            flags, **{k: v for k, v in rank_environment(rank, 2, port, of_a_machine).items() if os.environ.get(k) != v}
        )
        for rank, flags in enumerate(lines)
    ]
    for process in started:
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 2, text
        assert "--save_every_n_steps 4 and 3" in text and "machine 1" in text and "Traceback" not in text
    assert not (tmp_path / "out0").exists() and not (tmp_path / "out1").exists()
