"""The difftrain command: quick where it can be, every fault at once, and exports that replace nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from refusals import is_about, names
from safetensors import safe_open
from safetensors.torch import load_file

from difftrain.cli import COMMANDS, export, main
from difftrain.cli.words import writing
from difftrain.config.schema.sections import TrainConfig
from difftrain.config.spellings.spelling import field_meaning

LIBRARY = Path(__file__).parents[3] / "library"


def said(capsys: pytest.CaptureFixture[str]) -> str:
    read = capsys.readouterr()
    return read.out + read.err


def test_without_a_command_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and main(["--help"]) == 0
    text = said(capsys)
    assert all(name in text for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip().count(".") == 2


@pytest.mark.parametrize(
    "words", [[name] for name in COMMANDS] + [["dataset", "inspect"], ["cache", "build"], ["cache", "info"]]
)
@pytest.mark.parametrize("asks", ["--help", "-h"])
def test_every_command_has_help(words: list[str], asks: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, asks]) == 0
    assert f"usage: difftrain {words[0]}" in capsys.readouterr().out


def test_a_misspelt_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exprot"]) == 2
    assert names(said(capsys), "exprot", "export")


def test_the_schema_is_that_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "sections"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$defs"].keys() == TrainConfig.model_json_schema()["$defs"].keys()
    captions = schema["$defs"]["CaptionSection"]["properties"]
    assert captions["token_warmup_min"] == {
        "default": 1, "minimum": 0, "title": "Token Warmup Min", "type": "integer",
        "description": field_meaning("captions.token_warmup_min", "train").replace("--captions", "captions"),
    }  # fmt: skip
    loss = schema["$defs"]["LossSection"]["properties"]
    assert "data.alpha_mask = true" in loss["masked"]["description"]
    assert main(["schema", "run", "x", "--y"]) == 2
    assert "'x'" in (text := said(capsys)) and "'--y'" in text


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["schema"],
        ["export", "--help"],
        ["export", "--sed=1"],
        ["convert", "--rank=0"],
        ["report"],
        ["doctor", "--help"],
        ["compare", "--help"],
        ["compare", "nowhere", "."],
        ["cache", "build", "--help"],
        ["cache", "build", "--sed=1"],
        ["cache", "export", "--help"],
        ["cache", "verify", "nowhere"],
        ["cache", "gc", "."],
    ],
)
def test_quick_commands_import_no_torch(words: list[str], tmp_path: Path) -> None:
    probe = "import sys, atexit; from difftrain.cli import main; atexit.register(lambda: print('TORCH', 'torch' in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{probe}\nsys.exit(main(sys.argv[1:]))", *words],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(LIBRARY)},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "TORCH False", done.stdout + done.stderr


def test_report_of_a_folder_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert str(tmp_path) in said(capsys)


def test_report_builds_the_page_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from reports import config, facts

    from difftrain.report.report import make_report, write_report

    write_report(tmp_path, make_report(config(), facts(tmp_path)))
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert "<html" in (tmp_path / "report.html").read_text()


def test_export_writes_what_the_layout_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "export",
        "--family=sdxl",
        "--init_from_config=tiny",
        "--save_model_as=safetensors",
        "--save_precision=fp16",
    ]
    for output in ("a", "b.safetensors"):
        assert main([*line, f"--output={tmp_path / output}"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        names = set(file.keys())
        assert "model.diffusion_model.input_blocks.0.0.weight" in names
        assert {file.get_slice(name).get_dtype() for name in names} <= {"F16", "I64"}
        assert file.metadata()["modelspec.title"] == "a"


def test_export_depends_on_the_seed_alone(tmp_path: Path) -> None:
    line = ["export", "--init_from_config=tiny", "--save_precision=fp16"]
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert main([*line, f"--seed={seed}", f"--output={tmp_path / name}"]) == 0
    a, b, c = (load_file(tmp_path / f"{name}.safetensors") for name in "abc")
    assert all(a[name].equal(b[name]) for name in a)
    assert not all(a[name].equal(c[name]) for name in a)


def test_export_converts(tmp_path: Path) -> None:
    assert main(["export", "--init_from_config=tiny", f"--output={tmp_path / 'one'}"]) == 0
    source = f"--pretrained_model_name_or_path={tmp_path / 'one.safetensors'}"
    assert main(["export", source, "--save_model_as=diffusers_safetensors", f"--output={tmp_path / 'two'}"]) == 0
    source = f"--pretrained_model_name_or_path={tmp_path / 'two'}"
    assert main(["export", source, "--save_model_as=safetensors", f"--output={tmp_path / 'three'}"]) == 0
    with safe_open(tmp_path / "one.safetensors", "pt") as one, safe_open(tmp_path / "three.safetensors", "pt") as three:
        assert set(one.keys()) == set(three.keys())
        for name in one.keys():  # noqa: SIM118 - the file is no mapping
            assert one.get_tensor(name).equal(three.get_tensor(name)), name


def test_all_faults_of_an_export_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--famly=sdxl", "--save_precision=fp17", "--train_batch_size=2", "--vae=nowhere", "--family=sd9"]
    assert main(["export", *line]) == 2
    text = said(capsys)
    for flag in (
        "--output",
        "--famly",
        "--save_precision",
        "--train_batch_size",
        "--vae",
        "--family",
        "--pretrained_model",
    ):
        assert flag in text
    assert "7 faults" in text


@pytest.mark.parametrize(
    ("layout", "name", "says"),
    [
        ("safetensors", "file", ""),  # file.safetensors is another name
        ("safetensors", "folder.safetensors", "folder"),
        ("ckpt", "x.safetensors", "ckpt"),
        ("diffusers", "folder", "diffusers"),
        ("diffusers", "file", "diffusers"),
        ("diffusers", "model", ""),
        ("diffusers", "empty", ""),
        ("diffusers_safetensors", "new", ""),
    ],
)
def test_export_replaces_nothing_that_is_no_export(tmp_path: Path, layout: str, name: str, says: str) -> None:
    for folder in ("folder", "folder.safetensors", "model", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("too")
    (tmp_path / "model" / "model_index.json").write_text("{}")
    line = ["--init_from_config=tiny", f"--save_model_as={layout}", f"--output={tmp_path / name}"]
    if not says:
        assert export.read(line).bare["output"] == str(tmp_path / name)
        return
    with pytest.raises(export.ConfigFault) as caught:
        export.read(line)
    (fault,) = caught.value.faults
    assert is_about(fault, "--output", tmp_path / name, says)


@pytest.mark.parametrize("command", ["export", "inspect"])
def test_an_output_that_cannot_be_written_is_a_sentence(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "data" / "a.png")
    (tmp_path / "data" / "a.txt").write_text("a")
    (tmp_path / "file").write_text("no folder")
    lines = {
        "export": ["export", "--init_from_config=tiny"],
        "inspect": ["dataset", "inspect", f"--train_data_dir={tmp_path / 'data'}", "--resolution=64,64"],
    }
    assert main([*lines[command], f"--output={tmp_path / 'file' / 'x'}"]) == 1
    text = said(capsys)
    assert names(text, tmp_path / "file", "file") and "Traceback" not in text


def test_errors_elsewhere_are_none_of_the_outputs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), writing(tmp_path / "x"):
        (tmp_path / "other" / "folder").read_bytes()


def test_a_folder_that_is_no_runs_is_the_only_fault(tmp_path: Path) -> None:
    with pytest.raises(export.ConfigFault, match=rf"{re.escape(str(tmp_path))}\b.*config\.toml") as caught:
        export.read(["--ema_width=0.1", str(tmp_path), f"--output={tmp_path / 'x'}"])
    assert len(caught.value.faults) == 1


def test_the_layouts_are_the_familys() -> None:
    from difftrain.config.schema.validate import choices_of
    from difftrain.models.export import SUFFIXES

    assert SUFFIXES == export.SUFFIXES
    assert set(choices_of("save.model_as")) == set(SUFFIXES)
