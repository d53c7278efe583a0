"""The launchers, unmodified, on simulated devices: one card, several; kills, and too few cards."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from doors import write_pictures
from launched import TINY, Launched, Launchers, checkout
from PIL import Image


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Launchers:
    root = checkout(tmp_path_factory.mktemp("checkout"))
    return Launchers(root, tmp_path_factory.mktemp("cache"), write_pictures(tmp_path_factory.mktemp("pictures")))


def report(output: Path) -> dict[str, Any]:
    return json.loads((output / "report.json").read_text())


def steps(output: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def shown(done: Launched, found: dict[str, Any], ranks: int, precision: str) -> None:
    """Check what every finished run on NPUs shows."""
    assert done.code == 0, done.text
    assert re.search(r"^Final Performance images/sec : [0-9.]+$", done.text, re.MULTILINE)
    assert re.search(r"^Final Train Loss : [0-9.]+$", done.text, re.MULTILINE)
    assert (found["device"]["kind"], found["world_size"], found["precision"]) == ("npu", ranks, precision)
    assert found["finished"] and found["fps"] > 0 and 0.5 < found["final_loss"] < 2 and found["skipped_steps"] == 0
    assert found["kernels"]["attention"]["sdpa"] == 0 and found["kernels"]["attention"]["fused"] > 0


@pytest.mark.nightly  # several cards run below; a kill of one process on CPUs: test/launchers/test_real_job.py
def test_one_card_in_fp16_is_killed_and_goes_on(launchers: Launchers, tmp_path: Path) -> None:
    """The recipe as it is on the card that was named; the same command again draws the pictures and is whole."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle --w 64 --h 64 --s 2 --d 1\n")
    flags = (f"--dataset_name={launchers.pictures}", *TINY, "--max_train_steps=14", "--device_id=1",
             "--save_every_n_steps=4", f"--sample_prompts={prompts}", "--sample_every_n_steps=14")  # fmt: skip
    output = launchers.output(1)
    process = launchers.start("1m_1p", *flags, SIMULATED_NPU_DEVICES="2")
    deadline = time.monotonic() + 120
    while not (list(output.glob("*-state/manifest.json")) and len(steps(output)) > 4):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    again = launchers.run("1m_1p", *flags, SIMULATED_NPU_DEVICES="2")
    shown(again, report(output), 1, "fp16")
    assert "device: npu:1 (" in again.text and "1 process on npu (2 found)" in again.text
    assert "unfinished run" in again.text
    (resumed,) = re.findall(r"resuming from .* at step (\d+)$", again.text, re.MULTILINE)
    assert int(resumed) >= 4 and steps(output) == list(range(1, 15))
    log = (output / "train_1.log").read_text()
    assert re.search(r"\bstep=14 epoch=\d step_loss=[0-9.]+ .* FPS: [0-9.]+$", log, re.MULTILINE)
    assert Image.open(next((output / "sample").glob("*.png"))).size[0] >= 64
    assert (output / "last.safetensors").exists() and not launchers.moved_aside(1)


@pytest.mark.parametrize("cards", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_several_cards_in_fp16(launchers: Launchers, cards: int) -> None:
    done = launchers.real("1m_8p", f"--nproc_per_node={cards}", "--max_train_steps=2", "--batch_size=1", "--device_id=3",
                          SIMULATED_NPU_DEVICES=str(cards))  # fmt: skip
    shown(done, report(launchers.output(3)), cards, "fp16")
    assert f"{cards} processes on npu ({cards} found)" in done.text
    assert report(launchers.output(3))["global_batch"] == cards


@pytest.mark.nightly  # two launchers on CPUs: test/launchers
def test_two_machines_of_one_card_each(launchers: Launchers) -> None:
    """Two launchers on the loopback; each sees another card, as ASCEND_RT_VISIBLE_DEVICES says."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = (f"--dataset_name={launchers.pictures}", *TINY, "--max_train_steps=2", "--nnodes=2",
             "--master_ip=127.0.0.1", f"--master_port={port}", "--mixed_precision=bf16")  # fmt: skip
    machines = [
        launchers.start(
            "nm_np", *flags, f"--node_rank={rank}", SIMULATED_NPU_DEVICES="2", ASCEND_RT_VISIBLE_DEVICES=str(rank)
        )
        for rank in (0, 1)
    ]
    texts = [machine.communicate(timeout=200)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], texts
    shown(Launched(0, texts[0], 0.0), report(launchers.output() / "node0"), 2, "bf16")
    assert "machine 1 of 2, 1 process on npu (1 found)" in texts[1]


def test_fewer_cards_than_asked_for(launchers: Launchers) -> None:
    done = launchers.real("1m_8p", "--device_id=5", SIMULATED_NPU_DEVICES="4")
    assert done.code == 2 and re.search(r"8 npu .*4 found \(--nproc_per_node=4\)", done.text)
    other = launchers.real("1m_1p", "--device_id=7", SIMULATED_NPU_DEVICES="4", ASCEND_RT_VISIBLE_DEVICES="0,3")
    assert other.code == 2
    assert re.search(r"--device_id: 7 .*0, 3 .*ASCEND_RT_VISIBLE_DEVICES=0,3", other.text)
    assert not launchers.output(5).exists() and not launchers.output(7).exists()
