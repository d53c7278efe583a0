"""How a process finds its devices: without torch, with a torch_npu that cannot be used, and with none that is asked for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from refusals import is_about, names

from difftrain.device import ascend, choice, versions

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
    taken, counted, asked = ended.stdout.splitlines()
    why = ("npu", "torch_npu", "libhccl.so", ascend.source_cann())
    assert taken.startswith("cpu | ") and names(taken, *why) and counted == "cpu 1", ended.stderr
    assert is_about(asked, "--device", *why, "--device=auto"), ended.stderr


@bare_machine
def test_a_torch_npu_for_another_torch_is_named_and_never_imported(tmp_path: Path) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise SystemExit('imported')\n")
    about = tmp_path / "torch_npu-2.7.1.post2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.7.1.post2\n")
    ended = _python("from difftrain.device import choose; print(choose().reason)", str(tmp_path))
    assert names(ended.stdout, "npu", "torch_npu 2.7.1.post2", "torch 2.7.1", f"torch {torch.__version__}"), (
        ended.stderr
    )
    assert names(ended.stdout, f"torch_npu=={versions.torch_npu_for(torch.__version__)}", "torch==2.7.1")


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
    asked, reason = ended.stdout.splitlines()
    why = ("npu", "torch_npu", "libhccl.so")
    assert is_about(asked, "--device", *why) and names(reason, *why)


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
