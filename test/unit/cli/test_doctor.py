"""The doctor: checks that hang, crash or raise are findings; what is judged, and that each finding has its remedy."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from refusals import is_about, names

from difftrain.cli import doctor
from difftrain.cli.doctor import folders, machine, runner
from difftrain.cli.doctor.runner import CHECKS, Check, DoctorReport
from difftrain.cli.doctor.worker import findings
from difftrain.contracts.errors import ConfigFault, Fault
from difftrain.device import ascend
from difftrain.device.health import Context, HealthFinding, install, numerics, variables

ASCEND = (
    "ASCEND_DEVICE_ID", "ASCEND_GLOBAL_LOG_LEVEL", "ASCEND_HOME_PATH", "ASCEND_LAUNCH_BLOCKING", "ASCEND_OPP_PATH",
    "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_SLOG_PRINT_TO_STDOUT", "ASCEND_TOOLKIT_HOME", "HCCL_CONNECT_TIMEOUT",
    "HCCL_EVENT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "HCCL_IF_IP", "HCCL_WHITELIST_DISABLE", "INF_NAN_MODE_ENABLE",
    "INF_NAN_MODE_FORCE_DISABLE", "TASK_QUEUE_ENABLE", "CUDA_LAUNCH_BLOCKING",
)  # fmt: skip


def by_name(found: Iterable[HealthFinding]) -> dict[str, HealthFinding]:
    """Return the findings by what they are about; every one that is not fine says what to do."""
    out = {one.about: one for one in found}
    assert all(one.remedy for one in out.values() if one.verdict == "wrong"), out
    return out


# ------------------------------------------------------------------ the process of the checks

STRANGE = """
import ctypes, os, time
from difftrain.contracts.errors import ConfigFault, Fault
from difftrain.device.health import HealthFinding

def fine(context):
    yield HealthFinding("ok", f"asked for {context.kind}", about="one")
    yield HealthFinding("note", "beside", "nothing", "two")

def raises(context):
    yield HealthFinding("ok", "so far")
    raise RuntimeError("the card is gone\\nand more")

def refuses(context):
    raise ConfigFault([Fault("--x", "is wrong", "give another")])

def crashes(context):
    print("Segmentation is near", flush=True)
    ctypes.string_at(0)

def hangs(context):
    print("waiting for the driver", flush=True)
    time.sleep(600)

def exits(context):
    os._exit(3)
"""


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checks that behave badly, where the worker finds them."""
    (tmp_path / "strange.py").write_text(STRANGE)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    return tmp_path


def test_what_hangs_crashes_or_raises_is_a_finding_and_the_rest_goes_on(strange: Path) -> None:
    kinds = ("fine", "raises", "crashes", "refuses", "hangs", "exits", "fine")
    checks = {f"{name}{place}": Check(f"strange:{name}", 1.5) for place, name in enumerate(kinds)}
    checks["nowhere"] = Check("strange:nothing", 1.5)
    start = time.monotonic()
    found = {report.name: report for report in runner.examine(checks, Context("cpu"))}
    assert time.monotonic() - start < 30
    assert list(found) == [
        "fine0.one", "fine0.two", "raises1", "crashes2", "refuses3", "hangs4", "exits5", "fine6.one", "fine6.two",
        "nowhere",
    ]  # fmt: skip
    assert found["fine0.one"][:3] == ("fine0.one", "ok", "asked for cpu")
    assert (
        found["raises1"].observed == "raises1: RuntimeError: the card is gone" and found["raises1"].verdict == "wrong"
    )
    assert "died of SIGSEGV" in found["crashes2"].observed and "Segmentation is near" in found["crashes2"].observed
    assert found["refuses3"][1:4] == ("wrong", "--x: is wrong", "give another")
    assert names(found["hangs4"].observed, "hangs4", "1.5 s") and "waiting for the driver" in found["hangs4"].observed
    assert names(found["exits5"].observed, "exits5", "code 3")
    assert "AttributeError" in found["nowhere"].observed
    assert all(report.remedy for report in found.values() if report.verdict == "wrong")


