"""What train.py says of its keys: --help, docs/train_toml.md, the schema for editors."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from difftrain.cli import main
from difftrain.config.render.docs import keys_page
from difftrain.config.render.help import key_help
from difftrain.config.render.keys import WRITTEN, every_table, lines
from difftrain.config.schema.validate import fields
from difftrain.config.spellings.keys import KEYS, OPTIONS

ROOT = Path(__file__).parents[3]
DOORS = ("train.py", "sd3_light_pretrain.py")


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "train_toml.md").read_text(encoding="utf-8")
    assert page == keys_page(), "python -m difftrain.config.render.docs keys > docs/train_toml.md"


def test_page_and_help_name_every_option_key_and_field() -> None:
    page, text = keys_page(), key_help("train.py")
    for name in OPTIONS:
        assert f"`--{name}" in page and f"--{name}" in text
    for key in KEYS:
        assert key.secret or key.home == "adapter" or key.name in page
    told = {line.field for table in every_table() for line in lines(table)} - {""}
    by_meaning = {key.name for key in KEYS if key.to.startswith("?")}
    assert not {path for path in set(fields()) - told - WRITTEN if path.partition(".")[2] not in by_meaning}
    assert all(line.help for table in every_table() for line in lines(table))


@pytest.mark.parametrize("door", DOORS)
def test_help_needs_no_torch(door: str) -> None:
    code = f"import sys; sys.argv = ['{door}', '--help']; import runpy\n"
    code += (
        "try: runpy.run_path('sd_scripts_xl/"
        + door
        + "', run_name='__main__')\nexcept SystemExit as end: assert end.code == 0\n"
    )
    code += "assert 'torch' not in sys.modules and 'pydantic' in sys.modules"
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {door} --config FILE.toml")
    assert time.monotonic() - before < 10.0


def test_the_schema_of_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--train"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["additionalProperties"] is False
    for name in ("train_example_1.toml", "train_example_flat.toml"):
        told = tomllib.loads((Path(__file__).parents[1] / "files" / name).read_text())
        for table, value in told.items():
            assert table in schema["properties"]
            inner = schema["properties"][table].get("properties") if isinstance(value, dict) else None
            assert inner is None or table == "optimizer" or value.keys() <= inner.keys()
    assert schema["properties"]["save"]["properties"]["upload_hf_from_epoch"]["deprecated"]
