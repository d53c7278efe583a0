"""Plant one fault after the other in a copy of the repository, and see that the tests which should notice do.

    python test/drills/planted_faults.py [--only WORD] [--list]

A fault is a line that somebody could have written. The copy's tests must pass without it and fail with it; one that goes
unnoticed, or whose line is not there any more, ends this with 1. About a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("library", "third_patch", "sd_scripts_xl", "configs", "benchmarks", "docs", "test", "pyproject.toml")
LIMIT_S = 600.0
PASSED, FAILED, STOPPED = 0, 1, 2  # pytest's exit codes: workers that stop at the first failure end with 2


@dataclass(frozen=True)
class PlantedFault:
    """A line as it is and as it would be wrong. file: below library/difftrain; tests: below test, with pytest's options."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


FAULTS = (
    PlantedFault(
        "gradients are averaged over the ranks",
        "engine/ddp.py", "dist.ReduceOp.SUM", "dist.ReduceOp.AVG",
        ("integration/test_engine_ddp.py", "-k", "summed_and_not_averaged"),
    ),
    PlantedFault(
        "a loss that is not finite reaches the weights",
        "engine/update.py", "torch.isfinite(norm).logical_not()", "torch.zeros_like(norm)",
        ("contracts/test_engine.py",),
    ),
    PlantedFault(
        "the loss is divided by the samples of one rank's count only",
        "engine/update.py", "terms[name] / counts.get(name, counts[COUNT])", "terms[name] / 1.0",
        ("contracts/test_engine.py",),
    ),
    PlantedFault(
        "the average takes in the weights with the old ones' share",
        "diffusion/ema.py", "self.blend(named, 1.0 - self.decay_at(self.updates))", "self.blend(named, self.decay_at(self.updates))",
        ("unit/diffusion/test_ema.py",),
    ),
    PlantedFault(
        "off by one in the uses of a pass",
        "data/plan/sequential.py", "segment = np.searchsorted(starts, uses, side=\"right\") - 1",
        "segment = np.searchsorted(starts, uses, side=\"left\") - 1",
        ("unit/data/test_repeats.py", "unit/data/test_plan.py"),
    ),
    PlantedFault(
        "every seed draws the same",
        "diffusion/draws.py", "self._key = key_of(seed, key, occurrence, purpose)", "self._key = key_of(0, key, occurrence, purpose)",
        ("unit/diffusion/test_draws.py",),
    ),
    PlantedFault(
        "a mask of the loss is inverted",
        "diffusion/losses.py", "weighed = loss.mean(1, keepdim=True) * mask",
        "weighed = loss.mean(1, keepdim=True) * (1 - mask)",
        ("unit/diffusion", "unit/models/test_sdxl_objective.py"),
    ),
    PlantedFault(
        "the velocity points the wrong way",
        "diffusion/flow.py", "return noise - x0", "return x0 - noise",
        ("unit/diffusion/test_flow.py",),
    ),
    PlantedFault(
        "a mirrored picture shares the entry of the picture as it is",
        "cache/manifest/address.py", "*shape, bool(flip), recipe.interpolation", "*shape, False, recipe.interpolation",
        ("unit/cache/test_manifest.py", "unit/cache/test_address.py"),
    ),
    PlantedFault(
        "a pair is found by its caption alone",
        "cache/serve.py", "joined_address((picture, text))", "joined_address((text, text))",
        ("integration/test_cache_pairs.py",),
    ),
    PlantedFault(
        "features in another dtype share an entry",
        "cache/manifest/address.py", "[VERSION, list(cut), fingerprint, storage]", "[VERSION, list(cut), fingerprint]",
        ("unit/cache/test_address.py",),
    ),
    PlantedFault(
        "the last row of a commit is dropped from the cache's journal",
        "cache/store/segment.py", "[rows.tobytes()]", "[rows[:-1].tobytes()]",
        ("unit/cache/test_damage.py", "unit/cache/test_segment.py"),
    ),
    PlantedFault(
        "a checkpoint's checksum is not compared",
        "checkpoint/commit.py", "if entry != manifest.files[name]:", "if False:",
        ("unit/checkpoint",),
    ),
    PlantedFault(
        "a checkpoint in the background is not copied before the next update",
        "engine/snapshot.py", "_copy(buffer, tensor.detach())", "buffer = tensor.detach()",
        ("unit/train/test_checkpoints.py",),
    ),
    PlantedFault(
        "averages in the background go on while they are written",
        "train/checkpoints.py", "self._buffers if copied else None", "None",
        ("unit/train/test_checkpoints.py",),
    ),
    PlantedFault(
        "a checkpoint counts before every rank has written",
        "train/checkpoints.py", "not wait and self._ranks.any(not pending.work.ended())", "not wait and not pending.work.ended()",
        ("unit/train/test_checkpoints.py",),
    ),
    PlantedFault(
        "a manifest that was changed counts as whole",
        "checkpoint/commit.py", "if manifest.digest !=", "if False and manifest.digest !=",
        ("unit/checkpoint",),
    ),
    PlantedFault(
        "only the last checkpoint is kept",
        "checkpoint/retain.py", "ALWAYS_KEPT = 2", "ALWAYS_KEPT = 1",
        ("unit/checkpoint",),
    ),
    PlantedFault(
        "tokens stay in what is written",
        "config/secrets.py", "(?:key|token|secret|password|webhook_url)", "(?:key|secret|password|webhook_url)",
        ("unit/config/test_secrets.py",),
    ),
    PlantedFault(
        "a report's command line shows the tokens that were given",
        "report/environment.py", "for word in secrets.redact(argv))", "for word in argv)",
        ("unit/report/test_environment.py", "unit/report/test_report.py"),
    ),
    PlantedFault(
        "a report's configuration shows the login of an address",
        "report/report.py", 'environment.redacted(cfg.model_dump(mode="json"))', 'cfg.model_dump(mode="json")',
        ("unit/report/test_report.py",),
    ),
    PlantedFault(
        "captions are dropped where they should stay",
        "data/captions.py", "return lot < section.dropout_rate", "return lot > section.dropout_rate",
        ("unit/data/test_captions.py",),
    ),
    PlantedFault(
        "a picture is cut at its corner",
        "data/plan/buckets.py", "crop = ((resized[0] - reso[0]) // 2,", "crop = ((resized[0] - reso[0]) // 3,",
        ("unit/data/test_buckets.py",),
    ),
    PlantedFault(
        "latents are shifted after they are scaled",
        "models/vae/latents.py", "return (raw - shift) * self._scale", "return raw * self._scale - shift",
        ("contracts/test_vae_classes.py",),
    ),
    PlantedFault(
        "linear schedules end early",
        "optim/schedule.py", "return _warmed(w, lambda s: max(0.0, 1.0 - _progress(s, w, n)), warmup_type)", "return _warmed(w, lambda s: max(0.0, 1.0 - 1.1 * _progress(s, w, n)), warmup_type)",
        ("unit/optim/test_schedules.py", "contracts/test_schedule.py"),
    ),
    PlantedFault(
        "all groups of an optimizer have one rate",
        "optim/registry.py", '"lr": group.lr, "name"', '"lr": 1e-3, "name"',
        ("contracts/test_optimizer.py",),
    ),
    PlantedFault(
        "the keys of a data set hang on where it lies",
        "data/index/inspection.py", "record_key(work.source.name,", "record_key(work.source.root,",
        ("contracts/test_source.py",),
    ),
    PlantedFault(
        "a sampler draws from whatever generator there is",
        "sampling/draw.py", 'options = {"generator": generator} if', "options = {} if",
        ("contracts/test_sampler.py",),
    ),
    PlantedFault(
        "held-out records are measured under the weights as trained",
        "train/evaluating.py", "with self._model.averages.averaged():\n", "with self._model.engine.averaged_weights():\n",
        ("unit/train/test_evaluating.py",),
    ),
    PlantedFault(
        "FPS leaves the waiting for data out",
        "report/clock.py", "return self.wall_s - self.wait_s", "return self.wall_s",
        ("unit/report/test_clock.py",),
    ),
    PlantedFault(
        "a key that nobody knows is ignored",
        "config/schema/section.py", 'extra="forbid"', 'extra="ignore"',
        ("unit/config/test_toml.py",),
    ),
    PlantedFault(
        "a device is named outside its room",
        "optim/muon.py", "from __future__ import annotations\n", 'from __future__ import annotations\n\nHERE = "npu:0"\n',
        ("house/test_layers.py",),
    ),
    PlantedFault(
        "a room imports one above it",
        "data/recipe.py", "from __future__ import annotations\n",
        "from __future__ import annotations\n\nimport difftrain.train.loop  # noqa: F401\n",
        ("house/test_layers.py",),
    ),
    PlantedFault(
        "attention keeps what its mask hides",
        "device/attend.py", "masked_fill(mask.logical_not(), -math.inf)", "masked_fill(mask, -math.inf)",
        ("unit/device/test_attention.py",),
    ),
)  # fmt: skip