def test_a_device_that_hangs_is_left_alone(strange: Path) -> None:
    checks = {name: Check("strange:hangs", 0.2, "device") for name in ("a", "b")}
    checks |= {"c": Check("strange:fine", 5.0, "device"), "d": Check("strange:fine", 5.0)}
    found = list(runner.examine(checks, Context()))
    assert [report.name for report in found] == ["a", "b", "devices", "d.one", "d.two"]
    assert found[2].observed.endswith(": c")


def test_a_process_that_has_told_all_may_end_by_itself(strange: Path) -> None:
    left = strange / "left"
    (strange / "slow_end.py").write_text(
        "import atexit, pathlib, time\n"
        f"atexit.register(lambda: (time.sleep(0.5), pathlib.Path({str(left)!r}).touch()))\n"
        "def check(context):\n    return []\n"
    )
    assert not list(runner.examine({"slow": Check("slow_end:check", 5.0)}, Context("cpu")))
    assert left.exists()


def test_without_a_device_none_is_looked_at() -> None:
    checks = {name: CHECKS[name] for name in ("devices", "memory", "overflow")}
    found = {report.name: report for report in runner.examine(checks, Context("npu"))}
    if "devices.chosen" in found and found["devices.chosen"].verdict == "ok":
        pytest.skip("an NPU is on this machine")
    assert found["devices.npu"].verdict == "wrong" and found["devices.npu"].remedy
    assert not {"memory", "overflow"} & {name.split(".")[0] for name in found}


def test_what_a_check_raises_comes_after_what_it_found(strange: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(strange))
    found = findings("raises", "strange:raises", Context())
    assert [one.verdict for one in found] == ["ok", "wrong"]


def test_without_torch_the_rest_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "installed", lambda name: None)
    found = list(runner.examine({"launch": CHECKS["launch"], "attention": CHECKS["attention"]}, Context()))
    assert [(report.name, report.verdict) for report in found] == [("devices", "wrong"), ("launch", "ok")]


# ------------------------------------------------------------------ the command line and what it prints


def test_the_command_line() -> None:
    assert doctor.read(["--device=cpu", "--quick"]) == {"device": ["cpu"], "quick": []}
    with pytest.raises(ConfigFault) as caught:
        doctor.read(["--device=gpu", "--chekcs=noise", "--checks=nosie", "stray"])
    expected = (("--device", "'gpu'"), ("--chekcs", "--checks"), ("--checks", "'nosie'"), ("--checks", "'stray'"))
    assert len(caught.value.faults) == len(expected)
    assert all(any(is_about(fault, *facts) for fault in caught.value.faults) for facts in expected), caught.value


def test_which_checks_are_done() -> None:
    assert doctor.chosen({}) == list(CHECKS)
    assert set(CHECKS) - set(doctor.chosen({"quick": []})) == {"speed", "collective"}
    assert doctor.chosen({"checks": ["speed,system"]}) == ["system", "devices", "speed"]


def test_the_page_describes_every_check_and_flag() -> None:
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert [name for name in CHECKS if f"\n| `{name}` | " not in page] == []
    assert [name for name in doctor.FLAGS if f"`--{name}" not in page] == []
    assert f'"schema": {doctor.SCHEMA}' in page


REPORTS = [
    DoctorReport("system.host", "ok", "2 cores", "", 0.1),
    DoctorReport("variables", "note", "a word " * 40, "set another " * 20, 0.2),
    DoctorReport("overflow", "wrong", "it saturates", "unset it", 0.3),
]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[DoctorReport]:
    """Let the doctor find these, whatever it looks at."""
    found = list(REPORTS)
    monkeypatch.setattr(doctor, "examine", lambda checks, context: iter(found))
    return found


