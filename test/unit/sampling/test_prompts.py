"""Sample prompts: kohya's lines, TOML and JSON, what means nothing to SDXL, and every fault of a file at once."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from difftrain.contracts import ConfigFault
from difftrain.sampling import Prompt, parse_line, read_prompts, samplers
from difftrain.sampling.draw import drawn_size

KOHYA = json.loads((Path(__file__).parents[1] / "files" / "kohya_sample_prompts.json").read_text())


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def faults(path: Path, sampler: str = "ddim") -> list[str]:
    with pytest.raises(ConfigFault) as error:
        read_prompts(path, sampler)
    return [str(fault).replace(str(path), "FILE") for fault in error.value.faults]


@pytest.mark.parametrize("case", KOHYA, ids=lambda case: case["line"][:20])
def test_lines_are_parsed_as_kohya_parses_them(case: dict[str, Any]) -> None:
    entry = parse_line(case["line"])
    assert entry.fields == case["parsed"] and not entry.faults


def test_options_are_read_as_kohya_reads_them() -> None:
    assert parse_line("a --S 0 --W 96px --n  --L .5").fields == {
        "prompt": "a",
        "sample_steps": 1,
        "width": 96,
        "negative_prompt": "",
        "scale": 0.5,
    }
    assert parse_line("a --W 96px").notes[0].startswith("--w takes '96'; 'px' ")
    (note,) = parse_line("hill -- quality").notes
    assert note.startswith("'-- quality' is ")


@pytest.mark.flags("sample_prompts")
def test_a_text_file(tmp_path: Path) -> None:
    file = read_prompts(written(tmp_path, "p.txt", "# comment\n\n  a red star --d 5\nb --n low\n"))
    assert file.prompts == (Prompt("a red star", seed=5), Prompt("b", negative_prompt="low"))
    assert file.notes == ()


@pytest.mark.flags("sample_prompts")
def test_a_toml_file_inherits_its_defaults(tmp_path: Path) -> None:
    text = """
[prompt]
width = 640
seed = 7
scale = 5
negative_prompt = "blurry"

[[prompt.subset]]
prompt = "a red fox"
sample_steps = 12

[[prompt.subset]]
prompt = "a dog"
seed = 8
sample_sampler = "euler_a"
"""
    file = read_prompts(written(tmp_path, "p.toml", text))
    shared = {"width": 640, "scale": 5.0, "negative_prompt": "blurry"}
    assert file.prompts == (
        Prompt("a red fox", seed=7, sample_steps=12, **shared),
        Prompt("a dog", seed=8, sample_sampler="euler_a", **shared),
    )
    assert isinstance(file.prompts[0].scale, float)


@pytest.mark.flags("sample_prompts")
def test_a_json_file_takes_objects_and_lines(tmp_path: Path) -> None:
    data = [{"prompt": "a red fox", "height": 96, "scale": 3, "subset": []}, "a dog --d 4 --ss euler", {"seed": 1}]
    file = read_prompts(written(tmp_path, "p.JSON", json.dumps(data)))
    assert file.prompts == (
        Prompt("a red fox", height=96, scale=3.0),
        Prompt("a dog", seed=4, sample_sampler="euler"),
        Prompt(seed=1),
    )


def test_what_means_nothing_to_sdxl_is_said_once_and_draws_without_it(tmp_path: Path) -> None:
    lines = "a --g 3.5 --d 1\nb --g 3 --cn pose.png\nc --ctr 0.2 --rcfg 1 --fs 3\n"
    path = written(tmp_path, "p.txt", lines)
    file = read_prompts(path)
    assert file.prompts == (Prompt("a", seed=1), Prompt("b"), Prompt("c"))
    said = [note.replace(str(path), "FILE") for note in file.notes]
    assert [note.split(" has no ")[0] for note in said] == [
        "FILE, line 1 and 1 more: --g (guidance_scale)",
        "FILE, line 2: --cn (controlnet_image)",
        "FILE, line 3: --ctr (cfg_trunc_ratio)",
        "FILE, line 3: --rcfg (renorm_cfg)",
        "FILE, line 3: --fs (flow_shift)",
    ]
    toml = written(tmp_path, "p.toml", '[prompt]\nflow_shift = 3.0\n[[prompt.subset]]\nprompt = "a"\n')
    assert "--fs (flow_shift) has no " in read_prompts(toml).notes[0]


def test_sizes_are_rounded_as_kohya_rounds_them_and_it_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, "p.txt", "a --w 515 --h 96\nb --w 512\n")
    file = read_prompts(path)
    (note,) = file.notes
    assert note.startswith(f"{path}, line 1: 515 x 96 px ") and re.search(r" 512 x 96: .* 8$", note)
    model: Any = SimpleNamespace(native_size=(512, 512), unit=8)
    assert drawn_size(model, file.prompts[0]) == (96, 512)


def test_every_wrong_line_is_named_at_once(tmp_path: Path) -> None:
    lines = "a --w x --s 3 --l 1.2.3\nfine\nb --ss no --h 0\nc --d -1 --w 99999\n"
    found = faults(written(tmp_path, "p.txt", lines), sampler="none")
    for place, (where, what) in enumerate(
        [
            ("FILE, line 1", "--w .* take 'x'"),
            ("FILE, line 1", "--l .* take '1.2.3'"),
            ("FILE, line 3", "--ss: .*'no'.* ddim, pndm"),
            ("FILE, line 3", "--h: .* 1 to 16384, got 0"),
            ("FILE, line 4", "--d .* take '-1'"),
            ("FILE, line 4", "--w: .* 1 to 16384, got 99999"),
            ("sample.sampler", ".*'none'"),
        ]
    ):
        assert re.match(f"{where}: {what}", found[place])
    assert len(found) == 7


def test_every_fault_of_a_toml_file(tmp_path: Path) -> None:
    text = """
