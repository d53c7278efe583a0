"""The contract for scripts: build, damage, verify, repair, build again; what info says; what gc frees."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import warm
from doors import ROOT, write_pictures
from small_caches import flip

LIBRARY = str(ROOT / "library")


def tool(tmp_path: Path, *words: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run difftrain cache, under torchrun where there are several ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": LIBRARY, "XDG_CACHE_HOME": str(tmp_path / "home")}
    line = [sys.executable, *launcher, "-m", "difftrain.cli", "cache", *words]
    with (tmp_path / "errors").open("w+") as errors:
        process = warm.popen(line, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, cwd=tmp_path)
        output, _ = process.communicate(timeout=300)
        errors.seek(0)
        return subprocess.CompletedProcess(line, process.returncode, output, errors.read())


def built(tmp_path: Path, *flags: str, ranks: int = 1) -> str:
    line = ["--train_data_dir=data", "--resolution=64,64", "--init_from_config=tiny", "--seed=1", "--device=cpu"]
    done = tool(tmp_path, "build", *line, "--cache_dir=cache", *flags, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert "--cache_only: " in done.stdout
    return done.stdout


def said(tmp_path: Path, *words: str, code: int = 0) -> str:
    done = tool(tmp_path, *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_the_contract_for_scripts(tmp_path: Path) -> None:
    write_pictures(tmp_path / "data", 6)
    built(tmp_path, ranks=2)
    facts = json.loads(said(tmp_path, "info", "cache", "--json"))
    assert facts["entries"] == 6 + 7 + 7 and facts["rejects"] == 0  # the empty caption too
    assert 0 < facts["bytes"] <= facts["segments"]["bytes_on_disk"]
    assert facts["bytes_per_sample"]["moments"] == 32 * 8 * 8 * 4
    assert set(facts["bytes_per_sample"]) == {"moments", "hidden_1", "hidden_2", "pooled"}
    assert set(facts["fingerprints"]) == {"latents", "text_encoder_1", "text_encoder_2"}
    assert all(len(each) == 1 and each[0] for each in facts["fingerprints"].values())
    assert [use["whole"] for use in facts["uses"]] == [True] and facts["unused"] == {"entries": 0, "bytes": 0}

    whole = json.loads(said(tmp_path, "verify", "cache", "--json"))
    assert whole["whole"] and whole["entries"] >= facts["entries"]
    target = max((tmp_path / "cache" / "segments").glob("*.bin"), key=lambda path: path.stat().st_size)
    flip(target, target.stat().st_size // 2, 3)
    target_name = target.name.removesuffix(".bin")
    assert target_name in said(tmp_path, "verify", "cache", code=1)
    assert "1 damaged entries " in said(tmp_path, "repair", "cache")
    said(tmp_path, "verify", "cache")
    assert ", 1 to be " in built(tmp_path)
    said(tmp_path, "verify", "cache")
    assert json.loads(said(tmp_path, "info", "cache", "--json"))["entries"] == facts["entries"]


def test_another_configuration_is_another_use_until_it_is_forgotten(tmp_path: Path) -> None:
    write_pictures(tmp_path / "data", 4)
    built(tmp_path, "--cache_latents_to_disk")
    uses = tmp_path / "cache" / "uses"
    (first,) = uses.glob("*.json")
    os.utime(first, (0, first.stat().st_mtime - 40 * 86400))
    for path in [*(tmp_path / "data").glob("00[012].*")]:
        path.unlink()
    assert re.search(r"cache of latents: .* all ", built(tmp_path, "--cache_latents_to_disk"))
    assert len(list(uses.glob("*.json"))) == 2
    assert "0 entries removed" in said(tmp_path, "gc", "cache")
    freed = said(tmp_path, "gc", "cache", "--unused_days=30")
    assert first.stem in freed and re.search(r"1 rewritten, 3 entries .* 1 stay", freed) and not first.exists()
    said(tmp_path, "verify", "cache")
    assert re.search(r"cache of latents: .* all ", built(tmp_path, "--cache_latents_to_disk"))