def test_findings_are_printed_with_their_remedies(
    examined: list[DoctorReport], capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "     ok  2 cores\n" in text and "  WRONG  it saturates\n         -> unset it\n" in text
    assert max(len(line) for line in text.splitlines()) <= 120
    assert text.splitlines()[-1].startswith("1 ")
    del examined[2]
    assert doctor.main([]) == 0 and "fix" not in capsys.readouterr().out


def test_one_json_document_and_nothing_else(examined: list[DoctorReport], capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json", "--device=cpu"]) == 1
    read = json.loads(capsys.readouterr().out)
    assert set(read) == {"schema", "difftrain", "asked", "checks", "summary"}
    assert (read["schema"], read["asked"]) == (1, "cpu")
    assert read["checks"][2] == REPORTS[2].record()
    assert {**read["summary"], "seconds": 0} == {"ok": 1, "note": 1, "wrong": 1, "seconds": 0, "exit_code": 1}


# ------------------------------------------------------------------ what is judged


def test_packages_that_are_missing_old_or_harmful(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch": None, "numpy": "1.20", "torchvision": "0.1"}
    monkeypatch.setattr(machine, "installed", lambda name: there.get(name, "9999.0"))
    found = by_name(machine.check_packages(Context()))
    assert found["torch"].verdict == "wrong" and "not installed" in found["torch"].observed
    assert names(found["numpy"].observed, "numpy 1.20", "1.26") and found["numpy"].verdict == "wrong"
    assert found["torchvision"].verdict == "note" and "pip uninstall torchvision" in found["torchvision"].remedy


def test_packages_that_do_not_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apart.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(machine, "_IMPORTS", {"diffusers": ("apart", "x"), "fine": ("json", "dumps")})
    monkeypatch.setattr(machine, "installed", lambda name: "0.1" if name == "torchvision" else None)
    found = by_name(machine.imports(Context()))
    assert (
        "torchvision::nms" in found["diffusers"].observed and found["diffusers"].remedy == "pip uninstall torchvision"
    )
    assert found["fine"].verdict == "ok"


def test_limits_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    limits = {(100, 4096): "wrong", (1024, 1 << 20): "note", (1 << 20, 1 << 20): "ok", (-1, -1): "ok"}
    for pair, verdict in limits.items():
        monkeypatch.setattr(resource, "getrlimit", lambda what, pair=pair: pair)
        assert by_name(machine._files())["files"].verdict == verdict, pair
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: type("D", (), {"total": 64 << 20}))
    if Path("/dev/shm").is_dir():
        assert "--shm-size" in by_name(machine._shared())["shared_memory"].remedy
    for text, verdict in {"1": None, "3,2": "note", "many": "wrong"}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        found = by_name(machine._threads(2))
        assert (found["threads"].verdict if found else None) == verdict, text


def test_launch_variables_that_are_half_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert by_name(machine.launch(Context()))[""].verdict == "ok"
    monkeypatch.setenv("RANK", "1")
    found = by_name(machine.launch(Context()))[""]
    assert found.verdict == "wrong" and "WORLD_SIZE" in found.observed and "torchrun" in found.remedy


def test_folders_that_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(b"x")
    asked = Context(
        data_dir=str(tmp_path / "data"), cache_dir=str(tmp_path / "c"), output_dir=str(tmp_path / "o" / "p")
    )
    found = by_name(folders.check(asked))
    assert "1 entries" in found["data"].observed and found["data"].verdict == "ok"
    assert names(found["output"].observed, tmp_path / "o" / "p", "made") and found["output"].verdict in ("ok", "note")
    assert names(found["cache"].observed, tmp_path / "c", "made")
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "a.png"], "nothing is left behind"


@pytest.mark.parametrize(("url", "verdict"), [("memory://cache", "ok"), ("nowhere://cache", "wrong")])
def test_a_cache_on_an_object_store_is_no_folder_that_is_written(url: str, verdict: str) -> None:
    found = by_name(folders.check(Context(cache_dir=url)))
    assert found["cache_url"].verdict == verdict and url in found["cache_url"].observed
    assert names(found["cache"].observed, "user's cache") and url not in found["cache"].observed


def test_folders_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    asked = Context(data_dir=str(tmp_path / "none"), cache_dir=str(tmp_path / "file" / "x"), output_dir=str(tmp_path))

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folders.tempfile, "mkstemp", refuse)
    found = by_name(folders.check(asked))
    assert {name: found[name].verdict for name in ("data", "cache", "output")} == dict.fromkeys(
        ("data", "cache", "output"), "wrong"
    )
    assert names(found["cache"].observed, tmp_path / "file", "file") and "Permission denied" in found["output"].observed
    assert "is empty" in by_name(folders._readable(tmp_path / "empty"))["data"].observed


