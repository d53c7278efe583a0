"""The launchers as a real job runs them, on tiny weights: files, exit codes, several cards and machines."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from launched import TINY, Launchers


def steps(output: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_accuracy_then_performance_on_two_processes_in_one_folder(launchers: Launchers) -> None:
    first = launchers.real("1m_1p", "--max_train_epoch=1", "--device_id=3")
    output = launchers.output(3)
    assert first.code == 0, first.text
    assert "(from" not in first.text and f" {output}" in first.text
    log = (output / "train_3.log").read_text()
    for pattern in (
        r"step=1 epoch=1 step_loss=[0-9.]+ avr_loss=",
        r"FPS: [0-9.]+$",
        r"Final Performance images/sec : [0-9.]+",
    ):
        assert re.search(pattern, log, re.MULTILINE), pattern
    case = dict(line.split(" = ") for line in next(output.glob("*_bs2_1p_perf.log")).read_text().splitlines())
    assert case["CaseName"] == f"{case['Network']}_bs2_1p_perf" and case["RankSize"] == "1"
    assert (output / "report.html").exists() and json.loads((output / "report.json").read_text())["finished"]

    # two processes, in a shell that has a rank's variables
    more = ("--nproc_per_node=2", "--max_train_epoch=4", "--performance", "--device_id=3")
    again = launchers.real("1m_8p", *more, RANK="5", WORLD_SIZE="9")
    assert again.code == 0, again.text
    aside = launchers.moved_aside(3)
    assert len(aside) == 1 and re.search(
        rf"finished run .*another configuration: .* {re.escape(str(aside[0]))}", again.text
    )
    assert (aside[0] / "report.json").exists()
    assert len(steps(output)) > len(steps(aside[0]))
    report = json.loads((output / "report.json").read_text())
    assert report["world_size"] == 2 and report["global_batch"] == 4


def test_a_stopped_run_goes_on_with_the_same_command(launchers: Launchers) -> None:
    flags = ("--max_train_steps=40", "--save_state", "--device_id=4", "--learning_rate=1e-4")
    command = (f"--dataset_name={launchers.pictures}", "--init_from_config=tiny", "--resolution=64", "--batch_size=2",
               "--min_bucket_reso=32", "--max_bucket_reso=128", "--max_data_loader_n_workers=0", "--log_every=1", *flags)  # fmt: skip
    output = launchers.output(4)
    process = launchers.start("1m_1p", *command)
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists() or len(steps(output)) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, text
    done = len(steps(output))
    assert 3 <= done < 40 and list(output.glob("*-state")), text
    rest = launchers.run("1m_1p", *command)
    assert rest.code == 0, rest.text
    assert "unfinished run" in rest.text
    assert steps(output) == list(range(1, 41)) and not launchers.moved_aside(4)


@pytest.mark.flags("device")
def test_faults_end_with_2_before_anything_starts(launchers: Launchers) -> None:
    done = launchers.real("1m_1p", "--learning_rte=1", "--nnodes=2", "--device_id=5", batch_size="two")
    assert done.code == 2 and not launchers.output(5).exists()
    assert "--learning_rte" in done.text and "mean --learning_rate" in done.text
    assert re.search(r"--nnodes: .*one machine, got 2", done.text)
    assert "Traceback" not in done.text and "torchrun" not in done.text


def test_a_model_without_data_and_data_without_a_model(launchers: Launchers, tmp_path: Path) -> None:
    assert "--dataset_name: is missing" in launchers.run("1m_1p", f"--model_name={tmp_path}").text
    only_data = launchers.run("1m_1p", f"--dataset_name={tmp_path}")
    assert only_data.code == 2 and "--model_name: is missing" in only_data.text


def test_bad_data_ends_with_2_through_torchrun(launchers: Launchers, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no picture here")
    done = launchers.real("1m_1p", f"--dataset_name={tmp_path}", "--max_train_steps=2", "--device_id=6")
    assert done.code == 2, done.text
    assert "ChildFailedError" not in done.text and "Traceback" not in done.text


@pytest.mark.flags("max_skipped_steps")
def test_failing_training_ends_with_1(launchers: Launchers) -> None:
    flags = ("--learning_rate=1e30", "--learning_rate_te1=1e30", "--max_skipped_steps=2", "--max_train_steps=12")
    done = launchers.real("1m_1p", *flags, "--device_id=7")
    assert done.code == 1, done.text
    assert "not finite" in done.text and re.search("rank 0 failed .*exit code 1", done.text)


def test_two_machines_stop_and_go_on_with_the_same_commands(launchers: Launchers) -> None:
    """On the loopback; one of them has its place from torchrun's variables, the other from flags."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = (f"--dataset_name={launchers.pictures}", *TINY, "--max_train_steps=40", "--save_state",
              "--master_ip=127.0.0.1", f"--master_port={port}", "--nproc_per_node=1", "--device_id=10")  # fmt: skip
    output = launchers.output(10)
    metrics = output / "node0" / "metrics.jsonl"

    def both() -> list[subprocess.Popen[str]]:
        first = launchers.start("nm_np", *common, PET_NNODES="2", PET_NODE_RANK="0")
        return [first, launchers.start("nm_np", *common, "--nnodes=2", "--node_rank=1")]

    machines = both()
    deadline = time.monotonic() + 180
    while not metrics.exists() or len(steps(output / "node0")) < 3:
        assert time.monotonic() < deadline and [machine.poll() for machine in machines] == [None, None]
        time.sleep(0.2)
    machines[1].send_signal(signal.SIGTERM)  # one of them is enough: both stop at the same step
    texts = [machine.communicate(timeout=120)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [128 + signal.SIGTERM] * 2, texts
    done = len(steps(output / "node0"))
    assert 3 <= done < 40
    machines = both()
    texts = [machine.communicate(timeout=300)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], texts
    for text in texts:
        assert "unfinished run" in text
    assert re.search(rf"resuming from .* at step {done}$", texts[0], re.MULTILINE), texts[0]
    assert steps(output / "node0") == list(range(1, 41)) and not launchers.moved_aside(10)
    report = json.loads((output / "node0" / "report.json").read_text())
    assert report["finished"] and report["world_size"] == 2
    assert "machine 1 of 2" in texts[1] and "--rdzv_conf=timeout=1800" in texts[1]  # 30 min, as ranks wait
    assert "PET_NNODES" in texts[0] and (output / "node1" / "train_10.log").exists()


def test_dry_run_prints_the_arithmetic_and_leaves_nothing(launchers: Launchers) -> None:
    done = launchers.real("1m_8p", "--dry_run", "--device_id=9")
    assert done.code == 0, done.text
    assert "x 8 ranks = 16 images " in done.text and not launchers.output(9).exists()


def test_too_few_open_files_are_refused_before_anything_starts(launchers: Launchers) -> None:
    script = launchers.root / "test" / "pretrain_full_1m_8p_sdxl.sh"
    words = [str(script), f"--dataset_name={launchers.pictures}", *TINY, "--nproc_per_node=2", "--device_id=9"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 24; exec bash "$@"', "bash", *words],
        env=launchers.env, cwd=launchers.root, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2 and "ulimit -n" in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr and not launchers.output(9).exists()
