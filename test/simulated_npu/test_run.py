"""The command that everything here runs under."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUM = "import torch; print(torch.ones(3, device='npu:1').sum().item())"


def _run(*words, **env):
    return subprocess.run([HERE / "run", *words], env=os.environ | env, capture_output=True, text=True)


def test_children_of_children_see_the_devices_and_write_their_counts(tmp_path):
    code = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {SUM!r}]))"
    done = _run("--devices=2", f"--counts={tmp_path}/c", sys.executable, "-c", code)
    assert done.stdout.strip() == "3.0", done.stderr
    counts = [json.loads(path.read_text()) for path in tmp_path.glob("c.*.json")]
    assert any(each.get("aten::sum") == 1 for each in counts)


def test_the_exit_code_is_the_command_s():
    assert _run(sys.executable, "-c", "raise SystemExit(7)").returncode == 7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device=2", sys.executable, "-c", ""], "no switch --device=2"),
        (["--cann=6.3", sys.executable, "-c", ""], "no CANN 6.3 is played"),
        ([], "--devices=N"),
    ],
)
def test_wrong_words_are_named(words, said):
    done = _run(*words)
    assert done.returncode == 2
    assert said in done.stdout + done.stderr


def test_a_python_without_torch_is_named():
    done = subprocess.run([sys.executable, "-S", "-I", HERE / "build.py"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "has no torch; the simulated NPU needs torch 2.13.0" in done.stderr


# What is made is copied from the build that these tests run on, which was compiled; noted is how often.
BUILD = """
import shutil, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import build
def make(folder, torch):
    with (folder.parent / "made").open("a") as note:
        note.write("x")
    time.sleep(2)  # the other comes meanwhile
    shutil.copytree(sys.argv[2], folder / "lib")
build.make = make
print(build.main())
"""


def test_an_interrupted_build_is_made_again(tmp_path):
    """Half a build does not count: without its mark, the folder is made anew. Two at once make one."""
    whole = Path(os.environ["SIMULATED_NPU_LIBRARIES"]).parent
    half = tmp_path / "difftrain" / whole.name
    (half / "lib").mkdir(parents=True)
    (half / "lib" / "libascendcl.so").write_text("torn")
    command = [sys.executable, "-c", BUILD, HERE, whole / "lib"]
    both = [
        subprocess.Popen(command, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)}, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert {each.communicate()[0].strip() for each in both} == {str(half)}
    assert (half.parent / "made").read_text() == "x"
    assert (half / "ready").exists()
    assert (half / "lib" / "libascendcl.so").read_bytes()[:4] == b"\x7fELF"
    assert sorted(path.name for path in (half / "lib").iterdir()) == sorted(
        path.name for path in (whole / "lib").iterdir()
    )