def test_a_full_disk_and_a_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(free: float):
        return lambda path: type("D", (), {"free": int(free * 2**30), "total": 2**40})

    for free, verdict, told in (
        (0.1, "wrong", "full"),
        (20.0, "note", "checkpoints of SDXL"),
        (500, "ok", ""),
    ):
        monkeypatch.setattr(folders.shutil, "disk_usage", usage(free))
        found = by_name(folders._writable(tmp_path, "output", "--output_dir"))["output"]
        assert found.verdict == verdict and told in found.observed, found


def test_kinds_of_disks(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:2 / / rw shared:1 - ext4 /dev/vda rw\n"
        f"30 22 0:9 / {tmp_path}/net rw shared:2 master:1 - nfs4 server:/x rw\n"
        f"31 22 0:9 / {tmp_path}/net/a\\040b rw - fuse.sshfs x rw\n"
        "broken line\n"
    )
    for folder, kind in {
        "": "ext4",
        "net": "nfs4",
        "net/x": "nfs4",
        "netto": "ext4",
        "net/a b/c": "fuse.sshfs",
    }.items():
        assert folders.kind_of(tmp_path / folder, mounts) == kind, folder
    assert folders.kind_of(tmp_path, tmp_path / "none") == ""
    assert folders.is_network("nfs4") and folders.is_network("fuse.sshfs") and not folders.is_network("ext4")
    assert folders.kind_of(Path("/")) != ""


def test_each_network_disk_has_its_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "kind_of", lambda folder: "nfs4")
    for about in ("data", "cache", "output"):
        found = by_name(folders._disk(tmp_path, about))[f"{about}_disk"]
        assert found.verdict == "note" and "nfs4" in found.observed and found.remedy


# ------------------------------------------------------------------ Ascend, on a machine without it


