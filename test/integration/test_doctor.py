"""`difftrain doctor` as users run it, on the CPU: one JSON document, exit codes, ranks that sum, folders that are closed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIBRARY = Path(__file__).parents[2] / "library"
FIELDS = {"name": str, "verdict": str, "found": str, "remedy": str, "seconds": float}


def doctor(*words: str, expect: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "difftrain.cli", "doctor", *words],
        env={**os.environ, "PYTHONPATH": str(LIBRARY), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done


def document(*words: str, expect: int = 0, **env: str) -> dict[str, Any]:
    """Return the document, which must be all that is printed and be as docs/doctor.md says."""
    read = json.loads(doctor("--json", *words, expect=expect, **env).stdout)
    assert set(read) == {"schema", "difftrain", "asked", "checks", "summary"} and read["schema"] == 1
    for check in read["checks"]:
        assert {name: type(value) for name, value in check.items()} == FIELDS, check
        assert check["verdict"] in ("ok", "note", "wrong") and (check["remedy"] or check["verdict"] != "wrong")
    counts = {verdict: sum(c["verdict"] == verdict for c in read["checks"]) for verdict in ("ok", "note", "wrong")}
    assert counts.items() <= read["summary"].items() and read["summary"]["exit_code"] == expect
    return read


def test_a_machine_that_can_train(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(b"x")
    folders = [f"--{name}={tmp_path / place}" for name, place in (("train_data_dir", "data"), ("output_dir", "out"))]
    left_out = ("speed", "imports")
    from difftrain.cli.doctor.runner import CHECKS

    wanted = ",".join(name for name in CHECKS if name not in left_out)
    read = document("--device=cpu", f"--checks={wanted}", *folders)
    names = {check["name"].split(".")[0] for check in read["checks"]}
    assert names == set(CHECKS) - {*left_out, *(() if "installation" in names else ("installation",))}
    found = {check["name"]: check for check in read["checks"]}
    assert {found[f"attention.{each}"]["verdict"] for each in ("fp32", "fp16", "bf16")} == {"ok"}
    assert " in fp32, fp16, bf16" in found["collective"]["found"]
    assert found["folders.data"]["verdict"] == "ok"


def test_what_is_wrong_is_named_and_is_the_exit_code(tmp_path: Path) -> None:
    asked = ["--checks=folders,launch", f"--train_data_dir={tmp_path / 'none'}", "--output_dir=/proc/closed"]
    found = {check["name"]: check for check in document(*asked, expect=1, RANK="1")["checks"]}
    assert os.strerror(errno.ENOENT) in found["folders.data"]["found"]
    assert "/proc/closed cannot be" in found["folders.output"]["found"]  # nobody can, root neither
    assert "WORLD_SIZE" in found["launch"]["found"] and "torchrun" in found["launch"]["remedy"]
    text = doctor(*asked, expect=1, RANK="1").stdout
    assert text.count("WRONG") == 3 and text.rstrip().splitlines()[-1].startswith("3 ") and text.count("-> ") >= 3


def test_ranks_that_cannot_meet_are_a_finding(tmp_path: Path) -> None:
    env = {"GLOO_SOCKET_IFNAME": "no_such_card"}
    (found,) = (
        c
        for c in document("--device=cpu", "--checks=collective", expect=1, **env)["checks"]
        if c["name"] == "collective"
    )
    assert found["verdict"] == "wrong" and "2 cpu processes (gloo) " in found["found"] and ": rank " in found["found"]
    assert "not connect" in found["found"]  # at once, and so it is said
    assert "GLOO_SOCKET_IFNAME" in found["remedy"]


def test_a_wrong_command_line() -> None:
    done = doctor("--device=gpu", "--fast", expect=2)
    assert done.stdout == "" and "2 faults" in done.stderr and "--device: got 'gpu'" in done.stderr


def test_a_device_that_is_not_there() -> None:
    kind = next((kind for kind in ("npu", "cuda") if _missing(kind)), None)
    if kind is None:
        pytest.skip("every kind of device is on this machine")
    read = document(f"--device={kind}", "--checks=attention", expect=1)
    names = [check["name"] for check in read["checks"]]
    assert f"devices.{kind}" in names and not any(name.startswith("attention") for name in names)


def _missing(kind: str) -> bool:
    from difftrain.device.choice import find

    return find(kind).count == 0
