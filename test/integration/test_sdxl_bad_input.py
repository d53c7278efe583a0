"""Bad input at the door: a clear message, the right exit code, and nothing lost."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from doors import Door, losses, metrics, wait_for, write_pictures
from PIL import Image
from safetensors.torch import load_file, save_file


def small_pictures(folder: Path, count: int = 4) -> Path:
    return write_pictures(folder, count)


def rejected(out: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert all(line.keys() == {"path", "reason"} for line in lines)
    return {line["path"]: line["reason"] for line in lines}


def test_bad_pictures_and_captions_are_named_and_the_rest_is_trained(door: Door, tmp_path: Path) -> None:
    data = small_pictures(tmp_path / "data", 12)
    good = (data / "000.png").read_bytes()

    def add(name: str, content: bytes, caption: bytes | None = b"a caption") -> None:
        (data / name).write_bytes(content)
        if caption is not None:
            (data / name).with_suffix(".txt").write_bytes(caption)

    add("truncated.png", good[: len(good) // 2])
    add("empty.jpg", b"")
    add("text.jpg", b"this is no picture")
    add("no_caption.png", good, None)
    add("not_utf8.png", good, b"caf\xe9")
    add("empty_caption.png", good, b"  \n")
    add("long_caption.png", good, b"word, " * 1700)
    for name, size in (("sliver.png", (1, 10_000)), ("bomb.png", (20_000, 20_000))):
        buffer = io.BytesIO()
        Image.new("1", size).save(buffer, "PNG")
        add(name, buffer.getvalue())
    output = door.run(door.flags(tmp_path / "out", f"--train_data_dir={data}", steps=2))
    found = rejected(tmp_path / "out")
    bad = {"truncated.png", "empty.jpg", "text.jpg", "not_utf8.png", "sliver.png", "bomb.png"}
    assert {Path(path).name for path in found} == bad
    assert all(found.values())
    assert "6 rejected" in output
    assert json.loads((tmp_path / "out" / "report.json").read_text())["rejected"]["count"] == 6
    # as in kohya's scripts, but not in silence
    assert "index: 2 images" in output and "no_caption.png" in output and "empty_caption.png" in output
    assert len(metrics(tmp_path / "out")) == 2


def test_too_much_rejected_stops_with_2(door: Door, tmp_path: Path) -> None:
    data = small_pictures(tmp_path / "data", 2)
    for i in range(3):
        (data / f"bad{i}.png").write_bytes(b"")
    output = door.run(door.flags(tmp_path / "out", f"--train_data_dir={data}"), expect=2)
    assert "max_rejected_share" in output and "bad0.png" in output
    named = [json.loads(line)["path"] for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert len(named) == 3 and all("bad" in path for path in named)
    door.run(door.flags(tmp_path / "out", f"--train_data_dir={data}", "--max_rejected_share=0.7", steps=1))


def test_tars_cut_in_the_middle_and_with_strange_members(door: Door, tmp_path: Path) -> None:
    pictures = small_pictures(tmp_path / "pictures", 6)
    data = tmp_path / "tars"
    data.mkdir()
    with tarfile.open(data / "00000.tar", "w") as tar:
        for i in range(6):
            tar.add(pictures / f"{i:03d}.png", f"{i:05d}.png")
            if i != 3:
                tar.add(pictures / f"{i:03d}.txt", f"{i:05d}.txt")
        tar.add(pictures / "000.png", "../outside.png")
        tar.add(pictures / "000.txt", "../outside.txt")
        info = tarfile.TarInfo("lonely.json")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"{}"))
    whole = (data / "00000.tar").read_bytes()
    with tarfile.open(data / "00001.tar", "w") as tar:
        for i in range(4):
            tar.add(pictures / f"{i:03d}.txt", f"1{i:04d}.txt")
            tar.add(pictures / f"{i:03d}.png", f"1{i:04d}.png")
        end = tar.offset
    cut = (data / "00001.tar").read_bytes()[: end - 700]
    (data / "00001.tar").write_bytes(cut)
    out = tmp_path / "out"
    door.run(door.flags(out, f"--train_data_dir={data}", steps=2))
    found = rejected(out)
    reasons = " ".join(f"{path}: {reason}" for path, reason in found.items())
    assert "outside.png" in reasons and "lonely" in reasons and "00001.tar" in reasons
    assert json.loads((out / "report.json").read_text())["dataset"]["count"] == 6 + 3  # that without a caption too
    assert (data / "00000.tar").read_bytes() == whole and not (tmp_path / "outside.png").exists()


def test_parquet_without_the_column(door: Door, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(pa.table({"url": ["x"], "text": ["y"]}), data / "a.parquet")
    output = door.run(door.flags(tmp_path / "out", f"--train_data_dir={data}"), expect=2)
    assert "url" in output and "image" in output


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_no_data(kind: str, door: Door, tmp_path: Path) -> None:
    data = tmp_path / "data"
    if kind == "empty":
        data.mkdir()
    output = door.run(door.flags(tmp_path / "out", f"--train_data_dir={data}"), expect=2)
    assert str(data) in output and "Traceback" not in output


def test_all_faults_of_a_command_line_at_once(door: Door, tmp_path: Path) -> None:
    flags = door.flags(
        tmp_path / "out",
        "--train_batch_size=0",
        "--learning_rate=fast",
        "--mixed_precision=fp8",
        "--grad_accumulation=2",
        "--v2",
        "--min_bucket_reso=256",
    )
    output = door.run([*flags, "--pretrained_model_name_or_path=somewhere"], expect=2)
    for word in (
        "--train_batch_size",
        "--learning_rate",
        "--mixed_precision",
        "--gradient_accumulation_steps",  # the nearest name
        "--v2",
        "--min_bucket_reso",
        "--pretrained_model_name_or_path",
    ):
        assert word in output, word
    assert not (tmp_path / "out").exists()


def test_weights_of_the_wrong_model_and_with_missing_keys(straight: Path, door: Door, tmp_path: Path) -> None:
    def flags(path: Path) -> list[str]:
        kept = [flag for flag in door.flags(tmp_path / "out", steps=1) if not flag.startswith("--init_from_config")]
        return [*kept, f"--pretrained_model_name_or_path={path}"]

    state = load_file(straight / "NAME.safetensors")
    from safetensors import safe_open

    with safe_open(straight / "NAME.safetensors", "pt") as file:
        header = file.metadata()
    lost = sorted(state)[5]
    save_file({key: value for key, value in state.items() if key != lost}, tmp_path / "lost.safetensors", header)
    assert lost in door.run(flags(tmp_path / "lost.safetensors"), expect=2)
    save_file({"lora_unet_x.lora_down.weight": torch.zeros(2, 2)}, tmp_path / "lora.safetensors")
    assert "LoRA" in door.run(flags(tmp_path / "lora.safetensors"), expect=2)
    (tmp_path / "broken.safetensors").write_bytes((straight / "NAME.safetensors").read_bytes()[:1000])
    assert "broken.safetensors" in door.run(flags(tmp_path / "broken.safetensors"), expect=2)
    assert not (tmp_path / "out" / "NAME.safetensors").exists()


def test_an_output_folder_that_cannot_be_written(door: Door, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    output = door.run(door.flags(tmp_path / "file" / "out"), expect=2)
    assert "--output_dir" in output and "Traceback" not in output


def test_a_full_disk_loses_nothing(straight: Path, door: Door, tmp_path: Path) -> None:
    """The size limit of a file stands for the full disk: checkpoints and exports do not fit, small files do."""
    out = tmp_path / "out"
    flags = door.flags(out, "--resume=auto")
    process = door.start(flags)
    wait_for(lambda: (out / "NAME-step00000004-state").exists())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    before = {path.name for path in out.glob("*-state")}
    words = " ".join(f"'{word}'" for word in door.command(flags))
    limited = door.shell(f"ulimit -f 600; exec {words}", expect=1)
    assert "untouched" in limited and "Traceback" not in limited, limited
    assert {path.name for path in out.glob("*-state")} == before
    assert not list(out.glob("tmp-*"))
    door.run(flags)
    assert losses(out) == losses(straight)
    left, right = load_file(out / "NAME.safetensors"), load_file(straight / "NAME.safetensors")
    assert all(torch.equal(left[key], right[key]) for key in right)


def test_help_and_a_fault_answer_without_torch(door: Door, tmp_path: Path) -> None:
    code = "import sys, runpy; sys.argv = sys.argv[1:]\ntry: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "except SystemExit as end: print('torch' in sys.modules, end.code)"
    for words, expected in ((["--help"], "False 0"), (["--no_such_flag"], "False 2")):
        output = door.run_cold([sys.executable, "-c", code, str(door.path), *words])
        assert output.strip().splitlines()[-1] == expected


def test_weights_that_an_optimizer_broke_are_named_and_no_success(door: Door, tmp_path: Path) -> None:
    """In fp16 the eps of this optimizer is 0, and it divides by it."""
    line = ["--full_fp16", "--mixed_precision=fp16", "--optimizer_type=AdamWScheduleFree", "--learning_rate=1e-3"]
    output = door.run(door.flags(tmp_path / "out", *line, "--save_every_n_steps=9", steps=3), expect=1)
    assert re.search(r"\d+ tensors of .* non-finite values, such as \w", output) and "Traceback" not in output