@pytest.fixture
def npu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has device files, and none of the variables."""
    for name in ASCEND:
        monkeypatch.delenv(name, raising=False)
    for folder in ("dev", "Ascend"):
        (tmp_path / folder).mkdir()
    for name in ("davinci0", "davinci1", *ascend.COMPANIONS):
        (tmp_path / "dev" / name).write_text("")
    monkeypatch.setattr(ascend, "DEV", tmp_path / "dev")
    monkeypatch.setattr(ascend, "ROOTS", (tmp_path / "Ascend",))
    return tmp_path


WITH = [
    ({}, "TASK_QUEUE_ENABLE", "note"),
    ({"TASK_QUEUE_ENABLE": "0"}, "TASK_QUEUE_ENABLE", "note"),
    ({"TASK_QUEUE_ENABLE": "7"}, "TASK_QUEUE_ENABLE", "wrong"),
    ({"HCCL_CONNECT_TIMEOUT": "60"}, "HCCL_CONNECT_TIMEOUT", "wrong"),
    ({"HCCL_CONNECT_TIMEOUT": "120"}, "HCCL_CONNECT_TIMEOUT", "note"),
    ({"HCCL_CONNECT_TIMEOUT": "1800"}, "HCCL_CONNECT_TIMEOUT", "ok"),
    ({"HCCL_EXEC_TIMEOUT": "soon"}, "HCCL_EXEC_TIMEOUT", "wrong"),
    ({"HCCL_EXEC_TIMEOUT": "0"}, "HCCL_EXEC_TIMEOUT", "note"),
    ({"HCCL_EXEC_TIMEOUT": "68"}, "HCCL_EXEC_TIMEOUT", "note"),
    ({"HCCL_EXEC_TIMEOUT": "1800"}, "HCCL_EXEC_TIMEOUT", "ok"),
    ({"HCCL_EXEC_TIMEOUT": "1800", "HCCL_EVENT_TIMEOUT": "1800"}, "HCCL_EVENT_TIMEOUT", "wrong"),
    ({"ASCEND_LAUNCH_BLOCKING": "1"}, "ASCEND_LAUNCH_BLOCKING", "note"),
    ({"ASCEND_HOME_PATH": "/nowhere/at/all"}, "ASCEND_HOME_PATH", "wrong"),
    ({"ASCEND_RT_VISIBLE_DEVICES": "0,0"}, "ASCEND_RT_VISIBLE_DEVICES", "wrong"),
    ({"ASCEND_RT_VISIBLE_DEVICES": "0,1", "ASCEND_DEVICE_ID": "5"}, "ASCEND_DEVICE_ID", "wrong"),
    ({"ASCEND_RT_VISIBLE_DEVICES": "0,1", "ASCEND_DEVICE_ID": "1"}, "ASCEND_DEVICE_ID", "note"),
    ({"INF_NAN_MODE_ENABLE": "0"}, "INF_NAN_MODE_ENABLE", "wrong"),
    ({"HCCL_IF_IP": "10.255.255.1"}, "HCCL_IF_IP", "wrong"),
    ({"HCCL_WHITELIST_DISABLE": "0"}, "HCCL_WHITELIST_DISABLE", "wrong"),
    ({"ASCEND_GLOBAL_LOG_LEVEL": "1"}, "ASCEND_GLOBAL_LOG_LEVEL", "note"),
    ({"ASCEND_SLOG_PRINT_TO_STDOUT": "1"}, "ASCEND_SLOG_PRINT_TO_STDOUT", "note"),
    ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING", "note"),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "about", "verdict"), WITH)
def test_variables(
    npu_machine: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], about: str, verdict: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = by_name(variables.check(Context()))
    assert found[about].verdict == verdict and all(value in found[about].observed for value in environ.values()), found
    assert verdict == "ok" or found[about].remedy


def test_variables_that_are_fine(npu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    monkeypatch.setenv("HCCL_IF_IP", "127.0.0.1")
    assert [one.verdict for one in variables.check(Context())] == ["ok"]
    with socket.socket() as probe:  # of every machine
        probe.bind(("127.0.0.1", 0))


def test_nothing_of_ascend_is_judged_where_it_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ascend, "DEV", tmp_path)
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "7")
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    assert list(install.check(Context())) == []
    assert [one.verdict for one in variables.check(Context())] == ["ok"]
    assert by_name(install.check(Context("npu")))["torch_npu"].verdict == "wrong"


@pytest.mark.parametrize(
    ("torch_npu", "cann", "driver", "wrong"),
    [
        ("2.13.0", "8.5.0", "25.5.0", set()),
        ("2.7.1", "8.5.0", "25.5.0", {"torch_npu"}),
        ("2.13.0", "7.0.0", "25.5.0", {"cann"}),
        ("2.13.0", None, None, {"cann"}),
        ("2.13.0", "8.5.0", "23.0.6", {"driver"}),
    ],
)
def test_versions_of_an_installation(
    npu_machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    torch_npu: str,
    cann: str | None,
    driver: str | None,
    wrong: set[str],
) -> None:
    monkeypatch.setattr(install.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(install.ascend, "version", {"torch_npu": torch_npu, "torch": "2.13.0+cpu"}.get)
    monkeypatch.setattr(install.host, "cann_version", lambda: cann)
    monkeypatch.setattr(install.host, "npu_driver", lambda: driver)
    monkeypatch.setattr(install.host, "npu_firmware", lambda: "7.5.0.1.129")
    monkeypatch.setattr(install.ascend, "found_apex", lambda: True)
    monkeypatch.setattr(install.ascend, "found_torchvision_npu", lambda: False)
    found = by_name(install.check(Context()))
    assert {about for about, one in found.items() if one.verdict == "wrong"} == wrong
    assert "7.5.0.1.129" in found["firmware"].observed and found["rights"].verdict == "ok"
    assert (found["apex"].verdict, found["torchvision_npu"].verdict) == ("ok", "ok")


def test_a_wheel_without_cann_says_what_to_source(npu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = npu_machine / "Ascend" / "cann" / "set_env.sh"
    script.parent.mkdir()
    script.write_text("")
    monkeypatch.setattr(install.host, "cann_version", lambda: None)
    found = by_name(install._cann())["cann"]
    assert found.verdict == "wrong" and f"source {script}" in found.remedy


def test_device_files_that_are_closed_or_missing(npu_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (npu_machine / "dev" / "hisi_hdc").unlink()
    found = by_name(install._rights())["rights"]
    assert found.verdict == "wrong" and "--device=/dev/hisi_hdc" in found.remedy
    monkeypatch.setattr(ascend.os, "access", lambda path, mode: False)
    assert "usermod -aG HwHiAiUser" in by_name(install._rights())["rights"].remedy


SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.5.0                   Version: 25.5.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 93.6        40                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3161 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | Alarm         | 94.1        41                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3161 / 65536         |
+===========================+===============+====================================================+
"""