stray = 1
[prompt]
seed = "7"
heigth = 96
[[prompt.subset]]
prompt = 3
width = 512.0
[[prompt.subset]]
sample_steps = 2000
scale = true
sample_sampler = "eulr"
"""
    found = faults(written(tmp_path, "p.toml", text))
    for what, pattern in zip(
        found,
        [
            r"FILE stray: .*\(known is \[prompt\]\)",
            r"FILE \[prompt\]: seed: .*whole number, got '7'",
            r"FILE \[prompt\]: .* 'heigth' \(.* mean height\?\)",
            r"FILE \[\[prompt\.subset\]\] 1: prompt: .* text, got 3",
            r"FILE \[\[prompt\.subset\]\] 1: width: .*whole number, got 512\.0",
            r"FILE \[\[prompt\.subset\]\] 2: sample_steps: .* 1 to 1000, got 2000",
            r"FILE \[\[prompt\.subset\]\] 2: scale: .* a number, got True",
        ],
    ):
        assert re.fullmatch(pattern, what)
    assert "'eulr'" in found[7] and len(found) == 8


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", "# nothing\n\n", r"FILE holds no .*\(.*line"),
        ("p.toml", '[prompt]\nprompt = "a"\n', r"FILE holds no .*\(.*\[\[prompt\.subset\]\]"),
        ("p.toml", "[[prompt]]\n", "FILE prompt: .* table, .* list"),
        ("p.toml", "[prompt]\nsubset = 3\n", "FILE prompt.subset: .* tables"),
        ("p.toml", "prompt = \n", "FILE: .* TOML"),
        ("p.json", "[]", r"FILE holds no .*\(.* list .*objects"),
        ("p.json", "{}", "FILE: .* list, .* object"),
        ("p.json", "[3, null]", "FILE, entry 1: .* object .*text, got 3"),
        ("p.json", "[{]", "FILE: .* JSON"),
        ("p.json", f'[{{"width": {"9" * 5000}}}]', "FILE: .* JSON"),
        ("p.json", '[{"seed": -1, "scale": NaN}]', r"FILE, entry 1: seed: .* 0 to \d+, got -1"),
        ("p.yaml", "- a\n", r"FILE is not .*\(.*\.txt, \.toml or \.json file\)"),
    ],
)
def test_files_without_a_prompt_say_what_to_write(tmp_path: Path, name: str, text: str, message: str) -> None:
    assert re.search(message, faults(written(tmp_path, name, text))[0])


@pytest.mark.parametrize(
    ("name", "text"),
    [("p.txt", "a"), ("p.json", '["a"]'), ("p.toml", '[[prompt.subset]]\nprompt = "a"')],
)
def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path, name: str, text: str) -> None:
    assert read_prompts(written(tmp_path, name, f"\ufeff{text}\n")).prompts == (Prompt("a"),)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    assert "utf-8" in faults(tmp_path / "latin.txt")[0]
    assert os.strerror(errno.ENOENT) in faults(tmp_path / "absent.toml")[0]


def test_a_sampler_whose_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers.importlib.util, "find_spec", lambda package: None)
    assert "package scipy" in faults(written(tmp_path, "p.txt", "a\n"), sampler="lms")[0]


def test_what_kohyas_scripts_pass_over_is_said_where_his_flags_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, "p.txt", "a cat --d -1 --s abc --w 64\na dog --ss DPM++ 2M Karras --l 1.2.3\n")
    assert len(faults(path)) == 4
    file = read_prompts(path, "euler_a", passes_over=True)
    assert file.prompts == (Prompt("a cat", width=64), Prompt("a dog", sample_sampler="ddim"))
    for line, facts in ((1, ("--d", "-1")), (1, ("--s", "abc")), (2, ("--ss", "ddim")), (2, ("--l", "1.2.3"))):
        assert any(f"line {line}" in note and all(fact in note for fact in facts) for note in file.notes), facts
