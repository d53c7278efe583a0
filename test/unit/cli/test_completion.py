"""completion: bash itself completes with the script, and the script knows every command and flag."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from difftrain.cli import COMMANDS, completion, main, recipes
from difftrain.config.spellings.flags import FLAGS
from difftrain.models.registry import FAMILIES

ASK = """
ask() { COMP_LINE="difftrain $1"; COMP_POINT=${#COMP_LINE}; COMPREPLY=(); _difftrain; printf '%s\\n' "== $1" "${COMPREPLY[@]}"; }
"""
OFFERED = {f"--{flag.name}" for flag in FLAGS.values() if flag.status in ("offered", "nearest")}


@pytest.fixture(scope="module")
def script() -> str:
    return completion.script("bash")


def ask(script: str, lines: list[str], folder: Path, before: str = "COMP_WORDBREAKS=' ='") -> dict[str, list[str]]:
    """Return what bash would offer at the end of each line."""
    code = "\n".join([script, ASK, before, *(f"ask '{line}'" for line in lines)])
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=folder, check=True)
    assert not done.stderr
    parts = re.split(r"^== (.*)\n", done.stdout, flags=re.MULTILINE)[1:]
    return {line: sorted(reply.split()) for line, reply in zip(parts[::2], parts[1::2])}


def test_what_bash_offers(script: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text("")
    (tmp_path / "runs").mkdir()
    expected = {
        "": sorted(COMMANDS),
        "com": ["compare", "completion"],
        "nothing": [],
        "--": ["--help", "--version"],
        "recipes copy ": sorted(recipes.shipped()),
        "recipes copy sd3_light/ti": ["sd3_light/tiny"],
        "recipes copy sdxl/tiny --": ["--overwrite", "--schema"],
        "train --conf": ["--config="],
        "train --config=t": ["tiny.toml"],
        "train --config ": ["runs", "tiny.toml"],
        "train --config tiny.toml --model.typ": ["--model.type="],
        "train --model.type=": sorted(FAMILIES),
        "sd3_light --model.type f": [name for name in FAMILIES if name.startswith("f")],
        "sdxl --": sorted(f"--{row.name}{'' if row.kind == 'switch' else '='}" for row in FLAGS.values()
                                    if f"--{row.name}" in OFFERED),
        "sdxl --mixed_precision=b": ["bf16"],
        "sdxl --mixed_precision ": ["bf16", "fp16", "no"],
        "sdxl --save_state --save_every_n_s": ["--save_every_n_steps="],
        "sdxl --train_batch_size=": [],
        "text_to_image --dataset_na": ["--dataset_name="],
        "cache exp": ["export"],
        "cache export --format=": ["safetensors", "webdataset"],
        "cache build --cache_di": ["--cache_dir="],
        "report ru": ["runs"],
        "doctor --qu": ["--quick"],
        "completion z": ["zsh"],
    }  # fmt: skip
    assert ask(script, list(expected), tmp_path) == expected


def test_where_bash_does_not_cut_words_at_the_equals_sign(script: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text("")
    lines = ["train --config=t", "sdxl --mixed_precision=b"]
    replies = ask(script, lines, tmp_path, "COMP_WORDBREAKS=' '")
    assert list(replies.values()) == [["--config=tiny.toml"], ["--mixed_precision=bf16"]]


def test_every_flag_that_a_help_names_is_completed() -> None:
    topics = completion.flags_of_topics()
    for topic, flag in (("generate", "--weights"), ("init", "--size"), ("export", "--save_precision"), ("families", "--json"),
                        ("schema", "--list"), ("compare", "--html"), ("cache gc", "--unused_days")):  # fmt: skip
        assert flag in topics[topic], topic
    assert not [topic for topic, flags in topics.items() if "--flag" in flags]


@pytest.mark.parametrize(
    ("form", "what"),
    [("N", "@number"), ("N|X%", "@number"), ("TEXT", "@files"), ("FILE", "@files"), ("fp16|bf16", "fp16 bf16"),
     ("true|false", "true false"), ("AdamW8bit|TEXT", "AdamW8bit"), ("[N, N]", "@files")],
)  # fmt: skip
def test_what_a_flag_takes(form: str, what: str) -> None:
    assert completion.takes(form) == what


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh here")
def test_zsh_reads_its_script() -> None:
    done = subprocess.run(["zsh", "-n"], input=completion.script("zsh"), capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr


@pytest.mark.parametrize("words", [[], ["fish"], ["bash", "sh"], ["--bash"]])
def test_what_is_no_shell(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *words]) == 2
    assert "completion:" in capsys.readouterr().err
