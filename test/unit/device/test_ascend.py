"""Why torch_npu cannot be used: the texts that its libraries raise, and the device files, each with its remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from refusals import names

from difftrain.device import ascend, choice


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without an NPU, CANN or their variables, whose /dev and install folder can be filled."""
    for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for folder in ("dev", "Ascend"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(ascend, "DEV", tmp_path / "dev")
    monkeypatch.setattr(ascend, "ROOTS", (tmp_path / "Ascend",))
    return tmp_path


@pytest.mark.parametrize(
    ("error", "cause", "remedy"),
    [
        (
            ImportError("libhccl.so: cannot open shared object file: No such file or directory"),
            "libhccl.so, of CANN",
            "install CANN",
        ),
        (
            OSError("libascend_hal.so: cannot open shared object file: No such file or directory"),
            "libascend_hal.so, of the Ascend driver",
            "mount /usr/local/Ascend/driver/lib64",
        ),
        (
            ImportError("x/libtorch_npu.so: undefined symbol: _ZN2at8internalE"),
            "2.13.0+cpu (_ZN2at8internalE",
            "torch_npu==2.13.0",
        ),
        (
            ImportError("x/libtorch_npu.so: undefined symbol: aclrtNewThing"),
            "lacks aclrtNewThing, which torch_npu 2.13.0",
            "install CANN 9.2.0",
        ),
        (
            RuntimeError("Two accelerators cannot be used at the same time in PyTorch: npu and cuda."),
            "npu and cuda",
            "CPU build",
        ),
        (RuntimeError("Initialize:aclInit, error code is 507008\nmore"), "507008", "difftrain doctor"),
        (AttributeError(), "AttributeError", "difftrain doctor"),
    ],
)
def test_what_its_libraries_raise(error: Exception, cause: str, remedy: str) -> None:
    why = ascend.why_not_loaded(error, "2.13.0", "2.13.0+cpu")
    assert cause in why.cause and remedy in why.remedy and "\n" not in why.cause


@pytest.mark.parametrize("name", ["cann/set_env.sh", "ascend-toolkit/set_env.sh", "nnae/set_env.sh"])
def test_a_cann_that_is_installed_is_to_be_sourced(machine: Path, name: str) -> None:
    script = machine / "Ascend" / name
    script.parent.mkdir()
    script.write_text("")
    assert ascend.set_env_script() == script
    error = ImportError("libascendcl.so: cannot open shared object file: No such file or directory")
    assert f"source {script}" in ascend.why_not_loaded(error, "2.13.0", "2.13.0").remedy


def test_the_running_cann_comes_first(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "mine").mkdir()
    for script in (machine / "mine" / "set_env.sh", machine / "Ascend" / "set_env.sh"):
        script.write_text("")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(machine / "mine"))
    assert ascend.set_env_script() == machine / "mine" / "set_env.sh"


def test_no_device_file() -> None:
    why = ascend.why_none_seen()
    assert "no /dev/davinci*" in why.cause and "npu-smi info" in why.remedy
    assert "--device=/dev/davinci0 --device=/dev/davinci_manager" in why.remedy


def test_hidden_devices(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "dev" / "davinci0").write_text("")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "7")
    why = ascend.why_none_seen()
    assert names(why.cause, "ASCEND_RT_VISIBLE_DEVICES='7'", "1") and "unset it" in why.remedy


def test_device_files_without_a_right(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("davinci0", "davinci10", "davinci_manager"):
        (machine / "dev" / name).write_text("")
    assert choice.nodes("npu") == 2  # the manager is none
    assert names(ascend.why_none_seen().cause, "2 device files")
    closed = str(machine / "dev" / "davinci_manager")
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != closed and allowed(path, mode))
    assert ascend.without_right() == [closed]
    why = ascend.why_none_seen()
    assert closed in why.cause and "usermod -aG HwHiAiUser" in why.remedy


def test_a_broken_driver_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise KeyError("device")

    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(choice.ascend, "version", lambda name: None)
    monkeypatch.setattr(choice, "load_npu", broken)
    found = choice.find("npu")
    assert found.count == 0 and names(found.why_not, "torch_npu", "'device'") and found.remedy
