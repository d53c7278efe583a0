"""Run directories of machines that have disks of their own: one name for all, and what all of them have whole."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

from difftrain.testing.spawn import run_ranks

HERE = __file__


def two_machines(folder: str) -> None:
    """Settle as two machines: a new run, its newest checkpoint that both have, and one that only the first has."""
    from difftrain import checkpoint
    from difftrain.config.schema.sections import TrainConfig
    from difftrain.contracts import ConfigFault
    from difftrain.device import choose
    from difftrain.distributed.launch import Launch
    from difftrain.distributed.ranks import Ranks
    from difftrain.train.run_dir import resolve_run_directory

    launch = Launch.from_environment()
    with Ranks.open(launch, choose("cpu", launch.local_rank, launch.local_size), timeout_min=1) as both:
        ranks = dataclasses.replace(both, local_rank=0, local_size=1)
        base = Path(folder) / f"disk{ranks.rank}"

        def settled(resume: str | None) -> TrainConfig:
            save = {"output_dir": str(base), "run_dirs": True, "naming": "steps", "resume": resume}
            return resolve_run_directory(TrainConfig.model_validate({"save": save}), ranks)

        def write(into: Path) -> list[Path]:
            (into / f"part{ranks.rank}").write_text("x")
            return [into / f"part{ranks.rank}"]

        run = settled(None).output_dir
        for step in (4, 8):
            checkpoint.commit(run, f"global_step{step}", write, ranks, {"step": step})

        def told(resume: str) -> str:
            """Return the name of what is gone on from, or the fault; nobody goes ahead before all have seen it."""
            try:
                return Path(str(settled(resume).save.resume)).name
            except ConfigFault as fault:
                return fault.faults[0].what
            finally:
                ranks.barrier()

        found = [run.name, told("latest")]
        if ranks.rank == 1:
            (run / "global_step8" / "part1").write_text("y")
        found += [told("latest"), told(run.name), told("8"), told(f"{run.name}/global_step8")]
        if ranks.rank == 1:
            shutil.rmtree(run / "global_step4")
        found.append(told("latest"))
    print(json.dumps(found))


def test_machines_with_disks_of_their_own_go_on_from_what_all_have_whole(tmp_path: Path) -> None:
    told = [json.loads(ended.out.splitlines()[-1]) for ended in run_ranks(2, f"{HERE}::two_machines", tmp_path)]
    assert told[0][:4] == told[1][:4] == [told[0][0], "global_step8", "global_step4", "global_step4"]
    assert all("step 8: " in each[4] for each in told)
    assert all(re.search("global_step8 .*: rank 1: part1 .*checksum", each[5]) for each in told)
    assert all("no checkpoint" in each[6] for each in told)
    assert [path.name for path in (tmp_path / "disk1").iterdir()] == [told[0][0]]