def test_what_npu_smi_says_of_the_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install.npu_health() == {}
    tool = tmp_path / "npu-smi"
    (tmp_path / "table").write_text(SMI)
    tool.write_text(f"#!{sys.executable}\nprint(open({str(tmp_path / 'table')!r}).read())\n")
    tool.chmod(0o755)
    assert install.npu_health() == {"0": "OK", "1": "Alarm"}


# ------------------------------------------------------------------ numbers


def test_attention_that_forgets_its_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import difftrain.device as device_room

    real = device_room.attention
    monkeypatch.setattr(numerics, "_dtypes", lambda: {"fp32": torch.float32})
    assert [one.verdict for one in numerics.attention(Context("cpu"))] == ["ok"]
    monkeypatch.setattr(
        device_room, "attention", lambda q, k, v, mask, causal: real(q, k, v, None, causal), raising=False
    )
    (found,) = numerics.attention(Context("cpu"))
    assert found.verdict == "wrong" and "bool mask" in found.observed and found.remedy
    monkeypatch.setattr(
        device_room, "attention", lambda q, k, v, mask, causal: real(q, k, v, mask, False), raising=False
    )
    assert next(iter(numerics.attention(Context("cpu")))).verdict == "wrong"


def test_the_reference_is_torchs_formula() -> None:
    import torch
    import torch.nn.functional as F

    q, k, v = torch.randn(2, 4, 7, 8).double(), torch.randn(2, 2, 5, 8).double(), torch.randn(2, 2, 5, 8).double()
    mask = torch.rand(2, 1, 7, 5) > 0.4
    mask[..., 0] = True
    exact = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(numerics.reference(q, k, v, mask, False), exact)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(numerics.reference(q, k, v, None, True), exact)


def test_kernels_that_are_wrong_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.nn.functional as F

    from difftrain.device import fused_layers

    monkeypatch.setattr(numerics, "_dtypes", lambda: {"fp32": torch.float32})
    assert {one.verdict for one in numerics.kernels(Context("cpu"))} == {"ok"}

    def silu(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return a * F.silu(b)

    def never_skips(*args: object, found_inf: object, **settings: object) -> None:
        fused_layers.REGISTRY["adamw"].plain(*args, **settings)

    monkeypatch.setattr(fused_layers, "geglu", silu)
    monkeypatch.setattr(fused_layers, "adamw", never_skips)
    found = by_name(numerics.kernels(Context("cpu")))
    assert {about for about, one in found.items() if one.verdict == "wrong"} == {"geglu_fp32", "adamw_fp32"}


def test_overflow_that_saturates_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert [one.verdict for one in numerics.overflow(Context("cpu"))] == ["ok"]
    exp = torch.Tensor.exp
    monkeypatch.setattr(torch.Tensor, "exp", lambda x: exp(x).clamp(max=65504))
    (found,) = numerics.overflow(Context("cpu"))
    assert found.verdict == "wrong" and "65504" in found.observed and "INF_NAN_MODE_ENABLE" in found.remedy

    def refuse(device: object) -> None:
        raise ConfigFault([Fault("--mixed_precision=fp16", "it saturates", "bf16")])

    monkeypatch.setattr("difftrain.device.npu_settings.check_device", refuse)
    assert next(iter(numerics.overflow(Context("cpu")))).verdict == "wrong"


def test_precisions_and_small_facts() -> None:
    assert {one.verdict for one in numerics.precision(Context("cpu"))} == {"ok"}
    assert [one.verdict for one in machine.noise(Context("cpu"))] == ["ok"]
    assert len(list(machine.compiler(Context("cpu")))) == 1
    assert {one.about for one in install.check_devices(Context("cpu"))} == {"npu", "cuda", "cpu", "chosen"}
    assert {one.about for one in install.check_memory(Context("cpu"))} == {"memory"}
