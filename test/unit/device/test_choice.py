"""Which device is taken, what is said where one is missing, and what the visible-devices variables do."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from difftrain.contracts import ConfigFault
from difftrain.device import ascend, choice, choose, versions

LIBRARY = str(Path(choice.__file__).resolve().parents[2])
BARE = not any(choice.nodes(kind) for kind in ("npu", "cuda")) and importlib.util.find_spec("torch_npu") is None
bare_machine = pytest.mark.skipif(not BARE, reason="an accelerator, or torch_npu, is on this machine")


def _python(code: str, *paths: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([LIBRARY, *paths]), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@bare_machine
def test_the_probe_of_a_bare_machine_imports_no_torch() -> None:
    code = (
        "import runpy, sys; runpy.run_module('difftrain.device', run_name='__main__');"
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    ended = _python(code)
    assert (ended.returncode, ended.stdout) == (0, "cpu 1\n"), ended.stderr


@bare_machine
def test_auto_takes_the_cpu_and_says_why() -> None:
    device = choose()
    assert (device.kind, device.reason) == ("cpu", "no accelerator found")
    assert choose(local_rank=5, local_size=8).torch_device == torch.device("cpu")  # as many processes as wanted


def test_the_cpu_as_asked_for() -> None:
    assert choose("cpu").reason == "as asked for"


@bare_machine
@pytest.mark.parametrize(("kind", "told"), [("npu", "torch_npu is not installed"), ("cuda", "torch")])
def test_a_missing_kind_is_a_fault_and_no_fallback(kind: str, told: str) -> None:
    with pytest.raises(ConfigFault) as caught:
        choose(kind)
    assert f"--device: {kind} asked for, but" in str(caught.value) and told in str(caught.value)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigFault, match=r"--device: got 'gpu' \(one of auto, npu, cuda, cpu\)"):
        choose("gpu")


@pytest.fixture
def broken_npu(tmp_path: Path) -> str:
    """Make a torch_npu that cannot be loaded, as the wheel without CANN."""
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    return str(tmp_path)


@bare_machine
def test_torch_npu_without_a_device_is_named_and_no_error(broken_npu: str) -> None:
    code = """
import os, sys
from difftrain.device import choose, hold_autoload, probe
from difftrain.contracts import ConfigFault

hold_autoload()
assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
assert choose("cpu").kind == "cpu" and "torch_npu" not in sys.modules
device = choose()
print(device.kind, "|", device.reason)
print(probe())
try:
    choose("npu")
except ConfigFault as fault:
    print(fault)
"""
    ended = _python(code, broken_npu)
    why, remedy = "torch_npu cannot be loaded: libhccl.so, of CANN, was not found", ascend.source_cann()
    told = [
        f"cpu | no npu: {why} ({remedy})",
        "cpu 1",
        f"  --device: npu asked for, but {why} ({remedy}; or leave --device=auto)",
    ]
    assert ended.stdout.splitlines() == told, ended.stderr


@bare_machine
def test_a_torch_npu_for_another_torch_is_named_and_never_imported(tmp_path: Path) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise SystemExit('imported')\n")
    about = tmp_path / "torch_npu-2.7.1.post2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.7.1.post2\n")
    ended = _python("from difftrain.device import choose; print(choose().reason)", str(tmp_path))
    assert "no npu: torch_npu 2.7.1.post2 needs torch 2.7.1, found torch" in ended.stdout, ended.stderr
    assert f"pip install torch_npu=={versions.torch_npu_for(torch.__version__)}, or torch==2.7.1" in ended.stdout


@bare_machine
def test_a_torch_npu_that_cannot_be_used_is_hidden_from_other_libraries(broken_npu: str) -> None:
    code = """
import importlib.util
from difftrain.contracts import ConfigFault
from difftrain.device.choice import choose, hide_unusable_npu

try:
    hide_unusable_npu("npu")
except ConfigFault as fault:
    print(fault)
assert importlib.util.find_spec("torch_npu") is not None
hide_unusable_npu("auto")
assert importlib.util.find_spec("torch_npu") is None
try:
    import torch_npu
except ModuleNotFoundError:
    print(choose().reason)
from transformers.utils import is_torch_npu_available
assert not is_torch_npu_available()
"""
    ended = _python(code, broken_npu)
    assert ended.returncode == 0, ended.stderr
    why = "torch_npu cannot be loaded: libhccl.so, of CANN, was not found"
    asked, reason = ended.stdout.splitlines()
    assert f"--device: npu asked for, but {why}" in asked and f"no npu: {why}" in reason


@bare_machine
def test_a_torch_npu_that_is_not_asked_for_is_never_imported(tmp_path: Path) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise SystemExit('imported')\n")
    code = """
import importlib.util
from difftrain.device.choice import hide_unusable_npu
hide_unusable_npu("cpu")
assert importlib.util.find_spec("torch_npu") is None
hide_unusable_npu("auto")  # what is hidden stays so
"""
    ended = _python(code, str(tmp_path))
    assert ended.returncode == 0, ended.stderr


def _found(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> list[tuple[str, int, int]]:
    """Let `count` devices of a kind be found; return the list of what was then taken."""
    taken: list[tuple[str, int, int]] = []
    monkeypatch.setattr(
        choice, "find", lambda asked: choice.ProbedDevice(asked, count if asked == kind else 0, "none here")
    )
    monkeypatch.setattr(choice, "worth_asking", lambda asked: True)
    monkeypatch.setattr(
        "difftrain.device.torch_device.Device", lambda kind, index, count, reason: taken.append((kind, index, count))
    )
    return taken


def test_every_process_of_a_machine_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = _found(monkeypatch, "cuda", 4)
    for rank in range(4):
        choose("auto", rank, 4)
    assert taken == [("cuda", rank, 4) for rank in range(4)]


@pytest.mark.parametrize(("rank", "size"), [(0, 8), (5, 8), (4, 5)])
def test_more_processes_than_devices_is_a_fault_that_names_what_would_fit(
    rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _found(monkeypatch, "npu", 4)
    with pytest.raises(
        ConfigFault, match=rf"--nproc_per_node: {size} npu devices wanted .* 4 found .*--nproc_per_node=4"
    ):
        choose("npu", rank, size)


@pytest.mark.parametrize(
    ("one", "visible", "index"),
    [("", "", 0), ("3", "", 3), ("5", "4,5,6", 1), ("0", "0", 0)],
)
def test_ascend_device_id_is_respected_in_a_single_process(
    one: str, visible: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = _found(monkeypatch, "npu", 8)
    monkeypatch.setenv("ASCEND_DEVICE_ID", one)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    choose("npu")
    choose("npu", local_rank=2, local_size=4)  # ranks of a job take their own, whatever is inherited
    assert taken == [("npu", index, 8), ("npu", 2, 8)]
    assert os.environ["ASCEND_DEVICE_ID"] == one and os.environ["ASCEND_RT_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize(
    ("one", "visible", "told"),
    [
        ("7", "4,5", "7 is not among ASCEND_RT_VISIBLE_DEVICES=4,5"),
        ("first", "", "got 'first'"),
        ("9", "", "10 npu devices wanted on this machine, 8 found"),
    ],
)
def test_ascend_device_ids_that_make_no_sense(
    one: str, visible: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _found(monkeypatch, "npu", 8)
    monkeypatch.setenv("ASCEND_DEVICE_ID", one)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigFault) as caught:
        choose("npu")
    assert told in str(caught.value)