def main() -> int:
    """Plant what was asked for; return 1 where a fault goes unnoticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name or file has this in it")
    parser.add_argument("--list", action="store_true", help="name the faults, plant none")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if options.only in fault.name or options.only in fault.file]
    if options.list:
        for fault in chosen:
            print(f"{fault.file}: {fault.name}")
        return 0
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder, "repository")
        _copy_repository(copy)
        unnoticed = [fault.name for fault in chosen if not _is_noticed(fault, copy)]
    print(f"{len(chosen) - len(unnoticed)} of {len(chosen)} planted faults were noticed")
    return int(bool(unnoticed))


def _copy_repository(copy: Path) -> None:
    copy.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "output", ".*")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy / name)


def _is_noticed(fault: PlantedFault, copy: Path) -> bool:
    """Run a fault's tests without it and with it, and say what came of that."""
    began, path = time.monotonic(), copy / "library" / "difftrain" / fault.file
    right = path.read_text(encoding="utf-8")
    if right.count(fault.right) != 1:
        print(f"LOST       {fault.name}: {fault.file} has {fault.right!r} {right.count(fault.right)} times")
        return False
    before, output = _run_tests(fault, copy)
    if before != PASSED:
        print(f"BROKEN     {fault.name}: its tests end with {before} without it\n{output[-2000:]}")
        return False
    path.write_text(right.replace(fault.right, fault.wrong), encoding="utf-8")
    try:
        after, output = _run_tests(fault, copy, "-x")
    finally:
        path.write_text(right, encoding="utf-8")
    by = next((line for line in output.splitlines() if line.startswith("FAILED")), "").partition(" - ")[0]
    if after not in (FAILED, STOPPED) or not by:
        print(f"UNNOTICED  {fault.name}: its tests end with {after}\n{output[-1000:] if after else ''}")
        return False
    print(f"noticed    {fault.name} ({time.monotonic() - began:.0f} s): {by.removeprefix('FAILED ')}", flush=True)
    return True


def _run_tests(fault: PlantedFault, copy: Path, *more: str) -> tuple[int, str]:
    words = [
        f"test/{word}" if word.startswith(("unit/", "contracts/", "integration/")) else word for word in fault.tests
    ]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "-q", *more, *words]
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
